//! Decoding group-affine rows to f32, vectorised along the channels.

use super::encode::fill;
use crate::Result;
use crate::cpu::floats::Floats;
use crate::cpu::{Isa, Kernel, Simd};
use crate::format::affine::{Affine, Axis, bits};
use crate::format::decode_cpu::tile_stride;

/// The codes of all rows.
#[derive(Clone, Copy)]
pub(crate) enum Codes<'a> {
    /// One to a byte.
    Bytes(&'a [u8]),
    /// Packed.
    Words(&'a [u32]),
}

/// Group-affine rows, looked into.
#[derive(Clone, Copy)]
pub(crate) struct Tiles<'a> {
    pub codes: Codes<'a>,
    /// Elements of `codes` that a row takes.
    pub width: usize,
    pub scale: Floats<'a>,
    pub zero: Floats<'a>,
    pub bits: u32,
    pub group: usize,
    pub axis: Axis,
    pub capacity: usize,
    pub head_dim: usize,
    /// The last two axes of `scale` and `zero`.
    pub params: [usize; 2],
}

impl<'a> Tiles<'a> {
    pub fn of(rows: &'a Affine) -> Result<Self> {
        let shape = rows.shape();
        Ok(Tiles {
            codes: if rows.is_packed() {
                Codes::Words(rows.codes.as_slice()?)
            } else {
                Codes::Bytes(rows.codes.as_slice()?)
            },
            width: rows.codes.shape()[3],
            scale: Floats::of(&rows.scale)?,
            zero: Floats::of(&rows.zero)?,
            bits: rows.bits,
            group: rows.group,
            axis: rows.axis,
            capacity: shape.capacity,
            head_dim: shape.head_dim,
            params: rows.axis.param_shape(shape.capacity, shape.head_dim, rows.group),
        })
    }

    /// The parameters that start at row `row` (a group of tokens, or a token) of a matrix.
    #[inline(always)]
    pub fn param_row(&self, params: Floats<'a>, matrix: usize, row: usize) -> Floats<'a> {
        params.part((matrix * self.params[0] + row) * self.params[1], self.params[1])
    }

    pub fn decode(&self, isa: Isa, matrix: usize, from: usize, count: usize, tile: &mut [f32]) {
        isa.run(Decode { rows: self, matrix, from, count, tile });
    }
}

struct Decode<'a> {
    rows: &'a Tiles<'a>,
    matrix: usize,
    from: usize,
    count: usize,
    tile: &'a mut [f32],
}

impl Kernel for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Decode { rows, matrix, from, count, tile } = self;
        let stride = tile_stride(rows.head_dim);
        // Codes and parameters of one row, padded with zeros.
        let mut codes = vec![0u8; bits::cpu::unpacked_len(stride)];
        let (mut scale, mut zero) = (vec![0.0; stride], vec![0.0; stride]);
        let mut group = usize::MAX;
        for (i, row) in tile.chunks_exact_mut(stride).take(count).enumerate() {
            let t = from + i;
            let at = (matrix * rows.capacity + t) * rows.width;
            match rows.codes {
                Codes::Bytes(bytes) => codes[..rows.head_dim].copy_from_slice(&bytes[at..at + rows.width]),
                Codes::Words(words) => {
                    bits::cpu::unpack_codes(&words[at..at + rows.width], rows.bits, rows.head_dim, &mut codes);
                }
            }
            match rows.axis {
                Axis::Tokens if t / rows.group == group => {}
                Axis::Tokens => {
                    group = t / rows.group;
                    rows.param_row(rows.scale, matrix, group).widen(s, &mut scale);
                    rows.param_row(rows.zero, matrix, group).widen(s, &mut zero);
                }
                Axis::Channels => {
                    let (scales, zeros) = (rows.param_row(rows.scale, matrix, t), rows.param_row(rows.zero, matrix, t));
                    for g in 0..rows.params[1] {
                        let channels = g * rows.group..((g + 1) * rows.group).min(rows.head_dim);
                        fill(s, &mut scale[channels.clone()], scales.get(g));
                        fill(s, &mut zero[channels], zeros.get(g));
                    }
                }
            }
            for c in (0..stride).step_by(S::LANES) {
                // SAFETY: all four rows are at least `stride` long, a multiple of `LANES`.
                unsafe {
                    let code = s.to_f(s.load_u8(codes.as_ptr().add(c)));
                    let product = s.mul(code, s.load(scale.as_ptr().add(c)));
                    s.store(row.as_mut_ptr().add(c), s.add(product, s.load(zero.as_ptr().add(c))));
                }
            }
            row[rows.head_dim..].fill(0.0);
        }
    }
}
