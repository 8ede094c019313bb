//! The end of a call: the last cube of a KV head to begin merges all slots, which saves a launch.
//!
//! It waits for words of cubes that have begun, and those wait for nobody, so it does not matter how many cubes are resident.
//! The code is short on purpose: it runs once, from an instruction cache that does not have it yet.

use cubecl::prelude::*;

use super::kernel::Shape;
use crate::DType;
use crate::gpu::float::{LOWEST, is_zero, stored};
use crate::gpu::scratch::{VACANT, first_of, get, second_of};

/// Slots whose words are asked for at once.
const AT_ONCE: u32 = 16;

/// Counts this cube in; how many cubes of the KV head had begun before.
#[cube]
pub(crate) fn enter(part_ml: &mut Array<Atomic<u64>>, rows: u32, matrix: u32, slots: u32) -> u32 {
    // The count begins at VACANT, which is -1.
    u32::cast_from(part_ml[count_of(rows, matrix, slots)].fetch_add(1u64)) + 1u32
}

/// Where the cubes of a KV head are counted: behind the maxima and sums of all.
#[cube]
fn count_of(rows: u32, matrix: u32, slots: u32) -> usize {
    (CUBE_COUNT_Y * CUBE_COUNT_Z * rows * slots + matrix) as usize
}

/// Merges the slots of a KV head in order, and leaves all its words vacant. A warp takes 64 channels of a row at a time.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn join(
    part_o: &mut Array<Atomic<u64>>,
    part_ml: &mut Array<Atomic<u64>>,
    out: &mut Array<u16>,
    lse: &mut Array<f32>,
    rows: u32,
    matrix: u32,
    slots: u32,
    no_token: f32,
    lane: u32,
    warp: u32,
    #[comptime] shape: Shape,
) {
    let head_dim = comptime!(shape.values.head_dim);
    let blocks = comptime!(shape.values.head_dim.div_ceil(64));
    let first_row = matrix * rows;
    for unit in range_stepped(warp, rows * blocks, comptime!(shape.warps)) {
        let row = first_row + unit / blocks;
        let channel = unit % blocks * 64u32 + lane * 2u32;
        merge_row(part_o, part_ml, out, lse, row, slots, channel, lane, no_token, head_dim, shape.out_dtype);
    }
    // Several warps read the maxima and sums of a row.
    sync_cube();
    for i in range_stepped(UNIT_POS_X, rows * slots, comptime!(shape.warps * 32)) {
        part_ml[(first_row * slots + i) as usize].store(VACANT);
    }
    if UNIT_POS_X == 0u32 {
        part_ml[count_of(rows, matrix, slots)].store(VACANT);
    }
}

/// Two channels of a row from `channel` on, if it has them. All lanes of a warp have channels of the same row.
#[cube]
#[allow(clippy::too_many_arguments)]
fn merge_row(
    part_o: &mut Array<Atomic<u64>>,
    part_ml: &mut Array<Atomic<u64>>,
    out: &mut Array<u16>,
    lse: &mut Array<f32>,
    row: u32,
    slots: u32,
    channel: u32,
    lane: u32,
    no_token: f32,
    #[comptime] head_dim: u32,
    #[comptime] out_dtype: DType,
) {
    // Lanes past the row read its last channels.
    let stride = comptime!(head_dim / 2);
    let column = min(channel, comptime!(head_dim - 2)) / 2u32;
    // Asked for here and needed when the channels are there.
    let mut pair = 0u64;
    let first = row * slots;
    if lane < min(slots, AT_ONCE) {
        pair = part_ml[(first + lane) as usize].load();
    }
    let mut most = f32::new(LOWEST);
    for begin in range_stepped(AT_ONCE, slots, AT_ONCE) {
        if begin + lane < slots && lane < AT_ONCE {
            most = max(most, first_of(get(part_ml, first + begin + lane)));
        }
    }
    let mut left = 0.0f32;
    let mut right = 0.0f32;
    let mut sum = 0.0f32;
    for begin in range_stepped(0u32, slots, AT_ONCE) {
        let count = min(slots - begin, AT_ONCE);
        // Without branches, so that all are under way at once; what is not there is asked for again with the rest.
        let mut words = Array::<u64>::new(AT_ONCE as usize);
        let mut missing = true;
        while missing {
            #[unroll]
            for i in 0..AT_ONCE {
                words[i as usize] = part_o[((first + begin + min(i, count - 1u32)) * stride + column) as usize].load();
            }
            missing = false;
            #[unroll]
            for i in 0..AT_ONCE {
                missing = missing || words[i as usize] == VACANT;
            }
        }
        let mut m = f32::new(LOWEST);
        let mut l = 0.0f32;
        if lane < count {
            if pair == VACANT || begin > 0u32 {
                pair = get(part_ml, first + begin + lane);
            }
            m = first_of(pair);
            l = second_of(pair);
        }
        if begin == 0u32 {
            most = plane_max(max(most, m));
        }
        let weight = select(is_zero(l), 0.0f32, f32::exp(m - most));
        let mass = l * weight;
        #[unroll]
        for i in 0..AT_ONCE {
            let weight = plane_shuffle(weight, i);
            sum += plane_shuffle(mass, i);
            let word = select(i < count, words[i as usize], 0u64);
            left += weight * first_of(word);
            right += weight * second_of(word);
        }
    }
    if channel < head_dim {
        for slot in first..first + slots {
            part_o[(slot * stride + column) as usize].store(VACANT);
        }
        let norm = select(is_zero(sum), 0.0f32, 1.0f32 / sum);
        let at = (row * head_dim + channel) as usize;
        out[at] = stored::<u16>(left * norm, out_dtype);
        out[at + 1] = stored::<u16>(right * norm, out_dtype);
    }
    if channel == 0u32 {
        lse[row as usize] = select(is_zero(sum), no_token, most + f32::ln(sum));
    }
}
