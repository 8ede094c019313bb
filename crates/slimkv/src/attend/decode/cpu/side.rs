//! What the skeleton asks of a format.

use std::ops::Range;

use super::MAX_ROWS;
use crate::cpu::Isa;
use crate::cpu::floats::{Floats, Widen};
use crate::format::decode_cpu::tile_stride;

/// Tokens that are scored together. Blocks start at multiples of it.
pub(crate) const BLOCK: usize = 128;

/// A number for each query row and token of a block: scores, or weights.
#[repr(align(64))]
pub(crate) struct Block(pub [[f32; BLOCK]; MAX_ROWS]);

/// The query rows of one KV head, times the scale of scores and `log2(e)`, in f32.
pub(crate) struct Queries {
    pub rows: usize,
    /// Elements from one row to the next, a multiple of 16; rows are filled with zeros past the head dimension.
    pub stride: usize,
    pub data: Vec<f32>,
}

impl Queries {
    /// The queries of KV head `matrix` (sequence times heads plus head), which lie together in `q`.
    pub fn new(isa: Isa, q: Floats, matrix: usize, rows: usize, head_dim: usize, scale: f32) -> Self {
        let stride = tile_stride(head_dim);
        let mut data = vec![0.0; rows * stride];
        for (r, row) in data.chunks_exact_mut(stride).enumerate() {
            isa.run(Widen { from: q.part((matrix * rows + r) * head_dim, head_dim), to: row });
            row.iter_mut().for_each(|x| *x *= scale);
        }
        Queries { rows, stride, data }
    }
}

/// A key format, ready for one call.
pub(crate) trait KeyPlan: Sync {
    /// Prepares what depends on the queries of one KV head.
    fn prepare<'a>(&'a self, matrix: usize, queries: &Queries) -> Box<dyn Keys + 'a>;
}

/// Keys of one KV head, ready for its queries.
pub(crate) trait Keys {
    /// Writes the score of every query row and token; at most [`BLOCK`] tokens, from a multiple of it on.
    fn scores(&mut self, tokens: Range<usize>, scores: &mut Block);
}

/// A value format, ready for one call.
pub(crate) trait ValuePlan: Sync {
    /// Makes an empty sum for the query rows of one KV head.
    fn prepare<'a>(&'a self, matrix: usize, rows: usize) -> Box<dyn Values + 'a>;
}

/// A weighted sum of the values of one KV head, for each of its query rows.
pub(crate) trait Values {
    /// `sum[row] = sum[row] * keep[row] + factor[row] * (weights[row] * values of the tokens)`.
    ///
    /// Weights lie between 0 and 1 and are 0 past the tokens.
    fn accumulate(&mut self, tokens: Range<usize>, weights: &Block, keep: &[f32; MAX_ROWS], factor: &[f32; MAX_ROWS]);

    /// Writes the sums, `rows` times the head dimension.
    fn finish(&mut self, sums: &mut [f32]);
}
