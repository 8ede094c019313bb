//! Generating text.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use slimkv::cache::KvCache;

use crate::sample::Sampler;
use crate::{Error, Model, Result, Sampling, Want};

/// How text is generated.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// At most this many tokens.
    pub max_tokens: usize,
    /// Tokens of the prompt that are processed together.
    pub batch: usize,
    /// How a token is chosen.
    pub sampling: Sampling,
    /// Tokens that end the text, besides the model's own end tokens.
    pub stop: Vec<u32>,
    /// Whether the model's own end tokens are generated like any other.
    pub ignore_eos: bool,
    /// Turns true when the caller wants to stop.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_tokens: 256,
            batch: 512,
            sampling: Sampling::default(),
            stop: Vec::new(),
            ignore_eos: false,
            cancel: None,
        }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// The model, or a stop token of the caller, ended the text.
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// The model's context is full.
    Context,
    /// The caller asked to stop.
    Cancelled,
}

/// A generated text and how long it took.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Generation {
    /// The tokens, without the one that ended the text.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Seconds for the prompt, up to the first logits.
    pub prefill_seconds: f64,
    /// Passes of one token after that.
    pub decode_steps: usize,
    /// Seconds for these.
    pub decode_seconds: f64,
}

impl Generation {
    /// Tokens of the prompt per second.
    pub fn prefill_tokens_per_s(&self) -> f64 {
        self.prompt_tokens as f64 / self.prefill_seconds
    }

    /// Tokens after the first per second; NaN if there was none.
    pub fn decode_tokens_per_s(&self) -> f64 {
        self.decode_steps as f64 / self.decode_seconds
    }
}

impl Model {
    /// Appends `prompt` to `cache` and generates from there. Text goes to `on_text` as it comes, in whole characters; a
    /// `Break` from it ends the generation.
    ///
    /// All tokens but the last one generated are in the cache afterwards, so that a conversation can go on from there.
    pub fn generate(
        &self,
        prompt: &[u32],
        cache: &mut KvCache,
        options: &GenerateOptions,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        const OP: &str = "Model::generate";
        if prompt.is_empty() {
            return Err(Error::Argument {
                op: OP,
                arg: "prompt",
                expected: "at least one token".into(),
                found: "none".into(),
            });
        }
        if options.batch == 0 {
            return Err(Error::Argument { op: OP, arg: "batch", expected: "at least 1".into(), found: "0".into() });
        }
        let (tokens, context) = (cache.len() + prompt.len(), self.config().context);
        if tokens > context {
            return Err(Error::ContextFull { tokens, context });
        }
        let cancel = options.cancel.as_deref();
        let cancelled = || cancel.is_some_and(|flag| flag.load(Ordering::Relaxed));

        let mut generation = Generation {
            tokens: Vec::new(),
            text: String::new(),
            finish: Finish::Length,
            prompt_tokens: prompt.len(),
            prefill_seconds: 0.0,
            decode_steps: 0,
            decode_seconds: 0.0,
        };
        let started = Instant::now();
        let first = match self.prefill(prompt, cache, options.batch, cancel) {
            Err(Error::Cancelled) => {
                generation.finish = Finish::Cancelled;
                return Ok(generation);
            }
            first => first?,
        };
        generation.prefill_seconds = started.elapsed().as_secs_f64();

        let mut logits = first;
        let mut recent = prompt.to_vec();
        let mut sampler = Sampler::new(&options.sampling);
        let mut stream = self.tokenizer().stream();
        let started = Instant::now();
        while generation.tokens.len() < options.max_tokens {
            let token = sampler.sample(&logits, &recent);
            let ends = !options.ignore_eos && self.tokenizer().eos().contains(&token) || options.stop.contains(&token);
            if ends {
                generation.finish = Finish::Stop;
                break;
            }
            generation.tokens.push(token);
            recent.push(token);
            if let Some(text) = stream.push(token) {
                generation.text.push_str(&text);
                if on_text(&text).is_break() {
                    generation.finish = Finish::Cancelled;
                    break;
                }
            }
            if generation.tokens.len() == options.max_tokens {
                break;
            }
            if cancelled() {
                generation.finish = Finish::Cancelled;
                break;
            }
            if cache.len() == context {
                generation.finish = Finish::Context;
                break;
            }
            logits = self.forward(&[token], cache, Want::Last)?.into_last();
            generation.decode_steps += 1;
        }
        generation.decode_seconds = started.elapsed().as_secs_f64();
        let rest = stream.finish();
        if !rest.is_empty() {
            generation.text.push_str(&rest);
            let _ = on_text(&rest);
        }
        Ok(generation)
    }

    /// Runs a prompt in batches and returns the logits after its last token.
    fn prefill(
        &self,
        prompt: &[u32],
        cache: &mut KvCache,
        batch: usize,
        cancel: Option<&AtomicBool>,
    ) -> Result<Vec<f32>> {
        let mut last = None;
        for tokens in prompt.chunks(batch) {
            last = Some((self.hidden(tokens, cache, cancel)?, tokens.len()));
        }
        let (hidden, rows) = last.expect("the prompt has at least one token");
        Ok(self.logits(&hidden, rows - 1, 1)?.into_last())
    }
}
