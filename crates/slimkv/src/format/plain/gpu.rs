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
}
