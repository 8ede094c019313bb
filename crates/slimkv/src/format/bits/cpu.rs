//! Packing and unpacking on the CPU.

use rayon::prelude::*;

use super::{codes_per_word, with_last_axis, words_per_row};
use crate::{DType, Device, Result, Tensor};

/// Codes that one task of the thread pool handles, about.
const TASK_CODES: usize = 1 << 16;

/// Packs every row of u8 codes.
pub(crate) fn pack(indices: &Tensor, bits: u32) -> Result<Tensor> {
    let len = *indices.shape().last().unwrap_or(&0);
    let width = words_per_row(len, bits);
    let mut packed = Tensor::zeros(DType::U32, &with_last_axis(indices, width), &Device::cpu())?;
    if let Some(rows) = TASK_CODES.checked_div(len) {
        let codes = indices.as_slice::<u8>()?;
        let rows = rows.max(1);
        let words = packed.as_mut_slice::<u32>()?;
        words.par_chunks_mut(rows * width).zip(codes.par_chunks(rows * len)).for_each(|(words, codes)| {
            let mut row = vec![0; len + 7];
            for (words, codes) in words.chunks_mut(width).zip(codes.chunks(len)) {
                row[..len].copy_from_slice(codes);
                pack_codes(&row, len, bits, words);
            }
        });
    }
    Ok(packed)
}

/// Unpacks every row of words into `len` codes.
pub(crate) fn unpack(packed: &Tensor, bits: u32, len: usize) -> Result<Tensor> {
    let width = words_per_row(len, bits);
    let mut indices = Tensor::zeros(DType::U8, &with_last_axis(packed, len), &Device::cpu())?;
    if let Some(rows) = TASK_CODES.checked_div(len) {
        let words = packed.as_slice::<u32>()?;
        let rows = rows.max(1);
        let codes = indices.as_mut_slice::<u8>()?;
        codes.par_chunks_mut(rows * len).zip(words.par_chunks(rows * width)).for_each(|(codes, words)| {
            let mut row = vec![0; unpacked_len(len)];
            for (codes, words) in codes.chunks_mut(len).zip(words.chunks(width)) {
                unpack_codes(words, bits, len, &mut row);
                codes.copy_from_slice(&row[..len]);
            }
        });
    }
    Ok(indices)
}

/// Bytes that [`unpack`] may write for a row of `len` codes.
pub(crate) const fn unpacked_len(len: usize) -> usize {
    len + 40
}

/// Unpacks a row of `len` codes, eight at a time. `codes` is at least [`unpacked_len`] long; what lies past `len` is
/// overwritten with anything.
#[inline(always)]
pub(crate) fn unpack_codes(words: &[u32], bits: u32, len: usize, codes: &mut [u8]) {
    assert!(codes.len() >= unpacked_len(len));
    let words = words[..words_per_row(len, bits)].iter().enumerate();
    let out = codes.as_mut_ptr();
    // SAFETY: the words of a row hold at most 31 codes past `len`, so a store of eight bytes at the place of a code, or of
    // a three-bit word's last two codes, ends below `len + 40`.
    let put = |at: usize, bytes: u64| unsafe { out.add(at).cast::<u64>().write_unaligned(bytes.to_le()) };
    match bits {
        8 => words.for_each(|(i, w)| put(4 * i, u64::from(*w))),
        4 => words.for_each(|(i, &w)| put(8 * i, spread(w, [16, 8, 4], [0x0000_FFFF, 0x00FF_00FF, 0x0F0F_0F0F]))),
        3 => words.for_each(|(i, &w)| {
            put(10 * i, spread(w & 0xFF_FFFF, [20, 10, 5], [0x0000_0FFF, 0x003F_003F, 0x0707_0707]));
            put(10 * i + 8, u64::from(w >> 24 & 7) | u64::from(w >> 27 & 7) << 8);
        }),
        2 => words.for_each(|(i, &w)| {
            for half in 0..2 {
                let codes = w >> (16 * half) & 0xFFFF;
                put(16 * i + 8 * half, spread(codes, [24, 12, 6], [0x0000_00FF, 0x000F_000F, 0x0303_0303]));
            }
        }),
        _ => words.for_each(|(i, &w)| {
            for byte in 0..4 {
                let codes = w >> (8 * byte) & 0xFF;
                put(32 * i + 8 * byte, spread(codes, [28, 14, 7], [0x0000_000F, 0x0003_0003, 0x0101_0101]));
            }
        }),
    }
}

/// Packs a row of `len` codes, eight at a time; each code is masked. `codes` holds seven bytes more than `len`, of any value.
#[inline(always)]
pub(crate) fn pack_codes(codes: &[u8], len: usize, bits: u32, words: &mut [u32]) {
    match bits {
        8 => pack_words::<8>(codes, len, words),
        4 => pack_words::<4>(codes, len, words),
        3 => pack_words::<3>(codes, len, words),
        2 => pack_words::<2>(codes, len, words),
        _ => pack_words::<1>(codes, len, words),
    }
}

/// [`pack_codes`] for one width, so that all masks are constants.
#[inline(always)]
fn pack_words<const BITS: u32>(codes: &[u8], len: usize, words: &mut [u32]) {
    assert!(codes.len() >= len + 7);
    let eight = |at| eight_codes::<BITS>(codes, len, at);
    for (i, word) in words[..words_per_row(len, BITS)].iter_mut().enumerate() {
        let at = i * codes_per_word(BITS);
        *word = match BITS {
            8 | 4 => eight(at),
            3 => eight(at) | (eight(at + 8) & 0x3F) << 24,
            2 => eight(at) | eight(at + 8) << 16,
            _ => eight(at) | eight(at + 8) << 8 | eight(at + 16) << 16 | eight(at + 24) << 24,
        };
    }
}

/// Eight codes from `at` on, or the four of a word of bytes, as the low bits of a word; codes past the end are 0.
#[inline(always)]
fn eight_codes<const BITS: u32>(codes: &[u8], len: usize, at: usize) -> u32 {
    assert!(codes.len() >= len + 7);
    let left = len.saturating_sub(at).min(8) as u32;
    if left == 0 {
        return 0;
    }
    // SAFETY: `at < len`, and seven bytes follow the codes.
    let bytes = u64::from_le(unsafe { codes.as_ptr().add(at).cast::<u64>().read_unaligned() });
    let bytes = bytes & u64::MAX >> (64 - 8 * left);
    if BITS == 8 { bytes as u32 } else { gather(bytes, BITS) }
}

/// Moves eight codes of `bits` bits, one to a byte, together: pairs, fours and eights in turn.
#[inline(always)]
fn gather(bytes: u64, bits: u32) -> u32 {
    let repeat = |mask: u64, width: u32| (0..64 / width).fold(0, |all, i| all | mask << (i * width));
    let ones = |n: u32| (1u64 << n) - 1;
    let x = bytes & repeat(ones(bits), 8);
    let x = (x | x >> (8 - bits)) & repeat(ones(2 * bits), 16);
    let x = (x | x >> (16 - 2 * bits)) & repeat(ones(4 * bits), 32);
    (x | x >> (32 - 4 * bits)) as u32 & ones(8 * bits) as u32
}

/// Moves eight codes to a byte each: halves, quarters and eighths are shifted apart in turn. Masks repeat in both halves.
#[inline(always)]
fn spread(codes: u32, shifts: [u32; 3], masks: [u32; 3]) -> u64 {
    let mut x = u64::from(codes);
    for (shift, mask) in shifts.into_iter().zip(masks) {
        x = (x | x << shift) & (u64::from(mask) << 32 | u64::from(mask));
    }
    x
}
