//! Times decode attention on a GPU beside the memory roofline: `attend_gpu [device] [tokens...]`.
//!
//! One query token of 32 heads over 8 KV heads of 128 channels, f16 parameters in groups of 32. Caches are visited in turn
//! and hold 200 MB and more together, so that they come from memory; a time is that of a whole call, merge included, with the
//! device kept busy by queued calls.

use std::time::Instant;

use slimkv::attend::{Options, Segment, attend};
use slimkv::format::{Axis, Plain, RowCopy, RowFormat, RowShape, Rows};
use slimkv::{DType, Device, Result, Tensor};

const OP: &str = "bench";
const HQ: usize = 32;
const HKV: usize = 8;
const D: usize = 128;
const GROUP: usize = 32;
/// Calls of one timing.
const CALLS: usize = 64;
/// Timings, of which the median counts.
const ROUNDS: usize = 15;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let device: Device = args.first().map_or("cuda:0", String::as_str).parse()?;
    let tokens: Vec<usize> = args.iter().skip(1).filter_map(|a| a.parse().ok()).collect();
    let tokens = if tokens.is_empty() { vec![4096, 16384, 131_072] } else { tokens };
    println!("{device}: {}", device.name());
    for tokens in tokens {
        for (name, keys, values) in formats() {
            decode(&device, name, keys, values, tokens)?;
        }
    }
    Ok(())
}

fn formats() -> Vec<(&'static str, RowFormat, RowFormat)> {
    let affine = |bits, axis| RowFormat::Affine { bits, group: GROUP, axis, params: DType::F16 };
    let both = |k, v| (affine(k, Axis::Tokens), affine(v, Axis::Channels));
    let plain = |dtype| (RowFormat::Plain(dtype), RowFormat::Plain(dtype));
    [
        ("f16", plain(DType::F16)),
        ("kivi:8", both(8, 8)),
        ("kivi:k8v4", both(8, 4)),
        ("kivi:4", both(4, 4)),
        ("kivi:2", both(2, 2)),
    ]
    .map(|(name, (k, v))| (name, k, v))
    .to_vec()
}

fn decode(device: &Device, name: &str, keys: RowFormat, values: RowFormat, tokens: usize) -> Result<()> {
    let shape = RowShape { batch: 1, heads: HKV, capacity: tokens, head_dim: D };
    let exact = Rows::Plain(Plain::new(OP, "x", noise(&[1, HKV, tokens, D], 1)?.to_device(device)?)?);
    let q = noise(&[1, HQ, 1, D], 2)?.to_device(device)?;
    let copies = [RowCopy { from: 0, to: 0, rows: tokens }];
    let cache = || -> Result<Segment> {
        let (mut k, mut v) = (keys.allocate(shape, device)?, values.allocate(shape, device)?);
        k.write(OP, &exact, &copies)?;
        v.write(OP, &exact, &copies)?;
        Ok(Segment::full(k, v, 1))
    };
    let first = cache()?;
    let bytes = first.keys.byte_len() + first.values.byte_len();
    let mut caches = vec![first];
    for _ in 1..200_000_000usize.div_ceil(bytes) {
        caches.push(cache()?);
    }
    let options = Options { scale: 1.0 / (D as f32).sqrt(), causal: false, window: 0, out_dtype: DType::F16 };
    let mut seconds = Vec::new();
    for _ in 0..ROUNDS + 2 {
        device.synchronize()?;
        let start = Instant::now();
        for call in 0..CALLS {
            attend(OP, &q, std::slice::from_ref(&caches[call % caches.len()]), options)?;
        }
        device.synchronize()?;
        seconds.push(start.elapsed().as_secs_f64() / CALLS as f64);
    }
    let mut seconds = seconds.split_off(2);
    seconds.sort_by(f64::total_cmp);
    let time = seconds[ROUNDS / 2];
    let rate = bytes as f64 / time / 1e9;
    println!("S={tokens:<7} {name:10} {:8.1} us  {:7.2} MB  {rate:6.0} GB/s", time * 1e6, bytes as f64 / 1e6);
    Ok(())
}

/// Unit-variance numbers in f16, the same everywhere.
fn noise(shape: &[usize], seed: u64) -> Result<Tensor> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let values: Vec<half::f16> =
        (0..shape.iter().product()).map(|_| half::f16::from_f32((next() + next() + next()) * 2.0)).collect();
    Tensor::from_vec(values, shape)
}
