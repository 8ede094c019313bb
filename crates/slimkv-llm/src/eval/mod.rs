//! What a compressed cache does to a model: perplexity, divergence from the fp16 cache, memory and speed.
//!
//! The first N tokens of a text run as one sequence, without BOS, in batches. The reference, an fp16 cache, and all
//! methods advance in lock-step, so that no more than a few rows of logits are in memory at a time.

mod divergence;
mod memory;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use slimkv::cache::{KvCache, LayerMethod, Method};
use slimkv::{Device, DeviceKind};

use crate::model::Hidden;
use crate::sample::argmax;
use crate::{Error, Model, Result, Special, Want};
use divergence::{Reference, Score};

/// How methods are evaluated.
#[derive(Debug, Clone)]
pub struct EvalOptions {
    /// Tokens of the text.
    pub tokens: usize,
    /// Tokens that are processed together.
    pub batch: usize,
    /// Tokens that are generated one by one afterwards, to measure the speed of that.
    pub decode_tokens: usize,
    /// Turns true when the caller wants to stop.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Default for EvalOptions {
    fn default() -> Self {
        EvalOptions { tokens: 2048, batch: 512, decode_tokens: 32, cancel: None }
    }
}

/// What an evaluation is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The text runs in batches.
    Prefill,
    /// Tokens are generated one by one.
    Decode,
}

/// How far an evaluation has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The method that has just advanced.
    pub method: &'a str,
    /// What it does.
    pub stage: Stage,
    /// Tokens that are done, over all methods.
    pub done: usize,
    /// Tokens in all.
    pub total: usize,
}

/// What was measured for one method.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Evaluation {
    /// The method.
    pub method: String,
    /// Mean bits of one stored element over a long sequence, parameters included.
    pub bits_per_value: f64,
    /// `exp(nll)`.
    pub perplexity: f64,
    /// Mean negative log-likelihood of a token given those before it, in nats.
    pub nll: f64,
    /// Mean Kullback-Leibler divergence of the next-token distribution from the reference, in nats.
    pub kl_mean: f64,
    /// The 99th percentile of it.
    pub kl_p99: f64,
    /// How often both find the same token most probable.
    pub top1: f64,
    /// Bytes of cache that are resident, per token of the text.
    pub bytes_per_token: f64,
    /// Bytes of cache that are allocated after the text.
    pub cache_bytes: usize,
    /// The most memory that the process held while this method ran; the caches of all methods are in it. `None` where
    /// the system does not say.
    pub peak_rss_bytes: Option<u64>,
    /// Tokens of the text per second, without the output projection, which generation needs for one token only.
    pub prefill_tokens_per_s: f64,
    /// Tokens generated one by one per second, at the end of the text.
    pub decode_tokens_per_s: f64,
    /// Where attention ran.
    pub device: String,
}

/// One method on its way through the text.
struct Run {
    method: Method,
    name: String,
    cache: KvCache,
    score: Score,
    peak_rss: Option<u64>,
    prefill: Duration,
    decode: Duration,
    cache_bytes: usize,
}

/// Rows of logits that are in memory at a time, for the reference and for one method.
const ROWS: usize = 64;

/// Evaluates `methods` on the first `options.tokens` tokens of `text`; the results come in the same order.
///
/// Errors: a text that is too short, a sequence longer than the model's context, whatever the cache refuses, and
/// [`Error::Cancelled`].
pub fn evaluate(
    model: &Model,
    text: &str,
    methods: &[Method],
    device: &Device,
    options: &EvalOptions,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Vec<Evaluation>> {
    let tokens = leading_tokens(model, text, options)?;
    let fp16 = Method::from(LayerMethod::Fp16);
    let mut reference = Run::new(model, &fp16, device)?;
    let others = methods.iter().filter(|method| **method != fp16);
    let mut runs: Vec<Run> = others.map(|method| Run::new(model, method, device)).collect::<Result<_>>()?;
    let decode_tokens = options.decode_tokens.min(model.config().context - tokens.len());
    let mut progress = Tracker { on_progress, done: 0, total: (tokens.len() + decode_tokens) * (1 + runs.len()) };
    let cancel = options.cancel.as_deref();
    if device.kind() != DeviceKind::Cpu {
        // Kernels compile on first use.
        for run in std::iter::once(&reference).chain(&runs) {
            warm_up(model, run, &tokens, options)?;
        }
    }

    for (chunk, batch) in tokens.chunks(options.batch).enumerate() {
        let first = chunk * options.batch;
        let expected = reference.advance(model, batch, cancel)?;
        progress.advance(&reference.name, Stage::Prefill, batch.len());
        let mut found = Vec::with_capacity(runs.len());
        for run in &mut runs {
            found.push(run.advance(model, batch, cancel)?);
            progress.advance(&run.name, Stage::Prefill, batch.len());
        }
        // The last token of the text has no successor to be scored with.
        let scored = batch.len().min(tokens.len() - 1 - first);
        for row in (0..scored).step_by(ROWS) {
            check(cancel)?;
            let rows = ROWS.min(scored - row);
            let targets = &tokens[first + row + 1..][..rows];
            let logits = Reference::new(model.logits(&expected, row, rows)?);
            reference.score.add_reference(&logits, targets);
            for (run, hidden) in runs.iter_mut().zip(&found) {
                run.score.add(&logits, &model.logits(hidden, row, rows)?, targets);
            }
        }
    }
    for run in std::iter::once(&mut reference).chain(&mut runs) {
        run.cache_bytes = run.cache.bytes();
        run.decode(model, *tokens.last().expect("at least two tokens"), decode_tokens, cancel, &mut progress)?;
    }

    let mut runs = runs.into_iter();
    Ok(methods
        .iter()
        .map(|method| match *method == fp16 {
            true => reference.evaluation(model, tokens.len(), decode_tokens, device),
            false => runs.next().expect("one run for each").evaluation(model, tokens.len(), decode_tokens, device),
        })
        .collect())
}

/// The tokens that are scored.
fn leading_tokens(model: &Model, text: &str, options: &EvalOptions) -> Result<Vec<u32>> {
    let bad = |arg, expected: String, found: usize| Error::Argument {
        op: "evaluate",
        arg,
        expected,
        found: found.to_string(),
    };
    if options.tokens < 2 {
        return Err(bad("tokens", "at least 2".into(), options.tokens));
    }
    if options.batch == 0 {
        return Err(bad("batch", "at least 1".into(), 0));
    }
    let context = model.config().context;
    if options.tokens > context {
        return Err(Error::ContextFull { tokens: options.tokens, context });
    }
    let mut tokens = model.tokenizer().encode(text, Special::Text)?;
    if tokens.len() < options.tokens {
        return Err(bad("text", format!("at least {} tokens", options.tokens), tokens.len()));
    }
    tokens.truncate(options.tokens);
    Ok(tokens)
}

fn warm_up(model: &Model, run: &Run, tokens: &[u32], options: &EvalOptions) -> Result<()> {
    let mut cache = KvCache::new(run.method.clone(), model.geometry(1), run.cache.device())?;
    let cancel = options.cancel.as_deref();
    model.hidden(&tokens[..options.batch.min(tokens.len())], &mut cache, cancel)?;
    if cache.len() < model.config().context {
        model.hidden(&tokens[..1], &mut cache, cancel)?;
    }
    Ok(())
}

fn check(cancel: Option<&AtomicBool>) -> Result<()> {
    match cancel {
        Some(cancel) if cancel.load(Ordering::Relaxed) => Err(Error::Cancelled),
        _ => Ok(()),
    }
}

struct Tracker<'a> {
    on_progress: &'a mut dyn FnMut(Progress<'_>),
    done: usize,
    total: usize,
}

impl Tracker<'_> {
    fn advance(&mut self, method: &str, stage: Stage, tokens: usize) {
        self.done += tokens;
        (self.on_progress)(Progress { method, stage, done: self.done, total: self.total });
    }
}

impl Run {
    fn new(model: &Model, method: &Method, device: &Device) -> Result<Self> {
        Ok(Run {
            method: method.clone(),
            name: method.to_string(),
            cache: KvCache::new(method.clone(), model.geometry(1), device)?,
            score: Score::default(),
            peak_rss: None,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            cache_bytes: 0,
        })
    }

    fn advance(&mut self, model: &Model, batch: &[u32], cancel: Option<&AtomicBool>) -> Result<Hidden> {
        memory::reset_peak();
        let started = Instant::now();
        let hidden = model.hidden(batch, &mut self.cache, cancel)?;
        self.cache.device().synchronize()?;
        self.prefill += started.elapsed();
        self.peak_rss = self.peak_rss.max(memory::peak());
        Ok(hidden)
    }

    fn decode(
        &mut self,
        model: &Model,
        last: u32,
        tokens: usize,
        cancel: Option<&AtomicBool>,
        progress: &mut Tracker<'_>,
    ) -> Result<()> {
        memory::reset_peak();
        let (mut token, started) = (last, Instant::now());
        for _ in 0..tokens {
            check(cancel)?;
            token = argmax(model.forward(&[token], &mut self.cache, Want::Last)?.last()) as u32;
            progress.advance(&self.name, Stage::Decode, 1);
        }
        self.decode = started.elapsed();
        self.peak_rss = self.peak_rss.max(memory::peak());
        Ok(())
    }

    fn evaluation(&self, model: &Model, tokens: usize, decode_tokens: usize, device: &Device) -> Evaluation {
        let (config, nll) = (model.config(), self.score.nll());
        Evaluation {
            method: self.name.clone(),
            bits_per_value: self.method.bits_per_value(config.layers, config.head_dim),
            perplexity: nll.exp(),
            nll,
            kl_mean: self.score.kl_mean(),
            kl_p99: self.score.kl_quantile(0.99),
            top1: self.score.top1(),
            bytes_per_token: self.cache_bytes as f64 / tokens as f64,
            cache_bytes: self.cache_bytes,
            peak_rss_bytes: self.peak_rss,
            prefill_tokens_per_s: tokens as f64 / self.prefill.as_secs_f64(),
            decode_tokens_per_s: decode_tokens as f64 / self.decode.as_secs_f64(),
            device: device.to_string(),
        }
    }
}
