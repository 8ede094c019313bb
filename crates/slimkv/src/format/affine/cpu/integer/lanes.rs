//! Scores of few query rows, with tokens in the lanes of a register.
//!
//! Packed words of thirty-two rows are transposed in registers as they are, so that a register holds one word of sixteen
//! tokens; its codes are then a shift and a mask away, four of consecutive bytes at a time. Each meets a broadcast dword of a
//! plane of the queries. Up to four query rows this takes fewer instructions than filling tiles for the matrix unit does.

use std::arch::x86_64::*;
use std::ops::Range;

use super::planes::{self, Order};
use super::{KeyPlan, LARGER_MAGNITUDE, LARGEST};
use crate::attend::decode::cpu::{self as skeleton, Block, Keys, Queries};
use crate::cpu::Worker;
use crate::cpu::floats::Floats;
use crate::format::affine::cpu;

/// Query rows at most; fewer are padded with zeros.
pub(super) const ROWS: usize = 4;

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
    /// Queries times the scales of one group of tokens; an array in `fold` would be filled with zeros each time.
    products: Vec<[f32; 16]>,
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
            queries: vec![0.0; ROWS * d],
            products: vec![[0.0; 16]; ROWS * d / 16],
            planes: (0..skeleton::BLOCK.div_ceil(plan.rows.group) + 1).map(|_| Planes::ZERO).collect(),
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
        // All groups before any product, which would wait for the last instructions of a fold.
        for (i, group) in (first..tokens.end.div_ceil(group)).enumerate() {
            self.fold(i, group);
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

    /// Query rows times the parameters of a group of tokens, group `i` of the block.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn fold(&mut self, i: usize, group: usize) {
        let rows = &self.plan.rows;
        // Registers of a row. Their number is no constant on purpose: unrolled, the loops below spill.
        let registers = rows.head_dim / 16;
        let mut params = [rows.scale, rows.zero];
        for params in &mut params {
            let len = rows.head_dim * params.element_size();
            *params = rows.param_row(*params, self.matrix, group);
            cpu::prefetch(params.address(0).wrapping_add(skeleton::BLOCK.div_ceil(rows.group) * len), len);
        }
        let (planes, queries, products) = (&mut self.planes[i], &self.queries, &mut self.products);
        assert!(queries.len() == ROWS * 16 * registers && products.len() == ROWS * registers);
        assert!(16 * registers <= CHANNELS && params.iter().all(|params| params.len() == 16 * registers));
        let zeros = _mm512_setzero_ps();
        let (mut peak, mut offset) = ([zeros; ROWS], [zeros; ROWS]);
        for v in 0..registers {
            // SAFETY: both have as many registers.
            let (scale, zero) = unsafe { (load_params(params[0], 16 * v), load_params(params[1], 16 * v)) };
            for r in 0..ROWS {
                // SAFETY: register `v` of row `r` is inside the queries and the products.
                unsafe {
                    let query = _mm512_loadu_ps(queries.as_ptr().add((r * registers + v) * 16));
                    let product = _mm512_mul_ps(query, scale);
                    _mm512_storeu_ps(products.as_mut_ptr().add(r * registers + v).cast(), product);
                    peak[r] = _mm512_range_ps::<LARGER_MAGNITUDE>(peak[r], product);
                    offset[r] = _mm512_fmadd_ps(query, zero, offset[r]);
                }
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
        let order = self.order.load();
        for r in 0..ROWS {
            let factor = _mm512_set1_ps(factor[r]);
            for c in 0..registers / 4 {
                let mut x = [zeros; 4];
                for (v, x) in x.iter_mut().enumerate() {
                    // SAFETY: register `4 c + v` of row `r` is inside the products.
                    *x = unsafe { _mm512_loadu_ps(products.as_ptr().add(r * registers + 4 * c + v).cast()) };
                }
                for (plane, x) in planes.bytes[r].iter_mut().zip(planes::split(x, factor, order)) {
                    // SAFETY: it has as many bytes as a row has channels.
                    unsafe { _mm512_storeu_si512(plane.as_mut_ptr().add(64 * c).cast(), x) }
                }
            }
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

/// Sixteen parameters from `at` on.
///
/// # Safety
///
/// They are inside of `params`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_params(params: Floats<'_>, at: usize) -> __m512 {
    // SAFETY: the caller vouches for sixteen elements.
    unsafe {
        match params {
            // This form of the instruction can take its operand from memory, which saves a shuffle.
            Floats::F16(x) => {
                _mm512_cvt_roundph_ps::<_MM_FROUND_CUR_DIRECTION>(_mm256_loadu_si256(x.as_ptr().add(at).cast()))
            }
            Floats::BF16(x) => {
                let bits = _mm256_loadu_si256(x.as_ptr().add(at).cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
            }
            Floats::F32(x) => _mm512_loadu_ps(x.as_ptr().add(at)),
        }
    }
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
        let (unit, offset) = (_mm512_set1_ps(planes.unit[r]), _mm512_set1_ps(planes.offset[r]));
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
