//! KV-cache compression for language-model inference: quantise, pack, attend from packed memory.

pub mod attend;
pub mod cache;
pub mod cpu;
pub mod device;
mod dtype;
mod error;
pub mod format;
#[cfg(feature = "gpu")]
pub mod gpu;
pub mod ops;
mod tensor;

pub use device::{Device, DeviceKind};
pub use dtype::{DType, Element, FloatElement};
pub use error::{Error, Result};
pub use tensor::Tensor;
