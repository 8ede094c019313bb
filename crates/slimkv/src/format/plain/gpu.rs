//! Plain rows in kernels.

use cubecl::prelude::*;

use crate::format::gpu::{Layout, Place, ReadRows, float_block};

/// [`Plain`](super::Plain) rows.
pub(crate) struct PlainRows;

#[cube]
impl ReadRows for PlainRows {
    fn block<C: Size, P: Size>(
        codes: &Array<Vector<u32, C>>,
        _first: &Array<Vector<u32, P>>,
        _second: &Array<Vector<u32, P>>,
        at: Place,
        channel: u32,
        out: &mut Array<f32>,
        #[comptime] layout: Layout,
    ) {
        let start = at.row * comptime!(layout.head_dim);
        float_block::<C>(codes, start + channel, start + comptime!(layout.head_dim), out, comptime!(layout.float));
    }

    fn exact_block<C: Size, P: Size>(
        codes: &Array<Vector<u32, C>>,
        first: &Array<Vector<u32, P>>,
        second: &Array<Vector<u32, P>>,
        at: Place,
        channel: u32,
        out: &mut Array<f32>,
        _zero: u32,
        #[comptime] layout: Layout,
    ) {
        Self::block::<C, P>(codes, first, second, at, channel, out, layout);
    }
}
