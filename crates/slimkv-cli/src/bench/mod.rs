//! `slimkv bench`: kernels against the bound that memory sets, and against what they replace.

mod cases;
mod clock;
mod rows;
mod shape;

use std::path::PathBuf;

use serde::Serialize;
use slimkv::cache::Method;
use slimkv::{Device, DeviceKind};

use crate::failure::{Failure, Outcome};
use crate::output;
use crate::text::{self, Table};
use shape::Shape;

/// Time a kernel, beside the speed of memory and what it replaces.
///
/// Times are cold: caches of 1.25 GiB in all (0.5 GiB on a GPU) are visited in turn, so that every visit reads memory.
/// The bytes are those that must move: decode and prefill read the packed keys and values once; encode reads f16 and
/// writes packed rows; append writes one token's packed keys and values (averaged over the packing of whole groups).
/// The roofline is a stream read by the same threads (CPU) or a device-to-device copy (GPU), measured in this process.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  slimkv bench decode --format kivi:4 --threads 1
  slimkv bench decode --format fp16,kivi:8,kivi:4,kivi:2 --shape s=4096 --shape s=131072 --device cuda --json out.json
  slimkv bench prefill --format kivi:4 --shape b=1,hq=32,hkv=8,d=128,s=4096,sq=512
  slimkv bench encode --format kivi:k4v2,group=64 --warm

Each format gives one row a baseline: `dequantise + attend` on the same device, and `fp16 attend`.")]
pub struct Args {
    /// What to time
    #[arg(value_enum)]
    kind: Kind,
    /// Formats, as methods: fp16, kivi:4, kivi:k4v2,group=64; a list, or repeated
    #[arg(long = "format", default_value = "kivi:4", value_name = "LIST")]
    formats: Vec<String>,
    /// Sizes; what is left out keeps b=1,hq=32,hkv=8,d=128,s=32768. sq is 1 (decode) or up to 512 (prefill). Repeatable
    #[arg(long = "shape", default_value = "b=1,hq=32,hkv=8,d=128,s=32768", value_name = "SIZES")]
    shapes: Vec<String>,
    /// Where to run: cpu, cuda[:N], vulkan[:N], metal or best
    #[arg(long, default_value = "cpu")]
    device: String,
    /// CPU threads; 0 means all
    #[arg(long, default_value_t = 0, value_name = "N")]
    threads: usize,
    /// Visit one cache again and again instead
    #[arg(long)]
    warm: bool,
    /// Write the results as a JSON list
    #[arg(long, value_name = "OUT.json")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// One query a sequence over a full cache
    Decode,
    /// Many queries a sequence over a full cache, causal
    Prefill,
    /// Quantise and pack rows
    Encode,
    /// Add one token to a cache
    Append,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Decode => "decode",
            Kind::Prefill => "prefill",
            Kind::Encode => "encode",
            Kind::Append => "append",
        }
    }
}

/// One line of the results. The names are the keys of the JSON.
#[derive(Debug, Clone, Serialize)]
struct Record {
    kind: &'static str,
    format: String,
    device: String,
    threads: usize,
    shape: String,
    median_us: f64,
    min_us: f64,
    bytes: u64,
    gb_per_s: f64,
    roofline_gb_per_s: f64,
    roofline_fraction: f64,
    baseline: &'static str,
    baseline_us: f64,
    /// How many times faster than the baseline.
    speedup: f64,
    /// Against the float64 oracle, on one KV head.
    max_abs_error: f64,
}

/// What a case measures, before it is held against the roofline.
struct Measured {
    timing: clock::Timing,
    bytes: usize,
    max_abs_error: f64,
    /// Baselines and their medians in microseconds.
    baselines: Vec<(&'static str, f64)>,
}

/// The command.
pub fn bench(args: &Args) -> Outcome {
    let formats = text::split_methods(&args.formats)
        .iter()
        .map(|text| Ok((text.clone(), text.parse::<Method>()?)))
        .collect::<Outcome<Vec<_>>>()?;
    let shapes = args
        .shapes
        .iter()
        .flat_map(|list| list.split(';'))
        .map(|text| text.parse::<Shape>().map(|shape| with_queries(shape, args.kind)))
        .collect::<Outcome<Vec<_>>>()?;
    if let Some(path) = &args.json {
        output::check_target("bench", "--json", path)?;
    }
    let device = crate::device::open(&args.device)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(args.threads)
        .build()
        .map_err(|e| Failure::Failed(format!("cannot start {} threads: {e}", args.threads)))?;
    // All work happens inside the pool, whose size the kernels take as theirs.
    let records = pool.install(|| -> Outcome<Vec<Record>> {
        let roofline = roofline(&device)?;
        let mut records = Vec::new();
        for shape in &shapes {
            let mut known = cases::Fp16::default();
            for (format, method) in &formats {
                let case = cases::Case { shape, method, device: &device, warm: args.warm };
                let measured = match args.kind {
                    Kind::Decode | Kind::Prefill => cases::attend(&case, &mut known)?,
                    Kind::Encode => cases::encode(&case)?,
                    Kind::Append => cases::append(&case)?,
                };
                records.extend(rows_of(args.kind, format, &device, shape, roofline, &measured));
            }
        }
        Ok(records)
    })?;
    print!("{}", table(&records));
    match &args.json {
        Some(path) => output::write(path, &json(&records)?),
        None => Ok(()),
    }
}

fn with_queries(shape: Shape, kind: Kind) -> Shape {
    let usual = if kind == Kind::Prefill { shape.s.min(512) } else { 1 };
    Shape { sq: if shape.sq == 0 { usual } else { shape.sq }, ..shape }
}

/// Bytes a second that memory gives.
fn roofline(device: &Device) -> Outcome<f64> {
    match device.kind() {
        DeviceKind::Cpu => clock::stream_read(),
        _ => clock::device_copy(device),
    }
}

fn rows_of(kind: Kind, format: &str, device: &Device, shape: &Shape, roofline: f64, m: &Measured) -> Vec<Record> {
    let rate = m.bytes as f64 / (m.timing.median_us * 1e-6);
    let record = |&(baseline, baseline_us): &(&'static str, f64)| Record {
        kind: kind.name(),
        format: format.to_string(),
        device: device.to_string(),
        threads: rayon::current_num_threads(),
        shape: shape.to_string(),
        median_us: m.timing.median_us,
        min_us: m.timing.min_us,
        bytes: m.bytes as u64,
        gb_per_s: rate / 1e9,
        roofline_gb_per_s: roofline / 1e9,
        roofline_fraction: rate / roofline,
        baseline,
        baseline_us,
        speedup: baseline_us / m.timing.median_us,
        max_abs_error: m.max_abs_error,
    };
    m.baselines.iter().map(record).collect()
}

fn json(records: &[Record]) -> Outcome<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(records).map_err(|e| Failure::Failed(e.to_string()))?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn table(records: &[Record]) -> Table {
    let mut table = Table::new(&[
        "format",
        "shape",
        "median",
        "min",
        "GB/s",
        "of roofline",
        "baseline",
        "its time",
        "speedup",
        "max error",
    ]);
    let time = |us: f64| if us >= 10_000.0 { format!("{:.2} ms", us / 1e3) } else { format!("{us:.1} us") };
    for r in records {
        table.row(vec![
            r.format.clone(),
            r.shape.clone(),
            time(r.median_us),
            time(r.min_us),
            format!("{:.2}", r.gb_per_s),
            format!("{:.0} %", 100.0 * r.roofline_fraction),
            r.baseline.into(),
            time(r.baseline_us),
            format!("{:.2}x", r.speedup),
            format!("{:.1e}", r.max_abs_error),
        ]);
    }
    table
}
