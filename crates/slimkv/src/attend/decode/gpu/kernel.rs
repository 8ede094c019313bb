//! Which kernel works on a segment, and how it cuts the segment up.

use std::ops::Range;

use cubecl::prelude::*;

use super::{Cut, Cuts, Lanes, Mma, Parts, Queries, TILE};
use crate::DType;
use crate::attend::prefill::gpu::Tiles;
use crate::attend::{Geometry, Options, Segment, Span};
use crate::format::gpu::with_format;

/// Cubes that one long sequence is cut into: enough to occupy a large GPU.
const CUBES: usize = 1024;

/// What the kernels of a call are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Skeleton {
    /// Few queries: splits, so that a long sequence occupies the GPU.
    Decode,
    /// Many queries: tiles of rows that a block of queries shares.
    Prefill,
}

/// A kernel that writes the partial results of a segment. The choice depends on the device, the formats and the head
/// geometry, never on lengths.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kernel {
    /// [`Lanes`], cut into splits of at least two tiles.
    Lanes(Lanes, Geometry),
    /// [`Tiles`].
    Tiles(Tiles, Geometry),
    /// [`Mma`], which cuts for itself.
    Mma(Mma, Geometry),
}

impl Kernel {
    /// `None` where the device has too little shared memory for a single row.
    pub(super) fn choose<R: Runtime>(
        client: &ComputeClient<R>,
        skeleton: Skeleton,
        segment: &Segment,
        q_dtype: DType,
        options: Options,
        geometry: Geometry,
    ) -> Option<Self> {
        let tiles = || Tiles::new(client, geometry, q_dtype).map(|tiles| Kernel::Tiles(tiles, geometry));
        let lanes = || Lanes::new(client, geometry).map(|lanes| Kernel::Lanes(lanes, geometry));
        match skeleton {
            Skeleton::Decode => Mma::new(client, geometry, segment, q_dtype, options)
                .map(|mma| Kernel::Mma(mma, geometry))
                .or_else(lanes),
            Skeleton::Prefill => tiles().or_else(lanes),
        }
    }

    /// The cut of a span for `count` queries from `first` on. The chunk is a function of what all queries of the sequence
    /// see, whatever the pass.
    pub(super) fn cut(&self, span: Span, first: usize, count: usize, options: Options) -> Cut {
        let (Kernel::Lanes(_, g) | Kernel::Tiles(_, g) | Kernel::Mma(_, g)) = self;
        let all = Cut::new(span, 0, g.s_q, options, 1);
        let visible = (all.high - all.low) as usize;
        let split = |blocks: usize, least: usize| {
            (visible * g.kv_heads * blocks).div_ceil(CUBES).next_multiple_of(TILE).max(least)
        };
        let chunk = match self {
            Kernel::Lanes(lanes, _) => split(lanes.row_blocks(*g), 2 * TILE),
            Kernel::Tiles(tiles, _) => split(tiles.row_blocks(*g), 8 * TILE),
            Kernel::Mma(mma, _) => mma.chunk(visible),
        };
        Cut::new(span, first, count, options, chunk)
    }

    /// Whether it merges for itself, if all of a call do.
    pub(super) fn merges(&self) -> bool {
        matches!(self, Kernel::Mma(..))
    }

    /// Writes the partial results of the segment into `slots`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn launch<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        queries: &Queries,
        segment: &Segment,
        cuts: &[Cut],
        slots: Range<usize>,
        parts: &Parts,
        options: Options,
        geometry: Geometry,
    ) {
        let (keys, values) = (segment.keys.gpu_side(), segment.values.gpu_side());
        let cuts = Cuts::arg(client, cuts, &queries.handle);
        match self {
            Kernel::Lanes(lanes, _) => with_format!(&segment.keys, K => with_format!(&segment.values, V => {
                lanes.launch::<K, V, R>(client, queries, &keys, &values, cuts, slots, parts, options, geometry)
            })),
            Kernel::Tiles(tiles, _) => with_format!(&segment.keys, K => with_format!(&segment.values, V => {
                tiles.launch::<K, V, R>(client, queries, &keys, &values, cuts, slots, parts, options, geometry)
            })),
            Kernel::Mma(mma, _) => mma.launch(client, queries, segment, &keys, &values, cuts, slots, parts, options),
        }
    }
}
