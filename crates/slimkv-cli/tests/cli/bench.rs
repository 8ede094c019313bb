//! `slimkv bench` at sizes that take no time.

use super::{json, keys, slimkv};

const KEYS: [&str; 15] = [
    "baseline",
    "baseline_us",
    "bytes",
    "device",
    "format",
    "gb_per_s",
    "kind",
    "max_abs_error",
    "median_us",
    "min_us",
    "roofline_fraction",
    "roofline_gb_per_s",
    "shape",
    "speedup",
    "threads",
];

#[test]
fn every_kind_writes_the_promised_keys() {
    let folder = tempfile::tempdir().unwrap();
    for kind in ["decode", "prefill", "encode", "append"] {
        let shape = "b=2,hq=4,hkv=2,d=64,s=256,sq=24";
        let shape = if kind == "decode" { "b=2,hq=4,hkv=2,d=64,s=256" } else { shape };
        let args = ["bench", kind, "--format", "fp16,kivi:k4v2,group=32", "--shape", shape, "--threads", "1", "--warm"];
        let table = slimkv(folder.path(), &[&args[..], &["--json", "bench.json"]].concat()).ok();
        assert!(table.contains("kivi:k4v2,group=32"), "{table}");
        let records = json(&folder.path().join("bench.json"));
        let records = records.as_array().unwrap();
        assert!(records.len() >= 2);
        for record in records {
            assert_eq!(keys(record), KEYS);
            assert_eq!(
                (&record["kind"], &record["threads"], &record["device"]),
                (&kind.into(), &1.into(), &"cpu".into())
            );
            assert!(record["median_us"].as_f64().unwrap() >= record["min_us"].as_f64().unwrap());
            assert!(record["roofline_gb_per_s"].as_f64().unwrap() > 0.0);
            let error = record["max_abs_error"].as_f64().unwrap();
            assert!(error <= if matches!(kind, "decode" | "prefill") { 2e-3 } else { 0.0 }, "{record}");
        }
        if kind == "decode" {
            // Two sides, 2 x 2 heads, 256 tokens of 64 values: 2 bytes each; or 4 and 2 bits, and two f16 per 32 values.
            let values = 2 * 2 * 256 * 64;
            assert_eq!(records[0]["bytes"], 2 * 2 * values);
            assert_eq!(records[1]["bytes"], values / 2 + values / 4 + 2 * (values / 32 * 4));
        }
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_with_130_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // Cold: it takes seconds to fill that many caches.
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_slimkv"))
        .args(["bench", "decode", "--json", "bench.json"])
        .current_dir(folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    // SAFETY: the process is our child and has not been waited for, so the id is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) }, 0);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(super::names(folder.path()).is_empty());
}
