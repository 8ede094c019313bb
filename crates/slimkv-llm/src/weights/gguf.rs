//! A model in one GGUF file, read by candle.

use std::cell::RefCell;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{Content, Value};

use super::{Part, Source};
use crate::chat::ChatTemplate;
use crate::config::Config;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// An open GGUF file: its header, and its tensors when they are asked for.
pub(crate) struct Gguf {
    pub path: PathBuf,
    pub content: Content,
    pub bytes: u64,
    reader: RefCell<BufReader<File>>,
}

impl Gguf {
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path))?;
        let bytes = file.metadata().map_err(Error::io(path))?.len();
        let mut reader = BufReader::with_capacity(1 << 20, file);
        let content = Content::read(&mut reader).map_err(|e| Error::Format {
            file: path.into(),
            expected: "a GGUF file of version 1 to 3",
            found: e.to_string(),
        })?;
        let gguf = Gguf { path: path.into(), content, bytes, reader: reader.into() };
        match gguf.number("split.count")? {
            Some(n) if n > 1 => Err(gguf.bad("split.count", "a model in one file", n)),
            _ => Ok(gguf),
        }
    }

    /// A metadata value that is an integer.
    pub fn number(&self, key: &str) -> Result<Option<usize>> {
        self.get(key, "a non-negative integer", |value| match *value {
            Value::I8(v) => usize::try_from(v).ok(),
            Value::I16(v) => usize::try_from(v).ok(),
            Value::I32(v) => usize::try_from(v).ok(),
            Value::I64(v) => usize::try_from(v).ok(),
            Value::Bool(_) => None,
            _ => value.to_u64().ok().and_then(|v| usize::try_from(v).ok()),
        })
    }

    /// A metadata value that is a float.
    pub fn float(&self, key: &str) -> Result<Option<f32>> {
        self.get(key, "a finite number", |value| {
            match *value {
                Value::F32(v) => Some(v),
                Value::F64(v) => Some(v as f32),
                _ => None,
            }
            .filter(|v| v.is_finite())
        })
    }

    /// A metadata value that is true or false.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "true or false", |value| value.to_bool().ok())
    }

    /// A metadata value that is text.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.get(key, "text", |value| value.to_string().ok().map(String::as_str))
    }

    /// A metadata value that is an array of which each element reads as `T`.
    pub fn array<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        self.get(key, expected, |value| value.to_vec().ok()?.iter().map(&read).collect())
    }

    /// Insists on a value.
    pub fn required<T>(&self, key: &str, expected: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| Error::Missing { file: self.path.clone(), key: key.into(), expected: expected.into() })
    }

    /// An error about a metadata value.
    pub fn bad(&self, key: &str, expected: impl Into<String>, found: impl std::fmt::Display) -> Error {
        Error::Value { file: self.path.clone(), key: key.into(), expected: expected.into(), found: found.to_string() }
    }

    /// The shape of a tensor, outermost dimension first.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.content.tensor_infos.get(name).map(|info| info.shape.dims())
    }

    /// Reads a tensor as it is stored.
    pub fn read(&self, name: &str, shape: &[usize]) -> Result<QTensor> {
        let found = self.required(name, &format!("a tensor of shape {shape:?}"), self.shape(name))?;
        if found != shape {
            let (expected, found) = (shape.to_vec(), found.to_vec());
            return Err(Error::Shape { file: self.path.clone(), tensor: name.into(), expected, found });
        }
        self.content.tensor(&mut *self.reader.borrow_mut(), name, &Device::Cpu).map_err(|e| Error::Format {
            file: self.path.clone(),
            expected: "a readable tensor",
            found: format!("`{name}`: {e}"),
        })
    }

    fn get<'a, T>(&'a self, key: &str, expected: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.content.metadata.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| {
            let mut found = format!("{value:?}");
            found.truncate(found.char_indices().nth(60).map_or(found.len(), |(at, _)| at));
            self.bad(key, expected, found)
        })
    }
}

impl Source for Gguf {
    fn path(&self) -> &Path {
        &self.path
    }

    fn config(&self) -> Result<Config> {
        Config::from_gguf(self)
    }

    fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::from_gguf(self)
    }

    fn chat_template(&self, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
        ChatTemplate::new(self.text("tokenizer.chat_template")?, tokenizer)
    }

    fn tensor_names(&self) -> Vec<String> {
        self.content.tensor_infos.keys().cloned().collect()
    }

    fn name_of(&self, part: Part) -> String {
        part.gguf_name()
    }

    fn is_harmless(&self, name: &str) -> bool {
        // Read with the configuration.
        name == "rope_freqs.weight"
    }

    fn tensor(&mut self, part: Part, shape: &[usize]) -> Result<QTensor> {
        self.read(&part.gguf_name(), shape)
    }
}
