//! Writing, quantising, packing and merging: what every GPU must do exactly as the CPU does.

use slimkv::attend::{self, merge};
use slimkv::format::affine::{self, Names};
use slimkv::format::{Affine, Axis, Plain, RowCopy, Rows, bits};
use slimkv::gpu::Gpu;
use slimkv::{DType, Device, DeviceKind, Tensor};

use super::{Case, Kind, Random, rows_to, segment_to};

/// A check and its name.
pub type Check = (&'static str, fn(&Device));

/// Every check of this file.
pub const ALL: &[Check] = &[
    ("buffers_come_back", buffers_come_back),
    ("dropped_buffers_are_given_back", dropped_buffers_are_given_back),
    ("plain_rows_are_converted", plain_rows_are_converted),
    ("rows_are_quantised_bit_for_bit", rows_are_quantised_bit_for_bit),
    ("rows_are_decoded_bit_for_bit", rows_are_decoded_bit_for_bit),
    ("arrays_are_quantised_bit_for_bit", arrays_are_quantised_bit_for_bit),
    ("codes_are_packed", codes_are_packed),
    ("partial_results_are_merged", partial_results_are_merged),
    ("shared_memory_is_not_written", shared_memory_is_not_written),
    ("same_alone_as_in_a_batch", same_alone_as_in_a_batch),
];

const FLOATS: [DType; 3] = [DType::F16, DType::BF16, DType::F32];
const COPIES: [RowCopy; 2] = [RowCopy { from: 2, to: 0, rows: 45 }, RowCopy { from: 0, to: 32, rows: 9 }];

pub fn buffers_come_back(device: &Device) {
    for len in [0, 1, 3, 4, 15, 16, 17, 1000, 100_001] {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
        let there = Tensor::from_slice(&bytes, &[len], device).unwrap();
        assert_eq!(there.to_vec::<u8>().unwrap(), bytes, "{device}: {len} bytes");
        let zeros = Tensor::zeros(DType::U8, &[len], device).unwrap();
        assert_eq!(zeros.to_vec::<u8>().unwrap(), vec![0; len], "{device}: {len} zeros");
    }
}

pub fn dropped_buffers_are_given_back(device: &Device) {
    let index = device.to_string().rsplit(':').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let gpu = Gpu::open(device.kind(), index).unwrap();
    let reserved = || gpu.memory().unwrap().1;
    let mib = |n: usize| Tensor::zeros(DType::U8, &[n << 20], device).unwrap();
    let keep = mib(9);
    device.synchronize().unwrap();
    let before = reserved();
    for n in 20..30 {
        drop(mib(n));
    }
    let last = mib(9);
    device.synchronize().unwrap();
    let grown = reserved().saturating_sub(before);
    assert!(grown <= 64 << 20, "{device}: {grown} more bytes are reserved for {} bytes", last.byte_len());
    assert!(keep.to_vec::<u8>().unwrap().iter().all(|&b| b == 0), "{device}");
}

/// Normal values with what breaks careless code among them.
fn with_specials(random: &mut Random, dtype: DType, shape: &[usize]) -> Tensor {
    let mut values: Vec<f32> = (0..shape.iter().product()).map(|_| random.normal()).collect();
    let specials = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, 1e-7, -3e-5, 6e4, 1e-40, 65519.0];
    for special in specials {
        let at = random.below(values.len());
        values[at] = special;
    }
    // A group without a spread, and one without a finite element.
    let n = values.len();
    values[n / 2..n / 2 + 40.min(n / 4)].fill(0.3);
    values[..32.min(n / 4)].fill(f32::NAN);
    Tensor::from_vec(values, shape).unwrap().to_float(dtype).unwrap()
}

fn plain(data: Tensor) -> Rows {
    Rows::Plain(Plain::new("test", "x", data).unwrap())
}

fn tensors(rows: &Rows) -> Vec<Tensor> {
    match rows {
        Rows::Plain(rows) => vec![rows.data().clone()],
        Rows::Affine(rows) => vec![rows.codes().clone(), rows.scale().clone(), rows.zero().clone()],
        _ => unreachable!("a format that these tests do not know"),
    }
}

/// Floats are equal by value, or both NaN; codes by their bits, but for one step on Metal, which divides inexactly.
fn assert_same(what: &str, got: &Tensor, expected: &Tensor, bits: u32) {
    assert_eq!(got.shape(), expected.shape(), "{what}");
    if got.dtype().is_float() {
        let (a, b) = (got.to_f32_vec().unwrap(), expected.to_f32_vec().unwrap());
        for (i, (a, b)) in a.iter().zip(&b).enumerate() {
            assert!(a == b || (a.is_nan() && b.is_nan()), "{what}: [{i}] is {a:e}, expected {b:e}");
        }
        return;
    }
    let codes = |t: &Tensor| -> Vec<u32> {
        match t.dtype() {
            DType::U8 => t.to_vec::<u8>().unwrap().into_iter().map(u32::from).collect(),
            _ => t.to_vec().unwrap(),
        }
    };
    let metal = got.device().kind() == DeviceKind::Metal;
    for (i, (&a, &b)) in codes(got).iter().zip(&codes(expected)).enumerate() {
        let steps = (0..32).step_by(bits as usize).map(|s| ((a >> s) & 0xff).abs_diff((b >> s) & 0xff)).max();
        assert!(a == b || (metal && steps <= Some(1)), "{what}: word [{i}] is {a:#x}, expected {b:#x}");
    }
}

fn compare_writes(what: &str, device: &Device, to: &Rows, from: &Rows, bits: u32) {
    let (mut here, mut there) = (to.clone(), rows_to(to, device));
    here.write("test", from, &COPIES).unwrap();
    there.write("test", &rows_to(from, device), &COPIES).unwrap();
    for (i, (got, expected)) in tensors(&there).iter().zip(&tensors(&here)).enumerate() {
        assert_same(&format!("{what}, array {i}"), got, expected, bits);
    }
}

pub fn plain_rows_are_converted(device: &Device) {
    let mut random = Random(1);
    for head_dim in [64, 6, 5] {
        for from in FLOATS {
            for to in FLOATS {
                let source = plain(with_specials(&mut random, from, &[2, 2, 50, head_dim]));
                let target = plain(random.tensor(to, &[2, 2, 60, head_dim]));
                compare_writes(&format!("{device}: {from} to {to}, D = {head_dim}"), device, &target, &source, 8);
            }
        }
    }
}

fn zeroed(shape: [usize; 4], bits: u32, packed: bool, group: usize, axis: Axis, params: DType) -> Rows {
    let [b, h, s, d] = shape;
    let cpu = Device::cpu();
    let codes = if packed {
        Tensor::zeros(DType::U32, &[b, h, s, bits::words_per_row(d, bits)], &cpu)
    } else {
        Tensor::zeros(DType::U8, &shape, &cpu)
    };
    let [p0, p1] = axis.param_shape(s, d, group);
    let param = || Tensor::zeros(params, &[b, h, p0, p1], &cpu).unwrap();
    let names = Names { op: "test", codes: "codes", scale: "scale", zero: "zero", bits: "bits" };
    Rows::Affine(Affine::new(names, codes.unwrap(), param(), param(), bits, group, axis, d).unwrap())
}

pub fn rows_are_quantised_bit_for_bit(device: &Device) {
    let mut random = Random(2);
    for axis in [Axis::Tokens, Axis::Channels] {
        for bits in bits::WIDTHS {
            for (packed, head_dim, group) in
                [(true, 64, 32), (true, 64, 4), (true, 50, 8), (false, 64, 16), (false, 7, 4)]
            {
                let params = if head_dim == 64 { DType::F16 } else { DType::F32 };
                let dtype = FLOATS[random.below(3)];
                let source = plain(with_specials(&mut random, dtype, &[2, 2, 50, head_dim]));
                let target = zeroed([2, 2, 64, head_dim], bits, packed, group, axis, params);
                let what =
                    format!("{device}: {dtype} to {bits} bits, packed {packed}, {axis:?} / {group}, D = {head_dim}");
                compare_writes(&what, device, &target, &source, bits);
            }
        }
    }
}

pub fn rows_are_decoded_bit_for_bit(device: &Device) {
    let mut random = Random(3);
    for axis in [Axis::Tokens, Axis::Channels] {
        for bits in bits::WIDTHS {
            for (packed, head_dim, group) in [(true, 64, 32), (true, 50, 7), (false, 7, 3)] {
                for to in FLOATS {
                    let kind = Kind::Affine { bits, packed, group, axis, params: DType::F32 };
                    let source = kind.rows(&mut random, [2, 2, 50, head_dim]);
                    let target = plain(random.tensor(to, &[2, 2, 60, head_dim]));
                    let what = format!("{device}: {kind:?} to {to}, D = {head_dim}");
                    if device.kind() != DeviceKind::Metal {
                        compare_writes(&what, device, &target, &source, bits);
                    }
                }
            }
        }
    }
}

pub fn arrays_are_quantised_bit_for_bit(device: &Device) {
    let mut random = Random(4);
    for axis in [Axis::Tokens, Axis::Channels] {
        for (bits, packed, params, group) in
            [(4, true, DType::F16, 32), (3, true, DType::F32, 9), (2, false, DType::F32, 10), (8, true, DType::F16, 64)]
        {
            let x = with_specials(&mut random, DType::F32, &[3, 41, 40]);
            let there = x.to_device(device).unwrap();
            let what = format!("{device}: {bits} bits, {axis:?} / {group}");
            let expected = affine::quantize("test", &x, axis, group, bits, 1e-8, packed, params).unwrap();
            let got = affine::quantize("test", &there, axis, group, bits, 1e-8, packed, params).unwrap();
            assert_same(&format!("{what}: codes"), &got.0, &expected.0, bits);
            assert_same(&format!("{what}: scale"), &got.1, &expected.1, bits);
            assert_same(&format!("{what}: zero"), &got.2, &expected.2, bits);
            let expected =
                affine::dequantize("test", &expected.0, &expected.1, &expected.2, axis, group, bits, 40).unwrap();
            let got = affine::dequantize("test", &got.0, &got.1, &got.2, axis, group, bits, 40).unwrap();
            let x16 = with_specials(&mut random, DType::F16, &[2, 20, 40]);
            let trip = |x: &Tensor| affine::round_trip("test", x, axis, group, 10, 1e-8).unwrap();
            if device.kind() != DeviceKind::Metal {
                assert_same(&format!("{what}: decoded"), &got, &expected, bits);
                assert_same(&format!("{what}: round trip"), &trip(&x16.to_device(device).unwrap()), &trip(&x16), bits);
            }
        }
    }
}

pub fn codes_are_packed(device: &Device) {
    let mut random = Random(5);
    for width in bits::WIDTHS {
        for len in [1, 32, 50, 0] {
            let codes: Vec<u8> = (0..3 * len).map(|_| random.bits() as u8).collect();
            let codes = Tensor::from_vec(codes, &[3, len]).unwrap();
            let expected = bits::pack("test", &codes, width).unwrap();
            let got = bits::pack("test", &codes.to_device(device).unwrap(), width).unwrap();
            assert_eq!(
                got.to_vec::<u32>().unwrap(),
                expected.to_vec::<u32>().unwrap(),
                "{device}: pack {width} x {len}"
            );
            let expected = bits::unpack("test", &expected, width, len).unwrap();
            let got = bits::unpack("test", &got, width, len).unwrap();
            assert_eq!(
                got.to_vec::<u8>().unwrap(),
                expected.to_vec::<u8>().unwrap(),
                "{device}: unpack {width} x {len}"
            );
        }
    }
}

pub fn partial_results_are_merged(device: &Device) {
    let mut random = Random(6);
    for dtype in FLOATS {
        let (a, b) = (random.tensor(dtype, &[2, 4, 5]), random.tensor(dtype, &[2, 4, 5]));
        let mut lse = || {
            let values: Vec<f32> =
                (0..8).map(|i| if i % 3 == 0 { f32::NEG_INFINITY } else { random.normal() }).collect();
            Tensor::from_vec(values, &[2, 4]).unwrap()
        };
        let (la, mut lb) = (lse(), lse());
        lb.as_mut_slice::<f32>().unwrap().rotate_left(3);
        lb.as_mut_slice::<f32>().unwrap()[5] = 1.0;
        let expected = merge::merge("test", &a, &la, &b, &lb).unwrap();
        let to = |t: &Tensor| t.to_device(device).unwrap();
        let got = merge::merge("test", &to(&a), &to(&la), &to(&b), &to(&lb)).unwrap();
        let tolerance = if dtype == DType::F32 { 1e-6 } else { 1e-2 };
        for (got, expected) in [(&got.out, &expected.out), (&got.lse, &expected.lse)] {
            let (a, b) = (got.to_f32_vec().unwrap(), expected.to_f32_vec().unwrap());
            let close = |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= tolerance * b.abs().max(1.0);
            assert!(a.iter().zip(&b).all(close), "{device}, {dtype}: {a:?}, expected {b:?}");
        }
    }
}

pub fn shared_memory_is_not_written(device: &Device) {
    let mut random = Random(7);
    let zeros = rows_to(&plain(Tensor::zeros(DType::F16, &[1, 1, 8, 16], &Device::cpu()).unwrap()), device);
    let mut written = zeros.clone();
    let source = rows_to(&plain(random.tensor(DType::F16, &[1, 1, 8, 16])), device);
    written.write("test", &source, &[RowCopy { from: 0, to: 0, rows: 8 }]).unwrap();
    assert!(tensors(&zeros)[0].to_f32_vec().unwrap().iter().all(|&x| x == 0.0), "{device}");
    let (a, b) = (tensors(&written)[0].to_f32_vec().unwrap(), tensors(&source)[0].to_f32_vec().unwrap());
    assert_eq!(a, b, "{device}");
}

/// Bit for bit: alone and in a batch, and the same call twice; for one query and for many.
pub fn same_alone_as_in_a_batch(device: &Device) {
    let keys = Kind::Affine { bits: 4, packed: true, group: 32, axis: Axis::Tokens, params: DType::F16 };
    let values = Kind::Affine { bits: 2, packed: true, group: 32, axis: Axis::Channels, params: DType::F16 };
    for (s_q, window) in [(1, 0), (3, 50), (40, 0), (40, 25)] {
        let segments = vec![vec![600, 37, 300], vec![20, 20, 1]];
        let case = Case { s_q, window, keys, values, segments, head_dim: 64, ..Case::default() };
        let (q, segments, options) = case.build(9);
        let there: Vec<_> = segments.iter().map(|s| segment_to(s, device)).collect();
        let queries = q.to_device(device).unwrap();
        let run = || attend::attend("test", &queries, &there, options).unwrap().out.to_vec::<f32>().unwrap();
        let together = run();
        assert_eq!(together, run(), "{device}: twice");
        let n = together.len() / 3;
        for b in 0..3 {
            let alone: Vec<_> = segments.iter().map(|s| segment_to(&sequence(s, b), device)).collect();
            let q = part(&q, b).to_device(device).unwrap();
            let out = attend::attend("test", &q, &alone, options).unwrap().out.to_vec::<f32>().unwrap();
            assert_eq!(out, together[b * n..][..n], "{device}: sequence {b} alone, {s_q} queries, window {window}");
        }
    }
}

/// One sequence of a tensor `[B, ..]`.
fn part(tensor: &Tensor, b: usize) -> Tensor {
    let mut shape = tensor.shape().to_vec();
    let bytes = tensor.to_bytes().unwrap();
    let n = bytes.len() / shape[0];
    shape[0] = 1;
    Tensor::from_bytes(tensor.dtype(), &bytes[b * n..][..n], &shape, &Device::cpu()).unwrap()
}

fn sequence(segment: &attend::Segment, b: usize) -> attend::Segment {
    let side = |rows: &Rows| match rows {
        Rows::Plain(rows) => plain(part(rows.data(), b)),
        Rows::Affine(rows) => {
            let names = Names { op: "test", codes: "codes", scale: "scale", zero: "zero", bits: "bits" };
            let (codes, scale, zero) = (part(rows.codes(), b), part(rows.scale(), b), part(rows.zero(), b));
            let d = rows.shape().head_dim;
            Rows::Affine(Affine::new(names, codes, scale, zero, rows.bits(), rows.group(), rows.axis(), d).unwrap())
        }
        _ => unreachable!("a format that these tests do not know"),
    };
    attend::Segment { keys: side(&segment.keys), values: side(&segment.values), spans: vec![segment.spans[b]] }
}
