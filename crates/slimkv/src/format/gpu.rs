//! How kernels read rows: one trait that each format implements, and what the host tells a kernel about a buffer.
//!
//! Every array is bound as 32-bit words, in vectors as wide as the layout allows, whatever its dtype: 8 and 16-bit
//! elements are cut out of words, so one kernel serves all dtypes and devices, bf16 included.

use cubecl::prelude::*;
use cubecl::server::Handle;
use half::f16;

use super::{Axis, Rows};
use crate::gpu::float::{from_bf16, from_f16};
use crate::{DType, Tensor};

/// Channels that are decoded together.
pub(crate) const BLOCK: usize = 8;

/// What a kernel must know of a layout when it is compiled. It never depends on how many rows there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    /// Elements of a row.
    pub head_dim: u32,
    /// Bits of a code: packed width, or 8 for one code a byte. Unused by plain rows.
    pub bits: u32,
    /// Whether rows start on a word. Otherwise bytes or halves are addressed one by one.
    pub word_rows: bool,
    /// Elements that share parameters.
    pub group: u32,
    /// Whether tokens, not channels, share them.
    pub by_token: bool,
    /// How floats are stored: the elements of plain rows, the parameters of the others.
    pub float: DType,
    /// Words in a vector of the codes (or elements), and of the parameters.
    pub widths: (usize, usize),
}

/// One side of an attention, bound.
#[derive(Clone)]
pub(crate) struct Side {
    /// Codes or elements.
    pub codes: Handle,
    /// Words of `codes`.
    pub code_words: usize,
    /// The parameters; the codes again where there are none.
    pub params: [Handle; 2],
    /// Words of each of them.
    pub param_words: usize,
    /// The layout.
    pub layout: Layout,
    /// Rows of a head.
    pub capacity: u32,
}

/// Where a row lies. Made by [`place`].
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    /// The row among all rows of the buffer.
    pub row: u32,
    /// The row of its parameters.
    pub params: u32,
}

/// The place of `token` of a matrix, the matrix being a (sequence, head).
#[cube]
pub(crate) fn place(matrix: u32, token: u32, capacity: u32, #[comptime] layout: Layout) -> Place {
    let row = matrix * capacity + token;
    if comptime!(layout.by_token) {
        let group = comptime!(layout.group);
        Place { row, params: matrix * ((capacity + comptime!(layout.group - 1)) / group) + token / group }
    } else {
        Place { row, params: row }
    }
}

/// A format that kernels can read.
#[cube]
pub(crate) trait ReadRows: Send + Sync + 'static {
    /// Decodes [`BLOCK`] channels of a row from `channel` on, which is a multiple of it. Channels past the end are 0.
    fn block<C: Size, P: Size>(
        codes: &Array<Vector<u32, C>>,
        first: &Array<Vector<u32, P>>,
        second: &Array<Vector<u32, P>>,
        at: Place,
        channel: u32,
        out: &mut Array<f32>,
        #[comptime] layout: Layout,
    );

    /// The same, every operation rounded as the definition says; `zero` as in [`pin`](crate::gpu::float::pin).
    fn exact_block<C: Size, P: Size>(
        codes: &Array<Vector<u32, C>>,
        first: &Array<Vector<u32, P>>,
        second: &Array<Vector<u32, P>>,
        at: Place,
        channel: u32,
        out: &mut Array<f32>,
        zero: u32,
        #[comptime] layout: Layout,
    );
}

/// A word of an array, from whichever vectors it is bound in.
#[cube]
pub(crate) fn word<N: Size>(array: &Array<Vector<u32, N>>, index: u32) -> u32 {
    let width = N::value();
    let width = comptime!(width as u32);
    if comptime!(width == 1) {
        array[index as usize][0]
    } else {
        let vector = array[(index / width) as usize];
        let mut found = vector[0];
        #[unroll]
        for i in 1..width {
            found = select(index % width == i, vector[i as usize], found);
        }
        found
    }
}

/// A float of an array, addressed by element.
#[cube]
pub(crate) fn float_at<N: Size>(array: &Array<Vector<u32, N>>, index: u32, #[comptime] dtype: DType) -> f32 {
    match comptime!(dtype) {
        DType::F32 => f32::reinterpret(word::<N>(array, index)),
        DType::BF16 => from_bf16(word::<N>(array, index / 2u32) >> (16u32 * (index % 2u32))),
        _ => from_f16((word::<N>(array, index / 2u32) >> (16u32 * (index % 2u32))) & 0xFFFFu32),
    }
}

/// [`BLOCK`] consecutive floats from `index` on. Where the array is bound in vectors, `index` is a multiple of what one
/// holds; floats at and after `end` are 0.
#[cube]
pub(crate) fn float_block<N: Size>(
    array: &Array<Vector<u32, N>>,
    index: u32,
    end: u32,
    out: &mut Array<f32>,
    #[comptime] dtype: DType,
) {
    let width = N::value();
    if comptime!(width == 1) {
        #[unroll]
        for i in 0..BLOCK {
            let at = index + comptime!(i as u32);
            out[i] = 0.0f32;
            if at < end {
                out[i] = float_at::<N>(array, at, dtype);
            }
        }
    } else {
        let size = comptime!(dtype.size());
        let vectors = comptime!(BLOCK * size / 4 / width);
        let per_word = comptime!(4 / size);
        let first = index * comptime!(size as u32) / comptime!(4 * width as u32);
        #[unroll]
        for v in 0..vectors {
            let words = array[first as usize + v];
            #[unroll]
            for w in 0..width {
                let at = comptime!((v * width + w) * per_word);
                match comptime!(dtype) {
                    DType::F32 => {
                        out[at] = f32::reinterpret(words[w]);
                    }
                    DType::BF16 => {
                        out[at] = from_bf16(words[w]);
                        out[comptime!(at + 1)] = f32::reinterpret(words[w] & 0xFFFF_0000u32);
                    }
                    _ => {
                        let pair = Vector::<f16, Const<2>>::reinterpret(words[w]);
                        out[at] = f32::cast_from(pair[0]);
                        out[comptime!(at + 1)] = f32::cast_from(pair[1]);
                    }
                }
            }
        }
    }
}

/// Words in a vector for blocks of `bytes` that start at multiples of `bytes`: as many as fill it, at most four.
pub(crate) fn vector_width(bytes: usize, aligned: bool) -> usize {
    if aligned && bytes.is_multiple_of(4) { (bytes / 4).min(4) } else { 1 }
}

impl Layout {
    /// Plain rows.
    pub(crate) fn plain(head_dim: usize, float: DType) -> Self {
        let aligned = head_dim.is_multiple_of(BLOCK);
        Layout {
            head_dim: head_dim as u32,
            bits: 0,
            word_rows: (head_dim * float.size()).is_multiple_of(4),
            group: 1,
            by_token: false,
            float,
            widths: (vector_width(BLOCK * float.size(), aligned), 1),
        }
    }

    /// Group-affine rows, packed or one code a byte.
    pub(crate) fn affine(head_dim: usize, bits: u32, packed: bool, group: usize, axis: Axis, float: DType) -> Self {
        let by_token = axis == Axis::Tokens;
        let aligned = head_dim.is_multiple_of(BLOCK);
        let word_rows = packed || head_dim.is_multiple_of(4);
        let bits = if packed { bits } else { 8 };
        let code_bytes = BLOCK * bits as usize / 8;
        Layout {
            head_dim: head_dim as u32,
            bits,
            word_rows,
            group: group as u32,
            by_token,
            float,
            widths: (
                if bits == 3 { 1 } else { vector_width(code_bytes, aligned) },
                if by_token { vector_width(BLOCK * float.size(), aligned) } else { 1 },
            ),
        }
    }
}

impl Rows {
    /// The buffers as kernels bind them. The rows are on a GPU.
    pub(crate) fn gpu_side(&self) -> Side {
        let shape = self.shape();
        let (codes, params, layout) = match self {
            Rows::Plain(rows) => (&rows.data, None, Layout::plain(shape.head_dim, rows.data.dtype())),
            Rows::Affine(rows) => (
                &rows.codes,
                Some([&rows.scale, &rows.zero]),
                Layout::affine(shape.head_dim, rows.bits, rows.is_packed(), rows.group, rows.axis, rows.scale.dtype()),
            ),
        };
        let (codes, code_words) = bound(codes);
        let (params, param_words) = match params {
            None => ([codes.clone(), codes.clone()], code_words),
            Some([first, second]) => ([bound(first).0, bound(second).0], bound(first).1),
        };
        Side { codes, code_words, params, param_words, layout, capacity: shape.capacity as u32 }
    }
}

/// The handle and the words of a tensor on a GPU.
pub(crate) fn bound(tensor: &Tensor) -> (Handle, usize) {
    let buffer = tensor.gpu_buffer().expect("the caller dispatched on the device");
    (buffer.handle().clone(), buffer.words())
}

/// Evaluates `$body` with `$t` bound to the [`ReadRows`] of some rows: the list of formats that kernels read.
macro_rules! with_format {
    ($rows:expr, $t:ident => $body:expr) => {
        match $rows {
            $crate::format::Rows::Plain(_) => {
                type $t = $crate::format::plain::gpu::PlainRows;
                $body
            }
            $crate::format::Rows::Affine(_) => {
                type $t = $crate::format::affine::gpu::AffineRows;
                $body
            }
        }
    };
}
pub(crate) use with_format;
