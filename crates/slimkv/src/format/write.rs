//! Writing rows from one buffer into another: appending, flushing into a packed format, and reading back.

use super::{Axis, Rows};
use crate::{Error, Result};

/// Rows of one sequence to move, the same for all its heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowCopy {
    /// First row in the source.
    pub from: usize,
    /// First row in the destination.
    pub to: usize,
    /// How many.
    pub rows: usize,
}

impl Rows {
    /// Encodes rows of `source` into this buffer: plain rows are converted or quantised, affine rows are decoded into
    /// plain ones. One copy a sequence. Quantising needs whole groups: `to` on a group boundary where tokens share a
    /// group (the last group may be short).
    pub fn write(&mut self, op: &'static str, source: &Rows, copies: &[RowCopy]) -> Result<()> {
        let (to, from) = (self.shape(), source.shape());
        if (to.batch, to.heads, to.head_dim) != (from.batch, from.heads, from.head_dim) {
            let expected = format!("[{}, {}, S, {}]", to.batch, to.heads, to.head_dim);
            return Err(Error::shape(op, "source", expected, &[from.batch, from.heads, from.capacity, from.head_dim]));
        }
        if source.device() != self.device() {
            return Err(Error::DeviceMismatch { op, arg: "source", expected: self.device(), found: source.device() });
        }
        if copies.len() != to.batch {
            return Err(Error::value(op, "copies", format!("one a sequence ({})", to.batch), copies.len()));
        }
        for copy in copies {
            let fits = |start: usize, capacity: usize| start.checked_add(copy.rows).is_some_and(|end| end <= capacity);
            if !fits(copy.from, from.capacity) || !fits(copy.to, to.capacity) {
                let expected = format!("rows within {} (source) and {} (destination)", from.capacity, to.capacity);
                return Err(Error::value(op, "copies", expected, format!("{copy:?}")));
            }
            if let Rows::Affine(rows) = &*self
                && rows.axis == Axis::Tokens
                && copy.to % rows.group != 0
                && copy.rows != 0
            {
                let expected = format!("a destination on a boundary of {} tokens", rows.group);
                return Err(Error::value(op, "copies", expected, copy.to));
            }
        }
        match self.device().gpu() {
            None => super::write_cpu::write(op, self, source, copies),
            #[cfg(feature = "gpu")]
            Some(gpu) => super::write_gpu::write(op, gpu, self, source, copies),
            #[cfg(not(feature = "gpu"))]
            Some(never) => match *never {},
        }
    }
}
