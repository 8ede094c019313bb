//! Quantising and decoding arrays of any leading shape on the GPU.

use super::super::{Affine, Axis, Names, bits};
use super::{AffineRows, Quantize, Target};
use crate::format::gpu::{Layout, Side, bound};
use crate::format::write_gpu::{Destination, Work, check_extent, decode};
use crate::format::{RowShape, Rows};
use crate::gpu::{Gpu, with_client};
use crate::{DType, Result, Tensor};

fn gpu_of(x: &Tensor) -> Gpu {
    x.gpu_buffer().expect("the caller dispatched on the device").gpu().clone()
}

/// Matrices, tokens and channels of `[..., S, D]`.
fn matrix(shape: &[usize]) -> (usize, usize, usize) {
    let (leading, last) = shape.split_at(shape.len() - 2);
    (leading.iter().product(), last[0], last[1])
}

fn with_last_axes(shape: &[usize], last: [usize; 2]) -> Vec<usize> {
    shape[..shape.len() - 2].iter().copied().chain(last).collect()
}

fn uninitialised(op: &'static str, gpu: &Gpu, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let buffer = gpu.empty(op, shape.iter().product::<usize>() * dtype.size())?;
    Ok(Tensor::from_gpu_buffer(dtype, shape, buffer))
}

/// What `quantize` and `round_trip` share.
#[allow(clippy::too_many_arguments)]
fn encode(
    op: &'static str,
    x: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    levels: u32,
    eps: f32,
    packed: bool,
    param_dtype: DType,
) -> Result<(Tensor, Tensor, Tensor)> {
    let gpu = gpu_of(x);
    let (matrices, tokens, channels) = matrix(x.shape());
    check_extent(op, &gpu, RowShape { batch: 1, heads: matrices, capacity: tokens, head_dim: channels })?;
    let width = if packed { bits::words_per_row(channels, bits) } else { channels };
    let dtype = if packed { DType::U32 } else { DType::U8 };
    let codes = uninitialised(op, &gpu, dtype, &with_last_axes(x.shape(), [tokens, width]))?;
    let params = with_last_axes(x.shape(), axis.param_shape(tokens, channels, group));
    let scale = uninitialised(op, &gpu, param_dtype, &params)?;
    let zero = uninitialised(op, &gpu, param_dtype, &params)?;
    if !x.is_empty() {
        let (handle, words) = bound(x);
        let source = Side {
            codes: handle.clone(),
            code_words: words,
            params: [handle.clone(), handle],
            param_words: words,
            layout: Layout::plain(channels, x.dtype()),
            capacity: tokens as u32,
        };
        let target = Target::new(&codes, &scale, &zero, tokens);
        with_client!(gpu, client => {
            let work = Work::all(client, matrices, tokens);
            Quantize { bits, group, axis, levels, eps }.launch(client, &work, &source, &target);
        });
    }
    Ok((codes, scale, zero))
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn quantize(
    op: &'static str,
    x: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    eps: f32,
    packed: bool,
    param_dtype: DType,
) -> Result<(Tensor, Tensor, Tensor)> {
    encode(op, x, axis, group, bits, (1 << bits) - 1, eps, packed, param_dtype)
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn dequantize(
    op: &'static str,
    codes: &Tensor,
    scale: &Tensor,
    zero: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    head_dim: usize,
) -> Result<Tensor> {
    decode_to(op, codes, scale, zero, axis, group, bits, head_dim, DType::F16)
}

#[allow(clippy::too_many_arguments)]
fn decode_to(
    op: &'static str,
    codes: &Tensor,
    scale: &Tensor,
    zero: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    head_dim: usize,
    dtype: DType,
) -> Result<Tensor> {
    let gpu = gpu_of(codes);
    let (matrices, tokens, width) = matrix(codes.shape());
    let shape = with_last_axes(codes.shape(), [tokens, head_dim]);
    check_extent(op, &gpu, RowShape { batch: 1, heads: matrices, capacity: tokens, head_dim })?;
    let out = uninitialised(op, &gpu, dtype, &shape)?;
    if !out.is_empty() {
        let [p0, p1] = axis.param_shape(tokens, head_dim, group);
        let names = Names { op, codes: "codes", scale: "scale", zero: "zero", bits: "bits" };
        let rows = Rows::Affine(Affine::new(
            names,
            codes.reshape(&[1, matrices, tokens, width])?,
            scale.reshape(&[1, matrices, p0, p1])?,
            zero.reshape(&[1, matrices, p0, p1])?,
            bits,
            group,
            axis,
            head_dim,
        )?);
        let (handle, words) = bound(&out);
        let target = Destination { handle, words, capacity: tokens, dtype };
        with_client!(gpu, client => {
            let work = Work::all(client, matrices, tokens);
            decode::<AffineRows, _>(client, &work, &rows.gpu_side(), &target);
        });
    }
    Ok(out)
}

pub(crate) fn round_trip(
    op: &'static str,
    x: &Tensor,
    axis: Axis,
    group: usize,
    levels: u32,
    eps: f32,
) -> Result<Tensor> {
    let (codes, scale, zero) = encode(op, x, axis, group, 8, levels, eps, false, DType::F32)?;
    decode_to(op, &codes, &scale, &zero, axis, group, 8, x.shape()[x.shape().len() - 1], x.dtype())
}
