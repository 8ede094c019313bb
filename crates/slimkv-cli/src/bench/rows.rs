//! Rows to measure on, filled with random codes at the speed of memory.

use rayon::prelude::*;
use slimkv::attend::Segment;
use slimkv::format::affine::Names;
use slimkv::format::{Affine, Plain, RowFormat, RowShape, Rows, bits};
use slimkv::{DType, Device, Tensor};

use super::shape::Shape;
use crate::failure::{Failure, Outcome};

/// Elements that one task fills.
const CHUNK: usize = 1 << 16;

/// A generator whose i-th number needs no other (SplitMix64), so that threads and devices agree.
pub fn random(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_mul(0xA076_1D64_78BD_642F).wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Values of unit scale, both signs: a random sign and fraction under the exponents of [0.5, 2).
fn f16_bits(r: u64) -> u16 {
    ((r as u16) & 0x83FF) | (14 + ((r >> 32) as u16 & 1)) << 10
}

/// A f16 tensor of random values.
pub fn random_f16(seed: u64, shape: &[usize], device: &Device) -> Outcome<Tensor> {
    fill(DType::F16, seed, shape, device, |seed, i, place: &mut [u16]| {
        for (j, x) in place.iter_mut().enumerate() {
            *x = f16_bits(random(seed, (i + j) as u64));
        }
    })
}

/// Rows of `format` with random contents of unit scale.
pub fn random_rows(format: RowFormat, seed: u64, shape: RowShape, device: &Device) -> Outcome<Rows> {
    let RowShape { batch, heads, capacity, head_dim } = shape;
    match format {
        RowFormat::Plain(DType::F16) => {
            let data = random_f16(seed, &[batch, heads, capacity, head_dim], device)?;
            Ok(Rows::Plain(Plain::new("bench", "rows", data)?))
        }
        RowFormat::Affine { bits: width, group, axis, params } => {
            let words = bits::words_per_row(head_dim, width);
            let codes = random_codes(seed, width, head_dim, &[batch, heads, capacity, words], device)?;
            let [p0, p1] = axis.param_shape(capacity, head_dim, group);
            let [scale, zero] = random_params(seed, width, params, &[batch, heads, p0, p1], device)?;
            Ok(Rows::Affine(Affine::new(NAMES, codes, scale, zero, width, group, axis, head_dim)?))
        }
        other => Err(Failure::argument("bench", "--format", "a format with a random filler", format!("{other:?}"))),
    }
}

const NAMES: Names = Names { op: "bench", codes: "codes", scale: "scale", zero: "zero", bits: "bits" };

/// Random words whose unused bits are zero, as an encoder would leave them.
fn random_codes(seed: u64, width: u32, head_dim: usize, shape: &[usize], device: &Device) -> Outcome<Tensor> {
    let words = shape[3];
    let per_word = (32 / width) as usize;
    let used = |codes: usize| u32::MAX >> (32 - codes as u32 * width);
    let (inner, last) = (used(per_word), used(head_dim - (words - 1) * per_word));
    fill(DType::U32, seed, shape, device, |seed, i, place: &mut [u32]| {
        for (j, word) in place.iter_mut().enumerate() {
            let mask = if (i + j) % words == words - 1 { last } else { inner };
            *word = random(seed, (i + j) as u64) as u32 & mask;
        }
    })
}

/// Scales and zero points that spread the codes over about [-1.7, 1.7], where a standard deviation is 1.
fn random_params(seed: u64, width: u32, dtype: DType, shape: &[usize], device: &Device) -> Outcome<[Tensor; 2]> {
    let levels = ((1u32 << width) - 1) as f32;
    let count: usize = shape.iter().product();
    let half_range = |i: usize| 1.7 * (0.75 + 0.5 * (random(seed ^ 0x5CA1E, i as u64) >> 40) as f32 / (1 << 24) as f32);
    let tensor = |value: &(dyn Fn(usize) -> f32 + Sync)| -> Outcome<Tensor> {
        let values: Vec<f32> = (0..count).into_par_iter().map(value).collect();
        Ok(Tensor::from_vec(values, shape)?.to_float(dtype)?.to_device(device)?)
    };
    Ok([tensor(&|i| 2.0 * half_range(i) / levels)?, tensor(&|i| -half_range(i))?])
}

/// A tensor filled in parallel; `write` gets the index of the first element of its part.
fn fill<T: bytemuck::Pod + Send + Sync>(
    dtype: DType,
    seed: u64,
    shape: &[usize],
    device: &Device,
    write: impl Fn(u64, usize, &mut [T]) + Sync,
) -> Outcome<Tensor> {
    let count: usize = shape.iter().product();
    let mut values = vec![<T as bytemuck::Zeroable>::zeroed(); count];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(i, place)| write(seed, i * CHUNK, place));
    Ok(Tensor::from_bytes(dtype, bytemuck::cast_slice(&values), shape, device)?)
}

/// The part of a case that the oracle is asked about: KV head 0 of sequence 0, with its query heads, on the host.
pub struct Part {
    /// `[1, group, Sq, D]`.
    pub q: Tensor,
    /// One segment over the rows of that head.
    pub segment: Segment,
}

impl Part {
    /// Cuts the part out. It lies at the front of every buffer.
    pub fn of(shape: &Shape, q: &Tensor, segment: &Segment) -> Outcome<Self> {
        let mut spans = segment.spans.clone();
        spans.truncate(1);
        Ok(Part {
            q: front(q, &[1, shape.group(), shape.sq, shape.d])?,
            segment: Segment { keys: first_head(&segment.keys)?, values: first_head(&segment.values)?, spans },
        })
    }
}

/// The elements at the front of `tensor`, as a host tensor of this shape.
pub fn front(tensor: &Tensor, shape: &[usize]) -> Outcome<Tensor> {
    let bytes = tensor.to_bytes()?;
    let count: usize = shape.iter().product();
    Ok(Tensor::from_bytes(tensor.dtype(), &bytes[..count * tensor.dtype().size()], shape, &Device::cpu())?)
}

/// The rows of the first head of the first sequence, on the host.
pub fn first_head(rows: &Rows) -> Outcome<Rows> {
    let cut = |tensor: &Tensor| {
        let s = tensor.shape();
        front(tensor, &[1, 1, s[2], s[3]])
    };
    match rows {
        Rows::Plain(rows) => Ok(Rows::Plain(Plain::new("bench", "rows", cut(rows.data())?)?)),
        Rows::Affine(rows) => {
            let (codes, scale, zero) = (cut(rows.codes())?, cut(rows.scale())?, cut(rows.zero())?);
            let (bits, group, axis, d) = (rows.bits(), rows.group(), rows.axis(), rows.shape().head_dim);
            Ok(Rows::Affine(Affine::new(NAMES, codes, scale, zero, bits, group, axis, d)?))
        }
        _ => Err(Failure::argument("bench", "--format", "a format that the oracle reads", "another one")),
    }
}

#[cfg(test)]
mod tests {
    use slimkv::format::Axis;

    use super::*;

    #[test]
    fn unused_bits_are_zero_and_values_have_unit_scale() {
        let shape = RowShape { batch: 1, heads: 2, capacity: 40, head_dim: 64 };
        for width in [1, 2, 3, 4, 8] {
            let format = RowFormat::Affine { bits: width, group: 32, axis: Axis::Tokens, params: DType::F16 };
            let rows = random_rows(format, 7, shape, &Device::cpu()).unwrap();
            let Rows::Affine(affine) = &rows else { panic!("an affine format") };
            let words = affine.codes().to_vec::<u32>().unwrap();
            let per_word = 32 / width;
            assert!(words.iter().all(|w| w.checked_shr(per_word * width).unwrap_or(0) == 0));
            let values = rows.decode_oracle().unwrap();
            let power = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
            assert!((0.5..4.0).contains(&power), "{width} bits: {power}");
        }
    }
}
