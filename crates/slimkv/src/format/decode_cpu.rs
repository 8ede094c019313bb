//! Rows as f32 tiles on the CPU: what the attention skeletons use of a format that has no faster way.

use super::Rows;
use crate::Result;
use crate::cpu::Isa;

/// Tiles have rows of a multiple of this many elements, so that no instruction set has a tail.
pub(crate) const TILE_ALIGN: usize = 16;

/// The row length of tiles for rows of `head_dim` elements.
pub(crate) const fn tile_stride(head_dim: usize) -> usize {
    head_dim.next_multiple_of(TILE_ALIGN)
}

/// Rows that can be decoded block by block.
pub(crate) enum Tiles<'a> {
    Plain(super::plain::cpu::Tiles<'a>),
    Affine(super::affine::cpu::Tiles<'a>),
}

impl<'a> Tiles<'a> {
    /// Looks into the buffers of `rows`, which live on the CPU.
    pub fn of(rows: &'a Rows) -> Result<Self> {
        Ok(match rows {
            Rows::Plain(rows) => Tiles::Plain(super::plain::cpu::Tiles::of(rows)?),
            Rows::Affine(rows) => Tiles::Affine(super::affine::cpu::Tiles::of(rows)?),
        })
    }

    /// Decodes `count` rows from row `from` of matrix `matrix` (sequence times heads plus head) into `tile`, each row
    /// [`tile_stride`] long and filled with zeros past the head dimension. The values are those of the oracle, bit for bit.
    pub fn decode(&self, isa: Isa, matrix: usize, from: usize, count: usize, tile: &mut [f32]) {
        match self {
            Tiles::Plain(rows) => rows.decode(isa, matrix, from, count, tile),
            Tiles::Affine(rows) => rows.decode(isa, matrix, from, count, tile),
        }
    }
}
