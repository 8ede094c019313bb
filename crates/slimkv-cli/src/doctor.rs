//! `slimkv doctor`: what this machine can do, and what is missing.

use serde::Serialize;
use slimkv::Device;

use crate::failure::{Failure, Outcome};
use crate::memory::{self, Memory};
use crate::{device, model, text};

/// Show devices, features, the kernel cache and models; say why something is missing and what supplies it.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  slimkv doctor
  slimkv doctor --json | jq '.devices[] | select(.available)'")]
pub struct Args {
    /// Print JSON instead
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    features: Vec<&'static str>,
    cpu: Cpu,
    memory: Option<Memory>,
    devices: Vec<Entry>,
    best: String,
    kernel_cache: Option<KernelCache>,
    model_folders: Vec<ModelFolder>,
}

#[derive(Serialize)]
struct Cpu {
    name: String,
    threads: usize,
}

#[derive(Serialize)]
struct Entry {
    kind: String,
    name: String,
    available: bool,
    /// How commands name it, or why it is not there.
    device: Option<String>,
    reason: Option<String>,
}

#[derive(Serialize)]
struct KernelCache {
    folder: String,
    entries: usize,
    bytes: u64,
}

#[derive(Serialize)]
struct ModelFolder {
    folder: String,
    models: Vec<String>,
}

/// The command.
pub fn doctor(args: &Args) -> Outcome {
    let report = report();
    if args.json {
        let json = serde_json::to_string_pretty(&report).map_err(|e| Failure::Failed(e.to_string()))?;
        println!("{json}");
    } else {
        print(&report);
    }
    Ok(())
}

fn report() -> Report {
    device::enable_kernel_cache();
    let devices = Device::all()
        .into_iter()
        .map(|found| Entry {
            kind: found.kind.to_string(),
            name: found.name,
            available: found.device.is_ok(),
            device: found.device.as_ref().ok().map(Device::to_string),
            reason: found.device.err(),
        })
        .collect();
    Report {
        version: env!("CARGO_PKG_VERSION"),
        features: features(),
        cpu: Cpu { name: Device::cpu().name(), threads: rayon::current_num_threads() },
        memory: memory::machine(),
        devices,
        best: Device::best().to_string(),
        kernel_cache: kernel_cache(),
        model_folders: model::folders()
            .into_iter()
            .map(|folder| ModelFolder {
                models: model::in_folder(&folder).iter().map(|m| m.display().to_string()).collect(),
                folder: folder.display().to_string(),
            })
            .collect(),
    }
}

fn features() -> Vec<&'static str> {
    let all =
        [("cuda", cfg!(feature = "cuda")), ("vulkan", cfg!(feature = "vulkan")), ("metal", cfg!(feature = "metal"))];
    all.into_iter().filter(|f| f.1).map(|f| f.0).collect()
}

fn kernel_cache() -> Option<KernelCache> {
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
    return slimkv::gpu::kernel_cache().ok().map(|cache| KernelCache {
        folder: cache.folder.display().to_string(),
        entries: cache.entries,
        bytes: cache.bytes,
    });
    #[cfg(not(any(feature = "cuda", feature = "vulkan", feature = "metal")))]
    None
}

fn print(report: &Report) {
    let features = if report.features.is_empty() { "none".into() } else { report.features.join(", ") };
    println!("slimkv {}, GPU features: {features}", report.version);
    println!("cpu      {}, {} threads", report.cpu.name, report.cpu.threads);
    if let Some(memory) = report.memory {
        let free = memory.available_bytes.map(|n| format!(", {} free", text::bytes(n))).unwrap_or_default();
        println!("memory   {}{free}", text::bytes(memory.total_bytes));
    }
    println!("\ndevices");
    for entry in &report.devices {
        match (&entry.device, &entry.reason) {
            (Some(device), _) => println!("  [ok]   {device:<10} {}", entry.name),
            (None, Some(reason)) => println!("  [none] {:<10} {reason}", entry.kind),
            (None, None) => {}
        }
    }
    println!("  `--device best` is {}", report.best);
    println!("\nkernel cache");
    match &report.kernel_cache {
        Some(c) => println!("  {} ({} files, {}); `slimkv warm` fills it", c.folder, c.entries, text::bytes(c.bytes)),
        None => println!("  none: this build has no GPU feature"),
    }
    println!("\nmodels");
    for folder in &report.model_folders {
        println!("  {}", folder.folder);
        for model in &folder.models {
            println!("    {model}");
        }
    }
    if report.model_folders.iter().all(|f| f.models.is_empty()) {
        println!("  none yet: `slimkv run` or `slimkv eval` without --model fetches a small one (98 MB)");
    }
}
