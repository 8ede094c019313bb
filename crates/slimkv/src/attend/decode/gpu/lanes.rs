//! The decode kernel without tensor cores: any plane size, head dimension and pair of formats, f32 arithmetic.
//!
//! A cube works through tiles of as many tokens as it has units. For the scores a unit is a token, and reads the queries
//! from shared memory; for the output a unit is a block of channels of every n-th token of the tile, and reads the
//! weights from shared memory. Every decoded block of a row serves all query rows of the cube.

use std::ops::Range;

use cubecl::prelude::*;

use super::super::MAX_ROWS;
use super::{Cuts, CutsLaunch, Parts, Queries};
use crate::DType;
use crate::attend::{Geometry, Options};
use crate::format::gpu::{BLOCK, Layout, ReadRows, Side, float_at, place};
use crate::gpu::float::{LOWEST, weight_of};
use crate::gpu::{grid, word_array};

/// Tokens of a tile, and units of a cube: whole planes of any size up to 64.
pub(crate) const TILE: usize = 128;

/// What a kernel must know of the shape of a call when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Units of a cube, and tokens of a tile.
    units: u32,
    /// Query rows of a cube.
    rows: u32,
    /// Elements of a row.
    head_dim: u32,
    /// Slots for one value a plane.
    planes: u32,
    /// How queries are stored.
    dtype: DType,
}

impl Shape {
    /// Blocks of channels of a row.
    fn blocks(self) -> u32 {
        self.head_dim.div_ceil(BLOCK as u32)
    }
}

/// The kernel, sized for a device and a geometry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lanes {
    units: usize,
    rows: usize,
    planes: usize,
}

impl Lanes {
    /// `None` where not even one query row fits the device's shared memory.
    pub(crate) fn new<R: Runtime>(client: &ComputeClient<R>, geometry: Geometry) -> Option<Self> {
        let hardware = &client.properties().hardware;
        let blocks = geometry.head_dim.div_ceil(BLOCK);
        let units = TILE * blocks.div_ceil(TILE);
        let planes = units / (hardware.plane_size_min.max(1) as usize);
        let limit = hardware.max_shared_memory_size.min(48 << 10);
        let bytes = |rows: usize| 4 * (rows * (blocks * BLOCK + units + planes) + BLOCK * units);
        let wanted = (geometry.group() * geometry.s_q).min(MAX_ROWS);
        let rows = [wanted, 8, 4, 2, 1].into_iter().find(|&rows| rows <= wanted && bytes(rows) <= limit)?;
        (units <= hardware.max_units_per_cube as usize).then_some(Lanes { units, rows, planes })
    }

    /// Blocks of query rows of a KV head.
    pub(crate) fn row_blocks(self, geometry: Geometry) -> usize {
        (geometry.group() * geometry.s_q).div_ceil(self.rows)
    }

    /// Writes the partial results of one segment.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn launch<K: ReadRows, V: ReadRows, R: Runtime>(
        self,
        client: &ComputeClient<R>,
        queries: &Queries,
        keys: &Side,
        values: &Side,
        cuts: CutsLaunch<R>,
        slots: Range<usize>,
        parts: &Parts,
        options: Options,
        g: Geometry,
    ) {
        let splits = slots.len();
        let row_blocks = self.row_blocks(g);
        let cubes = g.batch * g.kv_heads * row_blocks * splits;
        let shape = Shape {
            units: self.units as u32,
            rows: self.rows as u32,
            head_dim: g.head_dim as u32,
            planes: self.planes as u32,
            dtype: queries.dtype,
        };
        let total_rows = g.batch * g.q_heads * g.s_q;
        // SAFETY: the kernel reads rows below `capacity` and writes slots below `slots`, which the host sized.
        unsafe {
            lanes::launch_unchecked::<K, V, R>(
                client,
                grid(cubes),
                CubeDim::new_1d(self.units as u32),
                keys.layout.widths.0,
                keys.layout.widths.1,
                values.layout.widths.0,
                values.layout.widths.1,
                word_array(&queries.handle, queries.words),
                word_array(&keys.codes, keys.code_words),
                word_array(&keys.params[0], keys.param_words),
                word_array(&keys.params[1], keys.param_words),
                word_array(&values.codes, values.code_words),
                word_array(&values.params[0], values.param_words),
                word_array(&values.params[1], values.param_words),
                cuts,
                word_array(&parts.out, total_rows * parts.slots * g.head_dim),
                word_array(&parts.ml, total_rows * parts.slots * 2),
                cubes as u32,
                splits as u32,
                row_blocks as u32,
                g.kv_heads as u32,
                g.group() as u32,
                g.s_q as u32,
                queries.first as u32,
                queries.of as u32,
                keys.capacity,
                slots.start as u32,
                parts.slots as u32,
                options.scale,
                u32::from(options.causal),
                options.window.min(1 << 30) as i32,
                keys.layout,
                values.layout,
                shape,
            );
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn lanes<K: ReadRows, V: ReadRows, KC: Size, KP: Size, VC: Size, VP: Size>(
    queries: &Array<Vector<u32, Const<1>>>,
    k_codes: &Array<Vector<u32, KC>>,
    k_first: &Array<Vector<u32, KP>>,
    k_second: &Array<Vector<u32, KP>>,
    v_codes: &Array<Vector<u32, VC>>,
    v_first: &Array<Vector<u32, VP>>,
    v_second: &Array<Vector<u32, VP>>,
    cuts: &Cuts,
    part_o: &mut Array<f32>,
    part_ml: &mut Array<f32>,
    cubes: u32,
    splits: u32,
    row_blocks: u32,
    kv_heads: u32,
    group: u32,
    s_q: u32,
    q_first: u32,
    q_of: u32,
    capacity: u32,
    first_slot: u32,
    slots: u32,
    scale: f32,
    causal: u32,
    window: i32,
    #[comptime] k_layout: Layout,
    #[comptime] v_layout: Layout,
    #[comptime] shape: Shape,
) {
    let cube = CUBE_POS as u32;
    if cube >= cubes {
        terminate!();
    }
    let units = comptime!(shape.units);
    let rows = comptime!(shape.rows as usize);
    let head_dim = comptime!(shape.head_dim);
    let blocks = comptime!(shape.blocks());
    let quads = comptime!(shape.blocks() as usize * BLOCK / 4);

    let split = cube % splits;
    let row_block = (cube / splits) % row_blocks;
    let matrix = cube / (splits * row_blocks);
    let sequence = matrix / kv_heads;
    let first_row = row_block * comptime!(shape.rows);
    let all_rows = group * s_q;
    let (low, high, chunk, q_offset) = cuts.of(sequence);

    // Rows of a KV head are ordered by query, then by head, so that the rows of a cube see nearly the same tokens.
    let mut unseen_from = Array::<i32>::new(rows);
    let mut seen_from = Array::<i32>::new(rows);
    let mut end = low;
    let mut start = high;
    #[unroll]
    for r in 0..rows {
        let row = first_row + comptime!(r as u32);
        let position = q_offset + i32::cast_from(row / group);
        let mut to = i32::cast_from(high);
        let mut from = i32::cast_from(low);
        if causal != 0u32 {
            to = min(to, position + 1i32);
        }
        if window > 0i32 {
            from = max(from, position + 1i32 - window);
        }
        if row >= all_rows {
            to = from;
        }
        unseen_from[r] = to;
        seen_from[r] = from;
        if to > from {
            end = max(end, u32::cast_from(to));
            start = min(start, u32::cast_from(from));
        }
    }
    start = max(start, low + split * chunk);
    end = min(end, min(high, low + split * chunk + chunk));

    let mut q = SharedMemory::<Vector<f32, Const<4>>>::new(comptime!(rows * quads));
    for i in range_stepped(UNIT_POS, comptime!((rows * quads) as u32), units) {
        let row = first_row + i / comptime!(quads as u32);
        let channel = (i % comptime!(quads as u32)) * 4u32;
        let mut four = Vector::<f32, Const<4>>::new(0.0f32);
        if row < all_rows {
            let head = matrix * group + row % group;
            let at = (head * q_of + q_first + row / group) * head_dim;
            #[unroll]
            for c in 0..4usize {
                if channel + comptime!(c as u32) < head_dim {
                    let x = float_at::<Const<1>>(queries, at + channel + comptime!(c as u32), comptime!(shape.dtype));
                    four[c] = x * scale;
                }
            }
        }
        q[i as usize] = four;
    }
    let mut weights = SharedMemory::<f32>::new(comptime!(rows * shape.units as usize));
    let mut planes = SharedMemory::<f32>::new(comptime!(rows * shape.planes as usize));

    let mut m = Array::<f32>::new(rows);
    let mut l = Array::<f32>::new(rows);
    let mut scores = Array::<f32>::new(rows);
    let mut acc = Array::<f32>::new(comptime!(rows * BLOCK));
    #[unroll]
    for r in 0..rows {
        m[r] = f32::new(LOWEST);
        l[r] = 0.0f32;
        #[unroll]
        for i in 0..BLOCK {
            acc[comptime!(r * BLOCK + i)] = 0.0f32;
        }
    }
    let mut x = Array::<f32>::new(BLOCK);
    let token_lanes = comptime!(shape.units / shape.blocks());
    let block = UNIT_POS % blocks;
    let token_lane = UNIT_POS / blocks;
    sync_cube();

    let mut tile = start;
    while tile < end {
        let token = tile + UNIT_POS;
        #[unroll]
        for r in 0..rows {
            scores[r] = 0.0f32;
        }
        if token < end {
            let at = place(matrix, token, capacity, k_layout);
            for b in 0..blocks {
                K::block::<KC, KP>(k_codes, k_first, k_second, at, b * comptime!(BLOCK as u32), &mut x, k_layout);
                #[unroll]
                for r in 0..rows {
                    let near = q[(b * 2u32) as usize + comptime!(r * quads)];
                    let far = q[(b * 2u32) as usize + comptime!(r * quads + 1)];
                    #[unroll]
                    for i in 0..4usize {
                        scores[r] += near[i] * x[i];
                    }
                    #[unroll]
                    for i in 0..4usize {
                        scores[r] += far[i] * x[comptime!(i + 4)];
                    }
                }
            }
        }
        #[unroll]
        for r in 0..rows {
            let here = i32::cast_from(token);
            let visible = token < end && here >= seen_from[r] && here < unseen_from[r];
            scores[r] = select(visible, scores[r], f32::new(LOWEST));
            let most = plane_max(scores[r]);
            if UNIT_POS_PLANE == 0u32 {
                planes[PLANE_POS as usize + comptime!(r * shape.planes as usize)] = most;
            }
        }
        sync_cube();
        #[unroll]
        for r in 0..rows {
            let mut most = m[r];
            for p in 0..units / PLANE_DIM {
                most = max(most, planes[p as usize + comptime!(r * shape.planes as usize)]);
            }
            let keep = f32::exp(m[r] - most);
            let weight = weight_of(scores[r], most);
            weights[UNIT_POS as usize + comptime!(r * shape.units as usize)] = weight;
            l[r] = l[r] * keep + weight;
            m[r] = most;
            #[unroll]
            for i in 0..BLOCK {
                acc[comptime!(r * BLOCK + i)] *= keep;
            }
        }
        sync_cube();
        if token_lane < token_lanes {
            let count = min(units, end - tile);
            for t in range_stepped(token_lane, count, token_lanes) {
                let at = place(matrix, tile + t, capacity, v_layout);
                V::block::<VC, VP>(v_codes, v_first, v_second, at, block * comptime!(BLOCK as u32), &mut x, v_layout);
                #[unroll]
                for r in 0..rows {
                    let weight = weights[t as usize + comptime!(r * shape.units as usize)];
                    #[unroll]
                    for i in 0..BLOCK {
                        acc[comptime!(r * BLOCK + i)] += weight * x[i];
                    }
                }
            }
        }
        sync_cube();
        tile += units;
    }

    let mut stage = SharedMemory::<f32>::new(comptime!(BLOCK * shape.units as usize));
    #[unroll]
    for r in 0..rows {
        let sum = plane_sum(l[r]);
        if UNIT_POS_PLANE == 0u32 {
            planes[PLANE_POS as usize + comptime!(r * shape.planes as usize)] = sum;
        }
        #[unroll]
        for i in 0..BLOCK {
            stage[UNIT_POS as usize * BLOCK + i] = acc[comptime!(r * BLOCK + i)];
        }
        sync_cube();
        let row = first_row + comptime!(r as u32);
        if row < all_rows {
            let head = matrix * group + row % group;
            let slot = (head * s_q + row / group) * slots + first_slot + split;
            for c in range_stepped(UNIT_POS, head_dim, units) {
                let mut sum = 0.0f32;
                for lane in 0..token_lanes {
                    sum += stage[(lane * comptime!(shape.blocks() * BLOCK as u32) + c) as usize];
                }
                part_o[(slot * head_dim + c) as usize] = sum;
            }
            if UNIT_POS == 0u32 {
                let mut sum = 0.0f32;
                for p in 0..units / PLANE_DIM {
                    sum += planes[p as usize + comptime!(r * shape.planes as usize)];
                }
                part_ml[(slot * 2u32) as usize] = m[r];
                part_ml[(slot * 2u32 + 1u32) as usize] = sum;
            }
        }
        sync_cube();
    }
}
