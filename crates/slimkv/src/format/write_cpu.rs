//! [`Rows::write`] on the CPU.

use super::{Affine, Axis, Plain, RowCopy, Rows, affine, bits};
use crate::dtype::with_float;
use crate::{DType, Error, FloatElement, Result};

/// The smallest scale that the library's own caches store.
const EPS: f32 = 1e-8;

/// Writes rows; the shapes are checked.
pub(super) fn write(op: &'static str, to: &mut Rows, from: &Rows, copies: &[RowCopy]) -> Result<()> {
    let values = from.decode_oracle()?;
    let (shape, capacity) = (to.shape(), from.shape().capacity);
    let d = shape.head_dim;
    for (b, copy) in copies.iter().enumerate() {
        for h in 0..shape.heads {
            let matrix = b * shape.heads + h;
            let rows = &values[(matrix * capacity + copy.from) * d..][..copy.rows * d];
            match (&mut *to, from) {
                (Rows::Plain(to), _) => write_plain(to, rows, matrix * shape.capacity + copy.to, d)?,
                (Rows::Affine(to), Rows::Plain(_)) => write_affine(to, rows, matrix, copy)?,
                _ => return Err(Error::value(op, "source", "plain rows for an affine destination", "affine rows")),
            }
        }
    }
    Ok(())
}

fn write_plain(to: &mut Plain, rows: &[f32], at: usize, d: usize) -> Result<()> {
    with_float!(to.data.dtype(), T => {
        for (to, &x) in to.data.as_mut_slice::<T>()?[at * d..].iter_mut().zip(rows) {
            *to = T::from_f32(x);
        }
        Ok(())
    }, else unreachable!("plain rows are floats"))
}

fn write_affine(to: &mut Affine, rows: &[f32], matrix: usize, copy: &RowCopy) -> Result<()> {
    let (d, group, capacity) = (to.head_dim, to.group, to.shape().capacity);
    let levels = (1u32 << to.bits) - 1;
    let q = affine::oracle::quantize(rows, copy.rows, d, to.axis, group, levels, EPS, to.scale.dtype());
    let [param_rows, param_columns] = to.axis.param_shape(capacity, d, group);
    let first = matrix * param_rows + if to.axis == Axis::Tokens { copy.to / group } else { copy.to };
    with_float!(to.scale.dtype(), T => {
        let at = first * param_columns;
        for (to, p) in to.scale.as_mut_slice::<T>()?[at..].iter_mut().zip(&q.params) {
            *to = T::from_f32(p.scale);
        }
        for (to, p) in to.zero.as_mut_slice::<T>()?[at..].iter_mut().zip(&q.params) {
            *to = T::from_f32(p.zero);
        }
    }, else unreachable!("parameters are floats"));
    let row = matrix * capacity + copy.to;
    if to.codes.dtype() == DType::U32 {
        let width = bits::words_per_row(d, to.bits);
        let bits = to.bits;
        let words = &mut to.codes.as_mut_slice::<u32>()?[row * width..];
        for (words, codes) in words.chunks_mut(width.max(1)).zip(q.codes.chunks(d.max(1))) {
            bits::pack_row(codes, bits, words);
        }
    } else {
        to.codes.as_mut_slice::<u8>()?[row * d..][..q.codes.len()].copy_from_slice(&q.codes);
    }
    Ok(())
}
