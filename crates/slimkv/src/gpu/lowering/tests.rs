use std::collections::BTreeMap;

use super::{Cuda90, Msl, gpu, nvrtc, runtime::Target, texts};
use crate::attend::{self, Options, Segment, Span};
use crate::format::{Axis, RowCopy, RowFormat, RowShape, affine, bits};
use crate::gpu::{COMMON, warm};
use crate::{DType, Device, Tensor};

const TOKENS: usize = 40;

/// Runs every kernel of the library, in the variants that take different paths.
fn run_everything(device: &Device) {
    warm(device, &COMMON[..1]).unwrap();
    warm(device, &COMMON[4..5]).unwrap();
    for head_dim in [5, 80, 256] {
        for bits in [1, 3, 8] {
            attend_and_write(device, head_dim, bits, DType::F16, DType::F32);
        }
        attend_and_write(device, head_dim, 4, DType::BF16, DType::F16);
    }
    attend_and_write(device, 64, 4, DType::F32, DType::BF16);
    let x = Tensor::zeros(DType::F16, &[2, TOKENS, 64], device).unwrap();
    let out = Tensor::zeros(DType::F16, &[2, TOKENS], device).unwrap();
    let lse = Tensor::zeros(DType::F32, &[2], device).unwrap();
    attend::merge::merge("test", &out, &lse, &out, &lse).unwrap();
    for axis in [Axis::Tokens, Axis::Channels] {
        for packed in [true, false] {
            let (codes, scale, zero) = affine::quantize("test", &x, axis, 32, 4, 1e-8, packed, DType::F32).unwrap();
            affine::dequantize("test", &codes, &scale, &zero, axis, 32, 4, 64).unwrap();
        }
        affine::round_trip("test", &x, axis, 32, 15, 1e-8).unwrap();
    }
    decode_to_halves(device);
    let codes = Tensor::zeros(DType::U8, &[3, 50], device).unwrap();
    let packed = bits::pack("test", &codes, 3).unwrap();
    bits::unpack("test", &packed, 3, 50).unwrap();
    device.synchronize().unwrap();
}

fn attend_and_write(device: &Device, head_dim: usize, bits: u32, dtype: DType, params: DType) {
    let params = if params == DType::BF16 { DType::F16 } else { params };
    let shape = RowShape { batch: 1, heads: 1, capacity: TOKENS, head_dim };
    let format = |axis| RowFormat::Affine { bits, group: 32, axis, params };
    let plain = RowFormat::Plain(dtype).allocate(shape, device).unwrap();
    let all = [RowCopy { from: 0, to: 0, rows: TOKENS }];
    for (k, v) in [(Axis::Tokens, Axis::Channels), (Axis::Channels, Axis::Tokens)] {
        let mut keys = format(k).allocate(shape, device).unwrap();
        let mut values = format(v).allocate(shape, device).unwrap();
        keys.write("test", &plain, &all).unwrap();
        values.write("test", &plain, &all).unwrap();
        let mut back = RowFormat::Plain(dtype).allocate(shape, device).unwrap();
        back.write("test", &keys, &all).unwrap();
        let q = Tensor::zeros(dtype, &[1, 4, 1, head_dim], device).unwrap();
        let spans = vec![Span { len: TOKENS, q_offset: TOKENS as i64 - 1 }];
        let options = Options { scale: 1.0, causal: true, window: 8, out_dtype: dtype };
        let mixed = Segment { keys: keys.clone(), values: plain.clone(), spans: spans.clone() };
        attend::attend("test", &q, &[Segment { keys, values, spans }, mixed], options).unwrap();
    }
}

/// What takes the tensor-core kernel where there is one.
fn decode_to_halves(device: &Device) {
    let keys = |bits| RowFormat::Affine { bits, group: 32, axis: Axis::Tokens, params: DType::F16 };
    let values = |bits| RowFormat::Affine { bits, group: 32, axis: Axis::Channels, params: DType::F16 };
    let plain = RowFormat::Plain;
    for (k, v, head_dim, rows, dtype) in [
        (plain(DType::F16), plain(DType::F16), 80, 1, DType::F16),
        (plain(DType::BF16), plain(DType::BF16), 128, 4, DType::BF16),
        (plain(DType::F16), plain(DType::F16), 256, 16, DType::F16),
        (keys(4), values(4), 128, 4, DType::F16),
        (keys(2), values(2), 128, 16, DType::F16),
        (keys(2), values(4), 64, 12, DType::BF16),
        (keys(1), values(1), 128, 8, DType::F16),
        (keys(8), values(8), 256, 4, DType::F16),
        (keys(8), plain(DType::F16), 64, 1, DType::F16),
        (plain(DType::BF16), values(1), 128, 1, DType::BF16),
    ] {
        let shape = RowShape { batch: 1, heads: 1, capacity: TOKENS, head_dim };
        let (keys, values) = (k.allocate(shape, device).unwrap(), v.allocate(shape, device).unwrap());
        let q = Tensor::zeros(dtype, &[1, rows, 1, head_dim], device).unwrap();
        let options = Options { scale: 1.0, causal: true, window: 8, out_dtype: dtype };
        attend::attend("test", &q, &[Segment::full(keys, values, 1)], options).unwrap();
    }
}

#[test]
fn cuda_decodes_to_halves_on_tensor_cores() {
    let device = Device::from_gpu(gpu::<Cuda90>());
    decode_to_halves(&device);
    // Launches are asynchronous: the last text may not be there yet.
    device.synchronize().unwrap();
    let mut distinct: Vec<_> =
        texts(Cuda90::NAME).into_iter().filter(|t| t.1.contains("::mma::kernel")).map(|t| t.2.unwrap()).collect();
    distinct.sort();
    distinct.dedup();
    assert!(distinct.len() >= 10, "only {} kernels", distinct.len());
    assert!(distinct.iter().all(|t| t.contains("mma.sync.aligned.m16n8k16")));
}

/// The distinct texts of a target, by kernel; fails where one could not be lowered.
fn lowered<T: Target>() -> BTreeMap<String, &'static str> {
    run_everything(&Device::from_gpu(gpu::<T>()));
    let mut distinct = BTreeMap::new();
    for (_, name, text) in texts(T::NAME) {
        match text {
            Ok(text) => distinct.insert(text, name),
            Err(why) => panic!("{name} does not lower to {}: {why}", T::NAME),
        };
    }
    println!("{}: {} kernels", T::NAME, distinct.len());
    assert!(distinct.len() > 20, "only {} kernels were lowered", distinct.len());
    if let Ok(folder) = std::env::var("SLIMKV_DUMP") {
        std::fs::create_dir_all(&folder).unwrap();
        for (i, text) in distinct.keys().enumerate() {
            let ending = if T::NAME == "msl" { "metal" } else { "cu" };
            std::fs::write(format!("{folder}/{i:03}.{ending}"), text).unwrap();
        }
    }
    distinct
}

#[test]
fn every_kernel_lowers_to_metal() {
    for (text, name) in lowered::<Msl>() {
        for word in ["double", "bfloat"] {
            assert!(!text.contains(word), "{name} uses `{word}`, which Metal devices lack");
        }
    }
}

#[test]
fn every_kernel_compiles_for_cuda() {
    let mut compiled = 0;
    for (text, name) in lowered::<Cuda90>() {
        match nvrtc::compile(&text) {
            Some(Ok(_)) => compiled += 1,
            Some(Err(log)) => panic!("NVRTC rejects {name}:\n{log}\n{text}"),
            None => {
                assert_ne!(std::env::var("SLIMKV_REQUIRE_NVRTC").as_deref(), Ok("1"), "there is no NVRTC");
                eprintln!(
                    "NOT RUN: kernels were lowered but not compiled, for there is no NVRTC (scripts/nvrtc-setup)"
                );
                return;
            }
        }
    }
    println!("{compiled} kernels compiled");
}
