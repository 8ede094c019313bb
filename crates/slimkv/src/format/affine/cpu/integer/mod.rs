//! Attention over group-affine codes in integers, on AVX-512 with VNNI or AMX.
//!
//! Codes are spread to bytes in registers and multiplied as they are; what they multiply - the query times the scales of a
//! group of tokens, or a weight times the scale of its token and group of channels - is rounded to 16 bits and split into
//! two planes of signed bytes, `x = 256 * hi + lo`. The sums are exact; the rounding is 2^-16 of the largest product, far
//! below what f16 output can show. Zero points are separate dot products in f32.
//!
//! Keys that share parameters among tokens and values that share them among channels are served, in groups of a multiple
//! of 16. The rest takes 16-bit [halves](super::halves), which need more instructions but no more than the trait of every
//! instruction set; f32 output takes the tiles of f32.

mod keys;
mod lanes;
mod params;
mod planes;
mod spread;
mod stripes;
mod values;

pub(crate) use keys::KeyPlan;
pub(crate) use values::ValuePlan;

use super::{Codes, Tiles};

impl<'a> Tiles<'a> {
    /// Bits of a code and bytes of a row, where codes that are one to a byte count as packed in eight bits.
    fn row_layout(&self) -> (u32, usize) {
        match self.codes {
            Codes::Bytes(_) => (8, self.width),
            Codes::Words(_) => (self.bits, 4 * self.width),
        }
    }

    /// All codes as bytes. Words of eight-bit codes are their bytes in order, on a little-endian machine.
    fn code_bytes(&self) -> &'a [u8] {
        match self.codes {
            Codes::Bytes(bytes) => bytes,
            Codes::Words(words) => bytemuck::cast_slice(words),
        }
    }
}

/// The largest magnitude of a 16-bit factor: both planes of it fit a signed byte.
const LARGEST: f32 = 32512.0;

/// For `vrangeps`: the larger magnitude, as a positive number.
const LARGER_MAGNITUDE: i32 = 0b1011;

/// The factor that maps `peak` to [`LARGEST`], and its inverse.
#[inline(always)]
fn quantizer(peak: f32) -> (f32, f32) {
    if peak > 0.0 { (LARGEST / peak, peak / LARGEST) } else { (0.0, 0.0) }
}
