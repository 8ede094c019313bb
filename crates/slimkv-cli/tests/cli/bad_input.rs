//! A wrong call is exit code 2 with one line, and nothing is written.

use std::collections::HashMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::{names, slimkv};

/// Writes zeros under these names, dtypes and shapes.
fn write(path: &Path, tensors: &[(&str, Dtype, &[usize])]) {
    let zeros = vec![0u8; 1 << 16];
    let views: HashMap<&str, TensorView> = tensors
        .iter()
        .map(|(name, dtype, shape)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (*name, TensorView::new(*dtype, shape.to_vec(), &zeros[..bytes]).unwrap())
        })
        .collect();
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn operations_refuse_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    write(&here.join("x.st"), &[("x", Dtype::F32, &[4, 64])]);
    write(&here.join("int.st"), &[("x", Dtype::I32, &[4, 64])]);
    write(&here.join("double.st"), &[("x", Dtype::F64, &[4, 64])]);
    write(&here.join("other.st"), &[("y", Dtype::F32, &[4, 64])]);
    std::fs::write(here.join("broken.st"), "not safetensors").unwrap();
    std::fs::write(here.join("empty.st"), "").unwrap();
    let before = names(here);
    let quantize = |input: &str, settings: &[&str]| {
        let mut args = vec!["op", "kivi_group_quantize", "--in", input, "--out", "out.st"];
        settings.iter().for_each(|s| args.extend(["--set", s]));
        slimkv(here, &args)
    };
    let good = ["bits=4", "axis=-1", "group_size=32"];
    quantize("x.st", &["bits=5", "axis=-1", "group_size=32"]).refused(&["kivi_group_quantize", "bits", "8", "found 5"]);
    quantize("x.st", &["bits=4", "axis=0", "group_size=32"]).refused(&["axis", "-2", "found 0"]);
    quantize("x.st", &["bits=4", "axis=-1"]).refused(&["group_size", "found nothing"]);
    quantize("x.st", &["bits=4", "axis=-1", "group_size=32", "colour=red"]).refused(&["colour"]);
    quantize("x.st", &["bits=4", "bits=2", "axis=-1", "group_size=32"]).refused(&["bits", "second"]);
    quantize("x.st", &["bits"]).refused(&["--set", "KEY=VALUE"]);
    quantize("int.st", &good).refused(&["kivi_group_quantize", "`x`", "f16", "i32"]);
    quantize("double.st", &good).refused(&["kivi_group_quantize", "`x`", "f64"]);
    quantize("other.st", &good).code_is_two_and_mentions("`x`");
    quantize("broken.st", &good).refused(&["--in", "broken.st"]);
    quantize("empty.st", &good).refused(&["--in", "empty.st"]);
    quantize("missing.st", &good).refused(&["--in", "missing.st"]);
    quantize(".", &good).refused(&["--in"]);
    slimkv(here, &["op", "no_such", "--in", "x.st", "--out", "out.st"]).refused(&["no_such", "kivi_group_quantize"]);
    slimkv(here, &["op", "kivi_group_quantize"]).refused(&["--in", "--out"]);
    let elsewhere = ["op", "kivi_group_quantize", "--in", "x.st", "--out", "no/folder/out.st"];
    slimkv(here, &elsewhere).refused(&["--out", "folder"]);
    let gpu = ["op", "kivi_group_quantize", "--in", "x.st", "--out", "out.st", "--device", "tpu"];
    slimkv(here, &gpu).refused(&["tpu", "cuda"]);
    assert_eq!(names(here), before);
}

impl super::Run {
    /// As `refused`, where a warning may come before the line.
    #[track_caller]
    fn code_is_two_and_mentions(self, word: &str) {
        assert_eq!(self.code, Some(2), "{}", self.stderr);
        let last = self.stderr.lines().last().unwrap_or_default();
        assert!(last.starts_with("error: ") && last.contains(word), "{}", self.stderr);
    }
}

#[test]
fn an_unknown_tensor_is_ignored_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    write(&here.join("x.st"), &[("x", Dtype::F32, &[4, 64]), ("extra", Dtype::F64, &[3])]);
    let args = ["op", "kivi_group_quantize", "--in", "x.st", "--out", "out.st"];
    let settings = ["--set", "bits=4", "--set", "axis=-1", "--set", "group_size=32"];
    let run = slimkv(here, &[&args[..], &settings[..]].concat());
    assert!(run.stderr.contains("warning") && run.stderr.contains("extra"), "{}", run.stderr);
    run.ok();
    assert_eq!(names(here), ["out.st", "x.st"]);
}

#[test]
fn other_commands_refuse_too() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    slimkv(here, &["run", "--method", "kivi:5", "hello"]).refused(&["key_bits", "found 5"]);
    slimkv(here, &["run", "--method", "q4_0", "hello"]).refused(&["method", "q4_0", "kivi"]);
    slimkv(here, &["run", "--temperature=-1", "hello"]).refused(&["--temperature", "-1"]);
    slimkv(here, &["run", "--model", "none.gguf", "hello"]).refused(&["none.gguf"]);
    slimkv(here, &["eval", "--methods", "fp16,mp3"]).refused(&["method", "mp3"]);
    slimkv(here, &["eval", "--plot", "q.pdf"]).refused(&["--plot", ".svg", "q.pdf"]);
    slimkv(here, &["eval", "--json", "no/folder/x.json"]).refused(&["--json", "folder"]);
    slimkv(here, &["eval", "--model", "none.gguf", "--text", "none.txt"]).refused(&["--text", "none.txt"]);
    slimkv(here, &["bench", "decode", "--shape", "s=0"]).refused(&["--shape", "s=0"]);
    slimkv(here, &["bench", "decode", "--shape", "hq=3,hkv=2"]).refused(&["--shape", "hq"]);
    slimkv(here, &["bench", "sleep"]).refused(&["sleep", "decode"]);
    slimkv(here, &["plan"]).refused(&["plan", "--model", "--layers"]);
    slimkv(here, &["plan", "--memory", "lots", "--model", "m.gguf"]).refused(&["--memory", "8GiB", "lots"]);
    slimkv(here, &["fly"]).refused(&["fly"]);
    assert!(names(here).is_empty());
}
