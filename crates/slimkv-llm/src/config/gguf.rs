//! The description of a model from GGUF metadata.

use candle_core::Device;

use super::{Architecture, Config, Rope, RopePairs, RopeScaling};
use crate::Result;
use crate::weights::Gguf;

impl Config {
    pub(crate) fn from_gguf(gguf: &Gguf) -> Result<Config> {
        let key = "general.architecture";
        let name = gguf.required(key, "the name of the architecture", gguf.text(key)?)?;
        let architecture = Architecture::parse(name, &gguf.path, key)?;
        let key = |suffix: &str| format!("{name}.{suffix}");
        let number = |suffix: &str| {
            let key = key(suffix);
            gguf.number(&key).and_then(|value| gguf.required(&key, "a number", value))
        };

        let (hidden, heads) = (number("embedding_length")?, number("attention.head_count")?);
        if heads == 0 {
            return Err(gguf.bad(&key("attention.head_count"), "a positive number", heads));
        }
        let kv_heads = match gguf.number(&key("attention.head_count_kv"))? {
            Some(kv_heads) => kv_heads,
            None => heads,
        };
        let head_dim = gguf.number(&key("attention.key_length"))?.unwrap_or(hidden / heads);
        for suffix in ["attention.value_length", "rope.dimension_count"] {
            if let Some(found) = gguf.number(&key(suffix))?.filter(|&found| found != head_dim) {
                return Err(gguf.bad(&key(suffix), format!("the head dimension {head_dim}"), found));
            }
        }
        if let Some(window) = gguf.number(&key("attention.sliding_window"))?.filter(|&w| w != 0) {
            return Err(gguf.bad(&key("attention.sliding_window"), "no sliding window", window));
        }
        let embedding = gguf.required("token_embd.weight", "the token embedding", gguf.shape("token_embd.weight"))?;
        let eps = key("attention.layer_norm_rms_epsilon");
        Config {
            architecture,
            name: match gguf.text("general.name")? {
                Some(name) => name.to_string(),
                None => gguf.path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            },
            layers: number("block_count")?,
            hidden,
            ffn: number("feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
            vocab: embedding.first().copied().unwrap_or(0),
            context: number("context_length")?,
            rms_eps: gguf.required(&eps, "a number", gguf.float(&eps)?)?,
            rope: rope(gguf, name, architecture, head_dim)?,
            tied_embeddings: gguf.shape("output.weight").is_none(),
            parameters: gguf.content.tensor_infos.values().map(|info| info.shape.elem_count() as u64).sum(),
            weight_bytes: gguf.content.tensor_infos.values().map(stored_bytes).sum(),
            file_bytes: gguf.bytes,
        }
        .check(&gguf.path)
    }
}

fn stored_bytes(info: &candle_core::quantized::gguf_file::TensorInfo) -> u64 {
    (info.shape.elem_count() / info.ggml_dtype.block_size() * info.ggml_dtype.type_size()) as u64
}

fn rope(gguf: &Gguf, name: &str, architecture: Architecture, head_dim: usize) -> Result<Rope> {
    let key = |suffix: &str| format!("{name}.rope.{suffix}");
    // The query and key rows of llama models are permuted on conversion to GGUF, so that pairs lie side by side.
    let pairs = match architecture {
        Architecture::Llama => RopePairs::Interleaved,
        Architecture::Qwen2 | Architecture::Qwen3 => RopePairs::HalfSplit,
    };
    let factor = match gguf.float(&key("scaling.factor"))? {
        Some(factor) => Some(factor),
        None => gguf.float(&key("scale_linear"))?,
    };
    let factor = factor.filter(|&f| f != 0.0 && f != 1.0);
    let kind = gguf.text(&key("scaling.type"))?.unwrap_or(if factor.is_some() { "linear" } else { "none" });
    let scaling = match (kind, gguf.shape("rope_freqs.weight")) {
        ("none", Some(_)) => {
            let factors =
                gguf.read("rope_freqs.weight", &[head_dim / 2])?.dequantize(&Device::Cpu)?.to_vec1::<f32>()?;
            if !factors.iter().all(|f| f.is_finite() && *f > 0.0) {
                return Err(gguf.bad("rope_freqs.weight", "positive factors", "others"));
            }
            RopeScaling::Factors(factors)
        }
        ("none", None) => RopeScaling::None,
        ("linear", None) => factor.map_or(RopeScaling::None, |factor| RopeScaling::Linear { factor }),
        ("linear", Some(_)) => return Err(gguf.bad(&key("scaling.type"), "`none` beside `rope_freqs.weight`", kind)),
        _ => return Err(gguf.bad(&key("scaling.type"), "`none` or `linear`", format!("`{kind}`"))),
    };
    let base = gguf.float(&key("freq_base"))?.unwrap_or(10000.0);
    if base <= 0.0 {
        return Err(gguf.bad(&key("freq_base"), "a positive number", base));
    }
    Ok(Rope { base, pairs, scaling })
}
