//! Float arithmetic whose bits are the same on every device.

use cubecl::prelude::*;
use half::f16;

use crate::DType;

/// A stand-in for minus infinity that survives compilers which assume that there are no infinities.
pub(crate) const LOWEST: f32 = -3.0e38;

/// Keeps a product from being contracted with the addition that follows. `zero` is a scalar argument of the kernel,
/// always 0, which the compiler does not know.
#[cube]
pub(crate) fn pin(x: f32, zero: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(x) ^ zero)
}

/// Rounds half to even. The driver's own rounding may break ties either way; this one has only exact steps.
#[cube]
pub(crate) fn rint_exact(x: f32) -> f32 {
    let below = f32::floor(x);
    let rest = x - below;
    let odd = below - 2.0f32 * f32::floor(below * 0.5f32);
    select(rest > 0.5f32 || (rest == 0.5f32 && odd > 0.5f32), below + 1.0f32, below)
}

/// What a score weighs beside the highest: nothing where it is hidden, that is [`LOWEST`]. NaN is not, and weighs NaN.
#[cube]
pub(crate) fn weight_of(score: f32, highest: f32) -> f32 {
    select(score == f32::new(LOWEST), 0.0f32, f32::exp(score - highest))
}

/// Whether a float is neither infinite nor NaN, read from its bits.
#[cube]
pub(crate) fn is_finite(x: f32) -> bool {
    (u32::reinterpret(x) & 0x7F80_0000u32) != 0x7F80_0000u32
}

/// Whether a float is 0. Asked this way round because SPIR-V's `!=` is false of NaN.
#[cube]
pub(crate) fn is_zero(x: f32) -> bool {
    x == 0.0f32
}

/// Whether a float is NaN, read from its bits.
#[cube]
pub(crate) fn is_nan(x: f32) -> bool {
    (u32::reinterpret(x) & 0x7FFF_FFFFu32) > 0x7F80_0000u32
}

/// The value of a bf16, whatever the device knows of that type.
#[cube]
pub(crate) fn from_bf16(bits: u32) -> f32 {
    f32::reinterpret(bits << 16u32)
}

/// The bits of the nearest bf16, ties to even.
#[cube]
pub(crate) fn to_bf16(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let rounded = (bits + 0x7FFFu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
    select(is_nan(x), (bits >> 16u32) | 0x40u32, rounded)
}

/// The value of an f16.
#[cube]
pub(crate) fn from_f16(bits: u32) -> f32 {
    f32::cast_from(f16::reinterpret(u16::cast_from(bits)))
}

/// The bits of the nearest f16, ties to even.
#[cube]
pub(crate) fn to_f16(x: f32) -> u32 {
    u32::cast_from(u16::reinterpret(f16::cast_from(x)))
}

/// The bits of a float as `dtype` stores it.
#[cube]
pub(crate) fn stored<O: Numeric>(x: f32, #[comptime] dtype: DType) -> O {
    match comptime!(dtype) {
        DType::F16 => O::cast_from(to_f16(x)),
        DType::BF16 => O::cast_from(to_bf16(x)),
        _ => O::cast_from(u32::reinterpret(x)),
    }
}
