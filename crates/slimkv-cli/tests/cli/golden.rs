//! `slimkv op` over the golden vectors of the repository.

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

use super::{json, slimkv};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../slimkv/tests/golden")
}

#[test]
fn every_case_gives_the_expected_file() {
    let out = tempfile::tempdir().unwrap();
    let found = out.path().join("found.safetensors");
    let listed = slimkv(out.path(), &["op", "--list"]).ok();
    let known: Vec<&str> =
        listed.lines().filter(|l| !l.starts_with(' ')).filter_map(|l| l.split_whitespace().next()).collect();
    let cases = json(&folder().join("cases.json"));
    let mut ran = 0;
    for case in cases.as_array().unwrap() {
        let text = |key: &str| case[key].as_str().unwrap();
        let operation = text("operation");
        assert!(known.contains(&operation), "{operation} is not in `slimkv op --list`");
        let inputs = folder().join(text("inputs"));
        let mut args = vec!["op".to_string(), operation.into(), "--out".into(), found.display().to_string()];
        args.extend(["--in".into(), inputs.display().to_string()]);
        for (key, value) in case["settings"].as_object().unwrap() {
            let value = value.as_str().map_or_else(|| value.to_string(), String::from);
            args.extend(["--set".into(), format!("{key}={value}")]);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        slimkv(out.path(), &args).ok();
        compare(&found, &folder().join(text("outputs")), case);
        ran += 1;
    }
    assert!(ran >= 40, "{ran} cases");
}

fn compare(found: &Path, expected: &Path, case: &serde_json::Value) {
    let (found, expected) = (std::fs::read(found).unwrap(), std::fs::read(expected).unwrap());
    let (found, expected) = (SafeTensors::deserialize(&found).unwrap(), SafeTensors::deserialize(&expected).unwrap());
    assert_eq!(found.len(), expected.len(), "{case}");
    for (name, expected) in expected.iter() {
        let found = found.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}: {case}"));
        assert_eq!((found.dtype(), found.shape()), (expected.dtype(), expected.shape()), "{name}: {case}");
        let (f, e) = (numbers(found.dtype(), found.data()), numbers(expected.dtype(), expected.data()));
        let tolerance = &case["tolerance"][name];
        let atol = tolerance["atol"].as_f64().unwrap_or(0.0);
        let exact = tolerance["mode"] == "exact";
        for (i, (f, e)) in f.iter().zip(&e).enumerate() {
            let same = if exact { f.to_bits() == e.to_bits() } else { f == e || (f - e).abs() <= atol };
            assert!(same || (f.is_nan() && e.is_nan()), "{name}[{i}]: found {f}, expected {e}: {case}");
        }
    }
}

fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let two = |f: fn([u8; 2]) -> f64| bytes.as_chunks().0.iter().map(|b| f(*b)).collect();
    let four = |f: fn([u8; 4]) -> f64| bytes.as_chunks().0.iter().map(|b| f(*b)).collect();
    match dtype {
        Dtype::F16 => two(|b| half::f16::from_le_bytes(b).to_f64()),
        Dtype::BF16 => two(|b| half::bf16::from_le_bytes(b).to_f64()),
        Dtype::F32 => four(|b| f32::from_le_bytes(b).into()),
        Dtype::U32 => four(|b| u32::from_le_bytes(b).into()),
        Dtype::I32 => four(|b| i32::from_le_bytes(b).into()),
        Dtype::U16 => two(|b| u16::from_le_bytes(b).into()),
        Dtype::U8 => bytes.iter().map(|&b| b.into()).collect(),
        other => panic!("{other:?}"),
    }
}
