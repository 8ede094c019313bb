//! Plain f16 and bf16 rows as matrix operands: they are stored as such.

use cubecl::prelude::*;

use crate::format::fragments::{F2, KeyTiles, Quad, Single, Tile, ValueTiles};

/// Tiles of [`Plain`](super::Plain) rows.
pub(crate) struct PlainTiles;

#[cube]
impl KeyTiles for PlainTiles {
    fn fetch(
        _first: &Array<Quad>,
        _second: &Array<Quad>,
        _kept: &mut SharedMemory<Quad>,
        _slot: u32,
        _matrix: u32,
        _capacity: u32,
        _token: u32,
        _lane: u32,
        #[comptime] _tile: Tile,
    ) {
    }

    fn prepare<E: Float>(query: u32, #[comptime] _pair: usize, #[comptime] _tile: Tile) -> u32 {
        query
    }

    fn operands<E: Float>(
        _queries: &SharedMemory<Single>,
        prepared: &Array<u32>,
        _kept: &SharedMemory<Quad>,
        _slot: u32,
        _lane: u32,
        operands: &mut Array<u32>,
        constant: &mut Array<F2>,
        #[comptime] columns: usize,
        #[comptime] tile: Tile,
    ) {
        #[unroll]
        for p in 0..comptime!(columns * (tile.head_dim / 8) as usize) {
            operands[p] = prepared[p];
        }
        #[unroll]
        for x in 0..columns {
            constant[x] = F2::new(0.0f32);
        }
    }

    fn register(word: u32, #[comptime] _i: u32, #[comptime] _tile: Tile) -> u32 {
        word
    }
}

#[cube]
impl ValueTiles for PlainTiles {
    fn fetch<P: Size>(
        _first: &Array<Vector<u32, P>>,
        _second: &Array<Vector<u32, P>>,
        _kept: &mut SharedMemory<Quad>,
        _slot: u32,
        _row: u32,
        _left: u32,
        _lane: u32,
        #[comptime] _tile: Tile,
    ) {
    }

    fn operands<E: Float>(
        weights: &Array<u32>,
        _kept: &SharedMemory<Quad>,
        _slot: u32,
        _lane: u32,
        operands: &mut Array<u32>,
        _scales: &mut Array<u32>,
        _zeros: &mut Array<F2>,
        #[comptime] block: usize,
        #[comptime] columns: usize,
        #[comptime] tile: Tile,
    ) {
        let octets = comptime!((tile.tokens / 8) as usize);
        #[unroll]
        for x in 0..columns {
            operands[x * 2] = weights[comptime!(x * octets + block * 2)];
            operands[x * 2 + 1] = weights[comptime!(x * octets + block * 2 + 1)];
        }
    }

    fn register<E: Float>(word: u32, _scale: u32, _eights: u32, #[comptime] _i: u32, #[comptime] _tile: Tile) -> u32 {
        word
    }
}
