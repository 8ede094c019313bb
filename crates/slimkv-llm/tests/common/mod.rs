//! Tiny random models, written as GGUF and as safetensors, so that no test needs a download.
#![allow(dead_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use serde_json::json;

pub const LAYERS: usize = 2;
pub const HIDDEN: usize = 128;
pub const FFN: usize = 192;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_DIM: usize = 64;
pub const CONTEXT: usize = 640;
pub const ROPE_BASE: f64 = 10000.0;
pub const EPS: f64 = 1e-5;

pub const IM_START: &str = "<|im_start|>";
pub const IM_END: &str = "<|im_end|>";
pub const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}\
     {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const MERGES: [(&str, &str); 5] = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("a", "n"), ("an", "d")];

/// A model in memory: tensors by their safetensors name, with the rows in safetensors order.
#[derive(Clone)]
pub struct Tiny {
    pub architecture: &'static str,
    pub tensors: HashMap<String, Tensor>,
    pub tied: bool,
    pub llama3_rope: bool,
}

/// Numbers of `[-1, 1)`.
pub fn noise(seed: &mut u64) -> f32 {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

impl Tiny {
    pub fn new(architecture: &'static str) -> Self {
        let mut seed = 42;
        let mut tensors = HashMap::new();
        let mut put = |name: String, shape: &[usize], scale: f32, offset: f32| {
            let n = shape.iter().product();
            let data: Vec<f32> = (0..n).map(|_| offset + scale * noise(&mut seed)).collect();
            tensors.insert(name, Tensor::from_vec(data, shape, &Device::Cpu).unwrap());
        };
        let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
        put("model.embed_tokens.weight".into(), &[vocab().len(), HIDDEN], 1.0, 0.0);
        put("model.norm.weight".into(), &[HIDDEN], 0.2, 1.0);
        put("lm_head.weight".into(), &[vocab().len(), HIDDEN], 0.3, 0.0);
        for i in 0..LAYERS {
            let name = |part: &str| format!("model.layers.{i}.{part}");
            put(name("input_layernorm.weight"), &[HIDDEN], 0.2, 1.0);
            put(name("self_attn.q_proj.weight"), &[q, HIDDEN], 0.2, 0.0);
            put(name("self_attn.k_proj.weight"), &[kv, HIDDEN], 0.2, 0.0);
            put(name("self_attn.v_proj.weight"), &[kv, HIDDEN], 0.2, 0.0);
            put(name("self_attn.o_proj.weight"), &[HIDDEN, q], 0.1, 0.0);
            put(name("post_attention_layernorm.weight"), &[HIDDEN], 0.2, 1.0);
            put(name("mlp.gate_proj.weight"), &[FFN, HIDDEN], 0.2, 0.0);
            put(name("mlp.up_proj.weight"), &[FFN, HIDDEN], 0.2, 0.0);
            put(name("mlp.down_proj.weight"), &[HIDDEN, FFN], 0.1, 0.0);
            if architecture == "qwen2" {
                put(name("self_attn.q_proj.bias"), &[q], 0.5, 0.0);
                put(name("self_attn.k_proj.bias"), &[kv], 0.5, 0.0);
                put(name("self_attn.v_proj.bias"), &[kv], 0.5, 0.0);
            }
            if architecture == "qwen3" {
                put(name("self_attn.q_norm.weight"), &[HEAD_DIM], 0.3, 1.0);
                put(name("self_attn.k_norm.weight"), &[HEAD_DIM], 0.3, 1.0);
            }
        }
        Tiny { architecture, tensors, tied: false, llama3_rope: false }
    }

    /// The same model with the embedding as output projection.
    pub fn tied(mut self) -> Self {
        self.tensors.remove("lm_head.weight");
        self.tied = true;
        self
    }

    pub fn with_llama3_rope(mut self) -> Self {
        self.llama3_rope = true;
        self
    }

    /// Metadata of the GGUF form.
    pub fn metadata(&self) -> Vec<(String, Value)> {
        let key = |suffix: &str| format!("{}.{suffix}", self.architecture);
        let number = |n: usize| Value::U32(n as u32);
        let texts = |v: Vec<String>| Value::Array(v.into_iter().map(Value::String).collect());
        let control = |t: &str| t == IM_START || t == IM_END;
        let kinds = vocab().iter().map(|t| Value::I32(if control(t) { 3 } else { 1 })).collect();
        vec![
            ("general.architecture".into(), Value::String(self.architecture.into())),
            ("general.name".into(), Value::String("tiny".into())),
            (key("block_count"), number(LAYERS)),
            (key("embedding_length"), number(HIDDEN)),
            (key("feed_forward_length"), number(FFN)),
            (key("context_length"), number(CONTEXT)),
            (key("attention.head_count"), number(HEADS)),
            (key("attention.head_count_kv"), number(KV_HEADS)),
            (key("attention.key_length"), number(HEAD_DIM)),
            (key("attention.value_length"), number(HEAD_DIM)),
            (key("attention.layer_norm_rms_epsilon"), Value::F32(EPS as f32)),
            (key("rope.freq_base"), Value::F32(ROPE_BASE as f32)),
            ("tokenizer.ggml.model".into(), Value::String("gpt2".into())),
            ("tokenizer.ggml.pre".into(), Value::String("smollm".into())),
            ("tokenizer.ggml.tokens".into(), texts(vocab())),
            ("tokenizer.ggml.token_type".into(), Value::Array(kinds)),
            ("tokenizer.ggml.merges".into(), texts(MERGES.map(|(l, r)| format!("{l} {r}")).into())),
            ("tokenizer.ggml.bos_token_id".into(), number(id(IM_START) as usize)),
            ("tokenizer.ggml.eos_token_id".into(), number(id(IM_END) as usize)),
            ("tokenizer.ggml.add_bos_token".into(), Value::Bool(false)),
            ("tokenizer.chat_template".into(), Value::String(TEMPLATE.into())),
        ]
    }

    /// Tensors of the GGUF form.
    pub fn gguf_tensors(&self) -> Vec<(String, Tensor)> {
        let mut tensors: Vec<(String, Tensor)> =
            self.tensors.iter().map(|(name, tensor)| (gguf_name(name), self.gguf_rows(name, tensor))).collect();
        if self.llama3_rope {
            let factors = llama3_factors();
            tensors.push(("rope_freqs.weight".into(), Tensor::from_vec(factors, HEAD_DIM / 2, &Device::Cpu).unwrap()));
        }
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        tensors
    }

    /// Llama's query and key rows are permuted in GGUF: `[half, pair]` becomes `[pair, half]` within a head.
    fn gguf_rows(&self, name: &str, tensor: &Tensor) -> Tensor {
        let heads = match name {
            _ if self.architecture != "llama" => return tensor.clone(),
            _ if name.ends_with("q_proj.weight") => HEADS,
            _ if name.ends_with("k_proj.weight") => KV_HEADS,
            _ => return tensor.clone(),
        };
        let split = tensor.reshape((heads, 2, HEAD_DIM / 2, HIDDEN)).unwrap();
        split.transpose(1, 2).unwrap().contiguous().unwrap().reshape((heads * HEAD_DIM, HIDDEN)).unwrap()
    }

    pub fn write_gguf(&self, folder: &Path) -> PathBuf {
        let path = folder.join(format!("{}.gguf", self.architecture));
        write_gguf(&path, &self.metadata(), &self.gguf_tensors(), GgmlDType::F32);
        path
    }

    /// `config.json` of the directory form.
    pub fn config_json(&self) -> serde_json::Value {
        let scaling = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256
        });
        json!({
            "model_type": self.architecture,
            "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "vocab_size": vocab().len(), "max_position_embeddings": CONTEXT,
            "rms_norm_eps": EPS, "rope_theta": ROPE_BASE, "tie_word_embeddings": self.tied,
            "rope_scaling": if self.llama3_rope { scaling } else { serde_json::Value::Null },
            "eos_token_id": id(IM_END),
        })
    }

    /// Writes a directory, its tensors in `shards` files.
    pub fn write_directory(&self, folder: &Path, dtype: DType, shards: usize) -> PathBuf {
        let path = folder.join(format!("{}-{shards}", self.architecture));
        std::fs::create_dir_all(&path).unwrap();
        let mut names: Vec<&String> = self.tensors.keys().collect();
        names.sort();
        let mut home = serde_json::Map::new();
        for shard in 0..shards {
            let file = match shards {
                1 => "model.safetensors".to_string(),
                _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
            };
            let mine = names.iter().skip(shard).step_by(shards);
            let tensors: HashMap<String, Tensor> =
                mine.map(|&name| (name.clone(), self.tensors[name].to_dtype(dtype).unwrap())).collect();
            home.extend(tensors.keys().map(|name| (name.clone(), json!(file))));
            candle_core::safetensors::save(&tensors, path.join(file)).unwrap();
        }
        if shards > 1 {
            write_json(&path, "model.safetensors.index.json", &json!({ "weight_map": home }));
        }
        write_json(&path, "config.json", &self.config_json());
        write_json(&path, "tokenizer.json", &tokenizer_json());
        let settings = json!({ "bos_token": IM_START, "eos_token": { "content": IM_END }, "chat_template": TEMPLATE });
        write_json(&path, "tokenizer_config.json", &settings);
        path
    }
}

pub fn write_gguf(path: &Path, metadata: &[(String, Value)], tensors: &[(String, Tensor)], dtype: GgmlDType) {
    let tensors: Vec<(&str, QTensor)> = tensors
        .iter()
        .map(|(name, tensor)| {
            let dtype = if tensor.rank() == 1 { GgmlDType::F32 } else { dtype };
            (name.as_str(), QTensor::quantize(tensor, dtype).unwrap())
        })
        .collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    gguf_file::write(&mut std::fs::File::create(path).unwrap(), &metadata, &tensors).unwrap();
}

pub fn write_json(folder: &Path, name: &str, value: &serde_json::Value) {
    std::fs::write(folder.join(name), value.to_string()).unwrap();
}

/// What llama.cpp's converter stores for the scaling in [`Tiny::config_json`], by its own formula.
fn llama3_factors() -> Vec<f32> {
    let (factor, low, high, original) = (8.0, 1.0, 4.0, 256.0);
    let of = |i: usize| {
        let wavelength = 2.0 * std::f64::consts::PI * ROPE_BASE.powf(2.0 * i as f64 / HEAD_DIM as f64);
        if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..HEAD_DIM / 2).map(|i| of(i) as f32).collect()
}

fn gguf_name(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        "lm_head.weight" => return "output.weight".into(),
        _ => {}
    }
    let (i, part) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let part = part
        .replace("input_layernorm", "attn_norm")
        .replace("post_attention_layernorm", "ffn_norm")
        .replace("self_attn.o_proj", "attn_output")
        .replace("self_attn.q_norm", "attn_q_norm")
        .replace("self_attn.k_norm", "attn_k_norm")
        .replace("self_attn.", "attn_")
        .replace("mlp.", "ffn_")
        .replace("_proj", "");
    format!("blk.{i}.{part}")
}

/// 256 bytes as GPT-2 spells them, the results of the merges, two control tokens.
pub fn vocab() -> Vec<String> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    let bytes = (0..=255u8).map(|b| {
        let code = if printable(b) { b as u32 } else { next };
        next += !printable(b) as u32;
        char::from_u32(code).unwrap().to_string()
    });
    let bytes: Vec<String> = bytes.collect();
    let merged = MERGES.map(|(left, right)| format!("{left}{right}"));
    bytes.into_iter().chain(merged).chain([IM_START.into(), IM_END.into()]).collect()
}

pub fn id(token: &str) -> u32 {
    vocab().iter().position(|t| t == token).unwrap() as u32
}

pub fn tokenizer_json() -> serde_json::Value {
    let control = [IM_START, IM_END];
    let entries = vocab().into_iter().enumerate().filter(|(_, t)| !control.contains(&t.as_str()));
    let vocab: serde_json::Map<String, serde_json::Value> = entries.map(|(i, t)| (t, json!(i))).collect();
    let added = control.map(|t| {
        json!({ "id": id(t), "content": t, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Digits", "individual_digits": true },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true }
        ]},
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": MERGES.map(|(l, r)| format!("{l} {r}")) }
    })
}

/// Tokens of every kind but the control tokens.
pub fn tokens(n: usize) -> Vec<u32> {
    let mut seed = 9;
    (0..n).map(|_| ((noise(&mut seed) + 1.0) / 2.0 * 256.0) as u32).collect()
}
