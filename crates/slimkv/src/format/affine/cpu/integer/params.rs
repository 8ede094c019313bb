//! The parameters of value codes, block by block.

use std::arch::x86_64::*;
use std::ops::Range;

use half::f16;

use crate::attend::decode::cpu::BLOCK;
use crate::cpu::floats::{Floats, Widen};
use crate::cpu::{Aligned, Isa};
use crate::format::affine::cpu::{self, Tiles};

/// A number for each token of a block.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct Row(pub [f32; BLOCK]);

/// A number in sixteen parts.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct Lanes([f32; 16]);

impl Lanes {
    pub const ZERO: Lanes = Lanes([0.0; 16]);
}

/// The parameters of a block of tokens, a row a group of channels.
pub(super) struct Params {
    isa: Isa,
    pub scale: Vec<Row>,
    pub zero: Vec<Row>,
    /// As they lie in memory.
    wide: Aligned<f32>,
}

impl Params {
    pub fn new(isa: Isa, groups: usize) -> Self {
        let side = || vec![Row([0.0; BLOCK]); groups];
        Params { isa, scale: side(), zero: side(), wide: Aligned::zeros(BLOCK * groups) }
    }

    /// Takes those of `tokens`; zeros past them.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    pub fn load(&mut self, rows: &Tiles<'_>, matrix: usize, tokens: Range<usize>) {
        let (at, groups) = ((matrix * rows.params[0] + tokens.start) * rows.params[1], rows.params[1]);
        for (params, to) in [(rows.scale, &mut self.scale), (rows.zero, &mut self.zero)] {
            let from = params.part(at, tokens.len() * groups);
            let ahead = BLOCK * groups * params.element_size();
            cpu::prefetch(from.address(0).wrapping_add(2 * ahead), ahead);
            if let (Floats::F16(from), 4) = (from, groups) {
                transpose_four(from, to);
                continue;
            }
            self.isa.run(Widen { from, to: &mut self.wide });
            self.wide[tokens.len() * groups..].fill(0.0);
            match groups {
                1 => to[0].0.copy_from_slice(&self.wide),
                2 => transpose_params::<2>(&self.wide, to),
                4 => transpose_params::<4>(&self.wide, to),
                _ => {
                    for (group, to) in to.iter_mut().enumerate() {
                        for (to, from) in to.0.iter_mut().zip(self.wide.iter().skip(group).step_by(groups)) {
                            *to = *from;
                        }
                    }
                }
            }
        }
    }
}

/// A number for each token of a block, in registers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load(row: &[f32; BLOCK]) -> [__m512; BLOCK / 16] {
    let mut x = [_mm512_setzero_ps(); BLOCK / 16];
    for (i, x) in x.iter_mut().enumerate() {
        // SAFETY: register `i` is inside the row.
        *x = unsafe { _mm512_loadu_ps(row.as_ptr().add(16 * i)) };
    }
    x
}

/// `offset = offset * keep + factor * (weights times zero points)`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn add_weighted(
    weights: &[__m512; BLOCK / 16],
    zero: &[__m512; BLOCK / 16],
    keep: f32,
    factor: f32,
    offset: &mut Lanes,
) {
    let mut acc = [_mm512_setzero_ps(); 2];
    for i in 0..BLOCK / 32 {
        acc[0] = _mm512_fmadd_ps(weights[2 * i], zero[2 * i], acc[0]);
        acc[1] = _mm512_fmadd_ps(weights[2 * i + 1], zero[2 * i + 1], acc[1]);
    }
    // SAFETY: an offset has sixteen elements.
    unsafe {
        let kept = _mm512_mul_ps(_mm512_loadu_ps(offset.0.as_ptr()), _mm512_set1_ps(keep));
        let sum = _mm512_fmadd_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_set1_ps(factor), kept);
        _mm512_storeu_ps(offset.0.as_mut_ptr(), sum);
    }
}

/// Adds the offset of each group of channels to a row.
pub(super) fn add_offsets(row: &mut [f32], group: usize, offsets: &[Lanes]) {
    for (to, offset) in row.chunks_mut(group).zip(offsets) {
        let offset: f32 = offset.0.iter().sum();
        to.iter_mut().for_each(|to| *to += offset);
    }
}

/// `[tokens, 4]` to `[4, tokens]`; zeros past the tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn transpose_four(from: &[f16], to: &mut [Row]) {
    assert_eq!(to.len(), 4);
    // Of two registers of eight tokens the groups `first` and `first + 1`, each with its sixteen tokens together.
    let index = |first: i16| {
        let index: [i16; 32] = std::array::from_fn(|i| (i % 16 * 4 + i / 16) as i16 + first);
        // SAFETY: the array is 64 bytes.
        unsafe { _mm512_loadu_si512(index.as_ptr().cast()) }
    };
    let indices = [index(0), index(2)];
    let tokens = from.len() / 4;
    for t in (0..BLOCK).step_by(16) {
        let half = |t: usize| {
            let mask = ((1u64 << (4 * tokens.saturating_sub(t).min(8))) - 1) as u32;
            // SAFETY: only elements inside the slice are read.
            unsafe { _mm512_maskz_loadu_epi16(mask, from.as_ptr().wrapping_add(4 * t).cast()) }
        };
        let (a, b) = (half(t), half(t + 8));
        for i in 0..2 {
            let both = _mm512_permutex2var_epi16(a, indices[i], b);
            // SAFETY: `t + 16 <= BLOCK`.
            unsafe {
                let low = _mm512_castsi512_si256(both);
                _mm512_storeu_ps(to[2 * i].0.as_mut_ptr().add(t), _mm512_cvtph_ps(low));
                let high = _mm512_extracti64x4_epi64::<1>(both);
                _mm512_storeu_ps(to[2 * i + 1].0.as_mut_ptr().add(t), _mm512_cvtph_ps(high));
            }
        }
    }
}

/// `[tokens, G]` to `[G, tokens]`, for `G` 2 or 4.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn transpose_params<const G: usize>(from: &[f32], to: &mut [Row]) {
    assert!(from.len() == G * BLOCK && to.len() == G);
    // Within a register the tokens of each group together, then those parts of `G` registers.
    let index: [i32; 16] = std::array::from_fn(|i| (i % (16 / G) * G + i / (16 / G)) as i32);
    for t in (0..BLOCK).step_by(16) {
        // SAFETY: registers `t G / 16` to `t G / 16 + G - 1` are inside `from`; `t + 16` is inside a row of `to`.
        unsafe {
            let index = _mm512_loadu_si512(index.as_ptr().cast());
            let x: [__m512; G] = std::array::from_fn(|i| {
                _mm512_permutexvar_ps(index, _mm512_loadu_ps(from.as_ptr().add(t * G + 16 * i)))
            });
            let mut store = |group: usize, x: __m512| _mm512_storeu_ps(to[group].0.as_mut_ptr().add(t), x);
            if G == 2 {
                store(0, _mm512_shuffle_f32x4::<0b01_00_01_00>(x[0], x[1]));
                store(1, _mm512_shuffle_f32x4::<0b11_10_11_10>(x[0], x[1]));
            } else {
                let low = [0, 2].map(|i| _mm512_shuffle_f32x4::<0b01_00_01_00>(x[i], x[i + 1]));
                let high = [0, 2].map(|i| _mm512_shuffle_f32x4::<0b11_10_11_10>(x[i], x[i + 1]));
                store(0, _mm512_shuffle_f32x4::<0b10_00_10_00>(low[0], low[1]));
                store(1, _mm512_shuffle_f32x4::<0b11_01_11_01>(low[0], low[1]));
                store(2, _mm512_shuffle_f32x4::<0b10_00_10_00>(high[0], high[1]));
                store(3, _mm512_shuffle_f32x4::<0b11_01_11_01>(high[0], high[1]));
            }
        }
    }
}
