//! What holds for every operation of the registry: bad input is a typed error that names the operation and the argument,
//! on every device, and the documentation lists exactly the operations that there are.

mod common;

use std::collections::BTreeMap;
use std::fmt::Write;

use common::{devices, golden, read_safetensors};
use slimkv::ops::{self, Inputs, Operation};
use slimkv::{DType, Device, Tensor};

/// One valid call of each operation: the first golden case whose arrays are not empty.
fn valid_calls() -> Vec<(&'static Operation, Inputs)> {
    let cases: Vec<serde_json::Value> =
        serde_json::from_str(&std::fs::read_to_string(golden().join("cases.json")).unwrap()).unwrap();
    ops::registry()
        .iter()
        .map(|operation| {
            let inputs = cases
                .iter()
                .filter(|c| c["operation"] == operation.name)
                .map(|c| Inputs {
                    tensors: read_safetensors(&golden().join(c["inputs"].as_str().unwrap())),
                    settings: c["settings"]
                        .as_object()
                        .unwrap()
                        .iter()
                        .map(|(k, v)| (k.clone(), v.to_string().replace('"', "")))
                        .collect(),
                })
                .find(|i| i.tensors.values().all(|t| !t.is_empty()))
                .unwrap_or_else(|| panic!("{operation:?} has no golden case"));
            (operation, inputs)
        })
        .collect()
}

/// Runs a call that must fail, and checks that the error names the operation and one of `args`.
fn refuse(operation: &Operation, inputs: &Inputs, device: &Device, args: &[&str], what: &str) {
    let label = format!("{operation:?} on {device}: {what}");
    match operation.run(inputs, device) {
        Ok(_) => panic!("{label} was accepted"),
        Err(error) => {
            let text = error.to_string();
            assert!(!text.contains('\n'), "{label}: more than a line: {text}");
            assert!(text.starts_with(&format!("{}: argument `", operation.name)), "{label}: {text}");
            assert!(text.contains("expected") && text.contains("found"), "{label}: {text}");
            assert!(args.iter().any(|arg| text.contains(&format!("argument `{arg}`"))), "{label}: {text}");
        }
    }
}

fn with_tensor(inputs: &Inputs, name: &str, tensor: Option<Tensor>) -> Inputs {
    let mut inputs = inputs.clone();
    match tensor {
        Some(tensor) => drop(inputs.tensors.insert(name.into(), tensor)),
        None => drop(inputs.tensors.remove(name)),
    }
    inputs
}

#[test]
fn a_missing_argument_is_named() {
    for device in devices() {
        for (operation, inputs) in valid_calls() {
            operation.run(&inputs, &device).unwrap();
            for arg in operation.tensors.iter().filter(|a| !a.optional) {
                refuse(operation, &with_tensor(&inputs, arg.name, None), &device, &[arg.name], "missing tensor");
            }
            for arg in operation.scalars.iter().filter(|a| a.default.is_none()) {
                let mut less = inputs.clone();
                less.settings.remove(arg.name);
                refuse(operation, &less, &device, &[arg.name], "missing scalar");
            }
        }
    }
}

#[test]
fn an_unknown_setting_is_refused() {
    for (operation, mut inputs) in valid_calls() {
        inputs.settings.insert("colour".into(), "2".into());
        refuse(operation, &inputs, &Device::cpu(), &["settings"], "unknown setting");
    }
}

#[test]
fn a_scalar_that_is_no_value_is_named() {
    for (operation, inputs) in valid_calls() {
        for arg in operation.scalars {
            for bad in ["x", "", "-7", "1e99", "nan", "0.5.1"] {
                // Some of these are numbers, and good ones for some arguments.
                let fine = match arg.name {
                    "scale" => bad == "-7",
                    "eps" => false,
                    _ => false,
                };
                if fine {
                    continue;
                }
                let mut inputs = inputs.clone();
                inputs.settings.insert(arg.name.into(), bad.into());
                refuse(operation, &inputs, &Device::cpu(), &[arg.name], bad);
            }
        }
    }
}

#[test]
fn a_wrong_dtype_is_named() {
    for device in devices() {
        for (operation, inputs) in valid_calls() {
            for arg in operation.tensors {
                let Some(tensor) = inputs.tensors.get(arg.name) else { continue };
                let wrong = if tensor.dtype() == DType::I32 { DType::U16 } else { DType::I32 };
                let wrong = Tensor::zeros(wrong, tensor.shape(), &Device::cpu()).unwrap();
                let call = with_tensor(&inputs, arg.name, Some(wrong));
                refuse(operation, &call, &device, &[arg.name], "wrong dtype");
            }
        }
    }
}

#[test]
fn a_wrong_shape_is_refused() {
    for device in devices() {
        for (operation, inputs) in valid_calls() {
            // Alone, the array of these may have any shape of one axis or more.
            let any_shape = ["turboquant_bit_pack", "kivi_group_quant_dequant", "kivi_group_quantize"];
            let all: Vec<&str> =
                operation.tensors.iter().map(|a| a.name).chain(operation.scalars.iter().map(|a| a.name)).collect();
            for arg in operation.tensors {
                let Some(tensor) = inputs.tensors.get(arg.name) else { continue };
                let mut longer = tensor.shape().to_vec();
                *longer.last_mut().unwrap() += 1;
                let scalar: Vec<usize> = Vec::new();
                let mut more_axes = tensor.shape().to_vec();
                more_axes.push(2);
                for (what, shape) in [("longer", longer), ("no axis", scalar), ("one axis more", more_axes)] {
                    if what != "no axis" && any_shape.contains(&operation.name) {
                        continue;
                    }
                    let wrong = Tensor::zeros(tensor.dtype(), &shape, &Device::cpu()).unwrap();
                    let call = with_tensor(&inputs, arg.name, Some(wrong));
                    refuse(operation, &call, &device, &all, what);
                }
            }
        }
    }
}

#[test]
fn arrays_that_are_not_known_are_ignored() {
    for (operation, inputs) in valid_calls() {
        let stray = Tensor::from_vec(vec![1u8], &[1]).unwrap();
        operation.run(&with_tensor(&inputs, "stray", Some(stray)), &Device::cpu()).unwrap();
    }
}

/// The table of `docs/operations.md`, from the registry.
fn table() -> String {
    let mut families: BTreeMap<&str, Vec<&Operation>> = BTreeMap::new();
    for operation in ops::registry() {
        families.entry(operation.family).or_default().push(operation);
    }
    let mut text = String::from(
        "# Operations\n\nEvery operation of the registry, in Rust as `slimkv::ops::<family>::<name>` and on the command line \
         as `slimkv op <name>`. This\npage is generated from the registry; `UPDATE_DOCS=1 cargo test -p slimkv --test operations` \
         writes it.\n\nB batch, Hq and Hkv query and KV heads, S tokens, D head dimension, g group size, EPW = 32 / bits codes a word.\n",
    );
    for (family, operations) in families {
        writeln!(text, "\n## {family}\n\n| operation | arguments | results |\n|---|---|---|").unwrap();
        for op in operations {
            let mut arguments: Vec<String> = op
                .tensors
                .iter()
                .map(|a| {
                    format!("`{}` {} `{}`{}", a.name, a.dtypes, a.shape, if a.optional { " (optional)" } else { "" })
                })
                .collect();
            arguments.extend(op.scalars.iter().map(|a| match a.default {
                Some(default) => format!("`{}` {} (default {default})", a.name, a.kind),
                None => format!("`{}` {}", a.name, a.kind),
            }));
            let results: Vec<String> =
                op.results.iter().map(|r| format!("`{}` {} `{}`", r.name, r.dtype, r.shape)).collect();
            let (arguments, results) = (arguments.join("; "), results.join("; "));
            writeln!(text, "| `{}`: {} | {arguments} | {results} |", op.name, op.summary).unwrap();
        }
    }
    text
}

#[test]
fn the_documentation_lists_the_registry() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, table()).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap_or_default(), table(), "run with UPDATE_DOCS=1");
}
