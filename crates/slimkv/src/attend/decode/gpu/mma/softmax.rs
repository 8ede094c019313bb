//! The online softmax of a warp, and the turn of its weights from a result into an operand.

use cubecl::prelude::*;

use crate::format::fragments::{F2, Pair};
use crate::gpu::float::LOWEST;

/// Below [`LOWEST`], so that its weight is 0 also where nothing has been seen.
const HIDDEN: f32 = -3.3e38;

/// How far above the highest score weights are relative to when it grows: the next ones seldom exceed that, so what was
/// accumulated is seldom rescaled. A power of two, so that the weight of a lone token stays exact.
const HEADROOM: f32 = 2.0;

/// Which tokens the query rows 2t and 2t + 1 of each column see.
#[derive(CubeType)]
pub(crate) struct Seen {
    from: Array<i32>,
    to: Array<i32>,
}

#[cube]
impl Seen {
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        low: u32,
        high: u32,
        q_offset: i32,
        s_q: u32,
        t: u32,
        causal: u32,
        window: i32,
        #[comptime] columns: usize,
        #[comptime] distinct_rows: u32,
    ) -> Seen {
        let mut from = Array::<i32>::new(comptime!(2 * columns));
        let mut to = Array::<i32>::new(comptime!(2 * columns));
        #[unroll]
        for i in 0..comptime!(2 * columns) {
            let row = comptime!((i / 2 * 8 + i % 2) as u32) + (2u32 * t) % distinct_rows;
            let next = q_offset + (row % s_q) as i32 + 1i32;
            to[i] = select(causal != 0u32, min(next, high as i32), high as i32);
            from[i] = select(window > 0i32, max(next - window, low as i32), low as i32);
        }
        Seen { from, to }
    }
}

/// Of the query rows 2t and 2t + 1 of each column: the score, in powers of two, that weights are relative to, which none
/// exceeds, and the sum of the weights that a lane made.
#[derive(CubeType)]
pub(crate) struct Softmax {
    pub most: Array<F2>,
    pub sum: Array<F2>,
}

#[cube]
impl Softmax {
    pub(crate) fn new(#[comptime] columns: usize) -> Softmax {
        let mut most = Array::<F2>::new(columns);
        let mut sum = Array::<F2>::new(columns);
        #[unroll]
        for x in 0..columns {
            most[x] = F2::new(f32::new(LOWEST));
            sum[x] = F2::new(0.0f32);
        }
        Softmax { most, sum }
    }
}

/// The larger over the eight lanes that hold the same query rows.
#[cube]
pub(crate) fn most_of_column(x: F2) -> F2 {
    let mut most = x;
    #[unroll]
    for i in 2..5u32 {
        most[0] = max(most[0], plane_shuffle_xor(most[0], comptime!(1u32 << i)));
        most[1] = max(most[1], plane_shuffle_xor(most[1], comptime!(1u32 << i)));
    }
    most
}

/// The sum over the lanes that share the tokens of the same query rows: eight for each of `share` copies.
#[cube]
pub(crate) fn sum_of_column(x: F2, #[comptime] share: u32) -> F2 {
    let mut sum = x;
    #[unroll]
    for i in comptime!(2 - share.ilog2())..5u32 {
        sum[0] += plane_shuffle_xor(sum[0], comptime!(1u32 << i));
        sum[1] += plane_shuffle_xor(sum[1], comptime!(1u32 << i));
    }
    sum
}

/// Two to the power of `x`.
#[cube]
pub(crate) fn exp2v(x: F2) -> F2 {
    let mut e = F2::empty();
    e[0] = f32::powf(2.0f32, x[0]);
    e[1] = f32::powf(2.0f32, x[1]);
    e
}

/// Turns scores, in powers of two, into weights. Where `share` columns hold copies of the query rows, so that their lanes have
/// the same scores, each makes the weights of as large a part of the tokens and writes them for all.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn softmax<E: Float>(
    scores: &mut Array<F2>,
    token: i32,
    g: u32,
    lane: u32,
    warp: u32,
    seen: &Seen,
    state: &mut Softmax,
    acc: &mut Array<F2>,
    zeros: &mut Array<F2>,
    turn: &mut SharedMemory<u32>,
    weights: &mut Array<u32>,
    #[comptime] tokens: u32,
    #[comptime] accs: usize,
    #[comptime] columns: usize,
    #[comptime] share: u32,
) {
    let octets = comptime!((tokens / 8) as usize);
    let base = warp * comptime!(tokens * 4 * columns as u32);
    #[unroll]
    for x in 0..columns {
        let (low, high) = comptime!((2 * x, 2 * x + 1));
        let last = token + comptime!(tokens as i32);
        if plane_any(token < max(seen.from[low], seen.from[high]) || last > min(seen.to[low], seen.to[high])) {
            #[unroll]
            for o in 0..octets {
                let at = token + (comptime!(o as u32 * 8) + g) as i32;
                let mut s = scores[comptime!(x * octets + o)];
                s[0] = select(at >= seen.from[low] && at < seen.to[low], s[0], f32::new(HIDDEN));
                s[1] = select(at >= seen.from[high] && at < seen.to[high], s[1], f32::new(HIDDEN));
                scores[comptime!(x * octets + o)] = s;
            }
        }
        let mut most = scores[comptime!(x * octets)];
        #[unroll]
        for o in 1..octets {
            most = max(most, scores[comptime!(x * octets + o)]);
        }
        let before = state.most[x];
        if plane_any(most[0] > before[0] || most[1] > before[1]) {
            let most = most_of_column(most);
            let mut next = F2::empty();
            next[0] = select(most[0] > before[0], most[0] + HEADROOM, before[0]);
            next[1] = select(most[1] > before[1], most[1] + HEADROOM, before[1]);
            let fade = exp2v(before - next);
            state.most[x] = next;
            state.sum[x] = state.sum[x] * fade;
            #[unroll]
            for j in 0..accs {
                acc[comptime!(x * accs + j)] = acc[comptime!(x * accs + j)] * fade;
            }
            zeros[comptime!(2 * x)] = zeros[comptime!(2 * x)] * fade;
        }
        let own = comptime!(octets / share as usize);
        let copy = lane % 4u32 / comptime!(4 / share);
        let at = base + copy * comptime!(own as u32 * 32 - 4 / share) + lane;
        #[unroll]
        for o in 0..own {
            let mut s = scores[comptime!(x * octets + o)];
            #[unroll]
            for c in 1..share {
                let other = scores[comptime!(x * octets + c as usize * own + o)];
                s[0] = select(copy == c, other[0], s[0]);
                s[1] = select(copy == c, other[1], s[1]);
            }
            let p = exp2v(s - state.most[x]);
            state.sum[x] = state.sum[x] + p;
            let word = u32::reinterpret(Pair::<E>::cast_from(p));
            #[unroll]
            for c in 0..share {
                turn[(at + comptime!(((x * octets + o) * 32) as u32 + c * (4 / share))) as usize] = word;
            }
        }
    }
    // A result has tokens down and query rows across, the operand wants the tokens of a row side by side: eight rows of
    // 16 bytes written as they lie, read back transposed.
    sync_plane();
    let multiply = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let matrices = comptime!(octets.min(4));
    #[unroll]
    for part in 0..comptime!(columns * octets / matrices) {
        let at =
            (base + comptime!((part * matrices * 32) as u32) + (lane % comptime!(8 * matrices as u32)) * 4u32) as usize;
        let row = turn.slice(at, at + 4);
        // SAFETY: four words hold eight elements `E`, whole.
        let row = unsafe { row.downcast_unchecked::<E>() };
        let turned = multiply.load_matrix::<E, Const<2>>(&row, cmma::MatrixIdent::B, matrices, true);
        #[unroll]
        for i in 0..matrices {
            weights[comptime!(part * matrices + i)] = u32::reinterpret(turned[i]);
        }
    }
}
