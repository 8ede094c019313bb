//! Names the backends that this build has, and the sources of its kernels.
//!
//! `has_cuda` and `has_wgpu` say which runtimes are compiled in: a feature is a no-op on a platform without its backend.
//! `SLIMKV_SOURCE_HASH` names the folder of compiled kernels: CubeCL keys its cache by a kernel's name and arguments but
//! not by its code, so every file of the library takes part and none can be forgotten.

use std::path::{Path, PathBuf};

fn main() {
    let has = |name: &str| std::env::var_os(name).is_some();
    let macos = std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("macos");
    println!("cargo:rustc-check-cfg=cfg(has_cuda, has_wgpu)");
    if has("CARGO_FEATURE_CUDA") && !macos {
        println!("cargo:rustc-cfg=has_cuda");
    }
    if if macos { has("CARGO_FEATURE_METAL") } else { has("CARGO_FEATURE_VULKAN") } {
        println!("cargo:rustc-cfg=has_wgpu");
    }
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=SLIMKV_SOURCE_HASH={:016x}", hash(Path::new("src")));
}

/// FNV-1a over the names and contents of all files below `root`, in order of their names.
fn hash(root: &Path) -> u64 {
    let mut files = Vec::new();
    list(root, &mut files);
    files.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for file in files {
        let content = std::fs::read(&file).expect("a source file can be read");
        for byte in file.to_string_lossy().bytes().chain(content) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    hash
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the source folder can be read") {
        let path = entry.expect("a folder entry can be read").path();
        if path.is_dir() { list(&path, files) } else { files.push(path) }
    }
}
