//! The prefill skeleton on the GPU.

mod tiles;

pub(crate) use tiles::Tiles;

use crate::attend::decode::gpu::{Skeleton, attend_with};
use crate::attend::{Attended, Geometry, Options, Segment};
use crate::gpu::Gpu;
use crate::{Result, Tensor};

/// Attention of any number of queries. Head dimensions whose tiles fit no shared memory are left to the kernel of
/// [`decode`](crate::attend::decode), block of rows after block of rows.
pub(crate) fn attend(
    op: &'static str,
    gpu: &Gpu,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
) -> Result<Attended> {
    attend_with(Skeleton::Prefill, op, gpu, q, segments, options, geometry)
}
