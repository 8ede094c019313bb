//! The decode skeleton on the CPU.
//!
//! The rows of each segment are cut into splits at positions that depend on the segment's own length, each split is walked
//! in blocks of [`BLOCK`] tokens with an online softmax over the blocks, and the partial results of a sequence merge in
//! order. A [`Keys`] turns a block into scores, a [`Values`] adds up a weighted block; they are made once a split and know
//! nothing of softmax, masks or splits.

mod merge;
mod side;
mod split;
mod tile;

use rayon::prelude::*;

pub(crate) use side::{BLOCK, Block, KeyPlan, Keys, Queries, ValuePlan, Values};

use super::MAX_ROWS;
use crate::attend::{Attended, Geometry, Options, Segment};
use crate::cpu::floats::Floats;
use crate::cpu::math::LOG2_E;
use crate::cpu::{Isa, Worker};
use crate::format::plain::decode::PlainPlan;
use crate::format::{Rows, affine};
use crate::{DType, Result, Tensor};
pub(crate) use split::Mask;

/// Query rows of a KV head up to which plain AVX-512 is faster than the matrix unit: of a tile's sixteen rows few would count,
/// and between them it would go to sleep.
const FEW_ROWS: usize = 4;

/// Attention of up to [`MAX_ROWS`] query rows a KV head.
pub(crate) fn attend(
    _op: &'static str,
    q: &Tensor,
    segments: &[Segment],
    options: Options,
    geometry: Geometry,
) -> Result<Attended> {
    let rows = geometry.group() * geometry.s_q;
    let isa = match crate::cpu::isa()? {
        Isa::Amx if rows <= FEW_ROWS => Isa::Avx512,
        isa => isa,
    };
    let exact = options.out_dtype == DType::F32;
    let plans = segments
        .iter()
        .map(|s| Ok((plan_keys(isa, &s.keys, exact)?, plan_values(isa, &s.values, exact)?)))
        .collect::<Result<Vec<_>>>()?;
    let q = Floats::of(q)?;
    let (splits, first) = split::all(segments, options, geometry);
    let mut partials = vec![0.0f32; splits.len() * split::partial_len(rows, geometry.head_dim)];
    // Workspaces of a thread, a pair a segment, made when first met.
    let workspaces = || (Worker::new(isa), segments.iter().map(|_| None).collect::<Vec<_>>());
    let len = split::partial_len(rows, geometry.head_dim).max(1);
    splits.par_iter().zip(partials.par_chunks_mut(len)).for_each_init(
        workspaces,
        |(worker, pairs), (split, partial)| {
            let (key_plan, value_plan) = &plans[split.segment];
            let (keys, values) =
                pairs[split.segment].get_or_insert_with(|| (key_plan.keys(rows), value_plan.values(rows)));
            let queries = Queries::new(isa, q, split.matrix, rows, geometry.head_dim, options.scale * LOG2_E);
            keys.prepare(split.matrix, &queries);
            values.prepare(split.matrix);
            let mask = Mask::new(options, segments[split.segment].spans[split.sequence], geometry);
            split::walk(worker, split.tokens.clone(), &mask, rows, keys.as_mut(), values.as_mut(), partial);
        },
    );
    merge::merge(isa, &partials, &first, geometry, options)
}

/// The fastest way to score these keys; `exact` asks for f32 arithmetic.
fn plan_keys<'a>(isa: Isa, rows: &'a Rows, exact: bool) -> Result<Box<dyn KeyPlan + 'a>> {
    let fast = match rows {
        Rows::Plain(rows) => return Ok(Box::new(PlainPlan(rows))),
        Rows::Affine(rows) if !exact => affine::cpu::key_plan(isa, rows)?,
        Rows::Affine(_) => None,
    };
    fast.map_or_else(|| Ok(Box::new(tile::TilePlan::new(isa, rows)?) as Box<_>), Ok)
}

/// The fastest way to add up these values.
fn plan_values<'a>(isa: Isa, rows: &'a Rows, exact: bool) -> Result<Box<dyn ValuePlan + 'a>> {
    let fast = match rows {
        Rows::Plain(rows) => return Ok(Box::new(PlainPlan(rows))),
        Rows::Affine(rows) if !exact => affine::cpu::value_plan(isa, rows)?,
        Rows::Affine(_) => None,
    };
    fast.map_or_else(|| Ok(Box::new(tile::TilePlan::new(isa, rows)?) as Box<_>), Ok)
}
