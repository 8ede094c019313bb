//! Where weights come from: GGUF files and directories of safetensors, behind one trait.

mod gguf;
mod part;
mod safetensors;

use std::path::Path;

use candle_core::quantized::QTensor;

pub(crate) use gguf::Gguf;
pub(crate) use part::{LayerPart, Part};
pub(crate) use safetensors::Directory;

use crate::chat::ChatTemplate;
use crate::config::Config;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// A model on disk, its header read and its weights not.
pub(crate) trait Source {
    /// The file or directory, for errors.
    fn path(&self) -> &Path;
    /// The description of the model.
    fn config(&self) -> Result<Config>;
    /// The tokenizer.
    fn tokenizer(&self) -> Result<Tokenizer>;
    /// The chat template; a plain fallback if there is none.
    fn chat_template(&self, tokenizer: &Tokenizer) -> Result<ChatTemplate>;
    /// Every tensor by its name in the file.
    fn tensor_names(&self) -> Vec<String>;
    /// The name of a part in this kind of file.
    fn name_of(&self, part: Part) -> String;
    /// Whether a tensor that is no part of the model may be ignored.
    fn is_harmless(&self, name: &str) -> bool;
    /// Reads one tensor as it is stored, which must have the given shape.
    fn tensor(&mut self, part: Part, shape: &[usize]) -> Result<QTensor>;

    /// Refuses a file with tensors that the architecture does not know: a bias left out gives wrong results, quietly.
    fn check_names(&self, config: &Config) -> Result<()> {
        let known: std::collections::HashSet<String> = Part::all(config).map(|part| self.name_of(part)).collect();
        match self.tensor_names().into_iter().find(|name| !known.contains(name) && !self.is_harmless(name)) {
            Some(tensor) => Err(Error::UnknownTensor {
                file: self.path().into(),
                tensor,
                architecture: config.architecture.to_string(),
            }),
            None => Ok(()),
        }
    }
}

/// Opens a `.gguf` file or a directory with `config.json` and safetensors.
pub(crate) fn open(path: &Path) -> Result<Box<dyn Source>> {
    let metadata = std::fs::metadata(path).map_err(Error::io(path))?;
    match metadata.is_dir() {
        true => Ok(Box::new(Directory::open(path)?)),
        false => Ok(Box::new(Gguf::open(path)?)),
    }
}
