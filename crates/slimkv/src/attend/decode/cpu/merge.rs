//! Merging the partial results of the splits, in order.

use rayon::prelude::*;

use super::split::partial_len;
use crate::attend::{Attended, Geometry, Options};
use crate::cpu::Isa;
use crate::cpu::floats::Narrow;
use crate::dtype::with_float;
use crate::{DType, Device, FloatElement, Result, Tensor};

/// Merges the partials of every KV head: `first[m]..first[m + 1]` are those of head `m`.
pub(super) fn merge(isa: Isa, partials: &[f32], first: &[usize], g: Geometry, options: Options) -> Result<Attended> {
    let shape = [g.batch, g.q_heads, g.s_q, g.head_dim];
    let mut out = Tensor::zeros(options.out_dtype, &shape, &Device::cpu())?;
    let mut lse = Tensor::zeros(DType::F32, &shape[..3], &Device::cpu())?;
    let rows = g.group() * g.s_q;
    if rows == 0 || g.batch == 0 {
        return Ok(Attended { out, lse });
    }
    with_float!(options.out_dtype, T => {
        let out = out.as_mut_slice::<T>()?.par_chunks_mut(rows * g.head_dim);
        let lse = lse.as_mut_slice::<f32>()?.par_chunks_mut(rows);
        let len = partial_len(rows, g.head_dim);
        out.zip(lse).zip(first.par_windows(2)).for_each(|((out, lse), first)| {
            merge_head(isa, &partials[first[0] * len..first[1] * len], len, g.head_dim, out, lse);
        });
    }, else unreachable!("checked to be a float"));
    Ok(Attended { out, lse })
}

fn merge_head<T: FloatElement>(isa: Isa, partials: &[f32], len: usize, d: usize, out: &mut [T], lse: &mut [f32]) {
    let rows = lse.len();
    let mut row_sum = vec![0.0f32; d];
    for (r, (out, lse)) in out.chunks_exact_mut(d).zip(lse).enumerate() {
        let state = |partial: &[f32]| (partial[rows * d + 2 * r], partial[rows * d + 2 * r + 1]);
        let max = partials.chunks_exact(len).map(|p| state(p).0).fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY {
            *lse = f32::NEG_INFINITY;
            continue;
        }
        let mut sum = 0.0;
        row_sum.fill(0.0);
        for partial in partials.chunks_exact(len) {
            let (m, l) = state(partial);
            if m == f32::NEG_INFINITY {
                continue;
            }
            let factor = (m - max).exp2();
            sum += factor * l;
            row_sum.iter_mut().zip(&partial[r * d..][..d]).for_each(|(o, &x)| *o += factor * x);
        }
        row_sum.iter_mut().for_each(|x| *x /= sum);
        isa.run(Narrow { from: &row_sum, to: out });
        *lse = (max + sum.log2()) * std::f32::consts::LN_2;
    }
}
