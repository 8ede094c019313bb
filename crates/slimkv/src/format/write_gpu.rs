//! [`Rows::write`] on the GPU: one pass over the source, one unit a block of channels.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::affine::gpu::{Quantize, Target};
use super::gpu::{BLOCK, Layout, ReadRows, Side, bound, place, with_format};
use super::{RowCopy, RowShape, Rows};
use crate::gpu::float::{stored, to_bf16, to_f16};
use crate::gpu::{Gpu, UNITS, grid, small, with_client, word_array};
use crate::{DType, Error, Result, Tensor};

/// The smallest scale that the library's own caches store.
const EPS: f32 = 1e-8;

/// Writes rows; the shapes are checked.
pub(super) fn write(op: &'static str, gpu: &Gpu, to: &mut Rows, from: &Rows, copies: &[RowCopy]) -> Result<()> {
    let (shape, moved) = (from.shape(), copies.iter().map(|c| c.rows).max().unwrap_or(0));
    if moved == 0 || shape.heads == 0 || shape.head_dim == 0 {
        return Ok(());
    }
    for shape in [shape, to.shape()] {
        check_extent(op, gpu, shape)?;
    }
    match (&mut *to, from) {
        (Rows::Plain(to), _) => make_unique(op, gpu, &mut to.data)?,
        (Rows::Affine(to), Rows::Plain(_)) => {
            for tensor in [&mut to.codes, &mut to.scale, &mut to.zero] {
                make_unique(op, gpu, tensor)?;
            }
        }
        _ => return Err(Error::value(op, "source", "plain rows for an affine destination", "affine rows")),
    }
    let source = from.gpu_side();
    with_client!(gpu, client => {
        let copies = small(client, &table(copies));
        let work = Work { copies, batch: shape.batch, heads: shape.heads, rows: moved };
        match &*to {
            Rows::Plain(to) => {
                let (handle, words) = bound(&to.data);
                let target = Destination { handle, words, capacity: to.shape().capacity, dtype: to.data.dtype() };
                match from {
                    Rows::Plain(from) if from.data.dtype() == target.dtype => copy(client, &work, &source, &target),
                    _ => with_format!(from, F => decode::<F, _>(client, &work, &source, &target)),
                }
            }
            Rows::Affine(to) => {
                let levels = (1 << to.bits) - 1;
                let target = Target::new(&to.codes, &to.scale, &to.zero, to.shape().capacity);
                Quantize { bits: to.bits, group: to.group, axis: to.axis, levels, eps: EPS }
                    .launch(client, &work, &source, &target);
            }
        }
    });
    Ok(())
}

/// Rows that one launch moves.
pub(crate) struct Work {
    /// u32 `[batch, 3]`: first row in the source, first row in the destination, rows.
    pub copies: Handle,
    /// Sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Rows of the sequence that has most.
    pub rows: usize,
}

impl Work {
    /// All rows of `matrices` matrices.
    pub(crate) fn all<R: Runtime>(client: &ComputeClient<R>, matrices: usize, rows: usize) -> Self {
        let copies = small(client, &table(&[RowCopy { from: 0, to: 0, rows }]));
        Work { copies, batch: 1, heads: matrices, rows }
    }
}

fn table(copies: &[RowCopy]) -> Vec<u32> {
    copies.iter().flat_map(|c| [c.from as u32, c.to as u32, c.rows as u32]).collect()
}

/// Plain rows to be written.
pub(crate) struct Destination {
    /// The elements.
    pub handle: Handle,
    /// Words of them.
    pub words: usize,
    /// Rows of a head.
    pub capacity: usize,
    /// The element type.
    pub dtype: DType,
}

/// Kernels address elements with 32 bits.
pub(crate) fn check_extent(op: &'static str, gpu: &Gpu, shape: RowShape) -> Result<()> {
    let elements = shape.batch * shape.heads * shape.capacity * shape.head_dim.next_multiple_of(BLOCK);
    if elements < u32::MAX as usize {
        Ok(())
    } else {
        Err(gpu.unsupported(op, "rows", "fewer than 2^32 elements in one tensor", elements))
    }
}

/// A tensor that others share is copied before it is written, as on the CPU.
fn make_unique(op: &'static str, gpu: &Gpu, tensor: &mut Tensor) -> Result<()> {
    let buffer = tensor.gpu_buffer().expect("the caller dispatched on the device");
    if !buffer.is_unique() {
        let copy = gpu.empty(op, buffer.len())?;
        with_client!(gpu, client => copy_words(client, buffer.handle(), copy.handle(), buffer.words()));
        *tensor = Tensor::from_gpu_buffer(tensor.dtype(), tensor.shape(), copy);
    }
    Ok(())
}

/// Copies a whole buffer.
pub(crate) fn copy_words<R: Runtime>(client: &ComputeClient<R>, from: &Handle, to: &Handle, words: usize) {
    let quads = words / 4;
    // SAFETY: both buffers hold `quads` vectors of four words.
    unsafe {
        copy_all::launch_unchecked::<R>(
            client,
            grid(quads.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            word_array(from, words),
            word_array(to, words),
            quads as u32,
        );
    }
}

#[cube(launch_unchecked)]
fn copy_all(from: &Array<Vector<u32, Const<4>>>, to: &mut Array<Vector<u32, Const<4>>>, quads: u32) {
    if (ABSOLUTE_POS as u32) < quads {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}

/// Plain rows to plain rows of the same dtype, in the widest pieces that a row consists of.
fn copy<R: Runtime>(client: &ComputeClient<R>, work: &Work, from: &Side, to: &Destination) {
    let bytes = from.layout.head_dim as usize * to.dtype.size();
    let (launch, piece, width) = match bytes {
        n if n.is_multiple_of(4) => {
            let width = if n.is_multiple_of(16) { 4 } else { 1 };
            (copy_rows::launch_unchecked::<u32, R> as Copy<R>, 4 * width, width)
        }
        _ => (copy_rows::launch_unchecked::<u16, R> as Copy<R>, 2, 1),
    };
    let pieces = bytes / piece;
    let units = work.batch * work.heads * work.rows * pieces;
    // SAFETY: `Rows::write` checked that the copies lie within both buffers.
    unsafe {
        launch(
            client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            width,
            word_array(&from.codes, from.code_words * 4 / piece * width),
            word_array(&to.handle, to.words * 4 / piece * width),
            word_array(&work.copies, work.batch * 3),
            units as u32,
            work.rows as u32,
            work.heads as u32,
            from.capacity,
            to.capacity as u32,
            pieces as u32,
        );
    }
}

/// The launcher of [`copy_rows`].
type Copy<R> = unsafe fn(
    &ComputeClient<R>,
    CubeCount,
    CubeDim,
    usize,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
);

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn copy_rows<E: Numeric, N: Size>(
    from: &Array<Vector<E, N>>,
    to: &mut Array<Vector<E, N>>,
    copies: &Array<u32>,
    units: u32,
    rows: u32,
    heads: u32,
    from_capacity: u32,
    to_capacity: u32,
    pieces: u32,
) {
    let unit = ABSOLUTE_POS as u32;
    if unit < units {
        let piece = unit % pieces;
        let row = (unit / pieces) % rows;
        let matrix = unit / (pieces * rows);
        let copy = ((matrix / heads) * 3u32) as usize;
        if row < copies[copy + 2] {
            let source = matrix * from_capacity + copies[copy] + row;
            let target = matrix * to_capacity + copies[copy + 1] + row;
            to[(target * pieces + piece) as usize] = from[(source * pieces + piece) as usize];
        }
    }
}

/// Any rows to plain rows.
pub(crate) fn decode<F: ReadRows, R: Runtime>(client: &ComputeClient<R>, work: &Work, from: &Side, to: &Destination) {
    let blocks = (from.layout.head_dim as usize).div_ceil(BLOCK);
    let units = work.batch * work.heads * work.rows * blocks;
    let whole = (from.layout.head_dim as usize).is_multiple_of(BLOCK);
    let (launch, out_width) = match (whole, to.dtype.size()) {
        (true, _) => (decode_rows::launch_unchecked::<F, u32, R> as Decode<R>, 4),
        (_, 2) => (decode_rows::launch_unchecked::<F, u16, R> as Decode<R>, 1),
        _ => (decode_rows::launch_unchecked::<F, u32, R> as Decode<R>, 1),
    };
    let elements = if whole { to.words } else { to.words * 4 / to.dtype.size() };
    // SAFETY: `Rows::write` checked that the copies lie within both buffers.
    unsafe {
        launch(
            client,
            grid(units.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            from.layout.widths.0,
            from.layout.widths.1,
            out_width,
            word_array(&from.codes, from.code_words),
            word_array(&from.params[0], from.param_words),
            word_array(&from.params[1], from.param_words),
            word_array(&to.handle, elements),
            word_array(&work.copies, work.batch * 3),
            units as u32,
            work.rows as u32,
            work.heads as u32,
            from.capacity,
            to.capacity as u32,
            0,
            from.layout,
            to.dtype,
        );
    }
}

/// The launcher of [`decode_rows`].
type Decode<R> = unsafe fn(
    &ComputeClient<R>,
    CubeCount,
    CubeDim,
    usize,
    usize,
    usize,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    ArrayArg<R>,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    Layout,
    DType,
);

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn decode_rows<F: ReadRows, O: Numeric, C: Size, P: Size, N: Size>(
    codes: &Array<Vector<u32, C>>,
    first: &Array<Vector<u32, P>>,
    second: &Array<Vector<u32, P>>,
    to: &mut Array<Vector<O, N>>,
    copies: &Array<u32>,
    units: u32,
    rows: u32,
    heads: u32,
    from_capacity: u32,
    to_capacity: u32,
    zero: u32,
    #[comptime] layout: Layout,
    #[comptime] dtype: DType,
) {
    let unit = ABSOLUTE_POS as u32;
    let blocks = comptime!(layout.head_dim.div_ceil(BLOCK as u32));
    let head_dim = comptime!(layout.head_dim);
    if unit < units {
        let channel = (unit % blocks) * comptime!(BLOCK as u32);
        let row = (unit / blocks) % rows;
        let matrix = unit / (blocks * rows);
        let copy = ((matrix / heads) * 3u32) as usize;
        if row < copies[copy + 2] {
            let at = place(matrix, copies[copy] + row, from_capacity, layout);
            let mut x = Array::<f32>::new(BLOCK);
            F::exact_block::<C, P>(codes, first, second, at, channel, &mut x, zero, layout);
            let target = (matrix * to_capacity + copies[copy + 1] + row) * head_dim + channel;
            if comptime!(layout.head_dim.is_multiple_of(BLOCK as u32)) {
                let size = comptime!(dtype.size());
                #[unroll]
                for v in 0..comptime!(size / 2) {
                    let mut words = Vector::<O, N>::empty();
                    #[unroll]
                    for w in 0..4usize {
                        let i = comptime!((v * 4 + w) * 4 / size);
                        words[w] = match comptime!(dtype) {
                            DType::F32 => O::cast_from(u32::reinterpret(x[i])),
                            DType::BF16 => O::cast_from(to_bf16(x[i]) | (to_bf16(x[comptime!(i + 1)]) << 16u32)),
                            _ => O::cast_from(to_f16(x[i]) | (to_f16(x[comptime!(i + 1)]) << 16u32)),
                        };
                    }
                    to[(target / comptime!(16 / size as u32)) as usize + v] = words;
                }
            } else {
                #[unroll]
                for i in 0..BLOCK {
                    if channel + comptime!(i as u32) < head_dim {
                        to[target as usize + i] = Vector::<O, N>::new(stored::<O>(x[i], dtype));
                    }
                }
            }
        }
    }
}
