//! The decode skeleton on the CPU.

use crate::attend::{Attended, Geometry, Options, Segment};
use crate::{Result, Tensor};

/// Attention of up to [`MAX_ROWS`](super::MAX_ROWS) query rows a KV head.
pub(crate) fn attend(op: &'static str, q: &Tensor, segments: &[Segment], options: Options, _: Geometry) -> Result<Attended> {
    super::super::oracle::attend(op, q, segments, options)?.rounded(q, options)
}
