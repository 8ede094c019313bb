//! Quantising in kernels, bit for bit as [`oracle`](super::super::oracle) does it.
//!
//! Where groups divide evenly into blocks, [`one_pass`](super::one_pass) does it. These kernels do it for any shape, reading twice.
//! A unit owns the codes of one word for a whole group of tokens, or one group of channels of one row: it reads its
//! elements once for the extremes and once, from the cache, for the codes.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::one_pass::{Blocks, one_pass_channels, one_pass_tokens};
use crate::format::affine::Axis;
use crate::format::bits::codes_per_word;
use crate::format::gpu::{BLOCK, Side, bound, float_at, float_block};
use crate::format::write_gpu::Work;
use crate::gpu::float::{is_finite, is_nan, rint_exact, stored};
use crate::gpu::{UNITS, grid, word_array};
use crate::{DType, Tensor};

/// Affine rows to be written.
pub(crate) struct Target {
    codes: Handle,
    code_bytes: usize,
    packed: bool,
    params: [Handle; 2],
    param_len: usize,
    dtype: DType,
    capacity: usize,
}

impl Target {
    /// Binds codes (u32 words or u8) and parameters (f16 or f32).
    pub(crate) fn new(codes: &Tensor, scale: &Tensor, zero: &Tensor, capacity: usize) -> Self {
        let (handle, words) = bound(codes);
        Target {
            codes: handle,
            code_bytes: words * 4,
            packed: codes.dtype() == DType::U32,
            params: [bound(scale).0, bound(zero).0],
            param_len: scale.len(),
            dtype: scale.dtype(),
            capacity,
        }
    }
}

/// How to quantise.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantize {
    /// Bits of a packed code.
    pub bits: u32,
    /// Elements that share parameters.
    pub group: usize,
    /// Which elements share them.
    pub axis: Axis,
    /// The largest code.
    pub levels: u32,
    /// The smallest scale.
    pub eps: f32,
}

/// What the kernel must know when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Elements of a row.
    pub head_dim: u32,
    /// Codes that are written together: a word of them, or one byte.
    pub per_word: u32,
    /// Bits between two codes of a word.
    pub bits: u32,
    /// Words (or bytes) of a row.
    pub words: u32,
    /// Elements that share parameters.
    pub group: u32,
    /// Whether tokens share them.
    pub by_token: bool,
    /// Channels of a unit where channels share parameters: a group, or the row where words straddle groups.
    span: u32,
    /// How elements are stored.
    pub source: DType,
    /// How parameters are stored.
    pub params: DType,
}

impl Quantize {
    /// Quantises the rows of `work` from plain rows into `to`. Where tokens share a group, rows start on a group.
    pub(crate) fn launch<R: Runtime>(self, client: &ComputeClient<R>, work: &Work, from: &Side, to: &Target) {
        let head_dim = from.layout.head_dim as usize;
        // One code a byte is a packed row of four codes a word, where rows are whole words.
        let bytes = !to.packed && !head_dim.is_multiple_of(4);
        let bits = if to.packed { self.bits } else { 8 };
        let per_word = if bytes { 1 } else { codes_per_word(bits) };
        let words = head_dim.div_ceil(per_word);
        let by_token = self.axis == Axis::Tokens;
        let span = if self.group.is_multiple_of(per_word) { self.group.min(head_dim) } else { head_dim };
        let shape = Shape {
            head_dim: head_dim as u32,
            per_word: per_word as u32,
            bits,
            words: words as u32,
            group: self.group as u32,
            by_token,
            span: span as u32,
            source: from.layout.float,
            params: to.dtype,
        };
        let (rows, columns) =
            if by_token { (work.rows.div_ceil(self.group), words) } else { (work.rows, head_dim.div_ceil(span)) };
        let width = from.layout.widths.0;
        let shared = client.properties().hardware.max_shared_memory_size;
        if let Some(blocks) = Blocks::new(&shape, shared).filter(|_| !bytes && width > 1) {
            let matrices = work.batch * work.heads;
            let launch = match (to.dtype.size(), by_token) {
                (2, true) => one_pass_tokens::launch_unchecked::<u16, R> as OnePass<R>,
                (_, true) => one_pass_tokens::launch_unchecked::<u32, R> as OnePass<R>,
                (2, false) => one_pass_channels::launch_unchecked::<u16, R> as OnePass<R>,
                (_, false) => one_pass_channels::launch_unchecked::<u32, R> as OnePass<R>,
            };
            // SAFETY: `Rows::write` checked that the rows lie within both buffers.
            return unsafe {
                launch(
                    client,
                    grid(blocks.cubes(&shape, matrices, rows)),
                    CubeDim::new_1d(blocks.units),
                    width,
                    word_array(&from.codes, from.code_words),
                    word_array(&to.codes, to.code_bytes / 4),
                    word_array(&to.params[0], to.param_len),
                    word_array(&to.params[1], to.param_len),
                    word_array(&work.copies, work.batch * 3),
                    matrices as u32,
                    rows as u32,
                    work.heads as u32,
                    from.capacity,
                    to.capacity as u32,
                    self.levels as f32,
                    self.eps,
                    shape,
                    blocks,
                )
            };
        }
        let units = work.batch * work.heads * rows * columns;
        let blocks = |n: usize| n.is_multiple_of(BLOCK);
        let vectors = blocks(head_dim) && blocks(per_word) && (by_token || blocks(self.group) || span == self.group);
        let width = if vectors { from.layout.widths.0 } else { 1 };
        let launch = match (bytes, to.dtype.size(), by_token) {
            (false, 2, true) => quantize_tokens::launch_unchecked::<u32, u16, R> as Launch<R>,
            (false, _, true) => quantize_tokens::launch_unchecked::<u32, u32, R> as Launch<R>,
            (true, 2, true) => quantize_tokens::launch_unchecked::<u8, u16, R> as Launch<R>,
            (true, _, true) => quantize_tokens::launch_unchecked::<u8, u32, R> as Launch<R>,
            (false, 2, false) => quantize_channels::launch_unchecked::<u32, u16, R> as Launch<R>,
            (false, _, false) => quantize_channels::launch_unchecked::<u32, u32, R> as Launch<R>,
            (true, 2, false) => quantize_channels::launch_unchecked::<u8, u16, R> as Launch<R>,
            (true, _, false) => quantize_channels::launch_unchecked::<u8, u32, R> as Launch<R>,
        };
        // SAFETY: `Rows::write` checked that the rows lie within both buffers.
        unsafe {
            launch(
                client,
                grid(units.div_ceil(UNITS as usize)),
                CubeDim::new_1d(UNITS),
                width,
                word_array(&from.codes, from.code_words),
                word_array(&to.codes, if bytes { to.code_bytes } else { to.code_bytes / 4 }),
                word_array(&to.params[0], to.param_len),
                word_array(&to.params[1], to.param_len),
                word_array(&work.copies, work.batch * 3),
                units as u32,
                rows as u32,
                work.heads as u32,
                from.capacity,
                to.capacity as u32,
                self.levels as f32,
                self.eps,
                shape,
            );
        }
    }
}

/// The launcher of the kernels that read once.
type OnePass<R> = unsafe fn(
    &ComputeClient<R>,
    CubeCount,
    CubeDim,
    usize,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    u32,
    u32,
    u32,
    u32,
    u32,
    f32,
    f32,
    Shape,
    Blocks,
);

/// The launcher of the kernels that read twice.
type Launch<R> = unsafe fn(
    &ComputeClient<R>,
    CubeCount,
    CubeDim,
    usize,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    u32,
    u32,
    u32,
    u32,
    u32,
    f32,
    f32,
    Shape,
);

/// The parameters of a group from the extremes of its finite elements; `high < low` where there is none.
#[cube]
pub(super) fn scale_of(low: f32, high: f32, levels: f32, eps: f32, #[comptime] dtype: DType) -> f32 {
    let scale = select(high < low, 0.0f32, max((high - low) / levels, eps));
    as_stored(scale, dtype)
}

#[cube]
pub(super) fn zero_of(low: f32, high: f32, #[comptime] dtype: DType) -> f32 {
    as_stored(select(high < low, 0.0f32, low), dtype)
}

/// A parameter as the destination holds it; f16 saturates at its largest value.
#[cube]
fn as_stored(x: f32, #[comptime] dtype: DType) -> f32 {
    if comptime!(dtype == DType::F16) {
        f32::cast_from(half::f16::cast_from(min(max(x, f32::new(-65504.0)), f32::new(65504.0))))
    } else {
        x
    }
}

/// The code of an element. The quotient is clamped before it is rounded, which changes no code.
#[cube]
pub(super) fn code_of(x: f32, scale: f32, zero: f32, levels: f32) -> u32 {
    let steps = (x - zero) / scale;
    let clamped = min(max(steps, 0.0f32), levels);
    let none = scale == 0.0f32 || is_nan(x) || is_nan(steps);
    u32::cast_from(select(none, 0.0f32, rint_exact(clamped)))
}

/// `count` consecutive elements from `index` on; those at and after `end` are 0.
#[cube]
fn elements<N: Size>(
    from: &Array<Vector<u32, N>>,
    index: u32,
    end: u32,
    out: &mut Array<f32>,
    #[comptime] count: u32,
    #[comptime] dtype: DType,
) {
    let width = N::value();
    if comptime!(width > 1) {
        let mut eight = Array::<f32>::new(BLOCK);
        #[unroll]
        for b in 0..comptime!(count as usize / BLOCK) {
            float_block::<N>(from, index + comptime!((b * BLOCK) as u32), end, &mut eight, dtype);
            #[unroll]
            for i in 0..BLOCK {
                out[comptime!(b * BLOCK + i)] = eight[i];
            }
        }
    } else {
        #[unroll]
        for i in 0..count {
            let at = index + i;
            out[i as usize] = 0.0f32;
            if at < end {
                out[i as usize] = float_at::<N>(from, at, dtype);
            }
        }
    }
}

/// Keys: a unit is one word of every row of one group of tokens.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_tokens<O: Numeric, Q: Numeric, N: Size>(
    from: &Array<Vector<u32, N>>,
    codes: &mut Array<O>,
    scales: &mut Array<Q>,
    zeros: &mut Array<Q>,
    copies: &Array<u32>,
    units: u32,
    rows: u32,
    heads: u32,
    from_capacity: u32,
    to_capacity: u32,
    levels: f32,
    eps: f32,
    #[comptime] shape: Shape,
) {
    let unit = ABSOLUTE_POS as u32;
    let words = comptime!(shape.words);
    let group = comptime!(shape.group);
    let head_dim = comptime!(shape.head_dim);
    let count = comptime!(shape.per_word as usize);
    if unit < units {
        let word = unit % words;
        let matrix = unit / (words * rows);
        let copy = ((matrix / heads) * 3u32) as usize;
        let first = ((unit / words) % rows) * group;
        let last = min(first + group, copies[copy + 2]);
        if first < last {
            let channel = word * comptime!(shape.per_word);
            let source = matrix * from_capacity + copies[copy];
            let mut low = Array::<f32>::new(count);
            let mut high = Array::<f32>::new(count);
            #[unroll]
            for i in 0..count {
                low[i] = f32::new(f32::MAX);
                high[i] = f32::new(f32::MIN);
            }
            let mut x = Array::<f32>::new(count);
            for t in first..last {
                let at = (source + t) * head_dim;
                elements::<N>(
                    from,
                    at + channel,
                    at + head_dim,
                    &mut x,
                    comptime!(shape.per_word),
                    comptime!(shape.source),
                );
                #[unroll]
                for i in 0..count {
                    let finite = is_finite(x[i]);
                    low[i] = select(finite, min(low[i], x[i]), low[i]);
                    high[i] = select(finite, max(high[i], x[i]), high[i]);
                }
            }
            let columns = (to_capacity + comptime!(shape.group - 1)) / group;
            let params = (matrix * columns + (copies[copy + 1] + first) / group) * head_dim + channel;
            let dtype = comptime!(shape.params);
            #[unroll]
            for i in 0..count {
                let scale = scale_of(low[i], high[i], levels, eps, dtype);
                let zero = zero_of(low[i], high[i], dtype);
                if channel + comptime!(i as u32) < head_dim {
                    scales[params as usize + i] = stored::<Q>(scale, dtype);
                    zeros[params as usize + i] = stored::<Q>(zero, dtype);
                }
                low[i] = zero;
                high[i] = scale;
            }
            let target = matrix * to_capacity + copies[copy + 1];
            for t in first..last {
                let at = (source + t) * head_dim;
                elements::<N>(
                    from,
                    at + channel,
                    at + head_dim,
                    &mut x,
                    comptime!(shape.per_word),
                    comptime!(shape.source),
                );
                let mut packed = 0u32;
                #[unroll]
                for i in 0..count {
                    let code = code_of(x[i], high[i], low[i], levels);
                    let inside = channel + comptime!(i as u32) < head_dim;
                    packed = packed | (select(inside, code, 0u32) << comptime!(i as u32 * shape.bits));
                }
                codes[((target + t) * words + word) as usize] = O::cast_from(packed);
            }
        }
    }
}

/// Values: a unit is one group of channels of one row, or a whole row where words straddle groups.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_channels<O: Numeric, Q: Numeric, N: Size>(
    from: &Array<Vector<u32, N>>,
    codes: &mut Array<O>,
    scales: &mut Array<Q>,
    zeros: &mut Array<Q>,
    copies: &Array<u32>,
    units: u32,
    rows: u32,
    heads: u32,
    from_capacity: u32,
    to_capacity: u32,
    levels: f32,
    eps: f32,
    #[comptime] shape: Shape,
) {
    let unit = ABSOLUTE_POS as u32;
    let head_dim = comptime!(shape.head_dim);
    let group = comptime!(shape.group);
    let span = comptime!(shape.span);
    let spans = comptime!(shape.head_dim.div_ceil(shape.span));
    let groups = comptime!(shape.head_dim.div_ceil(shape.group));
    let per_word = comptime!(shape.per_word);
    let count = comptime!(shape.per_word as usize);
    let dtype = comptime!(shape.params);
    let width = N::value();
    if unit < units {
        let begin = (unit % spans) * span;
        let row = (unit / spans) % rows;
        let matrix = unit / (spans * rows);
        let copy = ((matrix / heads) * 3u32) as usize;
        if row < copies[copy + 2] {
            let source = (matrix * from_capacity + copies[copy] + row) * head_dim;
            let target = matrix * to_capacity + copies[copy + 1] + row;
            let end = min(begin + span, head_dim);
            let mut scale = 0.0f32;
            let mut zero = 0.0f32;
            for g in range_stepped(begin, end, group) {
                let group_end = min(g + group, end);
                let mut low = f32::new(f32::MAX);
                let mut high = f32::new(f32::MIN);
                if comptime!(width > 1) {
                    let mut x = Array::<f32>::new(BLOCK);
                    for c in range_stepped(g, group_end, comptime!(BLOCK as u32)) {
                        float_block::<N>(from, source + c, source + head_dim, &mut x, comptime!(shape.source));
                        #[unroll]
                        for i in 0..BLOCK {
                            let finite = is_finite(x[i]);
                            low = select(finite, min(low, x[i]), low);
                            high = select(finite, max(high, x[i]), high);
                        }
                    }
                } else {
                    for c in g..group_end {
                        let x = float_at::<N>(from, source + c, comptime!(shape.source));
                        let finite = is_finite(x);
                        low = select(finite, min(low, x), low);
                        high = select(finite, max(high, x), high);
                    }
                }
                scale = scale_of(low, high, levels, eps, dtype);
                zero = zero_of(low, high, dtype);
                let at = (target * groups + g / group) as usize;
                scales[at] = stored::<Q>(scale, dtype);
                zeros[at] = stored::<Q>(zero, dtype);
            }
            let mut x = Array::<f32>::new(count);
            for c in range_stepped(begin, end, per_word) {
                elements::<N>(from, source + c, source + head_dim, &mut x, per_word, comptime!(shape.source));
                let mut packed = 0u32;
                #[unroll]
                for i in 0..count {
                    let channel = c + comptime!(i as u32);
                    if channel < end {
                        if comptime!(shape.span != shape.group.min(shape.head_dim)) {
                            let at = (target * groups + channel / group) as usize;
                            scale = loaded::<Q>(scales[at], dtype);
                            zero = loaded::<Q>(zeros[at], dtype);
                        }
                        packed = packed | (code_of(x[i], scale, zero, levels) << comptime!(i as u32 * shape.bits));
                    }
                }
                codes[(target * comptime!(shape.words) + c / per_word) as usize] = O::cast_from(packed);
            }
        }
    }
}

/// The value of a parameter that was stored.
#[cube]
fn loaded<Q: Numeric>(bits: Q, #[comptime] dtype: DType) -> f32 {
    let bits = u32::cast_from(bits);
    if comptime!(dtype == DType::F16) { crate::gpu::float::from_f16(bits) } else { f32::reinterpret(bits) }
}
