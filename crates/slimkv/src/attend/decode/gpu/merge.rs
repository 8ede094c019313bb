//! The merge of partial results, in the order of their slots.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Parts, Queries};
use crate::DType;
use crate::attend::Geometry;
use crate::gpu::float::{LOWEST, stored};
use crate::gpu::{grid, word_array};

const UNITS: u32 = 64;

/// Merges the partial results of some queries into the output `[B, Hq, Sq, D]` and the log-sum-exp `[B, Hq, Sq]`.
pub(crate) fn merge<R: Runtime>(
    client: &ComputeClient<R>,
    parts: &Parts,
    queries: &Queries,
    geometry: Geometry,
    dtype: DType,
    out: &Handle,
    lse: &Handle,
) {
    let head_dim = geometry.head_dim;
    let heads = geometry.batch * geometry.q_heads;
    let (rows, all_rows) = (heads * geometry.s_q, heads * queries.of);
    let launch = match dtype.size() {
        2 => merge_slots::launch_unchecked::<u16, R>,
        _ => merge_slots::launch_unchecked::<u32, R>,
    };
    // SAFETY: a cube works on one row below `rows`, and the arrays have the sizes given.
    unsafe {
        launch(
            client,
            grid(rows),
            CubeDim::new_1d(UNITS),
            word_array(&parts.out, rows * parts.slots * head_dim),
            word_array(&parts.ml, rows * parts.slots * 2),
            word_array(out, all_rows * head_dim),
            word_array(lse, all_rows),
            rows as u32,
            parts.slots as u32,
            geometry.s_q as u32,
            queries.first as u32,
            queries.of as u32,
            f32::NEG_INFINITY,
            head_dim as u32,
            dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn merge_slots<O: Numeric>(
    part_o: &Array<f32>,
    part_ml: &Array<f32>,
    out: &mut Array<O>,
    lse: &mut Array<f32>,
    rows: u32,
    slots: u32,
    s_q: u32,
    q_first: u32,
    q_of: u32,
    no_token: f32,
    #[comptime] head_dim: u32,
    #[comptime] dtype: DType,
) {
    let row = CUBE_POS as u32;
    if row >= rows {
        terminate!();
    }
    let target = (row / s_q) * q_of + q_first + row % s_q;
    let first = row * slots;
    let mut most = f32::new(LOWEST);
    for s in 0..slots {
        most = max(most, part_ml[((first + s) * 2u32) as usize]);
    }
    let mut sum = 0.0f32;
    for s in 0..slots {
        let at = ((first + s) * 2u32) as usize;
        if part_ml[at + 1] > 0.0f32 {
            sum += part_ml[at + 1] * f32::exp(part_ml[at] - most);
        }
    }
    for c in range_stepped(UNIT_POS, head_dim, UNITS) {
        let mut acc = 0.0f32;
        for s in 0..slots {
            let at = ((first + s) * 2u32) as usize;
            if part_ml[at + 1] > 0.0f32 {
                acc += part_o[((first + s) * head_dim + c) as usize] * f32::exp(part_ml[at] - most);
            }
        }
        let value = select(sum > 0.0f32, acc / sum, 0.0f32);
        out[(target * head_dim + c) as usize] = stored::<O>(value, dtype);
    }
    if UNIT_POS == 0u32 {
        lse[target as usize] = select(sum > 0.0f32, most + f32::ln(sum), no_token);
    }
}
