//! Encoding rows in group-affine codes, vectorised along the channels. The arithmetic is that of the oracle, operation by
//! operation, so the codes are the same bits.

use rayon::prelude::*;

use crate::FloatElement;
use crate::cpu::floats::{Floats, narrow};
use crate::cpu::{Isa, Kernel, Simd};
use crate::format::RowCopy;
use crate::format::affine::{Axis, bits};
use crate::format::decode_cpu::tile_stride;

/// The largest f16.
const F16_MAX: f32 = 65504.0;

/// Elements that one task of the thread pool handles, about.
const TASK: usize = 1 << 16;

/// How values are quantised.
#[derive(Clone, Copy)]
pub(crate) struct Scheme {
    pub axis: Axis,
    pub group: usize,
    pub levels: u32,
    pub eps: f32,
    pub channels: usize,
}

/// Where codes go.
pub(crate) enum CodesMut<'a> {
    /// One to a byte.
    Bytes(&'a mut [u8]),
    /// Packed in so many bits.
    Words(&'a mut [u32], u32),
}

impl<'a> CodesMut<'a> {
    fn width(&self, channels: usize) -> usize {
        match self {
            CodesMut::Bytes(_) => channels,
            CodesMut::Words(_, bits) => bits::words_per_row(channels, *bits),
        }
    }

    /// Splits off the first `rows` rows.
    fn split_off(&mut self, rows: usize, channels: usize) -> Self {
        let len = rows * self.width(channels);
        match self {
            CodesMut::Bytes(all) => CodesMut::Bytes(all.split_off_mut(..len).unwrap_or_default()),
            CodesMut::Words(all, bits) => CodesMut::Words(all.split_off_mut(..len).unwrap_or_default(), *bits),
        }
    }

    /// Stores one row of codes, which has at least seven bytes after it.
    #[inline(always)]
    fn put(&mut self, row: usize, channels: usize, codes: &[u8]) {
        let width = self.width(channels);
        match self {
            CodesMut::Bytes(all) => all[row * width..(row + 1) * width].copy_from_slice(&codes[..channels]),
            CodesMut::Words(all, bits) => {
                bits::cpu::pack_codes(codes, channels, *bits, &mut all[row * width..(row + 1) * width]);
            }
        }
    }
}

/// Rows to encode: where they come from, and where codes and parameters go.
struct Job<'a, P> {
    source: Floats<'a>,
    codes: CodesMut<'a>,
    scale: &'a mut [P],
    zero: &'a mut [P],
}

/// Buffers of a whole destination: `matrices` times `capacity` rows.
pub(crate) struct Destination<'a, P> {
    pub codes: CodesMut<'a>,
    pub scale: &'a mut [P],
    pub zero: &'a mut [P],
    pub capacity: usize,
}

/// Encodes the rows that `copy` names for each matrix of `source`, which holds `source_capacity` rows a matrix. Where tokens
/// share parameters each copy begins on a group boundary of the destination.
pub(crate) fn encode<P: FloatElement>(
    isa: Isa,
    scheme: Scheme,
    source: Floats,
    source_capacity: usize,
    mut to: Destination<P>,
    copies: impl Iterator<Item = RowCopy>,
) {
    let channels = scheme.channels;
    let [param_rows, param_columns] = scheme.axis.param_shape(to.capacity, channels, scheme.group);
    // Tokens of a task: whole groups where tokens share one.
    let unit = if scheme.axis == Axis::Tokens { scheme.group } else { 1 };
    let step = (TASK / channels.max(1) / unit).max(1) * unit;
    let mut jobs = Vec::new();
    for (matrix, copy) in copies.enumerate() {
        let first = if scheme.axis == Axis::Tokens { copy.to / scheme.group } else { copy.to };
        let mut params_left = param_rows;
        let mut take = |rows: usize, params: usize| {
            params_left -= params;
            let scale = to.scale.split_off_mut(..params * param_columns).unwrap_or_default();
            let zero = to.zero.split_off_mut(..params * param_columns).unwrap_or_default();
            (to.codes.split_off(rows, channels), scale, zero, params_left)
        };
        let (.., mut left) = take(copy.to, first);
        for start in (0..copy.rows).step_by(step) {
            let rows = step.min(copy.rows - start);
            let [job_params, _] = scheme.axis.param_shape(rows, channels, scheme.group);
            let (codes, scale, zero, rest) = take(rows, job_params);
            left = rest;
            let at = (matrix * source_capacity + copy.from + start) * channels;
            jobs.push(Job { source: source.part(at, rows * channels), codes, scale, zero });
        }
        take(to.capacity - copy.to - copy.rows, left);
    }
    jobs.into_par_iter().for_each(|job| isa.run(Encode { scheme, job }));
}

struct Encode<'a, P> {
    scheme: Scheme,
    job: Job<'a, P>,
}

impl<P: FloatElement> Kernel for Encode<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Encode { scheme, mut job } = self;
        if scheme.channels == 0 {
            return;
        }
        let mut row = Row::new(s, scheme);
        match scheme.axis {
            Axis::Tokens => {
                let groups = job.source.len() / scheme.channels;
                for (i, first) in (0..groups).step_by(scheme.group).enumerate() {
                    let tokens = first..(first + scheme.group).min(groups);
                    row.start_extremes();
                    for t in tokens.clone() {
                        row.load(&job.source, t);
                        row.extend_extremes();
                    }
                    let at = i * scheme.channels;
                    row.params_of_channels(&mut job.scale[at..], &mut job.zero[at..]);
                    for t in tokens {
                        row.load(&job.source, t);
                        row.encode();
                        job.codes.put(t, scheme.channels, &row.codes);
                    }
                }
            }
            Axis::Channels => {
                let columns = scheme.channels.div_ceil(scheme.group);
                for t in 0..job.source.len() / scheme.channels {
                    row.load(&job.source, t);
                    let at = t * columns;
                    row.params_of_groups(&mut job.scale[at..at + columns], &mut job.zero[at..at + columns]);
                    row.encode();
                    job.codes.put(t, scheme.channels, &row.codes);
                }
            }
        }
    }
}

/// One row of values with the parameters of each of its channels; all padded to whole vectors.
struct Row<S: Simd> {
    s: S,
    scheme: Scheme,
    values: Vec<f32>,
    low: Vec<f32>,
    high: Vec<f32>,
    scale: Vec<f32>,
    zero: Vec<f32>,
    codes: Vec<u8>,
}

impl<S: Simd> Row<S> {
    #[inline(always)]
    fn new(s: S, scheme: Scheme) -> Self {
        let stride = tile_stride(scheme.channels);
        let zeros = vec![0.0; stride];
        let [values, low, high, scale, zero] = std::array::from_fn(|_| zeros.clone());
        Row { s, scheme, values, low, high, scale, zero, codes: vec![0; stride + 8] }
    }

    #[inline(always)]
    fn load(&mut self, source: &Floats, t: usize) {
        source.part(t * self.scheme.channels, self.scheme.channels).widen(self.s, &mut self.values);
    }

    #[inline(always)]
    fn start_extremes(&mut self) {
        self.low.fill(f32::INFINITY);
        self.high.fill(f32::NEG_INFINITY);
    }

    /// Takes the finite values into the extremes of their channels.
    #[inline(always)]
    fn extend_extremes(&mut self) {
        let s = self.s;
        for c in (0..self.values.len()).step_by(S::LANES) {
            // SAFETY: all vectors of the row have the same length, a multiple of `LANES`.
            unsafe {
                let x = s.load(self.values.as_ptr().add(c));
                let (low, high) = (self.low.as_mut_ptr().add(c), self.high.as_mut_ptr().add(c));
                s.store(low, s.min(s.load(low), s.finite_or(x, s.splat(f32::INFINITY))));
                s.store(high, s.max(s.load(high), s.finite_or(x, s.splat(f32::NEG_INFINITY))));
            }
        }
    }

    /// Scale and zero point of each channel, from its own extremes.
    #[inline(always)]
    fn params_of_channels<P: FloatElement>(&mut self, scale: &mut [P], zero: &mut [P]) {
        let s = self.s;
        for c in (0..self.values.len()).step_by(S::LANES) {
            // SAFETY: as above.
            unsafe {
                let (low, high) = (s.load(self.low.as_ptr().add(c)), s.load(self.high.as_ptr().add(c)));
                let (a, b) = params::<S, P>(s, self.scheme, low, high);
                s.store(self.scale.as_mut_ptr().add(c), a);
                s.store(self.zero.as_mut_ptr().add(c), b);
            }
        }
        narrow(s, &self.scale[..self.scheme.channels], scale);
        narrow(s, &self.zero[..self.scheme.channels], zero);
        if P::DTYPE == crate::DType::F16 {
            Floats::F16(bytemuck::cast_slice(&scale[..self.scheme.channels])).widen(s, &mut self.scale);
            Floats::F16(bytemuck::cast_slice(&zero[..self.scheme.channels])).widen(s, &mut self.zero);
        }
    }

    /// Scale and zero point of each group of channels, spread to its channels.
    #[inline(always)]
    fn params_of_groups<P: FloatElement>(&mut self, scale: &mut [P], zero: &mut [P]) {
        let (s, scheme) = (self.s, self.scheme);
        let columns = scale.len();
        for (g, values) in self.values[..scheme.channels].chunks(scheme.group).enumerate() {
            (self.low[g], self.high[g]) = extremes(s, values);
        }
        // The parameters of all groups at once; there are no more groups than channels.
        for c in (0..columns).step_by(S::LANES) {
            // SAFETY: as above.
            unsafe {
                let (low, high) = (self.low.as_mut_ptr().add(c), self.high.as_mut_ptr().add(c));
                let (a, b) = params::<S, P>(s, scheme, s.load(low), s.load(high));
                s.store(low, a);
                s.store(high, b);
            }
        }
        narrow(s, &self.low[..columns], scale);
        narrow(s, &self.high[..columns], zero);
        for g in 0..columns {
            let channels = g * scheme.group..((g + 1) * scheme.group).min(scheme.channels);
            fill(s, &mut self.scale[channels.clone()], scale[g].to_f32());
            fill(s, &mut self.zero[channels], zero[g].to_f32());
        }
    }

    /// The codes of the values.
    #[inline(always)]
    fn encode(&mut self) {
        let s = self.s;
        let (none, levels) = (s.splat(0.0), s.splat(self.scheme.levels as f32));
        for c in (0..self.values.len()).step_by(S::LANES) {
            // SAFETY: as above; there is a code for each value.
            unsafe {
                let scale = s.load(self.scale.as_ptr().add(c));
                let distance = s.sub(s.load(self.values.as_ptr().add(c)), s.load(self.zero.as_ptr().add(c)));
                // NaN becomes 0, and so does every value of a group whose scale is 0.
                let code = s.min(s.max(s.div(distance, scale), none), levels);
                let code = s.select_eq(scale, none, none, code);
                s.store_u8(self.codes.as_mut_ptr().add(c), s.round(code));
            }
        }
    }
}

/// Scales and zero points from extremes; no finite element is `low = inf`. Saturated to what `P` can hold.
#[inline(always)]
fn params<S: Simd, P: FloatElement>(s: S, scheme: Scheme, low: S::F, high: S::F) -> (S::F, S::F) {
    let (none, never) = (s.splat(0.0), s.splat(f32::INFINITY));
    let step = s.div(s.sub(high, low), s.splat(scheme.levels as f32));
    let scale = s.select_eq(low, never, none, s.max(step, s.splat(scheme.eps)));
    let zero = s.select_eq(low, never, none, low);
    if P::DTYPE == crate::DType::F16 {
        let clamp = |x| s.max(s.min(x, s.splat(F16_MAX)), s.splat(-F16_MAX));
        (clamp(scale), clamp(zero))
    } else {
        (scale, zero)
    }
}

/// The extremes of the finite values.
#[inline(always)]
fn extremes<S: Simd>(s: S, values: &[f32]) -> (f32, f32) {
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    let chunks = values.chunks_exact(S::LANES);
    let rest = chunks.remainder();
    if chunks.len() > 0 {
        let (mut lows, mut highs) = (s.splat(low), s.splat(high));
        for chunk in chunks {
            // SAFETY: the chunk has `LANES` elements.
            let x = unsafe { s.load(chunk.as_ptr()) };
            lows = s.min(lows, s.finite_or(x, s.splat(f32::INFINITY)));
            highs = s.max(highs, s.finite_or(x, s.splat(f32::NEG_INFINITY)));
        }
        low = -s.max_lane(s.sub(s.splat(0.0), lows));
        high = s.max_lane(highs);
    }
    for &x in rest.iter().filter(|x| x.is_finite()) {
        low = low.min(x);
        high = high.max(x);
    }
    (low, high)
}

#[inline(always)]
pub(super) fn fill<S: Simd>(s: S, out: &mut [f32], x: f32) {
    let v = s.splat(x);
    let whole = out.len() / S::LANES * S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: `i + LANES` is within `out`.
        unsafe { s.store(out.as_mut_ptr().add(i), v) }
    }
    out[whole..].fill(x);
}
