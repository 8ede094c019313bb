//! `slimkv plan` against arithmetic by hand.

use super::{json, keys, slimkv};

#[test]
fn contexts_are_the_longest_that_fit() {
    let folder = tempfile::tempdir().unwrap();
    let args = [
        "plan",
        "--layers",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "64",
        "--weights-bytes",
        "1MiB",
        "--memory",
        "9MiB",
        "--methods",
        "fp16,kivi:4",
        "--context",
        "1024",
        "--json",
        "plan.json",
    ];
    let table = slimkv(folder.path(), &args).ok();
    assert!(table.contains("fp16") && table.contains("kivi:4"));
    let plan = json(&folder.path().join("plan.json"));
    let (fp16, kivi) = (&plan[0], &plan[1]);
    assert_eq!(
        keys(fp16),
        [
            "bits_per_value",
            "bytes_per_token",
            "context",
            "context_bytes",
            "max_context",
            "memory_bytes",
            "method",
            "weights_bytes"
        ]
    );
    // Two sides of 4 layers with 2 heads of 64 values, of 2 bytes each.
    assert_eq!(fp16["bytes_per_token"], 2.0 * 4.0 * 2.0 * 64.0 * 2.0);
    assert_eq!(fp16["context_bytes"], 1024 * 2048);
    // 8 MiB are left: 4096 tokens exactly, or the whole blocks below.
    let longest = fp16["max_context"].as_u64().unwrap();
    assert!((3072..=4096).contains(&longest), "{longest}");
    assert_eq!(kivi["bits_per_value"], 5.0);
    assert!(kivi["max_context"].as_u64().unwrap() > 2 * longest, "{kivi}");
}
