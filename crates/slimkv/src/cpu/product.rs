//! Products of small integer matrices, on the matrix unit or with VNNI. Sums of integers are exact, so both give the same
//! bits.
//!
//! ```text
//! scores[16 tokens][16 columns] = keys[16 tokens][64 channels] * queries[64 channels][16 columns]
//! sums[16 rows][16 channels]    = weights[16 rows][64 tokens]  * codes[64 tokens][16 channels]
//! ```
//!
//! The right operand lies in memory with four steps of the sum together: `[16][16][4]` bytes.

use std::arch::x86_64::*;

use super::Worker;

/// Sixteen rows of 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Codes(pub [[u8; 64]; 16]);

/// Sixteen rows of sixteen sums.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Sums(pub [[i32; 16]; 16]);

impl Codes {
    pub const ZERO: Codes = Codes([[0; 64]; 16]);
}

impl Sums {
    pub const ZERO: Sums = Sums([[0; 16]; 16]);
}

/// The tiles of one operand, one for each step of a long sum.
#[derive(Clone, Copy)]
pub(crate) struct Steps<'a> {
    tiles: &'a [Codes],
    step: usize,
}

impl<'a> Steps<'a> {
    /// `tiles[0]`, `tiles[step]`, `tiles[2 * step]` and so on.
    #[inline(always)]
    pub fn new(tiles: &'a [Codes], step: usize) -> Self {
        Steps { tiles, step }
    }

    #[inline(always)]
    pub(super) fn at(&self, i: usize) -> &'a Codes {
        &self.tiles[i * self.step]
    }
}

/// Four tiles of scores: `scores[i] = sum over j of keys[i][j] * queries[i][j]`; codes are unsigned, queries signed.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) fn scores(worker: &Worker, keys: [Steps; 4], queries: [Steps; 4], steps: usize, scores: &mut [Sums; 4]) {
    match worker.tiles() {
        // SAFETY: a worker stays on the thread that configured its tiles.
        Some(tiles) => unsafe { tiles.unsigned_signed(keys, queries, steps, scores) },
        None => {
            for (i, scores) in scores.iter_mut().enumerate() {
                scores_vnni(keys[i], queries[i], steps, scores);
            }
        }
    }
}

/// Four tiles of sums: `sums[i] = sum over j of weights[i][j] * codes[i][j]`, of which the first `rows` rows count; weights
/// are signed, codes unsigned.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) fn sums(
    worker: &Worker,
    weights: [Steps; 4],
    codes: [Steps; 4],
    rows: usize,
    steps: usize,
    sums: &mut [Sums; 4],
) {
    match worker.tiles() {
        // SAFETY: as above.
        Some(tiles) => unsafe { tiles.signed_unsigned(weights, codes, steps, sums) },
        None => {
            for (i, sums) in sums.chunks_exact_mut(2).enumerate() {
                let (weights, codes) = ([weights[2 * i], weights[2 * i + 1]], [codes[2 * i], codes[2 * i + 1]]);
                match rows {
                    0..=2 => sums_vnni::<2>(weights, codes, steps, sums),
                    3..=4 => sums_vnni::<4>(weights, codes, steps, sums),
                    5..=8 => sums_vnni::<8>(weights, codes, steps, sums),
                    _ => {
                        sums_vnni::<16>([weights[0]; 2], [codes[0]; 2], steps, &mut sums[..1]);
                        sums_vnni::<16>([weights[1]; 2], [codes[1]; 2], steps, &mut sums[1..]);
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn scores_vnni(keys: Steps, queries: Steps, steps: usize, scores: &mut Sums) {
    for t in (0..16).step_by(8) {
        let mut acc = [_mm512_setzero_si512(); 8];
        for j in 0..steps {
            let (key, query) = (keys.at(j), queries.at(j));
            for k in 0..16 {
                // SAFETY: row `k` of the queries has 64 bytes, and byte `4 k` of a row of 64 begins four.
                unsafe {
                    let query = _mm512_load_si512(query.0[k].as_ptr().cast());
                    for (i, acc) in acc.iter_mut().enumerate() {
                        let key = key.0[t + i].as_ptr().add(4 * k).cast::<i32>().read_unaligned();
                        *acc = _mm512_dpbusd_epi32(*acc, _mm512_set1_epi32(key), query);
                    }
                }
            }
        }
        for (row, acc) in scores.0[t..t + 8].iter_mut().zip(acc) {
            // SAFETY: a row is sixteen i32.
            unsafe { _mm512_store_si512(row.as_mut_ptr().cast(), acc) }
        }
    }
}

/// One or two tiles of sums, as `sums` holds.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn sums_vnni<const R: usize>(weights: [Steps; 2], codes: [Steps; 2], steps: usize, sums: &mut [Sums]) {
    let shared = std::ptr::eq(weights[0].tiles, weights[1].tiles);
    match (sums.len(), shared) {
        (2, true) => sums_vnni_of::<R, 2, true>(weights, codes, steps, sums),
        (2, false) => sums_vnni_of::<R, 2, false>(weights, codes, steps, sums),
        _ => sums_vnni_of::<R, 1, true>(weights, codes, steps, sums),
    }
}

/// `N` tiles of sums together, which hides the latency of a product where rows are few; tiles that share weights load
/// them once.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn sums_vnni_of<const R: usize, const N: usize, const SHARED: bool>(
    weights: [Steps; 2],
    codes: [Steps; 2],
    steps: usize,
    sums: &mut [Sums],
) {
    let mut acc = [[_mm512_setzero_si512(); N]; R];
    for j in 0..steps {
        let weights = [weights[0].at(j), weights[1].at(j)];
        let codes = [codes[0].at(j), codes[1].at(j)];
        for k in 0..16 {
            let mut code = [_mm512_setzero_si512(); N];
            for n in 0..N {
                // SAFETY: a row of a tile is an aligned 64 bytes.
                code[n] = unsafe { _mm512_load_si512(codes[n].0[k].as_ptr().cast()) };
            }
            for r in 0..R {
                for n in 0..N {
                    let weights = if SHARED { weights[0] } else { weights[n] };
                    // SAFETY: byte `4 k` of a row of 64 begins four.
                    let weight = unsafe { weights.0[r].as_ptr().add(4 * k).cast::<i32>().read_unaligned() };
                    acc[r][n] = _mm512_dpbusd_epi32(acc[r][n], code[n], _mm512_set1_epi32(weight));
                }
            }
        }
    }
    for r in 0..R {
        for (n, sums) in sums.iter_mut().enumerate().take(N) {
            // SAFETY: a row is sixteen i32.
            unsafe { _mm512_store_si512(sums.0[r].as_mut_ptr().cast(), acc[r][n]) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn both_engines_give_the_plain_products() {
        let tile =
            |seed: usize| Codes(std::array::from_fn(|i| std::array::from_fn(|j| (i * 37 + j * 11 + seed * 71) as u8)));
        let left: [Codes; 8] = std::array::from_fn(tile);
        let right: [Codes; 8] = std::array::from_fn(|i| tile(i + 20));
        // Product i takes tiles i and i + 4 of both sides.
        let lefts: [Steps; 4] = std::array::from_fn(|i| Steps::new(&left[i..], 4));
        let rights: [Steps; 4] = std::array::from_fn(|i| Steps::new(&right[i..], 4));
        let dot = |signed_left: bool, tile: usize, i: usize, j: usize| -> i32 {
            let steps = [tile, tile + 4].into_iter().flat_map(|s| (0..64).map(move |k| (s, k)));
            steps
                .map(|(s, k)| {
                    let (a, b) = (left[s].0[i][k], right[s].0[k / 4][4 * j + k % 4]);
                    if signed_left { i32::from(a as i8) * i32::from(b) } else { i32::from(a) * i32::from(b as i8) }
                })
                .sum()
        };
        for isa in Isa::here().into_iter().filter(|i| matches!(i, Isa::Avx512 | Isa::Amx)) {
            let worker = Worker::new(isa);
            for rows in [1, 2, 3, 8, 16] {
                let (mut s, mut v) = ([Sums::ZERO; 4], [Sums::ZERO; 4]);
                // SAFETY: the machine has the instruction set.
                unsafe {
                    scores(&worker, lefts, rights, 2, &mut s);
                    sums(&worker, lefts, rights, rows, 2, &mut v);
                }
                for (tile, i, j) in (0..1024).map(|n| (n / 256, n / 16 % 16, n % 16)) {
                    assert_eq!(s[tile].0[i][j], dot(false, tile, i, j), "{isa}");
                    if i < rows {
                        assert_eq!(v[tile].0[i][j], dot(true, tile, i, j), "{isa}");
                    }
                }
            }
        }
    }
}
