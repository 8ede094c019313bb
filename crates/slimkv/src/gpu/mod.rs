//! The GPU vocabulary: runtimes, buffers, launches, and the device functions that all kernels share.
//!
//! Kernels are written once as CubeCL `#[cube]` functions and run on CUDA, Vulkan (SPIR-V) and Metal. Host code that
//! launches them is generic over CubeCL's `Runtime`; a concrete runtime is named only in `Client`.

mod buffer;
mod cache;
pub(crate) mod float;
mod launch;
#[cfg(all(test, feature = "lowering"))]
mod lowering;
mod probe;
pub(crate) mod scratch;
mod warm;

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[cfg(any(has_cuda, has_wgpu))]
use cubecl::prelude::ComputeClient;

pub use buffer::Buffer;
pub use cache::{KernelCache, enable_kernel_cache, kernel_cache};
pub(crate) use launch::{UNITS, fill, grid, small, word_array};
pub use probe::{Probe, probe_all};
pub use warm::{COMMON, HeadShape, Warmed, warm};

use crate::{Device, DeviceKind, Error, Result};

/// One GPU, opened. Cloning shares it; two are equal when they are the same GPU reached the same way.
#[derive(Clone)]
pub struct Gpu(Arc<Opened>);

struct Opened {
    kind: DeviceKind,
    index: usize,
    name: String,
    hardware: bool,
    client: Client,
    /// Whether a large buffer was dropped since unused memory was last given back.
    stale: AtomicBool,
}

/// The connection to a device, one variant a runtime that this build has.
pub(crate) enum Client {
    #[cfg(has_cuda)]
    Cuda(ComputeClient<cubecl_cuda::CudaRuntime>),
    #[cfg(has_wgpu)]
    Wgpu(ComputeClient<cubecl_wgpu::WgpuRuntime>),
    #[cfg(all(test, feature = "lowering"))]
    LoweredCuda(ComputeClient<lowering::Lower<lowering::Cuda90>>),
    #[cfg(all(test, feature = "lowering"))]
    LoweredMsl(ComputeClient<lowering::Lower<lowering::Msl>>),
}

/// Evaluates `$body` with `$client` bound to the typed client of a [`Gpu`]: the one place that knows the runtimes.
macro_rules! with_client {
    ($gpu:expr, $client:ident => $body:expr) => {
        match *$gpu.client() {
            #[cfg(has_cuda)]
            $crate::gpu::Client::Cuda(ref $client) => $body,
            #[cfg(has_wgpu)]
            $crate::gpu::Client::Wgpu(ref $client) => $body,
            #[cfg(all(test, feature = "lowering"))]
            $crate::gpu::Client::LoweredCuda(ref $client) => $body,
            #[cfg(all(test, feature = "lowering"))]
            $crate::gpu::Client::LoweredMsl(ref $client) => $body,
        }
    };
}
pub(crate) use with_client;

impl Gpu {
    /// Opens the `index`-th device of a kind; the reason, in words a user can act on, when it is not there.
    pub fn open(kind: DeviceKind, index: usize) -> std::result::Result<Self, String> {
        probe::open(kind, index)
    }

    /// CUDA, Vulkan or Metal.
    pub fn kind(&self) -> DeviceKind {
        self.0.kind
    }

    /// Its place among the devices of its kind.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The product name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Whether this is a real GPU rather than a software driver.
    pub fn is_hardware(&self) -> bool {
        self.0.hardware
    }

    /// Waits for all queued work, and reports what went wrong in it: launches return before they run.
    pub fn sync(&self, op: &'static str) -> Result<()> {
        with_client!(self, client => cubecl::future::block_on(client.sync())).map_err(|e| self.failed(op, e))
    }

    /// Bytes that tensors of this process hold on the device, and bytes that are reserved for them.
    pub fn memory(&self) -> Result<(u64, u64)> {
        with_client!(self, client => client.memory_usage())
            .map(|usage| (usage.bytes_in_use, usage.bytes_reserved))
            .map_err(|e| self.failed("Gpu::memory", e))
    }

    pub(crate) fn client(&self) -> &Client {
        &self.0.client
    }

    /// An error of the device, in one line.
    pub(crate) fn failed(&self, op: &'static str, error: impl std::fmt::Display) -> Error {
        let text = error.to_string();
        let lines: Vec<&str> = text.lines().map(str::trim).take_while(|l| !l.starts_with("Backtrace")).collect();
        Error::DeviceFailed { op, device: Device::from_gpu(self.clone()), reason: lines.join(" ") }
    }

    /// A request that the device does not serve.
    pub(crate) fn unsupported(
        &self,
        op: &'static str,
        arg: &'static str,
        expected: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Error {
        let device = Device::from_gpu(self.clone());
        Error::Unsupported { op, arg, device, expected: expected.into(), found: found.to_string() }
    }
}

impl PartialEq for Gpu {
    fn eq(&self, other: &Self) -> bool {
        (self.kind(), self.index()) == (other.kind(), other.index())
    }
}

impl Eq for Gpu {}

impl Hash for Gpu {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.kind(), self.index()).hash(state);
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{} ({})", self.kind(), self.index(), self.name())
    }
}
