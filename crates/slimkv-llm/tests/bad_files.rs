//! Broken and unsupported files: each gives a typed error that names the file and the key.

mod common;

use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Device, Tensor};
use common::*;
use slimkv::cache::{Geometry, KvCache};
use slimkv_llm::{Config, Error, LoadOptions, Model, Want};

fn fail(path: &Path) -> Error {
    Model::load(path, &LoadOptions::default()).unwrap_err()
}

/// A GGUF file with changed metadata and tensors.
fn changed(
    folder: &Path,
    metadata: impl FnOnce(&mut Vec<(String, Value)>),
    tensors: impl FnOnce(&mut Vec<(String, Tensor)>),
) -> PathBuf {
    let tiny = Tiny::new("llama");
    let (mut m, mut t) = (tiny.metadata(), tiny.gguf_tensors());
    metadata(&mut m);
    tensors(&mut t);
    let path = folder.join("changed.gguf");
    write_gguf(&path, &m, &t, GgmlDType::F32);
    path
}

fn set(metadata: &mut Vec<(String, Value)>, key: &str, value: Value) {
    metadata.retain(|(k, _)| k != key);
    metadata.push((key.into(), value));
}

#[test]
fn metadata_that_is_missing_or_not_supported() {
    let folder = tempfile::tempdir().unwrap();
    let text = |t: &str| Value::String(t.into());
    let cases = [
        ("general.architecture", text("mamba")),
        ("llama.attention.head_count", Value::U32(0)),
        ("llama.attention.head_count_kv", Value::U32(3)),
        ("llama.attention.value_length", Value::U32(32)),
        ("llama.attention.layer_norm_rms_epsilon", text("small")),
        ("llama.attention.sliding_window", Value::U32(128)),
        ("llama.rope.scaling.type", text("yarn")),
        ("llama.rope.freq_base", Value::F32(-1.0)),
        ("llama.context_length", Value::I32(-5)),
        ("split.count", Value::U16(2)),
        ("tokenizer.ggml.model", text("bert")),
        ("tokenizer.ggml.pre", text("tekken")),
        ("tokenizer.ggml.eos_token_id", Value::U32(100_000)),
        ("tokenizer.ggml.merges", Value::Array(vec![text("no-space")])),
        ("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1)])),
    ];
    for (key, value) in cases {
        let error = fail(&changed(folder.path(), |m| set(m, key, value), |_| ()));
        assert!(matches!(error, Error::Value { .. }), "{key}: {error:?}");
        let named = if key.ends_with("head_count_kv") { "attention heads" } else { key };
        assert!(error.to_string().contains(named) && error.to_string().contains("changed.gguf"), "{key}: {error}");
    }
    for key in ["general.architecture", "llama.block_count", "llama.context_length", "tokenizer.ggml.tokens"] {
        let error = fail(&changed(folder.path(), |m| m.retain(|(k, _)| k != key), |_| ()));
        assert!(matches!(&error, Error::Missing { key: found, .. } if found == key), "{key}: {error:?}");
    }
}

#[test]
fn tensors_that_are_missing_misshapen_or_unknown() {
    let folder = tempfile::tempdir().unwrap();
    let error = fail(&changed(folder.path(), |_| (), |t| t.retain(|(name, _)| name != "blk.1.ffn_up.weight")));
    assert!(matches!(&error, Error::Missing { key, .. } if key == "blk.1.ffn_up.weight"), "{error:?}");

    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let narrow = |t: &mut Vec<(String, Tensor)>| {
        t.iter_mut().find(|(name, _)| name == "blk.0.attn_k.weight").unwrap().1 = zeros(&[64, HIDDEN]);
    };
    let error = fail(&changed(folder.path(), |_| (), narrow));
    let Error::Shape { tensor, expected, found, .. } = &error else { panic!("{error:?}") };
    assert_eq!(
        (tensor.as_str(), expected.as_slice(), found.as_slice()),
        ("blk.0.attn_k.weight", &[128, 128][..], &[64, 128][..])
    );

    let error = fail(&changed(folder.path(), |_| (), |t| t.push(("blk.0.attn_q.bias".into(), zeros(&[256])))));
    assert!(matches!(&error, Error::UnknownTensor { tensor, .. } if tensor == "blk.0.attn_q.bias"), "{error:?}");
}

#[test]
fn files_that_are_cut_short_or_something_else() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(Tiny::new("llama").write_gguf(folder.path())).unwrap();
    let path = folder.path().join("cut.gguf");
    for length in [0, 3, 20, 1000, bytes.len() / 2, bytes.len() - 5000] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = fail(&path);
        assert!(matches!(error, Error::Format { .. }), "{length}: {error:?}");
    }
    std::fs::write(&path, b"this is a text, not a model").unwrap();
    assert!(matches!(fail(&path), Error::Format { .. }));
    assert!(matches!(fail(&folder.path().join("not-there.gguf")), Error::Io { .. }));
}

#[test]
fn directories() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Tiny::new("qwen2");
    let path = tiny.write_directory(folder.path(), DType::F16, 1);
    let with = |key: &str, value: serde_json::Value| {
        let mut config = tiny.config_json();
        config[key] = value;
        write_json(&path, "config.json", &config);
        fail(&path)
    };
    for (key, value) in [
        ("model_type", "bert".into()),
        ("use_sliding_window", true.into()),
        ("mlp_bias", true.into()),
        ("num_attention_heads", 0.into()),
        ("hidden_size", "wide".into()),
        ("rope_theta", (-1).into()),
    ] {
        let error = with(key, value);
        assert!(matches!(&error, Error::Value { key: found, .. } if found == key), "{key}: {error:?}");
    }
    let error = with("rope_scaling", serde_json::json!({ "rope_type": "yarn", "factor": 4.0 }));
    assert!(matches!(&error, Error::Value { key, .. } if key == "rope_scaling.rope_type"), "{error:?}");
    let error = with("rope_scaling", serde_json::json!({ "rope_type": "llama3", "factor": 4.0 }));
    assert!(matches!(&error, Error::Missing { key, .. } if key == "rope_scaling.low_freq_factor"), "{error:?}");
    assert!(matches!(with("hidden_size", 256.into()), Error::Shape { .. }));
    assert!(matches!(with("num_hidden_layers", 3.into()), Error::Missing { .. }));
    assert!(matches!(with("num_hidden_layers", 1.into()), Error::UnknownTensor { .. }));

    write_json(&path, "config.json", &tiny.config_json());
    std::fs::write(path.join("tokenizer.json"), "{").unwrap();
    assert!(matches!(fail(&path), Error::Format { .. }));
    write_json(&path, "tokenizer.json", &serde_json::json!({ "model": { "type": "Unigram" } }));
    assert!(matches!(fail(&path), Error::Value { .. }));
    std::fs::write(path.join("model.safetensors"), b"12345678").unwrap();
    assert!(matches!(fail(&path), Error::Format { .. }));
    std::fs::remove_file(path.join("model.safetensors")).unwrap();
    assert!(matches!(fail(&path), Error::Io { .. }));
}

#[test]
fn calls_that_make_no_sense_leave_the_cache_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = Tiny::new("llama").write_gguf(folder.path());
    let model = Model::load(&path, &LoadOptions { context: Some(100) }).unwrap();
    assert_eq!(model.config().context, 100);
    let mut cache = KvCache::new("kivi:4".parse().unwrap(), model.geometry(1), &slimkv::Device::cpu()).unwrap();
    model.forward(&tokens(10), &mut cache, Want::Last).unwrap();
    for bad in [vec![], vec![vocab().len() as u32], vec![u32::MAX]] {
        let error = model.forward(&bad, &mut cache, Want::Last).unwrap_err();
        assert!(matches!(error, Error::Argument { arg: "tokens", .. }), "{error:?}");
    }
    let error = model.forward(&tokens(91), &mut cache, Want::Last).unwrap_err();
    assert!(matches!(error, Error::ContextFull { tokens: 101, context: 100 }), "{error:?}");
    assert_eq!(cache.len(), 10);
    let geometry = Geometry { layers: LAYERS + 1, ..model.geometry(1) };
    let mut other = KvCache::new("fp16".parse().unwrap(), geometry, &slimkv::Device::cpu()).unwrap();
    let error = model.forward(&[1], &mut other, Want::Last).unwrap_err();
    assert!(matches!(error, Error::Argument { arg: "cache", .. }), "{error:?}");
    for context in [0, CONTEXT + 1] {
        let error = Model::load(&path, &LoadOptions { context: Some(context) }).unwrap_err();
        assert!(matches!(error, Error::Argument { arg: "context", .. }), "{error:?}");
    }
    assert_eq!(Config::read(&path).unwrap().context, CONTEXT);
}
