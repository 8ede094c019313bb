//! KV-cache compression for language-model inference: quantise, pack, attend from packed memory.
//!
//! The KV cache is what a language model remembers of its context. This crate stores it in 1 to 8 bits a value and
//! computes attention straight from the packed form, on CPUs and - with the features `cuda`, `vulkan` and `metal` - on
//! GPUs, from one source.
//!
//! ```
//! use slimkv::cache::{Geometry, KvCache};
//! use slimkv::{DType, Device, Tensor};
//! # fn main() -> slimkv::Result<()> {
//! let device = Device::cpu();                                          // or Device::best(), Device::cuda(0)?
//! let geometry = Geometry { layers: 1, kv_heads: 2, head_dim: 64, batch: 1 };
//! let mut cache = KvCache::new("kivi:4".parse()?, geometry, &device)?;
//!
//! // Every step, every layer: the new keys and values, then the queries of the same tokens.
//! let k = Tensor::zeros(DType::F16, &[1, 2, 3, 64], &device)?;         // [batch, KV heads, new tokens, head dimension]
//! let q = Tensor::zeros(DType::F16, &[1, 8, 3, 64], &device)?;         // four query heads share a KV head
//! cache.layer(0).append(&k, &k)?;
//! let out = cache.layer(0).attend(&q, 1.0 / 8.0)?;
//! assert_eq!(out.shape(), q.shape());
//! # Ok(())
//! # }
//! ```
//!
//! * [`cache`]: caches, by the name of their method.
//! * [`ops`]: the operations, by their public names, and the registry that lists them.
//! * [`attend`] and [`format`](mod@format): the attention skeletons, and the formats of rows that plug into them.
//! * [`Device`], [`Tensor`], [`Error`]: what everything stands on. Bad input is a typed error that names the operation,
//!   the argument, what was expected and what was found; nothing falls back silently to another device.

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
