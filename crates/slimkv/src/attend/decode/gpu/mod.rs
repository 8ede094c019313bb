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

use cubecl::prelude::*;
use cubecl::server::Handle;

pub(crate) use lanes::{Lanes, TILE};
pub(crate) use merge::merge;

use crate::attend::{Attended, Geometry, Options, Segment, Span};
use crate::format::gpu::{Side, bound, with_format};
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
}

/// Attention of up to [`MAX_ROWS`](super::MAX_ROWS) query rows a KV head.
pub(crate) fn attend(
    op: &'static str,
    gpu: &Gpu,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
) -> Result<Attended> {
    let cuts: Vec<Vec<Cut>> = segments
        .iter()
        .map(|s| s.spans.iter().map(|&span| Cut::new(span, geometry.s_q, options, chunk(geometry.kv_heads))).collect())
        .collect();
    attend_cut(op, gpu, q, segments, options, geometry, &cuts)
}

/// Attention over segments that are cut up: partial results of each, then the merge.
pub(crate) fn attend_cut(
    op: &'static str,
    gpu: &Gpu,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
    cuts: &[Vec<Cut>],
) -> Result<Attended> {
    let rows = geometry.batch * geometry.q_heads * geometry.s_q;
    let out_shape = [geometry.batch, geometry.q_heads, geometry.s_q, geometry.head_dim];
    let out = gpu.empty(op, rows * geometry.head_dim * options.out_dtype.size())?;
    let lse = gpu.empty(op, rows * 4)?;
    if rows > 0 {
        let splits: Vec<usize> = cuts.iter().map(|c| c.iter().map(|cut| cut.splits()).max().unwrap_or(0)).collect();
        let slots: usize = splits.iter().sum();
        let part_o = gpu.empty(op, rows * slots * geometry.head_dim * 4)?;
        let part_ml = gpu.empty(op, rows * slots * 8)?;
        let parts = Parts { out: part_o.handle().clone(), ml: part_ml.handle().clone(), slots };
        let (handle, words) = bound(q);
        let queries = Queries { handle, words, dtype: q.dtype() };
        let mut slot = 0;
        for ((segment, cuts), &splits) in segments.iter().zip(cuts).zip(&splits) {
            if splits > 0 {
                with_client!(gpu, client => {
                    segment_parts(op, gpu, client, &queries, segment, cuts, splits, slot, &parts, options, geometry)?;
                });
            }
            slot += splits;
        }
        with_client!(gpu, client => merge(
            client, &parts, rows, geometry.head_dim, options.out_dtype, out.handle(), lse.handle()
        ));
    }
    Ok(Attended {
        out: Tensor::from_gpu_buffer(options.out_dtype, &out_shape, out),
        lse: Tensor::from_gpu_buffer(DType::F32, &out_shape[..3], lse),
    })
}

#[allow(clippy::too_many_arguments)]
fn segment_parts<R: Runtime>(
    op: &'static str,
    gpu: &Gpu,
    client: &ComputeClient<R>,
    queries: &Queries,
    segment: &Segment,
    cuts: &[Cut],
    splits: usize,
    first_slot: usize,
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
    launch_lanes(
        client,
        lanes,
        queries,
        &segment.keys,
        &keys,
        &segment.values,
        &values,
        &cuts,
        splits,
        first_slot,
        parts,
        options,
    );
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn launch_lanes<R: Runtime>(
    client: &ComputeClient<R>,
    lanes: Lanes,
    queries: &Queries,
    key_rows: &crate::format::Rows,
    keys: &Side,
    value_rows: &crate::format::Rows,
    values: &Side,
    cuts: &Handle,
    splits: usize,
    first_slot: usize,
    parts: &Parts,
    options: Options,
) {
    with_format!(key_rows, K => with_format!(value_rows, V => {
        lanes.launch::<K, V, R>(client, queries, keys, values, cuts, splits, first_slot, parts, options)
    }));
}
