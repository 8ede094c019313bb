//! Quantising arrays of any leading shape: the checks, and the choice of the device.

use super::cpu;
#[cfg(feature = "gpu")]
use super::gpu;
use super::{Axis, bits, on_device};
use crate::{DType, Error, Result, Tensor};

/// Quantises `x` f16, bf16 or f32 `[..., S, D]` in groups along `axis` and returns codes, scale and zero point.
///
/// Codes are u32 `[..., S, ceil(D / EPW)]` when `packed`, else u8 `[..., S, D]`; scale and zero are `param_dtype` (f16 or
/// f32) `[..., S / g, D]` for [`Axis::Tokens`] and `[..., S, D / g]` for [`Axis::Channels`], rounded up. Codes are computed
/// against the parameters as stored. `eps` is the smallest scale.
#[allow(clippy::too_many_arguments)]
pub fn quantize(
    op: &'static str,
    x: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    eps: f32,
    packed: bool,
    param_dtype: DType,
) -> Result<(Tensor, Tensor, Tensor)> {
    check_input(op, x, group, eps)?;
    bits::check_width(op, "bits", bits)?;
    if !matches!(param_dtype, DType::F16 | DType::F32) {
        return Err(Error::dtype(op, "param_dtype", "f16 or f32", param_dtype));
    }
    match x.device().gpu() {
        None => cpu::quantize(op, x, axis, group, bits, eps, packed, param_dtype),
        #[cfg(feature = "gpu")]
        Some(_) => gpu::quantize(op, x, axis, group, bits, eps, packed, param_dtype),
        #[cfg(not(feature = "gpu"))]
        Some(never) => match *never {},
    }
}

/// Decodes `codes` to f16 `[..., S, D]`: `code * scale + zero`, product and sum rounded separately in f32.
///
/// `codes` is u8 `[..., S, D]` or packed u32 `[..., S, ceil(D / EPW)]` with `head_dim` = D; scale and zero are f16 or f32 in
/// the shape that [`quantize`] gives them.
#[allow(clippy::too_many_arguments)]
pub fn dequantize(
    op: &'static str,
    codes: &Tensor,
    scale: &Tensor,
    zero: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    head_dim: usize,
) -> Result<Tensor> {
    if !matches!(codes.dtype(), DType::U8 | DType::U32) {
        return Err(Error::dtype(op, "codes", "u8 or packed u32", codes.dtype()));
    }
    let &[ref leading @ .., tokens, width] = codes.shape() else {
        return Err(Error::shape(op, "codes", "[..., S, W]", codes.shape()));
    };
    check_group(op, group)?;
    bits::check_width(op, "bits", bits)?;
    let expected_width = if codes.dtype() == DType::U32 { bits::words_per_row(head_dim, bits) } else { head_dim };
    if width != expected_width {
        let expected = format!("[..., S, {expected_width}] for D = {head_dim} at {bits} bits");
        return Err(Error::shape(op, "codes", expected, codes.shape()));
    }
    let expected: Vec<usize> = leading.iter().copied().chain(axis.param_shape(tokens, head_dim, group)).collect();
    for (arg, tensor) in [("scale", scale), ("zero", zero)] {
        if tensor.shape() != expected {
            return Err(Error::shape(op, arg, format!("{expected:?}"), tensor.shape()));
        }
        if !matches!(tensor.dtype(), DType::F16 | DType::F32) || tensor.dtype() != scale.dtype() {
            return Err(Error::dtype(op, arg, "f16 or f32, the same for scale and zero", tensor.dtype()));
        }
        on_device(op, arg, tensor, &codes.device())?;
    }
    match codes.device().gpu() {
        None => cpu::dequantize(op, codes, scale, zero, axis, group, bits, head_dim),
        #[cfg(feature = "gpu")]
        Some(_) => gpu::dequantize(op, codes, scale, zero, axis, group, bits, head_dim),
        #[cfg(not(feature = "gpu"))]
        Some(never) => match *never {},
    }
}

/// What `x` `[..., S, D]` becomes when it is quantised to `levels` steps with f32 parameters and decoded again; shape and
/// dtype of `x`.
///
/// The extremes run over the finite elements of a group; NaN and -inf take code 0, +inf takes `levels`, and a group
/// without a finite element decodes to 0.
pub fn round_trip(op: &'static str, x: &Tensor, axis: Axis, group: usize, levels: u32, eps: f32) -> Result<Tensor> {
    check_input(op, x, group, eps)?;
    if !(1..=255).contains(&levels) {
        return Err(Error::value(op, "levels", "1 to 255", levels));
    }
    match x.device().gpu() {
        None => cpu::round_trip(op, x, axis, group, levels, eps),
        #[cfg(feature = "gpu")]
        Some(_) => gpu::round_trip(op, x, axis, group, levels, eps),
        #[cfg(not(feature = "gpu"))]
        Some(never) => match *never {},
    }
}

fn check_input(op: &'static str, x: &Tensor, group: usize, eps: f32) -> Result<()> {
    if x.shape().len() < 2 {
        return Err(Error::shape(op, "x", "[..., S, D]", x.shape()));
    }
    if !x.dtype().is_float() {
        return Err(Error::dtype(op, "x", "f16, bf16 or f32", x.dtype()));
    }
    if !(eps.is_finite() && eps >= 0.0) {
        return Err(Error::value(op, "eps", "a finite number, at least 0", eps));
    }
    check_group(op, group)
}

fn check_group(op: &'static str, group: usize) -> Result<()> {
    if group == 0 { Err(Error::value(op, "group_size", "at least 1", group)) } else { Ok(()) }
}
