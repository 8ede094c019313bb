//! [`Rows::write`] on the CPU.

use rayon::prelude::*;

use super::affine::cpu::{self as affine, encode};
use super::{Affine, Plain, RowCopy, Rows};
use crate::cpu::Isa;
use crate::cpu::floats::{Floats, Narrow, Widen};
use crate::dtype::with_float;
use crate::{Element, Error, FloatElement, Result};

/// The smallest scale that the library's own caches store.
const EPS: f32 = 1e-8;

/// Rows that one task of the thread pool converts.
const TILE: usize = 64;

/// Writes rows; the shapes are checked.
pub(super) fn write(op: &'static str, to: &mut Rows, from: &Rows, copies: &[RowCopy]) -> Result<()> {
    let isa = crate::cpu::isa()?;
    match (to, from) {
        (Rows::Plain(to), Rows::Plain(from)) => write_plain(to, from, copies, isa),
        (Rows::Plain(to), Rows::Affine(from)) => {
            let (rows, d) = (affine::Tiles::of(from)?, from.head_dim);
            with_float!(to.data.dtype(), T => {
                for_each_tile::<T>(to, copies, |matrix, first, out| {
                    if d != 0 {
                        affine::decode_to(isa, &rows, matrix, first, out);
                    }
                })
            }, else unreachable!("plain rows are floats"))
        }
        (Rows::Affine(to), Rows::Plain(from)) => write_affine(to, from, copies, isa),
        (Rows::Affine(_), Rows::Affine(_)) => {
            Err(Error::value(op, "source", "plain rows for an affine destination", "affine rows"))
        }
    }
}

/// Hands out every tile of rows to fill: its matrix, the source row of its first row, and itself.
fn for_each_tile<T: FloatElement>(
    to: &mut Plain,
    copies: &[RowCopy],
    fill: impl Fn(usize, usize, &mut [T]) + Sync,
) -> Result<()> {
    let shape = to.shape();
    let d = shape.head_dim;
    if d == 0 || shape.capacity == 0 {
        return Ok(());
    }
    let mut tiles = Vec::new();
    for (matrix, rows) in to.data.as_mut_slice::<T>()?.chunks_mut(shape.capacity * d).enumerate() {
        let copy = copies[matrix / shape.heads];
        let rows = &mut rows[copy.to * d..(copy.to + copy.rows) * d];
        tiles.extend(rows.chunks_mut(TILE * d).enumerate().map(|(i, rows)| (matrix, copy.from + i * TILE, rows)));
    }
    if let [(matrix, first, rows)] = &mut tiles[..] {
        fill(*matrix, *first, rows);
    } else {
        tiles.into_par_iter().for_each(|(matrix, first, rows)| fill(matrix, first, rows));
    }
    Ok(())
}

fn write_plain(to: &mut Plain, from: &Plain, copies: &[RowCopy], isa: Isa) -> Result<()> {
    let (d, capacity) = (from.shape().head_dim, from.shape().capacity);
    let source = Floats::of(&from.data)?;
    with_float!(to.data.dtype(), T => {
        let same = if from.data.dtype() == T::DTYPE { Some(from.data.as_slice::<T>()?) } else { None };
        for_each_tile::<T>(to, copies, |matrix, first, out| {
            let at = (matrix * capacity + first) * d;
            match same {
                Some(source) => out.copy_from_slice(&source[at..at + out.len()]),
                None => {
                    let mut wide = vec![0.0; out.len()];
                    isa.run(Widen { from: source.part(at, out.len()), to: &mut wide });
                    isa.run(Narrow { from: &wide, to: out });
                }
            }
        })
    }, else unreachable!("plain rows are floats"))
}

fn write_affine(to: &mut Affine, from: &Plain, copies: &[RowCopy], isa: Isa) -> Result<()> {
    let (shape, source_capacity) = (to.shape(), from.shape().capacity);
    let scheme =
        encode::Scheme { axis: to.axis, group: to.group, levels: (1 << to.bits) - 1, eps: EPS, channels: to.head_dim };
    let source = Floats::of(&from.data)?;
    with_float!(to.scale.dtype(), P => {
        let to = encode::Destination {
            codes: affine::codes_mut(&mut to.codes, to.bits)?,
            scale: to.scale.as_mut_slice::<P>()?,
            zero: to.zero.as_mut_slice::<P>()?,
            capacity: shape.capacity,
        };
        let copies = copies.iter().flat_map(|&copy| std::iter::repeat_n(copy, shape.heads));
        encode::encode(isa, scheme, source, source_capacity, to, copies);
    }, else unreachable!("parameters are floats"));
    Ok(())
}
