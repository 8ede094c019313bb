//! The prefill kernel: tiles of queries against tiles of decoded rows, f32 arithmetic, any pair of formats.
//!
//! A cube holds a block of query rows in shared memory and walks through the tokens that they see. A tile of keys is
//! decoded into shared memory once for all of them, then, in its place, the tile of values. Units form a grid of 8 x 16:
//! for the scores a unit owns every 8th row and every 16th token, for the output every 8th row and every 16th quad of
//! channels, so that each element read from shared memory serves several products.

use std::ops::Range;

use cubecl::prelude::*;

use crate::DType;
use crate::attend::decode::gpu::{Cuts, CutsLaunch, Parts, Queries};
use crate::attend::{Geometry, Options};
use crate::format::gpu::{BLOCK, Layout, ReadRows, Side, float_at, place};
use crate::gpu::float::{LOWEST, weight_of};
use crate::gpu::{grid, word_array};

type Quad = Vector<f32, Const<4>>;

/// Units of a cube.
const UNITS: usize = 128;
/// The grid of units: rows, and tokens or channels.
const ROW_UNITS: usize = 8;
const COLUMN_UNITS: usize = 16;

/// What a kernel must know of the shape of a call when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    /// Query rows of a unit.
    rows: usize,
    /// Tokens of a unit.
    tokens: usize,
    /// Elements of a row.
    head_dim: u32,
    /// How queries are stored.
    dtype: DType,
}

impl Shape {
    /// Query rows of a cube.
    fn all_rows(self) -> usize {
        self.rows * ROW_UNITS
    }

    /// Tokens of a tile.
    fn all_tokens(self) -> usize {
        self.tokens * COLUMN_UNITS
    }

    /// Blocks of channels of a row.
    fn blocks(self) -> usize {
        (self.head_dim as usize).div_ceil(BLOCK)
    }

    /// Quads of channels of a row; one more apart in memory, so that equal channels of several rows lie in different
    /// banks.
    fn quads(self) -> usize {
        self.blocks() * BLOCK / 4
    }

    fn stride(self) -> usize {
        self.quads() + 1
    }

    /// Units that share the softmax of one row: a power of two of at most 8, so that they lie in one plane of any size.
    fn lanes(self) -> usize {
        UNITS / self.all_rows()
    }

    fn bytes(self) -> usize {
        let rows = (self.all_rows() + self.all_tokens()) * self.stride() * 16;
        rows + 4 * self.all_rows() * (self.all_tokens() + 2)
    }
}

/// The kernel, sized for a device and a geometry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiles {
    shape: Shape,
}

impl Tiles {
    /// The largest tiles that fit the device's shared memory, `None` where none does.
    pub(crate) fn new<R: Runtime>(client: &ComputeClient<R>, geometry: Geometry, dtype: DType) -> Option<Self> {
        // Two cubes of a multiprocessor hide each other's waits.
        let limit = client.properties().hardware.max_shared_memory_size.min(100 << 10);
        let sizes = [(8, 4), (8, 2), (4, 4), (4, 2), (4, 1), (2, 1)];
        let shape = |(rows, tokens)| Shape { rows, tokens, head_dim: geometry.head_dim as u32, dtype };
        // What a unit accumulates must stay in registers.
        let fits = |s: &Shape| s.bytes() <= limit && s.rows * s.quads().div_ceil(COLUMN_UNITS) <= 16;
        sizes.into_iter().map(shape).find(fits).map(|shape| Tiles { shape })
    }

    /// Blocks of query rows of a KV head.
    pub(crate) fn row_blocks(self, geometry: Geometry) -> usize {
        (geometry.group() * geometry.s_q).div_ceil(self.shape.all_rows())
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
        let row_blocks = self.row_blocks(g);
        let cubes = g.batch * g.kv_heads * row_blocks * slots.len();
        let total_rows = g.batch * g.q_heads * g.s_q;
        // SAFETY: the kernel reads rows below `capacity` and writes slots below `slots`, which the host sized.
        unsafe {
            tiles::launch_unchecked::<K, V, R>(
                client,
                grid(cubes),
                CubeDim::new_1d(UNITS as u32),
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
                slots.len() as u32,
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
                self.shape,
            );
        }
    }
}

/// Decodes the rows of `tile..end` of a matrix into shared memory; rows past the end become 0.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load<F: ReadRows, C: Size, P: Size>(
    codes: &Array<Vector<u32, C>>,
    first: &Array<Vector<u32, P>>,
    second: &Array<Vector<u32, P>>,
    matrix: u32,
    tile: u32,
    end: u32,
    capacity: u32,
    rows: &mut SharedMemory<Quad>,
    #[comptime] layout: Layout,
    #[comptime] shape: Shape,
) {
    let blocks = comptime!(shape.blocks() as u32);
    let mut x = Array::<f32>::new(BLOCK);
    for i in range_stepped(UNIT_POS, comptime!((shape.all_tokens() * shape.blocks()) as u32), comptime!(UNITS as u32)) {
        let token = i / blocks;
        let block = i % blocks;
        let mut near = Quad::new(0.0f32);
        let mut far = Quad::new(0.0f32);
        if tile + token < end {
            let at = place(matrix, tile + token, capacity, layout);
            F::block::<C, P>(codes, first, second, at, block * comptime!(BLOCK as u32), &mut x, layout);
            #[unroll]
            for c in 0..4usize {
                near[c] = x[c];
                far[c] = x[comptime!(c + 4)];
            }
        }
        let to = (token * comptime!(shape.stride() as u32) + block * 2u32) as usize;
        rows[to] = near;
        rows[to + 1] = far;
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn tiles<K: ReadRows, V: ReadRows, KC: Size, KP: Size, VC: Size, VP: Size>(
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
    let rows = comptime!(shape.rows);
    let tokens = comptime!(shape.tokens);
    let all_rows = comptime!(shape.all_rows() as u32);
    let all_tokens = comptime!(shape.all_tokens() as u32);
    let head_dim = comptime!(shape.head_dim);
    let quads = comptime!(shape.quads());
    let stride = comptime!(shape.stride());
    let owned = comptime!(shape.quads().div_ceil(COLUMN_UNITS));
    let score_stride = comptime!(shape.all_tokens() as u32 + 1);

    let split = cube % splits;
    // The last rows see most tokens: first come, first served.
    let row_block = row_blocks - 1u32 - (cube / splits) % row_blocks;
    let matrix = cube / (splits * row_blocks);
    let sequence = matrix / kv_heads;
    let first_row = row_block * all_rows;
    let total = group * s_q;
    let (low, high, chunk, q_offset) = cuts.of(sequence);

    // Rows are ordered by query: the first sees the earliest token of the block, the last the latest.
    let last_row = min(first_row + all_rows, total) - 1u32;
    let mut start = low + split * chunk;
    let mut end = min(high, start + chunk);
    if causal != 0u32 {
        end = u32::cast_from(max(min(i32::cast_from(end), q_offset + i32::cast_from(last_row / group) + 1i32), 0i32));
    }
    if window > 0i32 {
        let from = q_offset + i32::cast_from(first_row / group) + 1i32 - window;
        start = u32::cast_from(max(i32::cast_from(start), from));
    }

    let mut q = SharedMemory::<Quad>::new(comptime!(shape.all_rows() * shape.stride()));
    let mut kv = SharedMemory::<Quad>::new(comptime!(shape.all_tokens() * shape.stride()));
    let mut scores = SharedMemory::<f32>::new(comptime!(shape.all_rows() * (shape.all_tokens() + 1)));
    let mut keeps = SharedMemory::<f32>::new(comptime!(shape.all_rows()));
    for i in range_stepped(UNIT_POS, comptime!((shape.all_rows() * shape.quads()) as u32), comptime!(UNITS as u32)) {
        let local = i / comptime!(quads as u32);
        let row = first_row + local;
        let channel = (i % comptime!(quads as u32)) * 4u32;
        let mut four = Quad::new(0.0f32);
        if row < total {
            let at = ((matrix * group + row % group) * q_of + q_first + row / group) * head_dim + channel;
            #[unroll]
            for c in 0..4usize {
                if channel + comptime!(c as u32) < head_dim {
                    four[c] = float_at::<Const<1>>(queries, at + comptime!(c as u32), comptime!(shape.dtype)) * scale;
                }
            }
        }
        q[(local * comptime!(stride as u32) + channel / 4u32) as usize] = four;
    }

    let row_unit = UNIT_POS / comptime!(COLUMN_UNITS as u32);
    let column = UNIT_POS % comptime!(COLUMN_UNITS as u32);
    let mut acc = Array::<Quad>::new(comptime!(rows * owned));
    #[unroll]
    for i in 0..comptime!(rows * owned) {
        acc[i] = Quad::new(0.0f32);
    }
    let mut s = Array::<f32>::new(comptime!(rows * tokens));
    let mut q_quads = Array::<Quad>::new(rows);
    let mut k_quads = Array::<Quad>::new(tokens);
    // The softmax of a row belongs to a few neighbouring units, which all hold its state.
    let lanes = comptime!(shape.lanes() as u32);
    let soft_row = UNIT_POS / lanes;
    let lane = UNIT_POS % lanes;
    let steps = comptime!(shape.lanes().trailing_zeros());
    let mut m = f32::new(LOWEST);
    let mut l = 0.0f32;

    let mut tile = start;
    while tile < end {
        load::<K, KC, KP>(k_codes, k_first, k_second, matrix, tile, end, capacity, &mut kv, k_layout, shape);
        sync_cube();
        #[unroll]
        for i in 0..comptime!(rows * tokens) {
            s[i] = 0.0f32;
        }
        for d in 0..comptime!(quads as u32) {
            #[unroll]
            for r in 0..rows {
                q_quads[r] =
                    q[((row_unit + comptime!((r * ROW_UNITS) as u32)) * comptime!(stride as u32) + d) as usize];
            }
            #[unroll]
            for t in 0..tokens {
                k_quads[t] =
                    kv[((column + comptime!((t * COLUMN_UNITS) as u32)) * comptime!(stride as u32) + d) as usize];
            }
            #[unroll]
            for r in 0..rows {
                #[unroll]
                for t in 0..tokens {
                    #[unroll]
                    for c in 0..4usize {
                        s[comptime!(r * tokens + t)] += q_quads[r][c] * k_quads[t][c];
                    }
                }
            }
        }
        #[unroll]
        for r in 0..rows {
            let local = row_unit + comptime!((r * ROW_UNITS) as u32);
            let position = q_offset + i32::cast_from((first_row + local) / group);
            #[unroll]
            for t in 0..tokens {
                let at = column + comptime!((t * COLUMN_UNITS) as u32);
                let token = i32::cast_from(tile + at);
                let unseen = tile + at >= end
                    || (causal != 0u32 && token > position)
                    || (window > 0i32 && token <= position - window);
                scores[(local * score_stride + at) as usize] =
                    select(unseen, f32::new(LOWEST), s[comptime!(r * tokens + t)]);
            }
        }
        sync_cube();
        load::<V, VC, VP>(v_codes, v_first, v_second, matrix, tile, end, capacity, &mut kv, v_layout, shape);
        let mut most = m;
        for t in range_stepped(lane, all_tokens, lanes) {
            most = max(most, scores[(soft_row * score_stride + t) as usize]);
        }
        #[unroll]
        for i in 0..steps {
            most = max(most, plane_shuffle_xor(most, comptime!(1u32 << i)));
        }
        let keep = f32::exp(m - most);
        let mut sum = 0.0f32;
        for t in range_stepped(lane, all_tokens, lanes) {
            let at = (soft_row * score_stride + t) as usize;
            let score = scores[at];
            let weight = weight_of(score, most);
            scores[at] = weight;
            sum += weight;
        }
        #[unroll]
        for i in 0..steps {
            sum += plane_shuffle_xor(sum, comptime!(1u32 << i));
        }
        l = l * keep + sum;
        m = most;
        if lane == 0u32 {
            keeps[soft_row as usize] = keep;
        }
        sync_cube();
        #[unroll]
        for r in 0..rows {
            let keep = Quad::new(keeps[(row_unit + comptime!((r * ROW_UNITS) as u32)) as usize]);
            #[unroll]
            for j in 0..owned {
                acc[comptime!(r * owned + j)] *= keep;
            }
        }
        let count = min(all_tokens, end - tile);
        for t in 0..count {
            #[unroll]
            for j in 0..owned {
                // Where quads do not fill the last column of the grid, the surplus units repeat the last quad.
                let quad = min(column + comptime!((j * COLUMN_UNITS) as u32), comptime!(quads as u32 - 1));
                let value = kv[(t * comptime!(stride as u32) + quad) as usize];
                #[unroll]
                for r in 0..rows {
                    let local = row_unit + comptime!((r * ROW_UNITS) as u32);
                    let weight = scores[(local * score_stride + t) as usize];
                    acc[comptime!(r * owned + j)] += value * Quad::new(weight);
                }
            }
        }
        sync_cube();
        tile += all_tokens;
    }

    #[unroll]
    for r in 0..rows {
        let row = first_row + row_unit + comptime!((r * ROW_UNITS) as u32);
        if row < total {
            let slot = ((matrix * group + row % group) * s_q + row / group) * slots + first_slot + split;
            #[unroll]
            for j in 0..owned {
                let channel = (column + comptime!((j * COLUMN_UNITS) as u32)) * 4u32;
                #[unroll]
                for c in 0..4usize {
                    if channel + comptime!(c as u32) < head_dim {
                        part_o[(slot * head_dim + channel) as usize + c] = acc[comptime!(r * owned + j)][c];
                    }
                }
            }
        }
    }
    let row = first_row + soft_row;
    if lane == 0u32 && row < total {
        let slot = ((matrix * group + row % group) * s_q + row / group) * slots + first_slot + split;
        part_ml[(slot * 2u32) as usize] = m;
        part_ml[(slot * 2u32 + 1u32) as usize] = l;
    }
}
