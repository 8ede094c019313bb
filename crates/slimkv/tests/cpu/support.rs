//! Random rows and comparisons.

use slimkv::attend::{Attended, Options, Segment, oracle};
use slimkv::cpu::{Isa, with_isa};
use slimkv::format::affine::Names;
use slimkv::format::{Affine, Axis, Plain, Rows, affine};
use slimkv::{DType, Result, Tensor};

pub const OP: &str = "test";

/// A small counter-based generator: the same numbers on every machine.
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D)
    }

    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z >> 32) as u32
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Close to a standard normal number: twelve uniform ones.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.bits() as f32 / 4_294_967_296.0).sum::<f32>() - 6.0
    }

    pub fn tensor(&mut self, shape: &[usize], dtype: DType) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.normal()).collect();
        Tensor::from_vec(values, shape).unwrap().to_float(dtype).unwrap()
    }
}

/// How rows are stored.
#[derive(Debug, Clone, Copy)]
pub enum Store {
    Plain(DType),
    Affine { bits: u32, group: usize, axis: Axis, packed: bool, params: DType },
}

impl Store {
    pub fn kivi(bits: u32, axis: Axis) -> Self {
        Store::Affine { bits, group: 32, axis, packed: true, params: DType::F16 }
    }

    pub fn any(random: &mut Random) -> Self {
        if random.below(3) == 0 {
            return Store::Plain(random.pick(&[DType::F16, DType::BF16, DType::F32]));
        }
        Store::Affine {
            bits: random.pick(&[1, 2, 3, 4, 8]),
            group: random.pick(&[1, 5, 16, 32, 32, 32, 64, 100, 128]),
            axis: random.pick(&[Axis::Tokens, Axis::Channels]),
            packed: random.below(3) != 0,
            params: random.pick(&[DType::F16, DType::F32]),
        }
    }

    /// Encodes `x` `[B, H, S, D]` with the scalar code.
    pub fn rows(self, x: &Tensor) -> Rows {
        match self {
            Store::Plain(dtype) => Rows::Plain(Plain::new(OP, "x", x.to_float(dtype).unwrap()).unwrap()),
            Store::Affine { bits, group, axis, packed, params } => {
                let quantize = || affine::quantize(OP, x, axis, group, bits, 1e-8, packed, params);
                let (codes, scale, zero) = with_isa(Isa::Scalar, quantize).unwrap().unwrap();
                let names = Names { op: OP, codes: "codes", scale: "scale", zero: "zero", bits: "bits" };
                let d = x.shape()[3];
                Rows::Affine(Affine::new(names, codes, scale, zero, bits, group, axis, d).unwrap())
            }
        }
    }
}

pub fn options(head_dim: usize, causal: bool, window: usize, out_dtype: DType) -> Options {
    Options { scale: 1.0 / (head_dim as f32).sqrt(), causal, window, out_dtype }
}

/// Attends on `isa`.
pub fn attend(isa: Isa, q: &Tensor, segments: &[Segment], options: Options) -> Result<Attended> {
    with_isa(isa, || slimkv::attend::attend(OP, q, segments, options)).unwrap()
}

/// Compares with the float64 oracle at the tolerance of the output's dtype.
#[track_caller]
pub fn check(isa: Isa, q: &Tensor, segments: &[Segment], options: Options, what: &str) {
    let exact = oracle::attend(OP, q, segments, options).unwrap();
    let found = attend(isa, q, segments, options).unwrap();
    let out = found.out.to_f32_vec().unwrap();
    let peak = exact.out.iter().fold(1.0f64, |m, x| m.max(x.abs()));
    let tolerance = match options.out_dtype {
        DType::F32 => 1e-5 * peak,
        DType::F16 => 2e-3,
        _ => 2e-3 + peak / 256.0,
    };
    assert_eq!(found.out.dtype(), options.out_dtype);
    let worst = out.iter().zip(&exact.out).map(|(&a, &b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
    assert!(out.iter().all(|x| x.is_finite()), "{isa}: {what}: not finite");
    assert!(worst <= tolerance, "{isa}: {what}: output is off by {worst:e} (allowed {tolerance:e})");
    let tolerance = if options.out_dtype == DType::F32 { 1e-5 } else { 1e-3 };
    for (&a, &b) in found.lse.as_slice::<f32>().unwrap().iter().zip(&exact.lse) {
        let right = if b == f64::NEG_INFINITY {
            a == f32::NEG_INFINITY
        } else {
            (f64::from(a) - b).abs() <= tolerance * b.abs().max(1.0)
        };
        assert!(right, "{isa}: {what}: lse {a}, not {b}");
    }
}

/// The bits of both results.
pub fn bits(a: &Attended) -> (Vec<u8>, Vec<u8>) {
    (a.out.to_bytes().unwrap(), a.lse.to_bytes().unwrap())
}
