//! Scores from key codes.

use std::ops::Range;

use super::{LARGEST, Layout, Rows, halves, quantizer};
use crate::attend::decode::MAX_ROWS;
use crate::attend::decode::cpu::{self as skeleton, BLOCK, Block, Keys, Queries};
use crate::cpu::floats::Floats;
use crate::cpu::{Aligned, Isa, Kernel, Simd, Worker};
use crate::format::affine::Axis;
use crate::format::affine::cpu::Tiles;
use crate::format::decode_cpu::tile_stride;

/// Key codes that share parameters among tokens.
pub(crate) struct KeyPlan<'a> {
    isa: Isa,
    rows: Tiles<'a>,
    layout: Layout,
    /// The channel that each half of the folded queries belongs to, by register, half and element; past the end, zero.
    order: Vec<u32>,
    /// All bits of the elements of each of the rows that lie side by side.
    masks: Vec<i32>,
}

impl<'a> KeyPlan<'a> {
    /// `None` where channels share the parameters of keys, or where rows are so long that a sum might not fit 32 bits.
    pub fn new(isa: Isa, rows: Tiles<'a>) -> Option<Self> {
        let layout = Layout::new(isa, &rows);
        let terms = layout.registers().checked_mul(layout.per_word())?;
        let largest = terms.checked_mul(((1 << layout.bits) - 1) * LARGEST as usize)?;
        if rows.axis != Axis::Tokens || largest > i32::MAX as usize {
            return None;
        }
        let (lanes, d) = (layout.lanes, rows.head_dim);
        let mut order = Vec::with_capacity(layout.registers() * layout.parts() * 2 * lanes);
        for register in 0..layout.registers() {
            for k in 0..layout.parts() {
                for half in 0..2 {
                    let channel = |i: usize| layout.channel(layout.word(register, i), half, k);
                    let channels = (0..lanes).map(|i| channel(i).min(d) as u32);
                    order.extend(channels);
                }
            }
        }
        let mask = |row: usize| (0..lanes).map(move |i| if i / layout.words == row { -1 } else { 0 });
        let masks = (0..layout.side).flat_map(mask).collect();
        Some(KeyPlan { isa, rows, layout, order, masks })
    }
}

impl skeleton::KeyPlan for KeyPlan<'_> {
    fn keys<'a>(&'a self, rows: usize) -> Box<dyn Keys + 'a> {
        let (stride, order) = (tile_stride(self.rows.head_dim), self.order.len());
        Box::new(HalfKeys {
            plan: self,
            matrix: 0,
            rows,
            group: usize::MAX,
            queries: Aligned::zeros(rows * stride),
            ordered: Aligned::zeros(rows * order),
            // More than there are channels, so that there is a zero for what is none.
            scale: Aligned::zeros((2 * order).max(stride) + 1),
            zero: Aligned::zeros(stride),
            ordered_scale: Aligned::zeros(order),
            folded: Aligned::zeros(rows * order / 2),
            unit: [0.0; MAX_ROWS],
            offset: [0.0; MAX_ROWS],
            scratch: Vec::new(),
        })
    }
}

/// The keys of one KV head.
struct HalfKeys<'a> {
    plan: &'a KeyPlan<'a>,
    matrix: usize,
    rows: usize,
    /// The group of tokens whose parameters are folded in.
    group: usize,
    /// Query rows.
    queries: Aligned<f32>,
    /// Query rows in the order of the halves.
    ordered: Aligned<f32>,
    scale: Aligned<f32>,
    zero: Aligned<f32>,
    ordered_scale: Aligned<f32>,
    /// Queries times scales in 16 bits: for each row the registers that those of the codes meet.
    folded: Aligned<i32>,
    /// What one unit of a row is worth.
    unit: [f32; MAX_ROWS],
    /// Query times zero points.
    offset: [f32; MAX_ROWS],
    scratch: Vec<u8>,
}

impl Keys for HalfKeys<'_> {
    fn prepare(&mut self, matrix: usize, queries: &Queries) {
        self.matrix = matrix;
        self.group = usize::MAX;
        self.queries.copy_from_slice(&queries.data);
        let order = &self.plan.order;
        let rows = self.queries.chunks_exact(tile_stride(self.plan.rows.head_dim));
        for (ordered, row) in self.ordered.chunks_exact_mut(order.len()).zip(rows) {
            // What is no channel meets a scale of zero.
            ordered.iter_mut().zip(order).for_each(|(to, &c)| *to = row.get(c as usize).copied().unwrap_or(0.0));
        }
    }

    fn scores(&mut self, _: &Worker, tokens: Range<usize>, scores: &mut Block) {
        let KeyPlan { isa, rows, layout, masks, .. } = self.plan;
        let mut from = tokens.start;
        while from < tokens.end {
            let group = from / rows.group;
            let to = ((group + 1) * rows.group).min(tokens.end);
            if group != self.group {
                isa.run(Fold { keys: self, group });
                self.group = group;
            }
            let count = to - from;
            isa.run(Scores {
                codes: rows.code_rows(*layout, self.matrix, from, count, &mut self.scratch),
                layout: *layout,
                masks,
                folded: &self.folded,
                unit: &self.unit,
                offset: &self.offset,
                rows: self.rows,
                count,
                at: from - tokens.start,
                scores,
            });
            from = to;
        }
    }
}

/// Folds the parameters of a group of tokens into the queries.
struct Fold<'a, 'b> {
    keys: &'a mut HalfKeys<'b>,
    group: usize,
}

impl Kernel for Fold<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let HalfKeys { plan, matrix, scale, zero, ordered_scale, .. } = &mut *self.keys;
        let (rows, order) = (&plan.rows, &plan.order);
        let next = BLOCK.div_ceil(rows.group);
        for (params, to) in [(rows.scale, &mut *scale), (rows.zero, &mut *zero)] {
            let row = rows.param_row(params, *matrix, self.group);
            prefetch(s, row, next * row.len());
            row.widen(s, to);
        }
        match (plan.layout.bits, plan.layout.side) {
            (1, 1) => arrange::<S, 1>(scale, ordered_scale),
            (2, 1) => arrange::<S, 2>(scale, ordered_scale),
            (3, 1) => arrange::<S, 3>(scale, ordered_scale),
            (4, 1) => arrange::<S, 4>(scale, ordered_scale),
            (_, 1) => arrange::<S, 8>(scale, ordered_scale),
            _ => ordered_scale.iter_mut().zip(order).for_each(|(to, &channel)| *to = scale[channel as usize]),
        }
        let mut r = 0;
        while r < self.keys.rows {
            match self.keys.rows - r {
                4.. => {
                    self.rows_at::<S, 4>(s, r);
                    r += 4;
                }
                2.. => {
                    self.rows_at::<S, 2>(s, r);
                    r += 2;
                }
                _ => {
                    self.rows_at::<S, 1>(s, r);
                    r += 1;
                }
            }
        }
    }
}

impl Fold<'_, '_> {
    /// `R` rows together, so that none waits for its own sums.
    #[inline(always)]
    fn rows_at<S: Simd, const R: usize>(&mut self, s: S, r: usize) {
        let HalfKeys { plan, queries, ordered, scale, zero, ordered_scale, folded, unit, offset, .. } = &mut *self.keys;
        let (len, stride) = (plan.order.len(), tile_stride(plan.rows.head_dim));
        let (ordered, queries) = (&ordered[r * len..(r + R) * len], &queries[r * stride..(r + R) * stride]);
        let folded = &mut folded[r * len / 2..(r + R) * len / 2];
        assert!(len.is_multiple_of(2 * S::LANES) && ordered_scale.len() == len && zero.len() == stride);
        assert!(stride.is_multiple_of(S::LANES) && scale.len() >= stride);
        let (mut none, mut sum) = (s.splat(0.0), [s.splat(0.0); R]);
        let (mut most, mut least) = ([s.splat(0.0); R], [s.splat(0.0); R]);
        let mut factor = [s.splat(0.0); R];
        // SAFETY: every access is to `LANES` elements of a row, whose length is a multiple of that.
        unsafe {
            // Channels as they lie: the scales in order are still on their way to memory.
            for c in (0..stride).step_by(S::LANES) {
                let (scale, zero) = (s.load(scale.as_ptr().add(c)), s.load(zero.as_ptr().add(c)));
                // Times zero, a scale that is not finite becomes NaN, as the scores must; the integers would hide it.
                none = s.fma(scale, s.splat(0.0), none);
                let mut from = queries.as_ptr().wrapping_add(c);
                for i in 0..R {
                    let query = s.load(from);
                    from = from.wrapping_add(stride);
                    sum[i] = s.fma(query, zero, sum[i]);
                    let product = s.mul(query, scale);
                    most[i] = s.max(product, most[i]);
                    least[i] = s.min(product, least[i]);
                }
            }
            for i in 0..R {
                offset[r + i] = s.sum(s.add(sum[i], none));
                let (to_integer, of_one) = quantizer(s.max_lane(s.max(most[i], s.sub(s.splat(0.0), least[i]))));
                unit[r + i] = of_one;
                factor[i] = s.splat(to_integer);
            }
            for c in (0..len).step_by(2 * S::LANES) {
                let scale = [s.load(ordered_scale.as_ptr().add(c)), s.load(ordered_scale.as_ptr().add(c + S::LANES))];
                let mut query = ordered.as_ptr().wrapping_add(c);
                let mut to = folded.as_mut_ptr().wrapping_add(c / 2);
                for i in 0..R {
                    let low = s.mul(s.load(query), s.mul(scale[0], factor[i]));
                    let high = s.mul(s.load(query.wrapping_add(S::LANES)), s.mul(scale[1], factor[i]));
                    s.store_i(to, s.low_halves(s.round(low), s.round(high)));
                    query = query.wrapping_add(len);
                    to = to.wrapping_add(len / 2);
                }
            }
        }
    }
}

/// Brings the channels of a row into the order of the halves, as [`KeyPlan::order`] says where rows do not lie side by side.
/// Distances are constants, so that no index is loaded.
#[inline(always)]
fn arrange<S: Simd, const BITS: usize>(row: &[f32], to: &mut [f32]) {
    let (parts, per_word) = (16 / BITS, 32 / BITS);
    let registers = to.len() / (2 * parts * S::LANES);
    assert!(row.len() >= registers * S::LANES * per_word && to.len() == registers * 2 * parts * S::LANES);
    let (mut from, mut to) = (row.as_ptr(), to.as_mut_ptr());
    for _ in 0..registers {
        for k in 0..parts {
            for half in 0..2 {
                for i in 0..S::LANES {
                    // SAFETY: `LANES` words of `per_word` channels are inside the row, and as many elements inside `to`.
                    unsafe { *to.add(i) = *from.add(i * per_word + half * parts + k) }
                }
                to = to.wrapping_add(S::LANES);
            }
        }
        from = from.wrapping_add(S::LANES * per_word);
    }
}

/// Asks for the cache lines of what lies `elements` further than `row`.
#[inline(always)]
pub(super) fn prefetch<S: Simd>(s: S, row: Floats, elements: usize) {
    let (from, size) = match row {
        Floats::F16(x) => (x.as_ptr().cast::<u8>(), 2),
        Floats::BF16(x) => (x.as_ptr().cast(), 2),
        Floats::F32(x) => (x.as_ptr().cast(), 4),
    };
    for line in (0..row.len() * size).step_by(64) {
        s.prefetch(from.wrapping_add(elements * size + line));
    }
}

/// The scores of tokens that share parameters.
struct Scores<'a> {
    codes: Rows<'a>,
    layout: Layout,
    masks: &'a [i32],
    folded: &'a [i32],
    unit: &'a [f32; MAX_ROWS],
    offset: &'a [f32; MAX_ROWS],
    rows: usize,
    count: usize,
    /// Where the first token lies in the block.
    at: usize,
    scores: &'a mut Block,
}

impl Kernel for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        assert!(self.at + self.count <= BLOCK && self.rows <= MAX_ROWS);
        match self.layout.bits {
            1 => self.all::<S, 1>(s),
            2 => self.all::<S, 2>(s),
            3 => self.all::<S, 3>(s),
            4 => self.all::<S, 4>(s),
            _ => self.all::<S, 8>(s),
        }
        self.scale(s);
    }
}

impl Scores<'_> {
    #[inline(always)]
    fn all<S: Simd, const BITS: usize>(&mut self, s: S) {
        let mut r = 0;
        while r < self.rows {
            match self.rows - r {
                4.. => {
                    if S::BLOCK >= 4 {
                        self.rows_at::<S, BITS, 4, 4>(s, r);
                    } else {
                        self.rows_at::<S, BITS, 4, 2>(s, r);
                    }
                    r += 4;
                }
                2.. => {
                    self.rows_at::<S, BITS, 2, 4>(s, r);
                    r += 2;
                }
                _ => {
                    self.rows_at::<S, BITS, 1, 4>(s, r);
                    r += 1;
                }
            }
        }
    }

    #[inline(always)]
    fn rows_at<S: Simd, const BITS: usize, const R: usize, const T: usize>(&mut self, s: S, r: usize) {
        let (layout, stride) = (self.layout, self.codes.stride);
        let row_len = layout.registers() * (16 / BITS) * S::LANES;
        assert!(layout.lanes == S::LANES && self.folded.len() >= (r + R) * row_len);
        assert!(self.codes.bytes.len() >= (self.count - 1) * stride + layout.reach());
        let mut queries = [std::ptr::null::<i32>(); R];
        for (i, query) in queries.iter_mut().enumerate() {
            *query = self.folded[(r + i) * row_len..].as_ptr();
        }
        let (mut t, mut row) = (0, self.codes.row(0));
        if layout.side > 1 {
            while t < self.count {
                // SAFETY: there are as many rows, and queries.
                let acc = unsafe { products::<S, BITS, R, 1>(s, row, stride, queries, layout.registers()) };
                self.put_side(s, acc, r, t);
                t += layout.side;
                row = row.wrapping_byte_add(layout.side * stride);
            }
            return;
        }
        while t + T <= self.count {
            // SAFETY: as above.
            let acc = unsafe {
                if S::BLOCK >= 4 {
                    products::<S, BITS, R, T>(s, row, stride, queries, layout.registers())
                } else {
                    // One by one: queries are operands from memory, and nothing is spilled.
                    let mut acc = [[s.splat_i(0); T]; R];
                    for j in 0..T {
                        let row = row.wrapping_byte_add(j * stride);
                        let one = products::<S, BITS, R, 1>(s, row, stride, queries, layout.registers());
                        for i in 0..R {
                            acc[i][j] = one[i][0];
                        }
                    }
                    acc
                }
            };
            self.put_all(s, acc, r, t);
            t += T;
            row = row.wrapping_byte_add(T * stride);
        }
        while t < self.count {
            // SAFETY: as above.
            let acc = unsafe { products::<S, BITS, R, 1>(s, row, stride, queries, layout.registers()) };
            self.put_all(s, acc, r, t);
            t += 1;
            row = row.wrapping_byte_add(stride);
        }
    }

    /// Writes the scores of the tokens that lie side by side from `t` on.
    #[inline(always)]
    fn put_side<S: Simd, const R: usize>(&mut self, s: S, acc: [[S::I; 1]; R], r: usize, t: usize) {
        for (row, mask) in self.masks.chunks_exact(S::LANES).enumerate().take(self.count - t) {
            // SAFETY: a mask has `LANES` elements.
            let mask = unsafe { s.load_i(mask.as_ptr()) };
            let mut sums = [s.splat(0.0); R];
            for i in 0..R {
                sums[i] = s.to_f(s.and(acc[i][0], mask));
            }
            let at = self.at + t + row;
            if R == 4 {
                let sums = s.sum4([sums[0], sums[1 % R], sums[2 % R], sums[3 % R]]);
                for i in 0..R {
                    self.put(r + i, at, [sums[i]]);
                }
            } else {
                for i in 0..R {
                    self.put(r + i, at, [s.sum(sums[i])]);
                }
            }
        }
    }

    /// Writes the scores of `T` tokens.
    #[inline(always)]
    fn put_all<S: Simd, const R: usize, const T: usize>(&mut self, s: S, acc: [[S::I; T]; R], r: usize, t: usize) {
        let mut sums = [[s.splat(0.0); T]; R];
        for i in 0..R {
            for j in 0..T {
                sums[i][j] = s.to_f(acc[i][j]);
            }
        }
        let at = self.at + t;
        if T == 4 {
            for i in 0..R {
                let of_row = s.sum4([sums[i][0], sums[i][1 % T], sums[i][2 % T], sums[i][3 % T]]);
                self.put(r + i, at, of_row);
            }
        } else if T == 2 && R.is_multiple_of(2) {
            for i in (0..R).step_by(2) {
                let [a, b, c, d] = s.sum4([sums[i][0], sums[i][1 % T], sums[i + 1][0], sums[i + 1][1 % T]]);
                self.put(r + i, at, [a, b]);
                self.put(r + i + 1, at, [c, d]);
            }
        } else {
            for i in 0..R {
                for j in 0..T {
                    self.put(r + i, at + j, [s.sum(sums[i][j])]);
                }
            }
        }
    }

    #[inline(always)]
    fn put<const N: usize>(&mut self, row: usize, at: usize, sums: [f32; N]) {
        debug_assert!(at + N <= BLOCK);
        // SAFETY: `run` checked that all tokens lie within the block.
        unsafe { self.scores.0[row].as_mut_ptr().add(at).cast::<[f32; N]>().write_unaligned(sums) }
    }

    /// From sums of integers to scores.
    #[inline(always)]
    fn scale<S: Simd>(&mut self, s: S) {
        for r in 0..self.rows {
            let (unit, offset) = (s.splat(self.unit[r]), s.splat(self.offset[r]));
            let scores = &mut self.scores.0[r][self.at..self.at + self.count];
            let mut vectors = scores.chunks_exact_mut(S::LANES);
            for vector in &mut vectors {
                // SAFETY: it has `LANES` elements.
                unsafe { s.store(vector.as_mut_ptr(), s.fma(s.load(vector.as_ptr()), unit, offset)) }
            }
            let rest = vectors.into_remainder();
            let mut whole = [0.0; 16];
            whole[..rest.len()].copy_from_slice(rest);
            // SAFETY: no instruction set has more than 16 elements.
            unsafe { s.store(whole.as_mut_ptr(), s.fma(s.load(whole.as_ptr()), unit, offset)) }
            rest.copy_from_slice(&whole[..rest.len()]);
        }
    }
}

/// The products of `R` query rows with `T` rows of codes from `row` on.
///
/// # Safety
///
/// The rows have `registers` registers that may be read, and the queries as many as these become.
#[inline(always)]
unsafe fn products<S: Simd, const BITS: usize, const R: usize, const T: usize>(
    s: S,
    row: *const i32,
    stride: usize,
    queries: [*const i32; R],
    registers: usize,
) -> [[S::I; T]; R] {
    let mut acc = [[s.splat_i(0); T]; R];
    // Pointers and one offset that step, so that no index is computed (and checked) in between.
    let mut rows = [row; T];
    for j in 0..T {
        rows[j] = row.wrapping_byte_add(j * stride);
    }
    let next = BLOCK * stride;
    let (mut word, mut at) = (0usize, 0usize);
    for _ in 0..registers {
        let mut words = [s.splat_i(0); T];
        for j in 0..T {
            let from = rows[j].wrapping_add(word);
            s.prefetch(from.cast::<u8>().wrapping_add(next));
            // SAFETY: the caller's.
            words[j] = unsafe { s.load_i(from) };
            if BITS == 3 {
                words[j] = s.low_halves(words[j], s.shift_right(words[j], 15));
            }
        }
        for k in 0..16 / BITS {
            let mut codes = words;
            for codes in &mut codes {
                *codes = halves::<S, BITS>(s, *codes, k);
            }
            for i in 0..R {
                // SAFETY: the caller's.
                let query = unsafe { s.load_i(queries[i].wrapping_add(at)) };
                for j in 0..T {
                    acc[i][j] = s.dot_halves(acc[i][j], codes[j], query);
                }
            }
            at = at.wrapping_add(S::LANES);
        }
        word = word.wrapping_add(S::LANES);
    }
    acc
}
