//! The prefill skeleton on the GPU.

use crate::attend::decode::gpu::attend_split;
use crate::attend::{Attended, Geometry, Options, Segment};
use crate::gpu::Gpu;
use crate::{Result, Tensor};

/// Attention of any number of queries: blocks of query rows, each over all the tokens that it sees.
pub(crate) fn attend(
    op: &'static str,
    gpu: &Gpu,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
) -> Result<Attended> {
    attend_split(op, gpu, q, segments, options, geometry, |visible| visible)
}
