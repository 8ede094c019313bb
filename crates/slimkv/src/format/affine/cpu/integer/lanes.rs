//! Scores of few query rows, with tokens in the lanes of a register.
//!
//! The packed words of sixteen rows are transposed as they are, so that a register holds one word of sixteen tokens; its
//! codes are then a shift and a mask away, four of consecutive bytes at a time. Each meets a broadcast dword of a plane of
//! the queries. Up to four query rows this takes fewer instructions than filling tiles for the matrix unit does.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{KeyPlan, LARGEST};
use crate::attend::decode::cpu::{self as skeleton, Block, Keys, Queries};
use crate::cpu::Worker;
use crate::format::affine::cpu;

/// Query rows at most; fewer are padded with zeros.
pub(super) const ROWS: usize = 4;

/// Tokens that are scored together: two registers of them, which share the parameters of a group.
pub(super) const TOKENS: usize = 32;

/// Channels at most.
const CHANNELS: usize = 256;

/// Packed words of a row at most.
const WORDS: usize = CHANNELS / 4;

/// The planes of the query rows times the scales of one group of tokens.
#[repr(C, align(64))]
struct Planes {
    /// High and low bytes of each row, in the order of the codes in a packed row: of each word the codes that come first in
    /// their bytes, then those that come second, and so on.
    bytes: [[[u8; CHANNELS]; 2]; ROWS],
    /// What one unit of a row's planes is worth.
    unit: [f32; ROWS],
    /// Query times zero points.
    offset: [f32; ROWS],
}

impl Planes {
    const ZERO: Planes = Planes { bytes: [[[0; CHANNELS]; 2]; ROWS], unit: [0.0; ROWS], offset: [0.0; ROWS] };
}

/// The keys of one KV head, for at most [`ROWS`] query rows.
pub(super) struct LaneKeys<'a> {
    plan: &'a KeyPlan<'a>,
    matrix: usize,
    rows: usize,
    /// `[ROWS, head dimension]`.
    queries: Vec<f32>,
    /// Of each group of tokens in a block.
    planes: Vec<Planes>,
    /// A word of thirty-two tokens each.
    words: Box<[[[u32; 16]; 2]; WORDS]>,
    /// Bits of a code in the words: of the packed codes, or eight where these do not fill their bytes and are spread first.
    bits: usize,
    /// Where the planes' bytes come from in a register of packed products.
    order: [u8; 64],
}

impl<'a> LaneKeys<'a> {
    /// `None` where rows of this layout take the matrix unit.
    pub fn new(plan: &'a KeyPlan<'a>, rows: usize) -> Option<Self> {
        let (bits, _) = plan.rows.row_layout();
        let d = plan.rows.head_dim;
        let served = rows <= ROWS && matches!(d, 64 | 128 | 256) && plan.rows.group.is_multiple_of(TOKENS);
        let bits = if matches!(bits, 1 | 2 | 4) { bits as usize } else { 8 };
        served.then(|| LaneKeys {
            plan,
            matrix: 0,
            rows,
            queries: vec![0.0; ROWS * d],
            planes: (0..skeleton::BLOCK.div_ceil(plan.rows.group) + 1).map(|_| Planes::ZERO).collect(),
            words: Box::new([[[0; 16]; 2]; WORDS]),
            bits,
            order: order(bits),
        })
    }
}

/// The byte of a register of packed products that each byte of a plane is.
fn order(bits: usize) -> [u8; 64] {
    let parts = 8 / bits;
    std::array::from_fn(|to| {
        let (dword, byte) = (to / 4, to % 4);
        let channel = dword / parts * (32 / bits) + byte * parts + dword % parts;
        // Two packing instructions leave four consecutive channels of each of four registers in a 128-bit lane.
        (channel % 16 / 4 * 16 + channel / 16 * 4 + channel % 4) as u8
    })
}

impl Keys for LaneKeys<'_> {
    fn prepare(&mut self, matrix: usize, queries: &Queries) {
        self.matrix = matrix;
        self.queries[..queries.data.len()].copy_from_slice(&queries.data);
    }

    fn scores(&mut self, _: &Worker, tokens: Range<usize>, scores: &mut Block) {
        // SAFETY: the plan is made for machines with these instructions only.
        unsafe { self.scores_avx512(tokens, scores) }
    }
}

impl LaneKeys<'_> {
    /// Words of a token.
    #[inline(always)]
    fn words(&self) -> usize {
        self.plan.rows.head_dim * self.bits / 32
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn scores_avx512(&mut self, tokens: Range<usize>, scores: &mut Block) {
        let group = self.plan.rows.group;
        let first = tokens.start / group;
        // All groups before any product, which would wait for the last instructions of a fold.
        for (i, group) in (first..tokens.end.div_ceil(group)).enumerate() {
            match self.plan.rows.head_dim / 64 {
                1 => self.fold::<4>(i, group),
                2 => self.fold::<8>(i, group),
                _ => self.fold::<16>(i, group),
            }
        }
        for start in tokens.clone().step_by(TOKENS) {
            self.transpose(start..(start + TOKENS).min(tokens.end));
            let scores = &mut scores.0;
            let (i, at) = (start / group - first, start - tokens.start);
            match (self.bits, self.rows) {
                (1, 1) => self.multiply::<1, 1>(i, scores, at),
                (1, 2) => self.multiply::<1, 2>(i, scores, at),
                (1, _) => self.multiply::<1, 4>(i, scores, at),
                (2, 1) => self.multiply::<2, 1>(i, scores, at),
                (2, 2) => self.multiply::<2, 2>(i, scores, at),
                (2, _) => self.multiply::<2, 4>(i, scores, at),
                (4, 1) => self.multiply::<4, 1>(i, scores, at),
                (4, 2) => self.multiply::<4, 2>(i, scores, at),
                (4, _) => self.multiply::<4, 4>(i, scores, at),
                (_, 1) => self.multiply::<8, 1>(i, scores, at),
                (_, 2) => self.multiply::<8, 2>(i, scores, at),
                _ => self.multiply::<8, 4>(i, scores, at),
            }
        }
    }

    /// Query rows times the parameters of a group of tokens, group `i` of the block, in `V` registers a row.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn fold<const V: usize>(&mut self, i: usize, group: usize) {
        let rows = &self.plan.rows;
        let mut params = [rows.scale, rows.zero];
        for params in &mut params {
            let len = rows.head_dim * params.element_size();
            *params = rows.param_row(*params, self.matrix, group);
            cpu::prefetch(params.address(0).wrapping_add(skeleton::BLOCK.div_ceil(rows.group) * len), len);
        }
        let planes = &mut self.planes[i];
        assert!(self.queries.len() == ROWS * 16 * V && 16 * V <= CHANNELS);
        let zeros = _mm512_setzero_ps();
        let (mut peak, mut offset) = ([zeros; ROWS], [zeros; ROWS]);
        let mut products = [[zeros; V]; ROWS];
        for v in 0..V {
            let (scale, zero) = (cpu::load_params(params[0], 16 * v), cpu::load_params(params[1], 16 * v));
            for r in 0..ROWS {
                // SAFETY: register `v` of row `r` is inside the queries.
                let query = unsafe { _mm512_loadu_ps(self.queries.as_ptr().add((r * V + v) * 16)) };
                products[r][v] = _mm512_mul_ps(query, scale);
                peak[r] = _mm512_max_ps(peak[r], _mm512_abs_ps(products[r][v]));
                offset[r] = _mm512_fmadd_ps(query, zero, offset[r]);
            }
        }
        let peak = largest(peak);
        let some = _mm_cmp_ps_mask::<_CMP_GT_OQ>(peak, _mm_setzero_ps());
        let mut factor = [0.0; ROWS];
        // SAFETY: all three hold four elements.
        unsafe {
            _mm_storeu_ps(factor.as_mut_ptr(), _mm_maskz_div_ps(some, _mm_set1_ps(LARGEST), peak));
            _mm_storeu_ps(planes.unit.as_mut_ptr(), _mm_maskz_div_ps(some, peak, _mm_set1_ps(LARGEST)));
            _mm_storeu_ps(planes.offset.as_mut_ptr(), total(offset));
        }
        // SAFETY: the table is 64 bytes.
        let order = unsafe { _mm512_loadu_si512(self.order.as_ptr().cast()) };
        for r in 0..ROWS {
            let factor = _mm512_set1_ps(factor[r]);
            for c in 0..V / 4 {
                let mut x = [_mm512_setzero_si512(); 4];
                for (i, x) in x.iter_mut().enumerate() {
                    *x = _mm512_cvtps_epi32(_mm512_mul_ps(products[r][4 * c + i], factor));
                }
                let (high, low) = cpu::planes([_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3])]);
                for (plane, x) in planes.bytes[r].iter_mut().zip([high, low]) {
                    // SAFETY: `64 c + 64 <= 16 V`, which the plane holds.
                    unsafe {
                        _mm512_storeu_si512(plane.as_mut_ptr().add(64 * c).cast(), _mm512_permutexvar_epi8(order, x));
                    }
                }
            }
        }
    }

    /// Brings each packed word of up to thirty-two tokens together; the last token stands in for those that are missing.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn transpose(&mut self, tokens: Range<usize>) {
        let plan = self.plan;
        let width = plan.row_bytes;
        let at = (self.matrix * plan.rows.capacity + tokens.start) * width;
        let rows = &plan.rows.code_bytes()[at..at + tokens.len() * width];
        let last = tokens.len() - 1;
        let words = self.words();
        let packed = 4 * words == width;
        for first in (0..words).step_by(16) {
            let count = (words - first).min(16);
            let mask = ((1u32 << count) - 1) as u16;
            let spreader = plan.spread.chunk(first * 4 * 8 / self.bits / 64);
            for half in 0..2 {
                let mut x = [_mm512_setzero_si512(); 16];
                for (t, x) in x.iter_mut().enumerate() {
                    // SAFETY: only words of a row are read, and it is a row of the slice; a prefetch never faults.
                    unsafe {
                        let row = rows.as_ptr().add((16 * half + t).min(last) * width);
                        _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(skeleton::BLOCK * width + 4 * first).cast());
                        *x = if packed {
                            _mm512_maskz_loadu_epi32(mask, row.add(4 * first).cast())
                        } else {
                            spreader.spread(row)
                        };
                    }
                }
                let x = transpose(x);
                for (to, x) in self.words[first..first + count].iter_mut().zip(x) {
                    // SAFETY: it has sixteen words.
                    unsafe { _mm512_storeu_si512(to[half].as_mut_ptr().cast(), x) }
                }
            }
        }
    }

    /// The scores of `R` query rows and the tokens whose words were brought together.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn multiply<const BITS: usize, const R: usize>(&self, i: usize, scores: &mut [[f32; skeleton::BLOCK]], at: usize) {
        let parts = 8 / BITS;
        let mask = _mm512_set1_epi8(((1u32 << BITS) - 1) as i8);
        let mut acc = [[[_mm512_setzero_si512(); 2]; 2]; R];
        let (words, planes) = (self.words(), &self.planes[i]);
        assert!(words * parts * 4 <= CHANNELS);
        for (w, word) in self.words[..words].iter().enumerate() {
            let mut x = [_mm512_setzero_si512(); 2];
            for (x, word) in x.iter_mut().zip(word) {
                // SAFETY: it has sixteen words.
                *x = unsafe { _mm512_loadu_si512(word.as_ptr().cast()) };
            }
            for part in 0..parts {
                let shift = _mm512_set1_epi32((part * BITS) as i32);
                let codes = if BITS == 8 {
                    x
                } else {
                    [
                        _mm512_and_si512(_mm512_srlv_epi32(x[0], shift), mask),
                        _mm512_and_si512(_mm512_srlv_epi32(x[1], shift), mask),
                    ]
                };
                for r in 0..R {
                    for plane in 0..2 {
                        // SAFETY: the dword is inside the plane.
                        let query = unsafe {
                            let plane = planes.bytes[r][plane].as_ptr();
                            _mm512_set1_epi32(plane.add(4 * (w * parts + part)).cast::<i32>().read_unaligned())
                        };
                        acc[r][plane][0] = _mm512_dpbusd_epi32(acc[r][plane][0], codes[0], query);
                        acc[r][plane][1] = _mm512_dpbusd_epi32(acc[r][plane][1], codes[1], query);
                    }
                }
            }
        }
        for r in 0..R.min(self.rows) {
            let (unit, offset) = (_mm512_set1_ps(planes.unit[r]), _mm512_set1_ps(planes.offset[r]));
            let to = &mut scores[r][at..at + TOKENS];
            for half in 0..2 {
                let (high, low) = (_mm512_cvtepi32_ps(acc[r][0][half]), _mm512_cvtepi32_ps(acc[r][1][half]));
                let sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0), low);
                // SAFETY: there is room for two registers.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr().add(16 * half), _mm512_fmadd_ps(sum, unit, offset)) }
            }
        }
    }
}

/// Transposes sixteen rows of sixteen dwords.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(x: [__m512i; 16]) -> [__m512i; 16] {
    let zero = _mm512_setzero_si512();
    let (mut a, mut b) = ([zero; 16], [zero; 16]);
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    // Lane `l` of `b[4 i + c]`: column `4 l + c` of rows `4 i` to `4 i + 3`.
    for i in 0..4 {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    for c in 0..4 {
        let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(b[c], b[4 + c]);
        let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(b[c], b[4 + c]);
        let even_up = _mm512_shuffle_i32x4::<0b10_00_10_00>(b[8 + c], b[12 + c]);
        let odd_up = _mm512_shuffle_i32x4::<0b11_01_11_01>(b[8 + c], b[12 + c]);
        // Lanes of `even`: columns c and c + 8 of the first four rows, then of the next four.
        a[c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even, even_up);
        a[8 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even, even_up);
        a[4 + c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd, odd_up);
        a[12 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd, odd_up);
    }
    a
}

/// Defines a function that reduces each of four registers to a lane of the result.
macro_rules! reduction {
    ($(#[$doc:meta])* $name:ident, $wide:ident, $half:ident, $quarter:ident) => {
        $(#[$doc])*
        #[inline]
        #[target_feature(enable = "avx512f,avx512dq,avx512vl")]
        fn $name([a, b, c, d]: [__m512; 4]) -> __m128 {
            let ab = _mm512_castps_pd($wide(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
            let cd = _mm512_castps_pd($wide(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
            let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
            let lanes = $wide(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            let half = $half(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
            $quarter(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half))
        }
    };
}

reduction!(
    /// The sum of each register.
    total, _mm512_add_ps, _mm256_add_ps, _mm_add_ps
);
reduction!(
    /// The largest element of each register.
    largest, _mm512_max_ps, _mm256_max_ps, _mm_max_ps
);
