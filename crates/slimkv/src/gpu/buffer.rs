//! Device memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cubecl::server::Handle;

use super::{Gpu, fill, with_client};
use crate::Result;

/// Allocations are whole 128-bit words, so that kernels may load and store them wide.
const WORD: usize = 16;

/// From this size on an allocation is exact; smaller ones are slices of shared pages.
const EXACT_FROM: usize = 64 << 10;

/// The runtime keeps exact allocations for others of the same size. When one of this size was dropped, what is unused is
/// given back before the next is made, so that caches which come and go leave nothing behind.
const LARGE: usize = 8 << 20;

/// Bytes on one GPU. Cloning shares them.
#[derive(Clone)]
pub struct Buffer(Arc<Memory>);

struct Memory {
    gpu: Gpu,
    handle: Handle,
    len: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.len >= LARGE {
            self.gpu.0.stale.store(true, Ordering::Relaxed);
        }
    }
}

impl Buffer {
    /// The GPU that holds it.
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Copies the bytes to the host, after all work queued before.
    pub fn download(&self) -> Result<Vec<u8>> {
        const OP: &str = "Tensor::to_bytes";
        if self.0.len == 0 {
            return Ok(Vec::new());
        }
        // A failed launch shows up here, not in the read: reading alone may return stale memory.
        self.0.gpu.sync(OP)?;
        let bytes = with_client!(self.0.gpu, client => client.read_one(self.0.handle.clone()))
            .map_err(|e| self.0.gpu.failed(OP, e))?;
        let mut bytes = bytes.to_vec();
        bytes.truncate(self.0.len);
        Ok(bytes)
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.0.handle
    }

    /// Whether no other tensor shares the bytes, so that they may be written in place.
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// 32-bit words that kernels see.
    pub(crate) fn words(&self) -> usize {
        padded(self.0.len) / 4
    }
}

fn padded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(WORD)
}

impl Gpu {
    /// Zeroed device memory.
    pub fn zeroed(&self, bytes: usize) -> Result<Buffer> {
        let buffer = self.allocate("Tensor::zeros", bytes, true)?;
        with_client!(self, client => fill(client, buffer.handle(), buffer.words(), 0));
        Ok(buffer)
    }

    /// Copies host bytes to the device.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.check_size("Tensor::from_bytes", bytes.len())?;
        let exact = bytes.len() >= EXACT_FROM;
        let copy = |data: &[u8]| {
            with_client!(self, client => if exact {
                self.give_back_unused(bytes.len());
                client.memory_persistent_allocation((), |_| client.create_from_slice(data))
            } else {
                Ok(client.create_from_slice(data))
            })
        };
        let handle = if bytes.len() == padded(bytes.len()) {
            copy(bytes)
        } else {
            let mut whole = bytes.to_vec();
            whole.resize(padded(bytes.len()), 0);
            copy(&whole)
        };
        let handle = handle.map_err(|e| self.failed("Tensor::from_bytes", e))?;
        Ok(self.hold(handle, bytes.len()))
    }

    /// Uninitialised memory for what a kernel writes whole.
    pub(crate) fn empty(&self, op: &'static str, bytes: usize) -> Result<Buffer> {
        self.allocate(op, bytes, false)
    }

    fn allocate(&self, op: &'static str, bytes: usize, long_lived: bool) -> Result<Buffer> {
        self.check_size(op, bytes)?;
        let size = padded(bytes);
        let handle = with_client!(self, client => if long_lived && size >= EXACT_FROM {
            self.give_back_unused(size);
            client.memory_persistent_allocation((), |_| client.empty(size))
        } else {
            Ok(client.empty(size))
        });
        Ok(self.hold(handle.map_err(|e| self.failed(op, e))?, bytes))
    }

    fn give_back_unused(&self, wanted: usize) {
        if wanted >= LARGE && self.0.stale.swap(false, Ordering::Relaxed) {
            with_client!(self, client => client.memory_cleanup());
        }
    }

    fn hold(&self, handle: Handle, len: usize) -> Buffer {
        Buffer(Arc::new(Memory { gpu: self.clone(), handle, len }))
    }

    /// CubeCL panics on a buffer that is too big; this is the error in its place.
    fn check_size(&self, op: &'static str, bytes: usize) -> Result<()> {
        let limit = with_client!(self, client => client.properties().memory.max_page_size);
        if padded(bytes) as u64 <= limit {
            Ok(())
        } else {
            Err(self.unsupported(op, "shape", format!("at most {limit} bytes in one tensor"), bytes))
        }
    }
}
