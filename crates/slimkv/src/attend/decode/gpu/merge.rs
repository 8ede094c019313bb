//! The merge of partial results, in the order of segments and slots.
//!
//! A cube merges one query row. Units that share channels take every n-th slot of each segment, counted from the
//! segment's first, so that how many slots another sequence has moves no term of a sum. Each reads its slots once, with an
//! online softmax, so that one wait for memory is all that a merge of few slots takes.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Parts, Queries, Skeleton};
use crate::DType;
use crate::attend::Geometry;
use crate::gpu::float::{LOWEST, is_zero, stored};
use crate::gpu::{grid, small, word_array};

/// What the kernel must know when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    head_dim: u32,
    /// Channels of a unit.
    vector: u32,
    /// Units side by side.
    columns: u32,
    /// Units that share channels.
    lanes: u32,
    dtype: DType,
}

impl Shape {
    fn new(skeleton: Skeleton, head_dim: u32, dtype: DType) -> Self {
        let vector = if head_dim.is_multiple_of(4) { 4 } else { 1 };
        let columns = (head_dim / vector).min(256);
        let lanes = if skeleton == Skeleton::Decode { (512 / columns).clamp(1, 16) } else { 1 };
        Shape { head_dim, vector, columns, lanes, dtype }
    }

    fn units(self) -> u32 {
        (self.lanes * self.columns).next_multiple_of(64)
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
    let shape = Shape::new(skeleton, head_dim as u32, dtype);
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
            shape.vector as usize,
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
fn merge_slots<O: Numeric, N: Size>(
    part_o: &Array<Vector<f32, N>>,
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
    let vector = comptime!(shape.vector);
    let vectors = comptime!(shape.head_dim / shape.vector);
    let columns = comptime!(shape.columns);
    let lanes = comptime!(shape.lanes);
    let target = (row / s_q) * q_of + q_first + row % s_q;
    let first = row * slots;
    let lane = UNIT_POS / columns;
    let column = UNIT_POS % columns;
    let mut outs = SharedMemory::<Vector<f32, N>>::new(comptime!(shape.units() as usize));
    let mut mosts = SharedMemory::<f32>::new(comptime!((shape.units() / shape.columns + 1) as usize));
    let mut sums = SharedMemory::<f32>::new(comptime!((shape.units() / shape.columns + 1) as usize));

    for begin in range_stepped(0u32, vectors, columns) {
        let place = begin + column;
        let mut acc = Vector::<f32, N>::new(0.0f32);
        let mut sum = 0.0f32;
        let mut most = f32::new(LOWEST);
        if lane < lanes && place < vectors {
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
                    let m = part_ml[(at * 2u32) as usize];
                    let l = part_ml[(at * 2u32 + 1u32) as usize];
                    let part = part_o[(at * vectors + place) as usize];
                    // A maximum may be infinite: what keeps it is not scaled.
                    let higher = max(most, m);
                    let fade = select(most == higher, 1.0f32, f32::exp(most - higher));
                    acc *= Vector::<f32, N>::new(fade);
                    sum *= fade;
                    if !is_zero(l) {
                        let weight = f32::exp(m - higher);
                        acc += part * Vector::<f32, N>::new(weight);
                        sum += l * weight;
                    }
                    most = higher;
                }
                start = end;
            }
        }
        if comptime!(shape.lanes > 1) {
            outs[UNIT_POS as usize] = acc;
            if column == 0u32 {
                mosts[lane as usize] = most;
                sums[lane as usize] = sum;
            }
            sync_cube();
            if lane == 0u32 {
                #[unroll]
                for i in 1..lanes {
                    most = max(most, mosts[i as usize]);
                }
                acc = Vector::<f32, N>::new(0.0f32);
                sum = 0.0f32;
                #[unroll]
                for i in 0..lanes {
                    let l = sums[i as usize];
                    let part = outs[(i * columns + column) as usize];
                    if !is_zero(l) {
                        let weight = f32::exp(mosts[i as usize] - most);
                        acc += part * Vector::<f32, N>::new(weight);
                        sum += l * weight;
                    }
                }
            }
            sync_cube();
        }
        if lane == 0u32 && place < vectors {
            #[unroll]
            for i in 0..vector {
                let value = select(is_zero(sum), 0.0f32, acc[i as usize] / sum);
                let at = target * comptime!(shape.head_dim) + place * vector + i;
                out[at as usize] = stored::<O>(value, comptime!(shape.dtype));
            }
            if place == 0u32 {
                lse[target as usize] = select(is_zero(sum), no_token, most + f32::ln(sum));
            }
        }
    }
}
