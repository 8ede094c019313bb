//! Attention of many queries over many rows: the prefill skeleton.
//!
//! Tiles of decoded rows are reused by a block of queries; chunks that lie wholly in the future are skipped.

pub(crate) mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
