//! What the GPU tests share: the devices they run on, random data, and the comparison with the oracle.
#![allow(dead_code)]

pub mod cases;
pub mod rows;

use slimkv::attend::{self, Attended, Options, Segment, Span, oracle};
use slimkv::format::affine::Names;
use slimkv::format::{Affine, Axis, Plain, Rows, bits};
use slimkv::{DType, Device, DeviceKind, Tensor};

/// Every GPU that is there. With `SLIMKV_REQUIRE_GPU=1` it is an error that there is none.
pub fn devices() -> Vec<Device> {
    let found: Vec<_> = Device::all().into_iter().filter(|f| f.kind != DeviceKind::Cpu).collect();
    let devices: Vec<Device> = found.iter().filter_map(|f| f.device.clone().ok()).collect();
    if devices.is_empty() {
        let why: Vec<String> =
            found.iter().map(|f| format!("{}: {}", f.kind, f.device.as_ref().unwrap_err())).collect();
        assert_ne!(std::env::var("SLIMKV_REQUIRE_GPU").as_deref(), Ok("1"), "no GPU: {why:?}");
        eprintln!("NOT RUN: no GPU on this machine: {why:?}");
    }
    devices
}

/// Random numbers that are the same everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() as usize * n) >> 32
    }

    /// Roughly normal, unit variance.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.bits() as f32 / u32::MAX as f32).sum::<f32>() - 6.0
    }

    pub fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.normal()).collect();
        Tensor::from_vec(values, shape).unwrap().to_float(dtype).unwrap()
    }
}

/// A format of the tests.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Plain(DType),
    Affine { bits: u32, packed: bool, group: usize, axis: Axis, params: DType },
}

impl Kind {
    /// Random rows on the CPU with unit-variance values.
    pub fn rows(self, random: &mut Random, shape: [usize; 4]) -> Rows {
        let [b, h, s, d] = shape;
        match self {
            Kind::Plain(dtype) => Rows::Plain(Plain::new("test", "x", random.tensor(dtype, &shape)).unwrap()),
            Kind::Affine { bits, packed, group, axis, params } => {
                let levels = 1usize << bits;
                let codes: Vec<u8> = (0..b * h * s * d).map(|_| random.below(levels) as u8).collect();
                let codes = Tensor::from_vec(codes, &shape).unwrap();
                let codes = if packed { bits::pack("test", &codes, bits).unwrap() } else { codes };
                let [p0, p1] = axis.param_shape(s, d, group);
                let step = 3.4 / (levels - 1) as f32;
                let of = |f: &mut dyn FnMut() -> f32| {
                    let values: Vec<f32> = (0..b * h * p0 * p1).map(|_| f()).collect();
                    Tensor::from_vec(values, &[b, h, p0, p1]).unwrap().to_float(params).unwrap()
                };
                let scale = of(&mut || step * (0.8 + 0.4 * (random.bits() as f32 / u32::MAX as f32)));
                let zero = of(&mut || -1.7 + 0.3 * (random.bits() as f32 / u32::MAX as f32 - 0.5));
                let names = Names { op: "test", codes: "codes", scale: "scale", zero: "zero", bits: "bits" };
                Rows::Affine(Affine::new(names, codes, scale, zero, bits, group, axis, d).unwrap())
            }
        }
    }
}

/// The same rows on another device.
pub fn rows_to(rows: &Rows, device: &Device) -> Rows {
    match rows {
        Rows::Plain(rows) => Rows::Plain(Plain::new("test", "x", rows.data().to_device(device).unwrap()).unwrap()),
        Rows::Affine(rows) => {
            let names = Names { op: "test", codes: "codes", scale: "scale", zero: "zero", bits: "bits" };
            let to = |t: &Tensor| t.to_device(device).unwrap();
            let (codes, scale, zero) = (to(rows.codes()), to(rows.scale()), to(rows.zero()));
            let d = rows.shape().head_dim;
            Rows::Affine(Affine::new(names, codes, scale, zero, rows.bits(), rows.group(), rows.axis(), d).unwrap())
        }
        _ => unreachable!("a format that these tests do not know"),
    }
}

pub fn segment_to(segment: &Segment, device: &Device) -> Segment {
    Segment {
        keys: rows_to(&segment.keys, device),
        values: rows_to(&segment.values, device),
        spans: segment.spans.clone(),
    }
}

/// One attention of the tests.
#[derive(Debug, Clone)]
pub struct Case {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub s_q: usize,
    pub head_dim: usize,
    pub keys: Kind,
    pub values: Kind,
    /// The rows of each sequence, for each segment.
    pub segments: Vec<Vec<usize>>,
    pub causal: bool,
    pub window: usize,
    pub q_dtype: DType,
    pub out_dtype: DType,
}

impl Default for Case {
    fn default() -> Self {
        Case {
            q_heads: 4,
            kv_heads: 2,
            s_q: 1,
            head_dim: 64,
            keys: Kind::Plain(DType::F16),
            values: Kind::Plain(DType::F16),
            segments: vec![vec![37]],
            causal: true,
            window: 0,
            q_dtype: DType::F16,
            out_dtype: DType::F32,
        }
    }
}

impl Case {
    /// Queries and segments on the CPU; the queries are the last tokens of the union of the segments.
    pub fn build(&self, seed: u64) -> (Tensor, Vec<Segment>, Options) {
        let mut random = Random(seed);
        let batch = self.segments[0].len();
        let q = random.tensor(self.q_dtype, &[batch, self.q_heads, self.s_q, self.head_dim]);
        let total: Vec<usize> = (0..batch).map(|b| self.segments.iter().map(|s| s[b]).sum()).collect();
        let mut before = vec![0usize; batch];
        let mut segments = Vec::new();
        for lens in &self.segments {
            let capacity = lens.iter().max().unwrap() + 3;
            let shape = [batch, self.kv_heads, capacity, self.head_dim];
            let spans = (0..batch)
                .map(|b| Span { len: lens[b], q_offset: (total[b] as i64 - self.s_q as i64) - before[b] as i64 })
                .collect();
            segments.push(Segment {
                keys: self.keys.rows(&mut random, shape),
                values: self.values.rows(&mut random, shape),
                spans,
            });
            for (b, len) in before.iter_mut().zip(lens) {
                *b += len;
            }
        }
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let options = Options { scale, causal: self.causal, window: self.window, out_dtype: self.out_dtype };
        (q, segments, options)
    }

    /// The same on a device.
    pub fn build_on(&self, seed: u64, device: &Device) -> (Tensor, Vec<Segment>, Options) {
        let (q, segments, options) = self.build(seed);
        let there = segments.iter().map(|s| segment_to(s, device)).collect();
        (q.to_device(device).unwrap(), there, options)
    }

    /// A query row that is NaN or infinite leaves the others alone, and NaN comes out as NaN.
    pub fn check_row_that_is_not_finite(&self, device: &Device) {
        let (q, there, options) = self.build_on(5, device);
        let run = |q: Vec<f32>| {
            let q = Tensor::from_vec(q, &[1, self.q_heads, self.s_q, self.head_dim]).unwrap();
            let q = q.to_float(self.q_dtype).unwrap().to_device(device).unwrap();
            let got = attend::attend("test", &q, &there, options).unwrap();
            (got.out.to_f32_vec().unwrap(), got.lse.to_f32_vec().unwrap())
        };
        let q = q.to_f32_vec().unwrap();
        let (d, row) = (self.head_dim, 2);
        let (good, good_lse) = run(q.clone());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let compare = |what: &str, got: &[f32], good: &[f32], of_a_row: usize, tolerance: f32| {
                for (i, (a, b)) in got.iter().zip(good).enumerate() {
                    let here = i / of_a_row;
                    let right = if here == row { !bad.is_nan() || a.is_nan() } else { (a - b).abs() <= tolerance };
                    assert!(right, "{device} {self:?}, {bad}: {what}[{i}] of row {here} is {a}, not {b}");
                }
            };
            let mut q = q.clone();
            q[row * d + 3] = bad;
            let (out, lse) = run(q);
            compare("out", &out, &good, d, 2e-3);
            compare("lse", &lse, &good_lse, 1, 1e-2);
        }
    }

    /// Runs the case on a device and compares it with the oracle.
    pub fn check(&self, device: &Device) {
        let (q, segments, options) = self.build(self.head_dim as u64 * 31 + self.segments[0][0] as u64);
        let exact = oracle::attend("test", &q, &segments, options).unwrap();
        let there: Vec<Segment> = segments.iter().map(|s| segment_to(s, device)).collect();
        let got = attend::attend("test", &q.to_device(device).unwrap(), &there, options).unwrap();
        compare(&format!("{device} {self:?}"), &got, &exact, self.out_dtype);
    }
}

/// Fails where a result is further from the oracle than the contract allows.
pub fn compare(what: &str, got: &Attended, exact: &oracle::Exact, dtype: DType) {
    let out = got.out.to_f32_vec().unwrap();
    let lse = got.lse.to_f32_vec().unwrap();
    let largest = exact.out.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    // One rounding of the output to 8 bits is more than the kernel's own error.
    let tolerance = match dtype {
        DType::F32 => 1e-5 * largest.max(1e-3),
        DType::F16 => 2e-3,
        _ => 2e-3 + largest / 256.0,
    };
    for (i, (&a, &b)) in out.iter().zip(&exact.out).enumerate() {
        assert!((f64::from(a) - b).abs() <= tolerance, "{what}: out[{i}] is {a}, expected {b}");
    }
    let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-3 };
    for (i, (&a, &b)) in lse.iter().zip(&exact.lse).enumerate() {
        let fits = if b == f64::NEG_INFINITY {
            a == f32::NEG_INFINITY
        } else {
            (f64::from(a) - b).abs() <= tolerance * b.abs().max(1.0)
        };
        assert!(fits, "{what}: lse[{i}] is {a}, expected {b}");
    }
}
