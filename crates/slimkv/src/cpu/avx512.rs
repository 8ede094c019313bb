//! AVX-512: sixteen f32 in a register.

use std::arch::x86_64::*;

use super::math::exp2_fraction;
use super::{Kernel, Simd};

/// The proof that the machine has it.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// Runs `kernel`, compiled for this instruction set.
///
/// # Safety
///
/// The machine has the features that are named here.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt"
)]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

// SAFETY of all the intrinsics below: a value of `Avx512` exists only inside `run`, whose caller knows that the machine
// has the instructions; pointers are valid for `LANES` elements by the contract of `Simd`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    const LANES: usize = 16;
    const BLOCK: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        // The form without a rounding argument can take its operand from memory, which saves a shuffle.
        unsafe { _mm512_cvt_roundph_ps::<_MM_FROUND_CUR_DIRECTION>(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: __m512) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn finite_or(self, x: __m512, otherwise: __m512) -> __m512 {
        unsafe {
            let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(x), _mm512_set1_ps(f32::INFINITY));
            _mm512_mask_blend_ps(finite, otherwise, x)
        }
    }
    #[inline(always)]
    fn select_eq(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    fn round(self, x: __m512) -> __m512i {
        unsafe { _mm512_cvtps_epi32(x) }
    }
    #[inline(always)]
    fn to_f(self, x: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    fn exp2i(self, n: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(n, _mm512_set1_epi32(127)))) }
    }
    #[inline(always)]
    fn exp2_nonpositive(self, x: __m512) -> __m512 {
        // The scaling instruction rounds to zero far below, keeps NaN, and takes -inf.
        unsafe {
            let floor = _mm512_max_ps(_mm512_set1_ps(-200.0), x);
            let n = _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(floor);
            _mm512_scalef_ps(exp2_fraction(self, _mm512_sub_ps(floor, n)), n)
        }
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const i32) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut i32, x: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), x) }
    }
    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    fn shift_right(self, x: __m512i, by: u32) -> __m512i {
        unsafe { _mm512_srlv_epi32(x, _mm512_set1_epi32((by & 31) as i32)) }
    }
    #[inline(always)]
    fn permute(self, x: __m512i, index: __m512i) -> __m512i {
        unsafe { _mm512_permutexvar_epi32(index, x) }
    }
    #[inline(always)]
    fn permute_f(self, x: __m512, index: __m512i) -> __m512 {
        unsafe { _mm512_permutexvar_ps(index, x) }
    }
    #[inline(always)]
    fn low_halves(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_mask_blend_epi16(0xAAAA_AAAA, a, _mm512_slli_epi32::<16>(b)) }
    }
    #[inline(always)]
    fn high_halves(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_mask_blend_epi16(0xAAAA_AAAA, _mm512_srli_epi32::<16>(a), b) }
    }
    #[inline(always)]
    fn dot_halves(self, acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_dpwssd_epi32(acc, a, b) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_u8(self, p: *mut u8, x: __m512i) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(x)) }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // The first-level cache has too few places for lines on their way from memory.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(x) }
    }
    #[inline(always)]
    fn max_lane(self, x: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(x) }
    }
    #[inline(always)]
    fn sum4(self, x: [__m512; 4]) -> [f32; 4] {
        unsafe {
            let [a, b, c, d] = x;
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let lanes = _mm512_add_ps(
                _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
            );
            let half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
            let quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), quarter);
            sums
        }
    }
}
