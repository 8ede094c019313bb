//! Real language models running on slimkv's compressed KV caches.
//!
//! ```no_run
//! use slimkv::{Device, cache::KvCache};
//! use slimkv_llm::{GenerateOptions, LoadOptions, Model, Special};
//!
//! let model = Model::load("SmolLM2-135M-Instruct.Q4_1.gguf", &LoadOptions::default())?;
//! let mut cache = KvCache::new("kivi:4".parse()?, model.geometry(1), &Device::best())?;
//! let prompt = model.tokenizer().encode("The capital of France is", Special::Prompt)?;
//! let generation = model.generate(&prompt, &mut cache, &GenerateOptions::default(), &mut |text| {
//!     print!("{text}");
//!     std::ops::ControlFlow::Continue(())
//! })?;
//! println!("\n{:.1} tokens/s, {} bytes of cache", generation.decode_tokens_per_s(), cache.bytes());
//! # Ok::<(), slimkv_llm::Error>(())
//! ```
//!
//! The dense layers run on the CPU: weights stay as their file stores them, and every product is an f32 product.
//! Attention and the cache are slimkv's, on any [`slimkv::Device`].

mod chat;
mod config;
mod dense;
mod error;
pub mod eval;
pub mod fetch;
mod generate;
mod model;
mod sample;
mod tokenizer;
mod weights;

pub use chat::{ChatMessage, ChatTemplate};
pub use config::{Architecture, Config, Rope, RopePairs, RopeScaling};
pub use error::{Error, Result};
pub use generate::{Finish, GenerateOptions, Generation};
pub use model::{LoadOptions, Logits, Model, Want};
pub use sample::Sampling;
pub use tokenizer::{Special, TextStream, Tokenizer};
