//! Finding a model, fetching it once if it is nowhere, and loading it.

use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use slimkv::cache::Geometry;
use slimkv_llm::fetch::{self, FetchOptions, Progress};
use slimkv_llm::{Config, Error, LoadOptions, Model};

use crate::failure::{Failure, Outcome};
use crate::interrupt;

/// Folders where models are looked for.
pub fn folders() -> Vec<PathBuf> {
    fetch::search_paths()
}

/// The GGUF files in a folder.
pub fn in_folder(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut models: Vec<PathBuf> =
        entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect();
    models.sort();
    models
}

/// The model that the user named, or a small known one: found in a local folder, else fetched, with a progress bar.
pub fn locate(named: Option<&Path>) -> Outcome<PathBuf> {
    if let Some(path) = named.filter(|path| path.exists()) {
        return Ok(path.to_path_buf());
    }
    let spec = named.map(|path| path.to_string_lossy().into_owned());
    let mut bar: Option<ProgressBar> = None;
    let mut tell = |progress| match progress {
        Progress::Connecting { source } => eprintln!("fetching a model from {source}"),
        Progress::Downloading { done, total } => {
            let bar = bar.get_or_insert_with(|| download_bar(total));
            bar.set_position(done);
        }
        Progress::Verifying => {
            if let Some(bar) = bar.take() {
                bar.finish_and_clear();
            }
        }
        Progress::Done => {}
    };
    let found = interrupt::watched(|cancel| {
        let options = FetchOptions { cancel: Some(cancel), ..FetchOptions::default() };
        fetch::resolve(spec.as_deref(), &options, &mut tell)
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    found.map_err(|error| match error {
        // What was named is the caller's to correct; what is known and cannot be had is not.
        Error::NoModel { .. } if named.is_none() => Failure::Failed(error.to_string()),
        other => failure(other),
    })
}

/// A model in memory.
pub fn load(named: Option<&Path>) -> Outcome<Model> {
    Model::load(locate(named)?, &LoadOptions::default()).map_err(failure)
}

/// The numbers that describe a model. Reads no weights.
pub fn config(path: &Path) -> Outcome<Config> {
    Config::read(locate(Some(path))?).map_err(failure)
}

/// The geometry of a model's cache, the bytes of its weights, and the context that it was made for.
pub fn describe(path: &Path) -> Outcome<(Geometry, u64, Option<usize>)> {
    let config = config(path)?;
    Ok((config.geometry(1), config.weight_bytes, Some(config.context)))
}

/// The failure that an error of the model crate is: mostly a file or an argument that the user chose.
pub fn failure(error: Error) -> Failure {
    match error {
        Error::Cache(error) => error.into(),
        Error::Cancelled => Failure::Interrupted,
        Error::Fetch { .. } | Error::Checksum { .. } | Error::Dense(_) => Failure::Failed(error.to_string()),
        other => Failure::BadInput(other.to_string()),
    }
}

fn download_bar(total: Option<u64>) -> ProgressBar {
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::new_spinner(),
    };
    match ProgressStyle::with_template("[{bar:32}] {bytes} of {total_bytes} ({bytes_per_sec}, left: {eta})") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
