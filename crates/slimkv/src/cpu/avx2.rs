//! AVX2 with FMA and F16C, and with AVX-VNNI where there is that: eight f32 in a register.

use std::arch::x86_64::*;

use super::{Kernel, Simd};

/// The proof that the machine has it. `VNNI`: products of halves and their sum are one instruction.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool>(());

/// Runs `kernel`, compiled for this instruction set.
///
/// # Safety
///
/// The machine has the features that are named here.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<false>(()))
}

/// Runs `kernel`, compiled for this instruction set with AVX-VNNI.
///
/// # Safety
///
/// The machine has the features that are named here.
#[target_feature(enable = "avxvnni,avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
pub(crate) unsafe fn run_vnni<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<true>(()))
}

// SAFETY of all the intrinsics below: a value of `Avx2` exists only inside `run` and `run_vnni`, whose caller knows that the
// machine has the instructions; pointers are valid for `LANES` elements by the contract of `Simd`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type F = __m256;
    type I = __m256i;
    const LANES: usize = 8;
    const BLOCK: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: __m256) {
        unsafe { _mm256_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: __m256) {
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn finite_or(self, x: __m256, otherwise: __m256) -> __m256 {
        unsafe {
            let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), x);
            let finite = _mm256_cmp_ps::<_CMP_LT_OQ>(magnitude, _mm256_set1_ps(f32::INFINITY));
            _mm256_blendv_ps(otherwise, x, finite)
        }
    }
    #[inline(always)]
    fn select_eq(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b)) }
    }
    #[inline(always)]
    fn round(self, x: __m256) -> __m256i {
        unsafe { _mm256_cvtps_epi32(x) }
    }
    #[inline(always)]
    fn to_f(self, x: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(x) }
    }
    #[inline(always)]
    fn exp2i(self, n: __m256i) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)))) }
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const i32) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut i32, x: __m256i) {
        unsafe { _mm256_storeu_si256(p.cast(), x) }
    }
    #[inline(always)]
    fn and(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_and_si256(a, b) }
    }
    #[inline(always)]
    fn shift_right(self, x: __m256i, by: u32) -> __m256i {
        // Below 32, which the compiler must know: else it makes sure that larger shifts give zeros.
        unsafe { _mm256_srlv_epi32(x, _mm256_set1_epi32((by & 31) as i32)) }
    }
    #[inline(always)]
    fn permute(self, x: __m256i, index: __m256i) -> __m256i {
        unsafe { _mm256_permutevar8x32_epi32(x, index) }
    }
    #[inline(always)]
    fn permute_f(self, x: __m256, index: __m256i) -> __m256 {
        unsafe { _mm256_permutevar8x32_ps(x, index) }
    }
    #[inline(always)]
    fn low_halves(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_blend_epi16::<0xAA>(a, _mm256_slli_epi32::<16>(b)) }
    }
    #[inline(always)]
    fn high_halves(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_blend_epi16::<0xAA>(_mm256_srli_epi32::<16>(a), b) }
    }
    #[inline(always)]
    fn dot_halves(self, acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe {
            if VNNI { _mm256_dpwssd_avx_epi32(acc, a, b) } else { _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)) }
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> __m256i {
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_u8(self, p: *mut u8, x: __m256i) {
        unsafe {
            let low = _mm256_and_si256(x, _mm256_set1_epi32(0xFF));
            let words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
            _mm_storel_epi64(p.cast(), _mm_packus_epi16(words, words))
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    fn sum(self, x: __m256) -> f32 {
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    fn max_lane(self, x: __m256) -> f32 {
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    fn sum4(self, x: [__m256; 4]) -> [f32; 4] {
        unsafe {
            let [a, b, c, d] = x;
            // On Zen 3 a `hadd` takes two cycles, its shuffles and its addition by themselves one.
            let ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
            let cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
            let (straight, crossed) = (_mm256_blend_pd::<0b1010>(ab, cd), _mm256_shuffle_pd::<0b0101>(ab, cd));
            let lanes = _mm256_add_ps(_mm256_castpd_ps(straight), _mm256_castpd_ps(crossed));
            let mut sums = [0.0; 4];
            let sum = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
            _mm_storeu_ps(sums.as_mut_ptr(), sum);
            sums
        }
    }
}
