//! A file that appears whole and right, or not at all.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use sha2::{Digest, Sha256};

use super::{Progress, check};
use crate::{Error, Result};

const CHUNK: usize = 1 << 20;

/// What is downloaded, for errors.
pub(super) struct Origin<'a> {
    pub what: &'a str,
    pub from: &'a str,
}

impl Origin<'_> {
    pub fn failed(&self, reason: impl std::fmt::Display) -> Error {
        Error::Fetch { what: self.what.into(), from: self.from.into(), reason: reason.to_string() }
    }
}

/// Copies `reader` to a temporary file beside `target` and moves it there once its checksum is right. The temporary file
/// is deleted whenever this returns without having moved it.
pub(super) fn save(
    reader: &mut dyn Read,
    total: Option<u64>,
    sha256: Option<&str>,
    target: &Path,
    origin: &Origin,
    cancel: Option<&AtomicBool>,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let folder = target.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let mut part = tempfile::Builder::new()
        .prefix(&format!("{name}."))
        .suffix(".part")
        .tempfile_in(folder)
        .map_err(Error::io(folder))?;
    let (mut hasher, mut done, mut chunk) = (Sha256::new(), 0u64, vec![0u8; CHUNK]);
    loop {
        check(cancel)?;
        let n = match reader.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(origin.failed(e)),
        };
        part.write_all(&chunk[..n]).map_err(Error::io(part.path()))?;
        hasher.update(&chunk[..n]);
        done += n as u64;
        on_progress(Progress::Downloading { done, total });
    }
    if let Some(total) = total.filter(|&total| total != done) {
        return Err(origin.failed(format!("expected {total} bytes, {done} came")));
    }
    let found = hex(&hasher.finalize());
    if let Some(expected) = sha256.filter(|expected| *expected != found) {
        let (what, from, expected) = (origin.what.into(), origin.from.into(), expected.into());
        return Err(Error::Checksum { what, from, expected, found });
    }
    part.as_file().sync_all().map_err(Error::io(part.path()))?;
    readable_by_all(part.as_file()).map_err(Error::io(part.path()))?;
    part.persist(target).map_err(|e| Error::Io { path: target.into(), source: e.error })?;
    Ok(())
}

/// Temporary files are private; a model is an ordinary file.
fn readable_by_all(file: &File) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    }
    let _ = file;
    Ok(())
}

/// The checksum of a file, in hexadecimal.
pub(super) fn sha256_of(path: &Path, cancel: Option<&AtomicBool>) -> Result<String> {
    let mut file = File::open(path).map_err(Error::io(path))?;
    let (mut hasher, mut chunk) = (Sha256::new(), vec![0u8; CHUNK]);
    loop {
        check(cancel)?;
        match file.read(&mut chunk).map_err(Error::io(path))? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&chunk[..n]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn save_abc(sha256: &str, total: u64, cancel: bool) -> (Result<()>, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        let origin = Origin { what: "abc", from: "a test" };
        let target = folder.path().join("deep").join("abc");
        let cancel = AtomicBool::new(cancel);
        let result = save(&mut &b"abc"[..], Some(total), Some(sha256), &target, &origin, Some(&cancel), &mut |_| ());
        let files = std::fs::read_dir(folder.path().join("deep")).unwrap();
        (result, files.map(|f| f.unwrap().file_name().into_string().unwrap()).collect())
    }

    #[test]
    fn the_file_appears_whole_or_not_at_all() {
        assert!(matches!(save_abc(ABC, 3, false), (Ok(()), files) if files == ["abc"]));
        assert!(matches!(save_abc("00", 3, false), (Err(Error::Checksum { .. }), files) if files.is_empty()));
        assert!(matches!(save_abc(ABC, 4, false), (Err(Error::Fetch { .. }), files) if files.is_empty()));
        assert!(matches!(save_abc(ABC, 3, true), (Err(Error::Cancelled), files) if files.is_empty()));
    }
}
