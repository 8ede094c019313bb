//! Which GPUs there are, and why one is not. Looking never panics: CubeCL does where a driver is missing, so everything
//! it would stumble over is asked for first.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use super::{Client, Gpu, Opened};
use crate::DeviceKind;

/// One GPU that was found, or one kind of GPU that was not.
#[derive(Debug, Clone)]
pub struct Probe {
    /// The kind that was looked for.
    pub kind: DeviceKind,
    /// The product name, or the kind where there is none.
    pub name: String,
    /// The GPU, or the reason in words that a user can act on.
    pub gpu: Result<Gpu, String>,
}

/// Every GPU of every kind, fastest kind first; a kind without a GPU has one entry that says why.
pub fn probe_all() -> Vec<Probe> {
    let mut found = Vec::new();
    for kind in [DeviceKind::Cuda, DeviceKind::Metal, DeviceKind::Vulkan] {
        match names(kind) {
            Err(reason) => found.push(Probe { kind, name: kind.to_string(), gpu: Err(reason) }),
            Ok(names) => found.extend(names.into_iter().enumerate().map(|(index, name)| Probe {
                kind,
                name,
                gpu: open(kind, index),
            })),
        }
    }
    found
}

/// The product names of a kind, in order of their index; never empty.
pub(super) fn names(kind: DeviceKind) -> Result<Vec<String>, String> {
    match kind {
        #[cfg(has_cuda)]
        DeviceKind::Cuda => cuda::names(),
        #[cfg(has_wgpu)]
        kind if kind == adapters::KIND => adapters::all().map(|all| all.into_iter().map(|a| a.name).collect()),
        kind if cfg!(target_os = "macos") != (kind == DeviceKind::Metal) => {
            Err(format!("{kind} is not available on this operating system"))
        }
        kind => Err(format!("this build does not include it; rebuild with the feature `{kind}`")),
    }
}

/// GPUs that are open. CubeCL keeps one server a device for the life of the process, and so do we.
static OPEN: LazyLock<Mutex<HashMap<(DeviceKind, usize), Gpu>>> = LazyLock::new(Mutex::default);

pub(super) fn open(kind: DeviceKind, index: usize) -> Result<Gpu, String> {
    let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(gpu) = open.get(&(kind, index)) {
        return Ok(gpu.clone());
    }
    let names = names(kind)?;
    let Some(name) = names.get(index) else {
        return Err(format!("there are {} ({})", names.len(), names.join(", ")));
    };
    let (client, hardware) = connect(kind, index)?;
    let gpu = Gpu(Arc::new(Opened { kind, index, name: name.clone(), hardware, client, stale: Default::default() }));
    open.insert((kind, index), gpu.clone());
    Ok(gpu)
}

fn connect(kind: DeviceKind, index: usize) -> Result<(Client, bool), String> {
    match kind {
        #[cfg(has_cuda)]
        DeviceKind::Cuda => Ok((Client::Cuda(guarded::<cubecl_cuda::CudaRuntime>(cuda::device(index))?), true)),
        #[cfg(has_wgpu)]
        kind if kind == adapters::KIND => {
            let adapter = adapters::all()?.swap_remove(index);
            let client = guarded::<cubecl_wgpu::WgpuRuntime>(adapter.device)?;
            adapters::check(&client)?;
            Ok((Client::Wgpu(client), adapter.hardware))
        }
        kind => Err(format!("there is no {kind} device {index}")),
    }
}

/// A client; a panic of the runtime becomes the reason.
#[cfg(any(has_cuda, has_wgpu))]
fn guarded<R: cubecl::Runtime>(device: R::Device) -> Result<cubecl::prelude::ComputeClient<R>, String> {
    let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let client = R::client(&device);
        let _ = client.properties();
        client
    }));
    made.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        format!("the driver is installed but the device cannot be opened: {text}")
    })
}

#[cfg(has_cuda)]
mod cuda {
    use cudarc::{driver, nvrtc};

    /// NVRTC compiles kernels at run time; it is a library, and it needs headers.
    const TOOLKIT: &str = "Either install the CUDA toolkit (`apt install nvidia-cuda-toolkit`, or NVIDIA's installer) or \
        `pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12 nvidia-cuda-nvcc-cu12`; with \
        pip, put the `lib` folder of nvidia/cuda_nvrtc into LD_LIBRARY_PATH, and set CUDA_PATH to a folder whose `include` \
        holds the headers of the others (scripts/nvrtc-setup does both)";

    pub(super) fn names() -> Result<Vec<String>, String> {
        // SAFETY: only tries to load the library.
        if !unsafe { driver::sys::is_culib_present() } {
            return Err("no NVIDIA driver: libcuda was not found; install the driver (`nvidia-smi` must work)".into());
        }
        // SAFETY: as above.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return Err(format!("the kernel compiler NVRTC (libnvrtc) was not found. {TOOLKIT}"));
        }
        match cubecl_cuda::install::cuda_path() {
            None => return Err(format!("the CUDA headers were not found. {TOOLKIT}")),
            Some(path) if !path.join("include/cuda_runtime.h").exists() => {
                let path = path.display();
                return Err(format!("there is no include/cuda_runtime.h in {path}. {TOOLKIT}"));
            }
            Some(_) => {}
        }
        let reason = |e: driver::DriverError| format!("the NVIDIA driver does not work: {e:?}; see `nvidia-smi`");
        driver::result::init().map_err(reason)?;
        let count = driver::result::device::get_count().map_err(reason)?;
        if count == 0 {
            return Err("the NVIDIA driver finds no GPU; see `nvidia-smi` and CUDA_VISIBLE_DEVICES".into());
        }
        let name = |n| driver::result::device::get(n).and_then(driver::result::device::get_name);
        (0..count).map(|n| name(n).map_err(reason)).collect()
    }

    pub(super) fn device(index: usize) -> cubecl_cuda::CudaDevice {
        cubecl_cuda::CudaDevice { index }
    }
}

#[cfg(has_wgpu)]
mod adapters {
    use cubecl::ir::{ElemType, FloatKind, UIntKind};
    use cubecl::prelude::*;
    use cubecl_wgpu::{WgpuDevice, WgpuRuntime};

    use crate::DeviceKind;

    pub(super) const KIND: DeviceKind = if cfg!(target_os = "macos") { DeviceKind::Metal } else { DeviceKind::Vulkan };

    pub(super) struct Adapter {
        pub name: String,
        pub device: WgpuDevice,
        pub hardware: bool,
    }

    /// Hardware first, so that index 0 is the GPU a user means.
    pub(super) fn all() -> Result<Vec<Adapter>, String> {
        let backends = if cfg!(target_os = "macos") { wgpu::Backends::METAL } else { wgpu::Backends::VULKAN };
        let descriptor =
            wgpu::InstanceDescriptor { backends, ..wgpu::InstanceDescriptor::new_without_display_handle() };
        let found = cubecl::future::block_on(wgpu::Instance::new(descriptor).enumerate_adapters(backends));
        // CubeCL counts the adapters of each type from 0.
        let mut counts = [0; 3];
        let mut next = |kind: usize| {
            counts[kind] += 1;
            counts[kind] - 1
        };
        let mut all = Vec::new();
        for adapter in found {
            let info = adapter.get_info();
            let device = match info.device_type {
                wgpu::DeviceType::DiscreteGpu => WgpuDevice::DiscreteGpu(next(0)),
                wgpu::DeviceType::IntegratedGpu => WgpuDevice::IntegratedGpu(next(1)),
                wgpu::DeviceType::VirtualGpu => WgpuDevice::VirtualGpu(next(2)),
                wgpu::DeviceType::Cpu => WgpuDevice::Cpu,
                wgpu::DeviceType::Other => continue,
            };
            all.push((
                rank(info.device_type),
                Adapter { name: info.name, hardware: device != WgpuDevice::Cpu, device },
            ));
        }
        all.sort_by_key(|(rank, _)| *rank);
        if all.is_empty() {
            return Err(match KIND {
                DeviceKind::Metal => "Metal finds no GPU".into(),
                _ => {
                    "no Vulkan driver was found (loader libvulkan.so.1 and an ICD in /usr/share/vulkan/icd.d); install \
                      the GPU's driver, or `apt install libvulkan1 mesa-vulkan-drivers`; see `vulkaninfo --summary`"
                        .to_string()
                }
            });
        }
        Ok(all.into_iter().map(|(_, adapter)| adapter).collect())
    }

    fn rank(kind: wgpu::DeviceType) -> u8 {
        match kind {
            wgpu::DeviceType::DiscreteGpu => 0,
            wgpu::DeviceType::IntegratedGpu => 1,
            wgpu::DeviceType::VirtualGpu => 2,
            wgpu::DeviceType::Other | wgpu::DeviceType::Cpu => 3,
        }
    }

    /// wgpu falls back to WGSL, which lacks 8 and 16-bit types, without a word where a driver lacks a feature.
    pub(super) fn check(client: &ComputeClient<WgpuRuntime>) -> Result<(), String> {
        let name = WgpuRuntime::name(client);
        if name == "wgpu<wgsl>" {
            return Err("the driver lacks the Vulkan features of SPIR-V kernels, and WGSL is not supported".into());
        }
        let needed = [
            (ElemType::UInt(UIntKind::U8), "8-bit integers"),
            (ElemType::UInt(UIntKind::U16), "16-bit integers"),
            (ElemType::Float(FloatKind::F16), "16-bit floats"),
        ];
        for (elem, words) in needed {
            if !client.features().supports_type(elem) {
                return Err(format!("the driver does not support {words} in buffers; a newer driver may"));
            }
        }
        if client.properties().hardware.plane_size_min < 8 {
            return Err("the driver has no subgroups of at least 8 lanes".into());
        }
        Ok(())
    }
}
