//! Group-affine rows in kernels.

mod convert;
mod one_pass;
mod quantize;

use cubecl::prelude::*;

pub(super) use convert::{dequantize, quantize, round_trip};
pub(crate) use quantize::{Quantize, Target};

use crate::format::gpu::{BLOCK, Layout, Place, ReadRows, float_at, float_block, word};
use crate::gpu::float::pin;

/// [`Affine`](super::Affine) rows.
pub(crate) struct AffineRows;

#[cube]
impl ReadRows for AffineRows {
    fn block<C: Size, P: Size>(
        codes: &Array<Vector<u32, C>>,
        first: &Array<Vector<u32, P>>,
        second: &Array<Vector<u32, P>>,
        at: Place,
        channel: u32,
        out: &mut Array<f32>,
        #[comptime] layout: Layout,
    ) {
        let mut scale = Array::<f32>::new(BLOCK);
        let mut zero_point = Array::<f32>::new(BLOCK);
        read::<C, P>(codes, first, second, at, channel, &mut scale, &mut zero_point, out, layout);
        #[unroll]
        for i in 0..BLOCK {
            out[i] = out[i] * scale[i] + zero_point[i];
        }
        clear_past_end(channel, out, layout);
    }

    fn exact_block<C: Size, P: Size>(
        codes: &Array<Vector<u32, C>>,
        first: &Array<Vector<u32, P>>,
        second: &Array<Vector<u32, P>>,
        at: Place,
        channel: u32,
        out: &mut Array<f32>,
        zero: u32,
        #[comptime] layout: Layout,
    ) {
        let mut scale = Array::<f32>::new(BLOCK);
        let mut zero_point = Array::<f32>::new(BLOCK);
        read::<C, P>(codes, first, second, at, channel, &mut scale, &mut zero_point, out, layout);
        #[unroll]
        for i in 0..BLOCK {
            out[i] = pin(out[i] * scale[i], zero) + zero_point[i];
        }
        clear_past_end(channel, out, layout);
    }
}

/// Codes as floats, scales and zero points of a block.
#[cube]
#[allow(clippy::too_many_arguments)]
fn read<C: Size, P: Size>(
    codes: &Array<Vector<u32, C>>,
    first: &Array<Vector<u32, P>>,
    second: &Array<Vector<u32, P>>,
    at: Place,
    channel: u32,
    scale: &mut Array<f32>,
    zero_point: &mut Array<f32>,
    out: &mut Array<f32>,
    #[comptime] layout: Layout,
) {
    params::<P>(first, at, channel, scale, layout);
    params::<P>(second, at, channel, zero_point, layout);
    code_block::<C>(codes, at.row, channel, out, layout);
}

/// Channels past the end decode to 0.
#[cube]
fn clear_past_end(channel: u32, out: &mut Array<f32>, #[comptime] layout: Layout) {
    if comptime!(!layout.head_dim.is_multiple_of(BLOCK as u32)) {
        #[unroll]
        for i in 0..BLOCK {
            out[i] = select(channel + comptime!(i as u32) < comptime!(layout.head_dim), out[i], 0.0f32);
        }
    }
}

/// The scales, or the zero points, of a block of channels.
#[cube]
pub(crate) fn params<P: Size>(
    array: &Array<Vector<u32, P>>,
    at: Place,
    channel: u32,
    out: &mut Array<f32>,
    #[comptime] layout: Layout,
) {
    let head_dim = comptime!(layout.head_dim);
    let group = comptime!(layout.group);
    let float = comptime!(layout.float);
    if comptime!(layout.by_token) {
        let start = at.params * head_dim;
        float_block::<P>(array, start + channel, start + head_dim, out, float);
    } else {
        let columns = comptime!(layout.head_dim.div_ceil(layout.group));
        let start = at.params * columns;
        if comptime!(layout.group.is_multiple_of(BLOCK as u32)) {
            let one = float_at::<P>(array, start + channel / group, float);
            #[unroll]
            for i in 0..BLOCK {
                out[i] = one;
            }
        } else {
            #[unroll]
            for i in 0..BLOCK {
                let c = min(channel + comptime!(i as u32), comptime!(layout.head_dim - 1));
                out[i] = float_at::<P>(array, start + c / group, float);
            }
        }
    }
}

/// The codes of a block of channels, as floats.
#[cube]
pub(crate) fn code_block<C: Size>(
    codes: &Array<Vector<u32, C>>,
    row: u32,
    channel: u32,
    out: &mut Array<f32>,
    #[comptime] layout: Layout,
) {
    let bits = comptime!(layout.bits);
    let mask = comptime!((1u32 << layout.bits) - 1);
    let per_word = comptime!(32 / layout.bits);
    let words = comptime!(layout.head_dim.div_ceil(32 / layout.bits));
    let last = comptime!(layout.head_dim - 1);
    if comptime!(!layout.word_rows) {
        // Bytes of rows that do not start on a word.
        #[unroll]
        for i in 0..BLOCK {
            let index = row * comptime!(layout.head_dim) + min(channel + comptime!(i as u32), last);
            out[i] = f32::cast_from((word::<C>(codes, index / 4u32) >> (8u32 * (index % 4u32))) & 255u32);
        }
    } else if comptime!(layout.bits == 3) {
        // A block lies in at most two of the words of ten codes.
        let low = channel / per_word;
        let start = row * words;
        let a = word::<C>(codes, start + low);
        let b = word::<C>(codes, start + min(low + 1u32, comptime!(layout.head_dim.div_ceil(10) - 1)));
        #[unroll]
        for i in 0..BLOCK {
            let c = channel + comptime!(i as u32);
            let held = select(c / per_word == low, a, b);
            out[i] = f32::cast_from((held >> ((c % per_word) * bits)) & mask);
        }
    } else if comptime!(BLOCK as u32 * layout.bits < 32) {
        let held = word::<C>(codes, row * words + channel / per_word);
        let held = held >> ((channel % per_word) * bits);
        #[unroll]
        for i in 0..BLOCK {
            out[i] = f32::cast_from((held >> comptime!(i as u32 * layout.bits)) & mask);
        }
    } else {
        // Whole words: one vector where rows are whole blocks, else words up to the end of the row.
        let count = comptime!(BLOCK as u32 * layout.bits / 32);
        let width = C::value();
        let width = comptime!(width as u32);
        let start = row * words;
        #[unroll]
        for w in 0..count {
            let index = channel / per_word + w;
            let held = if comptime!(width > 1) {
                codes[((start + channel / per_word) / width) as usize][w as usize]
            } else {
                codes[(start + min(index, comptime!(layout.head_dim.div_ceil(32 / layout.bits) - 1))) as usize][0]
            };
            #[unroll]
            for i in 0..per_word {
                let at = comptime!((w * (32 / layout.bits) + i) as usize);
                out[at] = f32::cast_from((held >> comptime!(i * layout.bits)) & mask);
            }
        }
    }
}
