//! The decode skeleton on the GPU.
//!
//! The KV axis of every sequence is cut into splits; a cube handles the query rows of one KV head over one split and
//! leaves an unnormalised output, the maximum and the sum of its softmax. A second launch merges the partial results of
//! all splits of all segments in order; on tensor cores the last cube of a KV head to begin does.
//!
//! ```text
//! part_o   f32 [rows, slots, D]     row  = (b * Hq + h) * Sq + i
//! part_ml  f32 [rows, slots, 2]     slot = first slot of the segment + split;  m (natural scale) and l
//! ```
//! Behind them is a count of the cubes that have begun, for each KV head of each sequence.
//!
//! A slot whose tokens a row does not see has `m = -3e38` and `l = 0`. Splits are a function of the sequence's own rows
//! and of the head geometry, and absent slots are skipped, so a result never depends on the rest of the batch.
//!
//! Two kernels share this: `mma` on tensor cores where the device, the formats and the output dtype allow it, and `lanes`
//! everywhere else. Each segment of a call takes its own.

mod kernel;
mod lanes;
mod merge;
mod mma;

use cubecl::prelude::*;
use cubecl::server::Handle;

use kernel::Kernel;
pub(crate) use kernel::Skeleton;
pub(crate) use lanes::{Lanes, TILE};
pub(crate) use merge::merge;
use mma::Mma;

use crate::attend::{Attended, Geometry, Options, Segment, Span};
use crate::format::gpu::bound;
use crate::format::write_gpu::check_extent;
use crate::gpu::{Gpu, small, with_client, word_array};
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
    /// The cut of a span for `count` queries from `first` on. Splits start at multiples of `chunk`, so that where a pass
    /// over the queries begins moves no cut.
    fn new(span: Span, first: usize, count: usize, options: Options, chunk: usize) -> Self {
        // No row lies further away than this, so clamping changes no comparison.
        const FAR: i64 = 1 << 30;
        let len = span.len as i64;
        let q_offset = span.q_offset.saturating_add(first as i64).clamp(-FAR, FAR);
        let high = if options.causal { (q_offset + count as i64).clamp(0, len) } else { len };
        let low = match i64::try_from(options.window).unwrap_or(FAR).min(FAR) {
            0 => 0,
            window => (q_offset + 1 - window).clamp(0, high),
        };
        let low = low / chunk as i64 * chunk as i64;
        Cut { low: low as u32, high: high as u32, chunk: chunk as u32, q_offset: q_offset as i32 }
    }

    /// How many splits.
    pub(crate) fn splits(self) -> usize {
        (self.high - self.low).div_ceil(self.chunk) as usize
    }

    fn words(self) -> [u32; 4] {
        [self.low, self.high, self.chunk, self.q_offset as u32]
    }
}

/// The cuts of a whole batch, as kernels read them: one for all sequences where they are the same, which costs no upload.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Cuts {
    /// u32 `[batch, 4]`, read where `chunk` is 0.
    table: Array<u32>,
    low: u32,
    high: u32,
    chunk: u32,
    q_offset: i32,
}

#[cube]
impl Cuts {
    /// The first token that a sequence sees, one past the last, the tokens of a split, and the row where query 0 stands.
    pub(crate) fn of(&self, sequence: u32) -> (u32, u32, u32, i32) {
        let mut low = self.low;
        let mut high = self.high;
        let mut chunk = self.chunk;
        let mut q_offset = self.q_offset;
        if chunk == 0u32 {
            let at = (sequence * 4u32) as usize;
            low = self.table[at];
            high = self.table[at + 1];
            chunk = self.table[at + 2];
            q_offset = i32::cast_from(self.table[at + 3]);
        }
        (low, high, chunk, q_offset)
    }
}

impl Cuts {
    /// The argument of a launch. `any` is a buffer that the kernel reads anyway; it stands for the table where there is none.
    pub(crate) fn arg<R: Runtime>(client: &ComputeClient<R>, cuts: &[Cut], any: &Handle) -> CutsLaunch<R> {
        match cuts {
            [first, rest @ ..] if rest.iter().all(|cut| cut == first) => {
                CutsLaunch::new(word_array(any, 1), first.low, first.high, first.chunk, first.q_offset)
            }
            _ => {
                let table: Vec<u32> = cuts.iter().flat_map(|cut| cut.words()).collect();
                CutsLaunch::new(word_array(&small(client, &table), table.len()), 0, 0, 0, 0)
            }
        }
    }
}

/// Where partial results go.
#[derive(Clone)]
pub(crate) struct Parts {
    /// f32 `[rows, slots, D]`.
    pub out: Handle,
    /// f32 `[rows, slots, 2]`.
    pub ml: Handle,
    /// Slots of a row.
    pub slots: usize,
    /// Where the kernels put the merged result, if they merge for themselves.
    pub merged: Option<Merged>,
}

/// The result of a call.
#[derive(Clone)]
pub(crate) struct Merged {
    /// `[B, Hq, Sq, D]`.
    pub out: Handle,
    /// f32 `[B, Hq, Sq]`.
    pub lse: Handle,
}

impl Parts {
    /// Two arrays in one allocation, the second where any device lets a binding start.
    fn offset(results: usize, head_dim: usize) -> usize {
        (results * head_dim * 4).max(1).next_multiple_of(256)
    }

    fn bytes(results: usize, head_dim: usize, matrices: usize) -> usize {
        Parts::offset(results, head_dim) + (results.max(1) + matrices) * 8
    }

    fn new(memory: &Handle, results: usize, head_dim: usize, slots: usize, merged: Option<Merged>) -> Self {
        let offset = Parts::offset(results, head_dim) as u64;
        let out = memory.clone().offset_end(memory.size_in_used() - offset);
        Parts { out, ml: memory.clone().offset_start(offset), slots, merged }
    }
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

/// Queries of a pass are a multiple of this, which is whole blocks of rows of any kernel.
const PASS: usize = 64;

/// Attention of up to [`MAX_ROWS`](super::MAX_ROWS) query rows a KV head.
pub(crate) fn attend(
    op: &'static str,
    gpu: &Gpu,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
) -> Result<Attended> {
    attend_with(Skeleton::Decode, op, gpu, q, segments, options, geometry)
}

/// Partial results of each segment, then the merge.
pub(crate) fn attend_with(
    skeleton: Skeleton,
    op: &'static str,
    gpu: &Gpu,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
) -> Result<Attended> {
    let Geometry { batch, q_heads, kv_heads, s_q, head_dim } = geometry;
    let mut kernels = Vec::with_capacity(segments.len());
    for segment in segments {
        check_extent(op, gpu, segment.keys.shape())?;
        let kernel =
            with_client!(gpu, client => Kernel::choose(client, skeleton, segment, q.dtype(), options, geometry));
        kernels.push(kernel.ok_or_else(|| {
            gpu.unsupported(op, "q", "head dimensions of which one row fits its shared memory", head_dim)
        })?);
    }
    let shape = [batch, q_heads, s_q, head_dim];
    let out = gpu.empty(op, batch * q_heads * s_q * head_dim * options.out_dtype.size())?;
    let lse = gpu.empty(op, batch * q_heads * s_q * 4)?;
    let (handle, words) = bound(q);
    let mut first = 0;
    while first < s_q && batch * q_heads > 0 {
        let cuts = |count: usize| -> Vec<Vec<Cut>> {
            let of =
                |(s, k): (&Segment, &Kernel)| s.spans.iter().map(|&span| k.cut(span, first, count, options)).collect();
            segments.iter().zip(&kernels).map(of).collect()
        };
        let all = cuts(s_q - first);
        let a_query = batch * q_heads * splits(&all).iter().sum::<usize>() * head_dim * 4;
        let count = (PART_BYTES / a_query.max(1) / PASS * PASS).max(PASS).min(s_q - first);
        let cuts = if count < s_q - first { cuts(count) } else { all };
        let splits = splits(&cuts);
        // One past the last slot of each segment.
        let ends: Vec<usize> = splits
            .iter()
            .scan(0, |end, n| {
                *end += n;
                Some(*end)
            })
            .collect();
        let slots = ends.last().copied().unwrap_or(0);
        let rows = batch * q_heads * count;
        let bytes = Parts::bytes(rows * slots, head_dim, batch * kv_heads);
        let merges = slots > 0 && count == s_q && kernels.iter().all(Kernel::merges);
        let memory = if merges { gpu.vacant(op, bytes)? } else { gpu.empty(op, bytes)? };
        let merged = merges.then(|| Merged { out: out.handle().clone(), lse: lse.handle().clone() });
        let parts = Parts::new(memory.handle(), rows * slots, head_dim, slots, merged);
        let queries = Queries { handle: handle.clone(), words, dtype: q.dtype(), first, of: s_q };
        let part = Geometry { s_q: count, ..geometry };
        with_client!(gpu, client => {
            for (((segment, kernel), cuts), (&splits, &end)) in
                segments.iter().zip(&kernels).zip(&cuts).zip(splits.iter().zip(&ends))
            {
                if splits > 0 {
                    kernel.launch(client, &queries, segment, cuts, end - splits..end, &parts, options, part);
                }
            }
            if !merges {
                merge(client, skeleton, &parts, &ends, &queries, part, options.out_dtype, out.handle(), lse.handle());
            }
        });
        first += count;
    }
    Ok(Attended {
        out: Tensor::from_gpu_buffer(options.out_dtype, &shape, out),
        lse: Tensor::from_gpu_buffer(DType::F32, &shape[..3], lse),
    })
}

/// The splits of every segment: those of the sequence that has most.
fn splits(cuts: &[Vec<Cut>]) -> Vec<usize> {
    cuts.iter().map(|c| c.iter().map(|cut| cut.splits()).max().unwrap_or(0)).collect()
}
