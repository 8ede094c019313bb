//! Plain Rust, in arrays that a compiler may keep in whatever registers there are.

use half::{bf16, f16};

use super::{Kernel, Simd};

/// The instruction set of every machine.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

const N: usize = 4;

/// Runs `kernel` in plain Rust.
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Scalar)
}

#[inline(always)]
fn zip<A: Copy, B: Copy, C>(a: [A; N], b: [B; N], f: impl Fn(A, B) -> C) -> [C; N] {
    std::array::from_fn(
        #[inline(always)]
        |i| f(a[i], b[i]),
    )
}

// SAFETY of the pointer accesses in this module: the contract of `Simd` is that `p` is valid for `LANES` elements.
impl Simd for Scalar {
    type F = [f32; N];
    type I = [i32; N];
    const LANES: usize = N;
    const BLOCK: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; N] {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> [f32; N] {
        // SAFETY: see the module.
        unsafe { p.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: [f32; N]) {
        // SAFETY: see the module.
        unsafe { p.cast::<[f32; N]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> [f32; N] {
        // SAFETY: see the module.
        unsafe { p.cast::<[u16; N]>().read_unaligned() }.map(|x| f16::from_bits(x).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> [f32; N] {
        // SAFETY: see the module.
        unsafe { p.cast::<[u16; N]>().read_unaligned() }.map(|x| bf16::from_bits(x).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: [f32; N]) {
        // SAFETY: see the module.
        unsafe { p.cast::<[u16; N]>().write_unaligned(x.map(|x| f16::from_f32(x).to_bits())) }
    }

    #[inline(always)]
    fn add(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn min(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn finite_or(self, x: [f32; N], otherwise: [f32; N]) -> [f32; N] {
        zip(x, otherwise, |x, otherwise| if x.is_finite() { x } else { otherwise })
    }
    #[inline(always)]
    fn select_eq(self, a: [f32; N], b: [f32; N], yes: [f32; N], no: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if a[i] == b[i] { yes[i] } else { no[i] })
    }

    #[inline(always)]
    fn round(self, x: [f32; N]) -> [i32; N] {
        x.map(|x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    fn to_f(self, x: [i32; N]) -> [f32; N] {
        x.map(|x| x as f32)
    }
    #[inline(always)]
    fn exp2i(self, n: [i32; N]) -> [f32; N] {
        n.map(|n| f32::from_bits(((n + 127) as u32) << 23))
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> [i32; N] {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const i32) -> [i32; N] {
        // SAFETY: see the module.
        unsafe { p.cast::<[i32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut i32, x: [i32; N]) {
        // SAFETY: see the module.
        unsafe { p.cast::<[i32; N]>().write_unaligned(x) }
    }
    #[inline(always)]
    fn and(self, a: [i32; N], b: [i32; N]) -> [i32; N] {
        zip(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn shift_right(self, x: [i32; N], by: u32) -> [i32; N] {
        x.map(|x| (x as u32 >> (by & 31)) as i32)
    }
    #[inline(always)]
    fn permute(self, x: [i32; N], index: [i32; N]) -> [i32; N] {
        index.map(|i| x[i as usize])
    }
    #[inline(always)]
    fn permute_f(self, x: [f32; N], index: [i32; N]) -> [f32; N] {
        index.map(|i| x[i as usize])
    }
    #[inline(always)]
    fn low_halves(self, a: [i32; N], b: [i32; N]) -> [i32; N] {
        zip(a, b, |a, b| a & 0xFFFF | b << 16)
    }
    #[inline(always)]
    fn high_halves(self, a: [i32; N], b: [i32; N]) -> [i32; N] {
        zip(a, b, |a, b| (a as u32 >> 16) as i32 | b & !0xFFFF)
    }
    #[inline(always)]
    fn dot_halves(self, acc: [i32; N], a: [i32; N], b: [i32; N]) -> [i32; N] {
        let product = |a: i32, b: i32| i32::from(a as i16) * i32::from(b as i16) + (a >> 16) * (b >> 16);
        zip(acc, zip(a, b, product), |acc, x| acc + x)
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> [i32; N] {
        // SAFETY: see the module.
        unsafe { p.cast::<[u8; N]>().read_unaligned() }.map(i32::from)
    }
    #[inline(always)]
    unsafe fn store_u8(self, p: *mut u8, x: [i32; N]) {
        // SAFETY: see the module.
        unsafe { p.cast::<[u8; N]>().write_unaligned(x.map(|x| x as u8)) }
    }

    #[inline(always)]
    fn sum(self, x: [f32; N]) -> f32 {
        (x[0] + x[2]) + (x[1] + x[3])
    }
    #[inline(always)]
    fn max_lane(self, x: [f32; N]) -> f32 {
        x[0].max(x[1]).max(x[2].max(x[3]))
    }
}
