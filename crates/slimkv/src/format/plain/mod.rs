//! Plain rows: uncompressed f16, bf16 or f32. The baseline, and the exact tail of the compressed caches.

pub(crate) mod cpu;
pub(crate) mod decode;
#[cfg(feature = "gpu")]
pub(crate) mod fragments;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;

use super::RowShape;
use crate::{Error, Result, Tensor};

/// Uncompressed rows, `[batch, heads, capacity, head_dim]` of f16, bf16 or f32.
#[derive(Debug, Clone)]
pub struct Plain {
    pub(crate) data: Tensor,
}

impl Plain {
    /// Checks and wraps a tensor; `op` and `arg` are named in errors.
    pub fn new(op: &'static str, arg: &'static str, data: Tensor) -> Result<Self> {
        if data.shape().len() != 4 {
            return Err(Error::shape(op, arg, "[B, Hkv, S, D]", data.shape()));
        }
        if !data.dtype().is_float() {
            return Err(Error::dtype(op, arg, "f16, bf16 or f32", data.dtype()));
        }
        Ok(Plain { data })
    }

    /// The rows.
    pub fn data(&self) -> &Tensor {
        &self.data
    }

    /// The geometry.
    pub fn shape(&self) -> RowShape {
        let s = self.data.shape();
        RowShape { batch: s[0], heads: s[1], capacity: s[2], head_dim: s[3] }
    }
}
