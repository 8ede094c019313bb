//! Timing, and the speed of memory that timings are held against.

use std::hint::black_box;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use slimkv::{Device, DeviceKind};

use crate::failure::Outcome;

/// Memory that must be touched between two visits of the same cache for the visit to be cold on a CPU.
pub const COLD_CPU: usize = 5 << 28;
/// The same on a GPU: several times the largest L2.
pub const COLD_GPU: usize = 1 << 29;

/// How long one case is measured.
const BUDGET: Duration = Duration::from_millis(1500);
/// Samples of one case, at least and at most.
const SAMPLES: std::ops::RangeInclusive<usize> = 11..=2001;

/// One case's time.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// The median.
    pub median_us: f64,
    /// The best.
    pub min_us: f64,
}

/// How many caches must be visited in turn so that each visit is cold.
pub fn rotation(device: &Device, bytes: usize, warm: bool) -> usize {
    let total = if device.kind() == DeviceKind::Cpu { COLD_CPU } else { COLD_GPU };
    match warm {
        true => 1,
        false => total.div_ceil(bytes.max(1)).clamp(2, 1 << 16),
    }
}

/// Times `call(i)` for i = 0, 1, 2, ... after a warm-up. `before` runs before each sample, off the clock.
///
/// A GPU runs behind the host: there a sample is a queue of calls long enough to hide the launch of the first and the
/// wait for the last, divided by their number.
pub fn time(device: &Device, mut before: impl FnMut(), mut call: impl FnMut(usize) -> Outcome) -> Outcome<Timing> {
    let mut next = 0;
    let mut batch = |n: usize| -> Outcome<Duration> {
        let start = Instant::now();
        for _ in 0..n {
            call(next)?;
            next += 1;
        }
        device.synchronize()?;
        Ok(start.elapsed())
    };
    let mut warmed = Duration::ZERO;
    for _ in 0..3 {
        warmed = batch(1)?;
    }
    let queue = match device.kind() {
        DeviceKind::Cpu => 1,
        _ => (Duration::from_millis(20).as_secs_f64() / warmed.as_secs_f64().max(1e-6)).clamp(1.0, 200.0) as usize,
    };
    let start = Instant::now();
    let mut samples = Vec::new();
    while samples.len() < *SAMPLES.start() || (samples.len() < *SAMPLES.end() && start.elapsed() < BUDGET) {
        before();
        samples.push(batch(queue)?.as_secs_f64() * 1e6 / queue as f64);
    }
    samples.sort_by(f64::total_cmp);
    Ok(Timing { median_us: samples[samples.len() / 2], min_us: samples[0] })
}

/// A buffer whose reading drives everything else out of the caches.
pub struct Flush(Vec<u64>);

impl Flush {
    /// A buffer of `bytes`.
    pub fn new(bytes: usize) -> Self {
        // Written, so that every page is its own and not the shared page of zeros.
        Flush((0..(bytes / 8) as u64).collect())
    }

    /// Reads it once, on the threads of the current pool.
    pub fn read(&self) {
        const PART: usize = 1 << 17;
        let sum = |part: &[u64]| part.iter().fold(0u64, |sum, x| sum.wrapping_add(*x));
        black_box(self.0.par_chunks(PART).map(sum).reduce(|| 0, u64::wrapping_add));
    }
}

/// Bytes a second of a stream read over memory that no cache holds, by as many threads as the current pool has.
pub fn stream_read() -> Outcome<f64> {
    Ok(slimkv::cpu::roofline::stream_read(COLD_CPU, rayon::current_num_threads(), 7)?)
}

/// Bytes a second, read and written, of a copy within the device.
pub fn device_copy(device: &Device) -> Outcome<f64> {
    use slimkv::format::{Plain, RowCopy, RowFormat, RowShape, Rows};
    const OP: &str = "bench";
    // 256 MiB, several times any L2; the library's own row copy is a plain streaming kernel.
    let shape = RowShape { batch: 1, heads: 1, capacity: 1 << 20, head_dim: 128 };
    let format = RowFormat::Plain(slimkv::DType::F16);
    let source =
        Rows::Plain(Plain::new(OP, "copy", slimkv::Tensor::zeros(slimkv::DType::F16, &[1, 1, 1 << 20, 128], device)?)?);
    let mut target = format.allocate(shape, device)?;
    let copies = [RowCopy { from: 0, to: 0, rows: shape.capacity }];
    let timing = time(device, || (), |_| Ok(target.write(OP, &source, &copies)?))?;
    Ok(2.0 * format.byte_len(shape) as f64 / (timing.min_us * 1e-6))
}
