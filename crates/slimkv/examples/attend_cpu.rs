//! Times attention on the CPU beside the memory roofline that is measured in the same process.
//!
//! `attend_cpu decode [tokens] [threads] [formats...]`: one query token, caches cold (1.25 GiB of them, visited in turn).
//! `attend_cpu prefill [tokens] [threads] [formats...]`: causal, as many queries as tokens.
//! `attend_cpu quantize [tokens] [threads]`: encoding both axes.

use slimkv::attend::{Options, Segment, attend};
use slimkv::cpu::roofline::stream_read;
use slimkv::format::affine::{Names, quantize};
use slimkv::format::{Affine, Axis, Plain, Rows};
use slimkv::{DType, Device, Result, Tensor};

const OP: &str = "bench";
const HQ: usize = 32;
const HKV: usize = 8;
const D: usize = 128;
const GROUP: usize = 32;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    let what = args.first().map_or("decode", String::as_str);
    let (tokens, threads) = (number(1, 32768), number(2, 1));
    let named: Vec<String> = args.iter().skip(3).cloned().collect();
    let formats = if named.is_empty() { ["f16", "8", "4", "3", "2", "1"].map(String::from).to_vec() } else { named };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
    println!("{}; {threads} threads", slimkv::cpu::name());
    match what {
        "prefill" => formats.iter().try_for_each(|f| pool.install(|| prefill(f, tokens))),
        "quantize" => pool.install(|| encode(tokens)),
        _ => {
            let stream = stream_read(1 << 30, threads, 5)?;
            println!("stream read {:.1} GB/s", stream / 1e9);
            formats.iter().try_for_each(|f| pool.install(|| decode(f, tokens, stream)))
        }
    }
}

/// Seconds.
fn clock() -> f64 {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed().as_secs_f64()
}

fn options(causal: bool) -> Options {
    let out_dtype = if std::env::var_os("OUT_F32").is_some() { DType::F32 } else { DType::F16 };
    Options { scale: 1.0 / (D as f32).sqrt(), causal, window: 0, out_dtype }
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

fn decode(format: &str, tokens: usize, stream: f64) -> Result<()> {
    let mut seed = 1;
    let first = segment(format, tokens, &mut seed)?;
    let bytes = first.keys.byte_len() + first.values.byte_len();
    // `CACHES=2` keeps them in the last-level cache: what the arithmetic alone takes.
    let count = std::env::var("CACHES").ok().and_then(|n| n.parse().ok()).unwrap_or((5usize << 28).div_ceil(bytes));
    let caches: Vec<Segment> = (0..count).map(|_| segment(format, tokens, &mut seed)).collect::<Result<_>>()?;
    let q = floats(&[1, HQ, 1, D], &mut seed)?;
    let mut seconds = Vec::new();
    let rounds = std::env::var("ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or((100 / count).max(2));
    for round in 0..rounds {
        for cache in &caches {
            let start = clock();
            attend(OP, &q, std::slice::from_ref(cache), options(false))?;
            if round > 0 {
                seconds.push(clock() - start);
            }
        }
    }
    let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let time = median(seconds);
    let rate = bytes as f64 / time;
    println!(
        "decode {format:>4}  {:8.3} ms (best {:.3})  {:6.2} MB  {:5.1} GB/s  {:5.1} % of the stream, bound {:.3} ms",
        time * 1e3,
        best * 1e3,
        bytes as f64 / 1e6,
        rate / 1e9,
        100.0 * rate / stream,
        bytes as f64 / stream * 1e3
    );
    Ok(())
}

fn prefill(format: &str, tokens: usize) -> Result<()> {
    let mut seed = 1;
    let cache = segment(format, tokens, &mut seed)?;
    let q = floats(&[1, HQ, tokens, D], &mut seed)?;
    let seconds = (0..3)
        .map(|_| {
            let start = clock();
            attend(OP, &q, std::slice::from_ref(&cache), options(true)).map(|_| clock() - start)
        })
        .collect::<Result<Vec<_>>>()?;
    let time = median(seconds);
    let flop = 4.0 * (HQ * D) as f64 * (tokens * (tokens + 1) / 2) as f64;
    println!("prefill {format:>4}  {:8.1} ms  {:6.1} GFLOP/s", time * 1e3, flop / time / 1e9);
    Ok(())
}

fn encode(tokens: usize) -> Result<()> {
    let x = floats(&[1, HKV, tokens, D], &mut 1)?;
    for bits in [4, 2, 8] {
        for axis in [Axis::Tokens, Axis::Channels] {
            let seconds = (0..5)
                .map(|_| {
                    let start = clock();
                    quantize(OP, &x, axis, GROUP, bits, 1e-8, true, DType::F16)?;
                    Ok(clock() - start)
                })
                .collect::<Result<Vec<_>>>()?;
            let time = median(seconds);
            println!(
                "quantize {bits} {axis:?}  {:7.2} ms  {:.2} GB/s of f16 read",
                time * 1e3,
                x.byte_len() as f64 / time / 1e9
            );
        }
    }
    Ok(())
}

/// Random rows in the given format: `f16`, or a number of bits.
fn segment(format: &str, tokens: usize, seed: &mut u64) -> Result<Segment> {
    let mut side = |axis: Axis| -> Result<Rows> {
        let Ok(bits) = format.parse::<u32>() else {
            return Ok(Rows::Plain(Plain::new(OP, "x", floats(&[1, HKV, tokens, D], seed)?)?));
        };
        let width = D.div_ceil(32 / bits as usize);
        let mask = if bits == 3 { 0x3FFF_FFFF } else { u32::MAX };
        let codes: Vec<u32> = (0..HKV * tokens * width).map(|_| next(seed) & mask).collect();
        let [p0, p1] = axis.param_shape(tokens, D, GROUP);
        let step = 4.0 / ((1 << bits) - 1) as f32;
        let mut params = |center: f32| {
            let x = (0..HKV * p0 * p1).map(|_| half::f16::from_f32(center * (0.75 + unit(seed) / 2.0))).collect();
            Tensor::from_vec(x, &[1, HKV, p0, p1])
        };
        let (scale, zero) = (params(step)?, params(-2.0)?);
        let names = Names { op: OP, codes: "codes", scale: "scale", zero: "zero", bits: "bits" };
        let codes = Tensor::from_slice(&codes, &[1, HKV, tokens, width], &Device::cpu())?;
        Ok(Rows::Affine(Affine::new(names, codes, scale, zero, bits, GROUP, axis, D)?))
    };
    let (keys, values) = (side(Axis::Tokens)?, side(Axis::Channels)?);
    Ok(Segment::full(keys, values, 1))
}

fn floats(shape: &[usize], seed: &mut u64) -> Result<Tensor> {
    let x: Vec<half::f16> = (0..shape.iter().product()).map(|_| half::f16::from_f32(4.0 * unit(seed) - 2.0)).collect();
    Tensor::from_slice(&x, shape, &Device::cpu())
}

fn next(seed: &mut u64) -> u32 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 16) as u32
}

fn unit(seed: &mut u64) -> f32 {
    next(seed) as f32 / 4_294_967_296.0
}
