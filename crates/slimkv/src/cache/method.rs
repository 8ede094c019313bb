//! Methods: what a person types, as a typed value.

use crate::format::{Axis, RowFormat, bits};
use crate::{DType, Error, Result};

/// How one layer stores its keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerMethod {
    /// Uncompressed f16: the baseline.
    Fp16,
    /// Group-affine codes with an exact tail (KIVI, arXiv 2402.02750).
    Kivi(Kivi),
}

/// The settings of [`LayerMethod::Kivi`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kivi {
    /// Bits of a key code: 1, 2, 3, 4 or 8.
    pub key_bits: u32,
    /// Bits of a value code: 1, 2, 3, 4 or 8.
    pub value_bits: u32,
    /// Tokens (keys) or channels (values) that share a scale and a zero point.
    pub group: usize,
    /// The newest tokens, at least this many, stay exact.
    pub residual: usize,
}

impl Kivi {
    /// The default settings at one width: groups of 32, 128 exact tokens.
    pub const fn new(bits: u32) -> Self {
        Kivi { key_bits: bits, value_bits: bits, group: 32, residual: 128 }
    }
}

impl LayerMethod {
    /// The formats of keys and values.
    pub fn formats(&self) -> (RowFormat, RowFormat) {
        match *self {
            LayerMethod::Fp16 => (RowFormat::Plain(DType::F16), RowFormat::Plain(DType::F16)),
            LayerMethod::Kivi(kivi) => {
                let side = |bits, axis| RowFormat::Affine { bits, group: kivi.group, axis, params: DType::F16 };
                (side(kivi.key_bits, Axis::Tokens), side(kivi.value_bits, Axis::Channels))
            }
        }
    }

    fn check(&self) -> Result<()> {
        const OP: &str = "Method";
        if let LayerMethod::Kivi(kivi) = self {
            bits::check_width(OP, "key_bits", kivi.key_bits)?;
            bits::check_width(OP, "value_bits", kivi.value_bits)?;
            if kivi.group == 0 || kivi.group > 1 << 16 {
                return Err(Error::value(OP, "group", "1 to 65536", kivi.group));
            }
            if kivi.residual > 1 << 24 {
                return Err(Error::value(OP, "residual", "at most 16777216", kivi.residual));
            }
        }
        Ok(())
    }
}

/// A method for every layer of a model: one default, and overrides for the first and last layers, which are the most
/// sensitive ones, or for any single layer.
///
/// ```
/// use slimkv::cache::Method;
/// for text in ["fp16", "kivi:2", "kivi:k4v2,group=64,residual=32", "kivi:2,first=2:8,last=2:k8v4", "kivi:4,first=1:fp16"] {
///     let method: Method = text.parse()?;
///     assert_eq!(method.to_string(), text);
/// }
/// # Ok::<(), slimkv::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Method {
    default: LayerMethod,
    first: Option<(usize, LayerMethod)>,
    last: Option<(usize, LayerMethod)>,
    layers: std::collections::BTreeMap<usize, LayerMethod>,
}

impl From<LayerMethod> for Method {
    fn from(default: LayerMethod) -> Self {
        Method { default, first: None, last: None, layers: Default::default() }
    }
}

impl Method {
    /// The names that begin a method, for help texts.
    pub const NAMES: [&'static str; 2] = ["fp16", "kivi"];

    /// The same method with another one in a single layer.
    pub fn with_layer(mut self, layer: usize, method: LayerMethod) -> Self {
        self.layers.insert(layer, method);
        self
    }

    /// The method of layer `i` of `layers`: a single-layer override, else `first`, else `last`, else the default.
    pub fn layer(&self, i: usize, layers: usize) -> LayerMethod {
        let within = |o: &Option<(usize, LayerMethod)>, distance: usize| o.filter(|(n, _)| distance < *n).map(|o| o.1);
        self.layers
            .get(&i)
            .copied()
            .or_else(|| within(&self.first, i))
            .or_else(|| within(&self.last, layers.saturating_sub(i + 1)))
            .unwrap_or(self.default)
    }

    /// The mean bits of one stored element, parameters and padding included, over a long sequence.
    pub fn bits_per_value(&self, layers: usize, head_dim: usize) -> f64 {
        let total: f64 = (0..layers.max(1))
            .map(|i| {
                let (keys, values) = self.layer(i, layers.max(1)).formats();
                (keys.bits_per_value(head_dim) + values.bits_per_value(head_dim)) / 2.0
            })
            .sum();
        total / layers.max(1) as f64
    }

    /// Checks all settings.
    pub(crate) fn check(&self) -> Result<()> {
        self.default.check()?;
        for over in [&self.first, &self.last].into_iter().flatten() {
            over.1.check()?;
        }
        self.layers.values().try_for_each(LayerMethod::check)
    }
}

const EXPECTED: &str = "fp16, kivi:BITS or kivi:kBITSvBITS (BITS 1, 2, 3, 4 or 8), then any of group=N, residual=N, \
     first=N:METHOD, last=N:METHOD, layer=I:METHOD with METHOD one of BITS, kBITSvBITS, fp16";

impl std::str::FromStr for Method {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::Parse { what: "method", text: text.into(), expected: EXPECTED.into() };
        let mut parts = text.trim().split(',').map(str::trim);
        let head = parts.next().unwrap_or_default();
        let (name, widths) = head.split_once(':').map_or((head, None), |(n, w)| (n, Some(w)));
        let default = match (name, widths) {
            ("fp16", None) => LayerMethod::Fp16,
            ("kivi", Some(widths)) => LayerMethod::Kivi(parse_widths(widths, Kivi::new(8)).ok_or_else(bad)?),
            _ => return Err(bad()),
        };
        let mut method = Method::from(default);
        let mut overrides = Vec::new();
        for part in parts {
            let (key, value) = part.split_once('=').ok_or_else(bad)?;
            match (key, &mut method.default) {
                ("group", LayerMethod::Kivi(kivi)) => kivi.group = value.parse().map_err(|_| bad())?,
                ("residual", LayerMethod::Kivi(kivi)) => kivi.residual = value.parse().map_err(|_| bad())?,
                ("first" | "last" | "layer", _) => {
                    let (n, spec) = value.split_once(':').ok_or_else(bad)?;
                    overrides.push((key, n.parse::<usize>().map_err(|_| bad())?, spec));
                }
                _ => return Err(bad()),
            }
        }
        // Overrides share the group and the residual of the default, wherever those stand in the text.
        let base = match method.default {
            LayerMethod::Kivi(kivi) => kivi,
            LayerMethod::Fp16 => Kivi::new(8),
        };
        for (key, n, spec) in overrides {
            let layer = match spec {
                "fp16" => LayerMethod::Fp16,
                widths => LayerMethod::Kivi(parse_widths(widths, base).ok_or_else(bad)?),
            };
            match key {
                "first" => method.first = Some((n, layer)),
                "last" => method.last = Some((n, layer)),
                _ => drop(method.layers.insert(n, layer)),
            }
        }
        method.check()?;
        Ok(method)
    }
}

/// Reads `4` or `k4v2`.
fn parse_widths(text: &str, base: Kivi) -> Option<Kivi> {
    let (key_bits, value_bits) = match text.strip_prefix('k') {
        Some(rest) => {
            let (k, v) = rest.split_once('v')?;
            (k.parse().ok()?, v.parse().ok()?)
        }
        None => {
            let bits = text.parse().ok()?;
            (bits, bits)
        }
    };
    Some(Kivi { key_bits, value_bits, ..base })
}

struct Widths(LayerMethod);

impl std::fmt::Display for Widths {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            LayerMethod::Fp16 => f.write_str("fp16"),
            LayerMethod::Kivi(k) if k.key_bits == k.value_bits => write!(f, "{}", k.key_bits),
            LayerMethod::Kivi(k) => write!(f, "k{}v{}", k.key_bits, k.value_bits),
        }
    }
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.default {
            LayerMethod::Fp16 => f.write_str("fp16")?,
            LayerMethod::Kivi(kivi) => {
                let usual = Kivi::new(8);
                write!(f, "kivi:{}", Widths(self.default))?;
                if kivi.group != usual.group {
                    write!(f, ",group={}", kivi.group)?;
                }
                if kivi.residual != usual.residual {
                    write!(f, ",residual={}", kivi.residual)?;
                }
            }
        }
        for (key, over) in [("first", &self.first), ("last", &self.last)] {
            if let Some((n, method)) = over {
                write!(f, ",{key}={n}:{}", Widths(*method))?;
            }
        }
        for (i, method) in &self.layers {
            write!(f, ",layer={i}:{}", Widths(*method))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_reach_their_layers() {
        let method: Method = "kivi:2,first=2:8,last=1:fp16,layer=5:k4v2,group=64".parse().unwrap();
        let bits = |i| match method.layer(i, 8) {
            LayerMethod::Fp16 => (16, 16, 0),
            LayerMethod::Kivi(k) => (k.key_bits, k.value_bits, k.group),
        };
        let all: Vec<_> = (0..8).map(bits).collect();
        let (two, eight) = ((2, 2, 64), (8, 8, 64));
        assert_eq!(all, [eight, eight, two, two, two, (4, 2, 64), two, (16, 16, 0)]);
    }

    #[test]
    fn bits_count_parameters_and_padding() {
        let bits = |text: &str| text.parse::<Method>().unwrap().bits_per_value(4, 128);
        assert_eq!(bits("fp16"), 16.0);
        assert_eq!(bits("kivi:4"), 5.0);
        assert_eq!(bits("kivi:k8v4"), 7.0);
        assert_eq!(bits("kivi:3"), 13.0 * 32.0 / 128.0 + 1.0);
    }

    #[test]
    fn bad_text_is_an_error() {
        for text in [
            "",
            "kivi",
            "kivi:5",
            "kivi:k4",
            "fp16:3",
            "kivi:4,group=0",
            "kivi:4,group",
            "kivi:4,colour=2",
            "q4_0",
            "fp16,group=3",
            "kivi:4,first=2",
        ] {
            assert!(text.parse::<Method>().is_err(), "{text}");
        }
    }
}
