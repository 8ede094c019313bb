//! Quantising in one pass over memory: what a unit read stays in its registers while the units that share parameters tell
//! each other their extremes.

use cubecl::prelude::*;

use super::quantize::{Shape, code_of, scale_of, zero_of};
use crate::format::gpu::{BLOCK, float_block};
use crate::gpu::float::{is_finite, stored};

/// Elements that a unit keeps in registers, if so few tokens make a block; twice as many leave room for too few units.
const KEPT: u32 = 32;
/// Elements at most.
const MOST_KEPT: u32 = 64;
/// Units of a cube.
const UNITS: u32 = 64;
/// Units that share parameters at most.
const MOST_PARTS: u32 = 32;

/// How elements are laid out over units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blocks {
    /// Channels of a unit: whole words and whole vectors.
    width: u32,
    /// Tokens of a unit.
    tokens: u32,
    /// Units that share parameters.
    parts: u32,
    /// Units of a cube: [`UNITS`].
    pub units: u32,
}

impl Blocks {
    /// `None` where groups do not divide into blocks, or shared memory cannot hold their extremes; the kernels of [`quantize`](super::quantize) read twice, but anything.
    pub(super) fn new(shape: &Shape, shared_bytes: usize) -> Option<Self> {
        let width = shape.per_word.max(BLOCK as u32);
        let few = (KEPT / width).max(1);
        let tokens = if shape.by_token { few.max(shape.group / MOST_PARTS) } else { few };
        let of_group = if shape.by_token { tokens } else { width };
        let parts = shape.group / of_group;
        let whole = shape.head_dim.is_multiple_of(width)
            && width.is_multiple_of(shape.per_word)
            && width.is_multiple_of(BLOCK as u32)
            && shape.group.is_multiple_of(of_group)
            && (shape.by_token || shape.head_dim.is_multiple_of(shape.group));
        let blocks = Blocks { width, tokens, parts, units: UNITS };
        // In this order: a group that is no whole number of parts has no size.
        let divided = whole && parts.is_power_of_two() && parts <= MOST_PARTS;
        (divided && tokens * width <= MOST_KEPT && blocks.bytes(shape) <= shared_bytes).then_some(blocks)
    }

    /// Shared memory of a cube.
    fn bytes(self, shape: &Shape) -> usize {
        let floats = if shape.by_token {
            2 * self.units * (self.width + 1) + self.units / self.parts * (3 * self.width + 1)
        } else {
            2 * self.units * self.tokens
        };
        floats as usize * 4
    }

    /// Cubes for some groups of tokens or rows of every matrix.
    pub(super) fn cubes(self, shape: &Shape, matrices: usize, rows: usize) -> usize {
        let per_row = (shape.head_dim / self.width) as usize;
        if shape.by_token {
            (matrices * rows * per_row).div_ceil((self.units / self.parts) as usize)
        } else {
            (matrices * rows.div_ceil(self.tokens as usize) * per_row).div_ceil(self.units as usize)
        }
    }
}

/// 2^23: a number from 0 to 255 added to it rounds to an integer, which is then its low bits.
const INTEGERS: f32 = 8_388_608.0;
/// The bits of [`INTEGERS`].
const INTEGER_BITS: u32 = 0x4B00_0000;

/// The elements of a unit.
#[derive(CubeType)]
struct Kept {
    /// Token by token.
    x: Array<f32>,
    finite: bool,
}

#[cube]
impl Kept {
    /// Reads `blocks.width` channels from `channel` on of the rows `first..last`, at most `blocks.tokens`.
    fn read<N: Size>(
        from: &Array<Vector<u32, N>>,
        source: u32,
        first: u32,
        last: u32,
        channel: u32,
        #[comptime] shape: Shape,
        #[comptime] blocks: Blocks,
    ) -> Kept {
        let width = comptime!(blocks.width as usize);
        let mut x = Array::<f32>::new(comptime!((blocks.tokens * blocks.width) as usize));
        let mut finite = true;
        #[unroll]
        for t in 0..comptime!(blocks.tokens as usize) {
            #[unroll]
            for b in 0..comptime!(width / BLOCK) {
                let mut eight = Array::<f32>::new(BLOCK);
                #[unroll]
                for i in 0..BLOCK {
                    eight[i] = 0.0f32;
                }
                let token = first + comptime!(t as u32);
                if token < last {
                    let row = (source + token) * comptime!(shape.head_dim);
                    let at = row + channel + comptime!((b * BLOCK) as u32);
                    float_block::<N>(from, at, row + comptime!(shape.head_dim), &mut eight, comptime!(shape.source));
                }
                #[unroll]
                for i in 0..BLOCK {
                    x[comptime!(t * width + b * BLOCK + i)] = eight[i];
                    finite = finite && is_finite(eight[i]);
                }
            }
        }
        Kept { x, finite }
    }

    /// The words of token number `t`, by products with the reciprocals of scales, and whether these are bit for bit what
    /// `code_of` says: a product is the quotient but for two units in the last place, so it rounds to the same code unless it
    /// lies that close to the middle between two.
    fn quick_words(
        &self,
        zero: &Array<f32>,
        inverse: &Array<f32>,
        levels: f32,
        words: &mut Array<u32>,
        #[comptime] t: usize,
        #[comptime] shape: Shape,
        #[comptime] blocks: Blocks,
    ) -> bool {
        let per_word = comptime!(shape.per_word as usize);
        let by_token = comptime!(shape.by_token);
        let mut furthest = 0.0f32;
        #[unroll]
        for w in 0..comptime!(blocks.width as usize / per_word) {
            let mut packed = 0u32;
            #[unroll]
            for i in 0..per_word {
                let c = comptime!(w * per_word + i);
                let p = comptime!(if by_token { c } else { 0 });
                let steps = (self.x[comptime!(t * blocks.width as usize + c)] - zero[p]) * inverse[p];
                let clamped = min(max(steps, 0.0f32), levels);
                // Rounded and converted by one addition; the mask is what keeps compilers from undoing it below.
                let rounded = u32::reinterpret(clamped + f32::new(INTEGERS));
                let rounded = (rounded & 0xFFu32) | INTEGER_BITS;
                let code = f32::reinterpret(rounded) - f32::new(INTEGERS);
                furthest = max(furthest, f32::abs(clamped - code));
                packed += rounded << comptime!(i as u32 * shape.bits);
            }
            let excess =
                comptime!((0..shape.per_word).fold(0u32, |sum, i| sum.wrapping_add(INTEGER_BITS << (i * shape.bits))));
            words[w] = packed - excess;
        }
        furthest <= 0.5f32 - levels * f32::new(1.0 / 1048576.0)
    }

    /// The words of token number `t`, element by element.
    fn exact_words(
        &self,
        scale: &Array<f32>,
        zero: &Array<f32>,
        levels: f32,
        words: &mut Array<u32>,
        #[comptime] t: usize,
        #[comptime] shape: Shape,
        #[comptime] blocks: Blocks,
    ) {
        let per_word = comptime!(shape.per_word as usize);
        #[unroll]
        for w in 0..comptime!(blocks.width as usize / per_word) {
            let mut packed = 0u32;
            #[unroll]
            for i in 0..per_word {
                let c = comptime!(w * per_word + i);
                let p = comptime!(if shape.by_token { c } else { 0 });
                let code = code_of(self.x[comptime!(t * blocks.width as usize + c)], scale[p], zero[p], levels);
                packed = packed | (code << comptime!(i as u32 * shape.bits));
            }
            words[w] = packed;
        }
    }

    /// The extremes of some elements `from`, `from + step` and so on. Where not all are known to be finite (`whole`), those
    /// of the finite ones among the first `count`.
    fn extremes(
        &self,
        count: u32,
        #[comptime] whole: bool,
        #[comptime] from: usize,
        #[comptime] step: usize,
        #[comptime] elements: usize,
    ) -> (f32, f32) {
        let mut low = f32::new(f32::MAX);
        let mut high = f32::new(f32::MIN);
        #[unroll]
        for i in 0..elements {
            let x = self.x[comptime!(from + i * step)];
            if whole {
                low = min(low, x);
                high = max(high, x);
            } else {
                let counts = is_finite(x) && comptime!(i as u32).runtime() < count;
                low = select(counts, min(low, x), low);
                high = select(counts, max(high, x), high);
            }
        }
        (low, high)
    }
}

/// Whether a scale is so small or so large that it has no reciprocal.
#[cube]
fn is_extreme(scale: f32) -> bool {
    let (enough, not_too_much) = (scale >= 1e-30f32, scale <= 1e30f32);
    !(enough && not_too_much)
}

/// Keys: a unit is a block of channels of some tokens of a group.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn one_pass_tokens<Q: Numeric, N: Size>(
    from: &Array<Vector<u32, N>>,
    codes: &mut Array<u32>,
    scales: &mut Array<Q>,
    zeros: &mut Array<Q>,
    copies: &Array<u32>,
    matrices: u32,
    rows: u32,
    heads: u32,
    from_capacity: u32,
    to_capacity: u32,
    levels: f32,
    eps: f32,
    #[comptime] shape: Shape,
    #[comptime] blocks: Blocks,
) {
    let dtype = comptime!(shape.params);
    let group = comptime!(shape.group);
    let head_dim = comptime!(shape.head_dim);
    let width = comptime!(blocks.width as usize);
    let stride = comptime!(blocks.width + 1);
    let across = comptime!(blocks.units / blocks.parts);
    let per_row = comptime!(shape.head_dim / blocks.width);

    // A cube takes `across` columns, each a block of channels of a group.
    let first_column = CUBE_POS as u32 * across;
    let columns = matrices * rows * per_row;
    let column = first_column + UNIT_POS % across;
    let matrix = column / (per_row * rows);
    let mut first = 0u32;
    let mut last = 0u32;
    let mut source = 0u32;
    let mut target = 0u32;
    if column < columns {
        let copy = ((matrix / heads) * 3u32) as usize;
        first = ((column / per_row) % rows) * group;
        last = min(first + group, copies[copy + 2]);
        source = matrix * from_capacity + copies[copy];
        target = matrix * to_capacity + copies[copy + 1];
    }
    let channel = (column % per_row) * comptime!(blocks.width);
    let own = first + UNIT_POS / across * comptime!(blocks.tokens);
    let kept = Kept::read::<N>(from, source, own, last, channel, shape, blocks);

    let mut lows = SharedMemory::<f32>::new(comptime!((blocks.units * (blocks.width + 1)) as usize));
    let mut highs = SharedMemory::<f32>::new(comptime!((blocks.units * (blocks.width + 1)) as usize));
    let count = max(last, own) - own;
    if kept.finite && count >= comptime!(blocks.tokens) {
        #[unroll]
        for c in 0..width {
            let (low, high) = kept.extremes(count, true, c, width, comptime!(blocks.tokens as usize));
            lows[(UNIT_POS * stride) as usize + c] = low;
            highs[(UNIT_POS * stride) as usize + c] = high;
        }
    } else {
        #[unroll]
        for c in 0..width {
            let (low, high) = kept.extremes(count, false, c, width, comptime!(blocks.tokens as usize));
            lows[(UNIT_POS * stride) as usize + c] = low;
            highs[(UNIT_POS * stride) as usize + c] = high;
        }
    }
    let mut any_extreme = SharedMemory::<u32>::new(comptime!((blocks.units / blocks.parts) as usize));
    if UNIT_POS < across {
        any_extreme[UNIT_POS as usize] = 0u32;
    }
    sync_cube();

    // Each channel of each column once.
    let mut scale_of_channel =
        SharedMemory::<f32>::new(comptime!((blocks.units / blocks.parts * blocks.width) as usize));
    let mut zero_of_channel =
        SharedMemory::<f32>::new(comptime!((blocks.units / blocks.parts * blocks.width) as usize));
    let mut inverse_of_channel =
        SharedMemory::<f32>::new(comptime!((blocks.units / blocks.parts * blocks.width) as usize));
    for task in range_stepped(UNIT_POS, comptime!(blocks.units / blocks.parts * blocks.width), comptime!(blocks.units))
    {
        let c = task % comptime!(blocks.width);
        let mut low = f32::new(f32::MAX);
        let mut high = f32::new(f32::MIN);
        #[unroll]
        for p in 0..comptime!(blocks.parts) {
            let at =
                ((comptime!(p * (blocks.units / blocks.parts)) + task / comptime!(blocks.width)) * stride + c) as usize;
            low = min(low, lows[at]);
            high = max(high, highs[at]);
        }
        let scale = scale_of(low, high, levels, eps, dtype);
        let zero = zero_of(low, high, dtype);
        scale_of_channel[task as usize] = scale;
        zero_of_channel[task as usize] = zero;
        inverse_of_channel[task as usize] = 1.0f32 / scale;
        if is_extreme(scale) {
            any_extreme[(task / comptime!(blocks.width)) as usize] = 1u32;
        }
        let column = first_column + task / comptime!(blocks.width);
        if column < columns {
            let matrix = column / (per_row * rows);
            let copy = ((matrix / heads) * 3u32) as usize;
            let first = ((column / per_row) % rows) * group;
            if first < copies[copy + 2] {
                let groups = (to_capacity + comptime!(shape.group - 1)) / group;
                let row = matrix * groups + (copies[copy + 1] + first) / group;
                let at = (row * head_dim + (column % per_row) * comptime!(blocks.width) + c) as usize;
                scales[at] = stored::<Q>(scale, dtype);
                zeros[at] = stored::<Q>(zero, dtype);
            }
        }
    }
    sync_cube();

    let mut zero = Array::<f32>::new(width);
    let mut inverse = Array::<f32>::new(width);
    #[unroll]
    for c in 0..width {
        let at = (UNIT_POS % across * comptime!(blocks.width)) as usize + c;
        zero[c] = zero_of_channel[at];
        inverse[c] = inverse_of_channel[at];
    }
    let quick = kept.finite && any_extreme[(UNIT_POS % across) as usize] == 0u32;
    #[unroll]
    for t in 0..comptime!(blocks.tokens as usize) {
        let token = own + comptime!(t as u32);
        if token < last {
            let mut words = Array::<u32>::new(comptime!((blocks.width / shape.per_word) as usize));
            let same = kept.quick_words(&zero, &inverse, levels, &mut words, t, shape, blocks);
            if !(quick && same) {
                let mut scale = Array::<f32>::new(width);
                #[unroll]
                for c in 0..width {
                    scale[c] = scale_of_channel[(UNIT_POS % across * comptime!(blocks.width)) as usize + c];
                }
                kept.exact_words(&scale, &zero, levels, &mut words, t, shape, blocks);
            }
            let at = ((target + token) * comptime!(shape.words) + channel / comptime!(shape.per_word)) as usize;
            #[unroll]
            for w in 0..comptime!((blocks.width / shape.per_word) as usize) {
                codes[at + w] = words[w];
            }
        }
    }
}

/// Values: a unit is a block of channels of some tokens, each of which has its own parameters.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn one_pass_channels<Q: Numeric, N: Size>(
    from: &Array<Vector<u32, N>>,
    codes: &mut Array<u32>,
    scales: &mut Array<Q>,
    zeros: &mut Array<Q>,
    copies: &Array<u32>,
    matrices: u32,
    rows: u32,
    heads: u32,
    from_capacity: u32,
    to_capacity: u32,
    levels: f32,
    eps: f32,
    #[comptime] shape: Shape,
    #[comptime] blocks: Blocks,
) {
    let dtype = comptime!(shape.params);
    let width = comptime!(blocks.width as usize);
    let parts = comptime!(blocks.parts);
    let per_row = comptime!(shape.head_dim / blocks.width);
    let row_blocks = (rows + comptime!(blocks.tokens - 1)) / comptime!(blocks.tokens);

    let unit = CUBE_POS as u32 * comptime!(blocks.units) + UNIT_POS;
    let matrix = unit / (per_row * row_blocks);
    let mut first = 0u32;
    let mut last = 0u32;
    let mut source = 0u32;
    let mut target = 0u32;
    if unit < matrices * row_blocks * per_row {
        let copy = ((matrix / heads) * 3u32) as usize;
        first = ((unit / per_row) % row_blocks) * comptime!(blocks.tokens);
        last = copies[copy + 2];
        source = matrix * from_capacity + copies[copy];
        target = matrix * to_capacity + copies[copy + 1];
    }
    let channel = (unit % per_row) * comptime!(blocks.width);
    let kept = Kept::read::<N>(from, source, first, last, channel, shape, blocks);

    let mut lows = SharedMemory::<f32>::new(comptime!((blocks.units * blocks.tokens) as usize));
    let mut highs = SharedMemory::<f32>::new(comptime!((blocks.units * blocks.tokens) as usize));
    if kept.finite {
        #[unroll]
        for t in 0..comptime!(blocks.tokens as usize) {
            let (low, high) = kept.extremes(comptime!(blocks.width), true, comptime!(t * width), 1usize, width);
            lows[(comptime!(t as u32 * blocks.units) + UNIT_POS) as usize] = low;
            highs[(comptime!(t as u32 * blocks.units) + UNIT_POS) as usize] = high;
        }
    } else {
        #[unroll]
        for t in 0..comptime!(blocks.tokens as usize) {
            let (low, high) = kept.extremes(comptime!(blocks.width), false, comptime!(t * width), 1usize, width);
            lows[(comptime!(t as u32 * blocks.units) + UNIT_POS) as usize] = low;
            highs[(comptime!(t as u32 * blocks.units) + UNIT_POS) as usize] = high;
        }
    }
    sync_cube();

    #[unroll]
    for t in 0..comptime!(blocks.tokens as usize) {
        let token = first + comptime!(t as u32);
        if token < last {
            let mut low = f32::new(f32::MAX);
            let mut high = f32::new(f32::MIN);
            #[unroll]
            for p in 0..parts {
                let at = (comptime!(t as u32 * blocks.units + p) + UNIT_POS / parts * parts) as usize;
                low = min(low, lows[at]);
                high = max(high, highs[at]);
            }
            let mut scale = Array::<f32>::new(1usize);
            let mut zero = Array::<f32>::new(1usize);
            let mut inverse = Array::<f32>::new(1usize);
            scale[0] = scale_of(low, high, levels, eps, dtype);
            zero[0] = zero_of(low, high, dtype);
            if UNIT_POS / parts * parts == UNIT_POS {
                let at = (target + token) * comptime!(shape.head_dim / shape.group) + channel / comptime!(shape.group);
                scales[at as usize] = stored::<Q>(scale[0], dtype);
                zeros[at as usize] = stored::<Q>(zero[0], dtype);
            }
            inverse[0] = 1.0f32 / scale[0];
            let mut words = Array::<u32>::new(comptime!((blocks.width / shape.per_word) as usize));
            let same = kept.quick_words(&zero, &inverse, levels, &mut words, t, shape, blocks);
            if !(same && kept.finite && !is_extreme(scale[0])) {
                kept.exact_words(&scale, &zero, levels, &mut words, t, shape, blocks);
            }
            let at = ((target + token) * comptime!(shape.words) + channel / comptime!(shape.per_word)) as usize;
            #[unroll]
            for w in 0..comptime!((blocks.width / shape.per_word) as usize) {
                codes[at + w] = words[w];
            }
        }
    }
}
