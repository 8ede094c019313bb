//! Weighted sums for few query rows, a stripe of thirty-two channels at a time.
//!
//! The sums of a stripe fit into registers, so the codes of four tokens go from memory to the products without being stored:
//! their bytes are interleaved, and four of one channel meet a broadcast dword of a plane of the weights.

use std::arch::x86_64::*;
use std::ops::Range;

use super::params::Params;
use super::planes::{self, Order};
use super::{LARGER_MAGNITUDE, ValuePlan, quantizer};
use crate::attend::decode::MAX_ROWS;
use crate::attend::decode::cpu::{BLOCK, Block, Values};
use crate::cpu::Worker;
use crate::format::affine::cpu;

/// Query rows at most.
const ROWS: usize = 4;

/// Channels of a stripe; a group is a whole number of stripes.
const CHANNELS: usize = 32;

/// Tokens of a product.
const QUAD: usize = 4;

/// High and low planes of the weights of each row, times the scales of one group of channels.
#[derive(Clone)]
#[repr(C, align(64))]
struct Planes([[[u8; BLOCK]; 2]; ROWS]);

/// The values of one KV head, for at most [`ROWS`] query rows, and their sums.
pub(super) struct StripeValues<'a> {
    plan: &'a ValuePlan<'a>,
    matrix: usize,
    rows: usize,
    groups: usize,
    bits: usize,
    /// Stripes of a group.
    stripes: usize,
    /// `[rows, head dimension]`: the sums without zero points; of each stripe the channels of one register, then of the other.
    sums: Vec<f32>,
    /// `[rows, groups]`: the weighted zero points, in sixteen parts.
    offsets: Vec<[f32; 16]>,
    params: Params,
    /// `[groups]`.
    planes: Vec<Planes>,
    /// `[groups]`: what one unit of the planes is worth.
    units: Vec<f32>,
    /// Rows of the last tokens where these are no whole quad.
    rest: Vec<u8>,
    order: Order,
    interleave: Interleave,
}

/// A stripe of the codes of a block.
struct Stripe<'a> {
    group: usize,
    stripe: usize,
    codes: &'a [u8],
    tokens: usize,
}

/// Where bytes go so that those of a channel come together.
#[repr(C, align(64))]
struct Interleave([u8; 64]);

impl Interleave {
    fn new(bits: usize) -> Self {
        Interleave(std::array::from_fn(|to| {
            let (channel, token) = (to / 4, to % 4);
            // Four-bit codes come as a lane a token, eight-bit ones with tokens 0 and 2 alternating, then tokens 1 and 3.
            (if bits == 4 { 16 * token + channel } else { 2 * channel + token / 2 + 32 * (token % 2) }) as u8
        }))
    }
}

impl<'a> StripeValues<'a> {
    /// `None` where codes of this layout are stored as tiles first.
    pub fn new(plan: &'a ValuePlan<'a>, rows: usize) -> Option<Self> {
        let (d, group, groups) = (plan.rows.head_dim, plan.rows.group, plan.rows.params[1]);
        let (bits, _) = plan.rows.row_layout();
        let whole = d.is_multiple_of(CHANNELS) && (group.is_multiple_of(CHANNELS) || group >= d);
        (whole && rows <= ROWS && matches!(bits, 4 | 8)).then(|| StripeValues {
            plan,
            matrix: 0,
            rows,
            groups,
            bits: bits as usize,
            stripes: group.min(d) / CHANNELS,
            sums: vec![0.0; rows * d],
            offsets: vec![[0.0; 16]; rows * groups],
            params: Params::new(plan.isa, groups),
            planes: vec![Planes([[[0; BLOCK]; 2]; ROWS]); groups],
            units: vec![0.0; groups],
            rest: vec![0; QUAD * plan.row_bytes],
            order: Order::new(|i| i),
            interleave: Interleave::new(bits as usize),
        })
    }
}

impl Values for StripeValues<'_> {
    fn prepare(&mut self, matrix: usize) {
        self.matrix = matrix;
        self.sums.fill(0.0);
        self.offsets.fill([0.0; 16]);
    }

    fn accumulate(
        &mut self,
        _: &Worker,
        tokens: Range<usize>,
        weights: &Block,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        // SAFETY: the plan is made for machines with these instructions only.
        unsafe { self.accumulate_avx512(tokens, weights, keep, factor) }
    }

    fn finish(&mut self, sums: &mut [f32]) {
        let (d, group, bits) = (self.plan.rows.head_dim, self.plan.rows.group, self.bits);
        let offsets = self.offsets.chunks_exact(self.groups);
        for ((to, from), offsets) in sums.chunks_exact_mut(d).zip(self.sums.chunks_exact(d)).zip(offsets) {
            for (to, from) in to.chunks_exact_mut(CHANNELS).zip(from.chunks_exact(CHANNELS)) {
                for (i, from) in from.iter().enumerate() {
                    let (register, lane) = (i / 16, i % 16);
                    let channel =
                        if bits == 4 { 2 * lane + register } else { lane % 8 + 8 * register + 16 * (lane / 8) };
                    to[channel] = *from;
                }
            }
            for (to, offset) in to.chunks_mut(group).zip(offsets) {
                let offset: f32 = offset.iter().sum();
                to.iter_mut().for_each(|to| *to += offset);
            }
        }
    }
}

impl StripeValues<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn accumulate_avx512(
        &mut self,
        tokens: Range<usize>,
        weights: &Block,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        let (rows, width) = (&self.plan.rows, self.plan.row_bytes);
        self.params.load(rows, self.matrix, tokens.clone());
        // All groups before any product, which would wait for the last instructions of a group.
        for group in 0..self.groups {
            self.units[group] = self.weigh(group, weights);
            for row in 0..self.rows {
                let offset = &mut self.offsets[row * self.groups + group];
                self.params.add_zero_points(group, &weights.0[row], keep[row], factor[row], offset);
            }
        }
        let at = (self.matrix * rows.capacity + tokens.start) * width;
        let codes = &rows.code_bytes()[at..at + tokens.len() * width];
        let whole = tokens.len() / QUAD * QUAD;
        // What is left there of other rows meets weights of zero.
        self.rest[..codes.len() - whole * width].copy_from_slice(&codes[whole * width..]);
        for group in 0..self.groups {
            for stripe in group * self.stripes..(group + 1) * self.stripes {
                if stripe * CHANNELS >= rows.head_dim {
                    break;
                }
                let stripe = Stripe { group, stripe, codes, tokens: tokens.len() };
                match (self.bits, self.rows) {
                    (4, 1) => self.multiply::<4, 1>(stripe, keep, factor),
                    (4, 2) => self.multiply::<4, 2>(stripe, keep, factor),
                    (4, _) => self.multiply::<4, 4>(stripe, keep, factor),
                    (_, 1) => self.multiply::<8, 1>(stripe, keep, factor),
                    (_, 2) => self.multiply::<8, 2>(stripe, keep, factor),
                    _ => self.multiply::<8, 4>(stripe, keep, factor),
                }
            }
        }
    }

    /// The planes of weight times scale of one group of channels; what one unit of them is worth.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn weigh(&mut self, group: usize, weights: &Block) -> f32 {
        let mut scale = [_mm512_setzero_ps(); BLOCK / 16];
        let mut peak = _mm512_setzero_ps();
        for (i, scale) in scale.iter_mut().enumerate() {
            // SAFETY: register `i` is inside the row.
            *scale = unsafe { _mm512_loadu_ps(self.params.scale[group].as_ptr().add(16 * i)) };
            peak = _mm512_range_ps::<LARGER_MAGNITUDE>(peak, *scale);
        }
        let (to_integer, unit) = quantizer(_mm512_reduce_max_ps(peak));
        let (factor, order) = (_mm512_set1_ps(to_integer), self.order.load());
        let planes = &mut self.planes[group].0;
        for (row, planes) in planes.iter_mut().enumerate().take(self.rows) {
            for step in 0..BLOCK / 64 {
                let mut products = [_mm512_setzero_ps(); 4];
                for (i, product) in products.iter_mut().enumerate() {
                    // SAFETY: register `4 step + i` is inside the row.
                    let weight = unsafe { _mm512_loadu_ps(weights.0[row].as_ptr().add(64 * step + 16 * i)) };
                    *product = _mm512_mul_ps(weight, scale[4 * step + i]);
                }
                for (plane, x) in planes.iter_mut().zip(planes::split(products, factor, order)) {
                    // SAFETY: `64 step + 64 <= BLOCK`.
                    unsafe { _mm512_storeu_si512(plane.as_mut_ptr().add(64 * step).cast(), x) }
                }
            }
        }
        unit
    }

    /// Adds the products of `R` query rows with the codes of a stripe to the sums.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn multiply<const BITS: usize, const R: usize>(
        &mut self,
        Stripe { group, stripe, codes, tokens }: Stripe<'_>,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        let (d, width) = (self.plan.rows.head_dim, self.plan.row_bytes);
        // Bytes of a stripe in a row, and of it in a quad of rows.
        let bytes = BITS * CHANNELS / 8;
        let ahead = QUAD * bytes;
        let (whole, quads, at) = (tokens / QUAD, tokens.div_ceil(QUAD), stripe * bytes);
        assert!(quads <= BLOCK / QUAD && codes.len() >= whole * QUAD * width && at + bytes <= width);
        assert!(self.rest.len() == QUAD * width);
        let mut rows = codes.as_ptr().wrapping_add(at);
        let mut weights = self.planes[group].0.as_ptr().cast::<u8>();
        // Each stripe asks for its share of the next block, so that it comes evenly.
        let mut next = codes.as_ptr().wrapping_add(BLOCK * width + stripe * BLOCK * bytes);
        // SAFETY: the table is an aligned 64 bytes.
        let interleave = unsafe { _mm512_load_si512(self.interleave.0.as_ptr().cast()) };
        let mut acc = [[[_mm512_setzero_si512(); 2]; 2]; R];
        for quad in 0..quads {
            let from = if quad < whole { rows } else { self.rest.as_ptr().wrapping_add(at) };
            // SAFETY: a stripe is inside of four rows from there on.
            let codes = unsafe { load_quad::<BITS>(from, width, interleave) };
            rows = rows.wrapping_add(QUAD * width);
            cpu::prefetch(next, ahead);
            next = next.wrapping_add(ahead);
            for r in 0..R {
                for plane in 0..2 {
                    // SAFETY: a plane has a dword for each quad of a block.
                    let weight = unsafe {
                        let weight = weights.add((2 * r + plane) * BLOCK);
                        _mm512_set1_epi32(weight.cast::<i32>().read_unaligned())
                    };
                    acc[r][plane][0] = _mm512_dpbusd_epi32(acc[r][plane][0], codes[0], weight);
                    acc[r][plane][1] = _mm512_dpbusd_epi32(acc[r][plane][1], codes[1], weight);
                }
            }
            weights = weights.wrapping_add(QUAD);
        }
        for (r, acc) in acc.iter_mut().enumerate().take(self.rows) {
            let (keep, unit) = (_mm512_set1_ps(keep[r]), _mm512_set1_ps(factor[r] * self.units[group]));
            let sums = &mut self.sums[r * d + stripe * CHANNELS..][..CHANNELS];
            if BITS == 4 {
                for acc in acc.iter_mut() {
                    // What was multiplied by sixteen, without the rest of its bytes.
                    acc[1] = _mm512_srai_epi32::<4>(_mm512_sub_epi32(acc[1], acc[0]));
                }
            }
            for i in 0..2 {
                let (high, low) = (_mm512_cvtepi32_ps(acc[0][i]), _mm512_cvtepi32_ps(acc[1][i]));
                let sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0), low);
                // SAFETY: the sums of a stripe are two registers.
                unsafe {
                    let to = sums.as_mut_ptr().add(16 * i);
                    _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, unit, _mm512_mul_ps(_mm512_loadu_ps(to), keep)));
                }
            }
        }
    }
}

/// Sixteen channels of four tokens, and the other sixteen of a stripe; of four-bit codes the even channels, and whole bytes:
/// sixteen times the odd ones plus the even ones.
///
/// # Safety
///
/// A stripe can be read from `row` on, and from every `width` bytes after it for four rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn load_quad<const BITS: usize>(row: *const u8, width: usize, interleave: __m512i) -> [__m512i; 2] {
    let at = [row, row.wrapping_add(width), row.wrapping_add(2 * width), row.wrapping_add(3 * width)];
    // SAFETY: the caller vouches for all rows.
    unsafe {
        if BITS == 4 {
            let x = _mm512_castsi128_si512(_mm_loadu_si128(at[0].cast()));
            let x = _mm512_inserti32x4::<1>(x, _mm_loadu_si128(at[1].cast()));
            let x = _mm512_inserti32x4::<2>(x, _mm_loadu_si128(at[2].cast()));
            let x = _mm512_inserti32x4::<3>(x, _mm_loadu_si128(at[3].cast()));
            let bytes = _mm512_permutexvar_epi8(interleave, x);
            return [_mm512_and_si512(bytes, _mm512_set1_epi8(15)), bytes];
        }
        let (a, b) = (_mm256_loadu_si256(at[0].cast()), _mm256_loadu_si256(at[2].cast()));
        let a = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), _mm256_loadu_si256(at[1].cast()));
        let b = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(b), _mm256_loadu_si256(at[3].cast()));
        [
            _mm512_permutexvar_epi8(interleave, _mm512_unpacklo_epi8(a, b)),
            _mm512_permutexvar_epi8(interleave, _mm512_unpackhi_epi8(a, b)),
        ]
    }
}
