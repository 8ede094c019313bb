//! Generating with a tiny random model.

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use common::*;
use slimkv::Device;
use slimkv::cache::KvCache;
use slimkv_llm::{ChatMessage, Error, Finish, GenerateOptions, Generation, LoadOptions, Model, Sampling, Special};

fn model() -> Model {
    let folder = tempfile::tempdir().unwrap();
    Model::load(Tiny::new("llama").write_gguf(folder.path()), &LoadOptions::default()).unwrap()
}

fn cache(model: &Model) -> KvCache {
    KvCache::new("kivi:4,residual=32".parse().unwrap(), model.geometry(1), &Device::cpu()).unwrap()
}

fn options(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, ignore_eos: true, ..GenerateOptions::default() }
}

fn generate(model: &Model, prompt: &[u32], options: &GenerateOptions) -> Generation {
    model.generate(prompt, &mut cache(model), options, &mut |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let (model, prompt) = (model(), tokens(20));
    let greedy = generate(&model, &prompt, &options(24));
    assert_eq!((greedy.tokens.len(), greedy.finish, greedy.prompt_tokens), (24, Finish::Length, 20));
    assert_eq!(greedy.decode_steps, 23);
    assert_eq!(greedy.tokens, generate(&model, &prompt, &options(24)).tokens);
    let hot = |seed| {
        let sampling = Sampling { temperature: 1.5, top_k: 50, top_p: 0.95, seed, ..Sampling::default() };
        generate(&model, &prompt, &GenerateOptions { sampling, ..options(24) }).tokens
    };
    assert_eq!(hot(1), hot(1));
    assert_ne!(hot(1), hot(2));
}

#[test]
fn the_prompt_batch_does_not_change_the_text() {
    let (model, prompt) = (model(), tokens(45));
    let whole = generate(&model, &prompt, &options(8)).tokens;
    assert_eq!(generate(&model, &prompt, &GenerateOptions { batch: 16, ..options(8) }).tokens, whole);
}

#[test]
fn the_streamed_text_is_the_whole_text() {
    let (model, prompt) = (model(), tokens(20));
    let mut streamed = String::new();
    let generation = model
        .generate(&prompt, &mut cache(&model), &options(40), &mut |text| {
            streamed.push_str(text);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(streamed, generation.text);
    assert_eq!(streamed, model.tokenizer().decode(&generation.tokens));
}

#[test]
fn a_stop_token_ends_the_text_and_is_not_part_of_it() {
    let (model, prompt) = (model(), tokens(20));
    let free = generate(&model, &prompt, &options(24)).tokens;
    let stop = free[10];
    let first = free.iter().position(|&t| t == stop).unwrap();
    let stopped = generate(&model, &prompt, &GenerateOptions { stop: vec![stop], ..options(24) });
    assert_eq!((stopped.tokens.as_slice(), stopped.finish), (&free[..first], Finish::Stop));
}

#[test]
fn the_caller_can_stop() {
    let (model, prompt) = (model(), tokens(20));
    let cancelled = GenerateOptions { cancel: Some(Arc::new(AtomicBool::new(true))), ..options(24) };
    let generation = generate(&model, &prompt, &cancelled);
    assert_eq!((generation.tokens.len(), generation.finish), (0, Finish::Cancelled));
    let mut pieces = 0;
    let broken = model.generate(&prompt, &mut cache(&model), &options(200), &mut |_| {
        pieces += 1;
        if pieces == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!(broken.unwrap().finish, Finish::Cancelled);
    assert!(pieces == 3 || pieces == 4, "{pieces}");
}

#[test]
fn a_full_context_ends_the_text_and_refuses_a_longer_prompt() {
    let (model, prompt) = (model(), tokens(CONTEXT - 3));
    let mut cache = cache(&model);
    let generation = model.generate(&prompt, &mut cache, &options(24), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((generation.tokens.len(), generation.finish), (4, Finish::Context));
    assert_eq!(cache.len(), CONTEXT);
    let error = model.generate(&[1], &mut cache, &options(1), &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, Error::ContextFull { tokens, context } if tokens == CONTEXT + 1 && context == CONTEXT));
    assert_eq!(cache.len(), CONTEXT);
}

#[test]
fn a_conversation_goes_on_in_the_same_cache() {
    let (model, prompt) = (model(), tokens(60));
    let mut cache = KvCache::new("fp16".parse().unwrap(), model.geometry(1), &Device::cpu()).unwrap();
    let mut quiet = |_: &str| ControlFlow::Continue(());
    let first = model.generate(&prompt[..40], &mut cache, &options(5), &mut quiet).unwrap();
    assert_eq!(cache.len(), 44);
    let mut next = vec![*first.tokens.last().unwrap()];
    next.extend(&prompt[40..]);
    let second = model.generate(&next, &mut cache, &options(5), &mut quiet).unwrap();
    cache.clear();
    let whole: Vec<u32> = prompt[..40].iter().chain(&first.tokens).chain(&prompt[40..]).copied().collect();
    assert_eq!(model.generate(&whole, &mut cache, &options(5), &mut quiet).unwrap().tokens, second.tokens);
}

#[test]
fn a_chat_prompt_has_control_tokens() {
    let model = model();
    let prompt = model.chat_template().render(&[ChatMessage::user("hi")]).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let tokens = model.tokenizer().encode(&prompt, Special::Prompt).unwrap();
    assert_eq!(tokens.iter().filter(|&&t| t == id(IM_START)).count(), 2);
    assert_eq!(tokens.iter().filter(|&&t| t == id(IM_END)).count(), 1);
    assert_eq!(model.tokenizer().eos(), [id(IM_END)]);
}
