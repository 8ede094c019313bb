//! Every operation of the registry on random input of random shape, on every device, against its oracle.

mod common;

use std::collections::BTreeMap;

use common::{Random, Tolerance, devices, difference, numbers};
use half::f16;
use proptest::prelude::*;
use slimkv::attend::{Options, Segment, oracle};
use slimkv::format::affine::{Names, oracle as affine};
use slimkv::format::{Affine, Axis, Plain, Rows, bits};
use slimkv::ops::{self, Inputs};
use slimkv::{DType, Device, DeviceKind, Tensor};

/// A call and what it must return, in the order of the registry's results.
struct Example {
    inputs: Inputs,
    expected: Vec<(Tensor, Tolerance)>,
}

/// Random choices of one example.
struct Dice(Random);

impl Dice {
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[(self.0.bits() % from.len() as u64) as usize]
    }

    fn up_to(&mut self, n: usize) -> usize {
        (self.0.bits() % (n as u64 + 1)) as usize
    }

    fn float(&mut self) -> DType {
        self.pick(&[DType::F16, DType::BF16, DType::F32])
    }

    fn normal(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        self.0.tensor(dtype, shape, &Device::cpu())
    }

    /// Values of very different magnitude, with constant stretches and now and then a value that is not finite.
    fn wild(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let magnitude = self.pick(&[1e-30f32, 1e-3, 1.0, 1.0, 100.0, 1e4]);
        let special = self.up_to(2) == 0;
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| match (special, self.up_to(40)) {
                (true, 0) => f32::NAN,
                (true, 1) => f32::INFINITY,
                (true, 2) => f32::NEG_INFINITY,
                (_, 3..8) => magnitude,
                (_, 8) => -0.0,
                _ => self.0.normal() * magnitude,
            })
            .collect();
        Tensor::from_vec(values, shape).unwrap().to_float(dtype).unwrap()
    }

    fn codes(&mut self, shape: &[usize], below: u64) -> Tensor {
        let codes: Vec<u8> = (0..shape.iter().product()).map(|_| (self.0.bits() % below) as u8).collect();
        Tensor::from_vec(codes, shape).unwrap()
    }

    /// Zero to two leading axes.
    fn leading(&mut self) -> Vec<usize> {
        (0..self.up_to(2)).map(|_| self.up_to(3)).collect()
    }
}

fn call(tensors: Vec<(&str, Tensor)>, settings: Vec<(&str, String)>) -> Inputs {
    Inputs {
        tensors: tensors.into_iter().map(|(k, v)| (k.to_string(), v)).collect(),
        settings: settings.into_iter().map(|(k, v)| (k.to_string(), v)).collect::<BTreeMap<_, _>>(),
    }
}

fn axes(leading: &[usize], last: &[usize]) -> Vec<usize> {
    [leading, last].concat()
}

fn pack(codes: &[u8], length: usize, width: u32) -> Vec<u32> {
    let words = bits::words_per_row(length, width);
    let mut packed = vec![0; codes.len().checked_div(length).unwrap_or(0) * words];
    for (row, words) in codes.chunks(length.max(1)).zip(packed.chunks_mut(words.max(1))) {
        bits::pack_row(row, width, words);
    }
    packed
}

fn bit_pack(dice: &mut Dice) -> Example {
    let (lead, length, width) = (dice.leading(), 1 + dice.up_to(200), dice.pick(&bits::WIDTHS));
    let indices = dice.codes(&axes(&lead, &[length]), 256);
    let packed = pack(indices.as_slice().unwrap(), length, width);
    let expected = Tensor::from_vec(packed, &axes(&lead, &[bits::words_per_row(length, width)])).unwrap();
    Example {
        inputs: call(vec![("indices", indices)], vec![("bits", width.to_string())]),
        expected: vec![(expected, Tolerance::Exact)],
    }
}

fn bit_unpack(dice: &mut Dice) -> Example {
    let (lead, length, width) = (dice.leading(), 1 + dice.up_to(200), dice.pick(&bits::WIDTHS));
    let words = bits::words_per_row(length, width);
    let rows: usize = lead.iter().product();
    // Random bits also where no code lies.
    let packed: Vec<u32> = (0..rows * words).map(|_| dice.0.bits() as u32).collect();
    let mut codes = vec![0u8; rows * length];
    for (row, words) in codes.chunks_mut(length).zip(packed.chunks(words)) {
        bits::unpack_row(words, width, row);
    }
    Example {
        inputs: call(
            vec![("packed", Tensor::from_vec(packed, &axes(&lead, &[words])).unwrap())],
            vec![("bits", width.to_string()), ("original_length", length.to_string())],
        ),
        expected: vec![(Tensor::from_vec(codes, &axes(&lead, &[length])).unwrap(), Tolerance::Exact)],
    }
}

/// A matrix to quantise, and how.
struct Grouping {
    lead: Vec<usize>,
    tokens: usize,
    channels: usize,
    axis: Axis,
    group: usize,
}

impl Grouping {
    fn roll(dice: &mut Dice) -> Self {
        Grouping {
            lead: dice.leading(),
            tokens: dice.up_to(70),
            channels: dice.pick(&[1, 5, 8, 33, 64, 80, 96, 128]),
            axis: dice.pick(&[Axis::Tokens, Axis::Channels]),
            group: dice.pick(&[1, 3, 16, 32, 64, 100]),
        }
    }

    fn axis_text(&self) -> String {
        if self.axis == Axis::Tokens { "-2".into() } else { "-1".into() }
    }

    fn shape(&self) -> Vec<usize> {
        axes(&self.lead, &[self.tokens, self.channels])
    }

    fn param_shape(&self) -> Vec<usize> {
        axes(&self.lead, &self.axis.param_shape(self.tokens, self.channels, self.group))
    }

    /// Quantises every matrix by the definition.
    fn quantize(&self, x: &Tensor, levels: u32, stored: DType) -> (Vec<u8>, Vec<affine::Params>) {
        let (mut codes, mut params) = (Vec::new(), Vec::new());
        let values = x.to_f32_vec().unwrap();
        for matrix in values.chunks((self.tokens * self.channels).max(1)) {
            let q = affine::quantize(matrix, self.tokens, self.channels, self.axis, self.group, levels, 1e-8, stored);
            codes.extend(q.codes);
            params.extend(q.params);
        }
        (codes, params)
    }

    /// The parameters of every element, in order.
    fn spread(&self, params: &[affine::Params]) -> Vec<affine::Params> {
        let [rows, columns] = self.axis.param_shape(self.tokens, self.channels, self.group);
        let matrices: usize = self.lead.iter().product();
        let mut all = Vec::new();
        for m in 0..matrices {
            for t in 0..self.tokens {
                for c in 0..self.channels {
                    let (row, column) = match self.axis {
                        Axis::Tokens => (t / self.group, c),
                        Axis::Channels => (t, c / self.group),
                    };
                    all.push(params[(m * rows + row) * columns + column]);
                }
            }
        }
        all
    }
}

fn group_quant_dequant(dice: &mut Dice) -> Example {
    let (g, dtype, width) = (Grouping::roll(dice), dice.float(), dice.pick(&bits::WIDTHS));
    let levels = (1u32 << width) - 1;
    let x = dice.wild(dtype, &g.shape());
    let (codes, params) = g.quantize(&x, levels, DType::F32);
    let decoded: Vec<f32> = g.spread(&params).iter().zip(&codes).map(|(p, &c)| p.decode(c)).collect();
    let expected = Tensor::from_vec(decoded, &g.shape()).unwrap().to_float(dtype).unwrap();
    let settings = vec![("axis", g.axis_text()), ("group_size", g.group.to_string()), ("levels", levels.to_string())];
    Example { inputs: call(vec![("x", x)], settings), expected: vec![(expected, Tolerance::Value)] }
}

fn group_quantize(dice: &mut Dice) -> Example {
    let (g, dtype, width) = (Grouping::roll(dice), dice.float(), dice.pick(&bits::WIDTHS));
    let (stored, packed) = (dice.pick(&[DType::F16, DType::F32]), dice.pick(&[true, false]));
    let x = dice.wild(dtype, &g.shape());
    let (codes, params) = g.quantize(&x, (1 << width) - 1, stored);
    let codes = if packed {
        let words = bits::words_per_row(g.channels, width);
        Tensor::from_vec(pack(&codes, g.channels, width), &axes(&g.lead, &[g.tokens, words])).unwrap()
    } else {
        Tensor::from_vec(codes, &g.shape()).unwrap()
    };
    let side = |f: fn(&affine::Params) -> f32| {
        let values = params.iter().map(f).collect();
        Tensor::from_vec(values, &g.param_shape()).unwrap().to_float(stored).unwrap()
    };
    let settings = vec![
        ("axis", g.axis_text()),
        ("group_size", g.group.to_string()),
        ("bits", width.to_string()),
        ("packed", packed.to_string()),
        ("param_dtype", stored.to_string()),
    ];
    Example {
        inputs: call(vec![("x", x)], settings),
        expected: vec![
            (codes, Tolerance::Exact),
            (side(|p| p.scale), Tolerance::Value),
            (side(|p| p.zero), Tolerance::Value),
        ],
    }
}

fn group_dequantize(dice: &mut Dice) -> Example {
    let (g, width) = (Grouping::roll(dice), dice.pick(&bits::WIDTHS));
    let (stored, packed) = (dice.pick(&[DType::F16, DType::F32]), dice.pick(&[true, false]));
    let scale = dice.normal(stored, &g.param_shape());
    let zero = dice.normal(stored, &g.param_shape());
    let codes = dice.codes(&g.shape(), 1 << width);
    let params: Vec<affine::Params> = (scale.to_f32_vec().unwrap().into_iter().zip(zero.to_f32_vec().unwrap()))
        .map(|(scale, zero)| affine::Params { scale, zero })
        .collect();
    let decoded: Vec<f32> =
        g.spread(&params).iter().zip(codes.as_slice::<u8>().unwrap()).map(|(p, &c)| p.decode(c)).collect();
    let largest = decoded.iter().fold(0f32, |m, x| m.max(x.abs()));
    let expected = Tensor::from_vec(decoded, &g.shape()).unwrap().to_float(DType::F16).unwrap();
    let mut settings = vec![("axis", g.axis_text()), ("group_size", g.group.to_string())];
    let codes = if packed {
        settings.extend([("bits", width.to_string()), ("original_length", g.channels.to_string())]);
        let words = bits::words_per_row(g.channels, width);
        let packed = pack(codes.as_slice().unwrap(), g.channels, width);
        Tensor::from_vec(packed, &axes(&g.lead, &[g.tokens, words])).unwrap()
    } else {
        codes
    };
    // A fused multiply-add may move a result by one f16 step.
    let step = f64::from(largest) / 1024.0 + 1e-6;
    Example {
        inputs: call(vec![("codes", codes), ("scale", scale), ("zero", zero)], settings),
        expected: vec![(expected, Tolerance::Close(step))],
    }
}

/// The geometry of an attention.
struct Heads {
    b: usize,
    hq: usize,
    hkv: usize,
    s_q: usize,
    s: usize,
    d: usize,
}

impl Heads {
    fn roll(dice: &mut Dice) -> Self {
        let hkv = 1 + dice.up_to(1);
        Heads {
            b: 1 + dice.up_to(1),
            hq: hkv * dice.pick(&[1, 2, 3, 4, 7, 8, 16]),
            hkv,
            s_q: dice.pick(&[1, 1, 1, 2, 5, 19]),
            s: dice.pick(&[0, 1, 2, 31, 32, 33, 64, 100, 150]),
            d: dice.pick(&[1, 8, 20, 64, 80, 96, 128, 256]),
        }
    }
}

fn attention_limits(q: &Tensor, exact: &oracle::Exact, options: Options) -> Vec<(Tensor, Tolerance)> {
    let rounded = exact.rounded(q, options).unwrap();
    let largest = exact.out.iter().fold(0f64, |m, x| m.max(x.abs()));
    let close = match options.out_dtype {
        DType::F32 => 1e-5 * largest.max(1.0),
        DType::BF16 => 2e-3 + largest / 256.0,
        _ => 2e-3 + largest / 2048.0,
    };
    let lse = exact.lse.iter().filter(|x| x.is_finite()).fold(1f64, |m, x| m.max(x.abs()));
    vec![(rounded.out, Tolerance::Close(close)), (rounded.lse, Tolerance::Close(1e-4 * lse + 5e-4))]
}

fn scalar_fused_decode_attend(dice: &mut Dice) -> Example {
    let h = Heads::roll(dice);
    let group = dice.pick(&[1, 7, 16, 32, 64, 128]);
    let (q_dtype, stored) = (dice.float(), dice.pick(&[DType::F16, DType::F32]));
    let q = dice.normal(q_dtype, &[h.b, h.hq, h.s_q, h.d]);
    let causal = dice.pick(&[true, false]);
    let mut tensors = vec![("q", q.clone())];
    let mut settings = vec![("group_size", group.to_string()), ("causal", causal.to_string())];
    let mut side = |axis: Axis, names: Names| {
        let width = dice.pick(&bits::WIDTHS);
        let packed = dice.pick(&[true, true, false]);
        let x = dice.normal(DType::F32, &[h.b, h.hkv, h.s, h.d]);
        let g = Grouping { lead: vec![h.b, h.hkv], tokens: h.s, channels: h.d, axis, group };
        let (codes, params) = g.quantize(&x, (1 << width) - 1, stored);
        let side = |f: fn(&affine::Params) -> f32| {
            Tensor::from_vec(params.iter().map(f).collect(), &g.param_shape()).unwrap().to_float(stored).unwrap()
        };
        let (scale, zero) = (side(|p| p.scale), side(|p| p.zero));
        let codes = if packed {
            settings.push((names.bits, width.to_string()));
            let shape = [h.b, h.hkv, h.s, bits::words_per_row(h.d, width)];
            Tensor::from_vec(pack(&codes, h.d, width), &shape).unwrap()
        } else {
            Tensor::from_vec(codes, &g.shape()).unwrap()
        };
        tensors.extend([(names.codes, codes.clone()), (names.scale, scale.clone()), (names.zero, zero.clone())]);
        Rows::Affine(Affine::new(names, codes, scale, zero, width, group, axis, h.d).unwrap())
    };
    let keys =
        side(Axis::Tokens, Names { op: "test", codes: "k_codes", scale: "k_scale", zero: "k_zero", bits: "k_bits" });
    let values =
        side(Axis::Channels, Names { op: "test", codes: "v_codes", scale: "v_scale", zero: "v_zero", bits: "v_bits" });
    let scale = 1.0 / (h.d as f32).sqrt();
    let options = Options { scale, causal, window: 0, out_dtype: DType::F16 };
    let exact = oracle::attend("test", &q, &[Segment::full(keys, values, h.s_q)], options).unwrap();
    Example { inputs: call(tensors, settings), expected: attention_limits(&q, &exact, options) }
}

fn flash_prefill_attend(dice: &mut Dice) -> Example {
    let h = Heads::roll(dice);
    let dtypes = [dice.float(), dice.float(), dice.float()];
    let q = dice.normal(dtypes[0], &[h.b, h.hq, h.s_q, h.d]);
    let k = dice.normal(dtypes[1], &[h.b, h.hkv, h.s, h.d]);
    let v = dice.normal(dtypes[2], &[h.b, h.hkv, h.s, h.d]);
    let causal = dice.pick(&[true, false]);
    let plain = |t: &Tensor| Rows::Plain(Plain::new("test", "k", t.clone()).unwrap());
    let scale = 1.0 / (h.d as f32).sqrt();
    let options = Options { scale, causal, window: 0, out_dtype: q.dtype() };
    let exact = oracle::attend("test", &q, &[Segment::full(plain(&k), plain(&v), h.s_q)], options).unwrap();
    let expected = attention_limits(&q, &exact, options);
    let settings = vec![("causal", causal.to_string())];
    Example { inputs: call(vec![("q", q), ("k", k), ("v", v)], settings), expected }
}

fn merge_attention(dice: &mut Dice) -> Example {
    let (lead, d, dtype) = (dice.leading(), dice.pick(&[1, 5, 64, 80, 128]), dice.float());
    let rows: usize = lead.iter().product();
    let mut side = || {
        let lse: Vec<f32> =
            (0..rows).map(|_| if dice.up_to(3) == 0 { f32::NEG_INFINITY } else { dice.0.normal() * 10.0 }).collect();
        let out = dice.normal(dtype, &axes(&lead, &[d]));
        (out, Tensor::from_vec(lse, &lead).unwrap())
    };
    let ((out_a, lse_a), (out_b, lse_b)) = (side(), side());
    let (a, b) = (numbers(&out_a), numbers(&out_b));
    let (la, lb) = (numbers(&lse_a), numbers(&lse_b));
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let m = la[row].max(lb[row]);
        let (wa, wb) = if m == f64::NEG_INFINITY { (0.0, 0.0) } else { ((la[row] - m).exp(), (lb[row] - m).exp()) };
        lse.push(if wa + wb == 0.0 { f32::NEG_INFINITY } else { (m + (wa + wb).ln()) as f32 });
        for i in row * d..(row + 1) * d {
            out.push(if wa + wb == 0.0 { 0.0 } else { ((wa * a[i] + wb * b[i]) / (wa + wb)) as f32 });
        }
    }
    let out = Tensor::from_vec(out, &axes(&lead, &[d])).unwrap().to_float(dtype).unwrap();
    let close = match dtype {
        DType::F32 => 5e-5,
        DType::BF16 => 0.035,
        _ => f64::from(f16::from_f32(5.0).to_f32()) / 1000.0,
    };
    Example {
        inputs: call(vec![("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)], vec![]),
        expected: vec![(out, Tolerance::Close(close)), (Tensor::from_vec(lse, &lead).unwrap(), Tolerance::Close(1e-4))],
    }
}

fn example(operation: &str, dice: &mut Dice) -> Example {
    match operation {
        "turboquant_bit_pack" => bit_pack(dice),
        "turboquant_bit_unpack" => bit_unpack(dice),
        "kivi_group_quant_dequant" => group_quant_dequant(dice),
        "kivi_group_quantize" => group_quantize(dice),
        "kivi_group_dequantize" => group_dequantize(dice),
        "scalar_fused_decode_attend" => scalar_fused_decode_attend(dice),
        "flash_prefill_attend" => flash_prefill_attend(dice),
        "merge_attention" => merge_attention(dice),
        other => panic!("{other} has no oracle in this test"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48, max_shrink_iters: 0, rng_seed: prop::test_runner::RngSeed::Fixed(1), ..ProptestConfig::default()
    })]
    #[test]
    fn every_operation_agrees_with_its_oracle(seed in any::<u64>()) {
        // A software GPU driver compiles most of these kernels anew: one case in four is enough for it.
        let mut devices = devices();
        devices.retain(|d| d.kind() == DeviceKind::Cpu || seed.is_multiple_of(4));
        for operation in ops::registry() {
            let Example { inputs, expected } = example(operation.name, &mut Dice(Random(seed)));
            for device in &devices {
                let label = || format!(
                    "{} on {device}, {:?}, {:?}", operation.name, inputs.settings, inputs.tensors.values().collect::<Vec<_>>()
                );
                let found = operation.run(&inputs, device).unwrap_or_else(|e| panic!("{}: {e}", label()));
                prop_assert_eq!(found.len(), expected.len());
                for ((name, found), (expected, tolerance)) in found.iter().zip(&expected) {
                    if let Some(difference) = difference(found, expected, *tolerance) {
                        panic!("{}: {name}: {difference}", label());
                    }
                }
                // The same call twice gives the same bits.
                for ((_, again), (_, first)) in operation.run(&inputs, device).unwrap().iter().zip(&found) {
                    prop_assert_eq!(again.to_bytes().unwrap(), first.to_bytes().unwrap(), "{}: not the same twice", label());
                }
            }
        }
    }
}
