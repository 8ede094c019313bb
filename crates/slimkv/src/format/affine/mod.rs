//! Group-affine rows (the KIVI family, arXiv 2402.02750): `x = code * scale + zero`.
//!
//! Codes of a row lie along its channels, packed in words ([`super::bits`]) or one to a byte. Keys share scale and
//! zero point among a *group of tokens* of one channel, values among a *group of channels* of one token:
//!
//! ```text
//!            keys, Axis::Tokens                       values, Axis::Channels
//! codes      [B, H, S, W]                             [B, H, S, W]
//! scale,zero [B, H, ceil(S / g), D]                   [B, H, S, ceil(D / g)]
//!
//!            channel ->                               channel ->
//!   token   | s00 s01 s02 s03 |  group 0       token | s00 | s00 | s01 | s01 |
//!     |     | s00 s01 s02 s03 |                  |   | s10 | s10 | s11 | s11 |
//!     v     | s10 s11 s12 s13 |  group 1         v   | s20 | s20 | s21 | s21 |      (g = 2)
//!           | s10 s11 s12 s13 |                      | s30 | s30 | s31 | s31 |
//! ```

mod convert;
pub(crate) mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod fragments;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
pub mod oracle;

pub use convert::{dequantize, quantize, round_trip};

use super::{RowShape, bits, on_device};
use crate::{DType, Error, Result, Tensor};

/// The axis along which elements share a scale and a zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Consecutive tokens of one channel (axis -2): keys.
    Tokens,
    /// Consecutive channels of one token (axis -1): values.
    Channels,
}

impl Axis {
    /// Reads the contract's `axis` argument.
    pub fn from_index(op: &'static str, axis: i64) -> Result<Self> {
        match axis {
            -2 => Ok(Axis::Tokens),
            -1 => Ok(Axis::Channels),
            other => Err(Error::value(op, "axis", "-2 (tokens) or -1 (channels)", other)),
        }
    }

    /// The last two axes of scale and zero for `tokens` rows of `channels` elements.
    pub fn param_shape(self, tokens: usize, channels: usize, group: usize) -> [usize; 2] {
        match self {
            Axis::Tokens => [tokens.div_ceil(group), channels],
            Axis::Channels => [tokens, channels.div_ceil(group)],
        }
    }
}

/// Group-affine rows with their parameters.
#[derive(Debug, Clone)]
pub struct Affine {
    pub(crate) codes: Tensor,
    pub(crate) scale: Tensor,
    pub(crate) zero: Tensor,
    pub(crate) bits: u32,
    pub(crate) group: usize,
    pub(crate) axis: Axis,
    pub(crate) head_dim: usize,
}

/// The argument names that the errors of [`Affine::new`] use.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct Names {
    pub op: &'static str,
    pub codes: &'static str,
    pub scale: &'static str,
    pub zero: &'static str,
    pub bits: &'static str,
}

impl Affine {
    /// Checks and wraps codes and parameters.
    ///
    /// `codes` is u32 `[B, H, S, ceil(D / EPW)]` (packed in `bits` bits) or u8 `[B, H, S, D]` (one code a byte, below `2^bits`
    /// where it encodes); `scale` and `zero` are f16 or f32 (both the same) in the shape of the module's drawing.
    pub fn new(
        names: Names,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor,
        bits: u32,
        group: usize,
        axis: Axis,
        head_dim: usize,
    ) -> Result<Self> {
        let op = names.op;
        if group == 0 {
            return Err(Error::value(op, "group_size", "at least 1", group));
        }
        let &[batch, heads, tokens, width] = codes.shape() else {
            return Err(Error::shape(op, names.codes, "[B, Hkv, S, W]", codes.shape()));
        };
        if !matches!(codes.dtype(), DType::U8 | DType::U32) {
            return Err(Error::dtype(op, names.codes, "u8 or packed u32", codes.dtype()));
        }
        bits::check_width(op, names.bits, bits)?;
        let expected_width = match codes.dtype() {
            DType::U32 => bits::words_per_row(head_dim, bits),
            _ => head_dim,
        };
        if width != expected_width {
            let expected = format!("[B, Hkv, S, {expected_width}] for D = {head_dim} at {bits} bits");
            return Err(Error::shape(op, names.codes, expected, codes.shape()));
        }
        let [p0, p1] = axis.param_shape(tokens, head_dim, group);
        let expected = [batch, heads, p0, p1];
        for (arg, tensor) in [(names.scale, &scale), (names.zero, &zero)] {
            if tensor.shape() != expected {
                return Err(Error::shape(op, arg, format!("{expected:?}"), tensor.shape()));
            }
            if !matches!(tensor.dtype(), DType::F16 | DType::F32) || tensor.dtype() != scale.dtype() {
                return Err(Error::dtype(op, arg, "f16 or f32, the same for scale and zero", tensor.dtype()));
            }
            on_device(op, arg, tensor, &codes.device())?;
        }
        Ok(Affine { codes, scale, zero, bits, group, axis, head_dim })
    }

    /// The geometry.
    pub fn shape(&self) -> RowShape {
        let s = self.codes.shape();
        RowShape { batch: s[0], heads: s[1], capacity: s[2], head_dim: self.head_dim }
    }

    /// Whether codes are packed in words rather than one to a byte.
    pub fn is_packed(&self) -> bool {
        self.codes.dtype() == DType::U32
    }

    /// Bits of a code.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Elements that share a scale and a zero point.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Which elements share them.
    pub fn axis(&self) -> Axis {
        self.axis
    }

    /// The codes.
    pub fn codes(&self) -> &Tensor {
        &self.codes
    }

    /// The scales.
    pub fn scale(&self) -> &Tensor {
        &self.scale
    }

    /// The zero points.
    pub fn zero(&self) -> &Tensor {
        &self.zero
    }

    /// Bytes that codes and parameters occupy.
    pub fn byte_len(&self) -> usize {
        self.codes.byte_len() + self.scale.byte_len() + self.zero.byte_len()
    }
}
