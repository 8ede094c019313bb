//! Attention over group-affine codes in 16-bit integers, written once for every instruction set.
//!
//! A code is masked out of its word into the low or the high half of a 32-bit element and multiplied as it is; what it meets -
//! the query times the scales of a group of tokens, or a weight times the scale of its token and group of channels - is
//! rounded to 16 bits. Every instruction set multiplies pairs of such halves and adds the products in one or two
//! instructions. The sums are exact; the rounding is 2^-16 of the largest product, far below what f16 output can show. Zero
//! points are separate dot products in f32.
//!
//! ```text
//! a word of a row, b bits a code, n = 16 / b rounded down:
//!     low half    codes 0 .. n         register k of the halves holds code k below
//!     high half   codes n .. 2 n       and code n + k above
//! ```
//!
//! Words of three-bit codes are brought into that form first: their second five codes begin at bit 15.

mod keys;
mod values;

pub(crate) use keys::KeyPlan;
pub(crate) use values::ValuePlan;

use super::{Codes, Tiles};
use crate::cpu::{Isa, Kernel, Simd};

/// The largest magnitude of a factor.
const LARGEST: f32 = 32767.0;

/// The factor that maps `peak` to [`LARGEST`], and its inverse.
#[inline(always)]
fn quantizer(peak: f32) -> (f32, f32) {
    // Below that the factor would be infinite, and nothing would be lost.
    if peak > 1e-30 { (LARGEST / peak, peak / LARGEST) } else { (0.0, 0.0) }
}

/// How the codes of a row lie in words.
#[derive(Clone, Copy)]
struct Layout {
    /// Bits of a code.
    bits: usize,
    /// Bytes from one row to the next.
    stride: usize,
    /// Words of a row.
    words: usize,
    /// Elements of a register.
    lanes: usize,
    /// Rows that a register holds side by side; 1 where a row is longer.
    side: usize,
}

impl Layout {
    fn new(isa: Isa, rows: &Tiles) -> Self {
        let (bits, stride) = match rows.codes {
            Codes::Bytes(_) => (8, rows.width),
            Codes::Words(_) => (rows.bits as usize, 4 * rows.width),
        };
        let (lanes, words) = (isa.run(Lanes), stride.div_ceil(4).max(1));
        let whole = stride.is_multiple_of(4) && lanes.is_multiple_of(words);
        Layout { bits, stride, words, lanes, side: if whole { lanes / words } else { 1 } }
    }

    /// Codes of a word.
    fn per_word(self) -> usize {
        32 / self.bits
    }

    /// Codes of half a word: registers of halves that a register of words becomes.
    fn parts(self) -> usize {
        16 / self.bits
    }

    /// Registers of words that hold a row, or `side` rows.
    fn registers(self) -> usize {
        self.words.div_ceil(self.lanes)
    }

    /// The word of its row that element `i` of register `register` is.
    fn word(self, register: usize, i: usize) -> usize {
        if self.side > 1 { i % self.words } else { register * self.lanes + i }
    }

    /// The channel of code `k` of half `half` of word `word`.
    fn channel(self, word: usize, half: usize, k: usize) -> usize {
        word * self.per_word() + half * self.parts() + k
    }

    /// Bytes that loading from a row on reads.
    fn reach(self) -> usize {
        4 * self.registers() * self.lanes
    }
}

/// Elements of a register.
struct Lanes;

impl Kernel for Lanes {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::LANES
    }
}

/// Rows of codes that may be read in whole registers.
#[derive(Clone, Copy)]
struct Rows<'a> {
    bytes: &'a [u8],
    stride: usize,
}

impl Rows<'_> {
    /// Where row `i` begins, with [`Layout::reach`] bytes to be read.
    #[inline(always)]
    fn row(&self, i: usize) -> *const i32 {
        self.bytes.as_ptr().wrapping_add(i * self.stride).cast()
    }
}

impl<'a> Tiles<'a> {
    /// All codes as bytes.
    fn bytes(&self) -> &'a [u8] {
        match self.codes {
            Codes::Bytes(bytes) => bytes,
            Codes::Words(words) => bytemuck::cast_slice(words),
        }
    }

    /// Rows `start..start + count` of a matrix, of which those past its end are anything. `scratch` holds them where they
    /// cannot be read in place.
    fn code_rows<'b>(
        &'b self,
        layout: Layout,
        matrix: usize,
        start: usize,
        count: usize,
        scratch: &'b mut Vec<u8>,
    ) -> Rows<'b> {
        let first = matrix * self.capacity + start;
        let there = count.min(self.capacity - start);
        let len = count.saturating_sub(1) * layout.stride + layout.reach();
        let (bytes, at) = (self.bytes(), first * layout.stride);
        if at + len <= bytes.len() {
            return Rows { bytes: &bytes[at..at + len], stride: layout.stride };
        }
        scratch.clear();
        scratch.extend_from_slice(&bytes[at..at + there * layout.stride]);
        scratch.resize(len, 0);
        Rows { bytes: scratch, stride: layout.stride }
    }
}

/// Register `k` of the halves of some words.
#[inline(always)]
fn halves<S: Simd, const BITS: usize>(s: S, words: S::I, k: usize) -> S::I {
    let mask = s.splat_i(((1 << BITS) - 1) * 0x0001_0001);
    s.and(s.shift_right(words, (k * BITS) as u32), mask)
}
