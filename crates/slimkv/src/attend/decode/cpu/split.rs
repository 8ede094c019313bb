//! Cutting the KV axis, and walking one cut with an online softmax.

use std::ops::Range;

use super::{BLOCK, Block, Keys, MAX_ROWS, Values};
use crate::attend::{Geometry, Options, Segment, Span};
use crate::cpu::math::exp2_nonpositive;
use crate::cpu::{Kernel, Simd, Worker};

/// Tokens that one task walks.
pub(super) struct Split {
    pub segment: usize,
    pub sequence: usize,
    /// Sequence times KV heads plus head.
    pub matrix: usize,
    pub tokens: Range<usize>,
}

/// Tokens of a split, by the length of the sequence alone.
fn split_len(len: usize) -> usize {
    (len / 16).next_multiple_of(BLOCK).clamp(512, 2048)
}

/// All splits, those of one KV head together and in order, and where each KV head's begin (with the end appended).
pub(super) fn all(segments: &[Segment], options: Options, g: Geometry) -> (Vec<Split>, Vec<usize>) {
    let (mut splits, mut first) = (Vec::new(), vec![0]);
    for matrix in 0..g.batch * g.kv_heads {
        let sequence = matrix / g.kv_heads;
        for (segment, s) in segments.iter().enumerate() {
            let span = s.spans[sequence];
            let visible = Mask::new(options, span, g).union();
            let step = split_len(span.len);
            for start in (0..span.len).step_by(step) {
                let tokens = start.max(visible.start / BLOCK * BLOCK)..(start + step).min(visible.end);
                if !tokens.is_empty() {
                    splits.push(Split { segment, sequence, matrix, tokens });
                }
            }
        }
        first.push(splits.len());
    }
    (splits, first)
}

/// The tokens of a segment that each query sees: an interval.
pub(crate) struct Mask {
    options: Options,
    span: Span,
    s_q: usize,
}

impl Mask {
    pub fn new(options: Options, span: Span, g: Geometry) -> Self {
        Mask { options, span, s_q: g.s_q }
    }

    /// What query row `row` of a KV head sees (rows are heads times queries).
    pub fn visible(&self, row: usize) -> Range<usize> {
        let position = self.span.q_offset.saturating_add((row % self.s_q) as i64);
        let clamp = |x: i64| x.clamp(0, self.span.len as i64) as usize;
        let window = i64::try_from(self.options.window).unwrap_or(i64::MAX);
        let start = if window == 0 { 0 } else { clamp(position.saturating_sub(window).saturating_add(1)) };
        let end = if self.options.causal { clamp(position.saturating_add(1)) } else { self.span.len };
        start..end
    }

    /// What any query sees: the intervals shift with the query, so the first and the last bound them.
    fn union(&self) -> Range<usize> {
        if self.s_q == 0 { 0..0 } else { self.visible(0).start..self.visible(self.s_q - 1).end }
    }
}

/// f32 of one partial result: sums, then for each row the running maximum and the sum of weights.
pub(super) const fn partial_len(rows: usize, head_dim: usize) -> usize {
    rows * (head_dim + 2)
}

/// Walks `tokens`; scores are in powers of two.
pub(super) fn walk(
    worker: &Worker,
    tokens: Range<usize>,
    mask: &Mask,
    rows: usize,
    keys: &mut dyn Keys,
    values: &mut dyn Values,
    partial: &mut [f32],
) {
    let mut block = Block([[0.0; BLOCK]; MAX_ROWS + 1]);
    let mut state = State::default();
    let visible: [Range<usize>; MAX_ROWS] = std::array::from_fn(|r| if r < rows { mask.visible(r) } else { 0..0 });
    for start in tokens.clone().step_by(BLOCK) {
        let range = start..(start + BLOCK).min(tokens.end);
        keys.scores(worker, range.clone(), &mut block);
        for (scores, visible) in block.0[..rows].iter_mut().zip(&visible) {
            let hide = |x: usize| x.clamp(range.start, range.end) - range.start;
            scores[..hide(visible.start)].fill(f32::NEG_INFINITY);
            scores[hide(visible.end)..].fill(f32::NEG_INFINITY);
        }
        for (i, scores) in block.0[..rows].chunks_mut(SOFTMAX_ROWS).enumerate() {
            worker.stay_awake();
            worker.isa().run(Softmax { scores, state: &mut state, first: i * SOFTMAX_ROWS });
        }
        values.accumulate(worker, range, &block, &state.keep, &state.factor);
    }
    let (sums, ends) = partial.split_at_mut(partial.len() - 2 * rows);
    values.finish(sums);
    for (r, end) in ends.chunks_exact_mut(2).enumerate() {
        end.copy_from_slice(&[state.max[r], state.sum[r]]);
    }
}

/// The online softmax of each query row.
struct State {
    max: [f32; MAX_ROWS],
    sum: [f32; MAX_ROWS],
    /// What the sums so far are multiplied by.
    keep: [f32; MAX_ROWS],
    /// What the weights of the block are multiplied by.
    factor: [f32; MAX_ROWS],
}

impl Default for State {
    fn default() -> Self {
        State {
            max: [f32::NEG_INFINITY; MAX_ROWS],
            sum: [0.0; MAX_ROWS],
            keep: [1.0; MAX_ROWS],
            factor: [0.0; MAX_ROWS],
        }
    }
}

/// Query rows whose softmax is taken together, so that none waits for the horizontal steps of another.
const SOFTMAX_ROWS: usize = 4;

/// Turns the scores of up to [`SOFTMAX_ROWS`] rows of a block, from row `first` on, into weights relative to the block's own
/// maximum, and updates the state.
struct Softmax<'a> {
    scores: &'a mut [[f32; BLOCK]],
    state: &'a mut State,
    first: usize,
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Softmax { scores, state, first } = self;
        let mut peaks = [f32::NEG_INFINITY; SOFTMAX_ROWS];
        for (peak, scores) in peaks.iter_mut().zip(scores.iter()) {
            let mut max = s.splat(f32::NEG_INFINITY);
            for i in (0..BLOCK).step_by(S::LANES) {
                // SAFETY: `LANES` divides `BLOCK`, the length of the row.
                max = s.max(max, unsafe { s.load(scores.as_ptr().add(i)) });
            }
            *peak = s.max_lane(max);
        }
        let mut sums = [s.splat(0.0); SOFTMAX_ROWS];
        for ((sum, peak), scores) in sums.iter_mut().zip(peaks).zip(scores.iter_mut()) {
            // A row that sees nothing keeps scores of minus infinity, whose weights are zero.
            let peak = s.splat(if peak == f32::NEG_INFINITY { 0.0 } else { peak });
            for i in (0..BLOCK).step_by(S::LANES) {
                // SAFETY: as above.
                unsafe {
                    let p = scores.as_mut_ptr().add(i);
                    let weight = exp2_nonpositive(s, s.sub(s.load(p), peak));
                    *sum = s.add(*sum, weight);
                    s.store(p, weight);
                }
            }
        }
        let sums = s.sum4(sums);
        for (r, (peak, sum)) in peaks.into_iter().zip(sums).enumerate().take(scores.len()) {
            state.update(first + r, peak, sum);
        }
    }
}

impl State {
    /// Takes in a block of row `r` with this maximum and this sum of weights.
    #[inline(always)]
    fn update(&mut self, r: usize, peak: f32, sum: f32) {
        if peak == f32::NEG_INFINITY {
            (self.keep[r], self.factor[r]) = (1.0, 0.0);
            return;
        }
        let old = self.max[r];
        self.max[r] = old.max(peak);
        // The larger of the two is kept as it is.
        let other = (old.min(peak) - self.max[r]).exp2();
        (self.keep[r], self.factor[r]) = if old < peak { (other, 1.0) } else { (1.0, other) };
        self.sum[r] = self.sum[r] * self.keep[r] + self.factor[r] * sum;
    }
}
