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

use super::{Isa, amx};

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

/// What multiplies.
pub(crate) enum Engine {
    Vnni,
    Amx(#[allow(dead_code)] amx::Session),
}

impl Engine {
    /// Gets ready to sum over values for `rows` rows of weights.
    pub fn new(isa: Isa, rows: usize) -> Self {
        match isa {
            // SAFETY: `cpu::isa` and `cpu::with_isa` checked that the matrix unit is there.
            Isa::Amx => Engine::Amx(unsafe { amx::Session::new(rows) }),
            _ => Engine::Vnni,
        }
    }

    /// `scores = sum over i of keys[i] * queries[i]`; codes are unsigned, queries signed.
    ///
    /// # Safety
    ///
    /// The machine has AVX-512 with VNNI.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub unsafe fn scores(&self, keys: &[Codes], queries: &[Codes], scores: &mut Sums) {
        assert_eq!(keys.len(), queries.len());
        match self {
            // SAFETY: the session is alive, and there are as many queries as keys.
            Engine::Amx(_) => unsafe { amx::scores(keys, queries, scores) },
            Engine::Vnni => scores_vnni(keys, queries, scores),
        }
    }

    /// Two tiles of sums over all `weights`, of which the first `rows` rows count; step `i` of the codes of tile `j` is
    /// `codes[i * step + j]`. Weights are signed, codes unsigned.
    ///
    /// # Safety
    ///
    /// As for [`scores`](Self::scores); `rows` is what the engine was made for.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub unsafe fn sums(&self, weights: &[Codes], rows: usize, codes: &[Codes], step: usize, sums: &mut [Sums; 2]) {
        assert!(weights.is_empty() || codes.len() >= (weights.len() - 1) * step + 2);
        match self {
            // SAFETY: the session is alive, and the indices were checked.
            Engine::Amx(_) => unsafe { amx::sums(weights, codes.as_ptr(), step, sums) },
            Engine::Vnni => {
                for (j, sums) in sums.iter_mut().enumerate() {
                    let codes = &codes[j..];
                    match rows {
                        0..=2 => sums_vnni::<2>(weights, codes, step, sums),
                        3..=4 => sums_vnni::<4>(weights, codes, step, sums),
                        5..=8 => sums_vnni::<8>(weights, codes, step, sums),
                        _ => sums_vnni::<16>(weights, codes, step, sums),
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn scores_vnni(keys: &[Codes], queries: &[Codes], scores: &mut Sums) {
    for t in (0..16).step_by(8) {
        let mut acc = [_mm512_setzero_si512(); 8];
        for (key, query) in keys.iter().zip(queries) {
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

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn sums_vnni<const R: usize>(weights: &[Codes], codes: &[Codes], step: usize, sums: &mut Sums) {
    let mut acc = [_mm512_setzero_si512(); R];
    for (weights, codes) in weights.iter().zip(codes.iter().step_by(step)) {
        for k in 0..16 {
            // SAFETY: as in `scores_vnni`.
            unsafe {
                let code = _mm512_load_si512(codes.0[k].as_ptr().cast());
                for (r, acc) in acc.iter_mut().enumerate() {
                    let weight = weights.0[r].as_ptr().add(4 * k).cast::<i32>().read_unaligned();
                    *acc = _mm512_dpbusd_epi32(*acc, code, _mm512_set1_epi32(weight));
                }
            }
        }
    }
    for (row, acc) in sums.0.iter_mut().zip(acc) {
        // SAFETY: a row is sixteen i32.
        unsafe { _mm512_store_si512(row.as_mut_ptr().cast(), acc) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_engines_give_the_plain_products() {
        let tile =
            |seed: usize| Codes(std::array::from_fn(|i| std::array::from_fn(|j| (i * 37 + j * 11 + seed * 71) as u8)));
        let (left, right) = ([tile(1), tile(2)], [tile(3), tile(4), tile(5), tile(6)]);
        for isa in Isa::here().into_iter().filter(|i| matches!(i, Isa::Avx512 | Isa::Amx)) {
            for rows in [1, 2, 3, 8, 16] {
                let engine = Engine::new(isa, rows);
                let (mut scores, mut sums) = (Sums::ZERO, [Sums::ZERO; 2]);
                // SAFETY: the machine has the instruction set.
                unsafe {
                    engine.scores(&left, &right[..2], &mut scores);
                    engine.sums(&left, rows, &right, 2, &mut sums);
                }
                for (i, j) in (0..16).flat_map(|i| (0..16).map(move |j| (i, j))) {
                    let dot = |signed_left: bool, tiles: [usize; 2]| -> i32 {
                        let steps = (0..2).flat_map(|s| (0..64).map(move |k| (s, k)));
                        steps
                            .map(|(s, k)| {
                                let (a, b) = (left[s].0[i][k], right[tiles[s]].0[k / 4][4 * j + k % 4]);
                                if signed_left {
                                    i32::from(a as i8) * i32::from(b)
                                } else {
                                    i32::from(a) * i32::from(b as i8)
                                }
                            })
                            .sum()
                    };
                    assert_eq!(scores.0[i][j], dot(false, [0, 1]), "{isa}");
                    if i < rows {
                        assert_eq!(sums[0].0[i][j], dot(true, [0, 2]), "{isa}");
                        assert_eq!(sums[1].0[i][j], dot(true, [1, 3]), "{isa}");
                    }
                }
            }
        }
    }
}
