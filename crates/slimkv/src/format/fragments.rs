//! How tensor-core kernels read rows: tiles of tokens in shared memory that become matrix operands in registers.
//!
//! A warp multiplies with `mma.m16n8k16`. Both products take the *rows of the cache* as the left operand, so that the
//! query rows of a KV head are the eight columns of the right one and nothing is padded to sixteen:
//!
//! ```text
//! scores  S [16 tokens, 8 rows]    += K [16 tokens, 16 channels]    * Q^T [16 channels, 8 rows]
//! output  O^T [16 channels, 8 rows] += V^T [16 channels, 16 tokens] * P^T [16 tokens, 8 rows]
//!
//! left operand of a lane (g = lane / 4, t = lane % 4), each register two 16-bit elements:
//!     register 0   row g,     columns 2t, 2t + 1          register 2   row g,     columns 2t + 8, 2t + 9
//!     register 1   row g + 8, columns 2t, 2t + 1          register 3   row g + 8, columns 2t + 8, 2t + 9
//! right operand:   registers 0 and 1 as 0 and 2, with the column g in the place of the row
//! result:          registers 0, 1 are row g, 2, 3 are row g + 8; columns 2t, 2t + 1
//! ```
//!
//! The order of a contraction is free. For the scores a lane therefore owns *consecutive words* of its token, whatever
//! channels these hold, and the queries are brought into the same order once. For the output, `ldmatrix` with transposition
//! reads 16 bytes of eight tokens and hands lane (g, t) the g-th 16 bits of tokens 2t and 2t + 1, side by side.
//!
//! A format turns such a word into operands; [`KeyTiles`] and [`ValueTiles`] are what it must know.

use cubecl::prelude::*;

/// 128 bits.
pub(crate) type Quad = Vector<u32, Const<4>>;
/// 32 bits, in memory that is also read as [`Quad`]s.
pub(crate) type Single = Vector<u32, Const<1>>;
/// Two f32 of a result: the query rows 2t and 2t + 1.
pub(crate) type F2 = Vector<f32, Const<2>>;
/// Two 16-bit elements of an operand.
pub(crate) type Pair<E> = Vector<E, Const<2>>;

/// What a kernel must know of one side's tiles when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// Elements of a row.
    pub head_dim: u32,
    /// Bits of a stored element: of a code, or 16.
    pub bits: u32,
    /// Elements that share parameters: tokens for keys, channels for values. 0 where there are no parameters.
    pub group: u32,
    /// Tokens of a tile.
    pub tokens: u32,
    /// How often the query rows appear side by side in the eight columns of an operand.
    pub copies: u32,
}

impl Tile {
    /// 16-byte chunks of a row; also 32-bit words that a lane owns of a row of keys.
    pub(crate) fn chunks(self) -> u32 {
        self.head_dim * self.bits / 128
    }

    /// Whether rows are codes with parameters.
    pub(crate) fn packed(self) -> bool {
        self.group > 0
    }

    /// Elements of a word.
    pub(crate) fn per_word(self) -> u32 {
        32 / self.bits
    }

    /// Elements of 16 bits: operand registers that a word of transposed values becomes.
    pub(crate) fn per_half(self) -> u32 {
        16 / self.bits
    }

    /// Channels of a chunk.
    pub(crate) fn per_chunk(self) -> u32 {
        128 / self.bits
    }

    /// Words that a lane loads at once from a row of keys.
    pub(crate) fn load(self) -> u32 {
        [4, 2].into_iter().find(|&n| self.chunks().is_multiple_of(n)).unwrap_or(1)
    }

    /// Consecutive channels of one such load.
    pub(crate) fn run(self) -> u32 {
        self.load() * self.per_word()
    }

    /// Groups of channels of a row of values.
    pub(crate) fn groups(self) -> u32 {
        if self.packed() { self.head_dim / self.group } else { 0 }
    }

    /// Groups that a chunk of values spans.
    pub(crate) fn spanned(self) -> u32 {
        if self.packed() { (self.per_chunk() / self.group).max(1) } else { 1 }
    }

    /// Whether the scales of values multiply the weights: the channels of a chunk share them, or each group of a chunk has
    /// columns of its own.
    pub(crate) fn scaled_weights(self) -> bool {
        self.packed() && self.spanned() == self.copies
    }

    /// Right operands of 16 tokens of values: one for each run of channels whose weights have other scales.
    pub(crate) fn sets(self) -> u32 {
        if self.scaled_weights() { self.groups() / self.copies } else { 1 }
    }

    /// Distinct query rows that a column of eight holds.
    pub(crate) fn distinct_rows(self) -> u32 {
        8 / self.copies
    }

    /// Powers of two by which the element `i` of 16 bits is too large after [`codes`].
    pub(crate) fn excess(self, i: u32) -> u32 {
        (i * self.bits) % 8
    }

    /// Whether chunks are moved within their row, so that eight tokens' worth of one chunk lie in different banks.
    pub(crate) fn swizzled(self) -> bool {
        self.chunks().is_power_of_two()
    }
}

/// The codes number `i` of both halves of a word, as two halves of value `code * 2^(excess(i) - 24)`.
///
/// Ten low bits and an exponent of zero are a subnormal half, so a masked word *is* a pair of numbers: the tensor core takes
/// subnormal operands exactly, and the power of two is undone in f32.
#[cube]
pub(crate) fn codes(word: u32, #[comptime] i: u32, #[comptime] bits: u32) -> u32 {
    let shift = comptime!(8 * (i * bits / 8));
    let mask = comptime!((((1u32 << bits) - 1) << ((i * bits) % 8)) * 0x0001_0001);
    let moved = if comptime!(shift > 0) { word >> shift } else { word };
    moved & mask
}

/// What [`codes`] and a sum of products with it must be multiplied with.
pub(crate) const CODE_UNIT: f32 = 16_777_216.0;

/// Two halves of 8.0, whose last place is 2^-7: or-ing a code adds it times [`EIGHTH`].
pub(crate) const EIGHTS: u32 = 0x4800_4800;
/// The last place of 8.0 as a half.
pub(crate) const EIGHTH: f32 = 1.0 / 128.0;

/// The same halves (low, or high where `odd`) of two words, side by side.
#[cube]
pub(crate) fn zip<E: Float>(a: u32, b: u32, #[comptime] odd: bool) -> u32 {
    let (a, b) = (Pair::<E>::reinterpret(a), Pair::<E>::reinterpret(b));
    let mut pair = Pair::<E>::empty();
    pair[0] = a[comptime!(odd as usize)];
    pair[1] = b[comptime!(odd as usize)];
    u32::reinterpret(pair)
}

/// The product of two pairs.
#[cube]
pub(crate) fn times<E: Float>(a: u32, b: u32) -> u32 {
    u32::reinterpret(Pair::<E>::reinterpret(a) * Pair::<E>::reinterpret(b))
}

/// Where chunk number `id` of a tile of keys lies: a quarter-warp reads half a row of two tokens.
#[cube]
pub(crate) fn key_place(id: u32, #[comptime] tile: Tile) -> u32 {
    let chunks = comptime!(tile.chunks());
    if comptime!(tile.chunks().is_multiple_of(8)) { id ^ (((id / chunks) & 1u32) << 2u32) } else { id }
}

/// Where chunk number `id` of a tile of values lies: `ldmatrix` reads one chunk of eight tokens.
#[cube]
pub(crate) fn value_place(id: u32, #[comptime] tile: Tile) -> u32 {
    if comptime!(tile.swizzled()) {
        id ^ ((id >> comptime!(tile.chunks().max(8).ilog2())) & comptime!(tile.chunks().min(8) - 1))
    } else {
        id
    }
}

/// Keys of a format as left operands.
#[cube]
pub(crate) trait KeyTiles: Send + Sync + 'static {
    /// Queues the copies of a tile's parameters into `kept`, which starts at `slot` and holds
    /// [`key_params`] chunks.
    #[allow(clippy::too_many_arguments)]
    fn fetch(
        first: &Array<Quad>,
        second: &Array<Quad>,
        kept: &mut SharedMemory<Quad>,
        slot: u32,
        matrix: u32,
        capacity: u32,
        token: u32,
        lane: u32,
        #[comptime] tile: Tile,
    );

    /// What the queries, in the order of the channels of a lane, must be multiplied with once.
    fn prepare<E: Float>(query: u32, #[comptime] pair: usize, #[comptime] tile: Tile) -> u32;

    /// The right operands of a tile, and what is added to the scores of all of its tokens. `queries` has four
    /// operand words of each lane, then the next four.
    fn operands<E: Float>(
        queries: &SharedMemory<Single>,
        prepared: &Array<u32>,
        kept: &SharedMemory<Quad>,
        slot: u32,
        lane: u32,
        operands: &mut Array<u32>,
        constant: &mut Array<F2>,
        #[comptime] columns: usize,
        #[comptime] tile: Tile,
    );

    /// The `i`-th register of a word of keys.
    fn register(word: u32, #[comptime] i: u32, #[comptime] tile: Tile) -> u32;
}

/// Values of a format as left operands.
#[cube]
pub(crate) trait ValueTiles: Send + Sync + 'static {
    /// Queues the copies of a tile's parameters into `kept`, from `slot` on; tokens from `left` on are zero-filled.
    #[allow(clippy::too_many_arguments)]
    fn fetch<P: Size>(
        first: &Array<Vector<u32, P>>,
        second: &Array<Vector<u32, P>>,
        kept: &mut SharedMemory<Quad>,
        slot: u32,
        row: u32,
        left: u32,
        lane: u32,
        #[comptime] tile: Tile,
    );

    /// Prepares 16 tokens: the right operands (as many as [`Tile::sets`]), the scales of a lane (where they do not multiply
    /// the weights), and the sums of weighted zero points, whose rows are groups.
    #[allow(clippy::too_many_arguments)]
    fn operands<E: Float>(
        weights: &Array<u32>,
        kept: &SharedMemory<Quad>,
        slot: u32,
        lane: u32,
        operands: &mut Array<u32>,
        scales: &mut Array<u32>,
        zeros: &mut Array<F2>,
        #[comptime] block: usize,
        #[comptime] columns: usize,
        #[comptime] tile: Tile,
    );

    /// The `i`-th register of a word of transposed values. `eights` is [`EIGHTS`], in a register: with two constants, masking
    /// and or-ing would be two instructions.
    fn register<E: Float>(word: u32, scale: u32, eights: u32, #[comptime] i: u32, #[comptime] tile: Tile) -> u32;
}

/// Chunks that the parameters of a tile of keys take in shared memory.
pub(crate) fn key_params(tile: Tile) -> u32 {
    if tile.packed() { tile.head_dim / 4 } else { 0 }
}

/// Chunks that the parameters of a tile of values take: one for the scales of a token, one for its zero points.
pub(crate) fn value_params(tile: Tile) -> u32 {
    if tile.packed() { 2 * tile.tokens } else { 0 }
}
