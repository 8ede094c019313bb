//! Elementary functions over vectors.

use super::Simd;

/// `log2(e)`: attention works in powers of two.
pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// `2^x` for `x <= 0`, within 2 ulp; 0 for `-inf` and wherever `2^x` is no normal number or close to it, NaN for NaN.
#[inline(always)]
pub(crate) fn exp2_nonpositive<S: Simd>(s: S, x: S::F) -> S::F {
    s.exp2_nonpositive(x)
}

/// `2^x` from the parts before and after the point.
#[inline(always)]
pub(super) fn exp2_by_parts<S: Simd>(s: S, x: S::F) -> S::F {
    let floor = s.splat(-126.0);
    let clamped = s.max(floor, x);
    let n = s.round(clamped);
    let value = s.mul(exp2_fraction(s, s.sub(clamped, s.to_f(n))), s.exp2i(n));
    s.select_eq(clamped, floor, s.splat(0.0), value)
}

/// `2^f` on [-0.5, 0.5] (Cephes).
#[inline(always)]
pub(super) fn exp2_fraction<S: Simd>(s: S, f: S::F) -> S::F {
    const C: [f32; 6] = [1.535_336_2e-4, 1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1];
    let mut p = s.splat(C[0]);
    for c in &C[1..] {
        p = s.fma(p, f, s.splat(*c));
    }
    s.fma(p, f, s.splat(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Isa, Kernel};

    struct Exp2<'a>(&'a mut [f32]);

    impl Kernel for Exp2<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for chunk in self.0.chunks_exact_mut(S::LANES) {
                // SAFETY: the chunk has `LANES` elements.
                unsafe { s.store(chunk.as_mut_ptr(), exp2_nonpositive(s, s.load(chunk.as_ptr()))) }
            }
        }
    }

    #[test]
    fn exp2_is_right_to_two_ulp_and_zero_for_minus_infinity() {
        for isa in Isa::here() {
            let x: Vec<f32> = (0..4096).map(|i| -(i as f32) * 0.03).collect();
            let mut y = x.clone();
            isa.run(Exp2(&mut y));
            for (x, y) in x.iter().zip(y) {
                let exact = f64::from(*x).exp2();
                assert!((f64::from(y) - exact).abs() <= 2.4e-7 * exact, "{isa}: 2^{x} = {y}, not {exact}");
            }
            let mut far = [f32::NEG_INFINITY; 16];
            far[1] = -1e30;
            isa.run(Exp2(&mut far));
            assert_eq!(far, [0.0; 16], "{isa}");
        }
    }
}
