//! The merge of partial results, in the order of segments and slots.
//!
//! A cube merges one query row. Units that share a channel take every n-th slot of each segment, counted from the
//! segment's first, so that how many slots another sequence has moves no term of a sum.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Parts, Queries, Skeleton};
use crate::DType;
use crate::attend::Geometry;
use crate::gpu::float::{LOWEST, stored};
use crate::gpu::{grid, small, word_array};

/// What the kernel must know when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    head_dim: u32,
    /// Units that share a channel.
    lanes: u32,
    /// Channels that are merged at a time.
    width: u32,
    dtype: DType,
}

impl Shape {
    fn units(self) -> u32 {
        (self.lanes * self.width).next_multiple_of(64)
    }
}

/// Merges the partial results of some queries into the output `[B, Hq, Sq, D]` and the log-sum-exp `[B, Hq, Sq]`. `ends` is
/// one past the last slot of each segment.
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge<R: Runtime>(
    client: &ComputeClient<R>,
    skeleton: Skeleton,
    parts: &Parts,
    ends: &[usize],
    queries: &Queries,
    geometry: Geometry,
    dtype: DType,
    out: &Handle,
    lse: &Handle,
) {
    let head_dim = geometry.head_dim;
    let heads = geometry.batch * geometry.q_heads;
    let (rows, all_rows) = (heads * geometry.s_q, heads * queries.of);
    let width = head_dim.min(256) as u32;
    let lanes = if skeleton == Skeleton::Decode { (512 / width).clamp(1, 8) } else { 1 };
    let shape = Shape { head_dim: head_dim as u32, lanes, width, dtype };
    // One segment ends with the slots and the first of two is a scalar: nothing to upload.
    let table = match ends.len() {
        0..=2 => parts.ml.clone(),
        _ => small(client, &ends.iter().map(|&end| end as u32).collect::<Vec<_>>()),
    };
    let launch = match dtype.size() {
        2 => merge_slots::launch_unchecked::<u16, R>,
        _ => merge_slots::launch_unchecked::<u32, R>,
    };
    // SAFETY: a cube works on one row below `rows`, and the arrays have the sizes given.
    unsafe {
        launch(
            client,
            grid(rows),
            CubeDim::new_1d(shape.units()),
            word_array(&parts.out, rows * parts.slots * head_dim),
            word_array(&parts.ml, rows * parts.slots * 2),
            word_array(&table, ends.len()),
            word_array(out, all_rows * head_dim),
            word_array(lse, all_rows),
            rows as u32,
            parts.slots as u32,
            ends.len() as u32,
            ends.first().map_or(0, |&end| end as u32),
            geometry.s_q as u32,
            queries.first as u32,
            queries.of as u32,
            f32::NEG_INFINITY,
            shape,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn merge_slots<O: Numeric>(
    part_o: &Array<f32>,
    part_ml: &Array<f32>,
    ends: &Array<u32>,
    out: &mut Array<O>,
    lse: &mut Array<f32>,
    rows: u32,
    slots: u32,
    segments: u32,
    first_end: u32,
    s_q: u32,
    q_first: u32,
    q_of: u32,
    no_token: f32,
    #[comptime] shape: Shape,
) {
    let row = CUBE_POS as u32;
    if row >= rows {
        terminate!();
    }
    let head_dim = comptime!(shape.head_dim);
    let width = comptime!(shape.width);
    let lanes = comptime!(shape.lanes);
    let target = (row / s_q) * q_of + q_first + row % s_q;
    let first = row * slots;
    let lane = UNIT_POS / width;
    let column = UNIT_POS % width;
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * shape.units() as usize));

    // The maximum, in any order.
    let mut most = f32::new(LOWEST);
    for s in range_stepped(UNIT_POS, slots, comptime!(shape.units())) {
        most = max(most, part_ml[((first + s) * 2u32) as usize]);
    }
    shared[UNIT_POS as usize] = most;
    sync_cube();
    for i in 0..min(slots, comptime!(shape.units())) {
        most = max(most, shared[i as usize]);
    }
    sync_cube();

    for begin in range_stepped(0u32, head_dim, width) {
        let channel = begin + column;
        let mut acc = 0.0f32;
        let mut sum = 0.0f32;
        if lane < lanes && channel < head_dim {
            let mut start = 0u32;
            for g in 0..segments {
                let mut end = slots;
                if g + 1u32 < segments {
                    end = first_end;
                    if segments > 2u32 {
                        end = ends[g as usize];
                    }
                }
                for s in range_stepped(start + lane, end, lanes) {
                    let at = first + s;
                    let l = part_ml[(at * 2u32 + 1u32) as usize];
                    let weight = f32::exp(part_ml[(at * 2u32) as usize] - most);
                    let part = part_o[(at * head_dim + channel) as usize];
                    sum += select(l > 0.0f32, l * weight, 0.0f32);
                    acc += select(l > 0.0f32, part * weight, 0.0f32);
                }
                start = end;
            }
        }
        if comptime!(shape.lanes > 1) {
            shared[UNIT_POS as usize] = acc;
            shared[(comptime!(shape.units()) + UNIT_POS) as usize] = sum;
            sync_cube();
            if lane == 0u32 {
                #[unroll]
                for i in 1..lanes {
                    acc += shared[(i * width + column) as usize];
                    sum += shared[(comptime!(shape.units() + i * shape.width) + column) as usize];
                }
            }
            sync_cube();
        }
        if lane == 0u32 && channel < head_dim {
            let value = select(sum > 0.0f32, acc / sum, 0.0f32);
            out[(target * head_dim + channel) as usize] = stored::<O>(value, comptime!(shape.dtype));
            if channel == 0u32 {
                lse[target as usize] = select(sum > 0.0f32, most + f32::ln(sum), no_token);
            }
        }
    }
}
