//! Compiling kernels ahead of time.

use std::time::{Duration, Instant};

use crate::attend::{self, Options, Segment, Span};
use crate::format::{Axis, RowCopy, RowFormat, RowShape};
use crate::{DType, Device, Result, Tensor};

/// A shape of heads that models have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Elements of a row.
    pub head_dim: usize,
    /// Query heads that share a KV head.
    pub group: usize,
}

/// The shapes of the models that most people run.
pub const COMMON: [HeadShape; 6] = [
    HeadShape { head_dim: 64, group: 1 },
    HeadShape { head_dim: 64, group: 3 },
    HeadShape { head_dim: 64, group: 4 },
    HeadShape { head_dim: 128, group: 1 },
    HeadShape { head_dim: 128, group: 4 },
    HeadShape { head_dim: 128, group: 8 },
];

/// What [`warm`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Warmed {
    /// Operations run, each with the kernels it needs.
    pub operations: usize,
    /// How long it took.
    pub elapsed: Duration,
}

/// Runs every operation that a cache of these heads needs, on a few rows, so that its kernels are compiled. They last for
/// the process, and beyond it with [`enable_kernel_cache`](super::enable_kernel_cache). The CPU needs none.
pub fn warm(device: &Device, heads: &[HeadShape]) -> Result<Warmed> {
    let begun = Instant::now();
    let mut operations = 0;
    if device.gpu().is_some() {
        for &head in heads {
            operations += warm_heads(device, head)?;
        }
        device.synchronize()?;
    }
    Ok(Warmed { operations, elapsed: begun.elapsed() })
}

fn warm_heads(device: &Device, HeadShape { head_dim, group }: HeadShape) -> Result<usize> {
    const OP: &str = "warm";
    const TOKENS: usize = 64;
    let shape = RowShape { batch: 1, heads: 1, capacity: TOKENS, head_dim };
    let plain = RowFormat::Plain(DType::F16);
    let affine = |bits, axis| RowFormat::Affine { bits, group: 32, axis, params: DType::F16 };
    let mut pairs = vec![(plain, plain)];
    pairs.extend([2, 3, 4, 8].map(|bits| (affine(bits, Axis::Tokens), affine(bits, Axis::Channels))));
    let exact = plain.allocate(shape, device)?;
    let all = [RowCopy { from: 0, to: 0, rows: TOKENS }];
    let mut operations = 0;
    for (keys, values) in pairs {
        let (mut keys, mut values) = (keys.allocate(shape, device)?, values.allocate(shape, device)?);
        keys.write(OP, &exact, &all)?;
        values.write(OP, &exact, &all)?;
        let segment = Segment { keys, values, spans: vec![Span { len: TOKENS, q_offset: TOKENS as i64 - 1 }] };
        for s_q in [1, 32] {
            let q = Tensor::zeros(DType::F16, &[1, group, s_q, head_dim], device)?;
            let options = Options { scale: 1.0, causal: true, window: 0, out_dtype: DType::F16 };
            attend::attend(OP, &q, std::slice::from_ref(&segment), options)?;
            operations += 1;
        }
        operations += 2;
    }
    Ok(operations)
}
