//! Every correctness check of the GPU tests on one device, then the speed of its main operations.
//!
//! ```text
//! cargo run --release -p slimkv --features cuda --example gpu_selftest -- cuda
//! ```
//!
//! Exits with 1 when a check fails. `--check` and `--time` run one half only.

#[path = "../tests/gpu/mod.rs"]
mod gpu;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use slimkv::attend::{self, Options, Segment};
use slimkv::format::{Axis, RowCopy, RowFormat, RowShape, Rows};
use slimkv::{DType, Device, Result, Tensor};

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wants = |half: &str| args.iter().any(|a| a == half) || !args.iter().any(|a| a.starts_with("--"));
    let name = args.iter().find(|a| !a.starts_with("--")).map_or("best", String::as_str);
    for found in Device::all() {
        println!("{}: {}: {:?}", found.kind, found.name, found.device);
    }
    let device: Device = match name.parse() {
        Ok(device) => device,
        Err(error) => {
            eprintln!("{error}");
            return 1.into();
        }
    };
    println!("on {device}, {}", device.name());
    let failed = if wants("--check") { check(&device) } else { 0 };
    if wants("--time")
        && let Err(error) = time(&device)
    {
        eprintln!("{error}");
        return 1.into();
    }
    println!("{failed} checks failed");
    u8::from(failed > 0).into()
}

/// Runs every check and returns how many failed.
fn check(device: &Device) -> usize {
    let mut failed = 0;
    let mut run = |name: &str, work: &dyn Fn()| {
        let begun = Instant::now();
        let ok = catch_unwind(AssertUnwindSafe(work)).is_ok();
        println!("{} {name} ({:.1} s)", if ok { "ok    " } else { "FAILED" }, begun.elapsed().as_secs_f64());
        failed += usize::from(!ok);
    };
    for (name, check) in gpu::rows::ALL {
        run(name, &|| check(device));
    }
    for (name, cases) in gpu::cases::ALL {
        for case in cases() {
            // One line a list, but every case of it runs.
            if catch_unwind(AssertUnwindSafe(|| case.check(device))).is_err() {
                run(name, &|| panic!("{case:?}"));
            }
        }
        run(name, &|| {});
    }
    failed
}

/// The best of several rounds of one operation, in seconds.
fn best(device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?;
    device.synchronize()?;
    let mut best = f64::MAX;
    for _ in 0..5 {
        let repeats = 20;
        let begun = Instant::now();
        for _ in 0..repeats {
            work()?;
        }
        device.synchronize()?;
        best = best.min(begun.elapsed().as_secs_f64() / f64::from(repeats));
    }
    Ok(best)
}

fn report(what: &str, seconds: f64, bytes: usize) {
    println!("{what:60} {:9.1} us {:8.0} GB/s", seconds * 1e6, bytes as f64 / seconds / 1e9);
}

fn time(device: &Device) -> Result<()> {
    let begun = Instant::now();
    let warmed = slimkv::gpu::warm(device, &slimkv::gpu::COMMON[4..5])?;
    println!("warm: {} operations in {:.1} s", warmed.operations, begun.elapsed().as_secs_f64());
    let tokens = if device.kind() == slimkv::DeviceKind::Cuda { 131_072 } else { 2048 };
    let (heads, head_dim, group) = (8, 128, 4);
    let shape = RowShape { batch: 1, heads, capacity: tokens, head_dim };
    let plain = RowFormat::Plain(DType::F16);
    let x = Tensor::zeros(DType::F32, &[1, heads, 64, head_dim], &Device::cpu())?;
    let noise: Vec<f32> = (0..x.len()).map(|i| ((i * 7919 % 4001) as f32 / 2000.0) - 1.0).collect();
    let noise = Tensor::from_vec(noise, &[1, heads, 64, head_dim])?.to_float(DType::F16)?.to_device(device)?;
    let noise = Rows::Plain(slimkv::format::Plain::new("selftest", "x", noise)?);
    let mut source = plain.allocate(shape, device)?;
    for to in (0..tokens).step_by(64) {
        source.write("selftest", &noise, &[RowCopy { from: 0, to, rows: 64 }])?;
    }
    let all = [RowCopy { from: 0, to: 0, rows: tokens }];
    let mut copy = plain.allocate(shape, device)?;
    let seconds = best(device, || copy.write("selftest", &source, &all))?;
    report("copy f16, read and written", seconds, 2 * source.byte_len());
    drop(copy);
    for s_q in [1, 4] {
        attend_speed(device, "f16", &source, &source, group, s_q, DType::F16)?;
    }
    attend_speed(device, "f16", &source, &source, group, 1, DType::F32)?;
    for bits in [2, 3, 4, 8] {
        let format = |axis| RowFormat::Affine { bits, group: 32, axis, params: DType::F16 };
        let mut keys = format(Axis::Tokens).allocate(shape, device)?;
        let mut values = format(Axis::Channels).allocate(shape, device)?;
        let seconds = best(device, || keys.write("selftest", &source, &all))?;
        report(&format!("encode keys, {bits} bits, read and written"), seconds, source.byte_len() + keys.byte_len());
        let seconds = best(device, || values.write("selftest", &source, &all))?;
        report(
            &format!("encode values, {bits} bits, read and written"),
            seconds,
            source.byte_len() + values.byte_len(),
        );
        let mut back = plain.allocate(shape, device)?;
        let seconds = best(device, || back.write("selftest", &keys, &all))?;
        report(&format!("decode keys, {bits} bits, read and written"), seconds, source.byte_len() + keys.byte_len());
        for dtype in [DType::F16, DType::F32] {
            attend_speed(device, &format!("{bits} bits"), &keys, &values, group, 1, dtype)?;
        }
    }
    let tokens = tokens.min(4096);
    let shape = RowShape { capacity: tokens, ..shape };
    let mut short = plain.allocate(shape, device)?;
    short.write("selftest", &source, &[RowCopy { from: 0, to: 0, rows: tokens }])?;
    let s_q = tokens / 2;
    let q = Tensor::zeros(DType::F16, &[1, heads * group, s_q, head_dim], device)?;
    let options = Options { scale: 0.088, causal: true, window: 0, out_dtype: DType::F16 };
    let segment = [Segment::full(short.clone(), short, s_q)];
    let seconds = best(device, || attend::attend("selftest", &q, &segment, options).map(drop))?;
    let flops = 4.0 * (heads * group * s_q * head_dim) as f64 * (tokens - s_q / 2) as f64;
    println!(
        "prefill f16, {s_q} queries over {tokens} rows: {:.1} us, {:.1} TFLOP/s",
        seconds * 1e6,
        flops / seconds / 1e12
    );
    Ok(())
}

fn attend_speed(
    device: &Device,
    what: &str,
    keys: &Rows,
    values: &Rows,
    group: usize,
    s_q: usize,
    out_dtype: DType,
) -> Result<()> {
    let RowShape { heads, capacity, head_dim, .. } = keys.shape();
    let q = Tensor::zeros(DType::F16, &[1, heads * group, s_q, head_dim], device)?;
    let options = Options { scale: 0.088, causal: true, window: 0, out_dtype };
    let segment = [Segment::full(keys.clone(), values.clone(), s_q)];
    let seconds = best(device, || attend::attend("selftest", &q, &segment, options).map(drop))?;
    let what = format!("attend {what} -> {out_dtype}, {capacity} rows x {heads} heads, {s_q} queries");
    report(&what, seconds, keys.byte_len() + values.byte_len());
    Ok(())
}
