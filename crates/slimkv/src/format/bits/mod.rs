//! Packed words: how small codes lie in `u32`s.
//!
//! `EPW = 32 / bits` codes a word (integer division), code `i` of a row in word `i / EPW` at bit `(i % EPW) * bits`, the
//! last word filled with zeros. Three-bit codes sit ten to a word with the top two bits zero.
//!
//! ```text
//! 4 bits:  word 0  | c7 | c6 | c5 | c4 | c3 | c2 | c1 | c0 |        bit 0 is on the right
//! 3 bits:  word 0  |00|c9|c8|c7|c6|c5|c4|c3|c2|c1|c0|
//! ```

pub(crate) mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;

use crate::{DType, Error, Result, Tensor};

/// The widths that the library packs.
pub const WIDTHS: [u32; 5] = [1, 2, 3, 4, 8];

/// Codes in one word.
pub const fn codes_per_word(bits: u32) -> usize {
    (32 / bits) as usize
}

/// Words of a row of `len` codes.
pub const fn words_per_row(len: usize, bits: u32) -> usize {
    len.div_ceil(codes_per_word(bits))
}

/// Checks a bit width.
pub fn check_width(op: &'static str, arg: &'static str, bits: u32) -> Result<()> {
    if WIDTHS.contains(&bits) { Ok(()) } else { Err(Error::value(op, arg, "1, 2, 3, 4 or 8", bits)) }
}

/// Packs indices u8 `[..., L]` into words u32 `[..., ceil(L / EPW)]`; each code is masked to `bits` bits.
///
/// Errors: indices that are not u8 or have no axis, a width that is not one of [`WIDTHS`].
pub fn pack(op: &'static str, indices: &Tensor, bits: u32) -> Result<Tensor> {
    check_width(op, "bits", bits)?;
    last_axis(op, "indices", indices, DType::U8, "[..., L]")?;
    match indices.device().gpu() {
        None => cpu::pack(indices, bits),
        #[cfg(feature = "gpu")]
        Some(_) => gpu::pack(op, indices, bits),
        #[cfg(not(feature = "gpu"))]
        Some(never) => match *never {},
    }
}

/// Unpacks words u32 `[..., W]` into indices u8 `[..., original_length]`.
///
/// Errors: words that are not u32 or have no axis, a width that is not one of [`WIDTHS`], a length that does not fill
/// exactly `W` words.
pub fn unpack(op: &'static str, packed: &Tensor, bits: u32, original_length: usize) -> Result<Tensor> {
    check_width(op, "bits", bits)?;
    let width = last_axis(op, "packed", packed, DType::U32, "[..., W]")?;
    if words_per_row(original_length, bits) != width {
        let expected = format!("a length that fills {width} words of {} codes", codes_per_word(bits));
        return Err(Error::value(op, "original_length", expected, original_length));
    }
    match packed.device().gpu() {
        None => cpu::unpack(packed, bits, original_length),
        #[cfg(feature = "gpu")]
        Some(_) => gpu::unpack(op, packed, bits, original_length),
        #[cfg(not(feature = "gpu"))]
        Some(never) => match *never {},
    }
}

fn last_axis(op: &'static str, arg: &'static str, tensor: &Tensor, dtype: DType, shape: &str) -> Result<usize> {
    if tensor.dtype() != dtype {
        return Err(Error::dtype(op, arg, dtype.name(), tensor.dtype()));
    }
    tensor.shape().last().copied().ok_or_else(|| Error::shape(op, arg, shape, tensor.shape()))
}

/// The shape of `tensor` with another last axis.
pub(crate) fn with_last_axis(tensor: &Tensor, last: usize) -> Vec<usize> {
    let mut shape = tensor.shape().to_vec();
    if let Some(axis) = shape.last_mut() {
        *axis = last;
    }
    shape
}

/// Packs one row; each code is masked to `bits` bits, so that a wrong code cannot disturb its neighbour.
pub fn pack_row(codes: &[u8], bits: u32, words: &mut [u32]) {
    let epw = codes_per_word(bits);
    let mask = (1u32 << bits) - 1;
    for (word, codes) in words.iter_mut().zip(codes.chunks(epw)) {
        *word = codes.iter().rev().fold(0, |w, &c| (w << bits) | (u32::from(c) & mask));
    }
}

/// Unpacks one row of `codes.len()` codes.
pub fn unpack_row(words: &[u32], bits: u32, codes: &mut [u8]) {
    let epw = codes_per_word(bits);
    let mask = (1u32 << bits) - 1;
    for (i, code) in codes.iter_mut().enumerate() {
        *code = ((words[i / epw] >> ((i % epw) as u32 * bits)) & mask) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_bit_codes_make_the_byte_of_the_definition() {
        let mut word = [0];
        pack_row(&[0, 1, 2, 3], 2, &mut word);
        assert_eq!(word, [228]);
    }

    proptest::proptest! {
        #[test]
        fn unpacking_undoes_packing(bits in proptest::sample::select(WIDTHS.to_vec()), codes in proptest::collection::vec(0u8.., 0..200)) {
            let mut words = vec![0; words_per_row(codes.len(), bits)];
            pack_row(&codes, bits, &mut words);
            let mut back = vec![0; codes.len()];
            unpack_row(&words, bits, &mut back);
            let masked: Vec<u8> = codes.iter().map(|c| c & ((1u32 << bits) - 1) as u8).collect();
            proptest::prop_assert_eq!(back, masked);
        }
    }
}
