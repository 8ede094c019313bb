//! Every golden case of every operation, on every device.

mod common;

use std::collections::BTreeMap;

use common::{Tolerance, devices, difference, golden, read_safetensors};
use serde::Deserialize;
use slimkv::ops::{self, Inputs};

#[derive(Deserialize)]
struct Case {
    operation: String,
    case: String,
    inputs: String,
    outputs: String,
    settings: BTreeMap<String, serde_json::Value>,
    tolerance: BTreeMap<String, Limit>,
}

#[derive(Deserialize)]
struct Limit {
    mode: String,
    atol: Option<f64>,
}

impl Limit {
    fn tolerance(&self) -> Tolerance {
        match (self.mode.as_str(), self.atol) {
            ("exact", None) => Tolerance::Exact,
            ("value", None) => Tolerance::Value,
            ("close", Some(atol)) => Tolerance::Close(atol),
            _ => panic!("tolerance `{}`", self.mode),
        }
    }
}

fn cases() -> Vec<Case> {
    serde_json::from_str(&std::fs::read_to_string(golden().join("cases.json")).unwrap()).unwrap()
}

#[test]
fn every_case_on_every_device() {
    let mut failures = Vec::new();
    let mut checked = 0;
    for case in cases() {
        let settings = case
            .settings
            .iter()
            .map(|(k, v)| (k.clone(), v.as_str().map_or_else(|| v.to_string(), str::to_string)))
            .collect();
        let inputs = Inputs { tensors: read_safetensors(&golden().join(&case.inputs)), settings };
        let expected = read_safetensors(&golden().join(&case.outputs));
        let operation = ops::find(&case.operation).unwrap();
        for device in devices() {
            let label = format!("{} {} on {device}", case.operation, case.case);
            match operation.run(&inputs, &device) {
                Err(error) => failures.push(format!("{label}: {error}")),
                Ok(results) => {
                    assert_eq!(results.len(), expected.len(), "{label}");
                    for (name, found) in results {
                        checked += 1;
                        assert_eq!(found.device(), device, "{label}: {name}");
                        let difference = difference(&found, &expected[name], case.tolerance[name].tolerance());
                        failures.extend(difference.map(|d| format!("{label}: {name}: {d}")));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} of {checked} failed:\n{}", failures.len(), failures.join("\n"));
    assert!(checked >= 48, "only {checked} results were checked");
}

#[test]
fn every_operation_has_a_case() {
    let cases = cases();
    for operation in ops::registry() {
        assert!(cases.iter().any(|c| c.operation == operation.name), "{operation:?} has no golden case");
    }
}
