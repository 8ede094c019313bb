//! Attention of a few queries over many rows: the decode skeleton.
//!
//! Bound by reading the packed rows once, so the query rows that share a KV head are handled together and the KV axis is
//! split: splits are worked on in parallel and merged in order.

pub(crate) mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;

use super::Geometry;

/// Query rows (heads of a group times queries) of one KV head that the decode skeleton holds in registers.
pub const MAX_ROWS: usize = 16;

/// Whether a call is for the decode skeleton; otherwise it is for [`prefill`](super::prefill).
pub(crate) fn serves(geometry: &Geometry) -> bool {
    geometry.group() * geometry.s_q <= MAX_ROWS
}
