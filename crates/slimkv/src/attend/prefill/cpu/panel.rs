//! One panel: as many query rows as two vectors have elements, against tile after tile.

use std::ops::Range;

use super::TILE;
use crate::cpu::floats::{Floats, Widen};
use crate::cpu::math::exp2_nonpositive;
use crate::cpu::{Isa, Kernel, Simd};
use crate::format::decode_cpu::tile_stride;

/// The most query rows that a panel has on any instruction set.
const MAX_WIDTH: usize = 32;

/// Query rows with their running softmax.
pub(super) struct Panel {
    /// `[D, width]`: the queries, scaled and transposed.
    queries: Vec<f32>,
    /// `[width, stride]`: the weighted sums of values.
    sums: Vec<f32>,
    max: [f32; MAX_WIDTH],
    total: [f32; MAX_WIDTH],
    /// `[TILE, width]`: scores, then weights.
    scores: Vec<f32>,
    rows: usize,
    width: usize,
    head_dim: usize,
}

impl Panel {
    /// Takes `rows` query rows, at most `width`.
    pub fn new(isa: Isa, q: Floats, rows: usize, width: usize, head_dim: usize, scale: f32) -> Self {
        let mut wide = vec![0.0; rows * head_dim];
        isa.run(Widen { from: q, to: &mut wide });
        let mut queries = vec![0.0; head_dim * width];
        for (r, row) in wide.chunks_exact(head_dim).enumerate() {
            for (c, x) in row.iter().enumerate() {
                queries[c * width + r] = x * scale;
            }
        }
        Panel {
            queries,
            sums: vec![0.0; width * tile_stride(head_dim)],
            max: [f32::NEG_INFINITY; MAX_WIDTH],
            total: [0.0; MAX_WIDTH],
            scores: vec![0.0; TILE * width],
            rows,
            width,
            head_dim,
        }
    }

    /// Attends to the decoded `tokens`, of which each row sees an interval.
    pub fn attend(&mut self, isa: Isa, keys: &[f32], values: &[f32], tokens: Range<usize>, visible: &[Range<usize>]) {
        // Tokens that any row sees; the rest of the tile is not looked at.
        let seen = visible.iter().filter(|v| v.start < tokens.end && v.end > tokens.start && !v.is_empty());
        let Some(end) = seen.clone().map(|v| v.end.min(tokens.end)).max() else { return };
        let start = seen.map(|v| v.start.max(tokens.start)).min().unwrap_or(tokens.start);
        let (start, end) = (start - tokens.start, end - tokens.start);
        let stride = tile_stride(self.head_dim);
        isa.run(Scores {
            keys: &keys[start * stride..],
            count: end - start,
            stride,
            head_dim: self.head_dim,
            queries: &self.queries,
            scores: &mut self.scores,
        });
        let width = self.width;
        for (r, visible) in visible.iter().enumerate() {
            let clamp = |t: usize| t.clamp(tokens.start + start, tokens.start + end) - tokens.start - start;
            let (lo, hi) = (clamp(visible.start), clamp(visible.end).max(clamp(visible.start)));
            for t in (0..lo).chain(hi..end - start) {
                self.scores[t * width + r] = f32::NEG_INFINITY;
            }
        }
        let mut keep = [0.0; MAX_WIDTH];
        isa.run(Softmax {
            scores: &mut self.scores[..(end - start) * width],
            max: &mut self.max,
            total: &mut self.total,
            keep: &mut keep,
        });
        isa.run(WeightedSums {
            values: &values[start * stride..],
            count: end - start,
            stride,
            weights: &self.scores,
            keep: &keep,
            sums: &mut self.sums,
        });
    }

    /// The output and the log-sum-exp of each row.
    pub fn finish(&mut self) -> impl Iterator<Item = (&[f32], f32)> {
        let stride = tile_stride(self.head_dim);
        for (row, &total) in self.sums.chunks_exact_mut(stride).zip(&self.total).take(self.rows) {
            if total != 0.0 {
                row.iter_mut().for_each(|x| *x /= total);
            }
        }
        let ends = self.max.iter().zip(&self.total).map(|(&max, &total)| {
            if max == f32::NEG_INFINITY { max } else { (max + total.log2()) * std::f32::consts::LN_2 }
        });
        self.sums.chunks_exact(stride).zip(ends).take(self.rows)
    }
}

/// `scores[t][row] = keys[t] . queries[row]`.
struct Scores<'a> {
    keys: &'a [f32],
    count: usize,
    stride: usize,
    head_dim: usize,
    queries: &'a [f32],
    scores: &'a mut [f32],
}

impl Kernel for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut t = 0;
        while t < self.count {
            if S::BLOCK >= 4 && t + 8 <= self.count {
                self.register_block::<S, 8>(s, t);
                t += 8;
            } else if t + 4 <= self.count {
                self.register_block::<S, 4>(s, t);
                t += 4;
            } else {
                self.register_block::<S, 1>(s, t);
                t += 1;
            }
        }
    }
}

impl Scores<'_> {
    /// `T` tokens times one panel.
    #[inline(always)]
    fn register_block<S: Simd, const T: usize>(&mut self, s: S, t: usize) {
        let width = 2 * S::LANES;
        assert!(self.keys.len() >= (t + T - 1) * self.stride + self.head_dim && self.stride >= self.head_dim);
        assert!(self.queries.len() >= self.head_dim * width && self.scores.len() >= (t + T) * width);
        let mut acc = [[s.splat(0.0); 2]; T];
        // SAFETY: the assertions above bound every index.
        unsafe {
            let keys = self.keys.as_ptr().add(t * self.stride);
            for c in 0..self.head_dim {
                let query = self.queries.as_ptr().add(c * width);
                let (q0, q1) = (s.load(query), s.load(query.add(S::LANES)));
                for (i, acc) in acc.iter_mut().enumerate() {
                    let key = s.splat(*keys.add(i * self.stride + c));
                    acc[0] = s.fma(key, q0, acc[0]);
                    acc[1] = s.fma(key, q1, acc[1]);
                }
            }
            for (i, acc) in acc.into_iter().enumerate() {
                let scores = self.scores.as_mut_ptr().add((t + i) * width);
                s.store(scores, acc[0]);
                s.store(scores.add(S::LANES), acc[1]);
            }
        }
    }
}

/// Scores to weights, relative to the new running maximum of each row.
struct Softmax<'a> {
    scores: &'a mut [f32],
    max: &'a mut [f32; MAX_WIDTH],
    total: &'a mut [f32; MAX_WIDTH],
    keep: &'a mut [f32; MAX_WIDTH],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = 2 * S::LANES;
        assert!(width <= MAX_WIDTH);
        let lowest = s.splat(f32::NEG_INFINITY);
        for lane in [0, S::LANES] {
            // SAFETY: every access is to `LANES` elements from `lane` on, of rows of `2 * LANES` elements.
            unsafe {
                let old = s.load(self.max.as_ptr().add(lane));
                let mut max = old;
                for row in self.scores.chunks_exact(width) {
                    max = s.max(s.load(row.as_ptr().add(lane)), max);
                }
                // A row that has seen nothing yet is compared with 0, so that no infinities are subtracted.
                let base = s.select_eq(max, lowest, s.splat(0.0), max);
                let mut total = s.splat(0.0);
                for row in self.scores.chunks_exact_mut(width) {
                    let p = row.as_mut_ptr().add(lane);
                    let weight = exp2_nonpositive(s, s.sub(s.load(p), base));
                    total = s.add(total, weight);
                    s.store(p, weight);
                }
                let keep = exp2_nonpositive(s, s.sub(old, base));
                let sum = self.total.as_mut_ptr().add(lane);
                s.store(sum, s.fma(s.load(sum), keep, total));
                s.store(self.max.as_mut_ptr().add(lane), max);
                s.store(self.keep.as_mut_ptr().add(lane), keep);
            }
        }
    }
}

/// `sums[row] = sums[row] * keep[row] + weights[row] * values`.
struct WeightedSums<'a> {
    values: &'a [f32],
    count: usize,
    stride: usize,
    weights: &'a [f32],
    keep: &'a [f32; MAX_WIDTH],
    sums: &'a mut [f32],
}

impl Kernel for WeightedSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let vectors = self.stride / S::LANES;
        let mut v = 0;
        while v < vectors {
            let four = v + 4 <= vectors;
            let mut r = 0;
            while r < 2 * S::LANES {
                match (S::BLOCK >= 4, four) {
                    (true, true) => self.register_block::<S, 4, 4>(s, r, v),
                    (true, false) => self.register_block::<S, 4, 1>(s, r, v),
                    (false, true) => self.register_block::<S, 2, 4>(s, r, v),
                    (false, false) => self.register_block::<S, 2, 1>(s, r, v),
                }
                r += if S::BLOCK >= 4 { 4 } else { 2 };
            }
            v += if four { 4 } else { 1 };
        }
    }
}

impl WeightedSums<'_> {
    /// `R` rows times `V` vectors of channels.
    #[inline(always)]
    fn register_block<S: Simd, const R: usize, const V: usize>(&mut self, s: S, r: usize, v: usize) {
        let (width, stride, c) = (2 * S::LANES, self.stride, v * S::LANES);
        assert!(self.values.len() >= self.count * stride && c + V * S::LANES <= stride);
        assert!(self.weights.len() >= self.count * width && r + R <= width && self.sums.len() >= (r + R) * stride);
        let mut acc = [[s.splat(0.0); V]; R];
        // SAFETY: the assertions above bound every index.
        unsafe {
            for (i, acc) in acc.iter_mut().enumerate() {
                let keep = s.splat(self.keep[r + i]);
                for (j, acc) in acc.iter_mut().enumerate() {
                    *acc = s.mul(keep, s.load(self.sums.as_ptr().add((r + i) * stride + c + j * S::LANES)));
                }
            }
            for t in 0..self.count {
                let value: [S::F; V] = std::array::from_fn(
                    #[inline(always)]
                    |j| s.load(self.values.as_ptr().add(t * stride + c + j * S::LANES)),
                );
                let weights = self.weights.as_ptr().add(t * width + r);
                for (i, acc) in acc.iter_mut().enumerate() {
                    let weight = s.splat(*weights.add(i));
                    for (acc, value) in acc.iter_mut().zip(value) {
                        *acc = s.fma(weight, value, *acc);
                    }
                }
            }
            for (i, acc) in acc.into_iter().enumerate() {
                for (j, acc) in acc.into_iter().enumerate() {
                    s.store(self.sums.as_mut_ptr().add((r + i) * stride + c + j * S::LANES), acc);
                }
            }
        }
    }
}
