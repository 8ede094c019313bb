//! Weighted sums for few query rows, a stripe of thirty-two channels at a time.
//!
//! The sums of a stripe fit into registers, so the codes of four tokens go from memory to the products without being stored:
//! their bytes are interleaved, and four of one channel meet a broadcast dword of a plane of the weights.

use std::arch::x86_64::*;
use std::ops::Range;

use super::params::{self, Lanes, Params, load};
use super::planes::{self, Order};
use super::{LARGER_MAGNITUDE, ValuePlan, quantizer};
use crate::attend::decode::MAX_ROWS;
use crate::attend::decode::cpu::{BLOCK, Block, Values};
use crate::cpu::{Aligned, Worker};
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
    sums: Aligned<f32>,
    /// `[rows, groups]`: the weighted zero points, in sixteen parts.
    offsets: Vec<Lanes>,
    params: Params,
    /// `[groups]`.
    planes: Vec<Planes>,
    /// `[groups]`: what one unit of the planes is worth.
    units: Vec<f32>,
    /// Rows of the last tokens where these are no whole quad.
    rest: Vec<u8>,
    order: Order,
    layout: Layout,
}

/// A stripe of the codes of a block.
struct Stripe<'a> {
    group: usize,
    stripe: usize,
    codes: &'a [u8],
    tokens: usize,
}

/// How the codes of four tokens become two registers, sixteen channels each.
#[repr(C, align(64))]
struct Layout {
    /// Where bytes go so that those of a channel come together.
    bytes: [u8; 64],
    /// How far a dword is shifted in each of the two registers, for codes of one or two bits.
    shifts: [[u32; 16]; 2],
    /// The channel of each dword.
    channels: [[u8; 16]; 2],
}

impl Layout {
    fn new(bits: usize) -> Self {
        // Bytes of a stripe in a row, and codes of a byte.
        let (width, codes) = (bits * CHANNELS / 8, 8 / bits);
        let mut layout = Layout { bytes: [0; 64], shifts: [[0; 16]; 2], channels: [[0; 16]; 2] };
        for lane in 0..16 {
            for token in 0..QUAD {
                // Rows come one after another, those of one or two bits repeated to fill the register; eight-bit codes
                // with tokens 0 and 2 alternating, then tokens 1 and 3.
                let from =
                    if bits == 8 { 2 * lane + token / 2 + 32 * (token % 2) } else { width * token + lane % width };
                layout.bytes[4 * lane + token] = from as u8;
            }
            for register in 0..2 {
                // Which of the codes of its byte.
                let code = (16 * register + lane) / width;
                layout.shifts[register][lane] = (bits * code) as u32;
                let channel =
                    if bits == 8 { lane % 8 + 8 * register + 16 * (lane / 8) } else { codes * (lane % width) + code };
                layout.channels[register][lane] = channel as u8;
            }
        }
        layout
    }
}

impl<'a> StripeValues<'a> {
    /// `None` where codes of this layout are stored as tiles first.
    pub fn new(plan: &'a ValuePlan<'a>, rows: usize) -> Option<Self> {
        let (d, group, groups) = (plan.rows.head_dim, plan.rows.group, plan.rows.params[1]);
        let (bits, _) = plan.rows.row_layout();
        let whole = d.is_multiple_of(CHANNELS) && (group.is_multiple_of(CHANNELS) || group >= d);
        (whole && rows <= ROWS && matches!(bits, 1 | 2 | 4 | 8)).then(|| StripeValues {
            plan,
            matrix: 0,
            rows,
            groups,
            bits: bits as usize,
            stripes: group.min(d) / CHANNELS,
            sums: Aligned::zeros(rows * d),
            offsets: vec![Lanes::ZERO; rows * groups],
            params: Params::new(plan.isa, groups),
            planes: vec![Planes([[[0; BLOCK]; 2]; ROWS]); groups],
            units: vec![0.0; groups],
            rest: vec![0; QUAD * plan.row_bytes],
            order: Order::new(|i| i),
            layout: Layout::new(bits as usize),
        })
    }
}

impl Values for StripeValues<'_> {
    fn prepare(&mut self, matrix: usize) {
        self.matrix = matrix;
        self.sums.fill(0.0);
        self.offsets.fill(Lanes::ZERO);
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
        let (d, group) = (self.plan.rows.head_dim, self.plan.rows.group);
        let offsets = self.offsets.chunks_exact(self.groups);
        for ((to, from), offsets) in sums.chunks_exact_mut(d).zip(self.sums.chunks_exact(d)).zip(offsets) {
            for (to, from) in to.chunks_exact_mut(CHANNELS).zip(from.chunks_exact(CHANNELS)) {
                for (channel, from) in self.layout.channels.as_flattened().iter().zip(from) {
                    to[usize::from(*channel)] = *from;
                }
            }
            params::add_offsets(to, group, offsets);
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
            self.weigh(group, weights, keep, factor);
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
                match self.bits {
                    1 => self.multiply_rows::<1>(stripe, keep, factor),
                    2 => self.multiply_rows::<2>(stripe, keep, factor),
                    4 => self.multiply_rows::<4>(stripe, keep, factor),
                    _ => self.multiply_rows::<8>(stripe, keep, factor),
                }
            }
        }
    }

    /// The planes of weight times scale of one group of channels, and the weighted zero points.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn weigh(&mut self, group: usize, weights: &Block, keep: &[f32; MAX_ROWS], factor: &[f32; MAX_ROWS]) {
        let mut scale = load(&self.params.scale[group].0);
        let zero = load(&self.params.zero[group].0);
        let mut peak = _mm512_setzero_ps();
        for scale in scale {
            peak = _mm512_range_ps::<LARGER_MAGNITUDE>(peak, scale);
        }
        let (to_integer, unit) = quantizer(_mm512_reduce_max_ps(peak));
        self.units[group] = unit;
        let (to_integer, round) = (_mm512_set1_ps(to_integer), _mm512_set1_ps(planes::ROUND));
        for scale in &mut scale {
            *scale = _mm512_mul_ps(*scale, to_integer);
        }
        let order = self.order.load();
        let planes = &mut self.planes[group].0;
        for (r, planes) in planes.iter_mut().enumerate().take(self.rows) {
            let weights = load(&weights.0[r]);
            params::add_weighted(&weights, &zero, keep[r], factor[r], &mut self.offsets[r * self.groups + group]);
            for step in 0..BLOCK / 64 {
                let mut products = [round; 4];
                for (i, product) in products.iter_mut().enumerate() {
                    *product = _mm512_fmadd_ps(weights[4 * step + i], scale[4 * step + i], round);
                }
                for (plane, x) in planes.iter_mut().zip(planes::split(products, order)) {
                    // SAFETY: `64 step + 64 <= BLOCK`.
                    unsafe { _mm512_storeu_si512(plane.as_mut_ptr().add(64 * step).cast(), x) }
                }
            }
        }
    }

    /// Adds the products of all query rows with the codes of a stripe to the sums. Not inlined: each of its many forms has
    /// the registers for itself.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn multiply_rows<const BITS: usize>(
        &mut self,
        stripe: Stripe<'_>,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        match self.rows {
            1 => self.multiply::<BITS, 1>(stripe, keep, factor),
            2 => self.multiply::<BITS, 2>(stripe, keep, factor),
            _ => self.multiply::<BITS, 4>(stripe, keep, factor),
        }
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
        // SAFETY: each table is an aligned 64 bytes.
        let (interleave, shifts) = unsafe {
            let [a, b] = &self.layout.shifts;
            let shifts = [_mm512_load_si512(a.as_ptr().cast()), _mm512_load_si512(b.as_ptr().cast())];
            (_mm512_load_si512(self.layout.bytes.as_ptr().cast()), shifts)
        };
        let mut acc = [[[_mm512_setzero_si512(); 2]; 2]; R];
        for quad in 0..quads {
            let from = if quad < whole { rows } else { self.rest.as_ptr().wrapping_add(at) };
            // SAFETY: a stripe is inside of four rows from there on.
            let codes = unsafe { load_quad::<BITS>(from, width, interleave, shifts) };
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

/// Sixteen channels of four tokens, and the other sixteen of a stripe, as the [`Layout`] says; of four-bit codes the even
/// channels, and whole bytes: sixteen times the odd ones plus the even ones.
///
/// # Safety
///
/// A stripe can be read from `row` on, and from every `width` bytes after it for four rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn load_quad<const BITS: usize>(
    row: *const u8,
    width: usize,
    interleave: __m512i,
    shifts: [__m512i; 2],
) -> [__m512i; 2] {
    let at = [row, row.wrapping_add(width), row.wrapping_add(2 * width), row.wrapping_add(3 * width)];
    // SAFETY: the caller vouches for all rows.
    unsafe {
        if BITS < 4 {
            // What is inserted by a mask comes from memory, which leaves port 5 to the instructions below.
            let x = if BITS == 2 {
                let part = |i: usize| _mm512_set1_epi64(at[i].cast::<i64>().read_unaligned());
                let x = _mm512_mask_mov_epi64(part(0), 0b10, part(1));
                _mm512_mask_mov_epi64(_mm512_mask_mov_epi64(x, 0b100, part(2)), 0b1000, part(3))
            } else {
                let part = |i: usize| _mm512_set1_epi32(at[i].cast::<i32>().read_unaligned());
                let x = _mm512_mask_mov_epi32(part(0), 0b10, part(1));
                _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(x, 0b100, part(2)), 0b1000, part(3))
            };
            let (bytes, mask) = (_mm512_permutexvar_epi8(interleave, x), _mm512_set1_epi8((1 << BITS) - 1));
            let [a, b] = [_mm512_srlv_epi32(bytes, shifts[0]), _mm512_srlv_epi32(bytes, shifts[1])];
            return [_mm512_and_si512(a, mask), _mm512_and_si512(b, mask)];
        }
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
