//! The prefill skeleton on the GPU.

use crate::attend::decode::gpu::{Cut, attend_cut};
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
    let whole = |visible: usize| visible;
    let cuts: Vec<Vec<Cut>> = segments
        .iter()
        .map(|s| s.spans.iter().map(|&span| Cut::new(span, geometry.s_q, options, whole)).collect())
        .collect();
    attend_cut(op, gpu, q, segments, options, geometry, &cuts)
}
