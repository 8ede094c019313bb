//! Weighted sums of value codes.
//!
//! A block's tokens are multiplied in pairs, each of the first half of the block with its counterpart in the second: the
//! halves of an element are the codes of both in the same channel, and meet the weights of both.

use std::ops::Range;

use super::keys::prefetch;
use super::{Layout, Rows, halves, quantizer};
use crate::attend::decode::MAX_ROWS;
use crate::attend::decode::cpu::{self as skeleton, BLOCK, Block, Values};
use crate::cpu::{Aligned, Isa, Kernel, Simd, Worker};
use crate::format::affine::Axis;
use crate::format::affine::cpu::Tiles;

/// Value codes that share parameters among channels.
pub(crate) struct ValuePlan<'a> {
    isa: Isa,
    rows: Tiles<'a>,
    layout: Layout,
    /// Groups of a row.
    groups: usize,
    /// The same, rounded up so that a register holds whole tokens, or a token whole registers.
    padded: usize,
    /// Which group each element of a register of halves is in, without repetition: `[maps, elements]`. Where rows lie side by
    /// side, the groups of the second follow those of the first.
    maps: Vec<usize>,
    /// The map of each register of halves, in the order of the sums.
    map_of: Vec<usize>,
    /// Where each channel lies in a row of sums, and its group.
    places: Vec<(usize, usize)>,
}

impl<'a> ValuePlan<'a> {
    /// `None` where tokens share the parameters of values, groups end within words, or those of a register have more
    /// parameters than fit one.
    pub fn new(isa: Isa, rows: Tiles<'a>) -> Option<Self> {
        let layout = Layout::new(isa, &rows);
        let (lanes, d) = (layout.lanes, rows.head_dim);
        let groups = d.div_ceil(rows.group);
        let padded = groups.next_power_of_two();
        // Registers of halves are taken together where they are in the same groups; three-bit ones are taken one by one.
        let together = layout.bits == 3 || groups == 1 || rows.group.is_multiple_of(layout.per_word());
        if rows.axis != Axis::Channels || padded > 4 * lanes || !together {
            return None;
        }
        let (mut maps, mut map_of): (Vec<Vec<usize>>, _) = (Vec::new(), Vec::new());
        let mut places = vec![(0, 0); d];
        for register in 0..layout.registers() {
            for code in 0..2 * layout.parts() {
                let mut map = Vec::with_capacity(lanes);
                for i in 0..lanes {
                    let channel =
                        layout.channel(layout.word(register, i), code / layout.parts(), code % layout.parts());
                    // What is past the end stands in the last group; nobody looks at its sums.
                    let group = (channel / rows.group).min(groups - 1);
                    map.push(i / layout.words * if layout.side > 1 { padded } else { 0 } + group);
                    if channel < d && (layout.side == 1 || i < layout.words) {
                        places[channel] = (map_of.len() * lanes + i, group);
                    }
                }
                map_of.push(maps.iter().position(|known| *known == map).unwrap_or(maps.len()));
                if *map_of.last()? == maps.len() {
                    maps.push(map);
                }
            }
        }
        let plan = ValuePlan { isa, rows, layout, groups, padded, maps: maps.concat(), map_of, places };
        (plan.alone() || padded * layout.side <= lanes).then_some(plan)
    }

    /// Registers after which the groups of the elements of parameters repeat.
    fn period(&self) -> usize {
        (self.padded / self.layout.lanes).max(1)
    }

    /// Whether the elements of each register of halves share their parameters, so that weights are broadcast.
    fn alone(&self) -> bool {
        self.maps.chunks(self.layout.lanes).all(|of| of.iter().all(|g| *g == of[0]))
    }

    /// Registers from the weights of one map to those of the next: as many as there are steps in a block, and a few more so
    /// that the rows of weights, which are read in step, do not lie a page apart.
    fn steps(&self) -> usize {
        BLOCK / 2 / self.layout.side + 3
    }
}

impl skeleton::ValuePlan for ValuePlan<'_> {
    fn values<'a>(&'a self, rows: usize) -> Box<dyn Values + 'a> {
        let Layout { lanes, side, .. } = self.layout;
        let (params, alone, maps) = (BLOCK * self.padded, self.alone(), self.maps.len() / lanes);
        // A register of parameters holds the weights of several steps.
        let steps = if alone { 0 } else { lanes / self.padded / side };
        let of_step = |map: &'a [usize], step: usize| map.iter().map(move |g| (g + step * side * self.padded) as i32);
        let index = self.maps.chunks(lanes).flat_map(|map| (0..steps).flat_map(move |step| of_step(map, step)));
        let places = (0..maps).flat_map(|map| (0..steps).map(move |step| (map * self.steps() + step) * lanes));
        Box::new(HalfValues {
            plan: self,
            matrix: 0,
            rows,
            alone,
            scale: Aligned::zeros(params),
            zero: Aligned::zeros(params),
            narrow: vec![0.0; BLOCK * self.groups],
            most: vec![0.0; BLOCK + lanes],
            unit: vec![0.0; self.padded],
            pairs: Aligned::zeros(if alone { rows * params / 2 } else { 0 }),
            operands: Aligned::zeros(if alone { 0 } else { rows * maps * self.steps() * lanes }),
            index: index.collect(),
            places: places.collect(),
            token_of: (0..lanes).map(|i| (i / self.padded) as i32).collect(),
            sums: Aligned::zeros(rows * self.map_of.len() * lanes),
            offsets: vec![0.0; rows * self.period() * lanes],
            scratch: Vec::new(),
        })
    }
}

/// The values of one KV head.
struct HalfValues<'a> {
    plan: &'a ValuePlan<'a>,
    matrix: usize,
    rows: usize,
    /// Whether weights are broadcast one by one, not laid out for whole registers.
    alone: bool,
    /// `[tokens, padded groups]`, like the zero points.
    scale: Aligned<f32>,
    zero: Aligned<f32>,
    /// Parameters as they are stored, where groups are padded.
    narrow: Vec<f32>,
    /// The largest weight of each token.
    most: Vec<f32>,
    /// What one unit of a group is worth.
    unit: Vec<f32>,
    /// `[rows, pairs of tokens, padded groups]`: weights times scales, in 16 bits.
    pairs: Aligned<i32>,
    /// `[rows, maps, steps]` registers: the same, laid out.
    operands: Aligned<i32>,
    /// `[maps, steps of a register of parameters]` registers: where in that each element finds its weights.
    index: Vec<i32>,
    /// `[maps, steps of a register of parameters]`: where the operands of each go, from those of the first on.
    places: Vec<usize>,
    /// The token of each element of a register of parameters, counted from that of the first.
    token_of: Vec<i32>,
    /// `[rows, registers of halves]` registers.
    sums: Aligned<f32>,
    /// Weighted zero points: for each row registers of tokens and groups.
    offsets: Vec<f32>,
    scratch: Vec<u8>,
}

impl Values for HalfValues<'_> {
    fn prepare(&mut self, matrix: usize) {
        self.matrix = matrix;
        self.sums.fill(0.0);
        self.offsets.fill(0.0);
    }

    fn accumulate(
        &mut self,
        _: &Worker,
        tokens: Range<usize>,
        weights: &Block,
        keep: &[f32; MAX_ROWS],
        factor: &[f32; MAX_ROWS],
    ) {
        let ValuePlan { isa, rows, layout, padded, .. } = self.plan;
        // Whole registers of parameters.
        let half = tokens.len().div_ceil(2).next_multiple_of((layout.lanes / padded).max(layout.side));
        isa.run(Weigh { values: self, tokens: tokens.clone(), half, weights, keep, factor });
        let codes = rows.code_rows(*layout, self.matrix, tokens.start, 2 * half, &mut self.scratch);
        isa.run(WeightedSum {
            codes,
            plan: self.plan,
            rows: self.rows,
            half,
            alone: self.alone,
            pairs: &self.pairs,
            operands: &self.operands,
            unit: &self.unit,
            keep,
            factor,
            sums: &mut self.sums,
        });
    }

    fn finish(&mut self, sums: &mut [f32]) {
        let ValuePlan { places, padded, groups, layout, .. } = self.plan;
        let all = sums.chunks_exact_mut(places.len()).zip(self.sums.chunks_exact(self.sums.len() / self.rows));
        for ((out, sums), offsets) in all.zip(self.offsets.chunks_exact(self.offsets.len() / self.rows)) {
            let offsets: Vec<f32> = (0..*groups).map(|g| offsets.iter().skip(g).step_by(*padded).sum()).collect();
            for (out, &(at, group)) in out.iter_mut().zip(places) {
                *out = sums[at] + offsets[group];
            }
            for row in 1..layout.side {
                for (out, &(at, _)) in out.iter_mut().zip(places) {
                    *out += sums[at + row * layout.words];
                }
            }
        }
    }
}

/// Prepares a block: parameters as f32, weights times scales in 16 bits, and the weighted zero points.
struct Weigh<'a, 'b> {
    values: &'a mut HalfValues<'b>,
    tokens: Range<usize>,
    /// Pairs of tokens.
    half: usize,
    weights: &'a Block,
    keep: &'a [f32; MAX_ROWS],
    factor: &'a [f32; MAX_ROWS],
}

impl Kernel for Weigh<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let finite = self.load_params(s);
        self.largest_weights(s);
        let factors = self.quantizers(s);
        match (finite, self.values.alone, self.values.places.len()) {
            (true, true, _) => self.quantize::<S, true, true, 0>(s, &factors),
            (true, false, 1) => self.quantize::<S, true, false, 1>(s, &factors),
            (true, false, 2) => self.quantize::<S, true, false, 2>(s, &factors),
            (true, false, 4) => self.quantize::<S, true, false, 4>(s, &factors),
            (true, false, _) => self.quantize::<S, true, false, 0>(s, &factors),
            (false, true, _) => self.quantize::<S, false, true, 0>(s, &factors),
            (false, false, _) => self.quantize::<S, false, false, 0>(s, &factors),
        }
    }
}

impl Weigh<'_, '_> {
    /// Widens the parameters of the block, zero past its tokens; whether all are finite.
    #[inline(always)]
    fn load_params<S: Simd>(&mut self, s: S) -> bool {
        let HalfValues { plan, matrix, scale, zero, narrow, .. } = &mut *self.values;
        let (groups, padded, count) = (plan.groups, plan.padded, self.tokens.len());
        let used = 2 * self.half * padded;
        let mut sums = [s.splat(0.0); 2];
        for (params, to) in [(plan.rows.scale, scale), (plan.rows.zero, zero)] {
            let row = params.part((*matrix * plan.rows.capacity + self.tokens.start) * groups, count * groups);
            prefetch(s, row, BLOCK * groups);
            if groups == padded {
                row.widen(s, to);
            } else {
                row.widen(s, narrow);
                for (to, from) in to.chunks_exact_mut(padded).zip(narrow.chunks_exact(groups)).take(count) {
                    to[..groups].copy_from_slice(from);
                }
            }
            to[count * padded..used].fill(0.0);
            assert!(used.is_multiple_of(S::LANES) && to.len() >= used);
            for i in (0..used).step_by(S::LANES) {
                // SAFETY: `i + LANES <= used`. Times zero, what is not finite becomes NaN.
                let none = s.mul(unsafe { s.load(to.as_ptr().add(i)) }, s.splat(0.0));
                sums[i / S::LANES % 2] = s.add(sums[i / S::LANES % 2], none);
            }
        }
        s.sum(s.add(sums[0], sums[1])) == 0.0
    }

    #[inline(always)]
    fn largest_weights<S: Simd>(&mut self, s: S) {
        assert!(self.values.rows <= MAX_ROWS && self.values.most.len() >= BLOCK);
        for t in (0..2 * self.half).step_by(S::LANES) {
            let mut most = s.splat(0.0);
            for weights in &self.weights.0[..self.values.rows] {
                // SAFETY: `LANES` divides `BLOCK`, the length of both.
                most = s.max(unsafe { s.load(weights.as_ptr().add(t)) }, most);
            }
            // SAFETY: as above.
            unsafe { s.store(self.values.most.as_mut_ptr().add(t), most) }
        }
    }

    /// The factor to 16 bits of each element of a period of registers; leaves the inverses in `unit`.
    #[inline(always)]
    fn quantizers<S: Simd>(&mut self, s: S) -> [S::F; 4] {
        let HalfValues { plan, scale, most, unit, token_of, .. } = &mut *self.values;
        let (used, period, padded) = (2 * self.half * plan.padded, plan.period(), plan.padded);
        assert!(scale.len() >= used && period <= 4 && used.is_multiple_of(period * S::LANES));
        assert!(most.len() >= BLOCK + S::LANES && token_of.len() == S::LANES);
        // SAFETY: a register of tokens.
        let token_of = unsafe { s.load_i(token_of.as_ptr()) };
        let mut peaks = [[0.0f32; 16]; 4];
        for (p, peaks) in peaks.iter_mut().enumerate().take(period) {
            let (mut high, mut low) = (s.splat(0.0), s.splat(0.0));
            let mut weights = most.as_ptr();
            for i in (p * S::LANES..used).step_by(period * S::LANES) {
                // SAFETY: `i + LANES <= used`, and the weights end a register after the last token.
                let product = unsafe {
                    let weight = s.permute_f(s.load(weights), token_of);
                    // What is not finite reaches the rows that see it through the offsets, and no other.
                    s.finite_or(s.mul(s.load(scale.as_ptr().add(i)), weight), s.splat(0.0))
                };
                weights = weights.wrapping_add((S::LANES / padded).max(1));
                high = s.max(product, high);
                low = s.min(product, low);
            }
            // SAFETY: no instruction set has more than 16 elements.
            unsafe { s.store(peaks.as_mut_ptr(), s.max(high, s.sub(s.splat(0.0), low))) }
        }
        let mut factors = [[0.0f32; 16]; 4];
        for (g, unit) in unit.iter_mut().enumerate() {
            let (register, first) = (g / S::LANES, g % S::LANES);
            let elements = (first..S::LANES).step_by(plan.padded);
            let peak = elements.clone().fold(0.0f32, |peak, i| peak.max(peaks[register][i]));
            let (factor, of_one) = quantizer(peak);
            *unit = of_one;
            elements.for_each(|i| factors[register][i] = factor);
        }
        let mut registers = [s.splat(0.0); 4];
        for (register, factors) in registers.iter_mut().zip(&factors) {
            // SAFETY: as above.
            *register = unsafe { s.load(factors.as_ptr()) };
        }
        registers
    }

    /// `FINITE`: no parameter is NaN or infinite. Otherwise a weight of zero must stand against that. `PLACES`: how many
    /// operands a register of pairs becomes; 0 where only the plan knows.
    #[inline(always)]
    fn quantize<S: Simd, const FINITE: bool, const ALONE: bool, const PLACES: usize>(
        &mut self,
        s: S,
        factors: &[S::F; 4],
    ) {
        let mut r = 0;
        while r < self.values.rows {
            match self.values.rows - r {
                4.. => {
                    self.rows_at::<S, FINITE, ALONE, PLACES, 4>(s, factors, r);
                    r += 4;
                }
                2.. => {
                    self.rows_at::<S, FINITE, ALONE, PLACES, 2>(s, factors, r);
                    r += 2;
                }
                _ => {
                    self.rows_at::<S, FINITE, ALONE, PLACES, 1>(s, factors, r);
                    r += 1;
                }
            }
        }
    }

    #[inline(always)]
    fn rows_at<S: Simd, const FINITE: bool, const ALONE: bool, const PLACES: usize, const R: usize>(
        &mut self,
        s: S,
        factors: &[S::F; 4],
        r: usize,
    ) {
        let HalfValues { plan, scale, zero, pairs, operands, index, places, token_of, offsets, .. } = &mut *self.values;
        let (period, lanes, padded) = (plan.period(), S::LANES, plan.padded);
        let (half, used, row_len) = (self.half, self.half * padded, BLOCK * padded);
        assert!(used.is_multiple_of(lanes) && scale.len() == row_len && zero.len() == row_len && 2 * used <= row_len);
        assert!(r + R <= MAX_ROWS && half <= BLOCK / 2 && token_of.len() == lanes && period <= 4);
        // SAFETY: a register of tokens.
        let token_of = unsafe { s.load_i(token_of.as_ptr()) };
        let (maps, all) = (plan.maps.len() / lanes, plan.steps() * lanes);
        // A register of parameters holds the weights of several tokens, and steps.
        let tokens = (lanes / padded).max(1);
        let steps = if ALONE { 0 } else { tokens / plan.layout.side };
        assert!(ALONE || period == 1 && index.len() == maps * steps * lanes && half / plan.layout.side <= plan.steps());
        let places = if PLACES > 0 { &places[..PLACES] } else { &places[..] };
        assert!(places.len() == maps * steps);
        // Pointers that step, so that no index is computed (and checked) in between.
        let mut to = [std::ptr::null_mut::<i32>(); R];
        for (j, to) in to.iter_mut().enumerate() {
            *to = if ALONE {
                pairs[(r + j) * row_len / 2..][..row_len / 2].as_mut_ptr()
            } else {
                operands[(r + j) * maps * all..][..maps * all].as_mut_ptr()
            };
        }
        for p in 0..period {
            let (mut sums, mut t) = ([s.splat(0.0); R], 0);
            for i in (p * lanes..used).step_by(period * lanes) {
                let (mut scales, mut zeros) = ([factors[p]; 2], [s.splat(0.0); 2]);
                for side in 0..2 {
                    let at = i.wrapping_add(side * used);
                    // SAFETY: twice `used` is inside the parameters.
                    unsafe {
                        scales[side] = s.mul(s.load(scale.as_ptr().add(at)), factors[p]);
                        zeros[side] = s.load(zero.as_ptr().add(at));
                    }
                }
                for j in 0..R {
                    let weights = self.weights.0.as_ptr().cast::<f32>().wrapping_add((r + j) * BLOCK);
                    let mut rounded = [s.splat_i(0); 2];
                    for side in 0..2 {
                        // SAFETY: `half + t < BLOCK`, and a row of weights follows the last.
                        let weight = unsafe { s.load(weights.add(t + side * half)) };
                        let weight = s.permute_f(weight, token_of);
                        let scaled = weighted::<S, FINITE>(s, weight, scales[side]);
                        rounded[side] = s.round(scaled);
                        if FINITE {
                            sums[j] = s.fma(weight, zeros[side], sums[j]);
                        } else {
                            // What is not finite must show up somewhere; the integers would hide it.
                            let zero = weighted::<S, FINITE>(s, weight, zeros[side]);
                            sums[j] = s.add(sums[j], s.fma(scaled, s.splat(0.0), zero));
                        }
                    }
                    let pair = s.low_halves(rounded[0], rounded[1]);
                    // SAFETY: `used` elements are inside the pairs of a row; its operands are as many registers for each map
                    // as there are steps, of which those of a register of parameters follow each other.
                    unsafe {
                        if ALONE {
                            s.store_i(to[j].wrapping_add(i), pair);
                            continue;
                        }
                        let mut from = index.as_ptr();
                        for &place in places {
                            s.store_i(to[j].wrapping_add(place), s.permute(pair, s.load_i(from)));
                            from = from.wrapping_add(lanes);
                        }
                    }
                    to[j] = to[j].wrapping_add(steps * lanes);
                }
                t = t.wrapping_add(tokens);
            }
            for (j, sum) in sums.into_iter().enumerate() {
                let offset = &mut offsets[((r + j) * period + p) * lanes..][..lanes];
                // SAFETY: it has `LANES` elements.
                unsafe {
                    let kept = s.mul(s.load(offset.as_ptr()), s.splat(self.keep[r + j]));
                    s.store(offset.as_mut_ptr(), s.fma(sum, s.splat(self.factor[r + j]), kept));
                }
            }
        }
    }
}

/// A parameter times a weight; `FINITE`: it is neither infinite nor NaN.
#[inline(always)]
fn weighted<S: Simd, const FINITE: bool>(s: S, weight: S::F, param: S::F) -> S::F {
    let product = s.mul(weight, param);
    if FINITE { product } else { s.select_eq(weight, s.splat(0.0), s.splat(0.0), product) }
}

/// Adds the weighted codes of a block.
struct WeightedSum<'a> {
    codes: Rows<'a>,
    plan: &'a ValuePlan<'a>,
    rows: usize,
    half: usize,
    alone: bool,
    pairs: &'a [i32],
    operands: &'a [i32],
    unit: &'a [f32],
    keep: &'a [f32; MAX_ROWS],
    factor: &'a [f32; MAX_ROWS],
    sums: &'a mut [f32],
}

impl Kernel for WeightedSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        match (self.plan.layout.bits, self.alone) {
            (1, false) => self.all::<S, 1, 4, false>(s),
            (1, true) => self.all::<S, 1, 4, true>(s),
            (2, false) => self.all::<S, 2, 4, false>(s),
            (2, true) => self.all::<S, 2, 4, true>(s),
            (3, false) => self.all::<S, 3, 1, false>(s),
            (3, true) => self.all::<S, 3, 1, true>(s),
            (4, false) => self.all::<S, 4, 4, false>(s),
            (4, true) => self.all::<S, 4, 4, true>(s),
            (_, false) => self.all::<S, 8, 2, false>(s),
            (_, true) => self.all::<S, 8, 2, true>(s),
        }
    }
}

impl WeightedSum<'_> {
    /// `MANY`: registers of halves together where few rows leave room for them, all of one map.
    #[inline(always)]
    fn all<S: Simd, const BITS: usize, const MANY: usize, const ALONE: bool>(&mut self, s: S) {
        let mut r = 0;
        while r < self.rows {
            match self.rows - r {
                4.. => {
                    if S::BLOCK >= 4 || MANY <= 2 {
                        self.rows_at::<S, BITS, 4, MANY, ALONE>(s, r);
                    } else {
                        self.rows_at::<S, BITS, 4, 2, ALONE>(s, r);
                    }
                    r += 4;
                }
                2.. => {
                    self.rows_at::<S, BITS, 2, MANY, ALONE>(s, r);
                    r += 2;
                }
                _ => {
                    self.rows_at::<S, BITS, 1, MANY, ALONE>(s, r);
                    r += 1;
                }
            }
        }
    }

    #[inline(always)]
    fn rows_at<S: Simd, const BITS: usize, const R: usize, const P: usize, const ALONE: bool>(
        &mut self,
        s: S,
        r: usize,
    ) {
        for c in 0..self.plan.layout.registers() {
            for k in (0..16 / BITS).step_by(P) {
                self.parts_at::<S, BITS, R, P, ALONE, false>(s, r, c, k);
                self.parts_at::<S, BITS, R, P, ALONE, true>(s, r, c, k);
            }
        }
    }

    /// `R` rows times `P` registers of the low or the high halves of register `c`, over all pairs of tokens.
    #[inline(always)]
    fn parts_at<S: Simd, const BITS: usize, const R: usize, const P: usize, const ALONE: bool, const HIGH: bool>(
        &mut self,
        s: S,
        r: usize,
        c: usize,
        k: usize,
    ) {
        let (plan, half, side) = (self.plan, self.half, self.plan.layout.side);
        let first = (2 * c + usize::from(HIGH)) * (16 / BITS) + k;
        let map = plan.map_of[first];
        let groups = &plan.maps[map * S::LANES..(map + 1) * S::LANES];
        let (maps, steps) = (plan.maps.len() / S::LANES, half / side);
        assert!(self.codes.bytes.len() >= (2 * half - side) * self.codes.stride + plan.layout.reach());
        assert!(plan.layout.lanes == S::LANES && c < plan.layout.registers() && r + R <= self.rows);
        assert!(half.is_multiple_of(side) && steps <= plan.steps());
        // Pointers that step, so that no index is computed (and checked) in between.
        let mut row = self.codes.row(0).wrapping_add(c * S::LANES).cast::<u8>();
        let (other, stride) = (half * self.codes.stride, side * self.codes.stride);
        let mut at = 0usize;
        let mut weights = [std::ptr::null::<i32>(); R];
        for (i, weights) in weights.iter_mut().enumerate() {
            *weights = if ALONE {
                self.pairs[(r + i) * BLOCK / 2 * plan.padded..][..steps * plan.padded][groups[0]..].as_ptr()
            } else {
                self.operands[((r + i) * maps + map) * plan.steps() * S::LANES..][..steps * S::LANES].as_ptr()
            };
        }
        let step = if ALONE { plan.padded } else { S::LANES };
        if r == 0 {
            // Its part of the next block: all at once would be more than may be on the way.
            let part = (2 * half * self.codes.stride).div_ceil(plan.map_of.len());
            let next = self.codes.row(0).cast::<u8>().wrapping_add(BLOCK * self.codes.stride + first * part);
            for line in (0..P * part).step_by(64) {
                s.prefetch(next.wrapping_add(line));
            }
        }
        let mut acc = [[s.splat_i(0); P]; R];
        for _ in 0..steps {
            // SAFETY: register `c` of the rows of a pair is inside what loading them reads.
            let (mut a, mut b) = unsafe { (s.load_i(row.cast()), s.load_i(row.wrapping_add(other).cast())) };
            row = row.wrapping_add(stride);
            if HIGH && BITS == 3 {
                (a, b) = (s.shift_right(a, 15), s.shift_right(b, 15));
            }
            let words = if HIGH && BITS != 3 { s.high_halves(a, b) } else { s.low_halves(a, b) };
            let mut codes = [words; P];
            for (p, codes) in codes.iter_mut().enumerate() {
                *codes = halves::<S, BITS>(s, *codes, k + p);
            }
            for i in 0..R {
                let weight = weights[i].wrapping_add(at);
                // SAFETY: `steps` steps of the row are inside the pairs, or the operands.
                let weight = unsafe { if ALONE { s.splat_i(*weight) } else { s.load_i(weight) } };
                for p in 0..P {
                    acc[i][p] = s.dot_halves(acc[i][p], codes[p], weight);
                }
            }
            at = at.wrapping_add(step);
        }
        let mut units = [0.0f32; 16];
        for (unit, &group) in units.iter_mut().zip(groups) {
            *unit = self.unit[group % plan.padded];
        }
        // SAFETY: no instruction set has more than 16 elements.
        let units = unsafe { s.load(units.as_ptr()) };
        let row_len = plan.map_of.len() * S::LANES;
        for i in 0..R {
            let (keep, unit) = (s.splat(self.keep[r + i]), s.mul(units, s.splat(self.factor[r + i])));
            let sums = &mut self.sums[(r + i) * row_len..][..row_len][first * S::LANES..][..P * S::LANES];
            for (sum, acc) in sums.chunks_exact_mut(S::LANES).zip(acc[i]) {
                // SAFETY: it has `LANES` elements.
                unsafe {
                    let kept = s.mul(keep, s.load(sum.as_ptr()));
                    s.store(sum.as_mut_ptr(), s.fma(s.to_f(acc), unit, kept));
                }
            }
        }
    }
}
