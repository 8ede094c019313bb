//! What a model is: its geometry, its rotary embedding, its architecture.

mod gguf;
mod json;
mod rope;

use std::path::Path;

pub(crate) use rope::Rotation;
pub use rope::{Rope, RopePairs, RopeScaling};

use crate::weights::open;
use crate::{Error, Result};

/// The model families that this crate runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2 and others of that shape.
    Llama,
    /// Qwen 2 and 2.5: the query, key and value projections have a bias.
    Qwen2,
    /// Qwen 3: queries and keys are normalised per head.
    Qwen3,
}

impl Architecture {
    const ALL: [Architecture; 3] = [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3];

    /// The name in GGUF metadata and in `config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
        }
    }

    /// Whether the query, key and value projections have a bias.
    pub(crate) const fn has_qkv_bias(self) -> bool {
        matches!(self, Architecture::Qwen2)
    }

    /// Whether queries and keys are normalised per head before the rotation.
    pub(crate) const fn has_qk_norm(self) -> bool {
        matches!(self, Architecture::Qwen3)
    }

    fn parse(name: &str, file: &Path, key: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|a| a.name() == name).ok_or_else(|| Error::Value {
            file: file.into(),
            key: key.into(),
            expected: format!("one of {}", Self::ALL.map(Architecture::name).join(", ")),
            found: format!("`{name}`"),
        })
    }
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The numbers that describe a model.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Config {
    /// The model family.
    pub architecture: Architecture,
    /// What the model calls itself, or the name of its file.
    pub name: String,
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the feed-forward blocks.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Channels of one head.
    pub head_dim: usize,
    /// Rows of the token embedding.
    pub vocab: usize,
    /// Tokens that the model was made for.
    pub context: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_eps: f32,
    /// The rotary position embedding.
    pub rope: Rope,
    /// Whether the output projection is the token embedding.
    pub tied_embeddings: bool,
    /// Weights, counted one by one.
    pub parameters: u64,
    /// Bytes that the weights take in memory.
    pub weight_bytes: u64,
    /// Bytes of the model's files.
    pub file_bytes: u64,
}

impl Config {
    /// Reads the description of a model - a `.gguf` file, or a directory with `config.json` and safetensors - and none of
    /// its weights.
    pub fn read(path: impl AsRef<Path>) -> Result<Config> {
        open(path.as_ref())?.config()
    }

    /// The geometry of a cache for `batch` sequences of this model.
    pub fn geometry(&self, batch: usize) -> slimkv::cache::Geometry {
        slimkv::cache::Geometry { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim, batch }
    }

    /// Refuses geometry that no tensor could have.
    pub(crate) fn check(self, file: &Path) -> Result<Config> {
        let bad = |key: &str, expected: String, found: usize| Error::Value {
            file: file.into(),
            key: key.into(),
            expected,
            found: found.to_string(),
        };
        for (key, found) in [
            ("layers", self.layers),
            ("hidden size", self.hidden),
            ("feed-forward size", self.ffn),
            ("attention heads", self.heads),
            ("key-value heads", self.kv_heads),
            ("head dimension", self.head_dim),
            ("vocabulary", self.vocab),
            ("context length", self.context),
        ] {
            if found == 0 || found > 1 << 30 {
                return Err(bad(key, "a positive number".into(), found));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(bad(
                "attention heads",
                format!("a multiple of the {} key-value heads", self.kv_heads),
                self.heads,
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(bad("head dimension", "an even number, for the rotary embedding".into(), self.head_dim));
        }
        Ok(self)
    }
}
