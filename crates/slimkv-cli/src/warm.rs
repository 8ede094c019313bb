//! `slimkv warm`: compile kernels ahead of time.

use std::path::PathBuf;

use slimkv::DeviceKind;

use crate::device;
use crate::failure::Outcome;

/// Compile a GPU's kernels ahead of time, so that the first token does not wait for them.
///
/// Kernels are compiled on first use anyway and kept on disk; this does it at a time of your choosing, after an
/// installation for example: for the head shapes of a model, or for those that most models have.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  slimkv warm
  slimkv warm --device cuda:1 --model model.gguf")]
pub struct Args {
    /// cuda[:N], vulkan[:N], metal or best
    #[arg(long, default_value = "best")]
    device: String,
    /// Compile what this model needs
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
}

/// The command.
pub fn warm(args: &Args) -> Outcome {
    let device = device::open(&args.device)?;
    if device.kind() == DeviceKind::Cpu {
        println!("{device}: nothing to compile, the CPU's kernels are part of the program");
        return Ok(());
    }
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
    {
        use slimkv::gpu;
        let heads = match &args.model {
            Some(path) => {
                let config = crate::model::config(path)?;
                vec![gpu::HeadShape { head_dim: config.head_dim, group: config.heads / config.kv_heads }]
            }
            None => gpu::COMMON.to_vec(),
        };
        let before = gpu::kernel_cache()?.entries;
        let warmed = gpu::warm(&device, &heads)?;
        let cache = gpu::kernel_cache()?;
        println!(
            "{device} ({}): {} operations in {:.1} s; {} new files, {} in all, {} in {}",
            device.name(),
            warmed.operations,
            warmed.elapsed.as_secs_f64(),
            cache.entries.saturating_sub(before),
            cache.entries,
            crate::text::bytes(cache.bytes),
            cache.folder.display()
        );
    }
    Ok(())
}
