//! The end of a split: the warps of a cube merge, in order, and write one slot.

use cubecl::prelude::*;

use super::kernel::Shape;
use super::softmax::{Softmax, exp2v, sum_of_column};
use crate::format::fragments::{CODE_UNIT, EIGHTH, F2, Tile};
use crate::gpu::float::LOWEST;
use crate::gpu::scratch::put;

/// Merges the warps of a cube into one slot of its query rows. All warps are past their loops.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn finish(
    state: &mut Softmax,
    acc: &Array<F2>,
    zeros: &Array<F2>,
    part_o: &mut Array<Atomic<u64>>,
    part_ml: &mut Array<Atomic<u64>>,
    rows: u32,
    first_row: u32,
    slots: u32,
    slot: u32,
    lane: u32,
    warp: u32,
    #[comptime] shape: Shape,
) {
    let warps = comptime!(shape.warps);
    let columns = comptime!(shape.columns as usize);
    let head_dim = comptime!(shape.values.head_dim);
    let all = comptime!(shape.columns * 8);
    let stride = comptime!(shape.values.head_dim + 1);
    let (g, t) = (lane / 4u32, lane % 4u32);
    let mut most = SharedMemory::<f32>::new(comptime!((warps * all) as usize));
    let mut sums = SharedMemory::<f32>::new(comptime!((warps * all) as usize));
    let mut outs = SharedMemory::<f32>::new(comptime!((warps * shape.rows * stride) as usize));

    #[unroll]
    for x in 0..columns {
        state.sum[x] = sum_of_column(state.sum[x], comptime!(shape.share()));
        if g == 0u32 {
            let at = (warp * all + comptime!(x as u32 * 8) + 2u32 * t) as usize;
            most[at] = state.most[x][0];
            most[at + 1] = state.most[x][1];
            sums[at] = state.sum[x][0];
            sums[at + 1] = state.sum[x][1];
        }
    }
    sync_cube();
    #[unroll]
    for x in 0..columns {
        let row = comptime!(x as u32 * 8) + (2u32 * t) % comptime!(shape.values.distinct_rows());
        let mut highest = F2::new(f32::new(LOWEST));
        #[unroll]
        for w in 0..warps {
            let at = (comptime!(w * all) + row) as usize;
            highest[0] = max(highest[0], most[at]);
            highest[1] = max(highest[1], most[at + 1]);
        }
        // Of the copies of a query row, a lane's own is the one whose weights had the scales of its channels.
        let own = (2u32 * t) / comptime!(shape.values.distinct_rows()) == g / comptime!(shape.values.distinct_rows());
        let fade = exp2v(state.most[x] - highest);
        let tiles = comptime!((shape.values.head_dim / 16) as usize);
        let zero = zeros[comptime!(2 * x)];
        let mut sum = F2::empty();
        #[unroll]
        for j in 0..comptime!(2 * tiles) {
            let (channel, group) = channel_of(g, comptime!(j as u32), comptime!(shape.values));
            let mut out = acc[comptime!(x * 2 * tiles + j)];
            if comptime!(shape.values.packed()) {
                // the channels of 16 bits of a chunk lie in one group
                if comptime!((j as u32).is_multiple_of(shape.values.per_half())) {
                    let source = group * 4u32 + t;
                    sum[0] = plane_shuffle(zero[0], source);
                    sum[1] = plane_shuffle(zero[1], source);
                }
                out = out * F2::new(f32::new(comptime!(unit_of(j as u32, shape.values)))) + sum;
            }
            out = out * fade;
            // even rows, then odd ones: the lanes of a quad write to neighbouring banks
            let at = warp * comptime!(shape.rows * stride) + row / 2u32 * stride + channel;
            if row < comptime!(shape.rows) && own {
                outs[at as usize] = out[0];
                outs[(at + comptime!(shape.rows / 2 * stride)) as usize] = out[1];
            }
        }
    }
    sync_cube();
    for entry in range_stepped(UNIT_POS_X, comptime!(shape.rows * head_dim / 2), comptime!(warps * 32)) {
        let row = entry / comptime!(head_dim / 2);
        let channel = entry % comptime!(head_dim / 2) * 2u32;
        let at = (row % 2u32) * comptime!(shape.rows / 2 * stride) + row / 2u32 * stride + channel;
        let mut left = 0.0f32;
        let mut right = 0.0f32;
        #[unroll]
        for w in 0..warps {
            left += outs[(comptime!(w * shape.rows * stride) + at) as usize];
            right += outs[(comptime!(w * shape.rows * stride + 1) + at) as usize];
        }
        if row < rows {
            put(part_o, (((first_row + row) * slots + slot) * head_dim + channel) / 2u32, left, right);
        }
    }
    // The last warp has the fewest channels to add.
    if warp == comptime!(warps - 1) && lane < rows {
        let row = lane;
        let mut highest = f32::new(LOWEST);
        #[unroll]
        for w in 0..warps {
            highest = max(highest, most[(comptime!(w * all) + row) as usize]);
        }
        let mut sum = 0.0f32;
        #[unroll]
        for w in 0..warps {
            let at = (comptime!(w * all) + row) as usize;
            sum += sums[at] * f32::powf(2.0f32, most[at] - highest);
        }
        put(part_ml, (first_row + row) * slots + slot, highest * std::f32::consts::LN_2, sum);
    }
}

/// The channel that lane row g of result j holds, and its group.
#[cube]
fn channel_of(g: u32, #[comptime] j: u32, #[comptime] tile: Tile) -> (u32, u32) {
    let n = comptime!(tile.per_half());
    if comptime!(n == 1) {
        (comptime!(8 * j) + g, 0u32.runtime())
    } else {
        // result j is element j % n of the 16 bits of lane row g of chunk j / n
        let channel = comptime!(j / n * tile.per_chunk() + j % n) + n * g;
        (channel, channel / comptime!(tile.group))
    }
}

/// What the sums of result j must be multiplied with.
fn unit_of(j: u32, tile: Tile) -> f32 {
    let code = if tile.scaled_weights() { CODE_UNIT } else { 1.0 / EIGHTH };
    code / (1u32 << tile.excess(j % tile.per_half())) as f32
}
