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
        super::matvec::Isa::Baseline => decode_row::<Baseline>(decoder, bytes, out),
    }
}

/// The decoding of one block, compiled for an instruction set.
///
/// It stays a call: inlined into the loop over blocks, it is vectorised across blocks, with gathers and scatters, at a
/// quarter of the speed.
trait Level {
    fn block<B: Block<N>, const N: usize>(block: &B, out: &mut [f32; N]);
}

struct Baseline;

impl Level for Baseline {
    #[inline(never)]
    fn block<B: Block<N>, const N: usize>(block: &B, out: &mut [f32; N]) {
        block.decode(out);
    }
}

macro_rules! x86_level {
    ($level:ident, $decode:ident, $features:literal) => {
        #[cfg(target_arch = "x86_64")]
        struct $level;

        #[cfg(target_arch = "x86_64")]
        impl Level for $level {
            #[inline(always)]
            fn block<B: Block<N>, const N: usize>(block: &B, out: &mut [f32; N]) {
                #[target_feature(enable = $features)]
                #[inline(never)]
                fn compiled<B: Block<N>, const N: usize>(block: &B, out: &mut [f32; N]) {
                    block.decode(out);
                }
                // SAFETY: this level is named by the function below alone, whose caller has found the features.
                unsafe { compiled(block, out) }
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $decode(decoder: Decoder, bytes: &[u8], out: &mut [f32]) -> bool {
            decode_row::<$level>(decoder, bytes, out)
        }
    };
}

x86_level!(Avx512, decode_avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma");
x86_level!(Avx2, decode_avx2, "avx2,fma");

#[inline(always)]
fn decode_row<L: Level>(decoder: Decoder, bytes: &[u8], out: &mut [f32]) -> bool {
    match decoder {
        Decoder::F32 => row::<L, F32, 1>(bytes, out),
        Decoder::F16 => row::<L, F16, 1>(bytes, out),
        Decoder::Bf16 => row::<L, Bf16, 1>(bytes, out),
        Decoder::Q4_0 => row::<L, Q4_0, 32>(bytes, out),
        Decoder::Q4_1 => row::<L, Q4_1, 32>(bytes, out),
        Decoder::Q5_0 => row::<L, Q5_0, 32>(bytes, out),
        Decoder::Q5_1 => row::<L, Q5_1, 32>(bytes, out),
        Decoder::Q8_0 => row::<L, Q8_0, 32>(bytes, out),
        Decoder::Q4K => row::<L, Q4K, 256>(bytes, out),
        Decoder::Q5K => row::<L, Q5K, 256>(bytes, out),
        Decoder::Q6K => row::<L, Q6K, 256>(bytes, out),
        Decoder::Candle => return false,
    }
    true
}

#[inline(always)]
fn row<L: Level, B: Block<N>, const N: usize>(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in cast_slice::<u8, B>(bytes).iter().zip(out.as_chunks_mut::<N>().0) {
        match N {
            1 => block.decode(out),
            _ => L::block(block, out),
        }
    }
}

/// `N` weights as they are stored. `decode` is inlined into functions compiled for an instruction set, and so must be
/// everything that it calls: a closure would not be.
trait Block<const N: usize>: AnyBitPattern {
    fn decode(&self, out: &mut [f32; N]);
}

macro_rules! block {
    ($(#[$doc:meta])* $name:ident, $n:literal, { $($field:ident: $type:ty),* }, |$b:ident, $out:ident| $body:block) => {
        $(#[$doc])*
        #[derive(Clone, Copy, AnyBitPattern)]
        #[repr(C)]
        struct $name {
            $($field: $type,)*
        }

        impl Block<$n> for $name {
            #[inline(always)]
            fn decode(&self, $out: &mut [f32; $n]) {
                let $b = self;
                $body
            }
        }
    };
}

block!(F32, 1, { value: f32 }, |b, out| { *out = [b.value]; });
block!(F16, 1, { bits: u16 }, |b, out| { *out = [half_to_f32(b.bits)]; });
block!(Bf16, 1, { bits: u16 }, |b, out| { *out = [f32::from_bits((b.bits as u32) << 16)]; });

block!(
    /// `d (q - 8)`; byte `i` holds element `i` below element `i + 16`, as in all of the following.
    Q4_0, 32, { d: u16, qs: [u8; 16] }, |b, out| {
        let d = half_to_f32(b.d);
        for i in 0..16 {
            out[i] = ((b.qs[i] & 15) as i32 - 8) as f32 * d;
            out[i + 16] = ((b.qs[i] >> 4) as i32 - 8) as f32 * d;
        }
    }
);

block!(
    /// `d q + m`.
    Q4_1, 32, { d: u16, m: u16, qs: [u8; 16] }, |b, out| {
        let (d, m) = (half_to_f32(b.d), half_to_f32(b.m));
        for i in 0..16 {
            out[i] = (b.qs[i] & 15) as f32 * d + m;
            out[i + 16] = (b.qs[i] >> 4) as f32 * d + m;
        }
    }
);

block!(
    /// `d (q - 16)`, the fifth bits of all elements in one word.
    Q5_0, 32, { d: u16, qh: [u8; 4], qs: [u8; 16] }, |b, out| {
        let (d, qh) = (half_to_f32(b.d), u32::from_le_bytes(b.qh));
        for i in 0..16 {
            out[i] = (fifth(b.qs[i] & 15, qh, i) as i32 - 16) as f32 * d;
            out[i + 16] = (fifth(b.qs[i] >> 4, qh, i + 16) as i32 - 16) as f32 * d;
        }
    }
);

block!(
    /// `d q + m`.
    Q5_1, 32, { d: u16, m: u16, qh: [u8; 4], qs: [u8; 16] }, |b, out| {
        let (d, m, qh) = (half_to_f32(b.d), half_to_f32(b.m), u32::from_le_bytes(b.qh));
        for i in 0..16 {
            out[i] = fifth(b.qs[i] & 15, qh, i) as f32 * d + m;
            out[i + 16] = fifth(b.qs[i] >> 4, qh, i + 16) as f32 * d + m;
        }
    }
);

block!(
    /// `d q`.
    Q8_0, 32, { d: u16, qs: [i8; 32] }, |b, out| {
        let d = half_to_f32(b.d);
        for i in 0..32 {
            out[i] = b.qs[i] as f32 * d;
        }
    }
);

block!(
    /// Eight sub-blocks of 32, each `d s q - dmin m` with 6-bit `s` and `m`; a byte holds two sub-blocks.
    Q4K, 256, { d: u16, dmin: u16, scales: [u8; 12], qs: [u8; 128] }, |b, out| {
        let (d, dmin) = (half_to_f32(b.d), half_to_f32(b.dmin));
        for sub in 0..8 {
            let (scale, min) = scale_min(sub, &b.scales);
            let (scale, min) = (d * scale as f32, dmin * min as f32);
            for i in 0..32 {
                let q = (b.qs[sub / 2 * 32 + i] >> (sub % 2 * 4)) & 15;
                out[sub * 32 + i] = scale * q as f32 - min;
            }
        }
    }
);

block!(
    /// As [`Q4K`], with bit `sub` of `qh` above the four.
    Q5K, 256, { d: u16, dmin: u16, scales: [u8; 12], qh: [u8; 32], qs: [u8; 128] }, |b, out| {
        let (d, dmin) = (half_to_f32(b.d), half_to_f32(b.dmin));
        for sub in 0..8 {
            let (scale, min) = scale_min(sub, &b.scales);
            let (scale, min) = (d * scale as f32, dmin * min as f32);
            for i in 0..32 {
                let q = (b.qs[sub / 2 * 32 + i] >> (sub % 2 * 4)) & 15 | ((b.qh[i] >> sub) & 1) << 4;
                out[sub * 32 + i] = scale * q as f32 - min;
            }
        }
    }
);

block!(
    /// Sixteen sub-blocks of 16, each `d s (q - 32)` with an 8-bit `s`; the upper two bits of `q` lie apart.
    Q6K, 256, { ql: [u8; 128], qh: [u8; 64], scales: [i8; 16], d: u16 }, |b, out| {
        let d = half_to_f32(b.d);
        for sub in 0..16 {
            // 128 elements take 64 bytes of ql, which hold elements 64 apart, and 32 bytes of qh, which hold four.
            let (half, quarter, side) = (sub / 8, sub % 8 / 2, sub % 2 * 16);
            let scale = d * b.scales[sub] as f32;
            for i in 0..16 {
                let low = (b.ql[half * 64 + quarter % 2 * 32 + side + i] >> (quarter / 2 * 4)) & 15;
                let high = (b.qh[half * 32 + side + i] >> (quarter * 2)) & 3;
                out[sub * 16 + i] = scale * ((low | high << 4) as i32 - 32) as f32;
            }
        }
    }
);

/// Puts bit `i` of `qh` above four bits.
#[inline(always)]
fn fifth(low: u8, qh: u32, i: usize) -> u32 {
    low as u32 | ((qh >> i) & 1) << 4
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
