//! Weighted sums of value codes.

use std::arch::x86_64::*;
use std::ops::Range;

use super::quantizer;
use super::spread::{Order, Spread};
use crate::attend::decode::MAX_ROWS;
use crate::attend::decode::cpu::{self as skeleton, BLOCK, Block, Values};
use crate::cpu::Isa;
use crate::cpu::floats::{Floats, Widen};
use crate::cpu::product::{Codes, Engine, Sums};
use crate::format::affine::Axis;
use crate::format::affine::cpu::{self, Tiles};
use crate::format::decode_cpu::tile_stride;

/// Channels of a tile of codes; a group is a whole number of them.
const CHANNELS: usize = 16;

/// Tokens of a tile of codes.
const STEP: usize = 64;
const STEPS: usize = BLOCK / STEP;

/// Query rows of a tile of weights: two planes each.
const TILE_ROWS: usize = 8;

/// Value codes that share parameters among channels.
pub(crate) struct ValuePlan<'a> {
    isa: Isa,
    rows: Tiles<'a>,
    spread: Spread,
    row_bytes: usize,
}

impl<'a> ValuePlan<'a> {
    /// `None` where these rows or this machine need another way.
    pub fn new(isa: Isa, rows: Tiles<'a>) -> Option<Self> {
        let whole = rows.group % CHANNELS == 0 || rows.group >= rows.head_dim;
        let served = matches!(isa, Isa::Avx512 | Isa::Amx) && rows.axis == Axis::Channels && whole;
        let (bits, row_bytes) = rows.row_layout();
        let spread = Spread::new(bits, rows.head_dim, row_bytes, Order::Interleaved);
        served.then_some(ValuePlan { isa, rows, spread, row_bytes })
    }
}

impl skeleton::ValuePlan for ValuePlan<'_> {
    fn prepare<'a>(&'a self, matrix: usize, rows: usize) -> Box<dyn Values + 'a> {
        let groups = self.rows.params[1];
        let tile_rows = rows.next_power_of_two().min(TILE_ROWS);
        Box::new(IntegerValues {
            plan: self,
            engine: Engine::new(self.isa, 2 * tile_rows),
            matrix,
            rows,
            tile_rows,
            groups,
            sums: vec![0.0; rows * tile_stride(self.rows.head_dim)],
            offsets: vec![[0.0; 16]; rows * groups],
            scale: vec![[0.0; BLOCK]; groups],
            zero: vec![[0.0; BLOCK]; groups],
            wide: vec![0.0; BLOCK * groups],
            codes: vec![Codes::ZERO; STEPS * 4 * self.spread.chunks()],
        })
    }
}

/// The values of one KV head, and their sums.
struct IntegerValues<'a> {
    plan: &'a ValuePlan<'a>,
    engine: Engine,
    matrix: usize,
    rows: usize,
    /// Query rows of a pass.
    tile_rows: usize,
    groups: usize,
    /// `[rows, stride]`: the sums without zero points.
    sums: Vec<f32>,
    /// `[rows, groups]`: the weighted zero points, in sixteen parts.
    offsets: Vec<[f32; 16]>,
    /// `[groups]`: the parameters of a block of tokens.
    scale: Vec<[f32; BLOCK]>,
    zero: Vec<[f32; BLOCK]>,
    /// Parameters as they lie in memory.
    wide: Vec<f32>,
    /// `[steps, tiles]`: codes of 64 tokens and 16 channels. Row `4 (q % 4) + q / 4` of a tile holds tokens `4 q` to
    /// `4 q + 3`, the order in which weights are packed.
    codes: Vec<Codes>,
}

impl Values for IntegerValues<'_> {
    fn accumulate(&mut self, tokens: Range<usize>, weights: &Block, keep: &[f32; MAX_ROWS], factor: &[f32; MAX_ROWS]) {
        // SAFETY: the plan is made for machines with these instructions only.
        unsafe { self.accumulate_avx512(tokens, weights, keep, factor) }
    }

    fn finish(&mut self, sums: &mut [f32]) {
        let (d, group) = (self.plan.rows.head_dim, self.plan.rows.group);
        let offsets = self.offsets.chunks_exact(self.groups);
        for ((to, from), offsets) in sums.chunks_exact_mut(d).zip(self.sums.chunks_exact(tile_stride(d))).zip(offsets) {
            for ((to, from), offset) in to.chunks_mut(group).zip(from.chunks(group)).zip(offsets) {
                let offset: f32 = offset.iter().sum();
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from + offset);
            }
        }
    }
}

impl IntegerValues<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn accumulate_avx512(
        &mut self,
        tokens: Range<usize>,
        weights: &Block,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        let steps = tokens.len().div_ceil(STEP);
        self.load_codes(tokens.clone());
        for (params, which) in [(self.plan.rows.scale, false), (self.plan.rows.zero, true)] {
            self.load_params(params, tokens.clone(), which);
        }
        let stride = tile_stride(self.plan.rows.head_dim);
        let tiles = 4 * self.plan.spread.chunks();
        let tiles_per_group = (self.plan.rows.group / CHANNELS).max(1);
        let mut planes = [Codes::ZERO; STEPS];
        let mut sums = [Sums::ZERO; 2];
        for group in 0..self.groups {
            let (to_integer, unit) = self.normalize(group);
            for first in (0..self.rows).step_by(self.tile_rows) {
                let rows = self.tile_rows.min(self.rows - first);
                for r in 0..rows {
                    let row = first + r;
                    let (keep, factor) = (keep[row], factor[row]);
                    self.add_zero_points(group, row, &weights.0[row], keep, factor);
                    for (step, planes) in planes[..steps].iter_mut().enumerate() {
                        let range = step * STEP..(step + 1) * STEP;
                        let (high, low) =
                            weigh(&weights.0[row][range.clone()], &self.scale[group][range], to_integer);
                        // SAFETY: both rows are below 16 and 64 bytes long.
                        unsafe {
                            _mm512_store_si512(planes.0[r].as_mut_ptr().cast(), high);
                            _mm512_store_si512(planes.0[self.tile_rows + r].as_mut_ptr().cast(), low);
                        }
                    }
                }
                let last = ((group + 1) * tiles_per_group).min(stride / CHANNELS);
                for tile in (group * tiles_per_group..last).step_by(2) {
                    // SAFETY: the machine has the instructions; the engine was made for this many rows.
                    unsafe {
                        let codes = &self.codes[tile.min(tiles - 2)..];
                        self.engine.sums(&planes[..steps], 2 * self.tile_rows, codes, tiles, &mut sums);
                    }
                    // An odd last tile is the second of its pair where the pair would not fit.
                    let shift = tile - tile.min(tiles - 2);
                    for (i, sums) in sums.iter().skip(shift).take(last - tile).enumerate() {
                        for r in 0..rows {
                            let row = first + r;
                            let at = row * stride + (tile + i) * CHANNELS;
                            let total = &mut self.sums[at..at + CHANNELS];
                            add(total, &sums.0[r], &sums.0[self.tile_rows + r], keep[row], factor[row] * unit);
                        }
                    }
                }
            }
        }
    }

    /// Spreads the codes of a block and interleaves the bytes of every four tokens.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn load_codes(&mut self, tokens: Range<usize>) {
        let plan = self.plan;
        let all = plan.rows.code_bytes();
        let at = (self.matrix * plan.rows.capacity + tokens.start) * plan.row_bytes;
        let rows = &all[at..at + tokens.len() * plan.row_bytes];
        let tiles = 4 * plan.spread.chunks();
        for (quad, rows) in rows.chunks(4 * plan.row_bytes).enumerate() {
            cpu::prefetch(rows.as_ptr().wrapping_add(BLOCK * plan.row_bytes), 4 * plan.row_bytes);
            let (step, q) = (quad / 16, quad % 16);
            let k = 4 * (q % 4) + q / 4;
            for chunk in 0..plan.spread.chunks() {
                let spreader = plan.spread.chunk(chunk);
                let zero = _mm512_setzero_si512();
                let mut t = [zero; 4];
                for (t, row) in t.iter_mut().zip(rows.chunks_exact(plan.row_bytes)) {
                    // SAFETY: the row has the width that the plan's spread was made for.
                    *t = unsafe { spreader.spread(row.as_ptr()) };
                }
                let (a, b) = (_mm512_unpacklo_epi8(t[0], t[1]), _mm512_unpackhi_epi8(t[0], t[1]));
                let (c, d) = (_mm512_unpacklo_epi8(t[2], t[3]), _mm512_unpackhi_epi8(t[2], t[3]));
                let quads = [
                    _mm512_unpacklo_epi16(a, c),
                    _mm512_unpackhi_epi16(a, c),
                    _mm512_unpacklo_epi16(b, d),
                    _mm512_unpackhi_epi16(b, d),
                ];
                let to = &mut self.codes[step * tiles + 4 * chunk..][..4];
                for (to, quad) in to.iter_mut().zip(quads) {
                    // SAFETY: a row of a tile is an aligned 64 bytes.
                    unsafe { _mm512_store_si512(to.0[k].as_mut_ptr().cast(), quad) }
                }
            }
        }
        // The rest of the last tile: its weights are zero, so any code will do.
    }

    /// The parameters of a block, a row a group; zeros past the tokens.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn load_params(&mut self, params: Floats<'_>, tokens: Range<usize>, zero: bool) {
        let groups = self.groups;
        let at = (self.matrix * self.plan.rows.params[0] + tokens.start) * groups;
        let from = params.part(at, tokens.len() * groups);
        let ahead = BLOCK * groups * params.element_size();
        cpu::prefetch(from.address(0).wrapping_add(ahead), ahead);
        let to = if zero { &mut self.zero } else { &mut self.scale };
        self.plan.isa.run(Widen { from, to: &mut self.wide });
        self.wide[tokens.len() * groups..].fill(0.0);
        let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let index = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(groups as i32));
        for (group, to) in to.iter_mut().enumerate() {
            for t in (0..BLOCK).step_by(16) {
                // SAFETY: the largest index is `(t + 15) * groups + group`, inside `wide`; `to` has `BLOCK` elements.
                unsafe {
                    let from = self.wide.as_ptr().add(t * groups + group);
                    _mm512_storeu_ps(to.as_mut_ptr().add(t), _mm512_i32gather_ps::<4>(index, from));
                }
            }
        }
    }

    /// How the scales of a group of channels are mapped to integers, and what one unit is worth.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn normalize(&self, group: usize) -> (f32, f32) {
        let mut peak = _mm512_setzero_ps();
        for scale in self.scale[group].chunks_exact(16) {
            // SAFETY: the chunk has sixteen elements.
            peak = _mm512_max_ps(peak, _mm512_abs_ps(unsafe { _mm512_loadu_ps(scale.as_ptr()) }));
        }
        quantizer(_mm512_reduce_max_ps(peak))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn add_zero_points(&mut self, group: usize, row: usize, weights: &[f32; BLOCK], keep: f32, factor: f32) {
        let mut acc = [_mm512_setzero_ps(); 2];
        for t in (0..BLOCK).step_by(32) {
            for (i, acc) in acc.iter_mut().enumerate() {
                // SAFETY: `t + 32 <= BLOCK`, the length of both.
                unsafe {
                    let weight = _mm512_loadu_ps(weights.as_ptr().add(t + 16 * i));
                    let zero = _mm512_loadu_ps(self.zero[group].as_ptr().add(t + 16 * i));
                    *acc = _mm512_fmadd_ps(weight, zero, *acc);
                }
            }
        }
        let offset = &mut self.offsets[row * self.groups + group];
        // SAFETY: an offset has sixteen elements.
        unsafe {
            let kept = _mm512_mul_ps(_mm512_loadu_ps(offset.as_ptr()), _mm512_set1_ps(keep));
            let sum = _mm512_fmadd_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_set1_ps(factor), kept);
            _mm512_storeu_ps(offset.as_mut_ptr(), sum);
        }
    }
}

/// Weight times scale of 64 tokens, as planes. Bytes are in the order of the packing instructions: four tokens each of the
/// first, second, third and fourth sixteen, and so on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn weigh(weights: &[f32], scale: &[f32], to_integer: f32) -> (__m512i, __m512i) {
    assert!(weights.len() == STEP && scale.len() == STEP);
    let to_integer = _mm512_set1_ps(to_integer);
    let x: [__m512i; 4] = std::array::from_fn(|i| {
        // SAFETY: `16 i + 16 <= 64`.
        let (w, s) =
            unsafe { (_mm512_loadu_ps(weights.as_ptr().add(16 * i)), _mm512_loadu_ps(scale.as_ptr().add(16 * i))) };
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(s, to_integer), w))
    });
    cpu::planes([_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3])])
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
