//! Group-affine rows on the CPU.

mod decode;
pub(crate) mod encode;
mod halves;
#[cfg(target_arch = "x86_64")]
pub(crate) mod integer;

use half::f16;
use rayon::prelude::*;

pub(crate) use decode::{Codes, Tiles};
use encode::{CodesMut, Destination, Scheme};

use super::{Affine, Axis, bits};
use crate::attend::decode::cpu::{KeyPlan, ValuePlan};
use crate::cpu::Isa;
use crate::cpu::floats::{Floats, Narrow};
use crate::dtype::with_float;
use crate::format::RowCopy;
use crate::format::decode_cpu::tile_stride;
use crate::{DType, Device, FloatElement, Result, Tensor};

/// Tokens that are decoded at a time.
const TILE: usize = 64;

/// Matrices, tokens and channels of `[..., S, D]`.
fn matrices(shape: &[usize]) -> (usize, usize, usize) {
    let (leading, last) = shape.split_at(shape.len() - 2);
    (leading.iter().product(), last[0], last[1])
}

fn with_last_axes(shape: &[usize], last: [usize; 2]) -> Vec<usize> {
    shape[..shape.len() - 2].iter().copied().chain(last).collect()
}

/// The way of these keys that is faster than decoding them to f32, if there is one.
pub(crate) fn key_plan<'a>(isa: Isa, rows: &'a Affine) -> Result<Option<Box<dyn KeyPlan + 'a>>> {
    let rows = Tiles::of(rows)?;
    #[cfg(target_arch = "x86_64")]
    if let Some(plan) = integer::KeyPlan::new(isa, rows) {
        return Ok(Some(Box::new(plan)));
    }
    Ok(halves::KeyPlan::new(isa, rows).map(|plan| Box::new(plan) as Box<dyn KeyPlan>))
}

/// The way of these values that is faster than decoding them to f32, if there is one.
pub(crate) fn value_plan<'a>(isa: Isa, rows: &'a Affine) -> Result<Option<Box<dyn ValuePlan + 'a>>> {
    let rows = Tiles::of(rows)?;
    #[cfg(target_arch = "x86_64")]
    if let Some(plan) = integer::ValuePlan::new(isa, rows) {
        return Ok(Some(Box::new(plan)));
    }
    Ok(halves::ValuePlan::new(isa, rows).map(|plan| Box::new(plan) as Box<dyn ValuePlan>))
}

/// Quantises all rows; the arguments are checked.
#[allow(clippy::too_many_arguments)]
pub(super) fn quantize(
    _op: &'static str,
    x: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    eps: f32,
    packed: bool,
    param_dtype: DType,
) -> Result<(Tensor, Tensor, Tensor)> {
    let isa = crate::cpu::isa()?;
    let (count, tokens, channels) = matrices(x.shape());
    let scheme = Scheme { axis, group, levels: (1 << bits) - 1, eps, channels };
    let width = if packed { bits::words_per_row(channels, bits) } else { channels };
    let code_dtype = if packed { DType::U32 } else { DType::U8 };
    let mut codes = Tensor::zeros(code_dtype, &with_last_axes(x.shape(), [tokens, width]), &Device::cpu())?;
    let params = with_last_axes(x.shape(), axis.param_shape(tokens, channels, group));
    let mut scale = Tensor::zeros(param_dtype, &params, &Device::cpu())?;
    let mut zero = Tensor::zeros(param_dtype, &params, &Device::cpu())?;
    with_float!(param_dtype, P => {
        let to = Destination {
            codes: codes_mut(&mut codes, bits)?,
            scale: scale.as_mut_slice::<P>()?,
            zero: zero.as_mut_slice::<P>()?,
            capacity: tokens,
        };
        let all = std::iter::repeat_n(RowCopy { from: 0, to: 0, rows: tokens }, count);
        encode::encode(isa, scheme, Floats::of(x)?, tokens, to, all);
    }, else unreachable!("checked to be a float"));
    Ok((codes, scale, zero))
}

/// The codes of a tensor, one to a byte or packed, to be written.
pub(crate) fn codes_mut(codes: &mut Tensor, bits: u32) -> Result<CodesMut<'_>> {
    Ok(match codes.dtype() {
        DType::U32 => CodesMut::Words(codes.as_mut_slice()?, bits),
        _ => CodesMut::Bytes(codes.as_mut_slice()?),
    })
}

/// Decodes all rows to f16; the arguments are checked.
#[allow(clippy::too_many_arguments)]
pub(super) fn dequantize(
    _op: &'static str,
    codes: &Tensor,
    scale: &Tensor,
    zero: &Tensor,
    axis: Axis,
    group: usize,
    bits: u32,
    head_dim: usize,
) -> Result<Tensor> {
    let isa = crate::cpu::isa()?;
    let (_, tokens, width) = matrices(codes.shape());
    let mut out = Tensor::zeros(DType::F16, &with_last_axes(codes.shape(), [tokens, head_dim]), &Device::cpu())?;
    let rows = Tiles {
        codes: if codes.dtype() == DType::U32 {
            Codes::Words(codes.as_slice()?)
        } else {
            Codes::Bytes(codes.as_slice()?)
        },
        width,
        scale: Floats::of(scale)?,
        zero: Floats::of(zero)?,
        bits,
        group,
        axis,
        capacity: tokens,
        head_dim,
        params: axis.param_shape(tokens, head_dim, group),
    };
    if !out.is_empty() {
        let matrices = out.as_mut_slice::<f16>()?.par_chunks_mut(tokens * head_dim).enumerate();
        matrices.for_each(|(matrix, out)| {
            let tiles = out.par_chunks_mut(TILE * head_dim).enumerate();
            tiles.for_each(|(i, out)| decode_to(isa, &rows, matrix, i * TILE, out));
        });
    }
    Ok(out)
}

/// Decodes as many rows as `out` holds, from row `from` on.
pub(crate) fn decode_to<T: FloatElement>(isa: Isa, rows: &Tiles, matrix: usize, from: usize, out: &mut [T]) {
    let (d, stride) = (rows.head_dim, tile_stride(rows.head_dim));
    let count = out.len() / d;
    let mut tile = vec![0.0; count * stride];
    rows.decode(isa, matrix, from, count, &mut tile);
    if d == stride {
        return isa.run(Narrow { from: &tile, to: out });
    }
    for (row, out) in tile.chunks_exact(stride).zip(out.chunks_exact_mut(d)) {
        isa.run(Narrow { from: &row[..d], to: out });
    }
}

/// Quantises with f32 parameters and decodes again; the arguments are checked.
pub(super) fn round_trip(
    _op: &'static str,
    x: &Tensor,
    axis: Axis,
    group: usize,
    levels: u32,
    eps: f32,
) -> Result<Tensor> {
    let isa = crate::cpu::isa()?;
    let (_, tokens, channels) = matrices(x.shape());
    let mut out = Tensor::zeros(x.dtype(), x.shape(), &Device::cpu())?;
    if out.is_empty() {
        return Ok(out);
    }
    let source = Floats::of(x)?;
    let scheme = Scheme { axis, group, levels, eps, channels };
    // Tokens of a task: whole groups where tokens share one.
    let step = if axis == Axis::Tokens { group.min(tokens) } else { TILE };
    with_float!(x.dtype(), T => {
        let matrices = out.as_mut_slice::<T>()?.par_chunks_mut(tokens * channels).enumerate();
        matrices.for_each(|(matrix, out)| {
            out.par_chunks_mut(step * channels).enumerate().for_each(|(i, out)| {
                let rows = out.len() / channels;
                let params = axis.param_shape(rows, channels, group);
                let mut codes = vec![0u8; rows * channels];
                let [mut scale, mut zero] = [(); 2].map(|()| vec![0.0f32; params[0] * params[1]]);
                let to = Destination {
                    codes: CodesMut::Bytes(&mut codes),
                    scale: &mut scale,
                    zero: &mut zero,
                    capacity: rows,
                };
                let part = source.part((matrix * tokens + i * step) * channels, rows * channels);
                encode::encode(isa, scheme, part, rows, to, std::iter::once(RowCopy { from: 0, to: 0, rows }));
                let rows = Tiles {
                    codes: Codes::Bytes(&codes),
                    width: channels,
                    scale: Floats::F32(&scale),
                    zero: Floats::F32(&zero),
                    bits: 8,
                    group,
                    axis,
                    capacity: rows,
                    head_dim: channels,
                    params,
                };
                decode_to(isa, &rows, 0, 0, out);
            });
        });
    }, else unreachable!("checked to be a float"));
    Ok(out)
}

/// Asks for `len` bytes from `from` on, which need not exist, into the second-level cache: the first has too few places for
/// lines on their way from memory.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(from: *const u8, len: usize) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    for line in (0..len).step_by(64) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line).cast()) }
    }
}

/// Sixteen parameters from `at` on; zeros past the end.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn load_params(params: Floats, at: usize) -> std::arch::x86_64::__m512 {
    use std::arch::x86_64::*;
    let left = params.len().saturating_sub(at).min(16);
    let mask = ((1u32 << left) - 1) as u16;
    // SAFETY: only elements inside the slice are read.
    unsafe {
        match params {
            Floats::F16(x) => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x.as_ptr().wrapping_add(at).cast())),
            Floats::BF16(x) => {
                let bits = _mm256_maskz_loadu_epi16(mask, x.as_ptr().wrapping_add(at).cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
            }
            Floats::F32(x) => _mm512_maskz_loadu_ps(mask, x.as_ptr().wrapping_add(at)),
        }
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
