//! Scores from key codes.

use std::arch::x86_64::*;
use std::ops::Range;

use super::lanes::LaneKeys;
use super::quantizer;
use super::spread::{Order, Spread};
use crate::attend::decode::cpu::{self as skeleton, Block, Keys, Queries};
use crate::cpu::product::{self, Codes, Steps, Sums};
use crate::cpu::{Isa, Worker};
use crate::format::affine::Axis;
use crate::format::affine::cpu::{self, Tiles};
use crate::format::decode_cpu::tile_stride;

/// Query rows of a register of byte planes; a tile of queries holds two of them: sixteen planes.
const QUAD: usize = 4;

/// Tokens of a tile of keys.
const TOKENS: usize = 16;

/// Tiles of a block.
const TILES: usize = skeleton::BLOCK / TOKENS;

/// Key codes that share parameters among tokens.
pub(crate) struct KeyPlan<'a> {
    pub(super) rows: Tiles<'a>,
    pub(super) spread: Spread,
    pub(super) row_bytes: usize,
}

impl<'a> KeyPlan<'a> {
    /// `None` where these rows or this machine need another way.
    pub fn new(isa: Isa, rows: Tiles<'a>) -> Option<Self> {
        let served =
            matches!(isa, Isa::Avx512 | Isa::Amx) && rows.axis == Axis::Tokens && rows.group.is_multiple_of(TOKENS);
        let (bits, row_bytes) = rows.row_layout();
        served.then(|| KeyPlan {
            spread: Spread::new(bits, rows.head_dim, row_bytes, Order::Channels),
            row_bytes,
            rows,
        })
    }
}

impl skeleton::KeyPlan for KeyPlan<'_> {
    fn keys<'a>(&'a self, rows: usize) -> Box<dyn Keys + 'a> {
        if let Some(keys) = LaneKeys::new(self, rows) {
            return Box::new(keys);
        }
        let (quads, stride, chunks) = (rows.div_ceil(QUAD), tile_stride(self.rows.head_dim), self.spread.chunks());
        let groups = TILES.min(skeleton::BLOCK / self.rows.group + 2);
        Box::new(IntegerKeys {
            plan: self,
            matrix: 0,
            rows,
            stride,
            queries: vec![0.0; quads * QUAD * stride],
            products: vec![0.0; QUAD * stride],
            folded: (0..groups).map(|_| Folded::new(quads, chunks)).collect(),
            keys: vec![Codes::ZERO; TILES * chunks],
            sums: vec![[Sums::ZERO; 4]; quads.div_ceil(2) * TILES / 4],
        })
    }
}

/// The keys of one KV head.
struct IntegerKeys<'a> {
    plan: &'a KeyPlan<'a>,
    matrix: usize,
    rows: usize,
    stride: usize,
    /// Query rows, padded to a multiple of [`QUAD`].
    queries: Vec<f32>,
    /// Four query rows times the scales of one group of tokens.
    products: Vec<f32>,
    /// The queries for each group of tokens in a block.
    folded: Vec<Folded>,
    /// `[tiles, chunks]`: the codes of a block.
    keys: Vec<Codes>,
    /// `[eights of rows, fours of tiles]`: their products.
    sums: Vec<[Sums; 4]>,
}

/// Query rows times the parameters of a group of tokens.
struct Folded {
    /// The planes of query times scale: for each eight rows a tile for each 64 channels. Columns are four high planes and
    /// four low planes of the first four rows, then of the next.
    planes: Vec<Codes>,
    /// What one unit of a row's planes is worth.
    unit: [f32; 16],
    /// Query times zero points.
    offset: [f32; 16],
}

impl Folded {
    fn new(quads: usize, chunks: usize) -> Self {
        Folded { planes: vec![Codes::ZERO; quads.div_ceil(2) * chunks], unit: [0.0; 16], offset: [0.0; 16] }
    }
}

impl Keys for IntegerKeys<'_> {
    fn prepare(&mut self, matrix: usize, queries: &Queries) {
        self.matrix = matrix;
        self.queries[..queries.data.len()].copy_from_slice(&queries.data);
    }

    fn scores(&mut self, worker: &Worker, tokens: Range<usize>, scores: &mut Block) {
        // SAFETY: the plan is made for machines with these instructions only.
        unsafe { self.scores_avx512(worker, tokens, scores) }
    }
}

impl IntegerKeys<'_> {
    /// Step by step over the whole block, so that no step waits for what the one before has just stored.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn scores_avx512(&mut self, worker: &Worker, tokens: Range<usize>, scores: &mut Block) {
        let group = self.plan.rows.group;
        let first_group = tokens.start / group;
        self.load_codes(worker, tokens.clone());
        for (i, group) in (first_group..tokens.end.div_ceil(group)).enumerate() {
            self.enter(worker, i, group);
        }
        let chunks = self.plan.spread.chunks();
        // Tiles past the tokens repeat the last group; nobody reads their scores.
        let last = tokens.end.div_ceil(group) - 1 - first_group;
        let folded = |tile: usize| ((tokens.start + tile * TOKENS) / group - first_group).min(last);
        for (eight, sums) in self.sums.chunks_exact_mut(TILES / 4).enumerate() {
            for (i, sums) in sums.iter_mut().enumerate().take(tokens.len().div_ceil(4 * TOKENS)) {
                let keys = std::array::from_fn(|t| Steps::new(&self.keys[(4 * i + t) * chunks..], 1));
                let queries =
                    std::array::from_fn(|t| Steps::new(&self.folded[folded(4 * i + t)].planes[eight * chunks..], 1));
                product::scores(worker, keys, queries, chunks, sums);
            }
        }
        for quad in 0..self.rows.div_ceil(QUAD) {
            let rows = QUAD.min(self.rows - quad * QUAD);
            let sums = self.sums[quad / 2 * TILES / 4..].iter().flatten();
            worker.stay_awake();
            for (tile, sums) in sums.enumerate().take(tokens.len().div_ceil(TOKENS)) {
                put(sums, &self.folded[folded(tile)], quad, rows, &mut scores.0, tile * TOKENS);
            }
        }
    }

    /// Spreads the codes of a block.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn load_codes(&mut self, worker: &Worker, tokens: Range<usize>) {
        let plan = self.plan;
        let (codes, chunks) = (plan.rows.code_bytes(), plan.spread.chunks());
        let at = (self.matrix * plan.rows.capacity + tokens.start) * plan.row_bytes;
        let rows = &codes[at..at + tokens.len() * plan.row_bytes];
        let tiles = rows.chunks(TOKENS * plan.row_bytes).zip(self.keys.chunks_exact_mut(chunks));
        for (rows, tile) in tiles {
            cpu::prefetch(rows.as_ptr().wrapping_add(skeleton::BLOCK * plan.row_bytes), rows.len());
            worker.stay_awake();
            for (j, keys) in tile.iter_mut().enumerate() {
                let spreader = plan.spread.chunk(j);
                for (key, row) in keys.0.iter_mut().zip(rows.chunks_exact(plan.row_bytes)) {
                    // SAFETY: the row has the width that the plan's spread was made for; `key` is an aligned 64 bytes.
                    unsafe { _mm512_store_si512(key.as_mut_ptr().cast(), spreader.spread(row.as_ptr())) }
                }
            }
        }
    }

    /// Folds the scales and zero points of a group of tokens into the queries, as group `i` of the block.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn enter(&mut self, worker: &Worker, i: usize, group: usize) {
        let rows = &self.plan.rows;
        for params in [rows.scale, rows.zero] {
            let len = rows.head_dim * params.element_size();
            let row = rows.param_row(params, self.matrix, group).address(0);
            cpu::prefetch(row.wrapping_add(skeleton::BLOCK.div_ceil(rows.group) * len), len);
        }
        for quad in 0..self.rows.div_ceil(QUAD) {
            worker.stay_awake();
            self.fold(i, group, quad);
        }
    }

    /// Four query rows times the scales, as planes.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn fold(&mut self, i: usize, group: usize, quad: usize) {
        let (stride, rows) = (self.stride, &self.plan.rows);
        let folded = &mut self.folded[i];
        let scale = rows.param_row(rows.scale, self.matrix, group);
        let zero = rows.param_row(rows.zero, self.matrix, group);
        let queries = &self.queries[quad * QUAD * stride..(quad + 1) * QUAD * stride];
        let products = &mut self.products[..QUAD * stride];
        let mut peak = [_mm512_setzero_ps(); QUAD];
        let mut offset = [_mm512_setzero_ps(); QUAD];
        for c in (0..stride).step_by(16) {
            let (scale, zero) = (cpu::load_params(scale, c), cpu::load_params(zero, c));
            for r in 0..QUAD {
                // SAFETY: `c + 16 <= stride`, the length of the rows of both.
                unsafe {
                    let query = _mm512_loadu_ps(queries.as_ptr().add(r * stride + c));
                    let product = _mm512_mul_ps(query, scale);
                    _mm512_storeu_ps(products.as_mut_ptr().add(r * stride + c), product);
                    peak[r] = _mm512_max_ps(peak[r], _mm512_abs_ps(product));
                    offset[r] = _mm512_fmadd_ps(query, zero, offset[r]);
                }
            }
        }
        let mut factor = [_mm512_setzero_ps(); QUAD];
        for r in 0..QUAD {
            let (to_integer, unit) = quantizer(_mm512_reduce_max_ps(peak[r]));
            factor[r] = _mm512_set1_ps(to_integer);
            folded.unit[quad * QUAD + r] = unit;
            folded.offset[quad * QUAD + r] = _mm512_reduce_add_ps(offset[r]);
        }
        // High and low planes of a lane (four channels), of two lanes a register.
        let low_lanes = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        let high_lanes = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        let chunks = self.plan.spread.chunks();
        for c in (0..stride).step_by(16) {
            let x: [__m512i; QUAD] = std::array::from_fn(|r| {
                // SAFETY: as above.
                let product = unsafe { _mm512_loadu_ps(products.as_ptr().add(r * stride + c)) };
                _mm512_cvtps_epi32(_mm512_mul_ps(product, factor[r]))
            });
            let (high, low) = cpu::planes([_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3])]);
            let pairs =
                [_mm512_permutex2var_epi64(high, low_lanes, low), _mm512_permutex2var_epi64(high, high_lanes, low)];
            let tile = &mut folded.planes[quad / 2 * chunks + c / 64];
            for (i, pair) in pairs.into_iter().enumerate() {
                let k = c % 64 / 4 + 2 * i;
                // SAFETY: rows `k` and `k + 1` are below 16, and half `quad % 2` of each is 32 bytes.
                unsafe {
                    let at = |k: usize| tile.0[k].as_ptr().add(quad % 2 * 32).cast_mut().cast();
                    _mm256_storeu_si256(at(k), _mm512_castsi512_si256(pair));
                    _mm256_storeu_si256(at(k + 1), _mm512_extracti64x4_epi64::<1>(pair));
                }
            }
        }
    }
}

/// Transposes the sums of four query rows, and scales them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn put(sums: &Sums, folded: &Folded, quad: usize, rows: usize, scores: &mut [[f32; skeleton::BLOCK]], at: usize) {
    // Tokens t and t + 8: eight columns each.
    let pair = |t: usize| {
        // SAFETY: half a row of sums is 32 bytes.
        unsafe {
            let low = _mm256_load_si256(sums.0[t].as_ptr().add(quad % 2 * 8).cast());
            let high = _mm256_load_si256(sums.0[t + 8].as_ptr().add(quad % 2 * 8).cast());
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    };
    let t: [__m512i; 8] = std::array::from_fn(pair);
    let lo: [__m512i; 4] = std::array::from_fn(|i| _mm512_unpacklo_epi32(t[2 * i], t[2 * i + 1]));
    let hi: [__m512i; 4] = std::array::from_fn(|i| _mm512_unpackhi_epi32(t[2 * i], t[2 * i + 1]));
    // Column r of tokens 4 i to 4 i + 3, and in the other 128-bit half of each 256 bits column r + 4.
    let quarter = |i: usize| -> [__m512i; 4] {
        [
            _mm512_unpacklo_epi64(lo[2 * i], lo[2 * i + 1]),
            _mm512_unpackhi_epi64(lo[2 * i], lo[2 * i + 1]),
            _mm512_unpacklo_epi64(hi[2 * i], hi[2 * i + 1]),
            _mm512_unpackhi_epi64(hi[2 * i], hi[2 * i + 1]),
        ]
    };
    let (a, b) = (quarter(0), quarter(1));
    // 128-bit lanes of `a`: columns r, r + 4 of tokens 0 to 3, then of 8 to 11; of `b`: tokens 4 to 7 and 12 to 15.
    let high_planes = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    let low_planes = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for r in 0..rows {
        let row = quad * QUAD + r;
        let high = _mm512_cvtepi32_ps(_mm512_permutex2var_epi64(a[r], high_planes, b[r]));
        let low = _mm512_cvtepi32_ps(_mm512_permutex2var_epi64(a[r], low_planes, b[r]));
        let sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0), low);
        let score = _mm512_fmadd_ps(sum, _mm512_set1_ps(folded.unit[row]), _mm512_set1_ps(folded.offset[row]));
        // SAFETY: `at` is a multiple of 16 below the block's length.
        unsafe { _mm512_storeu_ps(scores[row][at..at + TOKENS].as_mut_ptr(), score) }
    }
}
