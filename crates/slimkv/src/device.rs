//! Which devices there are, and why one is not.

use crate::{Error, Result};

/// Where tensors live and operations run.
///
/// Looking never panics: a missing driver or loader is a reason, as text.
///
/// ```
/// use slimkv::Device;
/// for found in Device::all() {
///     match &found.device {
///         Ok(device) => println!("{device}: {}", found.name),
///         Err(why) => println!("{}: not here: {why}", found.kind),
///     }
/// }
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Device(Inner);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Inner {
    Cpu,
    #[cfg(feature = "gpu")]
    Gpu(crate::gpu::Gpu),
}

/// The kinds of device that the library knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DeviceKind {
    Cpu,
    Cuda,
    Vulkan,
    Metal,
}

impl DeviceKind {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Vulkan => "vulkan",
            DeviceKind::Metal => "metal",
        }
    }
}

impl std::fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// One line of [`Device::all`]: a device that is there, or a kind of device that is not, and why.
#[derive(Debug, Clone)]
pub struct Found {
    /// The kind that was looked for.
    pub kind: DeviceKind,
    /// The product name, or the kind where there is none.
    pub name: String,
    /// The device, or the reason in words that a user can act on.
    pub device: std::result::Result<Device, String>,
}

/// Without a GPU feature there is no GPU, and the compiler knows it.
#[cfg(not(feature = "gpu"))]
#[derive(Debug)]
pub(crate) enum NoGpu {}

impl Device {
    /// The processor.
    pub const fn cpu() -> Self {
        Device(Inner::Cpu)
    }

    /// The `n`-th NVIDIA GPU, through CUDA.
    pub fn cuda(n: usize) -> Result<Self> {
        Self::open(DeviceKind::Cuda, n)
    }

    /// The `n`-th Vulkan GPU.
    pub fn vulkan(n: usize) -> Result<Self> {
        Self::open(DeviceKind::Vulkan, n)
    }

    /// The Apple GPU.
    pub fn metal() -> Result<Self> {
        Self::open(DeviceKind::Metal, 0)
    }

    /// The fastest device that is there: CUDA, then Metal, then a hardware Vulkan GPU, then the CPU. A software
    /// Vulkan driver is slower than the CPU code and is never chosen. [`Device::all`] says what was passed over, and why.
    pub fn best() -> Self {
        Self::all()
            .into_iter()
            .filter(|f| f.kind != DeviceKind::Cpu)
            .find_map(|f| f.device.ok().filter(Device::is_hardware))
            .unwrap_or(Device::cpu())
    }

    /// Every device that is there and every kind that is not, fastest kind first.
    pub fn all() -> Vec<Found> {
        let mut found = Vec::new();
        #[cfg(feature = "gpu")]
        for probe in crate::gpu::probe_all() {
            found.push(Found { kind: probe.kind, name: probe.name, device: probe.gpu.map(Device::from_gpu) });
        }
        #[cfg(not(feature = "gpu"))]
        for kind in [DeviceKind::Cuda, DeviceKind::Metal, DeviceKind::Vulkan] {
            let device = Err(format!("this build does not include it; rebuild with the feature `{kind}`"));
            found.push(Found { kind, name: kind.to_string(), device });
        }
        found.push(Found { kind: DeviceKind::Cpu, name: crate::cpu::name(), device: Ok(Device::cpu()) });
        found
    }

    /// The kind of this device.
    pub fn kind(&self) -> DeviceKind {
        match &self.0 {
            Inner::Cpu => DeviceKind::Cpu,
            #[cfg(feature = "gpu")]
            Inner::Gpu(gpu) => gpu.kind(),
        }
    }

    /// The product name.
    pub fn name(&self) -> String {
        match &self.0 {
            Inner::Cpu => crate::cpu::name(),
            #[cfg(feature = "gpu")]
            Inner::Gpu(gpu) => gpu.name().to_string(),
        }
    }

    /// Waits until all work queued on the device is done, and reports what went wrong in it.
    pub fn synchronize(&self) -> Result<()> {
        match &self.0 {
            Inner::Cpu => Ok(()),
            #[cfg(feature = "gpu")]
            Inner::Gpu(gpu) => gpu.sync("Device::synchronize"),
        }
    }

    fn open(kind: DeviceKind, n: usize) -> Result<Self> {
        #[cfg(feature = "gpu")]
        let opened = crate::gpu::Gpu::open(kind, n).map(Device::from_gpu);
        #[cfg(not(feature = "gpu"))]
        let opened: std::result::Result<Self, String> =
            Err(format!("this build does not include it; rebuild with the feature `{kind}`"));
        opened.map_err(|reason| Error::DeviceUnavailable { device: format!("{kind}:{n}"), reason })
    }

    fn is_hardware(&self) -> bool {
        match &self.0 {
            Inner::Cpu => true,
            #[cfg(feature = "gpu")]
            Inner::Gpu(gpu) => gpu.is_hardware(),
        }
    }

    #[cfg(feature = "gpu")]
    pub(crate) fn from_gpu(gpu: crate::gpu::Gpu) -> Self {
        Device(Inner::Gpu(gpu))
    }

    #[cfg(feature = "gpu")]
    pub(crate) fn gpu(&self) -> Option<&crate::gpu::Gpu> {
        match &self.0 {
            Inner::Cpu => None,
            Inner::Gpu(gpu) => Some(gpu),
        }
    }

    #[cfg(not(feature = "gpu"))]
    pub(crate) fn gpu(&self) -> Option<&NoGpu> {
        None
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Inner::Cpu => f.write_str("cpu"),
            #[cfg(feature = "gpu")]
            Inner::Gpu(gpu) => match gpu.kind() {
                DeviceKind::Metal => f.write_str("metal"),
                kind => write!(f, "{kind}:{}", gpu.index()),
            },
        }
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Reads `cpu`, `cuda`, `cuda:1`, `vulkan:0`, `metal` or `best`, and opens it.
impl std::str::FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::Parse {
            what: "device",
            text: text.into(),
            expected: "cpu, cuda[:N], vulkan[:N], metal or best".into(),
        };
        let (kind, index) = match text.split_once(':') {
            Some((kind, n)) => (kind, Some(n.parse::<usize>().map_err(|_| bad())?)),
            None => (text, None),
        };
        match (kind, index) {
            ("cpu", None) => Ok(Device::cpu()),
            ("best", None) => Ok(Device::best()),
            ("metal", None) => Device::metal(),
            ("cuda", n) => Device::cuda(n.unwrap_or(0)),
            ("vulkan", n) => Device::vulkan(n.unwrap_or(0)),
            _ => Err(bad()),
        }
    }
}
