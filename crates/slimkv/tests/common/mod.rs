//! What the tests share: devices, files, comparisons and random data.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use slimkv::{DType, Device, Tensor};

/// Every device of this machine: the CPU, and each GPU of the compiled backends. With `SLIMKV_REQUIRE_GPU=1` it is an
/// error to find no GPU, so that a run that was meant to test one cannot pass without it.
pub fn devices() -> Vec<Device> {
    let devices: Vec<Device> = Device::all().into_iter().filter_map(|f| f.device.ok()).collect();
    if std::env::var_os("SLIMKV_REQUIRE_GPU").is_some_and(|v| v == "1") {
        assert!(devices.len() > 1, "SLIMKV_REQUIRE_GPU=1, but there is no GPU: {:?}", Device::all());
    }
    devices
}

/// The folder of the golden vectors.
pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// All tensors of a safetensors file, on the CPU.
pub fn read_safetensors(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    file.tensors()
        .into_iter()
        .map(|(name, view)| {
            let dtype = match view.dtype() {
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::BF16,
                Dtype::F32 => DType::F32,
                Dtype::U8 => DType::U8,
                Dtype::U16 => DType::U16,
                Dtype::U32 => DType::U32,
                Dtype::I32 => DType::I32,
                other => panic!("{}: {name}: {other:?}", path.display()),
            };
            (name, Tensor::from_bytes(dtype, view.data(), view.shape(), &Device::cpu()).unwrap())
        })
        .collect()
}

/// How close a result must be.
#[derive(Debug, Clone, Copy)]
pub enum Tolerance {
    /// The same bits; any NaN equals any NaN.
    Exact,
    /// The same values; -0.0 equals 0.0.
    Value,
    /// Every finite element within this; infinities in the same place and of the same sign.
    Close(f64),
}

/// The first difference of two tensors, in words.
pub fn difference(found: &Tensor, expected: &Tensor, tolerance: Tolerance) -> Option<String> {
    if found.dtype() != expected.dtype() || found.shape() != expected.shape() {
        return Some(format!("found {found:?}, expected {expected:?}"));
    }
    let (f, e) = (numbers(found), numbers(expected));
    let same = |f: f64, e: f64| match tolerance {
        _ if f.is_nan() && e.is_nan() => true,
        Tolerance::Exact => f.to_bits() == e.to_bits(),
        Tolerance::Value => f == e,
        Tolerance::Close(_) if e.is_infinite() || f.is_infinite() => f == e,
        Tolerance::Close(atol) => (f - e).abs() <= atol,
    };
    let i = (0..f.len()).find(|&i| !same(f[i], e[i]))?;
    Some(format!("element {i} of {}: found {}, expected {}, {tolerance:?}", f.len(), f[i], e[i]))
}

/// The elements as f64, exactly; the sign of zero is kept.
pub fn numbers(tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        DType::U8 => tensor.to_vec::<u8>().unwrap().into_iter().map(f64::from).collect(),
        DType::U16 => tensor.to_vec::<u16>().unwrap().into_iter().map(f64::from).collect(),
        DType::U32 => tensor.to_vec::<u32>().unwrap().into_iter().map(f64::from).collect(),
        DType::I32 => tensor.to_vec::<i32>().unwrap().into_iter().map(f64::from).collect(),
        _ => tensor.to_f32_vec().unwrap().into_iter().map(f64::from).collect(),
    }
}

/// A reproducible stream of random numbers (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Standard normal (Box-Muller).
    pub fn normal(&mut self) -> f32 {
        let u = 1.0 - self.uniform();
        (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * self.uniform()).cos()
    }

    /// A tensor of standard normal values.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize], device: &Device) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.normal()).collect();
        Tensor::from_vec(values, shape).unwrap().to_float(dtype).unwrap().to_device(device).unwrap()
    }
}
