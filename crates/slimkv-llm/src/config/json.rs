//! The description of a model from `config.json`, as Hugging Face's transformers writes it.

use std::path::PathBuf;

use serde_json::Value;

use super::{Architecture, Config, Rope, RopePairs, RopeScaling};
use crate::weights::Directory;
use crate::{Error, Result};

/// An object in `config.json` and the path to it, for errors.
struct Object<'a> {
    file: PathBuf,
    prefix: &'static str,
    value: &'a Value,
}

impl<'a> Object<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    fn bad(&self, key: &str, expected: impl Into<String>, found: impl std::fmt::Display) -> Error {
        let (file, key) = (self.file.clone(), format!("{}{key}", self.prefix));
        Error::Value { file, key, expected: expected.into(), found: found.to_string() }
    }

    fn required<T>(&self, key: &str, expected: &str, value: Option<T>) -> Result<T> {
        let key = format!("{}{key}", self.prefix);
        value.ok_or_else(|| Error::Missing { file: self.file.clone(), key, expected: expected.into() })
    }

    fn read<T>(&self, key: &str, expected: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        self.get(key).map(|value| read(value).ok_or_else(|| self.bad(key, expected, value))).transpose()
    }

    fn number(&self, key: &str) -> Result<Option<usize>> {
        self.read(key, "a non-negative integer", |v| usize::try_from(v.as_u64()?).ok())
    }

    fn float(&self, key: &str) -> Result<Option<f32>> {
        self.read(key, "a positive number", |v| v.as_f64().map(|v| v as f32).filter(|v| v.is_finite() && *v > 0.0))
    }

    fn flag(&self, key: &str) -> Result<bool> {
        Ok(self.read(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "text", Value::as_str)
    }
}

impl Config {
    pub(crate) fn from_directory(directory: &Directory) -> Result<Config> {
        let (file, value) = (directory.path.join("config.json"), directory.json("config.json")?);
        let root = Object { file: file.clone(), prefix: "", value: &value };
        let number = |key: &str| root.number(key).and_then(|v| root.required(key, "a number", v));

        let name = root.required("model_type", "the name of the architecture", root.text("model_type")?)?;
        let architecture = Architecture::parse(name, &file, "model_type")?;
        for key in ["attention_bias", "mlp_bias", "use_sliding_window"] {
            if root.flag(key)? && !(key == "attention_bias" && architecture.has_qkv_bias()) {
                return Err(root.bad(key, "false", true));
            }
        }
        let (hidden, heads) = (number("hidden_size")?, number("num_attention_heads")?);
        if heads == 0 {
            return Err(root.bad("num_attention_heads", "a positive number", heads));
        }
        let head_dim = root.number("head_dim")?.unwrap_or(hidden / heads);
        let tied_embeddings = root.flag("tie_word_embeddings")?;
        let headers = directory.headers()?;
        let used = headers.iter().filter(|(name, _)| !(tied_embeddings && *name == "lm_head.weight"));
        let directory_name = directory.path.canonicalize().unwrap_or_else(|_| directory.path.clone());
        Config {
            architecture,
            name: directory_name.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            layers: number("num_hidden_layers")?,
            hidden,
            ffn: number("intermediate_size")?,
            heads,
            kv_heads: root.number("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            vocab: number("vocab_size")?,
            context: number("max_position_embeddings")?,
            rms_eps: root.float("rms_norm_eps")?.unwrap_or(1e-6),
            rope: rope(&root)?,
            tied_embeddings,
            parameters: used.clone().map(|(_, h)| h.shape.iter().product::<usize>() as u64).sum(),
            weight_bytes: used.map(|(_, h)| h.bytes as u64).sum(),
            file_bytes: directory.file_bytes(),
        }
        .check(&file)
    }
}

/// The rotary embedding: `rope_theta` and `rope_scaling`, or since transformers 5 both in `rope_parameters`.
fn rope(root: &Object) -> Result<Rope> {
    let nested = |key, prefix| root.get(key).map(|value| Object { file: root.file.clone(), prefix, value });
    let parameters = nested("rope_parameters", "rope_parameters.").or(nested("rope_scaling", "rope_scaling."));
    let base = match &parameters {
        Some(parameters) if parameters.get("rope_theta").is_some() => parameters.float("rope_theta")?,
        _ => root.float("rope_theta")?,
    };
    let scaling = match &parameters {
        None => RopeScaling::None,
        Some(parameters) => scaling(parameters, root)?,
    };
    Ok(Rope { base: base.unwrap_or(10000.0), pairs: RopePairs::HalfSplit, scaling })
}

fn scaling(parameters: &Object, root: &Object) -> Result<RopeScaling> {
    let float = |key: &str| parameters.float(key).and_then(|v| parameters.required(key, "a positive number", v));
    let kind = match parameters.text("rope_type")? {
        Some(kind) => kind,
        None => parameters.text("type")?.unwrap_or("default"),
    };
    Ok(match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: float("factor")? },
        "llama3" => {
            let original = match parameters.number("original_max_position_embeddings")? {
                Some(original) => Some(original),
                None => root.number("original_max_position_embeddings")?,
            };
            let key = "original_max_position_embeddings";
            let (low_freq_factor, high_freq_factor) = (float("low_freq_factor")?, float("high_freq_factor")?);
            if low_freq_factor >= high_freq_factor {
                let expected = format!("more than low_freq_factor ({low_freq_factor})");
                return Err(parameters.bad("high_freq_factor", expected, high_freq_factor));
            }
            RopeScaling::Llama3 {
                factor: float("factor")?,
                low_freq_factor,
                high_freq_factor,
                original_context: parameters.required(key, "a number", original)?,
            }
        }
        _ => return Err(parameters.bad("rope_type", "`default`, `linear` or `llama3`", format!("`{kind}`"))),
    })
}
