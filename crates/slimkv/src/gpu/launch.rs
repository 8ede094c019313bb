//! Grids, array arguments and the few launches that belong to no format.

use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a cube where the kernel does not say otherwise: whole planes of any size up to 64.
pub(crate) const UNITS: u32 = 256;

/// Cubes along x at most; the rest goes along y. The limit of WebGPU is 65535.
const MAX_X: u32 = 32768;

/// A grid of at least `cubes` cubes; kernels compare `CUBE_POS` or `ABSOLUTE_POS` with their own end.
pub(crate) fn grid(cubes: usize) -> CubeCount {
    let cubes = u32::try_from(cubes).expect("the caller bounds its work below 2^32");
    if cubes <= MAX_X { CubeCount::Static(cubes, 1, 1) } else { CubeCount::Static(MAX_X, cubes.div_ceil(MAX_X), 1) }
}

/// A buffer as an array of `len` scalars.
pub(crate) fn word_array<R: Runtime>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: buffers are allocated in whole 128-bit words and kernels stay below the lengths they are given.
    unsafe { ArrayArg::from_raw_parts(handle.clone(), len) }
}

/// Uploads a small table of 32-bit words.
pub(crate) fn small<R: Runtime>(client: &ComputeClient<R>, words: &[u32]) -> Handle {
    client.create_from_slice(bytemuck::cast_slice(words))
}

/// Fills a buffer with one word.
pub(crate) fn fill<R: Runtime>(client: &ComputeClient<R>, buffer: &Handle, words: usize, word: u32) {
    let quads = words / 4;
    // SAFETY: the kernel compares its position with `quads`, which the buffer holds.
    unsafe {
        fill_words::launch_unchecked::<R>(
            client,
            grid(quads.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            word_array(buffer, words),
            quads as u32,
            word,
        );
    }
}

#[cube(launch_unchecked)]
fn fill_words(out: &mut Array<Vector<u32, Const<4>>>, quads: u32, word: u32) {
    if (ABSOLUTE_POS as u32) < quads {
        out[ABSOLUTE_POS] = Vector::new(word);
    }
}
