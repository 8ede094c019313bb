//! Packing and unpacking on the CPU.

use rayon::prelude::*;

use super::{pack_row, unpack_row, with_last_axis, words_per_row};
use crate::{DType, Device, Result, Tensor};

/// Codes that one task of the thread pool handles, about.
const TASK_CODES: usize = 1 << 16;

/// Packs every row of u8 codes.
pub(crate) fn pack(indices: &Tensor, bits: u32) -> Result<Tensor> {
    let len = *indices.shape().last().unwrap_or(&0);
    let width = words_per_row(len, bits);
    let mut packed = Tensor::zeros(DType::U32, &with_last_axis(indices, width), &Device::cpu())?;
    if len != 0 {
        let codes = indices.as_slice::<u8>()?;
        let rows = (TASK_CODES / len).max(1);
        let words = packed.as_mut_slice::<u32>()?;
        words.par_chunks_mut(rows * width).zip(codes.par_chunks(rows * len)).for_each(|(words, codes)| {
            for (words, codes) in words.chunks_mut(width).zip(codes.chunks(len)) {
                pack_row(codes, bits, words);
            }
        });
    }
    Ok(packed)
}

/// Unpacks every row of words into `len` codes.
pub(crate) fn unpack(packed: &Tensor, bits: u32, len: usize) -> Result<Tensor> {
    let width = words_per_row(len, bits);
    let mut indices = Tensor::zeros(DType::U8, &with_last_axis(packed, len), &Device::cpu())?;
    if len != 0 {
        let words = packed.as_slice::<u32>()?;
        let rows = (TASK_CODES / len).max(1);
        let codes = indices.as_mut_slice::<u8>()?;
        codes.par_chunks_mut(rows * len).zip(words.par_chunks(rows * width)).for_each(|(codes, words)| {
            for (codes, words) in codes.chunks_mut(len).zip(words.chunks(width)) {
                unpack_row(words, bits, codes);
            }
        });
    }
    Ok(indices)
}
