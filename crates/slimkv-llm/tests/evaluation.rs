//! The evaluation of methods on a tiny random model.

mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use common::*;
use slimkv::Device;
use slimkv::cache::{KvCache, Method};
use slimkv_llm::eval::{EvalOptions, Evaluation, Stage, evaluate};
use slimkv_llm::{Error, LoadOptions, Model, Special, Want};

const TEXT: &str = "We hold the hat and the hand; 1234 bands and the thin man ran. ";

fn model() -> Model {
    let folder = tempfile::tempdir().unwrap();
    Model::load(Tiny::new("llama").write_gguf(folder.path()), &LoadOptions::default()).unwrap()
}

fn methods(names: &[&str]) -> Vec<Method> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn options() -> EvalOptions {
    EvalOptions { tokens: 250, batch: 64, decode_tokens: 3, cancel: None }
}

fn run(model: &Model, names: &[&str]) -> Vec<Evaluation> {
    evaluate(model, &TEXT.repeat(9), &methods(names), &Device::cpu(), &options(), &mut |_| ()).unwrap()
}

#[test]
fn the_reference_has_its_own_perplexity_and_no_divergence() {
    let model = model();
    let row = run(&model, &["fp16"]).remove(0);
    assert_eq!((row.kl_mean, row.kl_p99, row.top1), (0.0, 0.0, 1.0));
    assert_eq!((row.method.as_str(), row.bits_per_value, row.device.as_str()), ("fp16", 16.0, "cpu"));

    let mut tokens = model.tokenizer().encode(&TEXT.repeat(9), Special::Text).unwrap();
    tokens.truncate(250);
    let mut cache = KvCache::new("fp16".parse().unwrap(), model.geometry(1), &Device::cpu()).unwrap();
    let logits = model.forward(&tokens, &mut cache, Want::All).unwrap();
    let nll = |i: usize| {
        let row: Vec<f64> = logits.row(i).iter().map(|&l| l as f64).collect();
        row.iter().map(|l| l.exp()).sum::<f64>().ln() - row[tokens[i + 1] as usize]
    };
    let mean = (0..249).map(nll).sum::<f64>() / 249.0;
    assert!((row.nll - mean).abs() < 1e-3, "{} {mean}", row.nll);
    assert!((row.perplexity - row.nll.exp()).abs() < 1e-9);
    assert_eq!(row.cache_bytes, cache.bytes());
    assert_eq!(row.bytes_per_token, cache.bytes() as f64 / 250.0);
}

#[test]
fn fewer_bits_diverge_more_and_rows_come_in_order() {
    let model = model();
    let names = ["kivi:2,residual=32", "fp16", "kivi:8,residual=32", "kivi:4,residual=32"];
    let rows = run(&model, &names);
    assert_eq!(rows.iter().map(|row| row.method.as_str()).collect::<Vec<_>>(), names);
    let kl: Vec<f64> = rows.iter().map(|row| row.kl_mean).collect();
    assert!(kl[1] == 0.0 && kl[2] > 0.0 && kl[3] > 2.0 * kl[2] && kl[0] > 2.0 * kl[3], "{kl:?}");
    assert!(rows[0].top1 < rows[2].top1);
    assert!(rows[0].cache_bytes < rows[3].cache_bytes && rows[3].cache_bytes < rows[2].cache_bytes);
    assert!(rows.iter().all(|row| row.prefill_tokens_per_s > 0.0 && row.decode_tokens_per_s > 0.0));
    assert!(rows.iter().all(|row| row.kl_p99 >= row.kl_mean));
    let alone = run(&model, &names[..1]).remove(0);
    assert_eq!((alone.nll, alone.kl_mean), (rows[0].nll, rows[0].kl_mean), "methods must not disturb each other");
}

/// With a packed cache it does, a little: a batch is appended before it attends, so its early tokens see packed rows.
#[test]
fn the_batch_does_not_change_the_result_of_an_exact_cache() {
    let model = model();
    let with = |batch| {
        let options = EvalOptions { batch, ..options() };
        let rows = evaluate(&model, &TEXT.repeat(9), &methods(&["fp16"]), &Device::cpu(), &options, &mut |_| ());
        rows.unwrap().remove(0)
    };
    let (one, other) = (with(250), with(37));
    assert!((one.nll - other.nll).abs() < 1e-3, "{} {}", one.nll, other.nll);
}

#[test]
fn progress_rises_to_the_end() {
    let model = model();
    let (mut done, mut total, mut decoded) = (0, 0, 0);
    evaluate(&model, &TEXT.repeat(9), &methods(&["kivi:4"]), &Device::cpu(), &options(), &mut |progress| {
        assert!(progress.done > done && progress.done <= progress.total);
        decoded += (progress.stage == Stage::Decode) as usize;
        (done, total) = (progress.done, progress.total);
    })
    .unwrap();
    assert_eq!((done, decoded), (total, 2 * 3));
    assert_eq!(total, 2 * 253);
}

#[test]
fn bad_requests_are_errors() {
    let model = model();
    let run = |text: &str, options: EvalOptions| {
        evaluate(&model, text, &methods(&["kivi:4"]), &Device::cpu(), &options, &mut |_| ()).unwrap_err()
    };
    let short = run(TEXT, options());
    assert!(matches!(short, Error::Argument { arg: "text", .. }), "{short:?}");
    let long = run(TEXT, EvalOptions { tokens: CONTEXT + 1, ..options() });
    assert!(matches!(long, Error::ContextFull { .. }), "{long:?}");
    let none = run(TEXT, EvalOptions { batch: 0, ..options() });
    assert!(matches!(none, Error::Argument { arg: "batch", .. }), "{none:?}");
    let one = run(TEXT, EvalOptions { tokens: 1, ..options() });
    assert!(matches!(one, Error::Argument { arg: "tokens", .. }), "{one:?}");
    let cancelled = run(&TEXT.repeat(9), EvalOptions { cancel: Some(Arc::new(AtomicBool::new(true))), ..options() });
    assert!(cancelled.is_cancelled(), "{cancelled:?}");
}

#[test]
fn the_json_has_the_keys_of_the_command_line() {
    let row = serde_json::to_value(&run(&model(), &["kivi:4"])[0]).unwrap();
    let mut keys: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort();
    let mut expected = [
        "method",
        "bits_per_value",
        "perplexity",
        "nll",
        "kl_mean",
        "kl_p99",
        "top1",
        "bytes_per_token",
        "cache_bytes",
        "peak_rss_bytes",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "device",
    ];
    expected.sort();
    assert_eq!(keys, expected);
}
