//! Tokenizers from both kinds of file.

mod common;

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use common::*;
use slimkv_llm::{LoadOptions, Model, Special, Tokenizer};

const TEXTS: [&str; 8] = [
    "",
    "the cat and the hat",
    " the",
    "12 345",
    "line\n\n  two\ttabs ",
    "naïve 中文 🦀 e\u{301}",
    "<|im_start|>user",
    "'s and 'the' and",
];

fn models() -> Vec<Model> {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Tiny::new("llama");
    let paths = [tiny.write_gguf(folder.path()), tiny.write_directory(folder.path(), DType::F16, 1)];
    paths.map(|path| Model::load(path, &LoadOptions::default()).unwrap()).into()
}

#[test]
fn text_survives_a_round_trip_and_both_files_agree() {
    let models = models();
    for text in TEXTS {
        let tokens = models[0].tokenizer().encode(text, Special::Text).unwrap();
        assert_eq!(models[1].tokenizer().encode(text, Special::Text).unwrap(), tokens, "{text}");
        for model in &models {
            assert_eq!(model.tokenizer().decode(&tokens), text);
        }
    }
}

#[test]
fn merges_and_digits() {
    for model in models() {
        let pieces = |text| {
            let tokens = model.tokenizer().encode(text, Special::Text).unwrap();
            tokens.iter().map(|&t| model.tokenizer().token(t).unwrap().to_string()).collect::<Vec<_>>().join("|")
        };
        assert_eq!(pieces("the hand and the"), "t|he|Ġ|h|and|Ġ|and|Ġthe");
        assert_eq!(pieces("12 34"), "1|2|Ġ|3|4");
    }
}

#[test]
fn control_tokens_are_read_in_prompts_only() {
    for model in models() {
        let tokenizer = model.tokenizer();
        let text = "<|im_start|>the<|im_end|>";
        let prompt = tokenizer.encode(text, Special::Prompt).unwrap();
        assert_eq!(prompt, [id(IM_START), id("t"), id("he"), id(IM_END)]);
        assert_eq!(tokenizer.decode(&prompt), "the");
        let plain = tokenizer.encode(text, Special::Text).unwrap();
        assert!(!plain.contains(&id(IM_START)) && !plain.contains(&id(IM_END)));
        assert_eq!(tokenizer.decode(&plain), text);
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(id(IM_START)), &[id(IM_END)][..]));
        assert_eq!(tokenizer.vocab(), vocab().len());
    }
}

#[test]
fn bos_comes_once_if_the_model_wants_it() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Tiny::new("llama");
    let mut metadata = tiny.metadata();
    metadata.iter_mut().find(|(key, _)| key == "tokenizer.ggml.add_bos_token").unwrap().1 = Value::Bool(true);
    let path = folder.path().join("bos.gguf");
    write_gguf(&path, &metadata, &tiny.gguf_tensors(), GgmlDType::F32);
    let model = Model::load(path, &LoadOptions::default()).unwrap();
    let encode = |text, special| model.tokenizer().encode(text, special).unwrap();
    assert_eq!(encode("t", Special::Prompt), [id(IM_START), id("t")]);
    assert_eq!(encode("<|im_start|>t", Special::Prompt), [id(IM_START), id("t")]);
    assert_eq!(encode("t", Special::Text), [id("t")]);
}

#[test]
fn characters_come_whole_out_of_the_stream() {
    let models = models();
    let tokenizer = models[0].tokenizer();
    let tokens = tokenizer.encode("é🦀!", Special::Text).unwrap();
    assert_eq!(tokens.len(), 7);
    let mut stream = tokenizer.stream();
    let pieces: Vec<Option<String>> = tokens.iter().map(|&t| stream.push(t)).collect();
    let some = |text: &str| Some(text.to_string());
    assert_eq!(pieces, [None, some("é"), None, None, None, some("🦀"), some("!")]);
    assert_eq!(stream.finish(), "");
    let mut cut = tokenizer.stream();
    assert_eq!((cut.push(tokens[0]), cut.finish()), (None, "\u{FFFD}".to_string()));
}

/// A SentencePiece vocabulary: `<unk> <s> </s>`, 256 bytes, then pieces with falling scores.
fn sentencepiece(folder: &std::path::Path) -> Model {
    let pieces = ["▁", "t", "h", "e", "a", "c", "he", "▁t", "▁the", "at", "cat", "▁cat", "the"];
    let bytes = (0..=255u8).map(|b| format!("<0x{b:02X}>"));
    let tokens: Vec<String> =
        ["<unk>", "<s>", "</s>"].map(String::from).into_iter().chain(bytes).chain(pieces.map(String::from)).collect();
    let kinds = [2, 3, 3].into_iter().chain([6; 256]).chain([1; 13]);
    let scores = [0.0; 259].into_iter().chain((0..13).map(|i| -(i as f32)));
    let tiny = Tiny::new("llama");
    let mut metadata = tiny.metadata();
    metadata.retain(|(key, _)| !key.starts_with("tokenizer."));
    let array = |values: Vec<Value>| Value::Array(values);
    metadata.extend([
        ("tokenizer.ggml.model".into(), Value::String("llama".into())),
        ("tokenizer.ggml.tokens".into(), array(tokens.iter().cloned().map(Value::String).collect())),
        ("tokenizer.ggml.token_type".into(), array(kinds.map(Value::I32).collect())),
        ("tokenizer.ggml.scores".into(), array(scores.map(Value::F32).collect())),
        ("tokenizer.ggml.bos_token_id".into(), Value::U32(1)),
        ("tokenizer.ggml.eos_token_id".into(), Value::U32(2)),
    ]);
    let path = folder.join("spm.gguf");
    write_gguf(&path, &metadata, &tiny.gguf_tensors(), GgmlDType::F32);
    Model::load(path, &LoadOptions::default()).unwrap()
}

fn pieces(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    tokens.iter().map(|&t| tokenizer.token(t).unwrap()).collect::<Vec<_>>().join(" ")
}

#[test]
fn sentencepiece_merges_by_score_with_byte_fallback() {
    let folder = tempfile::tempdir().unwrap();
    let model = sentencepiece(folder.path());
    let tokenizer = model.tokenizer();
    let encode = |text, special| tokenizer.encode(text, special).unwrap();
    assert_eq!(pieces(tokenizer, &encode("the cat", Special::Text)), "▁the ▁cat");
    assert_eq!(pieces(tokenizer, &encode("the cat", Special::Prompt)), "<s> ▁the ▁cat");
    assert_eq!(pieces(tokenizer, &encode("é", Special::Text)), "▁ <0xC3> <0xA9>");
    for text in ["the cat", "é🦀", " two  spaces", "the\ncat"] {
        assert_eq!(tokenizer.decode(&encode(text, Special::Text)), text);
    }
}

#[test]
fn a_model_without_a_template_has_a_plain_one() {
    let folder = tempfile::tempdir().unwrap();
    assert!(sentencepiece(folder.path()).chat_template().is_fallback());
    assert!(models().iter().all(|model| !model.chat_template().is_fallback()));
}
