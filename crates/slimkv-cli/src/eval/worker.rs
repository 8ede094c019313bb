//! One method alone in a process of its own: its speed, and the most memory that it needs.
//!
//! The peak resident set is a property of a process, and what earlier methods freed may stay resident. So the program
//! starts itself once for each method.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use slimkv::cache::{KvCache, Method};
use slimkv_llm::{Special, Want};

use super::read_text;
use crate::failure::{Failure, Outcome};
use crate::{device, memory, model};

/// What a worker is asked.
pub struct Request<'a> {
    pub model: &'a Path,
    pub text: Option<&'a Path>,
    pub tokens: usize,
    pub batch: usize,
    pub decode_tokens: usize,
    pub method: &'a str,
    pub device: &'a str,
}

/// What a worker measured.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Measured {
    pub peak_rss_bytes: u64,
    pub prefill_tokens_per_s: f64,
    pub decode_tokens_per_s: f64,
}

/// What a worker says, one JSON object a line.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// Tokens that were read since the last such line.
    Progress(u64),
    Done(Measured),
}

/// Starts a worker and waits for what it measures. `progress` gets the tokens as they are read.
pub fn run(request: &Request, progress: &mut dyn FnMut(u64)) -> Outcome<Measured> {
    let failed = |why: String| Failure::Failed(format!("eval: {} alone in its process: {why}", request.method));
    let program = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
    let mut command = Command::new(program);
    command.arg("eval-worker").arg("--model").arg(request.model);
    if let Some(text) = request.text {
        command.arg("--text").arg(text);
    }
    for (flag, value) in
        [("--tokens", request.tokens), ("--batch", request.batch), ("--decode-tokens", request.decode_tokens)]
    {
        command.arg(flag).arg(value.to_string());
    }
    command.args(["--method", request.method, "--device", request.device]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| failed(e.to_string()))?;
    let mut measured = None;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            match serde_json::from_str(&line?) {
                Ok(Line::Progress(tokens)) => progress(tokens),
                Ok(Line::Done(result)) => measured = Some(result),
                Err(_) => {}
            }
        }
    }
    let output = child.wait_with_output()?;
    measured.filter(|_| output.status.success()).ok_or_else(|| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        failed(format!("{}: {}", output.status, last.trim_start_matches("error: ")))
    })
}

/// Measure one method alone (started by `slimkv eval`)
#[derive(clap::Args)]
pub struct Args {
    #[arg(long)]
    model: PathBuf,
    #[arg(long)]
    text: Option<PathBuf>,
    #[arg(long)]
    tokens: usize,
    #[arg(long)]
    batch: usize,
    #[arg(long)]
    decode_tokens: usize,
    #[arg(long)]
    method: String,
    #[arg(long)]
    device: String,
}

/// The command.
pub fn work(args: &Args) -> Outcome {
    leave_with_parent();
    let method: Method = args.method.parse()?;
    let device = device::open(&args.device)?;
    let model = model::load(Some(&args.model))?;
    let text = read_text(args.text.as_deref())?;
    let mut tokens = model.tokenizer().encode(&text, Special::Text).map_err(model::failure)?;
    tokens.truncate(args.tokens);
    drop(text);
    let new_cache = || KvCache::new(method.clone(), model.geometry(1), &device);
    // Threads start, pages are mapped and kernels compile on first use, which is not what a speed is about.
    let first = &tokens[..tokens.len().min(args.batch.min(32))];
    model.forward(first, &mut new_cache()?, Want::Last).map_err(model::failure)?;

    let mut cache = new_cache()?;
    let mut next = 0;
    let start = Instant::now();
    for batch in tokens.chunks(args.batch) {
        next = likeliest(model.forward(batch, &mut cache, Want::Last).map_err(model::failure)?.last());
        say(&Line::Progress(batch.len() as u64))?;
    }
    let prefill = start.elapsed();
    let steps = args.decode_tokens.min(model.config().context.saturating_sub(tokens.len()));
    let start = Instant::now();
    for _ in 0..steps {
        next = likeliest(model.forward(&[next], &mut cache, Want::Last).map_err(model::failure)?.last());
    }
    let decode = start.elapsed();
    say(&Line::Progress(args.decode_tokens as u64))?;
    let rate = |n: usize, time: std::time::Duration| if n == 0 { 0.0 } else { n as f64 / time.as_secs_f64() };
    say(&Line::Done(Measured {
        peak_rss_bytes: memory::peak_rss(),
        prefill_tokens_per_s: rate(tokens.len(), prefill),
        decode_tokens_per_s: rate(steps, decode),
    }))
}

/// Ends this process when its parent is gone, however that went: the parent holds the other end of stdin.
fn leave_with_parent() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(130);
    });
}

fn say(line: &Line) -> Outcome {
    let text = serde_json::to_string(line).map_err(|e| Failure::Failed(e.to_string()))?;
    Ok(writeln!(std::io::stdout(), "{text}")?)
}

fn likeliest(logits: &[f32]) -> u32 {
    let best =
        logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &l)| if l > best.1 { (i, l) } else { best });
    best.0 as u32
}
