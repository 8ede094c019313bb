//! Merging attention over disjoint sets of tokens.

pub(crate) mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;

use super::Attended;
use crate::format::on_device;
use crate::{DType, Error, Result, Tensor};

/// Attention over the union of two disjoint sets of tokens, from the results over each.
///
/// `out_a`, `out_b` are f16, bf16 or f32 `[..., D]`, both the same; `lse_a`, `lse_b` f32 `[...]`. With
/// `m = max(lse_a, lse_b)` and `w = exp(lse - m)` the result is `(w_a out_a + w_b out_b) / (w_a + w_b)` and
/// `m + ln(w_a + w_b)`. Where one side saw no token (`lse = -inf`) the other is returned bit for bit; where both did, zeros
/// and `-inf`.
pub fn merge(op: &'static str, out_a: &Tensor, lse_a: &Tensor, out_b: &Tensor, lse_b: &Tensor) -> Result<Attended> {
    if !out_a.dtype().is_float() {
        return Err(Error::dtype(op, "out_a", "f16, bf16 or f32", out_a.dtype()));
    }
    let Some((_, rows)) = out_a.shape().split_last() else {
        return Err(Error::shape(op, "out_a", "[..., D]", out_a.shape()));
    };
    if out_b.dtype() != out_a.dtype() {
        return Err(Error::dtype(op, "out_b", out_a.dtype().name(), out_b.dtype()));
    }
    if out_b.shape() != out_a.shape() {
        return Err(Error::shape(op, "out_b", format!("{:?}", out_a.shape()), out_b.shape()));
    }
    for (arg, lse) in [("lse_a", lse_a), ("lse_b", lse_b)] {
        if lse.dtype() != DType::F32 {
            return Err(Error::dtype(op, arg, "f32", lse.dtype()));
        }
        if lse.shape() != rows {
            return Err(Error::shape(op, arg, format!("{rows:?}"), lse.shape()));
        }
    }
    for (arg, tensor) in [("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)] {
        on_device(op, arg, tensor, &out_a.device())?;
    }
    match out_a.device().gpu() {
        None => cpu::merge(out_a, lse_a, out_b, lse_b),
        #[cfg(feature = "gpu")]
        Some(_) => gpu::merge(op, out_a, lse_a, out_b, lse_b),
        #[cfg(not(feature = "gpu"))]
        Some(never) => match *never {},
    }
}
