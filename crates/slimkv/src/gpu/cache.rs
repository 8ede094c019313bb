//! Compiled kernels, kept on disk between processes.
//!
//! CubeCL's cache is keyed by a kernel's name and arguments but not by its code, nor, for CUDA, by the GPU. So the folder
//! is named by the version, by a hash of every source file of this crate, and by the GPUs of the machine: another build
//! or another machine never sees these entries. Metal has no such cache; its driver keeps its own.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};

use super::probe;
use crate::{DeviceKind, Error, Result};

static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// What [`kernel_cache`] tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelCache {
    /// The folder of this build and this machine.
    pub folder: PathBuf,
    /// Compiled kernels in it.
    pub entries: usize,
    /// Bytes on disk.
    pub bytes: u64,
    /// Whether this process reads and writes it.
    pub enabled: bool,
}

/// Keeps compiled kernels below `dir` (the user's cache folder when `None`) and returns the folder of this build and
/// machine. For programs, not for libraries: it sets a setting of the whole process, and must come before any GPU is
/// opened. A second call returns the folder of the first.
pub fn enable_kernel_cache(dir: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(folder) = FOLDER.get() {
        return Ok(folder.clone());
    }
    let folder = folder(dir)?;
    std::fs::create_dir_all(&folder).map_err(|e| {
        Error::value("enable_kernel_cache", "dir", "a folder that can be written", format!("{}: {e}", folder.display()))
    })?;
    let mut config = CubeClRuntimeConfig::default();
    config.compilation.cache = Some(CacheConfig::File(folder.clone()));
    // CubeCL panics when its settings were read before: when somebody opened a device already.
    std::panic::catch_unwind(|| CubeClRuntimeConfig::set(config)).map_err(|_| {
        Error::value("enable_kernel_cache", "dir", "a call before any GPU is opened", "a GPU that is open")
    })?;
    Ok(FOLDER.get_or_init(|| folder).clone())
}

/// The folder that [`enable_kernel_cache`] uses or would use, and what lies in it.
pub fn kernel_cache() -> Result<KernelCache> {
    let folder = FOLDER.get().cloned().map_or_else(|| folder(None), Ok)?;
    let (entries, bytes) = measure(&folder);
    Ok(KernelCache { entries, bytes, enabled: FOLDER.get().is_some(), folder })
}

fn folder(dir: Option<PathBuf>) -> Result<PathBuf> {
    let root = match dir {
        Some(dir) => dir,
        None => user_cache().ok_or_else(|| Error::Missing {
            op: "enable_kernel_cache",
            arg: "dir",
            expected: "a folder, because neither XDG_CACHE_HOME nor HOME is set".into(),
        })?,
    };
    let mut gpus: Vec<String> = [DeviceKind::Cuda, DeviceKind::Vulkan, DeviceKind::Metal]
        .into_iter()
        .flat_map(|kind| probe::names(kind).unwrap_or_default().into_iter().map(move |n| format!("{kind}-{n}")))
        .collect();
    gpus.sort();
    gpus.dedup();
    let machine: String =
        gpus.join("+").chars().map(|c| if c.is_ascii_alphanumeric() || "+-.".contains(c) { c } else { '_' }).collect();
    let machine = if machine.is_empty() { "no-gpu".into() } else { machine.chars().take(120).collect::<String>() };
    let build = format!("{}-{}", env!("CARGO_PKG_VERSION"), env!("SLIMKV_SOURCE_HASH"));
    Ok(root.join("slimkv").join(build).join(machine))
}

fn user_cache() -> Option<PathBuf> {
    let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if cfg!(target_os = "macos") {
        path("HOME").map(|home| home.join("Library/Caches"))
    } else if cfg!(windows) {
        path("LOCALAPPDATA")
    } else {
        path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")))
    }
}

/// Kernels and bytes below a folder. CubeCL lists the kernels of each backend in a table of contents, one a line.
fn measure(folder: &Path) -> (usize, u64) {
    let Ok(entries) = std::fs::read_dir(folder) else { return (0, 0) };
    entries.flatten().fold((0, 0), |(kernels, bytes), entry| {
        let Ok(meta) = entry.metadata() else { return (kernels, bytes) };
        if meta.is_dir() {
            let (k, b) = measure(&entry.path());
            return (kernels + k, bytes + b);
        }
        let listed = if entry.file_name().to_string_lossy().starts_with("toc") {
            std::fs::read(entry.path()).map_or(0, |text| text.split(|&b| b == b'\n').filter(|l| !l.is_empty()).count())
        } else {
            0
        };
        (kernels + listed, bytes + meta.len())
    })
}
