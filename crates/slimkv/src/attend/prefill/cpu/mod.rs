//! The prefill skeleton on the CPU.
//!
//! A task takes a block of query rows of one KV head, which lie together in memory, and walks the tokens in tiles. A tile
//! of keys and one of values are decoded to f32 once and used by every panel of the block. Scores are computed transposed,
//! one column a query, so that nothing has to be shuffled: keys and weights are broadcast, the softmax runs down the
//! columns.

mod panel;

use rayon::prelude::*;

use super::super::decode::cpu::Mask;
use crate::attend::{Attended, Geometry, Options, Segment};
use crate::cpu::floats::{Floats, Narrow};
use crate::cpu::math::LOG2_E;
use crate::cpu::{Isa, Kernel, Simd};
use crate::dtype::with_float;
use crate::format::decode_cpu::{Tiles, tile_stride};
use crate::{DType, Device, FloatElement, Result, Tensor};
use panel::Panel;

/// Query rows of a task.
const ROWS: usize = 256;

/// Tokens of a tile.
const TILE: usize = 128;

/// Attention of any number of queries.
pub(crate) fn attend(
    _op: &'static str,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
) -> Result<Attended> {
    let isa = crate::cpu::isa()?;
    let mut out = Tensor::zeros(options.out_dtype, q.shape(), &Device::cpu())?;
    let mut lse = Tensor::zeros(DType::F32, &q.shape()[..3], &Device::cpu())?;
    let tiles =
        segments.iter().map(|s| Ok((Tiles::of(&s.keys)?, Tiles::of(&s.values)?))).collect::<Result<Vec<_>>>()?;
    let call = Call { isa, q: Floats::of(q)?, segments, tiles, options, g: geometry };
    let (rows, d) = (geometry.group() * geometry.s_q, geometry.head_dim);
    if rows == 0 {
        return Ok(Attended { out, lse });
    }
    with_float!(options.out_dtype, T => {
        let heads = out.as_mut_slice::<T>()?.par_chunks_mut(rows * d).zip(lse.as_mut_slice::<f32>()?.par_chunks_mut(rows));
        heads.enumerate().for_each(|(matrix, (out, lse))| {
            let blocks = out.par_chunks_mut(ROWS * d).zip(lse.par_chunks_mut(ROWS));
            blocks.enumerate().for_each(|(i, (out, lse))| call.block(matrix, i * ROWS, out, lse));
        });
    }, else unreachable!("checked to be a float"));
    Ok(Attended { out, lse })
}

struct Call<'a> {
    isa: Isa,
    q: Floats<'a>,
    segments: &'a [Segment],
    tiles: Vec<(Tiles<'a>, Tiles<'a>)>,
    options: Options,
    g: Geometry,
}

impl Call<'_> {
    /// The query rows of KV head `matrix` from `first` on, as many as `lse` has.
    fn block<T: FloatElement>(&self, matrix: usize, first: usize, out: &mut [T], lse: &mut [f32]) {
        let (g, isa) = (self.g, self.isa);
        let (d, stride) = (g.head_dim, tile_stride(g.head_dim));
        let at = (matrix * g.group() * g.s_q + first) * d;
        let width = isa.run(PanelWidth);
        let mut panels: Vec<Panel> = (0..lse.len())
            .step_by(width)
            .map(|r| {
                let rows = width.min(lse.len() - r);
                let queries = self.q.part(at + r * d, rows * d);
                Panel::new(isa, queries, rows, width, d, self.options.scale * LOG2_E)
            })
            .collect();
        let (mut keys, mut values) = (vec![0.0; TILE * stride], vec![0.0; TILE * stride]);
        for (segment, (key_tiles, value_tiles)) in self.segments.iter().zip(&self.tiles) {
            let span = segment.spans[matrix / g.kv_heads];
            let mask = Mask::new(self.options, span, g);
            let visible: Vec<_> = (first..first + lse.len()).map(|row| mask.visible(row)).collect();
            for from in (0..span.len).step_by(TILE) {
                let to = (from + TILE).min(span.len);
                if visible.iter().all(|v| v.start >= to || v.end <= from || v.is_empty()) {
                    continue;
                }
                key_tiles.decode(isa, matrix, from, to - from, &mut keys);
                value_tiles.decode(isa, matrix, from, to - from, &mut values);
                for (panel, visible) in panels.iter_mut().zip(visible.chunks(width)) {
                    panel.attend(isa, &keys, &values, from..to, visible);
                }
            }
        }
        let rows = out.chunks_exact_mut(d).zip(lse);
        for ((result, end), (out, lse)) in panels.iter_mut().flat_map(Panel::finish).zip(rows) {
            isa.run(Narrow { from: &result[..d], to: out });
            *lse = end;
        }
    }
}

/// Query rows of a panel: two vectors.
struct PanelWidth;

impl Kernel for PanelWidth {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        2 * S::LANES
    }
}
