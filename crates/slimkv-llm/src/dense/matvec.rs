//! Dot products of one decoded weight row with a few rows of activations.

/// The instruction sets for which the loops of this module are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the target always has: SSE2, NEON.
    Baseline,
}

/// The widest instruction set of this machine.
#[inline]
pub(super) fn isa() -> Isa {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
            return Isa::Avx512;
        }
        if has!("avx2") && has!("fma") {
            return Isa::Avx2;
        }
    }
    Isa::Baseline
}

/// `out[r]` becomes the dot product of `weight` with row `r` of `x`. The order of additions is fixed by the length alone.
pub(super) fn dots(weight: &[f32], x: &[f32], out: &mut [f32]) {
    match isa() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` has found AVX-512 F, BW, DQ and VL.
        Isa::Avx512 => unsafe { dots_avx512(weight, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` has found AVX2 and FMA.
        Isa::Avx2 => unsafe { dots_avx2(weight, x, out) },
        // NEON has a fused multiply-add; SSE2 would call a library function for it.
        Isa::Baseline => dots_with::<{ cfg!(target_arch = "aarch64") }>(weight, x, out),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn dots_avx512(weight: &[f32], x: &[f32], out: &mut [f32]) {
    dots_with::<true>(weight, x, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn dots_avx2(weight: &[f32], x: &[f32], out: &mut [f32]) {
    dots_with::<true>(weight, x, out);
}

/// The dot product of two rows.
pub(super) fn one_dot(a: &[f32], b: &[f32]) -> f32 {
    let mut out = [0.0];
    dots(a, b, &mut out);
    out[0]
}

#[inline(always)]
fn dots_with<const FUSED: bool>(weight: &[f32], x: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks_exact(weight.len()).zip(out) {
        *out = dot::<FUSED>(weight, x);
    }
}

/// Accumulators: four registers of 16 lanes hide the latency of the fused multiply-add.
const LANES: usize = 64;

#[inline(always)]
fn dot<const FUSED: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let ((a_chunks, a_rest), (b_chunks, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for i in 0..LANES {
            sums[i] = if FUSED { a[i].mul_add(b[i], sums[i]) } else { a[i] * b[i] + sums[i] };
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum = if FUSED { a.mul_add(*b, *sum) } else { a * b + *sum };
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}
