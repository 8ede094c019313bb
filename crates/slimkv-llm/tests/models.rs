//! Forward passes of tiny random models against their definition, and against themselves.

mod common;
#[path = "common/oracle.rs"]
mod oracle;

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use common::*;
use slimkv::Device;
use slimkv::cache::KvCache;
use slimkv_llm::{Architecture, Config, LoadOptions, Logits, Model, RopePairs, Want};

const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

fn load(path: impl AsRef<std::path::Path>) -> Model {
    Model::load(path, &LoadOptions::default()).unwrap()
}

fn cache(model: &Model, method: &str) -> KvCache {
    KvCache::new(method.parse().unwrap(), model.geometry(1), &Device::cpu()).unwrap()
}

fn run(model: &Model, tokens: &[u32]) -> Logits {
    model.forward(tokens, &mut cache(model, "fp16"), Want::All).unwrap()
}

fn worst(a: &Logits, b: &Logits) -> f32 {
    assert_eq!((a.rows(), a.vocab()), (b.rows(), b.vocab()));
    (0..a.rows()).flat_map(|i| a.row(i).iter().zip(b.row(i))).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// f16 keys and values move these logits, which are of the order of 5, by up to 0.003.
const F16_CACHE: f32 = 1e-2;

#[test]
fn logits_are_those_of_the_definition() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in ARCHITECTURES {
        let tiny = Tiny::new(architecture);
        let tokens = tokens(20);
        let expected = oracle::logits(&tiny, &tokens);
        let spread = expected.iter().flatten().fold(0.0f64, |m, l| m.max(l.abs()));
        assert!(spread > 2.0, "logits must vary for the test to mean something: {spread}");
        for path in [tiny.write_gguf(folder.path()), tiny.write_directory(folder.path(), DType::F32, 1)] {
            let found = run(&load(&path), &tokens);
            for (i, row) in expected.iter().enumerate() {
                for (e, f) in row.iter().zip(found.row(i)) {
                    assert!((e - *f as f64).abs() < F16_CACHE as f64, "{}: row {i}: {e} {f}", path.display());
                }
            }
        }
    }
}

#[test]
fn gguf_and_safetensors_give_the_same_logits() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(40);
    for architecture in ARCHITECTURES {
        for tiny in [Tiny::new(architecture), Tiny::new(architecture).tied()] {
            let (gguf, directory) =
                (tiny.write_gguf(folder.path()), tiny.write_directory(folder.path(), DType::F32, 3));
            let (a, b) = (load(gguf), load(directory));
            assert_eq!(a.config().tied_embeddings, tiny.tied);
            assert_eq!(a.config().parameters, b.config().parameters);
            let difference = worst(&run(&a, &tokens), &run(&b, &tokens));
            assert!(difference < 5e-3, "{architecture}: {difference}");
        }
    }
}

#[test]
fn llama3_rope_scaling_is_the_same_in_both_formats_and_not_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (tiny, tokens) = (Tiny::new("llama").with_llama3_rope(), tokens(300));
    let (a, b) = (load(tiny.write_gguf(folder.path())), load(tiny.write_directory(folder.path(), DType::F32, 1)));
    assert_eq!((a.config().rope.pairs, b.config().rope.pairs), (RopePairs::Interleaved, RopePairs::HalfSplit));
    let logits = run(&a, &tokens);
    assert!(worst(&logits, &run(&b, &tokens)) < 5e-3);
    let plain = load(Tiny::new("llama").write_directory(folder.path(), DType::F32, 2));
    assert!(worst(&logits, &run(&plain, &tokens)) > 0.1);
}

#[test]
fn sixteen_bit_safetensors_load_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let (tiny, tokens) = (Tiny::new("qwen3"), tokens(12));
    let exact = run(&load(tiny.write_gguf(folder.path())), &tokens);
    for (dtype, tolerance) in [(DType::F16, 0.05), (DType::BF16, 0.4)] {
        let model = load(tiny.write_directory(folder.path(), dtype, 1));
        assert_eq!(model.config().weight_bytes, 2 * model.config().parameters);
        let difference = worst(&exact, &run(&model, &tokens));
        assert!(difference > 0.0 && difference < tolerance, "{dtype:?}: {difference}");
    }
}

#[test]
fn quantised_weights_run() {
    let folder = tempfile::tempdir().unwrap();
    let (tiny, tokens) = (Tiny::new("llama"), tokens(12));
    let exact = run(&load(tiny.write_gguf(folder.path())), &tokens);
    let path = folder.path().join("q8.gguf");
    write_gguf(&path, &tiny.metadata(), &tiny.gguf_tensors(), GgmlDType::Q8_0);
    let model = load(path);
    assert!(model.config().weight_bytes < 2 * model.config().parameters);
    let difference = worst(&exact, &run(&model, &tokens));
    assert!(difference > 0.0 && difference < 0.5, "{difference}");
}

#[test]
fn chunks_give_the_logits_of_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(200);
    for architecture in ARCHITECTURES {
        let model = load(Tiny::new(architecture).write_gguf(folder.path()));
        let whole = run(&model, &tokens);
        for chunk in [1, 7, 64] {
            let mut cache = cache(&model, "fp16");
            let mut row = 0;
            for tokens in tokens.chunks(chunk) {
                let logits = model.forward(tokens, &mut cache, Want::All).unwrap();
                for i in 0..logits.rows() {
                    let pairs = logits.row(i).iter().zip(whole.row(row));
                    let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(worst < 5e-3, "{architecture}: chunks of {chunk}, row {row}: {worst}");
                    row += 1;
                }
            }
            assert_eq!(cache.len(), tokens.len());
        }
    }
}

#[test]
fn the_last_row_is_the_last_of_all_rows() {
    let folder = tempfile::tempdir().unwrap();
    let model = load(Tiny::new("llama").write_gguf(folder.path()));
    let all = run(&model, &tokens(30));
    let last = model.forward(&tokens(30), &mut cache(&model, "fp16"), Want::Last).unwrap();
    assert_eq!(last.rows(), 1);
    let worst = last.last().iter().zip(all.last()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-4, "{worst}");
}

#[test]
fn truncation_takes_the_model_back() {
    let folder = tempfile::tempdir().unwrap();
    let model = load(Tiny::new("qwen2").write_gguf(folder.path()));
    let (mut cache, tokens) = (cache(&model, "fp16"), tokens(50));
    model.forward(&tokens[..30], &mut cache, Want::Last).unwrap();
    let once = model.forward(&tokens[30..], &mut cache, Want::All).unwrap();
    cache.truncate(30).unwrap();
    let other: Vec<u32> = tokens[30..].iter().rev().copied().collect();
    assert_ne!(model.forward(&other, &mut cache, Want::All).unwrap(), once);
    cache.truncate(30).unwrap();
    assert_eq!(model.forward(&tokens[30..], &mut cache, Want::All).unwrap(), once);
}

#[test]
fn a_compressed_cache_stays_close() {
    let folder = tempfile::tempdir().unwrap();
    let model = load(Tiny::new("qwen3").write_gguf(folder.path()));
    let tokens = tokens(300);
    let exact = run(&model, &tokens);
    let with = |method| worst(&exact, &model.forward(&tokens, &mut cache(&model, method), Want::All).unwrap());
    let (eight, two) = (with("kivi:8,residual=32"), with("kivi:2,residual=32"));
    assert!(eight < 0.2, "{eight}");
    assert!(two > 2.0 * eight, "two bits must cost more than eight: {two} {eight}");
}

#[test]
fn the_description_is_read_without_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Tiny::new("qwen2");
    for path in [tiny.write_gguf(folder.path()), tiny.write_directory(folder.path(), DType::F16, 2)] {
        let config = Config::read(&path).unwrap();
        assert_eq!(config.architecture, Architecture::Qwen2);
        assert_eq!((config.layers, config.hidden, config.ffn), (LAYERS, HIDDEN, FFN));
        assert_eq!((config.heads, config.kv_heads, config.head_dim), (HEADS, KV_HEADS, HEAD_DIM));
        assert_eq!((config.vocab, config.context), (vocab().len(), CONTEXT));
        assert_eq!(config, *load(&path).config());
        assert!(config.file_bytes >= config.weight_bytes);
    }
}
