//! Quantising in one pass over memory: what a unit read stays in its registers while the units that share parameters tell
//! each other their extremes.

use cubecl::prelude::*;

use super::quantize::{Shape, code_of, scale_of, zero_of};
use crate::format::gpu::{BLOCK, float_block};
use crate::gpu::float::{is_finite, stored};

/// Elements that a unit keeps in registers.
const KEPT: u32 = 64;

/// How elements are laid out over units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blocks {
    /// Channels of a unit: whole words and whole vectors.
    width: u32,
    /// Tokens of a unit.
    tokens: u32,
    /// Units that share parameters.
    parts: u32,
    /// Units of a cube.
    pub units: u32,
}

impl Blocks {
    /// `None` where groups do not divide into blocks, or shared memory cannot hold their extremes; the kernels of [`quantize`](super::quantize) read twice, but anything.
    pub(super) fn new(shape: &Shape, shared_bytes: usize) -> Option<Self> {
        let width = shape.per_word.max(BLOCK as u32);
        let tokens = (KEPT / width).max(1);
        let of_group = if shape.by_token { tokens } else { width };
        let parts = shape.group / of_group;
        let whole = shape.head_dim.is_multiple_of(width)
            && width.is_multiple_of(shape.per_word)
            && width.is_multiple_of(BLOCK as u32)
            && shape.group.is_multiple_of(of_group)
            && (shape.by_token || shape.head_dim.is_multiple_of(shape.group));
        let units = 2048 / width.max(16);
        let blocks = Blocks { width, tokens, parts, units };
        (whole && parts.is_power_of_two() && parts <= 32 && blocks.bytes(shape) <= shared_bytes).then_some(blocks)
    }

    /// Shared memory of a cube.
    fn bytes(self, shape: &Shape) -> usize {
        let floats = if shape.by_token {
            2 * self.units * (self.width + 1) + 2 * self.units / self.parts * self.width
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

    /// The words of token number `t`, bit for bit what `code_of` says of each element.
    fn words(
        &self,
        scale: &Array<f32>,
        zero: &Array<f32>,
        inverse: &Array<f32>,
        levels: f32,
        exact: bool,
        words: &mut Array<u32>,
        #[comptime] t: usize,
        #[comptime] shape: Shape,
        #[comptime] blocks: Blocks,
    ) {
        let per_word = comptime!(shape.per_word as usize);
        let by_token = comptime!(shape.by_token);
        // A product with the reciprocal is the quotient but for two units in the last place, so it rounds to the same code
        // unless it lies that close to the middle between two.
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
                let code = f32::floor(clamped + 0.5f32);
                furthest = max(furthest, f32::abs(clamped - code));
                packed = packed | (u32::cast_from(code) << comptime!(i as u32 * shape.bits));
            }
            words[w] = packed;
        }
        if exact || furthest > 0.5f32 - levels * f32::new(1.0 / 1048576.0) {
            #[unroll]
            for w in 0..comptime!(blocks.width as usize / per_word) {
                let mut packed = 0u32;
                #[unroll]
                for i in 0..per_word {
                    let c = comptime!(w * per_word + i);
                    let p = comptime!(if by_token { c } else { 0 });
                    let code = code_of(self.x[comptime!(t * blocks.width as usize + c)], scale[p], zero[p], levels);
                    packed = packed | (code << comptime!(i as u32 * shape.bits));
                }
                words[w] = packed;
            }
        }
    }
}

/// Reciprocals of scales, and whether one is so small or so large that it has none.
#[cube]
fn invert(scale: &Array<f32>, inverse: &mut Array<f32>, #[comptime] count: usize) -> bool {
    let mut extreme = false;
    #[unroll]
    for i in 0..count {
        extreme = extreme || !(scale[i] >= 1e-30f32 && scale[i] <= 1e30f32);
        inverse[i] = 1.0f32 / scale[i];
    }
    extreme
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
    #[unroll]
    for c in 0..width {
        let mut low = f32::new(f32::MAX);
        let mut high = f32::new(f32::MIN);
        #[unroll]
        for t in 0..comptime!(blocks.tokens as usize) {
            let x = kept.x[comptime!(t * width + c)];
            let counts = is_finite(x) && own + comptime!(t as u32) < last;
            low = select(counts, min(low, x), low);
            high = select(counts, max(high, x), high);
        }
        lows[(UNIT_POS * stride) as usize + c] = low;
        highs[(UNIT_POS * stride) as usize + c] = high;
    }
    sync_cube();

    // Each channel of each column once.
    let mut scale_of_channel =
        SharedMemory::<f32>::new(comptime!((blocks.units / blocks.parts * blocks.width) as usize));
    let mut zero_of_channel =
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

    let mut scale = Array::<f32>::new(width);
    let mut zero = Array::<f32>::new(width);
    let mut inverse = Array::<f32>::new(width);
    #[unroll]
    for c in 0..width {
        let at = (UNIT_POS % across * comptime!(blocks.width)) as usize + c;
        scale[c] = scale_of_channel[at];
        zero[c] = zero_of_channel[at];
    }
    let extreme = invert(&scale, &mut inverse, width);
    let exact = extreme || !kept.finite;
    #[unroll]
    for t in 0..comptime!(blocks.tokens as usize) {
        let token = own + comptime!(t as u32);
        if token < last {
            let mut words = Array::<u32>::new(comptime!((blocks.width / shape.per_word) as usize));
            kept.words(&scale, &zero, &inverse, levels, exact, &mut words, t, shape, blocks);
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
    #[unroll]
    for t in 0..comptime!(blocks.tokens as usize) {
        let mut low = f32::new(f32::MAX);
        let mut high = f32::new(f32::MIN);
        #[unroll]
        for c in 0..width {
            let x = kept.x[comptime!(t * width + c)];
            let finite = is_finite(x);
            low = select(finite, min(low, x), low);
            high = select(finite, max(high, x), high);
        }
        lows[(comptime!(t as u32 * blocks.units) + UNIT_POS) as usize] = low;
        highs[(comptime!(t as u32 * blocks.units) + UNIT_POS) as usize] = high;
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
            let extreme = invert(&scale, &mut inverse, 1usize);
            let exact = extreme || !kept.finite;
            let mut words = Array::<u32>::new(comptime!((blocks.width / shape.per_word) as usize));
            kept.words(&scale, &zero, &inverse, levels, exact, &mut words, t, shape, blocks);
            let at = ((target + token) * comptime!(shape.words) + channel / comptime!(shape.per_word)) as usize;
            #[unroll]
            for w in 0..comptime!((blocks.width / shape.per_word) as usize) {
                codes[at + w] = words[w];
            }
        }
    }
}
