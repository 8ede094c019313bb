//! Attention straight from packed rows: one skeleton for a few queries, one for many, and the merge of partial results.
//!
//! Scores, softmax state and outputs accumulate in f32 (online softmax, arXiv 1805.02867; the KV axis is split as in
//! Flash-Decoding). The cuts of the KV axis are a function of a sequence's own length and of the head geometry, and
//! partial results merge in a fixed order, so a result never depends on the rest of the batch, on threads or on load.

pub mod decode;
pub mod merge;
pub mod oracle;
pub mod prefill;

use crate::format::{RowShape, Rows, on_device};
use crate::{DType, Device, Error, Result, Tensor};

/// Which rows of a [`Segment`] one sequence has, and where its queries stand among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Filled rows.
    pub len: usize,
    /// The position of query 0 relative to row 0 of this segment: query `i` stands at row `q_offset + i`. Negative or
    /// past `len` where it stands in another segment.
    pub q_offset: i64,
}

/// Rows that lie together: a whole cache, or one of the blocks that it grew by.
#[derive(Debug, Clone)]
pub struct Segment {
    /// The keys.
    pub keys: Rows,
    /// The values; same geometry, any format.
    pub values: Rows,
    /// One span a sequence.
    pub spans: Vec<Span>,
}

impl Segment {
    /// A segment whose rows are all filled and whose queries are the last `s_q` tokens.
    pub fn full(keys: Rows, values: Rows, s_q: usize) -> Self {
        let RowShape { batch, capacity, .. } = keys.shape();
        let span = Span { len: capacity, q_offset: capacity as i64 - s_q as i64 };
        Segment { keys, values, spans: vec![span; batch] }
    }
}

/// What the queries may see and how scores are scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// Factor of every score, usually `1 / sqrt(D)`.
    pub scale: f32,
    /// Whether a query sees only tokens at or before its own position.
    pub causal: bool,
    /// How many tokens up to its own position a query sees; 0 means all.
    pub window: usize,
    /// The dtype of the output. f16 and bf16 results are within 2e-3 of the exact ones on unit-variance data; f32 results
    /// within 1e-5, relative, which costs some speed.
    pub out_dtype: DType,
}

/// The result of an attention.
#[derive(Debug, Clone)]
pub struct Attended {
    /// `[B, Hq, Sq, D]`; zeros for a query that sees no token.
    pub out: Tensor,
    /// f32 `[B, Hq, Sq]`: the natural logarithm of the sum of exponentials of the scaled scores; `-inf` for a query that
    /// sees no token.
    pub lse: Tensor,
}

/// The geometry of one call, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub s_q: usize,
    pub head_dim: usize,
}

impl Geometry {
    /// Query heads that share one KV head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }
}

/// Attention of queries `[B, Hq, Sq, D]` over the union of the rows of `segments`, in order.
///
/// `op` is the operation that errors name. A query head `h` reads KV head `h / (Hq / Hkv)`.
pub fn attend(op: &'static str, q: &Tensor, segments: &[Segment], options: Options) -> Result<Attended> {
    let geometry = check(op, q, segments, options)?;
    match q.device().gpu() {
        None if decode::serves(&geometry) => decode::cpu::attend(op, q, segments, options, geometry),
        None => prefill::cpu::attend(op, q, segments, options, geometry),
        #[cfg(feature = "gpu")]
        Some(gpu) if decode::serves(&geometry) => decode::gpu::attend(op, gpu, q, segments, options, geometry),
        #[cfg(feature = "gpu")]
        Some(gpu) => prefill::gpu::attend(op, gpu, q, segments, options, geometry),
        #[cfg(not(feature = "gpu"))]
        Some(never) => match *never {},
    }
}

/// Checks everything about a call that does not depend on a format.
pub(crate) fn check(op: &'static str, q: &Tensor, segments: &[Segment], options: Options) -> Result<Geometry> {
    let &[batch, q_heads, s_q, head_dim] = q.shape() else {
        return Err(Error::shape(op, "q", "[B, Hq, Sq, D]", q.shape()));
    };
    if !q.dtype().is_float() {
        return Err(Error::dtype(op, "q", "f16, bf16 or f32", q.dtype()));
    }
    if !options.out_dtype.is_float() {
        return Err(Error::dtype(op, "out_dtype", "f16, bf16 or f32", options.out_dtype));
    }
    if !options.scale.is_finite() {
        return Err(Error::value(op, "scale", "a finite number", options.scale));
    }
    if head_dim == 0 {
        return Err(Error::shape(op, "q", "[B, Hq, Sq, D] with D > 0", q.shape()));
    }
    let Some(first) = segments.first() else {
        return Err(Error::value(op, "segments", "at least one segment", 0));
    };
    let kv_heads = first.keys.shape().heads;
    if kv_heads == 0 || q_heads % kv_heads != 0 {
        let expected = format!("a multiple of the {kv_heads} KV heads as Hq");
        return Err(Error::shape(op, "q", expected, q.shape()));
    }
    let device = q.device();
    for segment in segments {
        check_side(op, "k", &segment.keys, &device, (batch, kv_heads, head_dim))?;
        check_side(op, "v", &segment.values, &device, (batch, kv_heads, head_dim))?;
        let capacity = segment.keys.shape().capacity;
        if segment.values.shape().capacity != capacity {
            let found = segment.values.shape().capacity;
            return Err(Error::value(op, "v", format!("as many rows as the keys ({capacity})"), found));
        }
        if segment.spans.len() != batch {
            return Err(Error::value(op, "spans", format!("one span a sequence ({batch})"), segment.spans.len()));
        }
        if let Some(span) = segment.spans.iter().find(|s| s.len > capacity) {
            return Err(Error::value(op, "spans", format!("at most {capacity} rows"), span.len));
        }
    }
    Ok(Geometry { batch, q_heads, kv_heads, s_q, head_dim })
}

fn check_side(
    op: &'static str,
    arg: &'static str,
    rows: &Rows,
    device: &Device,
    (batch, heads, head_dim): (usize, usize, usize),
) -> Result<()> {
    let shape = rows.shape();
    if (shape.batch, shape.heads, shape.head_dim) != (batch, heads, head_dim) {
        let expected = format!("[{batch}, {heads}, S, {head_dim}]");
        return Err(Error::shape(op, arg, expected, &[shape.batch, shape.heads, shape.capacity, shape.head_dim]));
    }
    match rows {
        Rows::Plain(rows) => on_device(op, arg, &rows.data, device),
        Rows::Affine(rows) => on_device(op, arg, &rows.codes, device),
    }
}
