//! Workspaces that vectors are loaded from and stored to: each access that crosses a cache line costs two.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line, and of the longest vector.
const LINE: usize = 64;

/// Elements that begin at a cache line.
pub(crate) struct Aligned<T> {
    memory: Vec<T>,
    start: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// `len` zeros.
    pub fn zeros(len: usize) -> Self {
        let mut memory = vec![T::default(); len + LINE / size_of::<T>()];
        let start = memory.as_ptr().align_offset(LINE);
        memory.truncate(start + len);
        Aligned { memory, start }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        &self.memory[self.start..]
    }
}

impl<T> DerefMut for Aligned<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.start..]
    }
}
