//! The decode skeleton on the GPU.
//!
//! The KV axis of every sequence is cut into splits; a cube handles the query rows of one KV head over one split and
//! leaves an unnormalised output, the maximum and the sum of its softmax. A second launch merges the partial results of
//! all splits of all segments in order.
//!
//! ```text
//! part_o   f32 [rows, slots, D]     row  = (b * Hq + h) * Sq + i
//! part_ml  f32 [rows, slots, 2]     slot = first slot of the segment + split;  m (natural scale) and l
//! ```
//!
//! A slot whose tokens a row does not see has `m = -3e38` and `l = 0`. Splits are a function of the sequence's own rows
//! and of the head geometry, and absent slots are skipped, so a result never depends on the rest of the batch.

mod lanes;
mod merge;

use std::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

pub(crate) use lanes::{Lanes, TILE};
pub(crate) use merge::merge;

use super::MAX_ROWS;
use crate::attend::{Attended, Geometry, Options, Segment, Span};
use crate::format::gpu::{bound, with_format};
use crate::format::write_gpu::check_extent;
use crate::gpu::{Gpu, small, with_client};
use crate::{DType, Result, Tensor};

/// The tokens of one sequence in one segment, cut up: what the kernels read of a [`Span`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// The first token that any query sees.
    pub low: u32,
    /// One past the last.
    pub high: u32,
    /// Tokens of a split, a multiple of [`TILE`].
    pub chunk: u32,
    /// The row where query 0 stands.
    pub q_offset: i32,
}

impl Cut {
    /// Words that a kernel reads for one sequence.
    pub(crate) const WORDS: usize = 4;

    /// The cut of a span into splits of `chunk(visible tokens)`.
    pub(crate) fn new(span: Span, s_q: usize, options: Options, chunk: impl FnOnce(usize) -> usize) -> Self {
        let len = span.len as i64;
        // No row lies further away than this, so clamping changes no comparison.
        let far = 1i64 << 30;
        let q_offset = span.q_offset.clamp(-far, far);
        let high = if options.causal { (q_offset + s_q as i64).clamp(0, len) } else { len };
        let low = match i64::try_from(options.window).unwrap_or(far).min(far) {
            0 => 0,
            window => (q_offset + 1 - window).clamp(0, high),
        };
        let chunk = chunk((high - low) as usize).max(1);
        Cut { low: low as u32, high: high as u32, chunk: chunk as u32, q_offset: q_offset as i32 }
    }

    /// How many splits.
    pub(crate) fn splits(self) -> usize {
        (self.high - self.low).div_ceil(self.chunk) as usize
    }

    fn words(self) -> [u32; Cut::WORDS] {
        [self.low, self.high, self.chunk, self.q_offset as u32]
    }
}

/// The cuts of a whole batch as the table that kernels read.
pub(crate) fn table(cuts: &[Cut]) -> Vec<u32> {
    cuts.iter().flat_map(|cut| cut.words()).collect()
}

/// Tokens of a split: enough splits to occupy a large GPU with one sequence, and no fewer tokens than a tile.
fn chunk(kv_heads: usize) -> impl Fn(usize) -> usize {
    move |visible| (visible * kv_heads).div_ceil(CUBES).next_multiple_of(TILE).max(2 * TILE)
}

/// Cubes that one long sequence is cut into.
const CUBES: usize = 1024;

/// Where partial results go.
#[derive(Clone)]
pub(crate) struct Parts {
    /// f32 `[rows, slots, D]`.
    pub out: Handle,
    /// f32 `[rows, slots, 2]`.
    pub ml: Handle,
    /// Slots of a row.
    pub slots: usize,
}

/// A query tensor, bound.
#[derive(Clone)]
pub(crate) struct Queries {
    /// The elements, as words.
    pub handle: Handle,
    /// Words of it.
    pub words: usize,
    /// The element type.
    pub dtype: DType,
    /// The first query of this pass.
    pub first: usize,
    /// Queries of a head in the whole tensor.
    pub of: usize,
}

/// Bytes of partial results that one pass may take; more queries than fit take several passes.
const PART_BYTES: usize = 256 << 20;

/// Attention of up to [`MAX_ROWS`] query rows a KV head.
pub(crate) fn attend(
    op: &'static str,
    gpu: &Gpu,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
) -> Result<Attended> {
    attend_split(op, gpu, q, segments, options, geometry, chunk(geometry.kv_heads))
}

/// Attention over splits of `chunk(visible tokens)` tokens: partial results of each segment, then the merge.
pub(crate) fn attend_split(
    op: &'static str,
    gpu: &Gpu,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
    chunk: impl Fn(usize) -> usize,
) -> Result<Attended> {
    let Geometry { batch, q_heads, s_q, head_dim, .. } = geometry;
    for segment in segments {
        check_extent(op, gpu, segment.keys.shape())?;
    }
    let shape = [batch, q_heads, s_q, head_dim];
    let out = gpu.empty(op, batch * q_heads * s_q * head_dim * options.out_dtype.size())?;
    let lse = gpu.empty(op, batch * q_heads * s_q * 4)?;
    let (handle, words) = bound(q);
    let mut first = 0;
    while first < s_q && batch * q_heads > 0 {
        let all: Vec<Vec<Cut>> = cuts(segments, first, s_q - first, options, &chunk);
        let slots: usize = splits(&all).iter().sum();
        let a_query = batch * q_heads * slots * head_dim * 4;
        // Whole blocks of rows, so that where a pass ends changes no sum.
        let count = (PART_BYTES / a_query.max(1) / MAX_ROWS * MAX_ROWS).max(MAX_ROWS).min(s_q - first);
        // Fewer queries see no more tokens, so the slots still suffice.
        let some = if count < s_q - first { cuts(segments, first, count, options, &chunk) } else { all };
        let splits = splits(&some);
        let rows = batch * q_heads * count;
        let part_o = gpu.empty(op, rows * slots * head_dim * 4)?;
        let part_ml = gpu.empty(op, rows * slots * 8)?;
        let parts = Parts { out: part_o.handle().clone(), ml: part_ml.handle().clone(), slots: splits.iter().sum() };
        let queries = Queries { handle: handle.clone(), words, dtype: q.dtype(), first, of: s_q };
        let part = Geometry { s_q: count, ..geometry };
        let mut slot = 0;
        for ((segment, cuts), &splits) in segments.iter().zip(&some).zip(&splits) {
            if splits > 0 {
                let slots = slot..slot + splits;
                with_client!(gpu, client => {
                    segment_parts(op, gpu, client, &queries, segment, cuts, slots, &parts, options, part)?;
                });
            }
            slot += splits;
        }
        with_client!(gpu, client => {
            merge(client, &parts, &queries, part, options.out_dtype, out.handle(), lse.handle())
        });
        first += count;
    }
    Ok(Attended {
        out: Tensor::from_gpu_buffer(options.out_dtype, &shape, out),
        lse: Tensor::from_gpu_buffer(DType::F32, &shape[..3], lse),
    })
}

/// The cuts of every segment for `count` queries from `first` on.
fn cuts(
    segments: &[Segment],
    first: usize,
    count: usize,
    options: Options,
    chunk: impl Fn(usize) -> usize,
) -> Vec<Vec<Cut>> {
    let moved = |span: &Span| Span { q_offset: span.q_offset.saturating_add(first as i64), ..*span };
    let of = |s: &Segment| s.spans.iter().map(|span| Cut::new(moved(span), count, options, &chunk)).collect();
    segments.iter().map(of).collect()
}

/// The splits of every segment: those of the sequence that has most.
fn splits(cuts: &[Vec<Cut>]) -> Vec<usize> {
    cuts.iter().map(|c| c.iter().map(|cut| cut.splits()).max().unwrap_or(0)).collect()
}

#[allow(clippy::too_many_arguments)]
fn segment_parts<R: Runtime>(
    op: &'static str,
    gpu: &Gpu,
    client: &ComputeClient<R>,
    queries: &Queries,
    segment: &Segment,
    cuts: &[Cut],
    slots: Range<usize>,
    parts: &Parts,
    options: Options,
    geometry: Geometry,
) -> Result<()> {
    let (keys, values) = (segment.keys.gpu_side(), segment.values.gpu_side());
    let lanes = Lanes::new(client, geometry).ok_or_else(|| {
        let limit = client.properties().hardware.max_shared_memory_size;
        gpu.unsupported(op, "q", format!("head dimensions whose tile fits {limit} bytes"), geometry.head_dim)
    })?;
    let cuts = small(client, &table(cuts));
    with_format!(&segment.keys, K => with_format!(&segment.values, V => {
        lanes.launch::<K, V, R>(client, queries, &keys, &values, &cuts, slots, parts, options)
    }));
    Ok(())
}
