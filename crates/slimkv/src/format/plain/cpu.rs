//! Plain rows on the CPU.

use super::Plain;
use crate::Result;
use crate::cpu::floats::Floats;
use crate::cpu::{Isa, Kernel, Simd};
use crate::format::decode_cpu::tile_stride;

/// Plain rows, to be widened block by block.
pub(crate) struct Tiles<'a> {
    data: Floats<'a>,
    capacity: usize,
    head_dim: usize,
}

impl<'a> Tiles<'a> {
    pub fn of(rows: &'a Plain) -> Result<Self> {
        let shape = rows.shape();
        Ok(Tiles { data: Floats::of(&rows.data)?, capacity: shape.capacity, head_dim: shape.head_dim })
    }

    pub fn decode(&self, isa: Isa, matrix: usize, from: usize, count: usize, tile: &mut [f32]) {
        let d = self.head_dim;
        let at = (matrix * self.capacity + from) * d;
        isa.run(WidenRows { rows: self.data.part(at, count * d), head_dim: d, tile });
    }
}

struct WidenRows<'a> {
    rows: Floats<'a>,
    head_dim: usize,
    tile: &'a mut [f32],
}

impl Kernel for WidenRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (d, stride) = (self.head_dim, tile_stride(self.head_dim));
        if d == stride {
            return self.rows.widen(s, self.tile);
        }
        for (t, row) in self.tile.chunks_exact_mut(stride).take(self.rows.len() / d).enumerate() {
            self.rows.part(t * d, d).widen(s, row);
            row[d..].fill(0.0);
        }
    }
}
