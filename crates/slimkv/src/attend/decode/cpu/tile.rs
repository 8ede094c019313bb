//! The sides of any format that decodes to f32 tiles: exact, and the way of the formats and shapes that have no faster one.

use std::ops::Range;

use super::{BLOCK, Block, KeyPlan, Keys, MAX_ROWS, Queries, ValuePlan, Values};
use crate::Result;
use crate::cpu::{Isa, Kernel, Simd, Worker};
use crate::format::Rows;
use crate::format::decode_cpu::{TILE_ALIGN, Tiles, tile_stride};

/// Tokens decoded at a time, so that a tile stays in the first-level cache.
const TILE: usize = 16;

/// Keys or values of any format.
pub(super) struct TilePlan<'a> {
    isa: Isa,
    rows: Tiles<'a>,
    head_dim: usize,
}

impl<'a> TilePlan<'a> {
    pub fn new(isa: Isa, rows: &'a Rows) -> Result<Self> {
        Ok(TilePlan { isa, rows: Tiles::of(rows)?, head_dim: rows.shape().head_dim })
    }
}

impl KeyPlan for TilePlan<'_> {
    fn keys<'a>(&'a self, _: usize) -> Box<dyn Keys + 'a> {
        let tile = vec![0.0; TILE * tile_stride(self.head_dim)];
        Box::new(TileKeys { plan: self, matrix: 0, rows: 0, queries: Vec::new(), tile })
    }
}

struct TileKeys<'a> {
    plan: &'a TilePlan<'a>,
    matrix: usize,
    rows: usize,
    queries: Vec<f32>,
    tile: Vec<f32>,
}

impl Keys for TileKeys<'_> {
    fn prepare(&mut self, matrix: usize, queries: &Queries) {
        (self.matrix, self.rows) = (matrix, queries.rows);
        self.queries.clone_from(&queries.data);
    }

    fn scores(&mut self, _: &Worker, tokens: Range<usize>, scores: &mut Block) {
        for from in tokens.clone().step_by(TILE) {
            let count = TILE.min(tokens.end - from);
            self.plan.rows.decode(self.plan.isa, self.matrix, from, count, &mut self.tile);
            self.plan.isa.run(Dots {
                tile: &self.tile,
                queries: &self.queries,
                stride: tile_stride(self.plan.head_dim),
                rows: self.rows,
                at: from - tokens.start,
                scores,
            });
        }
    }
}

/// The dot products of every query row with every token of a tile.
struct Dots<'a> {
    tile: &'a [f32],
    queries: &'a [f32],
    stride: usize,
    rows: usize,
    at: usize,
    scores: &'a mut Block,
}

impl Kernel for Dots<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Dots { tile, queries, stride, rows, at, scores } = self;
        for t in (0..TILE).step_by(4) {
            let tokens = &tile[t * stride..(t + 4) * stride];
            let mut r = 0;
            while r < rows {
                let queries = &queries[r * stride..];
                let mut put = |i: usize, x: [f32; 4]| scores.0[r + i][at + t..at + t + 4].copy_from_slice(&x);
                if S::BLOCK >= 4 && r + 4 <= rows {
                    dots::<S, 4>(s, tokens, queries, stride).into_iter().enumerate().for_each(|(i, x)| put(i, x));
                    r += 4;
                } else if r + 2 <= rows {
                    dots::<S, 2>(s, tokens, queries, stride).into_iter().enumerate().for_each(|(i, x)| put(i, x));
                    r += 2;
                } else {
                    dots::<S, 1>(s, tokens, queries, stride).into_iter().enumerate().for_each(|(i, x)| put(i, x));
                    r += 1;
                }
            }
        }
    }
}

/// `R` queries times four tokens.
#[inline(always)]
fn dots<S: Simd, const R: usize>(s: S, tokens: &[f32], queries: &[f32], stride: usize) -> [[f32; 4]; R] {
    assert!(tokens.len() >= 4 * stride && queries.len() >= R * stride && stride.is_multiple_of(TILE_ALIGN));
    let mut acc = [[s.splat(0.0); 4]; R];
    for c in (0..stride).step_by(S::LANES) {
        // SAFETY: `c + LANES <= stride`, and the slices hold 4 and `R` rows of that length.
        unsafe {
            let keys: [S::F; 4] = [
                s.load(tokens.as_ptr().add(c)),
                s.load(tokens.as_ptr().add(stride + c)),
                s.load(tokens.as_ptr().add(2 * stride + c)),
                s.load(tokens.as_ptr().add(3 * stride + c)),
            ];
            for (r, acc) in acc.iter_mut().enumerate() {
                let query = s.load(queries.as_ptr().add(r * stride + c));
                for (acc, key) in acc.iter_mut().zip(keys) {
                    *acc = s.fma(query, key, *acc);
                }
            }
        }
    }
    let mut sums = [[0.0; 4]; R];
    for (sums, acc) in sums.iter_mut().zip(acc) {
        *sums = s.sum4(acc);
    }
    sums
}

impl ValuePlan for TilePlan<'_> {
    fn values<'a>(&'a self, rows: usize) -> Box<dyn Values + 'a> {
        let stride = tile_stride(self.head_dim);
        Box::new(TileValues {
            plan: self,
            matrix: 0,
            rows,
            sums: vec![0.0; rows * stride],
            tile: vec![0.0; TILE * stride],
        })
    }
}

struct TileValues<'a> {
    plan: &'a TilePlan<'a>,
    matrix: usize,
    rows: usize,
    sums: Vec<f32>,
    tile: Vec<f32>,
}

impl Values for TileValues<'_> {
    fn prepare(&mut self, matrix: usize) {
        self.matrix = matrix;
        self.sums.fill(0.0);
    }

    fn accumulate(
        &mut self,
        _: &Worker,
        tokens: Range<usize>,
        weights: &Block,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        let mut keep = *keep;
        for from in tokens.clone().step_by(TILE) {
            let count = TILE.min(tokens.end - from);
            self.plan.rows.decode(self.plan.isa, self.matrix, from, count, &mut self.tile);
            self.plan.isa.run(WeightedSum {
                tile: &self.tile,
                stride: tile_stride(self.plan.head_dim),
                rows: self.rows,
                count,
                at: from - tokens.start,
                weights,
                keep: &keep,
                factor,
                sums: &mut self.sums,
            });
            keep = [1.0; MAX_ROWS];
        }
    }

    fn finish(&mut self, sums: &mut [f32]) {
        let d = self.plan.head_dim;
        for (to, from) in sums.chunks_exact_mut(d).zip(self.sums.chunks_exact(tile_stride(d))) {
            to.copy_from_slice(&from[..d]);
        }
    }
}

/// Adds the weighted tokens of a tile to the sums of every query row.
struct WeightedSum<'a> {
    tile: &'a [f32],
    stride: usize,
    rows: usize,
    count: usize,
    at: usize,
    weights: &'a Block,
    keep: &'a [f32; MAX_ROWS],
    factor: &'a [f32; MAX_ROWS],
    sums: &'a mut [f32],
}

impl Kernel for WeightedSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut r = 0;
        while r < self.rows {
            if S::BLOCK >= 4 && r + 4 <= self.rows {
                self.rows_at::<S, 4>(s, r);
                r += 4;
            } else if r + 2 <= self.rows {
                self.rows_at::<S, 2>(s, r);
                r += 2;
            } else {
                self.rows_at::<S, 1>(s, r);
                r += 1;
            }
        }
    }
}

impl WeightedSum<'_> {
    #[inline(always)]
    fn rows_at<S: Simd, const R: usize>(&mut self, s: S, r: usize) {
        let vectors = self.stride / S::LANES;
        let mut v = 0;
        while v < vectors {
            if v + 4 <= vectors {
                self.register_block::<S, R, 4>(s, r, v);
                v += 4;
            } else {
                self.register_block::<S, R, 1>(s, r, v);
                v += 1;
            }
        }
    }

    /// `R` rows times `V` vectors of channels, over all tokens of the tile.
    #[inline(always)]
    fn register_block<S: Simd, const R: usize, const V: usize>(&mut self, s: S, r: usize, v: usize) {
        let (stride, c) = (self.stride, v * S::LANES);
        assert!(self.tile.len() >= self.count * stride && self.sums.len() >= (r + R) * stride);
        assert!(self.at + self.count <= BLOCK && r + R <= MAX_ROWS && c + V * S::LANES <= stride);
        let mut acc = [[s.splat(0.0); V]; R];
        for t in 0..self.count {
            // SAFETY: token `t` of the tile has `stride` elements, and `c + V * LANES <= stride`.
            let value: [S::F; V] = std::array::from_fn(
                #[inline(always)]
                |i| unsafe { s.load(self.tile.as_ptr().add(t * stride + c + i * S::LANES)) },
            );
            for (i, acc) in acc.iter_mut().enumerate() {
                let weight = s.splat(self.weights.0[r + i][self.at + t]);
                for (acc, value) in acc.iter_mut().zip(value) {
                    *acc = s.fma(weight, value, *acc);
                }
            }
        }
        for (i, acc) in acc.into_iter().enumerate() {
            let (keep, factor) = (s.splat(self.keep[r + i]), s.splat(self.factor[r + i]));
            for (j, acc) in acc.into_iter().enumerate() {
                // SAFETY: row `r + i` of the sums has `stride` elements.
                unsafe {
                    let sum = self.sums.as_mut_ptr().add((r + i) * stride + c + j * S::LANES);
                    s.store(sum, s.fma(factor, acc, s.mul(keep, s.load(sum))));
                }
            }
        }
    }
}
