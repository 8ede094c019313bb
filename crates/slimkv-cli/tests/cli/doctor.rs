//! `slimkv doctor` on whatever machine this is.

use std::path::Path;

use super::slimkv;

#[test]
fn every_kind_is_there_or_has_a_reason() {
    let here = Path::new(".");
    let report: serde_json::Value = serde_json::from_str(&slimkv(here, &["doctor", "--json"]).ok()).unwrap();
    let devices = report["devices"].as_array().unwrap();
    for kind in ["cpu", "cuda", "vulkan", "metal"] {
        let of_kind: Vec<_> = devices.iter().filter(|d| d["kind"] == kind).collect();
        assert!(!of_kind.is_empty(), "{kind}");
        for device in of_kind {
            let there = device["available"] == true;
            assert_eq!(there, device["device"].is_string(), "{device}");
            assert_ne!(there, device["reason"].is_string(), "{device}");
        }
    }
    assert!(report["memory"]["total_bytes"].as_u64().unwrap() > 1 << 28);
    assert!(slimkv(here, &["doctor"]).ok().contains("kernel cache"));
}
