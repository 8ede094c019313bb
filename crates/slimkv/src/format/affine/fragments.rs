//! Group-affine rows as matrix operands: codes are masked into place, scales and zero points go around them.
//!
//! Keys: the scale of a channel multiplies the query, once for a tile, since a tile lies in one group of tokens; the zero
//! points of a group are one product with the query, and the scales another, which tells how far rounding moved the scaled
//! query. Values: the scale of a token multiplies its weight where the channels of
//! a chunk share it, else the codes; the zero points are one product of 16 tokens with the weights, a row for each group.

use cubecl::prelude::barrier::{copy_async, copy_async_checked};
use cubecl::prelude::*;

use crate::format::fragments::{F2, KeyTiles, Pair, Quad, Single, Tile, ValueTiles, codes, times, zip};

/// Tiles of [`Affine`](super::Affine) rows: keys with [`Axis::Tokens`](super::Axis::Tokens), values with
/// [`Axis::Channels`](super::Axis::Channels), packed codes, f16 parameters.
pub(crate) struct AffineTiles;

#[cube]
impl KeyTiles for AffineTiles {
    fn fetch(
        first: &Array<Quad>,
        second: &Array<Quad>,
        kept: &mut SharedMemory<Quad>,
        slot: u32,
        matrix: u32,
        capacity: u32,
        token: u32,
        lane: u32,
        #[comptime] tile: Tile,
    ) {
        let row_chunks = comptime!(tile.head_dim / 8);
        let groups = (capacity + comptime!(tile.group - 1)) / comptime!(tile.group);
        let row = (matrix * groups + token / comptime!(tile.group)) * row_chunks;
        #[unroll]
        for x in 0..comptime!((2 * row_chunks).div_ceil(32)) {
            let id = comptime!(x * 32) + lane;
            let from = (row + id % row_chunks) as usize;
            let to = (slot + id - id % row_chunks + scale_place(id % row_chunks)) as usize;
            if id < row_chunks {
                copy_async(&first.slice(from, from + 1), &mut kept.slice_mut(to, to + 1), 4u32);
            } else if id < comptime!(2 * row_chunks) {
                copy_async(&second.slice(from, from + 1), &mut kept.slice_mut(to, to + 1), 4u32);
            }
        }
    }

    fn prepare<E: Float>(query: u32, #[comptime] pair: usize, #[comptime] tile: Tile) -> u32 {
        u32::reinterpret(Pair::<E>::reinterpret(query) * inverse_powers::<E>(comptime!(2 * pair as u32), tile))
    }

    fn operands<E: Float>(
        queries: &SharedMemory<Single>,
        prepared: &Array<u32>,
        kept: &SharedMemory<Quad>,
        slot: u32,
        lane: u32,
        operands: &mut Array<u32>,
        constant: &mut Array<F2>,
        #[comptime] columns: usize,
        #[comptime] tile: Tile,
    ) {
        let multiply = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
        let pairs = comptime!((tile.head_dim / 8) as usize);
        let t = lane % 4u32;
        let distinct = comptime!(tile.distinct_rows());
        let run_chunks = comptime!(tile.run() / 8);
        let loads = comptime!(tile.chunks() / tile.load());
        // The query times the zero points, and times the scales.
        let mut exact = Array::<F2>::new(comptime!(2 * columns.max(2)));
        // The sum of what the codes are multiplied with.
        let mut rounded = Array::<F2>::new(comptime!(2 * columns));
        #[unroll]
        for x in 0..comptime!(2 * columns.max(2)) {
            exact[x] = F2::new(0.0f32);
        }
        #[unroll]
        for x in 0..comptime!(2 * columns) {
            rounded[x] = F2::new(0.0f32);
        }
        #[unroll]
        for j in 0..loads {
            let mut scaled = Array::<u32>::new(comptime!(columns * (tile.run() / 2) as usize));
            #[unroll]
            for u in 0..run_chunks {
                let at = slot + scale_chunk(t, j, u, run_chunks);
                let scale = kept[at as usize];
                let zero = kept[(at + comptime!(tile.head_dim / 8)) as usize];
                if comptime!(tile.copies > 1) {
                    // Four words are an operand as they lie. Its rows g hold the first and the third, and meet these of the
                    // query in the columns of an even copy; the rows g + 8 hold the others, for the odd copies.
                    let odd = lane / 4u32 / distinct % 2u32;
                    let view = queries.to_slice().with_vector_size::<Const<2>>();
                    let query = view[(comptime!((j * run_chunks + u) * 64) + lane * 2u32 + odd) as usize];
                    accumulate::<E>(&multiply, &four::<E>(zero), query[0], query[1], &mut exact, 0usize);
                    accumulate::<E>(&multiply, &four::<E>(scale), query[0], query[1], &mut exact, 1usize);
                } else {
                    let view = queries.to_slice().with_vector_size::<Const<4>>();
                    #[unroll]
                    for x in 0..columns {
                        let quad = comptime!((x * pairs / 4) as u32 + j * run_chunks + u);
                        let query = view[(comptime!(quad * 32) + lane) as usize];
                        #[unroll]
                        for y in 0..2usize {
                            let mut left = Array::<Pair<E>>::new(4usize);
                            left[0] = Pair::<E>::reinterpret(zero[y]);
                            left[1] = Pair::<E>::reinterpret(scale[y]);
                            left[2] = Pair::<E>::reinterpret(zero[comptime!(y + 2)]);
                            left[3] = Pair::<E>::reinterpret(scale[comptime!(y + 2)]);
                            let (low, high) = (query[comptime!(2 * y)], query[comptime!(2 * y + 1)]);
                            accumulate::<E>(&multiply, &left, low, high, &mut exact, x);
                        }
                    }
                }
                #[unroll]
                for x in 0..columns {
                    let from = comptime!(x * pairs + ((j * run_chunks + u) * 4) as usize);
                    let to = comptime!((x * run_chunks as usize + u as usize) * 4);
                    #[unroll]
                    for y in 0..4usize {
                        scaled[comptime!(to + y)] = times::<E>(prepared[comptime!(from + y)], scale[y]);
                    }
                }
            }
            #[unroll]
            for p in 0..comptime!(tile.run() / 2) {
                // the channels whose codes lie opposite in a word
                let per_register = comptime!(tile.per_word() / 2);
                let c = comptime!(p / per_register * tile.per_word() + p % per_register);
                let low = comptime!((c / 2) as usize);
                let high = comptime!(((c + per_register) / 2) as usize);
                #[unroll]
                for x in 0..columns {
                    let base = comptime!(x * (tile.run() / 2) as usize);
                    operands[comptime!(x * pairs + (j * tile.run() / 2 + p) as usize)] =
                        zip::<E>(scaled[comptime!(base + low)], scaled[comptime!(base + high)], comptime!(c % 2 == 1));
                }
            }
            #[unroll]
            for p in range_stepped(0u32, comptime!(tile.run() / 2), 2u32) {
                let mut left = Array::<Pair<E>>::new(4usize);
                #[unroll]
                for z in 0..4u32 {
                    let register = comptime!((p + z / 2) % tile.per_half());
                    left[z as usize] = Pair::<E>::new(E::new(comptime!((1u32 << tile.excess(register)) as f32)));
                }
                #[unroll]
                for x in 0..columns {
                    let at = comptime!(x * pairs + (j * tile.run() / 2 + p) as usize);
                    accumulate::<E>(&multiply, &left, operands[at], operands[comptime!(at + 1)], &mut rounded, x);
                }
            }
        }
        // Rounding moved every score of the tile by about as much as it moves the product with the mean code, which is
        // known: without this the error of a log-sum-exp would be that of one score.
        let mean = F2::new(f32::new(comptime!(((1u32 << tile.bits) - 1) as f32 / 2.0)));
        if comptime!(tile.copies > 1) {
            let even = exact[0] + exact[2] * mean;
            let odd = exact[1] + exact[3] * mean;
            let is_odd = 2u32 * t / distinct % 2u32 == 1u32;
            let mut sum = F2::empty();
            #[unroll]
            for r in 0..2usize {
                let own = select(is_odd, odd[r], even[r]);
                sum[r] = own + plane_shuffle_xor(own, comptime!(tile.distinct_rows() / 2));
            }
            constant[0] = sum - rounded[0] * mean;
        } else {
            #[unroll]
            for x in 0..columns {
                let moved = exact[comptime!(2 * x + 1)] - rounded[comptime!(2 * x)];
                constant[x] = exact[comptime!(2 * x)] + moved * mean;
            }
        }
    }

    fn register(word: u32, #[comptime] i: u32, #[comptime] tile: Tile) -> u32 {
        codes(word, i, comptime!(tile.bits))
    }
}

/// The inverses of the powers of two by which the codes of a channel and the next are too large.
#[cube]
fn inverse_powers<E: Float>(#[comptime] channel: u32, #[comptime] tile: Tile) -> Pair<E> {
    let mut pair = Pair::<E>::empty();
    #[unroll]
    for i in 0..2u32 {
        let register = comptime!((channel + i) % tile.per_half());
        pair[i as usize] = E::new(comptime!(1.0 / (1u32 << tile.excess(register)) as f32));
    }
    pair
}

/// Four words as a left operand.
#[cube]
fn four<E: Float>(words: Quad) -> Array<Pair<E>> {
    let mut left = Array::<Pair<E>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        left[i] = Pair::<E>::reinterpret(words[i]);
    }
    left
}

/// Adds a product to the sums number `x`.
#[cube]
fn accumulate<E: Float>(
    multiply: &cmma::MmaDefinition<E, E, f32>,
    left: &Array<Pair<E>>,
    low: u32,
    high: u32,
    sums: &mut Array<F2>,
    #[comptime] x: usize,
) {
    let mut right = Array::<Pair<E>>::new(2usize);
    right[0] = Pair::<E>::reinterpret(low);
    right[1] = Pair::<E>::reinterpret(high);
    let mut sum = Array::<F2>::new(2usize);
    sum[0] = sums[comptime!(2 * x)];
    sum[1] = sums[comptime!(2 * x + 1)];
    let sum = multiply.execute(left, &right, &sum);
    sums[comptime!(2 * x)] = sum[0];
    sums[comptime!(2 * x + 1)] = sum[1];
}

/// Where chunk number `id` of a row of scales lies: the four lanes of a quad read 64 bytes apart.
#[cube]
fn scale_place(id: u32) -> u32 {
    id ^ ((id >> 3u32) & 1u32)
}

/// Where the chunk `u` of run `j` of lane t lies, in terms that let the loads of a lane share an address.
#[cube]
fn scale_chunk(t: u32, #[comptime] j: u32, #[comptime] u: u32, #[comptime] run_chunks: u32) -> u32 {
    if comptime!(run_chunks == 4) {
        4u32 * t + ((t / 2u32) ^ comptime!(u % 2)) + comptime!(16 * j + u / 2 * 2)
    } else {
        scale_place((comptime!(4 * j) + t) * run_chunks + u)
    }
}

#[cube]
impl ValueTiles for AffineTiles {
    fn fetch<P: Size>(
        first: &Array<Vector<u32, P>>,
        second: &Array<Vector<u32, P>>,
        kept: &mut SharedMemory<Quad>,
        slot: u32,
        row: u32,
        left: u32,
        lane: u32,
        #[comptime] tile: Tile,
    ) {
        if lane < comptime!(tile.tokens) {
            let from = (row + lane) as usize;
            let to = (slot + lane) as usize;
            let n = select(lane < left, 1usize, 0usize);
            let words = comptime!(tile.groups() / 2);
            let scales = kept.slice_mut(to, to + 1);
            // SAFETY: a line holds the whole parameters of a token, `groups` halves.
            let mut scales = unsafe { scales.downcast_unchecked::<Vector<u32, P>>() };
            copy_async_checked(&first.slice(from, from + n), &mut scales, words);
            let to = to + comptime!(tile.tokens as usize);
            let zeros = kept.slice_mut(to, to + 1);
            // SAFETY: as above.
            let mut zeros = unsafe { zeros.downcast_unchecked::<Vector<u32, P>>() };
            copy_async_checked(&second.slice(from, from + n), &mut zeros, words);
        }
    }

    fn operands<E: Float>(
        weights: &Array<u32>,
        kept: &SharedMemory<Quad>,
        slot: u32,
        lane: u32,
        operands: &mut Array<u32>,
        scales: &mut Array<u32>,
        zeros: &mut Array<F2>,
        #[comptime] block: usize,
        #[comptime] columns: usize,
        #[comptime] tile: Tile,
    ) {
        let multiply = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
        let octets = comptime!((tile.tokens / 8) as usize);
        let groups = comptime!(tile.groups() as usize);
        let (g, t) = (lane / 4u32, lane % 4u32);
        let shared = comptime!(tile.scaled_weights() && tile.copies == 1);
        // The parameters of 16 tokens, turned: lane (g, t) gets those of group g and tokens 2t and 2t + 1, zero points behind
        // the scales. What a line holds past its groups is not looked at.
        let matrices = comptime!(if shared { 2usize } else { 4 });
        let line = if comptime!(shared) { tile.tokens.runtime() } else { lane / 16u32 * tile.tokens };
        let at = (slot + line + comptime!(block as u32 * 16) + lane % 16u32) as usize;
        let row = kept.slice(at, at + 1);
        // SAFETY: a line holds 16 bytes of elements `E`, whole.
        let row = unsafe { row.downcast_unchecked::<E>() };
        let loaded = multiply.load_matrix::<E, Const<2>>(&row, cmma::MatrixIdent::A, matrices, true);
        #[unroll]
        for o in 0..2usize {
            if comptime!(shared) {
                let token = comptime!((block * 16 + o * 8) as u32) + 2u32 * t;
                let a = kept[(slot + token) as usize];
                let b = kept[(slot + token + 1u32) as usize];
                #[unroll]
                for group in 0..groups {
                    let scale = zip::<E>(a[group / 2], b[group / 2], comptime!(group % 2 == 1));
                    #[unroll]
                    for x in 0..columns {
                        operands[comptime!((x * groups + group) * 2 + o)] =
                            times::<E>(weights[comptime!(x * octets + block * 2 + o)], scale);
                    }
                }
            } else {
                // Eight lanes hold a chunk that spans several groups: each its own channels, which lie in one, and its own
                // column of weights, which belongs to the same one where there are columns for each.
                let lanes = comptime!(8 / tile.spanned());
                let words = u32::reinterpret(loaded[o]);
                #[unroll]
                for chunk in 0..comptime!(tile.chunks() as usize) {
                    let group = g / lanes + comptime!(chunk as u32 * tile.spanned());
                    let scale = plane_shuffle(words, group * 4u32 + t);
                    if comptime!(tile.scaled_weights()) {
                        operands[chunk * 2 + o] = times::<E>(weights[comptime!(block * 2 + o)], scale);
                    } else {
                        scales[chunk * 2 + o] = scale;
                    }
                }
                if comptime!(!tile.scaled_weights()) {
                    #[unroll]
                    for x in 0..columns {
                        operands[comptime!(x * 2 + o)] = weights[comptime!(x * octets + block * 2 + o)];
                    }
                }
            }
        }
        let mut left = Array::<Pair<E>>::new(4usize);
        left[0] = loaded[comptime!(matrices - 2)];
        left[1] = Pair::<E>::new(E::from_int(0));
        left[2] = loaded[comptime!(matrices - 1)];
        left[3] = Pair::<E>::new(E::from_int(0));
        #[unroll]
        for x in 0..columns {
            let at = comptime!(x * octets + block * 2);
            accumulate::<E>(&multiply, &left, weights[at], weights[comptime!(at + 1)], zeros, x);
        }
    }

    fn register<E: Float>(word: u32, scale: u32, eights: u32, #[comptime] i: u32, #[comptime] tile: Tile) -> u32 {
        let code = codes(word, i, comptime!(tile.bits));
        if comptime!(tile.scaled_weights()) {
            code
        } else {
            // one fused multiplication and addition, exact but for its rounding
            let number = Pair::<E>::reinterpret(code | eights);
            let scale = Pair::<E>::reinterpret(scale);
            u32::reinterpret(number * scale + scale * Pair::<E>::new(E::from_int(-8)))
        }
    }
}
