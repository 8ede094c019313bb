//! Files appear whole or not at all: written beside their place, then renamed into it.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use crate::failure::{Failure, Outcome};

/// Paths that an interrupted program must take away with it.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Removes what is half written; for the Ctrl-C handler.
pub fn remove_unfinished() {
    for path in std::mem::take(&mut *unfinished()) {
        // Nothing can be done about a failure while the program is being interrupted.
        let _ = std::fs::remove_file(&path);
    }
}

/// Checks, before long work starts, that a file could be written at `target`.
pub fn check_target(op: &str, arg: &str, target: &Path) -> Outcome {
    if target.is_dir() || target.file_name().is_none() {
        return Err(Failure::argument(op, arg, "a file name", format!("the folder {}", target.display())));
    }
    if !folder_of(target).is_dir() {
        let found = format!("{} in a folder that does not exist", target.display());
        return Err(Failure::argument(op, arg, "a file in an existing folder", found));
    }
    Ok(())
}

/// Writes `bytes` to `target` in one step.
pub fn write(target: &Path, bytes: &[u8]) -> Outcome {
    let failed = |e: std::io::Error| Failure::Failed(format!("cannot write {}: {e}", target.display()));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".slimkv-");
    #[cfg(unix)]
    {
        // As any new file: readable by all whom the umask admits.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(Permissions::from_mode(0o666));
    }
    let mut file = builder.tempfile_in(folder_of(target)).map_err(failed)?;
    unfinished().insert(file.path().to_path_buf());
    let temporary = file.path().to_path_buf();
    let written = file.write_all(bytes).and_then(|()| file.as_file().sync_all());
    let result = written.and_then(|()| file.persist(target).map(drop).map_err(|e| e.error));
    unfinished().remove(&temporary);
    result.map_err(failed)
}

fn folder_of(target: &Path) -> &Path {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_whole_and_nothing_stays_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out.json");
        write(&target, b"[1]").unwrap();
        write(&target, b"[2]").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"[2]");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(check_target("t", "--out", &folder.path().join("no/such/file")).is_err());
        assert!(check_target("t", "--out", folder.path()).is_err());
    }
}
