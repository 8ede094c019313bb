//! `slimkv op`: one operation of the contract, from file to file.

use std::collections::BTreeMap;
use std::path::PathBuf;

use slimkv::ops::{self, Inputs, Operation};

use crate::failure::{Failure, Outcome};
use crate::{device, output, tensors};

/// Run one operation on tensors in a safetensors file.
///
/// Inputs are looked up in the file by the operation's argument names; scalars come as --set; results are written
/// under the result names. `slimkv op --list` shows every operation with all three.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  slimkv op --list
  slimkv op --list kivi_group_quantize
  slimkv op kivi_group_quantize --in x.safetensors --out packed.safetensors \\
      --set bits=4 --set axis=-1 --set group_size=32
  slimkv op scalar_fused_decode_attend --device cuda --in in.safetensors --out out.safetensors --set group_size=32

A wrong name, tensor, dtype, shape or setting is exit code 2 with one line that says what was expected and what was
found; nothing is written.")]
pub struct Args {
    /// The operation
    #[arg(value_name = "NAME", required_unless_present = "list")]
    name: Option<String>,
    /// Show the operations with their arguments, defaults and results
    #[arg(long)]
    list: bool,
    /// Where to run: cpu, cuda[:N], vulkan[:N], metal or best
    #[arg(long, default_value = "cpu")]
    device: String,
    /// The inputs
    #[arg(long = "in", value_name = "INPUTS.safetensors", required_unless_present = "list")]
    input: Option<PathBuf>,
    /// The results
    #[arg(long = "out", value_name = "OUTPUTS.safetensors", required_unless_present = "list")]
    output: Option<PathBuf>,
    /// A scalar argument
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

/// The command.
pub fn op(args: &Args) -> Outcome {
    if args.list {
        return list(args.name.as_deref());
    }
    let (Some(name), Some(input), Some(target)) = (&args.name, &args.input, &args.output) else {
        return Err(Failure::argument("op", "NAME", "an operation, --in and --out", "one of them missing"));
    };
    let operation = ops::find(name)?;
    let settings = settings(operation.name, &args.settings)?;
    output::check_target(operation.name, "--out", target)?;
    let device = device::open(&args.device)?;
    let known = |tensor: &str| operation.tensors.iter().any(|t| t.name == tensor);
    let loaded = tensors::read(operation.name, input, known, &device)?;
    for name in &loaded.ignored {
        eprintln!("warning: {}: tensor `{name}` is not an argument of this operation and is ignored", operation.name);
    }
    let results = operation.run(&Inputs { tensors: loaded.tensors, settings }, &device)?;
    tensors::write(target, &results)
}

fn settings(op: &str, given: &[String]) -> Outcome<BTreeMap<String, String>> {
    let mut settings = BTreeMap::new();
    for setting in given {
        let Some((key, value)) = setting.split_once('=') else {
            return Err(Failure::argument(op, "--set", "KEY=VALUE", format!("`{setting}`")));
        };
        if settings.insert(key.to_string(), value.to_string()).is_some() {
            return Err(Failure::argument(op, key, "one value", "a second one"));
        }
    }
    Ok(settings)
}

fn list(name: Option<&str>) -> Outcome {
    match name {
        Some(name) => print(ops::find(name)?),
        None => ops::registry().iter().for_each(print),
    }
    Ok(())
}

fn print(operation: &Operation) {
    println!("{}  ({})", operation.name, operation.family);
    println!("    {}", operation.summary);
    for tensor in operation.tensors {
        let optional = if tensor.optional { "  optional" } else { "" };
        println!("    in   {}: {} {}{optional}", tensor.name, tensor.dtypes, tensor.shape);
    }
    for scalar in operation.scalars {
        let default = scalar.default.map_or("required".to_string(), |d| format!("default {d}"));
        println!("    set  {}: {}; {default}", scalar.name, scalar.kind);
    }
    for result in operation.results {
        println!("    out  {}: {} {}", result.name, result.dtype, result.shape);
    }
    println!();
}
