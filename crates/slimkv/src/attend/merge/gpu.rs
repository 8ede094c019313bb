//! Merging on the GPU: one unit an element of the output.

use cubecl::prelude::*;

use crate::attend::Attended;
use crate::format::gpu::bound;
use crate::gpu::float::{LOWEST, from_bf16, from_f16, stored};
use crate::gpu::{UNITS, grid, with_client, word_array};
use crate::{DType, Result, Tensor};

/// Merges two partial results; shapes and dtypes are checked.
pub(crate) fn merge(
    op: &'static str,
    out_a: &Tensor,
    lse_a: &Tensor,
    out_b: &Tensor,
    lse_b: &Tensor,
) -> Result<Attended> {
    let gpu = out_a.gpu_buffer().expect("the caller dispatched on the device").gpu();
    let dtype = out_a.dtype();
    let out = Tensor::from_gpu_buffer(dtype, out_a.shape(), gpu.empty(op, out_a.byte_len())?);
    let lse = Tensor::from_gpu_buffer(DType::F32, lse_a.shape(), gpu.empty(op, lse_a.byte_len())?);
    let (rows, head_dim) = (lse.len(), out.shape().last().copied().unwrap_or(0));
    // One more unit a row for the log-sum-exp.
    let units = rows * (head_dim + 1);
    if units > 0 {
        let words = bound(out_a).1;
        with_client!(gpu, client => {
            let launch = match dtype.size() {
                2 => merge_two::launch_unchecked::<u16, _>,
                _ => merge_two::launch_unchecked::<u32, _>,
            };
            // SAFETY: a unit reads and writes one element of one of `rows` rows.
            unsafe {
                launch(
                    client,
                    grid(units.div_ceil(UNITS as usize)),
                    CubeDim::new_1d(UNITS),
                    word_array(&bound(out_a).0, words * 4 / dtype.size()),
                    word_array(&bound(lse_a).0, rows),
                    word_array(&bound(out_b).0, words * 4 / dtype.size()),
                    word_array(&bound(lse_b).0, rows),
                    word_array(&bound(&out).0, words * 4 / dtype.size()),
                    word_array(&bound(&lse).0, rows),
                    units as u32,
                    head_dim as u32,
                    f32::NEG_INFINITY,
                    dtype,
                );
            }
        });
    }
    Ok(Attended { out, lse })
}

#[cube]
fn value<O: Numeric>(element: O, #[comptime] dtype: DType) -> f32 {
    let bits = u32::cast_from(element);
    match comptime!(dtype) {
        DType::F16 => from_f16(bits),
        DType::BF16 => from_bf16(bits),
        _ => f32::reinterpret(bits),
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn merge_two<O: Numeric>(
    out_a: &Array<O>,
    lse_a: &Array<f32>,
    out_b: &Array<O>,
    lse_b: &Array<f32>,
    out: &mut Array<O>,
    lse: &mut Array<f32>,
    units: u32,
    head_dim: u32,
    no_token: f32,
    #[comptime] dtype: DType,
) {
    let unit = ABSOLUTE_POS as u32;
    if unit < units {
        let row = unit / (head_dim + 1u32);
        let channel = unit % (head_dim + 1u32);
        let a = lse_a[row as usize];
        let b = lse_b[row as usize];
        // Far below every score: minus infinity, told apart without relying on infinities.
        let empty_a = a < f32::new(LOWEST);
        let empty_b = b < f32::new(LOWEST);
        let most = max(a, b);
        let weight_a = f32::exp(a - most);
        let weight_b = f32::exp(b - most);
        let sum = weight_a + weight_b;
        if channel == head_dim {
            let one = select(empty_a, b, a);
            let merged = select(empty_a || empty_b, one, most + f32::ln(sum));
            lse[row as usize] = select(empty_a && empty_b, no_token, merged);
        } else {
            let at = (row * head_dim + channel) as usize;
            let mut merged = select(empty_a, out_b[at], out_a[at]);
            if !empty_a && !empty_b {
                let x = (weight_a * value::<O>(out_a[at], dtype) + weight_b * value::<O>(out_b[at], dtype)) / sum;
                merged = stored::<O>(x, dtype);
            }
            if empty_a && empty_b {
                merged = O::from_int(0);
            }
            out[at] = merged;
        }
    }
}
