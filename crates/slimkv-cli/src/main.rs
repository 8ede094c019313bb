//! The `slimkv` program: compressed KV caches from the command line.
//!
//! Exit codes: 0 done, 1 something failed, 2 the call was wrong (one line on stderr says which argument, what was
//! expected and what was found; nothing was written), 130 interrupted (nothing half written stays).

mod bench;
mod device;
mod doctor;
mod eval;
mod failure;
mod interrupt;
mod memory;
mod model;
mod op;
mod output;
mod plan;
mod run;
mod tensors;
mod text;
mod warm;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use failure::Outcome;

/// Compressed KV caches for language models: measure them, run them, benchmark them.
#[derive(Parser)]
#[command(version, propagate_version = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  slimkv doctor                                  what this machine can do, and what is missing
  slimkv run --method kivi:4 'Why is the sky blue?'
  slimkv eval --methods fp16,kivi:8,kivi:4,kivi:2 --plot quality.svg
  slimkv plan --model model.gguf --memory 8GiB   how long a context fits
  slimkv bench decode --format kivi:4 --threads 1

A method is what a cache does with keys and values: `fp16` keeps them; `kivi:4` stores 4 bits a value;
`kivi:k4v2,group=32,residual=128` 4 bits for keys, 2 for values, groups of 32, the last 128 tokens exact;
`kivi:2,first=2:8,last=2:8` 2 bits, but 8 in the first two and last two layers.

A device is cpu, cuda[:N], vulkan[:N], metal, or best. There is no silent fallback.";

#[derive(Subcommand)]
enum Command {
    Doctor(doctor::Args),
    Run(run::Args),
    Eval(eval::Args),
    #[command(hide = true)]
    EvalWorker(eval::WorkerArgs),
    Op(op::Args),
    Bench(bench::Args),
    Warm(warm::Args),
    Plan(plan::Args),
}

fn main() -> ExitCode {
    restore_sigpipe();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    match interrupt::watch().and_then(|()| dispatch(cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {}", failure.one_line());
            ExitCode::from(failure.exit_code())
        }
    }
}

fn dispatch(command: Command) -> Outcome {
    match command {
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Run(args) => run::run(&args),
        Command::Eval(args) => eval::eval(&args),
        Command::EvalWorker(args) => eval::work(&args),
        Command::Op(args) => op::op(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Warm(args) => warm::warm(&args),
        Command::Plan(args) => plan::plan(&args),
    }
}

/// Help and version as clap prints them; a wrong call on one line.
fn refuse(error: &clap::Error) -> ExitCode {
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        let _ = error.print();
        return if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
    }
    let text = error.render().to_string();
    let message = text.split("\n\nUsage:").next().unwrap_or(&text);
    let message = message.split("\n\nFor more information").next().unwrap_or(message);
    let words: Vec<&str> = message.split_whitespace().collect();
    eprintln!("{} (see --help)", words.join(" "));
    ExitCode::from(2)
}

/// A closed pipe (`slimkv op --list | head`) ends the program quietly, as it does every other command.
fn restore_sigpipe() {
    #[cfg(unix)]
    // SAFETY: installs the default action of a signal, before any thread is started.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}
