//! Decoding of stored weights to f32, one row at a time.
//!
//! The layouts are those of ggml; K-quants go through candle. Each loop has a fixed trip count per block and no branch,
//! so that the compiler vectorises it for whichever instruction set it is compiled for.

use bytemuck::{AnyBitPattern, cast_slice};
use candle_core::quantized::GgmlDType;

/// How the rows of a matrix are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decoder {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    /// candle's own decoder.
    Candle,
}

impl Decoder {
    pub fn of(dtype: GgmlDType) -> Self {
        match dtype {
            GgmlDType::F32 => Decoder::F32,
            GgmlDType::F16 => Decoder::F16,
            GgmlDType::BF16 => Decoder::Bf16,
            GgmlDType::Q4_0 => Decoder::Q4_0,
            GgmlDType::Q4_1 => Decoder::Q4_1,
            GgmlDType::Q5_0 => Decoder::Q5_0,
            GgmlDType::Q5_1 => Decoder::Q5_1,
            GgmlDType::Q8_0 => Decoder::Q8_0,
            GgmlDType::Q4K => Decoder::Q4K,
            GgmlDType::Q5K => Decoder::Q5K,
            GgmlDType::Q6K => Decoder::Q6K,
            GgmlDType::Q8_1 | GgmlDType::Q2K | GgmlDType::Q3K | GgmlDType::Q8K => Decoder::Candle,
        }
    }
}

/// Decodes one row; false if it is left to candle.
pub(super) fn decode(decoder: Decoder, bytes: &[u8], out: &mut [f32]) -> bool {
    match super::matvec::isa() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` has found AVX-512 F, BW, DQ and VL.
        super::matvec::Isa::Avx512 => unsafe { decode_avx512(decoder, bytes, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` has found AVX2 and FMA.
        super::matvec::Isa::Avx2 => unsafe { decode_avx2(decoder, bytes, out) },
        super::matvec::Isa::Baseline => decode_row(decoder, bytes, out),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn decode_avx512(decoder: Decoder, bytes: &[u8], out: &mut [f32]) -> bool {
    decode_row(decoder, bytes, out)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn decode_avx2(decoder: Decoder, bytes: &[u8], out: &mut [f32]) -> bool {
    decode_row(decoder, bytes, out)
}

#[inline(always)]
fn decode_row(decoder: Decoder, bytes: &[u8], out: &mut [f32]) -> bool {
    match decoder {
        Decoder::F32 => each(cast_slice::<u8, f32>(bytes), out, |&v| v),
        Decoder::F16 => each(cast_slice::<u8, u16>(bytes), out, |&v| half_to_f32(v)),
        Decoder::Bf16 => each(cast_slice::<u8, u16>(bytes), out, |&v| f32::from_bits((v as u32) << 16)),
        Decoder::Q4_0 => blocks::<Q4_0, 32>(bytes, out, |b, out| {
            let d = half_to_f32(b.d);
            nibbles(&b.qs, out, |q| (q as i32 - 8) as f32 * d);
        }),
        Decoder::Q4_1 => blocks::<Q4_1, 32>(bytes, out, |b, out| {
            let (d, m) = (half_to_f32(b.d), half_to_f32(b.m));
            nibbles(&b.qs, out, |q| q as f32 * d + m);
        }),
        Decoder::Q5_0 => blocks::<Q5_0, 32>(bytes, out, |b, out| {
            let d = half_to_f32(b.d);
            fives(u32::from_le_bytes(b.qh), &b.qs, out, |q| (q as i32 - 16) as f32 * d);
        }),
        Decoder::Q5_1 => blocks::<Q5_1, 32>(bytes, out, |b, out| {
            let (d, m) = (half_to_f32(b.d), half_to_f32(b.m));
            fives(u32::from_le_bytes(b.qh), &b.qs, out, |q| q as f32 * d + m);
        }),
        Decoder::Q8_0 => blocks::<Q8_0, 32>(bytes, out, |b, out| {
            let d = half_to_f32(b.d);
            for i in 0..32 {
                out[i] = b.qs[i] as f32 * d;
            }
        }),
        Decoder::Q4K => blocks::<Q4K, 256>(bytes, out, |b, out| {
            let (d, dmin) = (half_to_f32(b.d), half_to_f32(b.dmin));
            for pair in 0..4 {
                for (high, shift) in [(0, 0), (1, 4)] {
                    let (scale, min) = scale_min(2 * pair + high, &b.scales);
                    let (scale, min) = (d * scale as f32, dmin * min as f32);
                    for i in 0..32 {
                        out[pair * 64 + high * 32 + i] = scale * ((b.qs[pair * 32 + i] >> shift) & 15) as f32 - min;
                    }
                }
            }
        }),
        Decoder::Q5K => blocks::<Q5K, 256>(bytes, out, |b, out| {
            let (d, dmin) = (half_to_f32(b.d), half_to_f32(b.dmin));
            for pair in 0..4 {
                for (high, shift) in [(0, 0), (1, 4)] {
                    let (scale, min) = scale_min(2 * pair + high, &b.scales);
                    let (scale, min) = (d * scale as f32, dmin * min as f32);
                    for i in 0..32 {
                        let fifth = (b.qh[i] >> (2 * pair + high)) & 1;
                        let q = ((b.qs[pair * 32 + i] >> shift) & 15) | fifth << 4;
                        out[pair * 64 + high * 32 + i] = scale * q as f32 - min;
                    }
                }
            }
        }),
        Decoder::Q6K => blocks::<Q6K, 256>(bytes, out, |b, out| {
            let d = half_to_f32(b.d);
            for half in 0..2 {
                for quarter in 0..4 {
                    let (low, shift) = (half * 64 + (quarter % 2) * 32, 4 * (quarter / 2));
                    for i in 0..32 {
                        let bits = (b.ql[low + i] >> shift) & 15 | ((b.qh[half * 32 + i] >> (2 * quarter)) & 3) << 4;
                        let scale = d * b.scales[half * 8 + quarter * 2 + i / 16] as f32;
                        out[half * 128 + quarter * 32 + i] = scale * (bits as i32 - 32) as f32;
                    }
                }
            }
        }),
        Decoder::Candle => return false,
    }
    true
}

#[inline(always)]
fn each<T>(values: &[T], out: &mut [f32], f: impl Fn(&T) -> f32) {
    for (value, out) in values.iter().zip(out) {
        *out = f(value);
    }
}

#[inline(always)]
fn blocks<B: AnyBitPattern, const N: usize>(bytes: &[u8], out: &mut [f32], f: impl Fn(&B, &mut [f32; N])) {
    for (block, out) in cast_slice::<u8, B>(bytes).iter().zip(out.as_chunks_mut::<N>().0) {
        f(block, out);
    }
}

/// 32 codes of 4 bits: byte `i` holds element `i` below element `i + 16`.
#[inline(always)]
fn nibbles(qs: &[u8; 16], out: &mut [f32; 32], f: impl Fn(u8) -> f32) {
    for i in 0..16 {
        out[i] = f(qs[i] & 15);
    }
    for i in 0..16 {
        out[i + 16] = f(qs[i] >> 4);
    }
}

/// 32 codes of 5 bits: as [`nibbles`], the fifth bits in one word.
#[inline(always)]
fn fives(qh: u32, qs: &[u8; 16], out: &mut [f32; 32], f: impl Fn(u32) -> f32) {
    for i in 0..16 {
        out[i] = f((qs[i] & 15) as u32 | ((qh >> i) & 1) << 4);
    }
    for i in 0..16 {
        out[i + 16] = f((qs[i] >> 4) as u32 | ((qh >> (i + 16)) & 1) << 4);
    }
}

/// The 6-bit scale and minimum of sub-block `i` of a Q4_K or Q5_K block.
#[inline(always)]
fn scale_min(i: usize, packed: &[u8; 12]) -> (u8, u8) {
    match i < 4 {
        true => (packed[i] & 63, packed[i + 4] & 63),
        false => (packed[i + 4] & 15 | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4),
    }
}

/// f16 bits to f32, exactly, without a call: the exponent is rebased by one multiplication.
#[inline(always)]
fn half_to_f32(bits: u16) -> f32 {
    let magnitude = (bits as u32 & 0x7fff) << 13;
    let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let special = if magnitude >= 0x0f80_0000 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | (bits as u32 & 0x8000) << 16)
}

#[derive(Clone, Copy, AnyBitPattern)]
#[repr(C)]
struct Q4_0 {
    d: u16,
    qs: [u8; 16],
}

#[derive(Clone, Copy, AnyBitPattern)]
#[repr(C)]
struct Q4_1 {
    d: u16,
    m: u16,
    qs: [u8; 16],
}

#[derive(Clone, Copy, AnyBitPattern)]
#[repr(C)]
struct Q5_0 {
    d: u16,
    qh: [u8; 4],
    qs: [u8; 16],
}

#[derive(Clone, Copy, AnyBitPattern)]
#[repr(C)]
struct Q5_1 {
    d: u16,
    m: u16,
    qh: [u8; 4],
    qs: [u8; 16],
}

#[derive(Clone, Copy, AnyBitPattern)]
#[repr(C)]
struct Q8_0 {
    d: u16,
    qs: [i8; 32],
}

#[derive(Clone, Copy, AnyBitPattern)]
#[repr(C)]
struct Q4K {
    d: u16,
    dmin: u16,
    scales: [u8; 12],
    qs: [u8; 128],
}

#[derive(Clone, Copy, AnyBitPattern)]
#[repr(C)]
struct Q5K {
    d: u16,
    dmin: u16,
    scales: [u8; 12],
    qh: [u8; 32],
    qs: [u8; 128],
}

#[derive(Clone, Copy, AnyBitPattern)]
#[repr(C)]
struct Q6K {
    ql: [u8; 128],
    qh: [u8; 64],
    scales: [i8; 16],
    d: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_converts_exactly() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (half_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(found == expected || found.is_nan() && expected.is_nan(), "{bits:#x}: {found} {expected}");
            assert_eq!(found.is_sign_negative(), expected.is_sign_negative());
        }
    }
}
