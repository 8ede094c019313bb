//! One layer: blocks of rows in the method's formats, and the newest tokens exact.
//!
//! ```text
//! tokens   0 ................................. packed ............ len
//!          | block 0 | block 1 | ... | block n |  tail (exact f16)  |
//! ```
//!
//! `packed` is a function of the length alone - whole groups, leaving at least `residual` exact tokens - so that the
//! contents do not depend on how tokens were chunked into calls.

use super::{Geometry, LayerMethod, Method, row_shape};
use crate::attend::{Segment, Span};
use crate::format::{Plain, RowCopy, RowFormat, Rows, on_device};
use crate::{DType, Device, DeviceKind, Error, Result, Tensor};

/// Tokens by which a layer grows on the CPU, where a further block costs nothing.
const BLOCK: usize = 1024;

/// Keys and values of consecutive tokens.
#[derive(Debug)]
struct Block {
    keys: Rows,
    values: Rows,
    /// The token in row 0.
    start: usize,
}

impl Block {
    fn capacity(&self) -> usize {
        self.keys.shape().capacity
    }
}

/// The newest tokens, exact.
#[derive(Debug)]
pub(super) struct Tail {
    keys: Rows,
    values: Rows,
}

impl Tail {
    pub(super) fn bytes(&self) -> usize {
        self.keys.byte_len() + self.values.byte_len()
    }
}

#[derive(Debug)]
pub(super) struct Layer {
    geometry: Geometry,
    device: Device,
    keys: RowFormat,
    values: RowFormat,
    /// `None` where rows are stored as they come.
    residual: Option<Residual>,
    blocks: Vec<Block>,
    tail: Option<Tail>,
    /// Tokens in blocks, of each sequence.
    packed: Vec<usize>,
    /// Tokens in the tail, of each sequence.
    exact: Vec<usize>,
}

/// How many tokens stay exact.
#[derive(Debug, Clone, Copy)]
struct Residual {
    group: usize,
    tokens: usize,
}

impl Residual {
    fn of(method: LayerMethod) -> Option<Self> {
        match method {
            LayerMethod::Fp16 => None,
            LayerMethod::Kivi(kivi) => Some(Residual { group: kivi.group, tokens: kivi.residual }),
        }
    }

    /// Rows of a tail: the exact tokens, rounded up to groups, and the group that fills.
    fn capacity(self) -> usize {
        self.tokens.next_multiple_of(self.group) + self.group
    }

    /// Tokens that are packed once `len` tokens have arrived.
    fn packed(self, len: usize) -> usize {
        len.saturating_sub(self.tokens) / self.group * self.group
    }
}

impl Layer {
    pub(super) fn new(method: LayerMethod, geometry: Geometry, device: &Device) -> Self {
        let (keys, values) = method.formats();
        Layer {
            geometry,
            device: device.clone(),
            keys,
            values,
            residual: Residual::of(method),
            blocks: Vec::new(),
            tail: None,
            packed: vec![0; geometry.batch],
            exact: vec![0; geometry.batch],
        }
    }

    pub(super) fn len(&self, sequence: usize) -> usize {
        match (self.packed.get(sequence), self.exact.get(sequence)) {
            (Some(packed), Some(exact)) => packed + exact,
            _ => 0,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let blocks: usize = self.blocks.iter().map(|b| b.keys.byte_len() + b.values.byte_len()).sum();
        blocks + self.tail.as_ref().map_or(0, Tail::bytes)
    }

    /// Room for `tokens` packed tokens: whole blocks, the next starting where the last ends.
    pub(super) fn reserve(&mut self, tokens: usize, at_once: bool) -> Result<()> {
        let mut capacity = self.blocks.last().map_or(0, |b| b.start + b.capacity());
        let unit = block_unit(self.residual);
        while capacity < tokens {
            let rows = match at_once {
                true => (tokens - capacity).next_multiple_of(unit),
                false => growth(capacity, unit, &self.device),
            };
            let shape = row_shape(self.geometry, rows);
            let keys = self.keys.allocate(shape, &self.device)?;
            let values = self.values.allocate(shape, &self.device)?;
            self.blocks.push(Block { keys, values, start: capacity });
            capacity += rows;
        }
        Ok(())
    }

    /// The bytes that a layer would have allocated after `tokens` tokens.
    pub(super) fn bytes_for(method: LayerMethod, geometry: Geometry, tokens: usize, device: &Device) -> usize {
        let (keys, values) = method.formats();
        let residual = Residual::of(method);
        let unit = block_unit(residual);
        let packed = residual.map_or(tokens, |r| r.packed(tokens));
        let mut bytes = 0;
        let mut capacity = 0;
        while capacity < packed {
            let rows = growth(capacity, unit, device);
            let shape = row_shape(geometry, rows);
            bytes += keys.byte_len(shape) + values.byte_len(shape);
            capacity += rows;
        }
        bytes + if tokens > 0 { tail_bytes(residual, geometry) } else { 0 }
    }

    /// The layer's rows in token order, with the place of the newest `queries(b)` tokens of each sequence among them.
    pub(super) fn segments(&self, queries: impl Fn(usize) -> usize) -> Result<Vec<Segment>> {
        let spans = |start: &dyn Fn(usize) -> usize, filled: &dyn Fn(usize) -> usize| -> Vec<Span> {
            (0..self.geometry.batch)
                .map(|b| Span { len: filled(b), q_offset: self.len(b) as i64 - queries(b) as i64 - start(b) as i64 })
                .collect()
        };
        let mut segments = Vec::with_capacity(self.blocks.len() + 1);
        for block in &self.blocks {
            let filled = |b: usize| self.packed[b].saturating_sub(block.start).min(block.capacity());
            if (0..self.geometry.batch).any(|b| filled(b) > 0) {
                let spans = spans(&|_| block.start, &filled);
                segments.push(Segment { keys: block.keys.clone(), values: block.values.clone(), spans });
            }
        }
        if let Some(tail) = self.tail.as_ref().filter(|_| self.exact.iter().any(|&n| n > 0)) {
            let spans = spans(&|b| self.packed[b], &|b| self.exact[b]);
            segments.push(Segment { keys: tail.keys.clone(), values: tail.values.clone(), spans });
        }
        if segments.is_empty() {
            let empty = |format: RowFormat| format.allocate(row_shape(self.geometry, 0), &self.device);
            let spans = spans(&|_| 0, &|_| 0);
            segments.push(Segment { keys: empty(self.keys)?, values: empty(self.values)?, spans });
        }
        Ok(segments)
    }

    /// Appends `counts[b]` rows to each sequence. All memory is there before the first row is written, rows are written
    /// where no reader looks, and the lengths change last: an error leaves the layer as it was.
    pub(super) fn append(
        &mut self,
        op: &'static str,
        k: &Rows,
        v: &Rows,
        counts: &[usize],
        spare: &mut Option<Tail>,
    ) -> Result<()> {
        let plans: Vec<Plan> =
            (0..counts.len()).map(|b| Plan::new(self.residual, self.packed[b], self.exact[b], counts[b])).collect();
        let packed: Vec<usize> = plans.iter().zip(&self.packed).map(|(plan, packed)| packed + plan.flushed()).collect();
        self.reserve(packed.iter().copied().max().unwrap_or(0), false)?;
        let moves = self.residual.is_some() && plans.iter().any(|p| p.flushed() > 0);
        if let Some(residual) = self.residual {
            if self.tail.is_none() {
                self.tail = Some(allocate_tail(residual, self.geometry, &self.device)?);
            }
            // Layers may differ in method, and so in their tails.
            let fits = |t: &Tail| t.keys.shape().capacity == residual.capacity();
            if moves && !spare.as_ref().is_some_and(fits) {
                *spare = Some(allocate_tail(residual, self.geometry, &self.device)?);
            }
        }
        let copies = |f: &dyn Fn(usize, &Plan) -> RowCopy| -> Vec<RowCopy> {
            plans.iter().enumerate().map(|(b, plan)| f(b, plan)).collect()
        };
        if let Some(tail) = &mut self.tail {
            let top_up = copies(&|b, p| RowCopy { from: 0, to: self.exact[b], rows: p.top_up });
            write(op, (&mut tail.keys, &mut tail.values), (k, v), &top_up)?;
            let flush = copies(&|b, p| RowCopy { from: 0, to: self.packed[b], rows: p.from_tail });
            write_blocks(op, &mut self.blocks, (&tail.keys, &tail.values), &flush)?;
        }
        // What passes through the tail is rounded to f16; what does not must be as well, or chunks would show.
        let rounded;
        let (k, v) = if self.residual.is_some() && plans.iter().any(|p| p.direct > 0) {
            rounded = (as_f16(op, k, counts)?, as_f16(op, v, counts)?);
            (&rounded.0, &rounded.1)
        } else {
            (k, v)
        };
        let direct = copies(&|b, p| RowCopy { from: p.top_up, to: self.packed[b] + p.from_tail, rows: p.direct });
        write_blocks(op, &mut self.blocks, (k, v), &direct)?;
        let Some(tail) = &mut self.tail else {
            self.packed = packed;
            return Ok(());
        };
        let kept: Vec<usize> =
            plans.iter().enumerate().map(|(b, p)| self.exact[b].saturating_sub(p.from_tail)).collect();
        let rest = copies(&|b, p| RowCopy { from: p.top_up + p.direct, to: kept[b], rows: p.to_tail });
        if let Some(next) = spare.as_mut().filter(|_| moves) {
            let keep = copies(&|b, p| RowCopy { from: p.from_tail, to: 0, rows: kept[b] });
            write(op, (&mut next.keys, &mut next.values), (&tail.keys, &tail.values), &keep)?;
            write(op, (&mut next.keys, &mut next.values), (k, v), &rest)?;
            std::mem::swap(tail, next);
        } else {
            write(op, (&mut tail.keys, &mut tail.values), (k, v), &rest)?;
        }
        self.exact = plans.iter().zip(&kept).map(|(p, kept)| kept + p.to_tail).collect();
        self.packed = packed;
        Ok(())
    }

    /// Keeps the first `tokens` tokens of one sequence.
    pub(super) fn truncate(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        let (packed, exact) = (self.packed[sequence], self.exact[sequence]);
        if tokens >= packed + exact {
            return Ok(());
        }
        match (self.residual, &mut self.tail) {
            (Some(residual), Some(tail)) if tokens < packed => {
                let whole = tokens / residual.group * residual.group;
                if let Some(block) = self.blocks.iter().rfind(|b| b.start <= whole) {
                    let mut copies = vec![RowCopy::default(); self.geometry.batch];
                    copies[sequence] = RowCopy { from: whole - block.start, to: 0, rows: tokens - whole };
                    let from = (&block.keys, &block.values);
                    write("KvCache::truncate", (&mut tail.keys, &mut tail.values), from, &copies)?;
                }
                self.packed[sequence] = whole;
                self.exact[sequence] = tokens - whole;
            }
            (Some(_), _) => self.exact[sequence] = tokens - packed,
            (None, _) => self.packed[sequence] = tokens,
        }
        Ok(())
    }
}

/// Where the rows of one call go, for one sequence. In order: `top_up` new rows complete the tail to whole groups,
/// `from_tail` rows of the tail are packed, `direct` new rows are packed without passing through the tail, `to_tail` new
/// rows stay exact.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Plan {
    top_up: usize,
    from_tail: usize,
    direct: usize,
    to_tail: usize,
}

impl Plan {
    fn new(residual: Option<Residual>, packed: usize, exact: usize, new: usize) -> Self {
        let Some(residual) = residual else {
            return Plan { top_up: 0, from_tail: 0, direct: new, to_tail: 0 };
        };
        // After a truncation fewer tokens are exact than the length asks for; what is packed stays packed.
        let flushed = residual.packed(packed + exact + new).saturating_sub(packed);
        if flushed <= exact {
            return Plan { top_up: 0, from_tail: flushed, direct: 0, to_tail: new };
        }
        let whole = exact.next_multiple_of(residual.group);
        let top_up = whole - exact;
        let direct = flushed - whole;
        Plan { top_up, from_tail: whole, direct, to_tail: new - top_up - direct }
    }

    fn flushed(&self) -> usize {
        self.from_tail + self.direct
    }
}

/// Blocks are whole numbers of groups, so that a group never straddles two.
fn block_unit(residual: Option<Residual>) -> usize {
    residual.map_or(BLOCK, |r| BLOCK.next_multiple_of(r.group))
}

/// Rows of the block after `capacity` rows. On a GPU every block is a launch, so blocks grow with the cache, by an eighth.
fn growth(capacity: usize, unit: usize, device: &Device) -> usize {
    match device.kind() {
        DeviceKind::Cpu => unit,
        _ => (capacity / 8).max(1).next_multiple_of(unit),
    }
}

fn allocate_tail(residual: Residual, geometry: Geometry, device: &Device) -> Result<Tail> {
    let side = || RowFormat::Plain(DType::F16).allocate(row_shape(geometry, residual.capacity()), device);
    Ok(Tail { keys: side()?, values: side()? })
}

fn tail_bytes(residual: Option<Residual>, geometry: Geometry) -> usize {
    residual.map_or(0, |r| 2 * RowFormat::Plain(DType::F16).byte_len(row_shape(geometry, r.capacity())))
}

/// The bytes of the spare tail after `tokens` tokens arrived one by one or in any chunks.
pub(super) fn spare_bytes_for(method: &Method, geometry: Geometry, tokens: usize) -> usize {
    (0..geometry.layers)
        .rev()
        .filter_map(|i| Residual::of(method.layer(i, geometry.layers)))
        .find(|r| r.packed(tokens) > 0)
        .map_or(0, |r| tail_bytes(Some(r), geometry))
}

/// The rows rounded to f16, on their device.
fn as_f16(op: &'static str, rows: &Rows, counts: &[usize]) -> Result<Rows> {
    match rows {
        Rows::Plain(plain) if plain.data().dtype() == DType::F16 => Ok(rows.clone()),
        _ => {
            let mut rounded = RowFormat::Plain(DType::F16).allocate(rows.shape(), &rows.device())?;
            let all: Vec<RowCopy> = counts.iter().map(|&rows| RowCopy { from: 0, to: 0, rows }).collect();
            rounded.write(op, rows, &all)?;
            Ok(rounded)
        }
    }
}

/// Checks new keys or values against the cache.
pub(super) fn incoming(
    op: &'static str,
    arg: &'static str,
    rows: &Tensor,
    geometry: Geometry,
    device: &Device,
) -> Result<Rows> {
    let Geometry { batch, kv_heads, head_dim, .. } = geometry;
    match rows.shape() {
        &[b, h, _, d] if (b, h, d) == (batch, kv_heads, head_dim) => {}
        found => return Err(Error::shape(op, arg, format!("[{batch}, {kv_heads}, n, {head_dim}]"), found)),
    }
    on_device(op, arg, rows, device)?;
    Ok(Rows::Plain(Plain::new(op, arg, rows.clone())?))
}

/// Writes rows of both sides; a call that moves nothing costs nothing.
fn write(op: &'static str, to: (&mut Rows, &mut Rows), from: (&Rows, &Rows), copies: &[RowCopy]) -> Result<()> {
    if copies.iter().all(|c| c.rows == 0) {
        return Ok(());
    }
    to.0.write(op, from.0, copies)?;
    to.1.write(op, from.1, copies)
}

/// Writes rows whose `to` counts tokens of the layer, cut at the blocks' boundaries.
fn write_blocks(op: &'static str, blocks: &mut [Block], from: (&Rows, &Rows), copies: &[RowCopy]) -> Result<()> {
    for block in blocks {
        let end = block.start + block.capacity();
        let inside: Vec<RowCopy> = copies
            .iter()
            .map(|c| {
                let (first, last) = (c.to.max(block.start), (c.to + c.rows).min(end));
                match last.checked_sub(first) {
                    Some(rows) if rows > 0 => RowCopy { from: c.from + first - c.to, to: first - block.start, rows },
                    _ => RowCopy::default(),
                }
            })
            .collect();
        write(op, (&mut block.keys, &mut block.values), from, &inside)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn plans_keep_every_token_and_every_invariant(
            group in 1usize..40, residual in 0usize..100, chunks in proptest::collection::vec(0usize..90, 1..40),
        ) {
            let residual = Residual { group, tokens: residual };
            let (mut packed, mut exact) = (0, 0);
            for n in chunks {
                let plan = Plan::new(Some(residual), packed, exact, n);
                proptest::prop_assert_eq!(plan.top_up + plan.direct + plan.to_tail, n);
                proptest::prop_assert!(plan.from_tail <= exact + plan.top_up);
                proptest::prop_assert!(exact + plan.top_up <= residual.capacity());
                packed += plan.flushed();
                exact = exact.saturating_sub(plan.from_tail) + plan.to_tail;
                proptest::prop_assert_eq!(packed, residual.packed(packed + exact));
                proptest::prop_assert!(exact <= residual.capacity());
            }
        }
    }
}
