//! Quantising, decoding, packing and writing rows.

use slimkv::cpu::{Isa, with_isa};
use slimkv::format::affine::{self, oracle};
use slimkv::format::{Axis, RowCopy, Rows, bits};
use slimkv::{DType, Error, Tensor};

use crate::support::{OP, Random, Store};

/// Values that a quantiser meets: normal ones, ties, constants, infinities, NaN, zeros of both signs, denormals.
fn awkward(random: &mut Random, shape: &[usize], dtype: DType) -> Tensor {
    let kind = random.below(4);
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| match kind {
            0 => random.normal(),
            1 => (random.below(9) as f32 - 4.0) * 0.5,
            2 => 1.25,
            _ => match random.below(8) {
                0 => f32::INFINITY,
                1 => f32::NEG_INFINITY,
                2 => f32::NAN,
                3 => -0.0,
                4 => 1e-41,
                5 => 60000.0 * random.normal(),
                _ => random.normal(),
            },
        })
        .collect();
    Tensor::from_vec(values, shape).unwrap().to_float(dtype).unwrap()
}

fn same(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

#[test]
fn codes_and_parameters_are_those_of_the_oracle_bit_for_bit() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let shape =
            [1 + random.below(2), random.pick(&[0, 1, 5, 32, 33, 100]), random.pick(&[1, 3, 16, 31, 64, 80, 128])];
        let dtype = random.pick(&[DType::F16, DType::BF16, DType::F32]);
        let x = awkward(&mut random, &shape, dtype);
        let axis = random.pick(&[Axis::Tokens, Axis::Channels]);
        let group = random.pick(&[1, 3, 16, 32, 32, 64, 1000]);
        let width = random.pick(&bits::WIDTHS);
        let params = random.pick(&[DType::F16, DType::F32]);
        let levels = (1u32 << width) - 1;
        let [m, s, d] = shape;
        let values = x.to_f32_vec().unwrap();
        let expected: Vec<_> = (0..m)
            .map(|i| oracle::quantize(&values[i * s * d..][..s * d], s, d, axis, group, levels, 1e-8, params))
            .collect();
        let codes: Vec<u8> = expected.iter().flat_map(|q| q.codes.clone()).collect();
        for isa in Isa::here() {
            let what = format!("{isa}: seed {seed}: {shape:?} {axis:?} group {group} {width} bits {params}");
            let run = |packed| {
                with_isa(isa, || affine::quantize(OP, &x, axis, group, width, 1e-8, packed, params)).unwrap().unwrap()
            };
            let (found, scale, zero) = run(false);
            assert_eq!(found.to_vec::<u8>().unwrap(), codes, "{what}");
            let scales = scale.to_f32_vec().unwrap();
            let zeros = zero.to_f32_vec().unwrap();
            for (p, (a, b)) in expected.iter().flat_map(|q| &q.params).zip(scales.iter().zip(&zeros)) {
                assert!(same(p.scale, *a) && same(p.zero, *b), "{what}: {p:?}, not {a} {b}");
            }
            let (packed, ..) = run(true);
            let back = with_isa(isa, || bits::unpack(OP, &packed, width, d)).unwrap().unwrap();
            assert_eq!(back.to_vec::<u8>().unwrap(), codes, "{what}");
            let round = with_isa(isa, || affine::round_trip(OP, &x, axis, group, levels, 1e-8)).unwrap().unwrap();
            assert_eq!((round.dtype(), round.shape()), (x.dtype(), x.shape()));
            if params == DType::F32 {
                let decoded = with_isa(isa, || {
                    affine::dequantize(OP, &packed, &scale, &zero, axis, group, width, d).unwrap().to_f32_vec().unwrap()
                });
                let round = round.to_float(DType::F16).unwrap().to_f32_vec().unwrap();
                let decoded = decoded.unwrap();
                if x.dtype() != DType::BF16 {
                    assert!(round.iter().zip(&decoded).all(|(a, b)| same(*a, *b)), "{what}: round trip");
                }
            }
        }
    }
}

#[test]
fn a_round_trip_keeps_the_rule_of_values_that_are_not_finite() {
    let x = Tensor::from_vec(vec![1.0f32, f32::NAN, f32::NEG_INFINITY, f32::INFINITY, 4.0, 2.0], &[1, 6]).unwrap();
    for isa in Isa::here() {
        let y = with_isa(isa, || affine::round_trip(OP, &x, Axis::Channels, 6, 3, 1e-8)).unwrap().unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), [1.0, 1.0, 1.0, 4.0, 4.0, 2.0], "{isa}");
        let none = Tensor::from_vec(vec![f32::NAN, f32::INFINITY], &[1, 2]).unwrap();
        let y = with_isa(isa, || affine::round_trip(OP, &none, Axis::Channels, 2, 3, 1e-8)).unwrap().unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), [0.0, 0.0], "{isa}");
    }
}

#[test]
fn rows_are_written_converted_quantised_and_decoded() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let (b, h, d) = (1 + random.below(3), 1 + random.below(2), random.pick(&[5, 16, 64, 80, 128]));
        let (from_capacity, to_capacity) = (70 + random.below(100), 200);
        let dtype = random.pick(&[DType::F16, DType::BF16, DType::F32]);
        let source = random.tensor(&[b, h, from_capacity, d], dtype);
        let target = Store::any(&mut random);
        let source_store = match target {
            Store::Plain(_) => Store::any(&mut random),
            Store::Affine { .. } => Store::Plain(source.dtype()),
        };
        let source = source_store.rows(&source);
        let filler = random.tensor(&[b, h, to_capacity, d], DType::F32);
        let group = if let Store::Affine { group, axis: Axis::Tokens, .. } = target { group } else { 1 };
        let copies: Vec<RowCopy> = (0..b)
            .map(|_| {
                let rows = random.below(60);
                RowCopy { from: random.below(10), to: (random.below(60)).div_ceil(group) * group, rows }
            })
            .filter(|c| c.to + c.rows <= to_capacity)
            .collect();
        if copies.len() != b {
            continue;
        }
        let mut results = Vec::new();
        for isa in Isa::here() {
            let mut rows = target.rows(&filler);
            with_isa(isa, || rows.write(OP, &source, &copies)).unwrap().unwrap();
            results.push((isa, rows));
        }
        // What was not written must be as before, what was written must decode near the source.
        let before = target.rows(&filler).decode_oracle().unwrap();
        let wanted = source.decode_oracle().unwrap();
        let bytes = |rows: &Rows| match rows {
            Rows::Plain(p) => vec![p.data().to_bytes().unwrap()],
            Rows::Affine(a) => [a.codes(), a.scale(), a.zero()].map(|t| t.to_bytes().unwrap()).to_vec(),
            _ => unreachable!(),
        };
        for (isa, rows) in &results {
            assert_eq!(bytes(rows), bytes(&results[0].1), "{isa}: seed {seed}");
            let after = rows.decode_oracle().unwrap();
            for (m, copy) in (0..b * h).map(|m| (m, copies[m / h])) {
                for t in 0..to_capacity {
                    let written = (copy.to..copy.to + copy.rows).contains(&t);
                    let shares_group = t / group < (copy.to + copy.rows).div_ceil(group) && t >= copy.to;
                    for c in 0..d {
                        let after = after[(m * to_capacity + t) * d + c];
                        if written {
                            let x = wanted[(m * from_capacity + copy.from + t - copy.to) * d + c];
                            let tolerance = match target {
                                Store::Plain(_) => 0.01 * x.abs(),
                                Store::Affine { bits, .. } => 12.0 / ((1 << bits) - 1) as f32,
                            };
                            assert!((after - x).abs() <= tolerance, "{isa}: seed {seed}: {after}, not {x}");
                        } else if !(shares_group && group > 1) {
                            assert_eq!(
                                after,
                                before[(m * to_capacity + t) * d + c],
                                "{isa}: seed {seed}: row {t} changed"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn written_codes_are_those_of_the_oracle() {
    let mut random = Random::new(1);
    let x = random.tensor(&[1, 2, 70, 48], DType::F32);
    for axis in [Axis::Tokens, Axis::Channels] {
        for params in [DType::F16, DType::F32] {
            for packed in [true, false] {
                let store = Store::Affine { bits: 3, group: 20, axis, packed, params };
                for isa in Isa::here() {
                    let zeros = Tensor::zeros(DType::F32, x.shape(), &slimkv::Device::cpu()).unwrap();
                    let mut rows = store.rows(&zeros);
                    let source = Store::Plain(DType::F32).rows(&x);
                    with_isa(isa, || rows.write(OP, &source, &[RowCopy { from: 0, to: 0, rows: 70 }]))
                        .unwrap()
                        .unwrap();
                    assert_eq!(
                        rows.decode_oracle().unwrap(),
                        store.rows(&x).decode_oracle().unwrap(),
                        "{isa} {store:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn bad_arguments_are_errors_that_name_them() {
    let x = Tensor::from_vec(vec![0.5f32; 12], &[3, 4]).unwrap();
    let arg = |e: Error| match e {
        Error::Shape { arg, .. } | Error::DType { arg, .. } | Error::Value { arg, .. } => arg,
        other => panic!("{other}"),
    };
    let quantize = |x: &Tensor, group, bits, eps, params| {
        arg(affine::quantize(OP, x, Axis::Tokens, group, bits, eps, true, params).unwrap_err())
    };
    assert_eq!(quantize(&x, 0, 2, 1e-8, DType::F16), "group_size");
    assert_eq!(quantize(&x, 2, 5, 1e-8, DType::F16), "bits");
    assert_eq!(quantize(&x, 2, 2, f32::NAN, DType::F16), "eps");
    assert_eq!(quantize(&x, 2, 2, 1e-8, DType::BF16), "param_dtype");
    assert_eq!(quantize(&x.reshape(&[12]).unwrap(), 2, 2, 1e-8, DType::F16), "x");
    let codes = Tensor::from_vec(vec![0u8; 12], &[3, 4]).unwrap();
    assert_eq!(quantize(&codes, 2, 2, 1e-8, DType::F16), "x");
    assert_eq!(arg(affine::round_trip(OP, &x, Axis::Tokens, 2, 0, 1e-8).unwrap_err()), "levels");
    assert_eq!(arg(bits::pack(OP, &x, 2).unwrap_err()), "indices");
    assert_eq!(arg(bits::pack(OP, &codes, 6).unwrap_err()), "bits");
    let packed = bits::pack(OP, &codes, 2).unwrap();
    assert_eq!(arg(bits::unpack(OP, &packed, 2, 17).unwrap_err()), "original_length");
    assert_eq!(arg(bits::unpack(OP, &codes, 2, 4).unwrap_err()), "packed");
}
