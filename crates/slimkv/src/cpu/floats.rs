//! Float tensors of any of the three dtypes, read and written as f32.

use half::{bf16, f16};

use super::{Kernel, Simd};
use crate::{DType, FloatElement, Result, Tensor};

/// The elements of a float tensor, or a part of them.
#[derive(Clone, Copy)]
pub(crate) enum Floats<'a> {
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    F32(&'a [f32]),
}

impl<'a> Floats<'a> {
    /// All elements of a CPU tensor that was checked to hold floats.
    pub fn of(tensor: &'a Tensor) -> Result<Self> {
        Ok(match tensor.dtype() {
            DType::F16 => Floats::F16(tensor.as_slice()?),
            DType::BF16 => Floats::BF16(tensor.as_slice()?),
            _ => Floats::F32(tensor.as_slice()?),
        })
    }

    /// `len` elements from `at` on.
    #[inline(always)]
    pub fn part(self, at: usize, len: usize) -> Self {
        match self {
            Floats::F16(x) => Floats::F16(&x[at..at + len]),
            Floats::BF16(x) => Floats::BF16(&x[at..at + len]),
            Floats::F32(x) => Floats::F32(&x[at..at + len]),
        }
    }

    #[inline(always)]
    pub fn len(self) -> usize {
        match self {
            Floats::F16(x) => x.len(),
            Floats::BF16(x) => x.len(),
            Floats::F32(x) => x.len(),
        }
    }

    /// Bytes of an element.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn element_size(self) -> usize {
        if matches!(self, Floats::F32(_)) { 4 } else { 2 }
    }

    #[inline(always)]
    pub fn get(self, i: usize) -> f32 {
        match self {
            Floats::F16(x) => x[i].to_f32(),
            Floats::BF16(x) => x[i].to_f32(),
            Floats::F32(x) => x[i],
        }
    }

    /// The address of element `i`, to be prefetched.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn address(self, i: usize) -> *const u8 {
        match self {
            Floats::F16(x) => x.as_ptr().wrapping_add(i).cast(),
            Floats::BF16(x) => x.as_ptr().wrapping_add(i).cast(),
            Floats::F32(x) => x.as_ptr().wrapping_add(i).cast(),
        }
    }

    /// Writes every element to `out`, which is at least as long, as f32.
    #[inline(always)]
    pub fn widen<S: Simd>(self, s: S, out: &mut [f32]) {
        let n = self.len();
        let out = &mut out[..n];
        let whole = n / S::LANES * S::LANES;
        // SAFETY: `i + LANES <= whole <= n`, the length of both slices.
        unsafe {
            match self {
                Floats::F16(x) => {
                    for i in (0..whole).step_by(S::LANES) {
                        s.store(out.as_mut_ptr().add(i), s.load_f16(x.as_ptr().add(i).cast()));
                    }
                }
                Floats::BF16(x) => {
                    for i in (0..whole).step_by(S::LANES) {
                        s.store(out.as_mut_ptr().add(i), s.load_bf16(x.as_ptr().add(i).cast()));
                    }
                }
                Floats::F32(x) => out[..whole].copy_from_slice(&x[..whole]),
            }
        }
        for i in whole..n {
            out[i] = self.get(i);
        }
    }
}

/// Rounds f32 to another float type, to nearest, ties to even.
#[inline(always)]
pub(crate) fn narrow<S: Simd, T: FloatElement>(s: S, x: &[f32], out: &mut [T]) {
    let n = x.len().min(out.len());
    let mut done = 0;
    if T::DTYPE == DType::F16 {
        done = n / S::LANES * S::LANES;
        for i in (0..done).step_by(S::LANES) {
            // SAFETY: `i + LANES <= n`, and `T` is f16.
            unsafe { s.store_f16(out.as_mut_ptr().add(i).cast(), s.load(x.as_ptr().add(i))) }
        }
    }
    for (out, &x) in out[done..n].iter_mut().zip(&x[done..n]) {
        *out = T::from_f32(x);
    }
}

/// [`Floats::widen`] as a kernel.
pub(crate) struct Widen<'a> {
    pub from: Floats<'a>,
    pub to: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.from.widen(s, self.to);
    }
}

/// [`narrow`] as a kernel.
pub(crate) struct Narrow<'a, T> {
    pub from: &'a [f32],
    pub to: &'a mut [T],
}

impl<T: FloatElement> Kernel for Narrow<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        narrow(s, self.from, self.to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn every_f16_widens_exactly_and_narrows_back_on_every_instruction_set() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for isa in Isa::here() {
            let mut wide = vec![0.0; all.len()];
            isa.run(Widen { from: Floats::F16(&all), to: &mut wide });
            let mut back = vec![f16::ZERO; all.len()];
            isa.run(Narrow { from: &wide, to: &mut back });
            for ((x, w), b) in all.iter().zip(&wide).zip(&back) {
                if x.is_nan() {
                    assert!(w.is_nan() && b.is_nan(), "{isa}");
                } else {
                    assert_eq!((w.to_bits(), b.to_bits()), (x.to_f32().to_bits(), x.to_bits()), "{isa}");
                }
            }
        }
    }
}
