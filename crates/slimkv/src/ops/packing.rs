//! Packing small codes into words.

use crate::format::bits;
use crate::{Result, Tensor};

/// Packs `indices` (u8 `[..., L]`) in `bits` bits (1, 2, 3, 4 or 8) into u32 `[..., ceil(L / EPW)]`, `EPW = 32 / bits`
/// codes a word, lowest bits first. Each code is masked to its width.
pub fn turboquant_bit_pack(indices: &Tensor, bits: u32) -> Result<Tensor> {
    bits::pack("turboquant_bit_pack", indices, bits)
}

/// Unpacks `packed` (u32 `[..., W]`) into u8 `[..., original_length]`. An error unless
/// `W = ceil(original_length / EPW)`.
pub fn turboquant_bit_unpack(packed: &Tensor, bits: u32, original_length: usize) -> Result<Tensor> {
    bits::unpack("turboquant_bit_unpack", packed, bits, original_length)
}
