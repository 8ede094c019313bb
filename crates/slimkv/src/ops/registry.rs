//! One list of all operations. The command line, the tests of every operation on every device, and the documentation
//! table are made from it.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::{affine, attention, packing};
use crate::{DType, Device, Error, Result, Tensor};

/// An array argument of an operation.
#[derive(Debug, Clone, Copy)]
pub struct TensorArg {
    /// Its name.
    pub name: &'static str,
    /// The accepted dtypes, in words.
    pub dtypes: &'static str,
    /// The shape, in words.
    pub shape: &'static str,
    /// Whether it may be left out.
    pub optional: bool,
}

/// A scalar argument of an operation.
#[derive(Debug, Clone, Copy)]
pub struct ScalarArg {
    /// Its name.
    pub name: &'static str,
    /// The accepted values, in words.
    pub kind: &'static str,
    /// What stands where it is left out; `None`: it must be given.
    pub default: Option<&'static str>,
}

/// A result of an operation.
#[derive(Debug, Clone, Copy)]
pub struct ResultArg {
    /// Its name.
    pub name: &'static str,
    /// Its dtype, in words.
    pub dtype: &'static str,
    /// Its shape, in words.
    pub shape: &'static str,
}

/// Arrays by name and scalars as text: an operation's arguments as the command line has them.
#[derive(Debug, Clone, Default)]
pub struct Inputs {
    /// The arrays.
    pub tensors: BTreeMap<String, Tensor>,
    /// The scalars.
    pub settings: BTreeMap<String, String>,
}

/// An operation of the contract.
pub struct Operation {
    /// The public name.
    pub name: &'static str,
    /// The family, which is its module.
    pub family: &'static str,
    /// One line that says what it computes.
    pub summary: &'static str,
    /// The array arguments.
    pub tensors: &'static [TensorArg],
    /// The scalar arguments.
    pub scalars: &'static [ScalarArg],
    /// The results.
    pub results: &'static [ResultArg],
    run: fn(&Call<'_>) -> Result<Vec<Tensor>>,
}

impl Operation {
    /// Runs the operation on `device`: arrays are moved there first, results stay there. Arrays that the operation does
    /// not know are ignored; scalars that it does not know are an error.
    pub fn run(&self, inputs: &Inputs, device: &Device) -> Result<Vec<(&'static str, Tensor)>> {
        if let Some(key) = inputs.settings.keys().find(|k| !self.scalars.iter().any(|s| s.name == **k)) {
            let known: Vec<_> = self.scalars.iter().map(|s| s.name).collect();
            let expected = if known.is_empty() { "no setting at all".into() } else { known.join(", ") };
            return Err(Error::value(self.name, "settings", expected, format!("`{key}`")));
        }
        let mut tensors = BTreeMap::new();
        for arg in self.tensors {
            if let Some(tensor) = inputs.tensors.get(arg.name) {
                tensors.insert(arg.name, tensor.to_device(device)?);
            }
        }
        let results = (self.run)(&Call { op: self, tensors, settings: &inputs.settings })?;
        debug_assert_eq!(results.len(), self.results.len());
        Ok(self.results.iter().map(|r| r.name).zip(results).collect())
    }
}

impl std::fmt::Debug for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Operation({})", self.name)
    }
}

/// The arguments of one call, looked up by name.
pub(super) struct Call<'a> {
    op: &'a Operation,
    tensors: BTreeMap<&'static str, Tensor>,
    settings: &'a BTreeMap<String, String>,
}

impl Call<'_> {
    fn tensor(&self, name: &'static str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| {
            let arg = self.op.tensors.iter().find(|a| a.name == name).expect("declared in the registry");
            Error::Missing { op: self.op.name, arg: name, expected: format!("{} {}", arg.dtypes, arg.shape) }
        })
    }

    /// A scalar as given, or its default; an error where it has none.
    fn scalar<T: FromStr>(&self, name: &'static str) -> Result<T> {
        let arg = self.op.scalars.iter().find(|a| a.name == name).expect("declared in the registry");
        let missing = || Error::Missing { op: self.op.name, arg: name, expected: arg.kind.into() };
        let text = self.settings.get(name).map(String::as_str).or(arg.default).ok_or_else(missing)?;
        text.parse().map_err(|_| Error::value(self.op.name, name, arg.kind, text))
    }

    /// A scalar whose default is computed, or which is not needed at all.
    fn given<T: FromStr>(&self, name: &'static str) -> Result<Option<T>> {
        if self.settings.contains_key(name) { self.scalar(name).map(Some) } else { Ok(None) }
    }

    fn param_dtype(&self) -> Result<DType> {
        let dtype = self.scalar::<DType>("param_dtype")?;
        match dtype {
            DType::F16 | DType::F32 => Ok(dtype),
            other => Err(Error::value(self.op.name, "param_dtype", "f16 or f32", other)),
        }
    }
}

/// Every operation, in the order of the contract.
pub fn registry() -> &'static [Operation] {
    OPERATIONS
}

/// The operation of this name.
pub fn find(name: &str) -> Result<&'static Operation> {
    OPERATIONS.iter().find(|op| op.name == name).ok_or_else(|| Error::Parse {
        what: "operation",
        text: name.into(),
        expected: OPERATIONS.iter().map(|op| op.name).collect::<Vec<_>>().join(", "),
    })
}

const FLOATS: &str = "f16, bf16 or f32";

const fn tensor(name: &'static str, dtypes: &'static str, shape: &'static str) -> TensorArg {
    TensorArg { name, dtypes, shape, optional: false }
}

const fn required(name: &'static str, kind: &'static str) -> ScalarArg {
    ScalarArg { name, kind, default: None }
}

const fn scalar(name: &'static str, kind: &'static str, default: &'static str) -> ScalarArg {
    ScalarArg { name, kind, default: Some(default) }
}

const fn result(name: &'static str, dtype: &'static str, shape: &'static str) -> ResultArg {
    ResultArg { name, dtype, shape }
}

const BITS: ScalarArg = required("bits", "1, 2, 3, 4 or 8");
const AXIS: ScalarArg = required("axis", "-2 (groups of tokens) or -1 (groups of channels)");
const GROUP_SIZE: ScalarArg = required("group_size", "a whole number from 1");
const EPS: ScalarArg = scalar("eps", "a number from 0", "1e-8");
const SCALE: ScalarArg = scalar("scale", "a number", "1/sqrt(D)");
const BITS_WHEN_PACKED: &str = "1, 2, 3, 4 or 8, when the codes are packed";
const NEEDED_WHEN_PACKED: &str = "none; needed when packed";

static OPERATIONS: &[Operation] = &[
    Operation {
        name: "turboquant_bit_pack",
        family: "packing",
        summary: "packs small codes into 32-bit words",
        tensors: &[tensor("indices", "u8", "[..., L]")],
        scalars: &[BITS],
        results: &[result("packed", "u32", "[..., ceil(L/EPW)], EPW = 32/bits")],
        run: |c| Ok(vec![packing::turboquant_bit_pack(c.tensor("indices")?, c.scalar("bits")?)?]),
    },
    Operation {
        name: "turboquant_bit_unpack",
        family: "packing",
        summary: "unpacks 32-bit words into codes",
        tensors: &[tensor("packed", "u32", "[..., ceil(L/EPW)]")],
        scalars: &[BITS, required("original_length", "the number L of codes in a row")],
        results: &[result("indices", "u8", "[..., L]")],
        run: |c| {
            let (bits, length) = (c.scalar("bits")?, c.scalar("original_length")?);
            Ok(vec![packing::turboquant_bit_unpack(c.tensor("packed")?, bits, length)?])
        },
    },
    Operation {
        name: "kivi_group_quant_dequant",
        family: "affine",
        summary: "rounds to group-affine codes and back",
        tensors: &[tensor("x", FLOATS, "[..., S, D]")],
        scalars: &[AXIS, GROUP_SIZE, required("levels", "2^bits - 1, up to 255"), EPS],
        results: &[result("x_hat", "that of x", "that of x")],
        run: |c| {
            let (axis, group) = (c.scalar("axis")?, c.scalar("group_size")?);
            let (levels, eps) = (c.scalar("levels")?, c.scalar("eps")?);
            Ok(vec![affine::kivi_group_quant_dequant(c.tensor("x")?, axis, group, levels, eps)?])
        },
    },
    Operation {
        name: "kivi_group_quantize",
        family: "affine",
        summary: "quantises to group-affine codes with a scale and a zero point a group",
        tensors: &[tensor("x", FLOATS, "[..., S, D]")],
        scalars: &[
            AXIS,
            GROUP_SIZE,
            BITS,
            scalar("packed", "true or false", "true"),
            scalar("param_dtype", "f16 or f32", "f32"),
            EPS,
        ],
        results: &[
            result("codes", "u32 (packed) or u8", "[..., S, ceil(D/EPW)] or [..., S, D]"),
            result("scale", "param_dtype", "[..., ceil(S/g), D] (axis -2) or [..., S, ceil(D/g)] (axis -1)"),
            result("zero", "param_dtype", "that of scale"),
        ],
        run: |c| {
            let q = affine::kivi_group_quantize(
                c.tensor("x")?,
                affine::GroupQuantize {
                    axis: c.scalar("axis")?,
                    group_size: c.scalar("group_size")?,
                    bits: c.scalar("bits")?,
                    packed: c.scalar("packed")?,
                    param_dtype: c.param_dtype()?,
                    eps: c.scalar("eps")?,
                },
            )?;
            Ok(vec![q.codes, q.scale, q.zero])
        },
    },
    Operation {
        name: "kivi_group_dequantize",
        family: "affine",
        summary: "decodes group-affine codes",
        tensors: &[
            tensor("codes", "u8 or packed u32", "[..., S, D] or [..., S, ceil(D/EPW)]"),
            tensor("scale", "f16 or f32", "[..., ceil(S/g), D] (axis -2) or [..., S, ceil(D/g)] (axis -1)"),
            tensor("zero", "that of scale", "that of scale"),
        ],
        scalars: &[
            AXIS,
            GROUP_SIZE,
            scalar("bits", BITS_WHEN_PACKED, NEEDED_WHEN_PACKED),
            scalar("original_length", "the number D of channels, when the codes are packed", NEEDED_WHEN_PACKED),
        ],
        results: &[result("x", "f16", "[..., S, D]")],
        run: |c| {
            Ok(vec![affine::kivi_group_dequantize(
                c.tensor("codes")?,
                c.tensor("scale")?,
                c.tensor("zero")?,
                affine::GroupDequantize {
                    axis: c.scalar("axis")?,
                    group_size: c.scalar("group_size")?,
                    bits: c.given("bits")?,
                    original_length: c.given("original_length")?,
                },
            )?])
        },
    },
    Operation {
        name: "scalar_fused_decode_attend",
        family: "affine",
        summary: "attention straight from group-affine keys and values",
        tensors: &[
            tensor("q", FLOATS, "[B, Hq, Sq, D]"),
            tensor("k_codes", "u8 or packed u32", "[B, Hkv, S, D] or [B, Hkv, S, W]"),
            tensor("k_scale", "f16 or f32", "[B, Hkv, ceil(S/g), D]"),
            tensor("k_zero", "that of k_scale", "[B, Hkv, ceil(S/g), D]"),
            tensor("v_codes", "u8 or packed u32", "[B, Hkv, S, D] or [B, Hkv, S, W]"),
            tensor("v_scale", "f16 or f32", "[B, Hkv, S, ceil(D/g)]"),
            tensor("v_zero", "that of v_scale", "[B, Hkv, S, ceil(D/g)]"),
        ],
        scalars: &[
            GROUP_SIZE,
            scalar("k_bits", BITS_WHEN_PACKED, NEEDED_WHEN_PACKED),
            scalar("v_bits", BITS_WHEN_PACKED, NEEDED_WHEN_PACKED),
            SCALE,
            scalar("causal", "true or false", "false"),
            scalar("nsg", "a whole number from 1; a tuning hint that never changes results", "none"),
        ],
        results: &[result("out", "f16", "[B, Hq, Sq, D]"), result("lse", "f32", "[B, Hq, Sq]")],
        run: |c| {
            let attended = affine::scalar_fused_decode_attend(affine::ScalarFusedDecodeAttend {
                q: c.tensor("q")?,
                k_codes: c.tensor("k_codes")?,
                k_scale: c.tensor("k_scale")?,
                k_zero: c.tensor("k_zero")?,
                v_codes: c.tensor("v_codes")?,
                v_scale: c.tensor("v_scale")?,
                v_zero: c.tensor("v_zero")?,
                group_size: c.scalar("group_size")?,
                k_bits: c.given("k_bits")?,
                v_bits: c.given("v_bits")?,
                scale: c.given("scale")?,
                causal: c.scalar("causal")?,
                nsg: c.given("nsg")?,
            })?;
            Ok(vec![attended.out, attended.lse])
        },
    },
    Operation {
        name: "flash_prefill_attend",
        family: "attention",
        summary: "attention over uncompressed keys and values",
        tensors: &[
            tensor("q", FLOATS, "[B, Hq, Sq, D]"),
            tensor("k", FLOATS, "[B, Hkv, S, D]"),
            tensor("v", FLOATS, "[B, Hkv, S, D]"),
        ],
        scalars: &[SCALE, scalar("causal", "true or false", "true")],
        results: &[result("out", "that of q", "[B, Hq, Sq, D]"), result("lse", "f32", "[B, Hq, Sq]")],
        run: |c| {
            let (q, k, v) = (c.tensor("q")?, c.tensor("k")?, c.tensor("v")?);
            let attended = attention::flash_prefill_attend(q, k, v, c.given("scale")?, c.scalar("causal")?)?;
            Ok(vec![attended.out, attended.lse])
        },
    },
    Operation {
        name: "merge_attention",
        family: "attention",
        summary: "joins two attentions over disjoint tokens into one over their union",
        tensors: &[
            tensor("out_a", FLOATS, "[..., D]"),
            tensor("lse_a", "f32", "[...]"),
            tensor("out_b", "that of out_a", "[..., D]"),
            tensor("lse_b", "f32", "[...]"),
        ],
        scalars: &[],
        results: &[result("out", "that of out_a", "[..., D]"), result("lse", "f32", "[...]")],
        run: |c| {
            let (a, b) = ((c.tensor("out_a")?, c.tensor("lse_a")?), (c.tensor("out_b")?, c.tensor("lse_b")?));
            let attended = attention::merge_attention(a.0, a.1, b.0, b.1)?;
            Ok(vec![attended.out, attended.lse])
        },
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_setting_is_an_error_that_lists_the_known_ones() {
        let inputs = Inputs { settings: [("bit".to_string(), "4".to_string())].into(), ..Default::default() };
        let error = find("turboquant_bit_pack").unwrap().run(&inputs, &Device::cpu()).unwrap_err();
        assert_eq!(error.to_string(), "turboquant_bit_pack: argument `settings`: expected bits, found `bit`");
    }

    #[test]
    fn a_missing_tensor_is_named() {
        let inputs = Inputs { settings: [("bits".to_string(), "4".to_string())].into(), ..Default::default() };
        let error = find("turboquant_bit_pack").unwrap().run(&inputs, &Device::cpu()).unwrap_err();
        assert_eq!(error.to_string(), "turboquant_bit_pack: argument `indices`: expected u8 [..., L], found nothing");
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = registry().iter().map(|op| op.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), registry().len());
    }
}
