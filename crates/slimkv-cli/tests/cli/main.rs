//! The program as a user meets it: exit codes, files, and what it prints.

mod bad_input;
mod bench;
mod doctor;
mod golden;
mod models;
mod plan;
#[path = "../../../slimkv-llm/tests/common/mod.rs"]
mod tiny;

use std::path::Path;
use std::process::{Command, Stdio};

/// What one run of the program gave.
struct Run {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs `slimkv` in `folder` with an empty stdin.
fn slimkv(folder: &Path, args: &[&str]) -> Run {
    slimkv_with(folder, args, Stdio::null())
}

fn slimkv_with(folder: &Path, args: &[&str], stdin: Stdio) -> Run {
    let output = Command::new(env!("CARGO_BIN_EXE_slimkv"))
        .args(args)
        .current_dir(folder)
        .stdin(stdin)
        .output()
        .expect("the program starts");
    Run {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

impl Run {
    /// The run succeeded; its stdout.
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "stderr: {}", self.stderr);
        self.stdout
    }

    /// The call was refused with one line that holds all of `words`.
    #[track_caller]
    fn refused(self, words: &[&str]) {
        assert_eq!(self.code, Some(2), "stdout: {} stderr: {}", self.stdout, self.stderr);
        assert_eq!(self.stderr.lines().count(), 1, "{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "no `{word}` in: {}", self.stderr);
        }
    }
}

/// The JSON in a file.
fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).expect("the file was written")).expect("it is JSON")
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The keys of a JSON object, sorted.
fn keys(object: &serde_json::Value) -> Vec<&str> {
    let mut keys: Vec<&str> = object.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort();
    keys
}

#[test]
fn help_teaches_and_costs_nothing() {
    let here = Path::new(".");
    let help = slimkv(here, &["--help"]).ok();
    for command in ["doctor", "run", "eval", "op", "bench", "warm", "plan"] {
        assert!(help.contains(command), "{command}");
        let help = slimkv(here, &[command, "--help"]).ok();
        assert!(help.contains("Examples:") && help.contains(&format!("slimkv {command}")), "{command}: {help}");
    }
    assert!(slimkv(here, &["--version"]).ok().contains(env!("CARGO_PKG_VERSION")));
}
