//! Tensors in safetensors files.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use slimkv::{DType, Device, Tensor};

use crate::failure::{Failure, Outcome};
use crate::output;

/// The tensors that `wanted` accepts, on `device`; the names of the others.
pub struct Loaded {
    /// Tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// Names in the file that nobody asked for.
    pub ignored: Vec<String>,
}

/// Reads from `path` the tensors whose names `wanted` accepts. `op` is named in errors.
pub fn read(op: &str, path: &Path, wanted: impl Fn(&str) -> bool, device: &Device) -> Outcome<Loaded> {
    let unreadable = |why: String| Failure::unreadable(op, "--in", path, why);
    let file = File::open(path).map_err(|e| unreadable(e.to_string()))?;
    // An empty file, or a folder, cannot be mapped everywhere; say what it is instead.
    let metadata = file.metadata().map_err(|e| unreadable(e.to_string()))?;
    if !metadata.is_file() || metadata.len() == 0 {
        return Err(unreadable("not a safetensors file".into()));
    }
    // SAFETY: the mapping is read-only and private to this call; a file that another program truncates meanwhile is
    // outside the contract of every reader of mapped files.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| unreadable(e.to_string()))?;
    let parsed = SafeTensors::deserialize(&map).map_err(|e| unreadable(format!("not a safetensors file ({e})")))?;
    let mut loaded = Loaded { tensors: BTreeMap::new(), ignored: Vec::new() };
    for (name, view) in parsed.iter() {
        if !wanted(name) {
            loaded.ignored.push(name.to_string());
            continue;
        }
        let Some(dtype) = from_safetensors(view.dtype()) else {
            let expected = format!("dtype {}", DType::ALL.map(DType::name).join(", "));
            return Err(Failure::argument(op, name, expected, format!("{:?}", view.dtype()).to_lowercase()));
        };
        loaded.tensors.insert(name.to_string(), Tensor::from_bytes(dtype, view.data(), view.shape(), device)?);
    }
    loaded.ignored.sort();
    Ok(loaded)
}

/// Writes tensors to `path` in one step.
pub fn write(path: &Path, tensors: &[(&'static str, Tensor)]) -> Outcome {
    let bytes = tensors.iter().map(|(_, tensor)| tensor.to_bytes()).collect::<slimkv::Result<Vec<_>>>()?;
    let failed = |e: safetensors::SafeTensorError| Failure::Failed(format!("cannot write {}: {e}", path.display()));
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, tensor), data)| {
            let view = TensorView::new(to_safetensors(tensor.dtype()), tensor.shape().to_vec(), data)?;
            Ok((*name, view))
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    output::write(path, &safetensors::serialize(views, None).map_err(failed)?)
}

fn from_safetensors(dtype: Dtype) -> Option<DType> {
    DType::ALL.into_iter().find(|&d| to_safetensors(d) == dtype)
}

fn to_safetensors(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::U8 => Dtype::U8,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
        DType::I32 => Dtype::I32,
    }
}
