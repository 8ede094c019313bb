//! The ring of tiles of a warp: asynchronous copies into shared memory, and the barriers that say they have landed.

use cubecl::prelude::barrier::{Barrier, copy_async, copy_async_checked};
use cubecl::prelude::*;

use crate::format::fragments::{KeyTiles, Quad, Tile, ValueTiles, key_params, key_place, value_params, value_place};

/// Queues the copies of one tile into one slot of the ring; tokens past `high` are zero-filled, so that whatever lies there
/// cannot become a NaN.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn fetch<K: KeyTiles, V: ValueTiles, P: Size>(
    k_rows: &Array<Quad>,
    k_first: &Array<Quad>,
    k_second: &Array<Quad>,
    v_rows: &Array<Quad>,
    v_first: &Array<Vector<u32, P>>,
    v_second: &Array<Vector<u32, P>>,
    k_tiles: &mut SharedMemory<Quad>,
    k_params: &mut SharedMemory<Quad>,
    v_tiles: &mut SharedMemory<Quad>,
    v_params: &mut SharedMemory<Quad>,
    matrix: u32,
    capacity: u32,
    high: u32,
    token: u32,
    slot: u32,
    lane: u32,
    #[comptime] keys: Tile,
    #[comptime] values: Tile,
) {
    let row = matrix * capacity + token;
    let left = high - token;
    fetch_rows(k_rows, k_tiles, row, left, slot, lane, true, keys);
    fetch_rows(v_rows, v_tiles, row, left, slot, lane, false, values);
    K::fetch(k_first, k_second, k_params, slot * comptime!(key_params(keys)), matrix, capacity, token, lane, keys);
    V::fetch::<P>(v_first, v_second, v_params, slot * comptime!(value_params(values)), row, left, lane, values);
}

/// The rows of a tile: 16 bytes a lane and copy.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fetch_rows(
    rows: &Array<Quad>,
    tiles: &mut SharedMemory<Quad>,
    row: u32,
    left: u32,
    slot: u32,
    lane: u32,
    #[comptime] keys: bool,
    #[comptime] tile: Tile,
) {
    let chunks = comptime!(tile.chunks());
    let from = row * chunks + lane;
    let to = slot * comptime!(tile.tokens * tile.chunks());
    if left >= comptime!(tile.tokens) {
        #[unroll]
        for x in 0..comptime!(tile.tokens * tile.chunks() / 32) {
            let from = (from + comptime!(x * 32)) as usize;
            let to = (to + chunk_place(lane, x, keys, tile)) as usize;
            copy_async(&rows.slice(from, from + 1), &mut tiles.slice_mut(to, to + 1), 4u32);
        }
    } else {
        #[unroll]
        for x in 0..comptime!(tile.tokens * tile.chunks() / 32) {
            let there = select((comptime!(x * 32) + lane) / chunks < left, 1usize, 0usize);
            let from = (from + comptime!(x * 32)) as usize;
            let to = (to + chunk_place(lane, x, keys, tile)) as usize;
            copy_async_checked(&rows.slice(from, from + there), &mut tiles.slice_mut(to, to + 1), 4u32);
        }
    }
}

/// The place of chunk `32 x + lane`, of which most is known before the loop over tiles.
#[cube]
fn chunk_place(lane: u32, #[comptime] x: u32, #[comptime] keys: bool, #[comptime] tile: Tile) -> u32 {
    if comptime!(keys && 32 % tile.chunks() == 0) {
        // 32 chunks are whole tokens; their number is even, or one
        let odd = comptime!(if tile.chunks() == 32 { (x % 2) << 2 } else { 0 });
        (key_place(lane, tile) ^ odd) + comptime!(32 * x)
    } else if comptime!(!keys && tile.swizzled() && 32 % tile.chunks() == 0) {
        let moved = comptime!(if tile.chunks() < 8 { 0 } else { (32 * x / tile.chunks()) % 8 });
        (value_place(lane, tile) ^ moved) + comptime!(32 * x)
    } else if comptime!(keys) {
        key_place(comptime!(32 * x) + lane, tile)
    } else {
        value_place(comptime!(32 * x) + lane, tile)
    }
}

/// Lets the barrier of a stage complete when all copies queued so far by all warps have landed.
#[cube]
pub(super) fn arrive(b0: &Barrier, b1: &Barrier, stage: u32, lane: u32) {
    if stage == 0u32 {
        arrive_at(b0, lane);
    } else {
        arrive_at(b1, lane);
    }
}

#[cube]
fn arrive_at(barrier: &Barrier, lane: u32) {
    barrier.commit_copy_async();
    sync_plane();
    if lane == 0u32 {
        let _token = barrier.arrive();
    }
}

/// Waits until the copies of a stage have landed.
#[cube]
pub(super) fn wait(b0: &Barrier, b1: &Barrier, stage: u32, phase: u32) {
    if stage == 0u32 {
        b0.wait_parity(phase);
    } else {
        b1.wait_parity(phase);
    }
}
