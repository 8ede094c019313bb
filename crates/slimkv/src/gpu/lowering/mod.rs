//! Kernels lowered to CUDA C++ and Metal source on a machine that has neither: a runtime that runs nothing.
//!
//! The library runs on it unchanged; the device says "sm_90" or "Metal 3", every launch leaves its source text in
//! [`texts`], and reads return zeros. The CUDA text is compiled by NVRTC where that library is present, which needs no GPU:
//!
//! ```text
//! eval "$(scripts/nvrtc-setup)"       # pip wheels into target/nvrtc; sets LD_LIBRARY_PATH and CUDA_PATH
//! SLIMKV_REQUIRE_NVRTC=1 cargo test --release -p slimkv --features lowering --lib lowering
//! ```
//!
//! The wheels are nvidia-cuda-nvrtc-cu12 (the compiler) and nvidia-cuda-runtime-cu12, nvidia-cuda-cccl-cu12 and
//! nvidia-cuda-nvcc-cu12 (headers). Metal source can only be compiled on a Mac; `SLIMKV_DUMP=folder` writes it there.

mod nvrtc;
mod runtime;
mod tests;

pub(crate) use runtime::{Cuda90, Lower, Msl, gpu, texts};
