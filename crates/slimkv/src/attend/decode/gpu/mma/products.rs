//! The two products of a tile: scores from keys, and weighted values.

use cubecl::prelude::*;

use crate::format::fragments::{
    CODE_UNIT, F2, KeyTiles, Pair, Quad, Single, Tile, ValueTiles, key_params, value_params, value_place,
};

/// Scores of a tile, in powers of two: block b of 16 tokens, then tokens g and g + 8, then query rows 2t and 2t + 1.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn score_tile<K: KeyTiles, E: Float>(
    queries: &SharedMemory<Single>,
    prepared: &Array<u32>,
    tiles: &SharedMemory<Quad>,
    params: &SharedMemory<Quad>,
    slot: u32,
    lane: u32,
    scale: f32,
    scores: &mut Array<F2>,
    #[comptime] columns: usize,
    #[comptime] tile: Tile,
) {
    let multiply = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let (g, t) = (lane / 4u32, lane % 4u32);
    let pairs = comptime!((tile.head_dim / 8) as usize);
    let octets = comptime!((tile.tokens / 8) as usize);
    let chunks = comptime!(tile.chunks());
    let load = comptime!(tile.load() as usize);
    let n = comptime!(tile.per_half());

    let mut right = Array::<u32>::new(comptime!(columns * pairs));
    let mut constant = Array::<F2>::new(columns);
    K::operands::<E>(
        queries,
        prepared,
        params,
        slot * comptime!(key_params(tile)),
        lane,
        &mut right,
        &mut constant,
        columns,
        tile,
    );

    let mut sums = Array::<F2>::new(comptime!(columns * octets));
    #[unroll]
    for i in 0..comptime!(columns * octets) {
        sums[i] = F2::new(0.0f32);
    }
    let base = slot * comptime!(tile.tokens * tile.chunks()) + g * chunks;
    #[unroll]
    for j in 0..comptime!(tile.chunks() / tile.load()) {
        let mut words = Array::<u32>::new(comptime!(octets * load));
        #[unroll]
        for o in 0..octets {
            let at = base + comptime!(o as u32 * 8 * tile.chunks());
            if comptime!(load == 4) {
                let flip = if comptime!(tile.chunks().is_multiple_of(8)) { (g & 1u32) << 2u32 } else { 0u32.runtime() };
                let four = tiles[(at + ((comptime!(4 * j) + t) ^ flip)) as usize];
                #[unroll]
                for e in 0..4usize {
                    words[o * 4 + e] = four[e];
                }
            } else if comptime!(load == 2) {
                let view = tiles.to_slice().with_vector_size::<Const<2>>();
                let two = view[(at * 2u32 + comptime!(4 * j) + t) as usize];
                words[o * 2] = two[0];
                words[o * 2 + 1] = two[1];
            } else {
                let view = tiles.to_slice().with_vector_size::<Const<1>>();
                words[o] = view[(at * 4u32 + comptime!(4 * j) + t) as usize][0];
            }
        }
        #[unroll]
        for s in 0..comptime!(tile.load() * n / 2) {
            let p = comptime!((j * tile.load() * n + 2 * s) as usize);
            let (e0, i0) = comptime!(((2 * s / n) as usize, 2 * s % n));
            let (e1, i1) = comptime!((((2 * s + 1) / n) as usize, (2 * s + 1) % n));
            #[unroll]
            for b in 0..comptime!(octets / 2) {
                let mut left = Array::<Pair<E>>::new(4usize);
                let (low, high) = comptime!((2 * b * load, (2 * b + 1) * load));
                left[0] = Pair::<E>::reinterpret(K::register(words[comptime!(low + e0)], i0, tile));
                left[1] = Pair::<E>::reinterpret(K::register(words[comptime!(high + e0)], i0, tile));
                left[2] = Pair::<E>::reinterpret(K::register(words[comptime!(low + e1)], i1, tile));
                left[3] = Pair::<E>::reinterpret(K::register(words[comptime!(high + e1)], i1, tile));
                #[unroll]
                for x in 0..columns {
                    let at = comptime!(x * octets + 2 * b);
                    step::<E>(
                        &multiply,
                        &left,
                        right[comptime!(x * pairs + p)],
                        right[comptime!(x * pairs + p + 1)],
                        &mut sums,
                        at,
                    );
                }
            }
        }
    }
    let unit = comptime!(if tile.packed() { CODE_UNIT } else { 1.0 });
    #[unroll]
    for x in 0..columns {
        let constant = constant[x] * F2::new(scale);
        #[unroll]
        for o in 0..octets {
            let i = comptime!(x * octets + o);
            scores[i] = fma(sums[i], F2::new(scale * unit), constant);
        }
    }
}

/// `sums[at..at + 2] += left * (low, high)`.
#[cube]
fn step<E: Float>(
    multiply: &cmma::MmaDefinition<E, E, f32>,
    left: &Array<Pair<E>>,
    low: u32,
    high: u32,
    sums: &mut Array<F2>,
    #[comptime] at: usize,
) {
    let mut right = Array::<Pair<E>>::new(2usize);
    right[0] = Pair::<E>::reinterpret(low);
    right[1] = Pair::<E>::reinterpret(high);
    let mut sum = Array::<F2>::new(2usize);
    sum[0] = sums[at];
    sum[1] = sums[comptime!(at + 1)];
    let sum = multiply.execute(left, &right, &sum);
    sums[at] = sum[0];
    sums[comptime!(at + 1)] = sum[1];
}

/// Adds the weighted values of a tile. Accumulator j holds 16 channels: where chunks hold codes, elements 2i and 2i + 1 of
/// every 16 bits of a chunk; where they hold 16-bit elements, two chunks.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn value_tile<V: ValueTiles, E: Float>(
    weights: &Array<u32>,
    tiles: &SharedMemory<Quad>,
    params: &SharedMemory<Quad>,
    slot: u32,
    lane: u32,
    v_lane: u32,
    eights: u32,
    acc: &mut Array<F2>,
    zeros: &mut Array<F2>,
    #[comptime] columns: usize,
    #[comptime] tile: Tile,
) {
    let multiply = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let chunks = comptime!(tile.chunks());
    let together = comptime!(tile.chunks().min(2) as usize);
    let n = comptime!(tile.per_half());
    let accs = comptime!((tile.head_dim / 16) as usize);
    let sets = comptime!(tile.sets() as usize);
    #[unroll]
    for block in 0..comptime!((tile.tokens / 16) as usize) {
        let mut right = Array::<u32>::new(comptime!(columns * sets * 2));
        let mut scales = Array::<u32>::new(comptime!(2 * tile.chunks() as usize));
        V::operands::<E>(
            weights,
            params,
            slot * comptime!(value_params(tile)),
            lane,
            &mut right,
            &mut scales,
            zeros,
            block,
            columns,
            tile,
        );
        let base = slot * comptime!(tile.tokens * tile.chunks()) + comptime!(block as u32 * 16 * tile.chunks());
        #[unroll]
        for two in 0..comptime!(chunks.div_ceil(2)) {
            // matrices: the first chunk of tokens 0-7 and 8-15, then the second
            let at = if comptime!(tile.swizzled()) {
                base + (v_lane ^ comptime!(2 * two))
            } else {
                base + v_lane + comptime!(2 * two)
            };
            let row = tiles.slice(at as usize, at as usize + 1);
            // SAFETY: a line of the tile holds 16 bytes of elements `E`, whole.
            let row = unsafe { row.downcast_unchecked::<E>() };
            let words = multiply.load_matrix::<E, Const<2>>(&row, cmma::MatrixIdent::A, comptime!(2 * together), true);
            #[unroll]
            for c in 0..comptime!(if n == 1 { 1 } else { together }) {
                let chunk = comptime!(2 * two + c as u32);
                let (a, b) = (u32::reinterpret(words[comptime!(2 * c)]), u32::reinterpret(words[comptime!(2 * c + 1)]));
                #[unroll]
                for i in 0..comptime!(n.div_ceil(2)) {
                    let mut left = Array::<Pair<E>>::new(4usize);
                    if comptime!(n == 1) {
                        left[0] = words[0];
                        left[1] = words[2];
                        left[2] = words[1];
                        left[3] = words[3];
                    } else {
                        let (sa, sb) =
                            (scales[comptime!(2 * chunk as usize)], scales[comptime!(2 * chunk as usize + 1)]);
                        left[0] = Pair::<E>::reinterpret(V::register::<E>(a, sa, eights, comptime!(2 * i), tile));
                        left[1] = Pair::<E>::reinterpret(V::register::<E>(a, sa, eights, comptime!(2 * i + 1), tile));
                        left[2] = Pair::<E>::reinterpret(V::register::<E>(b, sb, eights, comptime!(2 * i), tile));
                        left[3] = Pair::<E>::reinterpret(V::register::<E>(b, sb, eights, comptime!(2 * i + 1), tile));
                    }
                    let j = comptime!(if n == 1 { two as usize } else { (chunk * n / 2 + i) as usize });
                    let set = comptime!(if sets > 1 {
                        (chunk * tile.per_chunk() / tile.per_chunk().max(tile.group)) as usize
                    } else {
                        0
                    });
                    #[unroll]
                    for x in 0..columns {
                        let r = comptime!((x * sets + set) * 2);
                        step::<E>(
                            &multiply,
                            &left,
                            right[r],
                            right[comptime!(r + 1)],
                            acc,
                            comptime!((x * accs + j) * 2),
                        );
                    }
                }
            }
        }
    }
}

/// Where in a block of 16 tokens a lane's row of the first load of values lies.
#[cube]
pub(super) fn first_row(lane: u32, #[comptime] tile: Tile) -> u32 {
    let chunks = comptime!(tile.chunks());
    let row = value_place((lane % 16u32) * chunks, tile);
    if comptime!(chunks == 1) {
        row
    } else if comptime!(tile.swizzled()) {
        row ^ (lane / 16u32)
    } else {
        row + lane / 16u32
    }
}
