//! The kernel: warps that stream tiles through shared memory, each with an online softmax of its own.

use std::f32::consts::LOG2_E;

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::super::Cuts;
use super::finish::finish;
use super::join::{enter, join};
use super::products::{first_row, score_tile, value_tile};
use super::ring::{arrive, fetch, wait};
use super::softmax::{Seen, Softmax, softmax};
use crate::DType;
use crate::format::fragments::{F2, KeyTiles, Pair, Quad, Single, Tile, ValueTiles, key_params, value_params};
use crate::format::gpu::float_at;

/// What the kernel must know of a call when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub keys: Tile,
    pub values: Tile,
    /// Warps of a cube.
    pub warps: u32,
    /// Tiles that a warp keeps on their way or in use.
    pub stages: u32,
    /// Columns of eight query rows.
    pub columns: u32,
    /// Query rows for which the merge of the warps has room.
    pub rows: u32,
    /// How queries are stored.
    pub q_dtype: DType,
    /// How the output is.
    pub out_dtype: DType,
}

impl Shape {
    /// Tokens of a tile.
    pub(crate) fn tokens(self) -> u32 {
        self.keys.tokens
    }

    /// Copies of the query rows whose lanes split the tokens of a tile among them when weights are made.
    pub(crate) fn share(self) -> u32 {
        if (self.tokens() / 8).is_multiple_of(self.keys.copies) { self.keys.copies } else { 1 }
    }

    /// Bytes of shared memory.
    pub(crate) fn shared_bytes(self) -> u32 {
        let t = self.tokens();
        let tile = t * (self.keys.chunks() + self.values.chunks()) + key_params(self.keys) + value_params(self.values);
        let weights = self.columns * t;
        let merge = self.rows * (self.keys.head_dim + 1) * 4 + self.columns * 64;
        let queries = (self.columns * self.keys.head_dim).next_multiple_of(32) * 16;
        self.warps * ((tile * self.stages + weights) * 16 + merge) + queries + 256
    }
}

/// Writes the partial results of one split of one KV head: slot `first_slot + CUBE_POS_X` of its query rows. Where `merges`
/// is not 0 the last cube of a KV head to begin merges all slots.
///
/// Every warp takes each `warps`-th tile of the split and keeps `stages` of them in flight or in use. A warp reads only what
/// it copied itself; the barrier of a stage is shared, since CubeCL can index none by warp.
#[cube(launch_unchecked, fast_math = FastMath::all())]
#[allow(clippy::too_many_arguments)]
pub(crate) fn mma<K: KeyTiles, V: ValueTiles, KE: Float, VE: Float, P: Size>(
    queries: &Array<Single>,
    k_rows: &Array<Quad>,
    k_first: &Array<Quad>,
    k_second: &Array<Quad>,
    v_rows: &Array<Quad>,
    v_first: &Array<Vector<u32, P>>,
    v_second: &Array<Vector<u32, P>>,
    cuts: &Cuts,
    part_o: &mut Array<Atomic<u64>>,
    part_ml: &mut Array<Atomic<u64>>,
    out: &mut Array<u16>,
    lse: &mut Array<f32>,
    rows: u32,
    s_q: u32,
    capacity: u32,
    first_slot: u32,
    slots: u32,
    scale: f32,
    causal: u32,
    window: i32,
    eights: u32,
    merges: u32,
    no_token: f32,
    #[comptime] shape: Shape,
) {
    let (keys, values) = comptime!((shape.keys, shape.values));
    let tokens = comptime!(shape.tokens());
    let columns = comptime!(shape.columns as usize);
    let pairs = comptime!((shape.keys.head_dim / 8) as usize);
    let octets = comptime!((shape.tokens() / 8) as usize);
    let stages = comptime!(shape.stages);
    let warps = comptime!(shape.warps);
    let distinct_rows = comptime!(shape.keys.distinct_rows());
    let lane = UNIT_POS_X % 32u32;
    let warp = UNIT_POS_X / 32u32;
    let (g, t) = (lane / 4u32, lane % 4u32);
    let matrix = CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y;

    // ---- shared memory: a ring of tiles for each warp
    let ring = comptime!((shape.warps * shape.stages) as usize);
    let mut k_tiles = SharedMemory::<Quad>::new(comptime!(ring * (tokens * keys.chunks()) as usize));
    let mut v_tiles = SharedMemory::<Quad>::new(comptime!(ring * (tokens * values.chunks()) as usize));
    let mut k_params = SharedMemory::<Quad>::new(comptime!((ring * key_params(keys) as usize).max(1)));
    let mut v_params = SharedMemory::<Quad>::new(comptime!((ring * value_params(values) as usize).max(1)));
    let mut weights = SharedMemory::<u32>::new_aligned(comptime!((warps * tokens * 4) as usize * columns), 16usize);
    let mut query_pairs =
        SharedMemory::<Single>::new_aligned(comptime!((columns * pairs).next_multiple_of(4) * 32), 16usize);
    let arrived0 = Barrier::shared_uninit();
    let arrived1 = Barrier::shared_uninit();
    if UNIT_POS_X == 0u32 {
        arrived0.init_manual(warps);
        arrived1.init_manual(warps);
    }

    // Asked for here, so that nothing waits for the answer.
    let mut last = SharedMemory::<u32>::new(1usize);
    let mut before = 0u32;
    if merges != 0u32 && UNIT_POS_X == 0u32 {
        before = enter(part_ml, rows, matrix, slots);
    }

    // ---- this cube's tiles
    let (low, high, chunk, q_offset) = cuts.of(CUBE_POS_Z);
    let begin = min(low + CUBE_POS_X * chunk, high);
    let end = min(begin + chunk, high);
    let rounds = (end - begin + comptime!(warps * tokens - 1)) / comptime!(warps * tokens);
    sync_cube();

    // ---- queries, asked for before the tiles so that they come first: entry i of a unit is pair `i * units + UNIT_POS_X`
    let entries = comptime!((shape.columns as usize * pairs).div_ceil(shape.warps as usize));
    let words = comptime!(shape.q_dtype.size() / 2);
    let mut asked = Array::<Single>::new(comptime!(entries * words));
    #[unroll]
    for i in 0..entries {
        let (row, channel) = place(UNIT_POS_X + comptime!(i as u32 * warps * 32), pairs as u32, distinct_rows, keys);
        #[unroll]
        for word in 0..words {
            asked[comptime!(i * words + word)] = Single::new(0u32);
            if row < rows {
                let at = ((matrix * rows + row) * comptime!(keys.head_dim) + channel) / 2u32 * comptime!(words as u32);
                asked[comptime!(i * words + word)] = queries[at as usize + word];
            }
        }
    }

    // Not unrolled: what runs once should be short, for the instruction cache has none of it.
    for s in 0..min(rounds, stages.runtime()) {
        let token = begin + (warp + s * warps) * tokens;
        if token < end {
            fetch::<K, V, P>(
                k_rows,
                k_first,
                k_second,
                v_rows,
                v_first,
                v_second,
                &mut k_tiles,
                &mut k_params,
                &mut v_tiles,
                &mut v_params,
                matrix,
                capacity,
                high,
                token,
                warp * stages + s,
                lane,
                keys,
                values,
            );
        }
        arrive(&arrived0, &arrived1, s, lane);
    }

    // ---- queries as right operands, in the order of the channels of a lane
    #[unroll]
    for i in 0..entries {
        let entry = UNIT_POS_X + comptime!(i as u32 * warps * 32);
        if entry < comptime!((columns * pairs * 32) as u32) {
            let element = comptime!(2 * i as u32).runtime();
            let mut both = Pair::<KE>::new(KE::from_int(0));
            both[0] = KE::cast_from(float_at::<Const<1>>(&asked, element, comptime!(shape.q_dtype)));
            both[1] = KE::cast_from(float_at::<Const<1>>(&asked, element + 1u32, comptime!(shape.q_dtype)));
            let at = entry / 128u32 * 128u32 + entry % 32u32 * 4u32 + word_place(entry / 32u32 % 4u32);
            query_pairs[at as usize] = Single::new(u32::reinterpret(both));
        }
    }
    sync_cube();
    let mut prepared = Array::<u32>::new(comptime!(columns * pairs));
    #[unroll]
    for p in 0..comptime!(columns * pairs) {
        let at = comptime!((p / 4 * 128) as u32) + word_place(comptime!((p % 4) as u32).runtime()) + lane * 4u32;
        prepared[p] = K::prepare::<KE>(query_pairs[at as usize][0], comptime!(p % pairs), keys);
    }

    // ---- state
    let seen = Seen::new(low, high, q_offset, s_q, t, causal, window, columns, distinct_rows);
    let mut state = Softmax::new(columns);
    let tiles = comptime!((values.head_dim / 16) as usize);
    let mut acc = Array::<F2>::new(comptime!(columns * tiles * 2));
    #[unroll]
    for j in 0..comptime!(columns * tiles * 2) {
        acc[j] = F2::new(0.0f32);
    }
    let mut zeros = Array::<F2>::new(comptime!(2 * columns));
    #[unroll]
    for x in 0..comptime!(2 * columns) {
        zeros[x] = F2::new(0.0f32);
    }
    let v_lane = first_row(lane, values);

    if UNIT_POS_X == 0u32 {
        last[0] = select(merges != 0u32 && before + 1u32 == slots, 1u32, 0u32);
    }

    for round in 0..rounds {
        let stage = round % stages;
        wait(&arrived0, &arrived1, stage, round / stages % 2u32);
        let token = begin + (warp + round * warps) * tokens;
        let slot = warp * stages + stage;
        if token < end {
            let mut scores = Array::<F2>::new(comptime!(columns * octets));
            score_tile::<K, KE>(
                &query_pairs,
                &prepared,
                &k_tiles,
                &k_params,
                slot,
                lane,
                scale * LOG2_E,
                &mut scores,
                columns,
                keys,
            );
            let mut p = Array::<u32>::new(comptime!(columns * octets));
            softmax::<VE>(
                &mut scores,
                token as i32,
                g,
                lane,
                warp,
                &seen,
                &mut state,
                &mut acc,
                &mut zeros,
                &mut weights,
                &mut p,
                tokens,
                comptime!(tiles * 2),
                columns,
                comptime!(shape.share()),
            );
            value_tile::<V, VE>(
                &p, &v_tiles, &v_params, slot, lane, v_lane, eights, &mut acc, &mut zeros, columns, values,
            );
        }
        if round + stages < rounds {
            sync_plane();
            let token = token + comptime!(stages * warps * tokens);
            if token < end {
                fetch::<K, V, P>(
                    k_rows,
                    k_first,
                    k_second,
                    v_rows,
                    v_first,
                    v_second,
                    &mut k_tiles,
                    &mut k_params,
                    &mut v_tiles,
                    &mut v_params,
                    matrix,
                    capacity,
                    high,
                    token,
                    slot,
                    lane,
                    keys,
                    values,
                );
            }
            arrive(&arrived0, &arrived1, stage, lane);
        }
    }
    sync_cube();
    finish(
        &mut state,
        &acc,
        &zeros,
        part_o,
        part_ml,
        rows,
        matrix * rows,
        slots,
        first_slot + CUBE_POS_X,
        lane,
        warp,
        shape,
    );
    if last[0] != 0u32 {
        join(part_o, part_ml, out, lse, rows, matrix, slots, no_token, lane, warp, shape);
    }
}

/// Where in a quad the word number `i` of four lies: those that are multiplied together lie side by side.
#[cube]
fn word_place(i: u32) -> u32 {
    i % 2u32 * 2u32 + i / 2u32
}

/// The query row and the first of the two channels of an entry of the right operands.
#[cube]
fn place(entry: u32, #[comptime] pairs: u32, #[comptime] distinct_rows: u32, #[comptime] keys: Tile) -> (u32, u32) {
    let pair = (entry / 32u32) % pairs;
    let row = entry / comptime!(pairs * 32) * 8u32 + (entry % 32u32) / 4u32 % distinct_rows;
    let half_run = comptime!(keys.run() / 2);
    (row, (4u32 * (pair / half_run) + entry % 4u32) * comptime!(keys.run()) + 2u32 * (pair % half_run))
}
