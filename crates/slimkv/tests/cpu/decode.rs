//! Decode attention: few queries, any pair of formats.

use slimkv::attend::{Segment, Span};
use slimkv::cpu::Isa;
use slimkv::format::Axis;
use slimkv::{DType, Tensor};

use crate::support::{Random, Store, attend, bits, check, options};

fn segment(random: &mut Random, [b, h, s, d]: [usize; 4], keys: Store, values: Store, s_q: usize) -> Segment {
    let (k, v) = (random.tensor(&[b, h, s, d], DType::F32), random.tensor(&[b, h, s, d], DType::F32));
    Segment::full(keys.rows(&k), values.rows(&v), s_q)
}

#[test]
fn every_width_packed_and_not_at_common_head_sizes() {
    for isa in Isa::here() {
        for bits in [1, 2, 3, 4, 8] {
            for d in [64, 80, 96, 128, 256] {
                for packed in [true, false] {
                    let mut random = Random::new(u64::from(bits) * 1000 + d as u64);
                    let store = |axis| Store::Affine { bits, group: 32, axis, packed, params: DType::F16 };
                    let s = segment(&mut random, [1, 2, 300, d], store(Axis::Tokens), store(Axis::Channels), 1);
                    let q = random.tensor(&[1, 8, 1, d], DType::F16);
                    for out in [DType::F16, DType::F32] {
                        let what = format!("{bits} bits, D {d}, packed {packed}");
                        check(isa, &q, std::slice::from_ref(&s), options(d, true, 0, out), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn any_pair_of_formats_shapes_masks_and_segments() {
    for seed in 0..150 {
        let mut random = Random::new(seed);
        let (b, h) = (1 + random.below(3), 1 + random.below(3));
        let s_q = random.pick(&[1, 1, 1, 2, 3, 5]);
        let group = 1 + random.below(16 / s_q);
        let d = random.pick(&[1, 7, 16, 33, 64, 80, 96, 128, 160, 256]);
        let pieces = 1 + random.below(3);
        let lens: Vec<usize> = (0..pieces).map(|_| random.pick(&[0, 1, 2, 31, 100, 129, 257, 700])).collect();
        let mut segments = Vec::new();
        for &len in &lens {
            let (keys, values) = (Store::any(&mut random), Store::any(&mut random));
            let mut segment = segment(&mut random, [b, h, len, d], keys, values, s_q);
            segment.spans = (0..b)
                .map(|_| Span { len: random.below(len + 1), q_offset: random.below(2 * len + 3) as i64 - 2 })
                .collect();
            segments.push(segment);
        }
        let dtype = random.pick(&[DType::F16, DType::BF16, DType::F32]);
        let q = random.tensor(&[b, h * group, s_q, d], dtype);
        let out = random.pick(&[DType::F16, DType::BF16, DType::F32]);
        let options = options(d, random.below(2) == 0, random.pick(&[0, 0, 1, 50, 130]), out);
        for isa in Isa::here() {
            check(isa, &q, &segments, options, &format!("seed {seed}: {lens:?} {options:?}"));
        }
    }
}

#[test]
fn every_size_of_a_query_group() {
    for isa in Isa::here() {
        for group in 1..=16 {
            for (keys, values) in [
                (Store::kivi(4, Axis::Tokens), Store::kivi(4, Axis::Channels)),
                (Store::Plain(DType::F16), Store::Plain(DType::F16)),
            ] {
                let mut random = Random::new(group as u64);
                let s = segment(&mut random, [1, 2, 200, 64], keys, values, 1);
                let q = random.tensor(&[1, 2 * group, 1, 64], DType::F16);
                check(isa, &q, &[s], options(64, false, 0, DType::F16), &format!("group {group}"));
            }
        }
    }
}

#[test]
fn long_rows_of_the_largest_codes() {
    let d = 2048;
    let key = |i: usize| if (i / d).is_multiple_of(2) { 0.0f32 } else { 1.0 / d as f32 };
    let keys: Vec<f32> = (0..64 * d).map(key).collect();
    let keys = Tensor::from_slice(&keys, &[1, 1, 64, d], &slimkv::Device::cpu()).unwrap();
    let q = Tensor::from_slice(&vec![1.0f32; d], &[1, 1, 1, d], &slimkv::Device::cpu()).unwrap();
    for isa in Isa::here() {
        let values = Random::new(1).tensor(&[1, 1, 64, d], DType::F32);
        let (k, v) = (Store::kivi(8, Axis::Tokens).rows(&keys), Store::kivi(8, Axis::Channels).rows(&values));
        check(isa, &q, &[Segment::full(k, v, 1)], options(d, false, 0, DType::F16), "the largest codes");
    }
}

#[test]
fn huge_logits() {
    for isa in Isa::here() {
        for (keys, values) in [
            (Store::kivi(8, Axis::Tokens), Store::kivi(4, Axis::Channels)),
            (Store::kivi(2, Axis::Tokens), Store::kivi(2, Axis::Channels)),
            (Store::Plain(DType::F32), Store::Plain(DType::F32)),
        ] {
            let mut random = Random::new(9);
            let s = segment(&mut random, [1, 1, 1000, 128], keys, values, 1);
            let q: Vec<f32> = (0..4 * 128).map(|_| 8.0 * random.normal()).collect();
            let q = Tensor::from_vec(q, &[1, 4, 1, 128]).unwrap();
            check(isa, &q, std::slice::from_ref(&s), options(128, false, 0, DType::F32), "q x 8, f32");
            check(isa, &q, &[s], options(128, false, 0, DType::F16), "q x 8, f16");
        }
    }
}

#[test]
fn a_query_that_is_not_finite_leaves_the_others_of_its_group_alone() {
    let (h, s, d) = (2, 300, 128);
    for isa in Isa::here() {
        for bits in [2, 4, 8] {
            let mut random = Random::new(u64::from(bits));
            let (keys, values) = (Store::kivi(bits, Axis::Tokens), Store::kivi(bits, Axis::Channels));
            let segment = segment(&mut random, [1, h, s, d], keys, values, 1);
            let q = random.tensor(&[1, 4 * h, 1, d], DType::F32).as_slice::<f32>().unwrap().to_vec();
            let run = |q: &[f32]| {
                let q = Tensor::from_vec(q.to_vec(), &[1, 4 * h, 1, d]).unwrap();
                let options = options(d, false, 0, DType::F16);
                attend(isa, &q, std::slice::from_ref(&segment), options).unwrap().out.to_f32_vec().unwrap()
            };
            let good = run(&q);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut q = q.clone();
                q[2 * d + 5] = bad;
                for (i, (a, b)) in run(&q).into_iter().zip(&good).enumerate() {
                    let right = i / d == 2 || (a - b).abs() <= 2e-3;
                    assert!(right, "{isa}: {bits} bits, {bad}: row {}, channel {} is {a}, not {b}", i / d, i % d);
                }
            }
        }
    }
}

#[test]
fn the_same_bits_for_any_number_of_threads_any_batch_and_again() {
    for isa in Isa::here() {
        for (keys, values) in [
            (Store::kivi(4, Axis::Tokens), Store::kivi(2, Axis::Channels)),
            (Store::Plain(DType::F16), Store::kivi(8, Axis::Channels)),
        ] {
            let mut random = Random::new(3);
            let (b, h, s, d) = (3, 2, 3000, 128);
            let (k, v) = (random.tensor(&[b, h, s, d], DType::F16), random.tensor(&[b, h, s, d], DType::F16));
            let q = random.tensor(&[b, 8, 1, d], DType::F16);
            let options = options(d, true, 0, DType::F16);
            let segment = Segment::full(keys.rows(&k), values.rows(&v), 1);
            let all = attend(isa, &q, std::slice::from_ref(&segment), options).unwrap();
            for threads in [1, 2, 5] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let again = pool.install(|| attend(isa, &q, std::slice::from_ref(&segment), options).unwrap());
                assert_eq!(bits(&all), bits(&again), "{isa}: {threads} threads");
            }
            let one = |x: &Tensor, i: usize| {
                let shape: Vec<usize> = [1].into_iter().chain(x.shape()[1..].iter().copied()).collect();
                let len = x.len() / b;
                Tensor::from_vec(x.as_slice::<half::f16>().unwrap()[i * len..][..len].to_vec(), &shape).unwrap()
            };
            for i in 0..b {
                let alone = Segment::full(keys.rows(&one(&k, i)), values.rows(&one(&v, i)), 1);
                let alone = attend(isa, &one(&q, i), &[alone], options).unwrap();
                assert_eq!(bits(&alone).0, one(&all.out, i).to_bytes().unwrap(), "{isa}: sequence {i}");
            }
        }
    }
}

#[test]
fn segments_give_what_one_long_segment_gives() {
    for isa in Isa::here() {
        let mut random = Random::new(5);
        let (h, d) = (2, 64);
        let (keys, values) = (Store::kivi(4, Axis::Tokens), Store::kivi(4, Axis::Channels));
        let lens = [256, 512, 70];
        let total: usize = lens.iter().sum();
        let (k, v) = (random.tensor(&[1, h, total, d], DType::F32), random.tensor(&[1, h, total, d], DType::F32));
        let q = random.tensor(&[1, 4, 2, d], DType::F32);
        let part = |x: &Tensor, from: usize, len: usize| {
            let x = x.as_slice::<f32>().unwrap();
            let rows = (0..h).flat_map(|i| x[(i * total + from) * d..][..len * d].to_vec()).collect();
            Tensor::from_vec(rows, &[1, h, len, d]).unwrap()
        };
        let mut from = 0;
        let segments: Vec<Segment> = lens
            .iter()
            .map(|&len| {
                let (keys, values) = (keys.rows(&part(&k, from, len)), values.rows(&part(&v, from, len)));
                let spans = vec![Span { len, q_offset: (total - 2 - from) as i64 }];
                from += len;
                Segment { keys, values, spans }
            })
            .collect();
        let options = options(d, true, 600, DType::F32);
        let whole = Segment::full(keys.rows(&k), values.rows(&v), 2);
        let a = attend(isa, &q, &segments, options).unwrap().out.to_f32_vec().unwrap();
        let b = attend(isa, &q, &[whole], options).unwrap().out.to_f32_vec().unwrap();
        let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 2e-6, "{isa}: {worst}");
    }
}
