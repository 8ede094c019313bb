//! `slimkv eval`: what a compressed cache costs in quality, and saves in memory, on a real text.

mod plot;
mod report;
mod worker;

use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use slimkv::cache::Method;
use slimkv_llm::eval::{EvalOptions, Progress, evaluate};

use crate::failure::{Failure, Outcome};
use crate::{device, interrupt, model, output, text};
use report::Record;

pub use worker::{Args as WorkerArgs, work};

/// State of the Union addresses 2010-2021; public domain (data/README.md).
const SAMPLE: &str = include_str!("../../data/sotu2010.txt");

/// Compare caches on a text: perplexity, divergence from the fp16 cache, memory, speed.
///
/// The first --tokens tokens of the text run as one sequence in batches of --batch. All methods advance in lock-step
/// with an fp16 cache, and each row of predictions is compared with the fp16 one: perplexity, mean and 99th percentile
/// of the KL divergence, agreement of the likeliest token. Then each method runs once more alone, in a process of its
/// own, which gives the speeds and the peak resident memory (weights, cache, activations and one row of logits).
///
/// Without --model, a small known model is looked for, and fetched once if it is nowhere; without --text, a built-in
/// text of 451 KB is read (State of the Union addresses, public domain).
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  slimkv eval
  slimkv eval --methods fp16,kivi:8,kivi:4,kivi:2 --json quality.json --plot quality.svg --plot quality.png
  slimkv eval --model model.gguf --text book.txt --tokens 4096 --methods 'kivi:k4v2,group=64,residual=32'
  slimkv eval --device cuda --methods fp16,kivi:2,first=2:8,last=2:8")]
pub struct Args {
    /// A GGUF file, or a folder with config.json, tokenizer.json and safetensors
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// A text file
    #[arg(long, value_name = "PATH")]
    text: Option<PathBuf>,
    /// Tokens of the text
    #[arg(long, default_value_t = 2048, value_name = "N")]
    tokens: usize,
    /// Tokens that are processed together
    #[arg(long, default_value_t = 512, value_name = "N")]
    batch: usize,
    /// Tokens read one by one after the text, for the decode speed
    #[arg(long, default_value_t = 32, value_name = "N")]
    decode_tokens: usize,
    /// Methods to compare
    #[arg(long, alias = "method", default_value = "fp16,kivi:8,kivi:4,kivi:2", value_name = "LIST")]
    methods: Vec<String>,
    /// Where attention runs and the cache lies: cpu, cuda[:N], vulkan[:N], metal or best
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Write the results as a JSON list
    #[arg(long, value_name = "OUT.json")]
    json: Option<PathBuf>,
    /// Draw quality against bytes: a file that ends in .svg or .png; may be repeated
    #[arg(long, value_name = "OUT.svg|png")]
    plot: Vec<PathBuf>,
}

/// The command.
pub fn eval(args: &Args) -> Outcome {
    let names = text::split_methods(&args.methods);
    let methods = names.iter().map(|text| Ok(text.parse::<Method>()?)).collect::<Outcome<Vec<_>>>()?;
    if methods.is_empty() {
        return Err(Failure::argument("eval", "--methods", "at least one method", "none"));
    }
    for path in &args.plot {
        output::check_target("eval", "--plot", path)?;
        plot::check_path(path)?;
    }
    if let Some(path) = &args.json {
        output::check_target("eval", "--json", path)?;
    }
    let device = device::open(&args.device)?;
    let text = read_text(args.text.as_deref())?;
    let path = model::locate(args.model.as_deref())?;
    let records = {
        // Dropped before the workers start: two copies of the weights would need the memory of both.
        let model = model::load(Some(&path))?;
        let bar = bar("quality");
        let mut tell = |progress: Progress<'_>| {
            bar.set_length(progress.total as u64);
            bar.set_position(progress.done as u64);
            bar.set_message(progress.method.to_string());
        };
        let found = interrupt::watched(|cancel| {
            let (tokens, batch) = (args.tokens, args.batch);
            let options = EvalOptions { tokens, batch, decode_tokens: 0, cancel: Some(cancel) };
            evaluate(&model, &text, &methods, &device, &options, &mut tell)
        });
        bar.finish_and_clear();
        found.map_err(model::failure)?
    };
    let bar = bar("speed and memory");
    bar.set_length((records.len() * (args.tokens + args.decode_tokens)) as u64);
    let records = names
        .iter()
        .zip(records)
        .map(|(name, quality)| {
            bar.set_message(name.clone());
            let request = worker::Request {
                model: &path,
                text: args.text.as_deref(),
                tokens: args.tokens,
                batch: args.batch,
                decode_tokens: args.decode_tokens,
                method: name,
                device: &args.device,
            };
            let measured = worker::run(&request, &mut |tokens| bar.inc(tokens))?;
            Ok(Record {
                method: name.clone(),
                bits_per_value: quality.bits_per_value,
                perplexity: quality.perplexity,
                nll: quality.nll,
                kl_mean: quality.kl_mean,
                kl_p99: quality.kl_p99,
                top1: quality.top1,
                bytes_per_token: quality.bytes_per_token,
                cache_bytes: quality.cache_bytes as u64,
                peak_rss_bytes: measured.peak_rss_bytes,
                prefill_tokens_per_s: measured.prefill_tokens_per_s,
                decode_tokens_per_s: measured.decode_tokens_per_s,
                device: quality.device,
            })
        })
        .collect::<Outcome<Vec<Record>>>()?;
    bar.finish_and_clear();
    print!("{}", report::table(&records));
    if let Some(path) = &args.json {
        let json = serde_json::to_vec_pretty(&records).map_err(|e| Failure::Failed(e.to_string()))?;
        output::write(path, &json)?;
    }
    let model = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let title = format!("{model}, {} tokens, {}", text::thousands(args.tokens as u64), device);
    args.plot.iter().try_for_each(|path| plot::write(path, &title, &records))
}

fn read_text(path: Option<&Path>) -> Outcome<String> {
    match path {
        None => Ok(SAMPLE.to_string()),
        Some(path) => std::fs::read_to_string(path).map_err(|e| Failure::unreadable("eval", "--text", path, e)),
    }
}

fn bar(what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} [{bar:32}] {percent:>3} % {msg}  {elapsed} (left: {eta})");
    let bar = ProgressBar::new(1).with_prefix(what);
    match style {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
