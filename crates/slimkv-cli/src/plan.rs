//! `slimkv plan`: how long a context fits.

use std::path::PathBuf;

use serde::Serialize;
use slimkv::Device;
use slimkv::cache::{Geometry, KvCache, Method};

use crate::failure::{Failure, Outcome};
use crate::text::{self, Table};
use crate::{memory, model, output};

/// Say how long a context fits in memory, method by method.
///
/// The model's geometry comes from its file, or from --layers, --kv-heads and --head-dim. Cache bytes are exact: what
/// slimkv would have allocated. Activations are not counted; keep a few hundred MB for them.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  slimkv plan --model model.gguf --memory 8GiB
  slimkv plan --layers 32 --kv-heads 8 --head-dim 128 --weights-bytes 4.9GB --memory 24GiB --context 131072
  slimkv plan --layers 32 --kv-heads 8 --head-dim 128 --methods fp16,kivi:4,kivi:k4v2,group=64")]
pub struct Args {
    /// A GGUF file, or a folder with config.json and safetensors
    #[arg(long, value_name = "PATH", conflicts_with_all = ["layers", "kv_heads", "head_dim"])]
    model: Option<PathBuf>,
    /// Layers that have a cache
    #[arg(long, value_name = "N", requires_all = ["kv_heads", "head_dim"])]
    layers: Option<usize>,
    /// KV heads of a layer
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Elements of a head
    #[arg(long, value_name = "N")]
    head_dim: Option<usize>,
    /// Memory that the weights take: 4.9GB; default: the size of the model's file, or 0
    #[arg(long, value_name = "BYTES", value_parser = text::parse_bytes)]
    weights_bytes: Option<u64>,
    /// Memory for weights and cache together: 8GiB, 24GB; default: what is free now
    #[arg(long, value_name = "BYTES", value_parser = text::parse_bytes)]
    memory: Option<u64>,
    /// Methods to compare
    #[arg(long, alias = "method", default_value = "fp16,kivi:8,kivi:4,kivi:k4v2,kivi:2", value_name = "LIST")]
    methods: Vec<String>,
    /// Also say how many bytes this many tokens take
    #[arg(long, value_name = "TOKENS", default_value_t = 32768)]
    context: usize,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Write the results as a JSON list
    #[arg(long, value_name = "OUT.json")]
    json: Option<PathBuf>,
}

/// One method. The names are the keys of the JSON.
#[derive(Debug, Serialize)]
struct Record {
    method: String,
    bits_per_value: f64,
    /// Of one sequence, all layers, over a long context.
    bytes_per_token: f64,
    context: usize,
    /// Of all sequences, at `context` tokens each.
    context_bytes: u64,
    /// Tokens a sequence that fit.
    max_context: usize,
    memory_bytes: u64,
    weights_bytes: u64,
}

/// The command.
pub fn plan(args: &Args) -> Outcome {
    let methods = text::split_methods(&args.methods);
    let methods = methods.iter().map(|m| Ok((m, m.parse::<Method>()?))).collect::<Outcome<Vec<_>>>()?;
    if let Some(path) = &args.json {
        output::check_target("plan", "--json", path)?;
    }
    let (geometry, weights, limit) = model_of(args)?;
    let free = || memory::machine().and_then(|m| m.available_bytes);
    let memory = args.memory.or_else(free).ok_or_else(|| {
        Failure::argument("plan", "--memory", "an amount such as 8GiB, since free memory is unknown here", "nothing")
    })?;
    let room = memory.saturating_sub(weights);
    let records: Vec<Record> = methods
        .iter()
        .map(|(text, method)| {
            let bits = method.bits_per_value(geometry.layers, geometry.head_dim);
            let values = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim;
            let bytes_per_token = values as f64 * bits / 8.0;
            Record {
                method: text.to_string(),
                bits_per_value: bits,
                bytes_per_token,
                context: args.context,
                context_bytes: bytes_for(method, geometry, args.context),
                max_context: longest(method, geometry, room, bytes_per_token * geometry.batch as f64),
                memory_bytes: memory,
                weights_bytes: weights,
            }
        })
        .collect();
    println!(
        "{} layers, {} KV heads of {}, batch {}: {} of memory, {} of weights, {} left for the cache",
        geometry.layers,
        geometry.kv_heads,
        geometry.head_dim,
        geometry.batch,
        text::bytes(memory),
        text::bytes(weights),
        text::bytes(room)
    );
    print!("{}", table(&records, limit));
    match &args.json {
        Some(path) => {
            let json = serde_json::to_vec_pretty(&records).map_err(|e| Failure::Failed(e.to_string()))?;
            output::write(path, &json)
        }
        None => Ok(()),
    }
}

/// The geometry, the bytes of the weights, and the context that the model was made for.
fn model_of(args: &Args) -> Outcome<(Geometry, u64, Option<usize>)> {
    let (mut geometry, weights, limit) = match (&args.model, args.layers, args.kv_heads, args.head_dim) {
        (Some(path), ..) => model::describe(path)?,
        (None, Some(layers), Some(kv_heads), Some(head_dim)) => {
            (Geometry { layers, kv_heads, head_dim, batch: 1 }, 0, None)
        }
        _ => {
            let expected = "--model, or all of --layers, --kv-heads and --head-dim";
            return Err(Failure::argument("plan", "--model", expected, "neither"));
        }
    };
    geometry.batch = args.batch;
    for (arg, n) in [
        ("--layers", geometry.layers),
        ("--kv-heads", geometry.kv_heads),
        ("--head-dim", geometry.head_dim),
        ("--batch", geometry.batch),
    ] {
        if n == 0 || n > 1 << 20 {
            return Err(Failure::argument("plan", arg, "1 to 1048576", n));
        }
    }
    Ok((geometry, args.weights_bytes.unwrap_or(weights), limit))
}

fn bytes_for(method: &Method, geometry: Geometry, tokens: usize) -> u64 {
    KvCache::bytes_for(method, geometry, tokens, &Device::cpu()) as u64
}

/// The longest context whose cache fits into `room`. Bytes never fall as tokens arrive, so halving finds it.
fn longest(method: &Method, geometry: Geometry, room: u64, bytes_per_token: f64) -> usize {
    // Memory comes in blocks, so the estimate is at most too high.
    let (mut fits, mut too_long) = (0, (room as f64 / bytes_per_token) as usize * 2 + 4096);
    while too_long - fits > 1 {
        let middle = fits + (too_long - fits) / 2;
        if bytes_for(method, geometry, middle) <= room { fits = middle } else { too_long = middle }
    }
    fits
}

fn table(records: &[Record], limit: Option<usize>) -> Table {
    let context = records.first().map_or(0, |r| r.context);
    let at = format!("bytes at {}", text::thousands(context as u64));
    let mut table = Table::new(&["method", "bits", "bytes/token", at.as_str(), "context that fits"]);
    for r in records {
        let beyond = limit.filter(|&l| r.max_context > l).map(|l| format!(" (model: {})", text::thousands(l as u64)));
        table.row(vec![
            r.method.clone(),
            format!("{:.2}", r.bits_per_value),
            text::thousands(r.bytes_per_token.round() as u64),
            text::bytes(r.context_bytes),
            format!("{}{}", text::thousands(r.max_context as u64), beyond.unwrap_or_default()),
        ]);
    }
    table
}
