//! The decode kernel on tensor cores, for f16 and bf16 outputs on NVIDIA GPUs from sm_80 on.
//!
//! *Bound.* A call needs every packed byte once, so the kernel can only be as fast as memory. Two things stand between it and
//! that. Loads must be in flight all the time. And an element may cost few instructions: at 5 bits an element (4-bit codes with
//! their parameters) an H200 at full bandwidth leaves 4.7 lane instructions for each, half of them on the integer units.
//!
//! *Loads.* A cube fills a multiprocessor and takes one split of one KV head. Each warp has a ring of tiles in shared memory,
//! filled by asynchronous copies a tile or two ahead. The warps share one barrier a stage, which says that a round of copies
//! has landed, so none runs ahead of another by more than its ring. Chunks of 16 bytes are swizzled on the way, against
//! bank conflicts.
//!
//! *Instructions.* Codes become operands by one `and` (see [`codes`](crate::format::fragments::codes)). Scales, zero points and
//! powers of two go where they are applied to few numbers: queries, weights, results. The products take cache
//! rows as their left operand, so the up to eight query rows of a KV head are a whole right operand.

mod finish;
mod join;
mod kernel;
mod products;
mod ring;
mod softmax;

use std::ops::Range;

use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use half::{bf16, f16};

use super::{CutsLaunch, Parts, Queries};
use crate::DType;
use crate::attend::decode::MAX_ROWS;
use crate::attend::{Geometry, Options, Segment};
use crate::format::fragments::{EIGHTS, KeyTiles, Tile, ValueTiles};
use crate::format::gpu::Side;
use crate::format::{Axis, Rows};
use crate::gpu::word_array;
use kernel::Shape;

/// Tokens that the parts of a sequence are multiples of.
const TOKENS: usize = 32;
/// Tokens of a split at least.
const MIN_SPLIT: usize = 4 * TOKENS;
/// Cubes that one long sequence is cut into: the multiprocessors of an H100 or H200, each of which holds one.
const CUBES: usize = 132;

/// Evaluates `$body` with `$t` bound to the tiles of some rows and `$e` to the element type of their operands.
macro_rules! with_tiles {
    ($rows:expr, $t:ident, $e:ident => $body:expr) => {
        match $rows {
            Rows::Plain(rows) if rows.data.dtype() == DType::BF16 => {
                type $t = crate::format::plain::fragments::PlainTiles;
                type $e = bf16;
                $body
            }
            Rows::Plain(_) => {
                type $t = crate::format::plain::fragments::PlainTiles;
                type $e = f16;
                $body
            }
            _ => {
                type $t = crate::format::affine::fragments::AffineTiles;
                type $e = f16;
                $body
            }
        }
    };
}

/// A launch of the kernel, sized for a device, a geometry and a pair of formats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mma {
    geometry: Geometry,
    shape: Shape,
}

impl Mma {
    /// `None` where the device, the geometry or a format is not served; then [`Lanes`](super::Lanes) is.
    pub(crate) fn new<R: Runtime>(
        client: &ComputeClient<R>,
        geometry: Geometry,
        segment: &Segment,
        q_dtype: DType,
        options: Options,
    ) -> Option<Self> {
        let rows = geometry.group() * geometry.s_q;
        let keys = tile(&segment.keys, Axis::Tokens)?;
        let values = tile(&segment.values, Axis::Channels)?;
        // Products with bf16 operands are as exact as bf16 queries and outputs are, and no more.
        let exact_enough = |rows: &Rows, dtype: DType| element(rows) != DType::BF16 || dtype == DType::BF16;
        let served = options.out_dtype != DType::F32
            && rows <= MAX_ROWS
            && geometry.batch <= 65535
            && geometry.kv_heads <= 65535
            && geometry.head_dim.is_multiple_of(16)
            && geometry.head_dim <= 256
            && exact_enough(&segment.keys, q_dtype)
            && exact_enough(&segment.values, options.out_dtype)
            && [&segment.keys, &segment.values].into_iter().all(|rows| device_has(client, element(rows)));
        let limit = client.properties().hardware.max_shared_memory_size as u32;
        let shape =
            Shape { keys, values, warps: 0, stages: 0, columns: 0, rows: 0, q_dtype, out_dtype: options.out_dtype }
                .sized(rows as u32, limit)?;
        served.then_some(Mma { geometry, shape })
    }

    /// Tokens of a split, whole tiles, of a sequence that sees `visible` tokens.
    pub(crate) fn chunk(self, visible: usize) -> usize {
        let splits = (CUBES / self.geometry.kv_heads).max(1);
        visible.div_ceil(splits).next_multiple_of(TOKENS).max(MIN_SPLIT)
    }

    /// Writes the partial results of one segment.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn launch<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        queries: &Queries,
        segment: &Segment,
        keys: &Side,
        values: &Side,
        cuts: CutsLaunch<R>,
        slots: Range<usize>,
        parts: &Parts,
        options: Options,
    ) {
        with_tiles!(&segment.keys, K, KE => with_tiles!(&segment.values, V, VE => {
            self.launch_as::<K, V, KE, VE, R>(client, queries, keys, values, cuts, slots, parts, options)
        }));
    }

    #[allow(clippy::too_many_arguments)]
    fn launch_as<K: KeyTiles, V: ValueTiles, KE: Float, VE: Float, R: Runtime>(
        self,
        client: &ComputeClient<R>,
        queries: &Queries,
        keys: &Side,
        values: &Side,
        cuts: CutsLaunch<R>,
        slots: Range<usize>,
        parts: &Parts,
        options: Options,
    ) {
        let g = self.geometry;
        let all_rows = g.batch * g.q_heads * g.s_q;
        // Nothing is written there without a merge.
        let (out, lse) = parts.merged.as_ref().map_or((&parts.ml, &parts.ml), |merged| (&merged.out, &merged.lse));
        let param_words = (self.shape.values.groups() as usize / 2).max(1);
        // SAFETY: the kernel reads rows below `capacity` and writes slots below `slots`, which the host sized.
        unsafe {
            kernel::mma::launch_unchecked::<K, V, KE, VE, R>(
                client,
                CubeCount::Static(slots.len() as u32, g.kv_heads as u32, g.batch as u32),
                CubeDim::new_1d(self.shape.warps * 32),
                param_words,
                word_array(&queries.handle, queries.words),
                word_array(&keys.codes, keys.code_words),
                word_array(&keys.params[0], keys.param_words),
                word_array(&keys.params[1], keys.param_words),
                word_array(&values.codes, values.code_words),
                word_array(&values.params[0], values.param_words),
                word_array(&values.params[1], values.param_words),
                cuts,
                word_array(&parts.out, all_rows * parts.slots * g.head_dim / 2),
                word_array(&parts.ml, all_rows * parts.slots + g.batch * g.kv_heads),
                word_array(out, all_rows * g.head_dim),
                word_array(lse, all_rows),
                (g.group() * g.s_q) as u32,
                g.s_q as u32,
                keys.capacity,
                slots.start as u32,
                parts.slots as u32,
                options.scale,
                u32::from(options.causal),
                options.window.min(1 << 30) as i32,
                EIGHTS,
                u32::from(parts.merged.is_some()),
                f32::NEG_INFINITY,
                self.shape,
            );
        }
    }
}

impl Shape {
    /// The warps, stages and tile for a number of query rows: as many bytes in flight as registers and shared memory allow.
    fn sized(self, rows: u32, limit: u32) -> Option<Shape> {
        let columns = rows.div_ceil(8);
        // With room for it, each group of a chunk of values gets a copy of the query rows, whose weights take its scales.
        let copies = Some(self.values.spanned()).filter(|n| n * rows <= 8).unwrap_or(1);
        // With room for it in any case, all lanes have query rows to make weights for.
        let key_copies = copies.max(if rows <= 4 { 2 } else { 1 });
        let rows = rows.next_power_of_two().max(4);
        // Narrow codes are bound by instructions rather than by loads, and their kernel fits 128 registers.
        let narrow = [self.keys, self.values].iter().all(|t| t.bits <= 2);
        let most = match (columns == 1 && self.keys.head_dim <= 128, narrow) {
            (true, true) => 16,
            (true, false) => 12,
            (false, _) => 8,
        };
        let with = |warps, tokens, stages| {
            let tile = |t: Tile, copies| Tile { tokens, copies, ..t };
            Shape {
                keys: tile(self.keys, key_copies),
                values: tile(self.values, copies),
                warps,
                stages,
                columns,
                rows,
                ..self
            }
        };
        let fits = |shape: &Shape| {
            let whole = |t: Tile| (t.tokens * t.chunks()).is_multiple_of(32);
            whole(shape.keys) && whole(shape.values) && shape.shared_bytes() <= limit
        };
        let tiles = [(most, 32), (8, 32), (8, 16), (4, 16)];
        let in_flight = [2, 1].into_iter().flat_map(|stages| tiles.map(|(warps, tokens)| with(warps, tokens, stages)));
        in_flight.into_iter().find(fits)
    }
}

/// The tiles of some rows, or `None` where the kernel does not read them. `axis`: the one that must share parameters.
fn tile(rows: &Rows, axis: Axis) -> Option<Tile> {
    let head_dim = rows.shape().head_dim as u32;
    let tile = |bits: u32, group: usize| Tile { head_dim, bits, group: group as u32, tokens: TOKENS as u32, copies: 1 };
    match rows {
        Rows::Plain(rows) => (rows.data.dtype() != DType::F32 && head_dim.is_multiple_of(16)).then_some(tile(16, 0)),
        Rows::Affine(rows) => {
            let of = tile(rows.bits, rows.group);
            let stored = rows.is_packed() && rows.scale.dtype() == DType::F16 && rows.axis == axis;
            let whole_chunks = 32 % rows.bits == 0 && (head_dim * rows.bits).is_multiple_of(128);
            let grouped = match axis {
                Axis::Tokens => rows.group % TOKENS == 0 && whole_chunks && of.run() % 8 == 0,
                Axis::Channels => {
                    (head_dim as usize).is_multiple_of(rows.group)
                        && [2, 4, 8].contains(&of.groups())
                        && whole_chunks
                        && (of.group % of.per_chunk() == 0 || [2, 4].map(|n| n * of.group).contains(&of.per_chunk()))
                }
            };
            (stored && head_dim.is_multiple_of(8) && grouped).then_some(of)
        }
        #[allow(unreachable_patterns)]
        _ => None,
    }
}

/// The element type of a format's operands.
fn element(rows: &Rows) -> DType {
    match rows {
        Rows::Plain(rows) => rows.data.dtype(),
        _ => DType::F16,
    }
}

/// Whether a device has what the kernel is made of, for operands of a type.
fn device_has<R: Runtime>(client: &ComputeClient<R>, dtype: DType) -> bool {
    let properties = client.properties();
    let kind = if dtype == DType::BF16 { FloatKind::BF16 } else { FloatKind::F16 };
    let of = |kind| StorageType::Scalar(ElemType::Float(kind));
    let features = &properties.features;
    let product = features.matmul.mma.iter().any(|c| {
        (c.a_type, c.b_type, c.cd_type) == (of(kind), of(kind), of(FloatKind::F32)) && (c.m, c.n, c.k) == (16, 8, 16)
    });
    let (narrow, wide) = (properties.hardware.plane_size_min, properties.hardware.plane_size_max);
    product && features.matmul.ldmatrix.contains(&of(kind)) && features.copy_async && (narrow, wide) == (32, 32)
}
