//! Decode attention over plain rows on the CPU: rows are widened in registers, for all query rows at once, and never
//! stored as f32. Sums are f32, so this is the exact way too.

use std::ops::Range;

use half::{bf16, f16};

use super::Plain;
use crate::FloatElement;
use crate::attend::decode::MAX_ROWS;
use crate::attend::decode::cpu::{BLOCK, Block, KeyPlan, Keys, Queries, ValuePlan, Values};
use crate::cpu::{Aligned, Kernel, Simd, Worker};
use crate::dtype::with_float;
use crate::format::decode_cpu::{TILE_ALIGN, tile_stride};

/// Tokens that are scored in turn with all rows.
const TOKENS: usize = 4;

/// Tokens that are weighted at a time: few enough to stay in the first-level cache while rows and channels take turns.
const TILE: usize = 32;

/// Keys are asked for this many tokens before they are read, values a tile: the hardware looks no further than a page, and
/// keys and values take turns.
const AHEAD: usize = 16;

/// An element that vectors of f32 are loaded from.
trait Widen: FloatElement {
    /// Loads `LANES` elements.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F;

    /// Loads `len` elements, fewer than `LANES`, and zeros.
    #[inline(always)]
    unsafe fn load_part<S: Simd>(s: S, p: *const Self, len: usize) -> S::F {
        let mut part = [Self::from_f32(0.0); TILE_ALIGN];
        assert!(len <= TILE_ALIGN && S::LANES <= TILE_ALIGN);
        // SAFETY: the caller vouches for `len` elements, and `part` has at least `LANES`.
        unsafe {
            std::ptr::copy_nonoverlapping(p, part.as_mut_ptr(), len);
            Self::load(s, part.as_ptr())
        }
    }
}

// SAFETY of the loads: the caller vouches for `LANES` elements.
#[allow(clippy::undocumented_unsafe_blocks)]
mod widen {
    use super::*;

    impl Widen for f16 {
        #[inline(always)]
        unsafe fn load<S: Simd>(s: S, p: *const f16) -> S::F {
            unsafe { s.load_f16(p.cast()) }
        }
    }
    impl Widen for bf16 {
        #[inline(always)]
        unsafe fn load<S: Simd>(s: S, p: *const bf16) -> S::F {
            unsafe { s.load_bf16(p.cast()) }
        }
    }
    impl Widen for f32 {
        #[inline(always)]
        unsafe fn load<S: Simd>(s: S, p: *const f32) -> S::F {
            unsafe { s.load(p) }
        }
    }
}

/// Asks for `len` elements from `from` on, which need not exist.
#[inline(always)]
fn prefetch<S: Simd, T>(s: S, from: *const T, len: usize) {
    for byte in (0..len * size_of::<T>()).step_by(64) {
        s.prefetch(from.cast::<u8>().wrapping_add(byte));
    }
}

impl Plain {
    /// The elements of `tokens` of matrix `matrix`.
    fn rows_of<T: FloatElement>(&self, matrix: usize, tokens: Range<usize>) -> &[T] {
        let shape = self.shape();
        let row = |token: usize| (matrix * shape.capacity + token) * shape.head_dim;
        let data = self.data.as_slice::<T>().expect("checked to be on the CPU, and of this type");
        &data[row(tokens.start)..row(tokens.end)]
    }
}

/// Keys or values that are plain rows.
pub(crate) struct PlainPlan<'a>(pub &'a Plain);

impl KeyPlan for PlainPlan<'_> {
    fn keys<'a>(&'a self, rows: usize) -> Box<dyn Keys + 'a> {
        let queries = Aligned::zeros(rows * tile_stride(self.0.shape().head_dim));
        Box::new(PlainKeys { keys: self.0, matrix: 0, rows, queries })
    }
}

/// The keys of one KV head.
struct PlainKeys<'a> {
    keys: &'a Plain,
    matrix: usize,
    rows: usize,
    queries: Aligned<f32>,
}

impl Keys for PlainKeys<'_> {
    fn prepare(&mut self, matrix: usize, queries: &Queries) {
        self.matrix = matrix;
        self.queries.copy_from_slice(&queries.data);
    }

    fn scores(&mut self, worker: &Worker, tokens: Range<usize>, scores: &mut Block) {
        let head_dim = self.keys.shape().head_dim;
        with_float!(self.keys.data.dtype(), T => {
            let keys: &[T] = self.keys.rows_of(self.matrix, tokens);
            worker.isa().run(Dots { keys, head_dim, queries: &self.queries, rows: self.rows, scores });
        }, else unreachable!("checked to be a float"));
    }
}

/// The dot products of every query row with every token of a block.
struct Dots<'a, T> {
    keys: &'a [T],
    head_dim: usize,
    queries: &'a [f32],
    rows: usize,
    scores: &'a mut Block,
}

impl<T: Widen> Kernel for Dots<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for token in (0..self.keys.len() / self.head_dim).step_by(TOKENS) {
            let next = self.keys.as_ptr().wrapping_add((token + AHEAD) * self.head_dim);
            prefetch(s, next, TOKENS * self.head_dim);
            let mut r = 0;
            while r < self.rows {
                // Every row is widened once for as many query rows as there are registers for.
                r += if r + 4 > self.rows {
                    if r + 2 <= self.rows {
                        self.register_block::<S, 2, 4>(s, r, token)
                    } else {
                        self.register_block::<S, 1, 4>(s, r, token)
                    }
                } else if S::BLOCK >= 4 {
                    self.register_block::<S, 4, 4>(s, r, token)
                } else {
                    self.register_block::<S, 4, 2>(s, r, token);
                    self.register_block::<S, 4, 2>(s, r, token + 2)
                };
            }
        }
    }
}

impl<E: Widen> Dots<'_, E> {
    /// `R` queries from `r` on times `T` tokens from `token` on; returns `R`.
    #[inline(always)]
    fn register_block<S: Simd, const R: usize, const T: usize>(&mut self, s: S, r: usize, token: usize) -> usize {
        let (d, stride, tokens) = (self.head_dim, tile_stride(self.head_dim), self.keys.len() / self.head_dim);
        assert!(tokens > 0 && self.queries.len() >= (r + R) * stride && token + T <= BLOCK && r + R <= MAX_ROWS);
        let whole = d / S::LANES * S::LANES;
        // Past the last token comes the last one again: nobody reads its scores.
        let mut keys = [self.keys.as_ptr(); T];
        for (i, keys) in keys.iter_mut().enumerate() {
            *keys = keys.wrapping_add((token + i).min(tokens - 1).wrapping_mul(d));
        }
        let mut queries = [self.queries.as_ptr(); R];
        for (i, queries) in queries.iter_mut().enumerate() {
            *queries = queries.wrapping_add((r + i).wrapping_mul(stride));
        }
        let mut acc = [[s.splat(0.0); T]; R];
        for c in (0..whole).step_by(S::LANES) {
            // SAFETY: `c + LANES <= d`, the length of the rows of both.
            unsafe {
                let mut key = [s.splat(0.0); T];
                for t in 0..T {
                    key[t] = E::load(s, keys[t].add(c));
                }
                for i in 0..R {
                    let query = s.load(queries[i].add(c));
                    for t in 0..T {
                        acc[i][t] = s.fma(query, key[t], acc[i][t]);
                    }
                }
            }
        }
        if whole < d {
            for t in 0..T {
                // SAFETY: the row has `d - whole` more elements; those of queries are padded to a whole vector.
                unsafe {
                    let key = E::load_part(s, keys[t].add(whole), d - whole);
                    for i in 0..R {
                        acc[i][t] = s.fma(s.load(queries[i].add(whole)), key, acc[i][t]);
                    }
                }
            }
        }
        if T == 2 && R.is_multiple_of(2) {
            for i in (0..R).step_by(2) {
                let [a, b, c, d] = s.sum4([acc[i][0], acc[i][1 % T], acc[i + 1][0], acc[i + 1][1 % T]]);
                self.scores.0[r + i][token..token + 2].copy_from_slice(&[a, b]);
                self.scores.0[r + i + 1][token..token + 2].copy_from_slice(&[c, d]);
            }
        } else {
            assert!(T == 4);
            for i in 0..R {
                let sums = s.sum4([acc[i][0], acc[i][1 % T], acc[i][2 % T], acc[i][3 % T]]);
                self.scores.0[r + i][token..token + 4].copy_from_slice(&sums);
            }
        }
        R
    }
}

impl ValuePlan for PlainPlan<'_> {
    fn values<'a>(&'a self, rows: usize) -> Box<dyn Values + 'a> {
        let sums = Aligned::zeros(rows * tile_stride(self.0.shape().head_dim));
        Box::new(PlainValues { values: self.0, matrix: 0, rows, sums })
    }
}

/// The values of one KV head.
struct PlainValues<'a> {
    values: &'a Plain,
    matrix: usize,
    rows: usize,
    sums: Aligned<f32>,
}

impl Values for PlainValues<'_> {
    fn prepare(&mut self, matrix: usize) {
        self.matrix = matrix;
        self.sums.fill(0.0);
    }

    fn accumulate(
        &mut self,
        worker: &Worker,
        tokens: Range<usize>,
        weights: &Block,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        let (head_dim, rows) = (self.values.shape().head_dim, self.rows);
        with_float!(self.values.data.dtype(), T => {
            let values: &[T] = self.values.rows_of(self.matrix, tokens);
            let sums = &mut self.sums;
            worker.isa().run(WeightedSum { values, head_dim, rows, weights, keep: *keep, factor, sums });
        }, else unreachable!("checked to be a float"));
    }

    fn finish(&mut self, sums: &mut [f32]) {
        let d = self.values.shape().head_dim;
        for (to, from) in sums.chunks_exact_mut(d).zip(self.sums.chunks_exact(tile_stride(d))) {
            to.copy_from_slice(&from[..d]);
        }
    }
}

/// Adds the weighted tokens of a block to the sums of every query row.
struct WeightedSum<'a, T> {
    values: &'a [T],
    head_dim: usize,
    rows: usize,
    weights: &'a Block,
    keep: [f32; MAX_ROWS],
    factor: &'a [f32; MAX_ROWS],
    sums: &'a mut [f32],
}

impl<T: Widen> Kernel for WeightedSum<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let tokens = self.values.len() / self.head_dim;
        for from in (0..tokens).step_by(TILE) {
            let tile = from..(from + TILE).min(tokens);
            let mut r = 0;
            while r < self.rows {
                r += if r + 4 <= self.rows {
                    self.rows_at::<S, 4>(s, &tile, r)
                } else if r + 2 <= self.rows {
                    self.rows_at::<S, 2>(s, &tile, r)
                } else {
                    self.rows_at::<S, 1>(s, &tile, r)
                };
            }
            self.keep = [1.0; MAX_ROWS];
        }
    }
}

impl<T: Widen> WeightedSum<'_, T> {
    /// `R` rows from `r` on; returns `R`.
    #[inline(always)]
    fn rows_at<S: Simd, const R: usize>(&mut self, s: S, tile: &Range<usize>, r: usize) -> usize {
        let d = self.head_dim;
        let mut c = 0;
        while c < d {
            c += if S::BLOCK >= R && c + 4 * S::LANES <= d {
                self.register_block::<S, R, 4>(s, tile, r, c)
            } else if c + 2 * S::LANES <= d {
                self.register_block::<S, R, 2>(s, tile, r, c)
            } else {
                self.register_block::<S, R, 1>(s, tile, r, c)
            };
        }
        R
    }

    /// `R` rows from `r` on times `V` vectors of channels from `c` on, over the tokens of the tile; returns the channels.
    /// A single vector may go past the row.
    #[inline(always)]
    fn register_block<S: Simd, const R: usize, const V: usize>(
        &mut self,
        s: S,
        tile: &Range<usize>,
        r: usize,
        c: usize,
    ) -> usize {
        let (d, stride, channels) = (self.head_dim, tile_stride(self.head_dim), V * S::LANES);
        assert!(tile.end <= BLOCK && self.values.len() >= tile.end * d && c < d && c + channels <= stride);
        assert!(r + R <= MAX_ROWS && self.sums.len() >= (r + R) * stride);
        let part = V == 1 && c + channels > d;
        assert!(part || c + channels <= d);
        let mut acc = [[s.splat(0.0); V]; R];
        // Pointers that step, so that no index is computed (and checked) in between.
        let mut from = self.values.as_ptr().wrapping_add(tile.start * d + c);
        let mut weights = self.weights.0.as_ptr().cast::<f32>().wrapping_add(r * BLOCK + tile.start);
        let mut next = self.values.as_ptr().wrapping_add(tile.end * d + c * TILE);
        for _ in tile.clone() {
            // Its part of the next tile.
            prefetch(s, next, channels);
            next = next.wrapping_add(channels);
            let mut value = [s.splat(0.0); V];
            for j in 0..V {
                // SAFETY: the row has `d` elements, of which those of a whole vector, or `d - c`, are left at `c`.
                value[j] =
                    unsafe { if part { T::load_part(s, from, d - c) } else { T::load(s, from.add(j * S::LANES)) } };
            }
            from = from.wrapping_add(d);
            for i in 0..R {
                // SAFETY: rows `r..r + R` of the block have a weight for each token of the tile.
                let weight = s.splat(unsafe { *weights.wrapping_add(i * BLOCK) });
                for j in 0..V {
                    acc[i][j] = s.fma(weight, value[j], acc[i][j]);
                }
            }
            weights = weights.wrapping_add(1);
        }
        for i in 0..R {
            let (keep, factor) = (s.splat(self.keep[r + i]), s.splat(self.factor[r + i]));
            for j in 0..V {
                // SAFETY: `c + V * LANES <= stride`, the length of the rows of sums.
                unsafe {
                    let sum = self.sums.as_mut_ptr().add((r + i) * stride + c + j * S::LANES);
                    s.store(sum, s.fma(factor, acc[i][j], s.mul(keep, s.load(sum))));
                }
            }
        }
        channels
    }
}
