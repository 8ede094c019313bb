//! The shape of a benchmark: `b=1,hq=32,hkv=8,d=128,s=32768`.

use std::str::FromStr;

use crate::failure::Failure;

/// Sizes of one case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Sequences.
    pub b: usize,
    /// Query heads.
    pub hq: usize,
    /// KV heads.
    pub hkv: usize,
    /// Head dimension.
    pub d: usize,
    /// Tokens in the cache.
    pub s: usize,
    /// Queries of a sequence.
    pub sq: usize,
}

impl Shape {
    /// Query heads of a KV head.
    pub fn group(&self) -> usize {
        self.hq / self.hkv
    }
}

impl FromStr for Shape {
    type Err = Failure;

    /// What is left out keeps the default of an 8-billion-parameter Llama; `sq` is left at 0 for the command to choose.
    fn from_str(text: &str) -> Result<Self, Failure> {
        let bad = |found: &str| {
            let expected = "b=1,hq=32,hkv=8,d=128,s=32768[,sq=1], all positive, hq a multiple of hkv";
            Failure::argument("bench", "--shape", expected, format!("`{found}`"))
        };
        let mut shape = Shape { b: 1, hq: 32, hkv: 8, d: 128, s: 32768, sq: 0 };
        for pair in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| bad(pair))?;
            let value: usize = value.trim().parse().ok().filter(|&n| n > 0).ok_or_else(|| bad(pair))?;
            *match key.trim() {
                "b" => &mut shape.b,
                "hq" => &mut shape.hq,
                "hkv" => &mut shape.hkv,
                "d" => &mut shape.d,
                "s" => &mut shape.s,
                "sq" => &mut shape.sq,
                _ => return Err(bad(pair)),
            } = value;
        }
        if !shape.hq.is_multiple_of(shape.hkv) {
            return Err(bad(text));
        }
        let values = [shape.b, shape.hkv, shape.d, shape.s].iter().try_fold(1usize, |n, &x| n.checked_mul(x));
        if values.is_none_or(|n| n > 1 << 40) {
            return Err(bad(text));
        }
        Ok(shape)
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shape { b, hq, hkv, d, s, sq } = self;
        write!(f, "b={b},hq={hq},hkv={hkv},d={d},s={s}")?;
        if *sq > 1 { write!(f, ",sq={sq}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_read_back() {
        let shape: Shape = "b=2,hq=8,hkv=2,d=64,s=100".parse().unwrap();
        assert_eq!(shape.to_string(), "b=2,hq=8,hkv=2,d=64,s=100");
        assert_eq!(shape.group(), 4);
        for bad in ["b", "b=0", "hq=3,hkv=2", "x=1", "s=-1", "s=1099511627776,b=1099511627776"] {
            assert!(bad.parse::<Shape>().is_err(), "{bad}");
        }
    }
}
