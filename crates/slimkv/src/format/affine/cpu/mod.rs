//! Group-affine rows on the CPU.

mod decode;
#[cfg(target_arch = "x86_64")]
pub(crate) mod integer;

pub(crate) use decode::Tiles;

use super::{Affine, Axis, Names, bits, oracle};
use crate::{DType, Result, Tensor};

fn matrix(shape: &[usize]) -> (usize, usize, usize) {
    let (leading, last) = shape.split_at(shape.len() - 2);
    (leading.iter().product(), last[0], last[1])
}

fn with_last_axes(shape: &[usize], last: [usize; 2]) -> Vec<usize> {
    shape[..shape.len() - 2].iter().copied().chain(last).collect()
}

#[allow(clippy::too_many_arguments)]
pub(super) fn quantize(
    op: &'static str,
    x: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    eps: f32,
    packed: bool,
    param_dtype: DType,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (matrices, tokens, channels) = matrix(x.shape());
    let values = x.to_f32_vec()?;
    let (mut codes, mut scale, mut zero) = (Vec::new(), Vec::new(), Vec::new());
    for m in 0..matrices {
        let x = &values[m * tokens * channels..][..tokens * channels];
        let q = oracle::quantize(x, tokens, channels, axis, group, (1 << bits) - 1, eps, param_dtype);
        codes.extend(q.codes);
        scale.extend(q.params.iter().map(|p| p.scale));
        zero.extend(q.params.iter().map(|p| p.zero));
    }
    let params = with_last_axes(x.shape(), axis.param_shape(tokens, channels, group));
    let codes = Tensor::from_vec(codes, x.shape())?;
    let codes = if packed { bits::pack(op, &codes, bits)? } else { codes };
    Ok((
        codes,
        Tensor::from_vec(scale, &params)?.to_float(param_dtype)?,
        Tensor::from_vec(zero, &params)?.to_float(param_dtype)?,
    ))
}

#[allow(clippy::too_many_arguments)]
pub(super) fn dequantize(
    op: &'static str,
    codes: &Tensor,
    scale: &Tensor,
    zero: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    head_dim: usize,
) -> Result<Tensor> {
    let (matrices, tokens, width) = matrix(codes.shape());
    let [p0, p1] = axis.param_shape(tokens, head_dim, group);
    let names = Names { op, codes: "codes", scale: "scale", zero: "zero", bits: "bits" };
    let rows = Affine::new(
        names,
        codes.reshape(&[1, matrices, tokens, width])?,
        scale.reshape(&[1, matrices, p0, p1])?,
        zero.reshape(&[1, matrices, p0, p1])?,
        bits,
        group,
        axis,
        head_dim,
    )?;
    let shape = with_last_axes(codes.shape(), [tokens, head_dim]);
    Tensor::from_vec(oracle::decode(&rows)?, &shape)?.to_float(DType::F16)
}

pub(super) fn round_trip(
    _op: &'static str,
    x: &Tensor,
    axis: Axis,
    group: usize,
    levels: u32,
    eps: f32,
) -> Result<Tensor> {
    let (matrices, tokens, channels) = matrix(x.shape());
    let values = x.to_f32_vec()?;
    let mut out = Vec::with_capacity(values.len());
    let [_, columns] = axis.param_shape(tokens, channels, group);
    for m in 0..matrices {
        let x = &values[m * tokens * channels..][..tokens * channels];
        let q = oracle::quantize(x, tokens, channels, axis, group, levels, eps, DType::F32);
        for (i, &code) in q.codes.iter().enumerate() {
            let (t, c) = (i / channels, i % channels);
            let p = match axis {
                Axis::Tokens => q.params[t / group * columns + c],
                Axis::Channels => q.params[t * columns + c / group],
            };
            out.push(p.decode(code));
        }
    }
    Tensor::from_vec(out, x.shape())?.to_float(x.dtype())
}

/// Asks for `len` bytes from `from` on, which need not exist.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(from: *const u8, len: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    for line in (0..len).step_by(64) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) }
    }
}

/// Splits 16-bit integers of magnitude at most 32512 into two planes of signed bytes, `x = 256 * high + low`; the bytes of
/// the two registers alternate by 64 bits.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn planes(x: [std::arch::x86_64::__m512i; 2]) -> (std::arch::x86_64::__m512i, std::arch::x86_64::__m512i) {
    use std::arch::x86_64::*;
    let high = x.map(
        #[inline(always)]
        |x| _mm512_srai_epi16::<8>(_mm512_add_epi16(x, _mm512_set1_epi16(128))),
    );
    let low = x.map(
        #[inline(always)]
        |x| _mm512_and_si512(x, _mm512_set1_epi16(255)),
    );
    (_mm512_packs_epi16(high[0], high[1]), _mm512_packus_epi16(low[0], low[1]))
}
