//! Scores of few query rows, with tokens in the lanes of a register.
//!
//! Packed words of thirty-two rows are transposed in registers as they are, so that a register holds one word of sixteen
//! tokens; its codes are then a shift and a mask away, four of consecutive bytes at a time. Each meets a broadcast dword of a
//! plane of the queries. Up to four query rows this takes fewer instructions than filling tiles for the matrix unit does.

use std::arch::x86_64::*;
use std::ops::Range;

use half::{bf16, f16};

use super::planes::{self, Order};
use super::{KeyPlan, LARGER_MAGNITUDE, LARGEST};
use crate::attend::decode::cpu::{self as skeleton, Block, Keys, Queries};
use crate::cpu::floats::Floats;
use crate::cpu::{Aligned, Worker};
use crate::format::affine::cpu;

/// Query rows at most; fewer are padded with zeros.
pub(super) const ROWS: usize = 4;

/// Groups of tokens whose units are chosen together.
const FOLDS: usize = 4;

/// Tokens that are scored together: two registers of them, which share the parameters of a group.
pub(super) const TOKENS: usize = 32;

/// Channels at most.
const CHANNELS: usize = 256;

/// Bytes of a row that are transposed at a time: four words.
const PIECE: usize = 16;

/// The planes of the query rows times the scales of one group of tokens.
#[repr(C, align(64))]
struct Planes {
    /// High and low bytes of each row, in the order of the codes in a packed row: of each word the codes that come first in
    /// their bytes, then those that come second, and so on.
    bytes: [[[u8; CHANNELS]; 2]; ROWS],
    /// Query times zero points.
    offset: [f32; ROWS],
    /// What one unit of the planes is worth. Rows share it: what a score may be wrong by does not depend on its row.
    unit: f32,
    /// Its inverse.
    factor: f32,
}

impl Planes {
    const ZERO: Planes = Planes { bytes: [[[0; CHANNELS]; 2]; ROWS], offset: [0.0; ROWS], unit: 0.0, factor: 0.0 };
}

/// The keys of one KV head, for at most [`ROWS`] query rows.
pub(super) struct LaneKeys<'a> {
    plan: &'a KeyPlan<'a>,
    matrix: usize,
    rows: usize,
    /// `[ROWS, head dimension]`.
    queries: Aligned<f32>,
    /// Of each channel the largest magnitude in a query.
    peaks: Aligned<f32>,
    /// Of each group of tokens in a block.
    planes: Vec<Planes>,
    /// Bits of a code and bytes of a row as they are multiplied.
    bits: usize,
    width: usize,
    /// Whether that is as they are packed. Codes that do not fill their bytes, or less than a piece, are spread to bytes.
    packed: bool,
    /// Rows of [`TOKENS`] tokens that cannot be read where they are.
    tile: Vec<u8>,
    order: Order,
}

impl<'a> LaneKeys<'a> {
    /// `None` where rows of this layout take the matrix unit.
    pub fn new(plan: &'a KeyPlan<'a>, rows: usize) -> Option<Self> {
        let d = plan.rows.head_dim;
        let served = rows <= ROWS && matches!(d, 64 | 128 | 256) && plan.rows.group.is_multiple_of(TOKENS);
        let (bits, width, packed) = match plan.rows.row_layout() {
            (bits @ (1 | 2 | 4 | 8), width) if width >= PIECE => (bits as usize, width, true),
            _ => (8, d, false),
        };
        let parts = 8 / bits;
        served.then(|| LaneKeys {
            plan,
            matrix: 0,
            rows,
            queries: Aligned::zeros(ROWS * d),
            peaks: Aligned::zeros(d),
            planes: (0..(skeleton::BLOCK.div_ceil(plan.rows.group) + 1).next_multiple_of(FOLDS))
                .map(|_| Planes::ZERO)
                .collect(),
            bits,
            width,
            packed,
            tile: vec![0; TOKENS * width],
            order: Order::new(|to| {
                let (dword, byte) = (to / 4, to % 4);
                dword / parts * (32 / bits) + byte * parts + dword % parts
            }),
        })
    }
}

impl Keys for LaneKeys<'_> {
    fn prepare(&mut self, matrix: usize, queries: &Queries) {
        self.matrix = matrix;
        self.queries[..queries.data.len()].copy_from_slice(&queries.data);
        self.peaks.fill(0.0);
        let d = self.plan.rows.head_dim;
        for row in self.queries.chunks_exact_mut(d) {
            if row.iter().all(|x| x.is_finite()) {
                self.peaks.iter_mut().zip(row).for_each(|(peak, x)| *peak = peak.max(x.abs()));
            } else {
                // Through its zero points it scores NaN, and no other row is rounded in units of infinity.
                row.fill(f32::NAN);
            }
        }
    }

    fn scores(&mut self, _: &Worker, tokens: Range<usize>, scores: &mut Block) {
        // SAFETY: the plan is made for machines with these instructions only.
        unsafe { self.scores_avx512(tokens, scores) }
    }
}

impl LaneKeys<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn scores_avx512(&mut self, tokens: Range<usize>, scores: &mut Block) {
        let group = self.plan.rows.group;
        let first = tokens.start / group;
        let groups = first..tokens.end.div_ceil(group);
        match (self.plan.rows.scale, self.plan.rows.zero) {
            (Floats::F16(scale), Floats::F16(zero)) => self.fold(groups, scale, zero),
            (Floats::BF16(scale), Floats::BF16(zero)) => self.fold(groups, scale, zero),
            (Floats::F32(scale), Floats::F32(zero)) => self.fold(groups, scale, zero),
            _ => unreachable!("scales and zero points are of one dtype"),
        }
        for start in tokens.clone().step_by(TOKENS) {
            let tile = self.tile(start..(start + TOKENS).min(tokens.end));
            let scores = &mut scores.0;
            let (i, at) = (start / group - first, start - tokens.start);
            // SAFETY: a tile is `TOKENS` rows of `width` bytes.
            unsafe {
                match (self.bits, self.width) {
                    (1, 16) => self.score::<1, 16>(tile, i, scores, at),
                    (1, _) => self.score::<1, 32>(tile, i, scores, at),
                    (2, 16) => self.score::<2, 16>(tile, i, scores, at),
                    (2, 32) => self.score::<2, 32>(tile, i, scores, at),
                    (2, _) => self.score::<2, 64>(tile, i, scores, at),
                    (4, 32) => self.score::<4, 32>(tile, i, scores, at),
                    (4, 64) => self.score::<4, 64>(tile, i, scores, at),
                    (4, _) => self.score::<4, 128>(tile, i, scores, at),
                    (_, 64) => self.score::<8, 64>(tile, i, scores, at),
                    (_, 128) => self.score::<8, 128>(tile, i, scores, at),
                    _ => self.score::<8, 256>(tile, i, scores, at),
                }
            }
        }
    }

    /// Query rows times the parameters of the groups of tokens of a block. All groups come before any product, which would
    /// wait for the last instructions of a fold.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn fold<P: Parameter>(&mut self, groups: Range<usize>, scale: &[P], zero: &[P]) {
        let d = self.plan.rows.head_dim;
        let at = (self.matrix * self.plan.rows.params[0] + groups.start) * d;
        let len = groups.len() * d;
        let (scale, zero) = (&scale[at..at + len], &zero[at..at + len]);
        let ahead = 2 * skeleton::BLOCK.div_ceil(self.plan.rows.group) * d;
        for params in [scale, zero] {
            cpu::prefetch(params.as_ptr().wrapping_add(ahead).cast(), size_of_val(params));
        }
        for (i, planes) in self.planes.chunks_exact_mut(FOLDS).enumerate().take(groups.len().div_ceil(FOLDS)) {
            let params = scale[i * FOLDS * d..].chunks_exact(d).take(FOLDS);
            scale_planes(planes, params, &self.peaks);
        }
        let params = scale.chunks_exact(d).zip(zero.chunks_exact(d));
        for (planes, (scale, zero)) in self.planes.iter_mut().zip(params) {
            fill_planes(planes, scale, zero, &self.queries, self.order.load());
        }
    }

    /// Thirty-two rows from those of `tokens` on, `width` bytes each: where they lie if all are there and fill their bytes,
    /// else a copy. Nobody reads the scores of rows that are missing.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn tile(&mut self, tokens: Range<usize>) -> *const u8 {
        let plan = self.plan;
        let at = (self.matrix * plan.rows.capacity + tokens.start) * plan.row_bytes;
        let rows = &plan.rows.code_bytes()[at..at + tokens.len() * plan.row_bytes];
        if self.packed {
            if tokens.len() == TOKENS {
                return rows.as_ptr();
            }
            self.tile[..rows.len()].copy_from_slice(rows);
            return self.tile.as_ptr();
        }
        cpu::prefetch(rows.as_ptr().wrapping_add(skeleton::BLOCK * plan.row_bytes), rows.len());
        for chunk in 0..plan.spread.chunks() {
            let spreader = plan.spread.chunk(chunk);
            let tile = self.tile.chunks_exact_mut(self.width);
            for (to, row) in tile.zip(rows.chunks_exact(plan.row_bytes)) {
                // SAFETY: the row has the width that the plan's spread was made for; `to` has a byte a channel.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(64 * chunk).cast(), spreader.spread(row.as_ptr())) }
            }
        }
        self.tile.as_ptr()
    }

    /// The scores of the tokens of a tile, whose rows are `WIDTH` bytes. Not inlined: each of its many forms has the registers
    /// for itself.
    ///
    /// # Safety
    ///
    /// `tile` is [`TOKENS`] such rows.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn score<const BITS: usize, const WIDTH: usize>(
        &self,
        tile: *const u8,
        i: usize,
        scores: &mut [[f32; skeleton::BLOCK]],
        at: usize,
    ) {
        // SAFETY: as above.
        unsafe {
            match self.rows {
                1 => multiply::<BITS, WIDTH, 1>(tile, &self.planes[i], &mut scores[..1], at),
                2 => multiply::<BITS, WIDTH, 2>(tile, &self.planes[i], &mut scores[..2], at),
                rows => multiply::<BITS, WIDTH, 4>(tile, &self.planes[i], &mut scores[..rows], at),
            }
        }
    }
}

/// A dtype of parameters.
trait Parameter: Copy {
    /// Sixteen of them.
    ///
    /// # Safety
    ///
    /// They can be read from `from` on, and the machine has AVX-512.
    unsafe fn load(from: *const Self) -> __m512;
}

impl Parameter for f16 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const Self) -> __m512 {
        // This form of the instruction can take its operand from memory, which saves a shuffle.
        // SAFETY: the caller vouches for the elements.
        unsafe { _mm512_cvt_roundph_ps::<_MM_FROUND_CUR_DIRECTION>(_mm256_loadu_si256(from.cast())) }
    }
}

impl Parameter for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const Self) -> __m512 {
        // SAFETY: as above.
        let bits = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }
}

impl Parameter for f32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const Self) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_loadu_ps(from) }
    }
}

/// Chooses the units of the planes of [`FOLDS`] groups with these scales, by the largest product that any channel can have.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scale_planes<'a, P: Parameter + 'a>(planes: &mut [Planes], scales: impl Iterator<Item = &'a [P]>, peaks: &[f32]) {
    let mut peak = [_mm512_setzero_ps(); FOLDS];
    for (peak, scale) in peak.iter_mut().zip(scales) {
        assert_eq!(scale.len(), peaks.len());
        for c in (0..peaks.len()).step_by(16) {
            // SAFETY: the head dimension, the length of both, is a multiple of 16.
            let product =
                unsafe { _mm512_mul_ps(_mm512_loadu_ps(peaks.as_ptr().add(c)), P::load(scale.as_ptr().add(c))) };
            *peak = _mm512_range_ps::<LARGER_MAGNITUDE>(*peak, product);
        }
    }
    let peak = largest(peak);
    let (some, limit) = (_mm_cmp_ps_mask::<_CMP_GT_OQ>(peak, _mm_setzero_ps()), _mm_set1_ps(LARGEST));
    let (mut factor, mut unit) = ([0.0; FOLDS], [0.0; FOLDS]);
    // SAFETY: both hold four elements.
    unsafe {
        _mm_storeu_ps(factor.as_mut_ptr(), _mm_maskz_div_ps(some, limit, peak));
        _mm_storeu_ps(unit.as_mut_ptr(), _mm_maskz_div_ps(some, peak, limit));
    }
    for (planes, (factor, unit)) in planes.iter_mut().zip(factor.into_iter().zip(unit)) {
        (planes.factor, planes.unit) = (factor, unit);
    }
}

/// Query rows times the parameters of a group, in the units chosen before.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn fill_planes<P: Parameter>(planes: &mut Planes, scale: &[P], zero: &[P], queries: &[f32], order: __m512i) {
    let d = scale.len();
    assert!(zero.len() == d && queries.len() == ROWS * d && d.is_multiple_of(64) && d <= CHANNELS);
    let (factor, round) = (_mm512_set1_ps(planes.factor), _mm512_set1_ps(planes::ROUND));
    let mut offset = [_mm512_setzero_ps(); ROWS];
    for c in (0..d).step_by(64) {
        let zeros = [_mm512_setzero_ps(); 4];
        let (mut s, mut z) = (zeros, zeros);
        for i in 0..4 {
            // SAFETY: `c + 64 <= d`, the length of both.
            unsafe {
                s[i] = _mm512_mul_ps(P::load(scale.as_ptr().add(c + 16 * i)), factor);
                z[i] = P::load(zero.as_ptr().add(c + 16 * i));
            }
        }
        for r in 0..ROWS {
            let mut sums = zeros;
            for i in 0..4 {
                // SAFETY: row `r` of the queries has `d` elements.
                let query = unsafe { _mm512_loadu_ps(queries.as_ptr().add(r * d + c + 16 * i)) };
                sums[i] = _mm512_fmadd_ps(query, s[i], round);
                offset[r] = _mm512_fmadd_ps(query, z[i], offset[r]);
            }
            for (plane, x) in planes.bytes[r].iter_mut().zip(planes::split(sums, order)) {
                // SAFETY: `c + 64 <= CHANNELS`.
                unsafe { _mm512_storeu_si512(plane.as_mut_ptr().add(c).cast(), x) }
            }
        }
    }
    // SAFETY: there is an offset for each of four rows.
    unsafe { _mm_storeu_ps(planes.offset.as_mut_ptr(), total(offset)) }
}

/// Of each query row, of each of its planes, the sums of the first sixteen tokens and of the rest.
type Sums<const R: usize> = [[[__m512i; 2]; 2]; R];

/// The scores of up to `R` query rows, as many as `scores` has, and the tokens of a tile.
///
/// # Safety
///
/// `tile` is [`TOKENS`] rows of `WIDTH` bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn multiply<const BITS: usize, const WIDTH: usize, const R: usize>(
    tile: *const u8,
    planes: &Planes,
    scores: &mut [[f32; skeleton::BLOCK]],
    at: usize,
) {
    const { assert!(WIDTH * 8 / BITS <= CHANNELS && WIDTH.is_multiple_of(PIECE) && R <= ROWS) }
    // Codes of a word, and bytes of a plane that meet them.
    let codes = 32 / BITS;
    let mut acc: Sums<R> = [[[_mm512_setzero_si512(); 2]; 2]; R];
    let mut query = planes.bytes.as_ptr().cast::<u8>();
    // As many bytes of the next block as have been read of this one.
    let mut next = tile.wrapping_add(skeleton::BLOCK * WIDTH);
    for piece in (0..WIDTH).step_by(PIECE) {
        let rows = tile.wrapping_add(piece);
        // SAFETY: the piece is inside of sixteen rows from each of the two on; a plane has a byte for each code of a row.
        unsafe {
            let (a, b) = (transpose::<WIDTH>(rows), transpose::<WIDTH>(rows.wrapping_add(16 * WIDTH)));
            cpu::prefetch(next, TOKENS * PIECE / 2);
            add_word::<BITS, R>([a[0], b[0]], query, &mut acc);
            add_word::<BITS, R>([a[1], b[1]], query.wrapping_add(codes), &mut acc);
            cpu::prefetch(next.wrapping_add(TOKENS * PIECE / 2), TOKENS * PIECE / 2);
            add_word::<BITS, R>([a[2], b[2]], query.wrapping_add(2 * codes), &mut acc);
            add_word::<BITS, R>([a[3], b[3]], query.wrapping_add(3 * codes), &mut acc);
        }
        query = query.wrapping_add(4 * codes);
        next = next.wrapping_add(TOKENS * PIECE);
    }
    for (r, scores) in scores.iter_mut().enumerate().take(R) {
        let (unit, offset) = (_mm512_set1_ps(planes.unit), _mm512_set1_ps(planes.offset[r]));
        let to = &mut scores[at..at + TOKENS];
        for half in 0..2 {
            let (high, low) = (_mm512_cvtepi32_ps(acc[r][0][half]), _mm512_cvtepi32_ps(acc[r][1][half]));
            let sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0), low);
            // SAFETY: there is room for two registers.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr().add(16 * half), _mm512_fmadd_ps(sum, unit, offset)) }
        }
    }
}

/// Adds the products of the codes of a word, of sixteen tokens and of sixteen more, with the planes of `R` query rows.
///
/// # Safety
///
/// `query` is the first of the bytes of the first plane that these codes meet.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_word<const BITS: usize, const R: usize>(words: [__m512i; 2], query: *const u8, acc: &mut Sums<R>) {
    let mask = _mm512_set1_epi8(((1u32 << BITS) - 1) as i8);
    for part in 0..8 / BITS {
        let shift = _mm512_set1_epi32((part * BITS) as i32);
        let mut codes = words;
        if BITS < 8 {
            for codes in &mut codes {
                *codes = _mm512_and_si512(_mm512_srlv_epi32(*codes, shift), mask);
            }
        }
        for r in 0..R {
            for plane in 0..2 {
                // SAFETY: planes of [`CHANNELS`] bytes follow one another; a word has a dword of each for every part.
                let query = unsafe {
                    let query = query.wrapping_add((2 * r + plane) * CHANNELS + 4 * part);
                    _mm512_set1_epi32(query.cast::<i32>().read_unaligned())
                };
                for half in 0..2 {
                    acc[r][plane][half] = _mm512_dpbusd_epi32(acc[r][plane][half], codes[half], query);
                }
            }
        }
    }
}

/// Four words of sixteen rows: each register is a word of every row.
///
/// # Safety
///
/// [`PIECE`] bytes can be read from `rows` on, and from every `WIDTH` bytes after it for sixteen rows.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose<const WIDTH: usize>(rows: *const u8) -> [__m512i; 4] {
    let mut x = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        // Row `4 l + i` to lane `l`. Inserting from memory leaves port 5 to the instructions below.
        // SAFETY: the caller vouches for all rows.
        x[i] = unsafe {
            let mut lanes = [_mm_setzero_si128(); 4];
            for (l, lane) in lanes.iter_mut().enumerate() {
                *lane = _mm_loadu_si128(rows.wrapping_add((4 * l + i) * WIDTH).cast());
            }
            let x = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(lanes[0]), lanes[1]);
            _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(x, lanes[2]), lanes[3])
        };
    }
    let (a, b) = (_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    let (c, d) = (_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    [_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)]
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
