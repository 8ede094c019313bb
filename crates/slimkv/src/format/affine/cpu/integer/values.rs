//! Weighted sums of value codes.

use std::arch::x86_64::*;
use std::ops::Range;

use super::params::{self, Lanes, Params, load};
use super::spread::{Order, Spread};
use super::stripes::StripeValues;
use super::{LARGER_MAGNITUDE, quantizer};
use crate::attend::decode::MAX_ROWS;
use crate::attend::decode::cpu::{self as skeleton, BLOCK, Block, Values};
use crate::cpu::product::{self, Codes, Steps, Sums};
use crate::cpu::{Aligned, Isa, Worker};
use crate::format::affine::Axis;
use crate::format::affine::cpu::{self, Tiles};
use crate::format::decode_cpu::tile_stride;

/// Channels of a tile of codes; a group is a whole number of them.
const CHANNELS: usize = 16;

/// Channels of a register of four-bit codes.
const NIBBLES: usize = 128;

/// Tokens of a tile of codes.
const STEP: usize = 64;
const STEPS: usize = BLOCK / STEP;

/// Query rows of a tile of weights: two planes each.
const TILE_ROWS: usize = 8;

/// Value codes that share parameters among channels.
pub(crate) struct ValuePlan<'a> {
    pub(super) isa: Isa,
    pub(super) rows: Tiles<'a>,
    spread: Spread,
    pub(super) row_bytes: usize,
    nibbles: bool,
}

impl<'a> ValuePlan<'a> {
    /// `None` where these rows or this machine need another way.
    pub fn new(isa: Isa, rows: Tiles<'a>) -> Option<Self> {
        let whole = rows.group.is_multiple_of(CHANNELS) || rows.group >= rows.head_dim;
        let served = matches!(isa, Isa::Avx512 | Isa::Amx) && rows.axis == Axis::Channels && whole;
        let (bits, row_bytes) = rows.row_layout();
        let spread = Spread::new(bits, rows.head_dim, row_bytes, Order::Interleaved);
        let nibbles = bits == 4 && rows.head_dim.is_multiple_of(NIBBLES) && rows.group.is_multiple_of(2 * CHANNELS);
        served.then_some(ValuePlan { isa, rows, spread, row_bytes, nibbles })
    }
}

impl skeleton::ValuePlan for ValuePlan<'_> {
    fn values<'a>(&'a self, rows: usize) -> Box<dyn Values + 'a> {
        if let Some(values) = StripeValues::new(self, rows) {
            return Box::new(values);
        }
        let groups = self.rows.params[1];
        let tile_rows = rows.next_power_of_two().min(TILE_ROWS);
        Box::new(IntegerValues {
            plan: self,
            matrix: 0,
            rows,
            tile_rows,
            groups,
            sums: Aligned::zeros(rows * tile_stride(self.rows.head_dim)),
            offsets: vec![Lanes::ZERO; rows * groups],
            params: Params::new(self.isa, groups),
            codes: vec![Codes::ZERO; STEPS * 4 * self.spread.chunks()],
            units: vec![0.0; groups],
            planes: vec![Codes::ZERO; STEPS * groups],
            products: vec![[Sums::ZERO; 4]; self.spread.chunks()],
        })
    }
}

/// The values of one KV head, and their sums.
struct IntegerValues<'a> {
    plan: &'a ValuePlan<'a>,
    matrix: usize,
    rows: usize,
    /// Query rows of a pass.
    tile_rows: usize,
    groups: usize,
    /// `[rows, stride]`: the sums without zero points.
    sums: Aligned<f32>,
    /// `[rows, groups]`: the weighted zero points, in sixteen parts.
    offsets: Vec<Lanes>,
    params: Params,
    /// `[steps, tiles]`: codes of 64 tokens and 16 channels. Row `4 (q % 4) + q / 4` of a tile holds tokens `4 q` to
    /// `4 q + 3`, the order in which weights are packed.
    codes: Vec<Codes>,
    /// `[groups]`: what one unit of the planes is worth.
    units: Vec<f32>,
    /// `[groups, steps]`: planes of weight times scale.
    planes: Vec<Codes>,
    /// The products of each four tiles.
    products: Vec<[Sums; 4]>,
}

impl Values for IntegerValues<'_> {
    fn prepare(&mut self, matrix: usize) {
        self.matrix = matrix;
        self.sums.fill(0.0);
        self.offsets.fill(Lanes::ZERO);
    }

    fn accumulate(
        &mut self,
        worker: &Worker,
        tokens: Range<usize>,
        weights: &Block,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        // SAFETY: the plan is made for machines with these instructions only.
        unsafe { self.accumulate_avx512(worker, tokens, weights, keep, factor) }
    }

    fn finish(&mut self, sums: &mut [f32]) {
        let (d, group) = (self.plan.rows.head_dim, self.plan.rows.group);
        let offsets = self.offsets.chunks_exact(self.groups);
        for ((to, from), offsets) in sums.chunks_exact_mut(d).zip(self.sums.chunks_exact(tile_stride(d))).zip(offsets) {
            if self.plan.nibbles {
                // Even channels lie in one tile and odd ones in the next.
                for (to, from) in to.chunks_exact_mut(2 * CHANNELS).zip(from.chunks_exact(2 * CHANNELS)) {
                    for (c, to) in to.iter_mut().enumerate() {
                        *to = from[c % 2 * CHANNELS + c / 2];
                    }
                }
            } else {
                to.copy_from_slice(&from[..d]);
            }
            params::add_offsets(to, group, offsets);
        }
    }
}

impl IntegerValues<'_> {
    /// Step by step over the whole block, so that no step waits for what the one before has just stored.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn accumulate_avx512(
        &mut self,
        worker: &Worker,
        tokens: Range<usize>,
        weights: &Block,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        let plan = self.plan;
        let steps = tokens.len().div_ceil(STEP);
        let stride = tile_stride(plan.rows.head_dim);
        let tiles = 4 * plan.spread.chunks();
        // Tiles past the row repeat the last group; nobody reads their sums.
        let group_of = |tile: usize| (tile * CHANNELS / plan.rows.group).min(plan.rows.params[1] - 1);
        self.load_codes(worker, tokens.clone());
        worker.stay_awake();
        self.params.load(&plan.rows, self.matrix, tokens);
        for first in (0..self.rows).step_by(self.tile_rows) {
            let rows = first..(first + self.tile_rows).min(self.rows);
            for group in 0..self.groups {
                worker.stay_awake();
                self.units[group] = self.weigh(group, rows.clone(), steps, weights);
            }
            worker.stay_awake();
            for group in 0..self.groups {
                let zero = load(&self.params.zero[group].0);
                for row in rows.clone() {
                    let offset = &mut self.offsets[row * self.groups + group];
                    params::add_weighted(&load(&weights.0[row]), &zero, keep[row], factor[row], offset);
                }
            }
            for (i, products) in self.products.iter_mut().enumerate() {
                let planes = std::array::from_fn(|t| Steps::new(&self.planes[group_of(4 * i + t) * STEPS..], 1));
                let codes = std::array::from_fn(|t| Steps::new(&self.codes[4 * i + t..], tiles));
                product::sums(worker, planes, codes, 2 * self.tile_rows, steps, products);
            }
            worker.stay_awake();
            for (tile, products) in self.products.iter().flatten().enumerate().take(stride / CHANNELS) {
                let unit = self.units[group_of(tile)];
                for (r, row) in rows.clone().enumerate() {
                    let total = &mut self.sums[row * stride + tile * CHANNELS..][..CHANNELS];
                    let (high, low) = (&products.0[r], &products.0[self.tile_rows + r]);
                    add(total, high, low, keep[row], factor[row] * unit);
                }
            }
        }
    }

    /// Spreads the codes of a block and interleaves the bytes of every four tokens.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn load_codes(&mut self, worker: &Worker, tokens: Range<usize>) {
        let plan = self.plan;
        let all = plan.rows.code_bytes();
        let at = (self.matrix * plan.rows.capacity + tokens.start) * plan.row_bytes;
        let rows = &all[at..at + tokens.len() * plan.row_bytes];
        let tiles = 4 * plan.spread.chunks();
        for (quad, rows) in rows.chunks(4 * plan.row_bytes).enumerate() {
            let (step, q) = (quad / 16, quad % 16);
            let k = 4 * (q % 4) + q / 4;
            if quad % 4 == 0 {
                worker.stay_awake();
            }
            // The last token stands in for those that are missing, whose weights are zero. It is counted: rows of a slice
            // are counted by a division, which takes as long as all the rest.
            let last = (tokens.len() - 4 * quad).min(4) - 1;
            let row = |i: usize| rows.as_ptr().wrapping_add(i.min(last) * plan.row_bytes);
            let rows = [row(0), row(1), row(2), row(3)];
            if plan.nibbles {
                // SAFETY: each is a row of codes.
                unsafe { self.load_nibbles(rows, step * tiles, k) };
                continue;
            }
            cpu::prefetch(rows[0].wrapping_add(BLOCK * plan.row_bytes), 4 * plan.row_bytes);
            for chunk in 0..plan.spread.chunks() {
                let spreader = plan.spread.chunk(chunk);
                let zero = _mm512_setzero_si512();
                let mut t = [zero; 4];
                for (t, row) in t.iter_mut().zip(rows) {
                    // SAFETY: the row has the width that the plan's spread was made for.
                    *t = unsafe { spreader.spread(row) };
                }
                let quads = interleave(t);
                let to = &mut self.codes[step * tiles + 4 * chunk..][..4];
                for (to, quad) in to.iter_mut().zip(quads) {
                    // SAFETY: a row of a tile is an aligned 64 bytes.
                    unsafe { _mm512_store_si512(to.0[k].as_mut_ptr().cast(), quad) }
                }
            }
        }
        // The rest of the last tile: its weights are zero, so any code will do.
    }

    /// Four-bit codes of four tokens as row `k` of the tiles from `first` on. Bytes are interleaved before they are
    /// split, which halves the work: of every 32 channels the even ones go to one tile and the odd ones to the next.
    ///
    /// # Safety
    ///
    /// Each of `rows` is a row of codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn load_nibbles(&mut self, rows: [*const u8; 4], first: usize, k: usize) {
        // Dword `l` of lane `i` to dword `i` of lane `l`: interleaving then gives sixteen consecutive bytes a register.
        let transpose = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let low = _mm512_set1_epi8(15);
        let width = self.plan.row_bytes;
        for register in 0..width / 64 {
            let mut t = [_mm512_setzero_si512(); 4];
            for (t, row) in t.iter_mut().zip(rows) {
                // SAFETY: 64 bytes from `64 * register` on are inside of the row; a prefetch never faults.
                let bytes = unsafe {
                    let row = row.wrapping_add(64 * register);
                    _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(BLOCK * width).cast());
                    _mm512_loadu_si512(row.cast())
                };
                *t = _mm512_permutexvar_epi32(transpose, bytes);
            }
            let tiles = self.codes[first + 8 * register..][..8].chunks_exact_mut(2);
            for (pair, bytes) in tiles.zip(interleave(t)) {
                // SAFETY: a row of a tile is an aligned 64 bytes.
                unsafe {
                    _mm512_store_si512(pair[0].0[k].as_mut_ptr().cast(), _mm512_and_si512(bytes, low));
                    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low);
                    _mm512_store_si512(pair[1].0[k].as_mut_ptr().cast(), high);
                }
            }
        }
    }

    /// The planes of weight times scale of one group of channels; what one unit of them is worth.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn weigh(&mut self, group: usize, rows: Range<usize>, steps: usize, weights: &Block) -> f32 {
        let scale = load(&self.params.scale[group].0);
        let mut peak = _mm512_setzero_ps();
        for scale in scale {
            peak = _mm512_range_ps::<LARGER_MAGNITUDE>(peak, scale);
        }
        let (to_integer, unit) = quantizer(_mm512_reduce_max_ps(peak));
        for step in 0..steps {
            let planes_of_step = &mut self.planes[group * STEPS + step].0;
            let factor = _mm512_set1_ps(to_integer);
            let mut scales = [factor; 4];
            for (i, x) in scales.iter_mut().enumerate() {
                *x = _mm512_mul_ps(scale[step * STEP / 16 + i], factor);
            }
            for (r, row) in rows.clone().enumerate() {
                let mut x = [_mm512_setzero_si512(); 4];
                for (i, x) in x.iter_mut().enumerate() {
                    // SAFETY: the row has a register for each sixteen tokens of a step.
                    let weight = unsafe { _mm512_loadu_ps(weights.0[row].as_ptr().add(step * STEP + 16 * i)) };
                    *x = _mm512_cvtps_epi32(_mm512_mul_ps(weight, scales[i]));
                }
                // Bytes come in the order of the packing instructions: four tokens each of the first, second, third and
                // fourth sixteen, and so on.
                let (high, low) = cpu::planes([_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3])]);
                // SAFETY: both rows are below 16 and an aligned 64 bytes.
                unsafe {
                    _mm512_store_si512(planes_of_step[r].as_mut_ptr().cast(), high);
                    _mm512_store_si512(planes_of_step[self.tile_rows + r].as_mut_ptr().cast(), low);
                }
            }
        }
        unit
    }
}

/// Interleaves the bytes of four registers within each 128-bit lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave(t: [__m512i; 4]) -> [__m512i; 4] {
    let (a, b) = (_mm512_unpacklo_epi8(t[0], t[1]), _mm512_unpackhi_epi8(t[0], t[1]));
    let (c, d) = (_mm512_unpacklo_epi8(t[2], t[3]), _mm512_unpackhi_epi8(t[2], t[3]));
    [_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c), _mm512_unpacklo_epi16(b, d), _mm512_unpackhi_epi16(b, d)]
}

/// `total = total * keep + (256 high + low) * unit`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn add(total: &mut [f32], high: &[i32; 16], low: &[i32; 16], keep: f32, unit: f32) {
    assert_eq!(total.len(), 16);
    // SAFETY: all three have sixteen elements.
    unsafe {
        let high = _mm512_cvtepi32_ps(_mm512_loadu_si512(high.as_ptr().cast()));
        let low = _mm512_cvtepi32_ps(_mm512_loadu_si512(low.as_ptr().cast()));
        let sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0), low);
        let kept = _mm512_mul_ps(_mm512_loadu_ps(total.as_ptr()), _mm512_set1_ps(keep));
        _mm512_storeu_ps(total.as_mut_ptr(), _mm512_fmadd_ps(sum, _mm512_set1_ps(unit), kept));
    }
}
