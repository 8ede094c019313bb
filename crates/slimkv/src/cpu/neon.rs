//! NEON: four f32 in a register.

use std::arch::aarch64::*;

use super::{Kernel, Simd};

/// The proof that the machine has it.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// Runs `kernel`, compiled for this instruction set.
///
/// # Safety
///
/// The machine has the features that are named here.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon(()))
}

// SAFETY of all the intrinsics below: a value of `Neon` exists only inside `run`, whose caller knows that the machine
// has the instructions; pointers are valid for `LANES` elements by the contract of `Simd`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Neon {
    type F = float32x4_t;
    type I = int32x4_t;
    const LANES: usize = 4;
    const BLOCK: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: float32x4_t) {
        unsafe { vst1q_f32(p, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> float32x4_t {
        unsafe { f16_to_f32(vld1_u16(p)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: float32x4_t) {
        unsafe {
            let mut lanes = [0.0f32; 4];
            vst1q_f32(lanes.as_mut_ptr(), x);
            p.cast::<[u16; 4]>().write_unaligned(lanes.map(|x| half::f16::from_f32(x).to_bits()))
        }
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    fn min(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }
    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    fn finite_or(self, x: float32x4_t, otherwise: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vcltq_f32(vabsq_f32(x), vdupq_n_f32(f32::INFINITY)), x, otherwise) }
    }
    #[inline(always)]
    fn select_eq(self, a: float32x4_t, b: float32x4_t, yes: float32x4_t, no: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vceqq_f32(a, b), yes, no) }
    }
    #[inline(always)]
    fn round(self, x: float32x4_t) -> int32x4_t {
        unsafe { vcvtnq_s32_f32(x) }
    }
    #[inline(always)]
    fn to_f(self, x: int32x4_t) -> float32x4_t {
        unsafe { vcvtq_f32_s32(x) }
    }
    #[inline(always)]
    fn exp2i(self, n: int32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)))) }
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> int32x4_t {
        unsafe { vdupq_n_s32(x) }
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const i32) -> int32x4_t {
        unsafe { vld1q_s32(p) }
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut i32, x: int32x4_t) {
        unsafe { vst1q_s32(p, x) }
    }
    #[inline(always)]
    fn and(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        unsafe { vandq_s32(a, b) }
    }
    #[inline(always)]
    fn shift_right(self, x: int32x4_t, by: u32) -> int32x4_t {
        unsafe { vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), vdupq_n_s32(-(by as i32)))) }
    }
    #[inline(always)]
    fn permute(self, x: int32x4_t, index: int32x4_t) -> int32x4_t {
        unsafe {
            // The bytes of element `i` are 4 i to 4 i + 3.
            let bytes = vmlaq_s32(vdupq_n_s32(0x0302_0100), index, vdupq_n_s32(0x0404_0404));
            vreinterpretq_s32_s8(vqtbl1q_s8(vreinterpretq_s8_s32(x), vreinterpretq_u8_s32(bytes)))
        }
    }
    #[inline(always)]
    fn permute_f(self, x: float32x4_t, index: int32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_s32(self.permute(vreinterpretq_s32_f32(x), index)) }
    }
    #[inline(always)]
    fn low_halves(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        unsafe { vsliq_n_s32::<16>(a, b) }
    }
    #[inline(always)]
    fn high_halves(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        unsafe { vsriq_n_s32::<16>(b, a) }
    }
    #[inline(always)]
    fn dot_halves(self, acc: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        unsafe {
            let (a, b) = (vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b));
            let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
            vaddq_s32(acc, vpaddq_s32(low, vmull_high_s16(a, b)))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> int32x4_t {
        unsafe {
            let bytes = vreinterpret_u8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))))
        }
    }
    #[inline(always)]
    unsafe fn store_u8(self, p: *mut u8, x: int32x4_t) {
        unsafe {
            let halves = vmovn_u32(vreinterpretq_u32_s32(x));
            let bytes = vmovn_u16(vcombine_u16(halves, halves));
            p.cast::<u32>().write_unaligned(vget_lane_u32::<0>(vreinterpret_u32_u8(bytes)))
        }
    }
    #[inline(always)]
    fn sum(self, x: float32x4_t) -> f32 {
        unsafe { vaddvq_f32(x) }
    }
    #[inline(always)]
    fn max_lane(self, x: float32x4_t) -> f32 {
        unsafe { vmaxvq_f32(x) }
    }
    #[inline(always)]
    fn sum4(self, x: [float32x4_t; 4]) -> [f32; 4] {
        unsafe {
            let [a, b, c, d] = x;
            let mut sums = [0.0; 4];
            vst1q_f32(sums.as_mut_ptr(), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
            sums
        }
    }
}

/// Widens four f16, exactly, without the half-precision extension that stable Rust does not offer: shifts exponent and
/// mantissa into place and rebiases by a multiplication, which also normalises denormals.
#[inline(always)]
fn f16_to_f32(bits: uint16x4_t) -> float32x4_t {
    // SAFETY: NEON is part of the architecture.
    unsafe {
        let x = vmovl_u16(bits);
        let sign = vshlq_n_u32::<16>(vandq_u32(x, vdupq_n_u32(0x8000)));
        let magnitude = vandq_u32(x, vdupq_n_u32(0x7FFF));
        let rebias = vdupq_n_f32(f32::from_bits((254 - 15) << 23));
        let shifted = vreinterpretq_f32_u32(vshlq_n_u32::<13>(magnitude));
        let value = vreinterpretq_u32_f32(vmulq_f32(shifted, rebias));
        let special = vcgeq_u32(magnitude, vdupq_n_u32(0x7C00));
        let value = vorrq_u32(value, vandq_u32(special, vdupq_n_u32(0x7F80_0000)));
        vreinterpretq_f32_u32(vorrq_u32(value, sign))
    }
}
