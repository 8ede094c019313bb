//! How rows of keys and values are stored.
//!
//! A format only knows how to turn its packed rows into scores (keys) or into a weighted sum (values). Everything else -
//! blocks, splits, causality, windows, softmax, merging, grouped queries - belongs to the skeletons in
//! [`attend`](crate::attend), which never look inside a row. Any key format goes with any value format.

pub mod affine;
pub mod bits;
pub(crate) mod decode_cpu;
#[cfg(feature = "gpu")]
pub(crate) mod fragments;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
pub mod plain;
mod spec;
mod write;
mod write_cpu;
#[cfg(feature = "gpu")]
pub(crate) mod write_gpu;

use crate::{Device, Result, Tensor};

pub use affine::{Affine, Axis};
pub use plain::Plain;
pub use spec::RowFormat;
pub use write::RowCopy;

/// Rows of one side of a cache, keys or values: `batch` x `heads` x `capacity` rows of `head_dim` elements.
///
/// The buffers have a capacity; how many rows are filled is said by whoever attends to them
/// ([`Span`](crate::attend::Span)), so that a cache can grow in place.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Rows {
    /// Uncompressed floats.
    Plain(Plain),
    /// Group-affine codes: `code * scale + zero`.
    Affine(Affine),
}

/// The geometry that both sides of an attention must share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowShape {
    /// Sequences.
    pub batch: usize,
    /// KV heads.
    pub heads: usize,
    /// Rows that the buffers can hold, for each sequence and head.
    pub capacity: usize,
    /// Elements of a row.
    pub head_dim: usize,
}

impl Rows {
    /// The geometry.
    pub fn shape(&self) -> RowShape {
        match self {
            Rows::Plain(rows) => rows.shape(),
            Rows::Affine(rows) => rows.shape(),
        }
    }

    /// The device of the buffers.
    pub fn device(&self) -> Device {
        match self {
            Rows::Plain(rows) => rows.data.device(),
            Rows::Affine(rows) => rows.codes.device(),
        }
    }

    /// Bytes that the buffers occupy.
    pub fn byte_len(&self) -> usize {
        match self {
            Rows::Plain(rows) => rows.data.byte_len(),
            Rows::Affine(rows) => rows.byte_len(),
        }
    }

    /// Every row as f32, `[batch, heads, capacity, head_dim]`, by the definition of the format: the oracle's view.
    pub fn decode_oracle(&self) -> Result<Vec<f32>> {
        match self {
            Rows::Plain(rows) => rows.data.to_f32_vec(),
            Rows::Affine(rows) => affine::oracle::decode(rows),
        }
    }
}

/// Checks that `tensor` lives on `device`.
pub(crate) fn on_device(op: &'static str, arg: &'static str, tensor: &Tensor, device: &Device) -> Result<()> {
    let found = tensor.device();
    if found == *device {
        Ok(())
    } else {
        Err(crate::Error::DeviceMismatch { op, arg, expected: device.clone(), found })
    }
}
