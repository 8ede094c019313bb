//! What this machine can do at most: the yardstick that benchmarks are put beside.

use std::hint::black_box;
use std::time::Instant;

use super::{Kernel, Simd, isa};
use crate::Result;

/// Bytes per second that `threads` threads read together from `bytes` bytes of memory: the median of `rounds` passes.
///
/// `bytes` should be well past the last-level cache; memory is touched before it is timed.
pub fn stream_read(bytes: usize, threads: usize, rounds: usize) -> Result<f64> {
    let isa = isa()?;
    let threads = threads.max(1);
    let words = (bytes / 4 / threads / 64 * 64).max(64);
    let memory: Vec<Vec<f32>> = (0..threads).map(|t| vec![t as f32 + 1.0; words]).collect();
    let mut seconds: Vec<f64> = (0..rounds.max(1))
        .map(|_| {
            let start = Instant::now();
            std::thread::scope(|scope| {
                for part in &memory[1..] {
                    scope.spawn(move || black_box(isa.run(Sum(part))));
                }
                black_box(isa.run(Sum(&memory[0])));
            });
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    Ok((threads * words * 4) as f64 / seconds[seconds.len() / 2])
}

/// The sum of a slice, in enough registers to be bound by memory.
struct Sum<'a>(&'a [f32]);

impl Kernel for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut acc = [s.splat(0.0); 4];
        for chunk in self.0.chunks_exact(4 * S::LANES) {
            for (i, acc) in acc.iter_mut().enumerate() {
                // SAFETY: the chunk has `4 * LANES` elements.
                *acc = s.add(*acc, unsafe { s.load(chunk.as_ptr().add(i * S::LANES)) });
            }
        }
        s.sum4(acc).iter().sum()
    }
}
