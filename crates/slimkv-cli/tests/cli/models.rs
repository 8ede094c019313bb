//! `slimkv run`, `eval` and `plan` on a tiny random model: no download.

use std::path::Path;
use std::process::Stdio;

use super::tiny::{CONTEXT, HEAD_DIM, KV_HEADS, LAYERS, Tiny};
use super::{json, keys, names, slimkv, slimkv_with};

/// A text of the tiny tokenizer's letters.
fn write_text(folder: &Path) {
    std::fs::write(folder.join("text.txt"), "the hen and the ant ".repeat(200)).unwrap();
}

#[test]
fn run_generates_from_the_argument_and_from_stdin() {
    let folder = tempfile::tempdir().unwrap();
    let model = Tiny::new("llama").write_gguf(folder.path());
    let model = model.to_str().unwrap();
    let args = ["run", "--model", model, "--method", "kivi:4", "--max-tokens", "8", "--raw"];
    let run = slimkv(folder.path(), &[&args[..], &["the ant"]].concat());
    assert!(run.stderr.contains("kivi:4 cache on cpu") && run.stderr.contains("fp16:"), "{}", run.stderr);
    let text = run.ok();
    std::fs::write(folder.path().join("prompt.txt"), "the ant\n").unwrap();
    let prompt = std::fs::File::open(folder.path().join("prompt.txt")).unwrap();
    assert_eq!(slimkv_with(folder.path(), &args, Stdio::from(prompt)).ok(), text);
    slimkv(folder.path(), &args).refused(&["PROMPT"]);
}

#[test]
fn eval_writes_exactly_the_promised_records() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    let weights = tempfile::tempdir().unwrap();
    let model = Tiny::new("llama").write_directory(weights.path(), candle_core::DType::F32, 1);
    write_text(here);
    let args = [
        "eval",
        "--model",
        model.to_str().unwrap(),
        "--text",
        "text.txt",
        "--tokens",
        "320",
        "--batch",
        "64",
        "--decode-tokens",
        "2",
        "--methods",
        "fp16,kivi:8,residual=0,kivi:2,residual=0",
        "--json",
        "q.json",
        "--plot",
        "q.svg",
        "--plot",
        "q.png",
    ];
    let table = slimkv(here, &args).ok();
    assert!(table.contains("kivi:2,residual=0"), "{table}");
    let records = json(&here.join("q.json"));
    let records = records.as_array().unwrap();
    let methods: Vec<&str> = records.iter().map(|r| r["method"].as_str().unwrap()).collect();
    assert_eq!(methods, ["fp16", "kivi:8,residual=0", "kivi:2,residual=0"]);
    for record in records {
        assert_eq!(
            keys(record),
            [
                "bits_per_value",
                "bytes_per_token",
                "cache_bytes",
                "decode_tokens_per_s",
                "device",
                "kl_mean",
                "kl_p99",
                "method",
                "nll",
                "peak_rss_bytes",
                "perplexity",
                "prefill_tokens_per_s",
                "top1"
            ]
        );
        let number = |key: &str| record[key].as_f64().unwrap();
        assert!((number("nll").exp() - number("perplexity")).abs() < 1e-6 * number("perplexity"));
        assert_eq!(number("bytes_per_token"), number("cache_bytes") / 320.0);
        assert!(number("prefill_tokens_per_s") > 0.0 && number("decode_tokens_per_s") > 0.0);
        assert!(number("peak_rss_bytes") > 1e6);
    }
    let kl = |i: usize| records[i]["kl_mean"].as_f64().unwrap();
    assert_eq!((kl(0), records[0]["top1"].as_f64()), (0.0, Some(1.0)));
    assert!(kl(1) < kl(2), "8 bits must be closer than 2: {} {}", kl(1), kl(2));
    let svg = std::fs::read_to_string(here.join("q.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("kivi:2"));
    assert!(std::fs::read(here.join("q.png")).unwrap().starts_with(b"\x89PNG"));
    assert_eq!(names(here), ["q.json", "q.png", "q.svg", "text.txt"]);
}

#[test]
fn eval_refuses_what_the_model_cannot_do() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    let model = Tiny::new("llama").write_gguf(here);
    let model = model.to_str().unwrap();
    write_text(here);
    let too_long = (CONTEXT + 1).to_string();
    let args = ["eval", "--model", model, "--text", "text.txt", "--json", "q.json", "--tokens"];
    slimkv(here, &[&args[..], &[too_long.as_str()]].concat()).refused(&["context"]);
    slimkv(here, &[&args[..], &["1"]].concat()).refused(&["tokens", "found 1"]);
    std::fs::write(here.join("text.txt"), "the").unwrap();
    slimkv(here, &[&args[..], &["64"]].concat()).refused(&["text", "64"]);
    assert!(!here.join("q.json").exists());
}

#[test]
fn plan_reads_the_geometry_from_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = Tiny::new("qwen3").write_gguf(folder.path());
    let args =
        ["plan", "--model", model.to_str().unwrap(), "--memory", "64MiB", "--methods", "fp16", "--json", "p.json"];
    slimkv(folder.path(), &args).ok();
    let plan = json(&folder.path().join("p.json"));
    assert_eq!(plan[0]["bytes_per_token"].as_f64(), Some((2 * LAYERS * KV_HEADS * HEAD_DIM * 2) as f64));
    assert!(plan[0]["weights_bytes"].as_u64().unwrap() > 0);
}
