//! Opening the device that a person names.

use slimkv::Device;

use crate::failure::Outcome;

/// Opens `cpu`, `cuda[:N]`, `vulkan[:N]`, `metal` or `best`. Kernels that a GPU compiles are kept on disk for the next
/// process; where that fails, they are compiled again, and a line says so.
pub fn open(text: &str) -> Outcome<Device> {
    if text != "cpu" {
        enable_kernel_cache();
    }
    Ok(text.parse()?)
}

/// Must come before a GPU is opened.
pub fn enable_kernel_cache() {
    quieten_wayland();
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
    if let Err(error) = slimkv::gpu::enable_kernel_cache(None) {
        eprintln!("warning: compiled kernels are not kept: {error}");
    }
}

/// A Vulkan driver that asks Wayland for a display, which a kernel needs not, prints an error where this is unset.
fn quieten_wayland() {
    #[cfg(target_os = "linux")]
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        // SAFETY: devices are opened by the main thread before it starts others.
        unsafe { std::env::set_var("XDG_RUNTIME_DIR", std::env::temp_dir()) }
    }
}
