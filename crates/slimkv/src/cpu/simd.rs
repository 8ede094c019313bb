//! The trait that every instruction set implements, and what an algorithm over it looks like.

/// An algorithm, written once and compiled for each instruction set by [`Isa::run`](super::Isa::run).
pub(crate) trait Kernel {
    /// What it returns.
    type Output;

    /// The algorithm. Implementations are `#[inline(always)]`, as is all that they call, so that the code ends up in a
    /// function that is compiled for the instruction set.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// A vector of f32 and one of i32, both of [`LANES`](Simd::LANES) elements.
///
/// A value of the type is the proof that the machine has the instructions. Loads and stores take pointers to `LANES`
/// elements of any alignment.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// `LANES` f32.
    type F: Copy;
    /// `LANES` i32.
    type I: Copy;
    /// Elements of a vector: 4, 8 or 16.
    const LANES: usize;
    /// Vectors that a register block of four rows spans without spilling.
    const BLOCK: usize;

    fn splat(self, x: f32) -> Self::F;
    unsafe fn load(self, p: *const f32) -> Self::F;
    unsafe fn store(self, p: *mut f32, x: Self::F);
    /// Loads f16, given by their bits.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// Loads bf16, given by their bits.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F;
    /// Rounds to f16, to nearest, ties to even.
    unsafe fn store_f16(self, p: *mut u16, x: Self::F);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// Correctly rounded.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the machine can.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The smaller one; `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger one; `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `x` where it is finite, else `otherwise`.
    fn finite_or(self, x: Self::F, otherwise: Self::F) -> Self::F;
    /// `yes` where `a == b`, else `no`.
    fn select_eq(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;

    /// Rounds to the nearest integer, ties to even.
    fn round(self, x: Self::F) -> Self::I;
    fn to_f(self, x: Self::I) -> Self::F;
    /// `2^n` for `-126 <= n <= 127`.
    fn exp2i(self, n: Self::I) -> Self::F;
    /// [`exp2_nonpositive`](super::math::exp2_nonpositive) in the best way of this machine.
    #[inline(always)]
    fn exp2_nonpositive(self, x: Self::F) -> Self::F {
        super::math::exp2_by_parts(self, x)
    }
    fn splat_i(self, x: i32) -> Self::I;
    unsafe fn load_i(self, p: *const i32) -> Self::I;
    unsafe fn store_i(self, p: *mut i32, x: Self::I);
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// Shifts zeros in from above, by less than 32.
    fn shift_right(self, x: Self::I, by: u32) -> Self::I;
    /// `x[index[i]]`, with every index below `LANES`.
    fn permute(self, x: Self::I, index: Self::I) -> Self::I;
    /// The same for floats.
    fn permute_f(self, x: Self::F, index: Self::I) -> Self::F;
    /// In each element the low 16 bits of `a`, then those of `b`.
    fn low_halves(self, a: Self::I, b: Self::I) -> Self::I;
    /// In each element the high 16 bits of `a`, then those of `b`.
    fn high_halves(self, a: Self::I, b: Self::I) -> Self::I;
    /// `acc` plus the products of the low and of the high 16 bits, both signed.
    fn dot_halves(self, acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    unsafe fn load_u8(self, p: *const u8) -> Self::I;
    /// Stores the low byte of each element.
    unsafe fn store_u8(self, p: *mut u8, x: Self::I);

    /// Asks for the cache line at `p`, which need not exist, where the machine can.
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    fn sum(self, x: Self::F) -> f32;
    fn max_lane(self, x: Self::F) -> f32;
    /// The sums of four vectors.
    #[inline(always)]
    fn sum4(self, x: [Self::F; 4]) -> [f32; 4] {
        x.map(
            #[inline(always)]
            |x| self.sum(x),
        )
    }
}
