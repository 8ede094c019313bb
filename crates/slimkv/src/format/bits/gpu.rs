//! Packing and unpacking on the GPU: one unit a word of the result.

use cubecl::prelude::*;

use super::{codes_per_word, words_per_row};
use crate::format::gpu::bound;
use crate::gpu::{UNITS, grid, with_client, word_array};
use crate::{DType, Result, Tensor};

pub(super) fn pack(op: &'static str, indices: &Tensor, bits: u32) -> Result<Tensor> {
    let gpu = indices.gpu_buffer().expect("the caller dispatched on the device").gpu();
    let (leading, len) = split(indices.shape());
    let words = words_per_row(len, bits);
    let shape: Vec<usize> = leading.iter().copied().chain([words]).collect();
    let out = Tensor::from_gpu_buffer(DType::U32, &shape, gpu.empty(op, shape.iter().product::<usize>() * 4)?);
    let units = out.len();
    if units > 0 {
        let ((from, from_words), (to, to_words)) = (bound(indices), bound(&out));
        // SAFETY: a unit writes one of `units` words and reads codes of its own row.
        with_client!(gpu, client => unsafe {
            pack_words::launch_unchecked(
                client,
                grid(units.div_ceil(UNITS as usize)),
                CubeDim::new_1d(UNITS),
                word_array(&from, from_words),
                word_array(&to, to_words),
                units as u32,
                len as u32,
                words as u32,
                bits,
                codes_per_word(bits) as u32,
            )
        });
    }
    Ok(out)
}

pub(super) fn unpack(op: &'static str, packed: &Tensor, bits: u32, len: usize) -> Result<Tensor> {
    let gpu = packed.gpu_buffer().expect("the caller dispatched on the device").gpu();
    let (leading, words) = split(packed.shape());
    let shape: Vec<usize> = leading.iter().copied().chain([len]).collect();
    let out = Tensor::from_gpu_buffer(DType::U8, &shape, gpu.empty(op, shape.iter().product())?);
    let units = out.len().div_ceil(4);
    if units > 0 {
        let ((from, from_words), (to, to_words)) = (bound(packed), bound(&out));
        // SAFETY: buffers are whole words; a unit writes one of them and reads words of the rows of its codes.
        with_client!(gpu, client => unsafe {
            unpack_words::launch_unchecked(
                client,
                grid(units.div_ceil(UNITS as usize)),
                CubeDim::new_1d(UNITS),
                word_array(&from, from_words),
                word_array(&to, to_words),
                units as u32,
                out.len() as u32,
                len as u32,
                words as u32,
                bits,
                codes_per_word(bits) as u32,
            )
        });
    }
    Ok(out)
}

fn split(shape: &[usize]) -> (&[usize], usize) {
    let (last, leading) = shape.split_last().expect("the caller checked the axes");
    (leading, *last)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn pack_words(codes: &Array<u32>, out: &mut Array<u32>, units: u32, len: u32, words: u32, bits: u32, per_word: u32) {
    let unit = ABSOLUTE_POS as u32;
    if unit < units {
        let first = (unit % words) * per_word;
        let count = min(per_word, len - first);
        let row = (unit / words) * len;
        let mask = (1u32 << bits) - 1u32;
        let mut packed = 0u32;
        for i in 0..count {
            let at = row + first + i;
            let code = codes[(at / 4u32) as usize] >> (8u32 * (at % 4u32));
            packed = packed | ((code & 255u32 & mask) << (i * bits));
        }
        out[unit as usize] = packed;
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn unpack_words(
    packed: &Array<u32>,
    out: &mut Array<u32>,
    units: u32,
    total: u32,
    len: u32,
    words: u32,
    bits: u32,
    per_word: u32,
) {
    let unit = ABSOLUTE_POS as u32;
    if unit < units {
        let mask = (1u32 << bits) - 1u32;
        let mut four = 0u32;
        #[unroll]
        for i in 0..4u32 {
            let at = unit * 4u32 + i;
            if at < total {
                let code = at % len;
                let word = packed[((at / len) * words + code / per_word) as usize];
                four = four | (((word >> ((code % per_word) * bits)) & mask) << comptime!(8 * i));
            }
        }
        out[unit as usize] = four;
    }
}
