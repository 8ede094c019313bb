//! A format as a value: what to allocate, and how large it is.

use super::{Affine, Axis, Plain, RowShape, Rows, bits};
use crate::{DType, Device, Error, Result, Tensor};

/// A format with its parameters, before any row exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RowFormat {
    /// Uncompressed floats of one dtype.
    Plain(DType),
    /// Group-affine codes, packed.
    Affine {
        /// Bits of a code: 1, 2, 3, 4 or 8.
        bits: u32,
        /// Elements that share a scale and a zero point.
        group: usize,
        /// Which elements share them: tokens for keys, channels for values.
        axis: Axis,
        /// The dtype of scale and zero point, f16 or f32.
        params: DType,
    },
}

impl RowFormat {
    /// Empty rows on `device`.
    pub fn allocate(&self, shape: RowShape, device: &Device) -> Result<Rows> {
        const OP: &str = "RowFormat::allocate";
        let RowShape { batch, heads, capacity, head_dim } = shape;
        match *self {
            RowFormat::Plain(dtype) => {
                let data = Tensor::zeros(dtype, &[batch, heads, capacity, head_dim], device)?;
                Ok(Rows::Plain(Plain::new(OP, "dtype", data)?))
            }
            RowFormat::Affine { bits, group, axis, params } => {
                bits::check_width(OP, "bits", bits)?;
                if group == 0 {
                    return Err(Error::value(OP, "group", "at least 1", group));
                }
                let words = bits::words_per_row(head_dim, bits);
                let [p0, p1] = axis.param_shape(capacity, head_dim, group);
                let codes = Tensor::zeros(DType::U32, &[batch, heads, capacity, words], device)?;
                let scale = Tensor::zeros(params, &[batch, heads, p0, p1], device)?;
                let zero = Tensor::zeros(params, &[batch, heads, p0, p1], device)?;
                let names =
                    super::affine::Names { op: OP, codes: "codes", scale: "params", zero: "params", bits: "bits" };
                Ok(Rows::Affine(Affine::new(names, codes, scale, zero, bits, group, axis, head_dim)?))
            }
        }
    }

    /// Bytes that [`RowFormat::allocate`] would take.
    pub fn byte_len(&self, shape: RowShape) -> usize {
        let RowShape { batch, heads, capacity, head_dim } = shape;
        let per_head = match *self {
            RowFormat::Plain(dtype) => capacity * head_dim * dtype.size(),
            RowFormat::Affine { bits, group, axis, params } => {
                let [p0, p1] = axis.param_shape(capacity, head_dim, group);
                capacity * bits::words_per_row(head_dim, bits) * 4 + 2 * p0 * p1 * params.size()
            }
        };
        batch * heads * per_head
    }

    /// Bits of one element with its share of the parameters and of the padding, over a long run of tokens.
    pub fn bits_per_value(&self, head_dim: usize) -> f64 {
        let capacity = match *self {
            RowFormat::Plain(_) => 1,
            RowFormat::Affine { group, .. } => group,
        };
        let shape = RowShape { batch: 1, heads: 1, capacity, head_dim };
        8.0 * self.byte_len(shape) as f64 / (capacity * head_dim) as f64
    }
}
