//! `slimkv run`: generate text with a compressed cache.

use std::io::{IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

use slimkv::cache::{KvCache, LayerMethod, Method};
use slimkv_llm::{ChatMessage, GenerateOptions, Generation, Model, Sampling, Special};

use crate::failure::{Failure, Outcome};
use crate::{device, interrupt, model, text};

/// Generate text; the cache is stored by the method that you name.
///
/// The text goes to stdout as it comes; speed and cache size go to stderr at the end. Without --model, a small known
/// model is looked for, and fetched once if it is nowhere.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  slimkv run 'Why is the sky blue?'
  slimkv run --model model.gguf --method kivi:k4v2,group=32 --device cuda 'Write a haiku.'
  slimkv run --raw --max-tokens 20 'The capital of France is'
  slimkv run --temperature 0.7 --seed 1 < question.txt")]
pub struct Args {
    /// The question, or the text to continue; read from stdin when left out
    prompt: Option<String>,
    /// A GGUF file, or a folder with config.json, tokenizer.json and safetensors
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// How the cache is stored: fp16, kivi:4, kivi:k4v2,group=32,residual=128
    #[arg(long, default_value = "kivi:4")]
    method: String,
    /// Where attention runs and the cache lies: cpu, cuda[:N], vulkan[:N], metal or best
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Stop after this many tokens
    #[arg(long, default_value_t = 256, value_name = "N")]
    max_tokens: usize,
    /// 0 takes the likeliest token every time; higher is more varied
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    temperature: f32,
    /// Draw only from the K likeliest tokens; 0 means all
    #[arg(long, default_value_t = 0, value_name = "K")]
    top_k: usize,
    /// Draw only from the likeliest tokens that have this probability together
    #[arg(long, default_value_t = 1.0, value_name = "P")]
    top_p: f32,
    /// Weaken tokens that were just used; 1 is off
    #[arg(long, default_value_t = 1.0, value_name = "X")]
    repetition_penalty: f32,
    /// The same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// What the model is told before the question
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Ask through the model's chat template (the default where the model has one)
    #[arg(long, conflicts_with = "raw")]
    chat: bool,
    /// Continue the prompt as plain text
    #[arg(long)]
    raw: bool,
}

/// The command.
pub fn run(args: &Args) -> Outcome {
    let method: Method = args.method.parse()?;
    check(args)?;
    let device = device::open(&args.device)?;
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => read_stdin()?,
    };
    let model = model::load(args.model.as_deref())?;
    let chat = args.chat || (!args.raw && !model.chat_template().is_fallback());
    let prompt = match chat {
        true => model.chat_template().render(&messages(args, prompt)).map_err(model::failure)?,
        false => prompt,
    };
    let tokens = model.tokenizer().encode(&prompt, Special::Prompt).map_err(model::failure)?;
    let mut cache = KvCache::new(method, model.geometry(1), &device)?;
    let options = GenerateOptions {
        max_tokens: args.max_tokens,
        sampling: Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            repetition_penalty: args.repetition_penalty,
            seed: args.seed,
            ..Sampling::default()
        },
        ..GenerateOptions::default()
    };
    let mut stdout = std::io::stdout();
    let mut write = |text: &str| match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    };
    let generation = interrupt::watched(|cancel| {
        let options = GenerateOptions { cancel: Some(cancel), ..options };
        model.generate(&tokens, &mut cache, &options, &mut write)
    });
    let generation = generation.map_err(model::failure)?;
    println!();
    summary(&model, &cache, &generation);
    interrupt::check()
}

fn check(args: &Args) -> Outcome {
    let bad = |arg: &str, expected: &str, found: f32| Err(Failure::argument("run", arg, expected, found));
    if !(args.temperature >= 0.0 && args.temperature.is_finite()) {
        return bad("--temperature", "a number from 0", args.temperature);
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        return bad("--top-p", "a number above 0, up to 1", args.top_p);
    }
    if !(args.repetition_penalty > 0.0 && args.repetition_penalty.is_finite()) {
        return bad("--repetition-penalty", "a number above 0", args.repetition_penalty);
    }
    Ok(())
}

fn read_stdin() -> Outcome<String> {
    if std::io::stdin().is_terminal() {
        eprintln!("(reading the prompt from the terminal; end it with Ctrl-D)");
    }
    let mut prompt = String::new();
    std::io::stdin().read_to_string(&mut prompt).map_err(|e| Failure::argument("run", "PROMPT", "text on stdin", e))?;
    let prompt = prompt.trim_end_matches('\n').to_string();
    match prompt.is_empty() {
        true => Err(Failure::argument("run", "PROMPT", "a text, as an argument or on stdin", "nothing")),
        false => Ok(prompt),
    }
}

fn messages(args: &Args, prompt: String) -> Vec<ChatMessage> {
    args.system.iter().map(ChatMessage::system).chain([ChatMessage::user(prompt)]).collect()
}

fn summary(model: &Model, cache: &KvCache, generation: &Generation) {
    let fp16: Method = LayerMethod::Fp16.into();
    let fp16_bytes = KvCache::bytes_for(&fp16, model.geometry(1), cache.len(), cache.device());
    let decode = match generation.decode_steps {
        0 => "-".into(),
        _ => format!("{:.1}", generation.decode_tokens_per_s()),
    };
    eprintln!(
        "prefill {} tokens at {:.1}/s, decode {} at {decode}/s; {} cache on {}: {} for {} tokens (fp16: {})",
        generation.prompt_tokens,
        generation.prefill_tokens_per_s(),
        generation.tokens.len(),
        cache.method(),
        cache.device(),
        text::bytes(cache.bytes() as u64),
        cache.len(),
        text::bytes(fp16_bytes as u64),
    );
}
