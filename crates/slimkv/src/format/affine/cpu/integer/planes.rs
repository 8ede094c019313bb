//! Rounding products to 16 bits and splitting them into two planes of signed bytes, `x = 256 * high + low`.

use std::arch::x86_64::*;

/// Added to a product of magnitude at most [`LARGEST`](super::LARGEST), this leaves the product's nearest integer plus 128
/// in the low 16 bits of the sum: the first term moves the point behind the last bit of a float, the second makes the low
/// byte, less 128, a signed one.
pub(super) const ROUND: f32 = 12_582_912.0 + 128.0;

/// The order in which the bytes of a plane come.
#[repr(C, align(64))]
pub(super) struct Order([u8; 64]);

impl Order {
    /// Byte `i` of every 32 comes from element `from(i)` of the same 32.
    pub fn new(from: impl Fn(usize) -> usize) -> Self {
        // Elements are dwords of two registers: first their low bytes, then the bytes above.
        Order(std::array::from_fn(|to| (4 * from(to % 32) + to / 32) as u8))
    }

    /// In a register.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn load(&self) -> __m512i {
        // SAFETY: the table is an aligned 64 bytes.
        unsafe { _mm512_load_si512(self.0.as_ptr().cast()) }
    }
}

/// The high and low planes of numbers to which [`ROUND`] was added.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn split(x: [__m512; 4], order: __m512i) -> [__m512i; 2] {
    let mut bits = [_mm512_setzero_si512(); 4];
    for (bits, x) in bits.iter_mut().zip(x) {
        *bits = _mm512_castps_si512(x);
    }
    // Low bytes of 32 elements in the low half, high bytes in the high half.
    let (a, b) = (_mm512_permutex2var_epi8(bits[0], order, bits[1]), _mm512_permutex2var_epi8(bits[2], order, bits[3]));
    let low = _mm512_inserti64x4::<1>(a, _mm512_castsi512_si256(b));
    [_mm512_shuffle_i64x2::<0b11_10_11_10>(a, b), _mm512_xor_si512(low, _mm512_set1_epi8(-128))]
}
