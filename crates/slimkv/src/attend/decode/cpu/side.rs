//! What the skeleton asks of a format.

use std::ops::Range;

use super::MAX_ROWS;
use crate::cpu::floats::{Floats, Widen};
use crate::cpu::{Isa, Worker};
use crate::format::decode_cpu::tile_stride;

/// Tokens that are scored together. Blocks start at multiples of it.
pub(crate) const BLOCK: usize = 128;

/// A number for each query row and token of a block: scores, or weights. There is a row more than any call has, so that a
/// register may be loaded from any token on.
#[repr(align(64))]
pub(crate) struct Block(pub [[f32; BLOCK]; MAX_ROWS + 1]);

/// The query rows of one KV head, times the scale of scores and `log2(e)`, in f32.
pub(crate) struct Queries {
    pub rows: usize,
    /// Rows are [`tile_stride`] long and filled with zeros past the head dimension.
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
        Queries { rows, data }
    }
}

/// A key format, ready for one call.
pub(crate) trait KeyPlan: Sync {
    /// Makes the workspace of one thread, for at most `rows` query rows.
    fn keys<'a>(&'a self, rows: usize) -> Box<dyn Keys + 'a>;
}

/// Keys of one KV head, and what is prepared for its queries.
pub(crate) trait Keys {
    /// Turns to KV head `matrix` and prepares what depends on its queries alone.
    fn prepare(&mut self, matrix: usize, queries: &Queries);

    /// Writes the score of every query row and token; at most [`BLOCK`] tokens, from a multiple of it on.
    fn scores(&mut self, worker: &Worker, tokens: Range<usize>, scores: &mut Block);
}

/// A value format, ready for one call.
pub(crate) trait ValuePlan: Sync {
    /// Makes the workspace of one thread, for at most `rows` query rows.
    fn values<'a>(&'a self, rows: usize) -> Box<dyn Values + 'a>;
}

/// A weighted sum of the values of one KV head, for each query row.
pub(crate) trait Values {
    /// Turns to KV head `matrix`, with sums of zero.
    fn prepare(&mut self, matrix: usize);

    /// `sum[row] = sum[row] * keep[row] + factor[row] * (weights[row] * values of the tokens)`.
    ///
    /// Weights lie between 0 and 1 and are 0 past the tokens.
    fn accumulate(
        &mut self,
        worker: &Worker,
        tokens: Range<usize>,
        weights: &Block,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    );

    /// Writes the sums, `rows` times the head dimension.
    fn finish(&mut self, sums: &mut [f32]);
}
