//! A model in a directory: `config.json`, `tokenizer.json` and one or more safetensors files.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::{Part, Source};
use crate::chat::ChatTemplate;
use crate::config::Config;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// An open directory: its JSON files, and memory maps of its tensors.
pub(crate) struct Directory {
    pub path: PathBuf,
    shards: Vec<(PathBuf, Mmap)>,
    /// Which shard holds a tensor.
    home: HashMap<String, usize>,
}

/// What a safetensors header says about one tensor.
pub(crate) struct TensorHeader {
    pub shape: Vec<usize>,
    pub bytes: usize,
}

impl Directory {
    pub fn open(path: &Path) -> Result<Self> {
        let mut directory = Directory { path: path.into(), shards: Vec::new(), home: HashMap::new() };
        let index_path = path.join("model.safetensors.index.json");
        let files = match index_path.exists() {
            false => vec!["model.safetensors".to_string()],
            true => {
                let index = directory.json("model.safetensors.index.json")?;
                let map = index.get("weight_map").and_then(Value::as_object).ok_or_else(|| Error::Missing {
                    file: index_path,
                    key: "weight_map".into(),
                    expected: "an object from tensor to file".into(),
                })?;
                let names: std::collections::BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
                names.into_iter().map(String::from).collect()
            }
        };
        for file in files {
            directory.add_shard(path.join(file))?;
        }
        Ok(directory)
    }

    fn add_shard(&mut self, path: PathBuf) -> Result<()> {
        let file = File::open(&path).map_err(Error::io(&path))?;
        // SAFETY: the map is only read, and only while the model loads. As with every reader of model files, another
        // process that truncates the file meanwhile ends this one.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(&path))?;
        let names: Vec<String> = parse(&path, &map)?.names().into_iter().map(String::from).collect();
        self.home.extend(names.into_iter().map(|name| (name, self.shards.len())));
        self.shards.push((path, map));
        Ok(())
    }

    /// One of the JSON files of the directory.
    pub fn json(&self, name: &str) -> Result<Value> {
        let path = self.path.join(name);
        let text = std::fs::read(&path).map_err(Error::io(&path))?;
        serde_json::from_slice(&text).map_err(|e| Error::Format {
            file: path,
            expected: "a JSON file",
            found: e.to_string(),
        })
    }

    /// One of the JSON files, if it is there.
    pub fn json_if_there(&self, name: &str) -> Result<Option<Value>> {
        self.path.join(name).exists().then(|| self.json(name)).transpose()
    }

    /// Shape and size of every tensor.
    pub fn headers(&self) -> Result<HashMap<String, TensorHeader>> {
        let mut headers = HashMap::new();
        for (path, map) in &self.shards {
            for (name, view) in parse(path, map)?.tensors() {
                headers.insert(name, TensorHeader { shape: view.shape().to_vec(), bytes: view.data().len() });
            }
        }
        Ok(headers)
    }

    /// Bytes of all safetensors files.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|(_, map)| map.len() as u64).sum()
    }
}

impl Source for Directory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn config(&self) -> Result<Config> {
        Config::from_directory(self)
    }

    fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::from_directory(self)
    }

    fn chat_template(&self, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
        let config = self.json_if_there("tokenizer_config.json")?;
        let inline = config.as_ref().and_then(|config| match config.get("chat_template")? {
            Value::String(template) => Some(template.clone()),
            // A list of named templates.
            Value::Array(named) => named
                .iter()
                .find(|t| t.get("name").and_then(Value::as_str) == Some("default"))
                .and_then(|t| Some(t.get("template")?.as_str()?.to_string())),
            _ => None,
        });
        let path = self.path.join("chat_template.jinja");
        let template = match inline {
            None if path.exists() => Some(std::fs::read_to_string(&path).map_err(Error::io(path))?),
            inline => inline,
        };
        ChatTemplate::new(template.as_deref(), tokenizer)
    }

    fn tensor_names(&self) -> Vec<String> {
        self.home.keys().cloned().collect()
    }

    fn name_of(&self, part: Part) -> String {
        part.safetensors_name()
    }

    fn is_harmless(&self, name: &str) -> bool {
        // Constants that some exporters store, and a copy of a tied output projection.
        name.ends_with("rotary_emb.inv_freq") || name == "lm_head.weight"
    }

    fn tensor(&mut self, part: Part, shape: &[usize]) -> Result<QTensor> {
        let name = part.safetensors_name();
        let missing = || Error::Missing {
            file: self.path.clone(),
            key: name.clone(),
            expected: format!("a tensor of shape {shape:?}"),
        };
        let (path, map) = &self.shards[*self.home.get(&name).ok_or_else(missing)?];
        let file = parse(path, map)?;
        let view = file.tensor(&name).map_err(|_| missing())?;
        if view.shape() != shape {
            let (expected, found) = (shape.to_vec(), view.shape().to_vec());
            return Err(Error::Shape { file: path.clone(), tensor: name, expected, found });
        }
        let dtype = match view.dtype() {
            Dtype::F32 => GgmlDType::F32,
            Dtype::F16 => GgmlDType::F16,
            Dtype::BF16 => GgmlDType::BF16,
            found => {
                return Err(Error::Value {
                    file: path.clone(),
                    key: name,
                    expected: "dtype F32, F16 or BF16".into(),
                    found: format!("{found:?}"),
                });
            }
        };
        // candle casts the bytes in place, so they must lie where an f32 may.
        let mut aligned = vec![0u32; view.data().len().div_ceil(4)];
        let bytes = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut aligned)[..view.data().len()];
        bytes.copy_from_slice(view.data());
        Ok(QTensor::new(QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, dtype)?, shape)?)
    }
}

fn parse<'a>(path: &Path, map: &'a Mmap) -> Result<SafeTensors<'a>> {
    SafeTensors::deserialize(map).map_err(|e| Error::Format {
        file: path.into(),
        expected: "a safetensors file",
        found: e.to_string(),
    })
}
