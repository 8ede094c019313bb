//! Prefill attention: many queries, any pair of formats.

use slimkv::attend::{Segment, Span};
use slimkv::cpu::Isa;
use slimkv::format::Axis;
use slimkv::{DType, Tensor};

use crate::support::{Random, Store, attend, bits, check, options};

#[test]
fn any_pair_of_formats_shapes_masks_and_segments() {
    for seed in 0..60 {
        let mut random = Random::new(1000 + seed);
        let (b, h) = (1 + random.below(2), 1 + random.below(2));
        let (group, s_q) = (1 + random.below(5), 17 + random.below(150));
        let d = random.pick(&[1, 7, 16, 33, 64, 80, 96, 128]);
        let pieces = 1 + random.below(3);
        let mut segments = Vec::new();
        for _ in 0..pieces {
            let len = random.pick(&[0, 1, 2, 31, 100, 129, 257]);
            let shape = [b, h, len, d];
            let (k, v) = (random.tensor(&shape, DType::F32), random.tensor(&shape, DType::F32));
            let (keys, values) = (Store::any(&mut random).rows(&k), Store::any(&mut random).rows(&v));
            let mut span = || Span { len: random.below(len + 1), q_offset: random.below(2 * len + 300) as i64 - 150 };
            let spans = (0..b).map(|_| span()).collect();
            segments.push(Segment { keys, values, spans });
        }
        let dtype = random.pick(&[DType::F16, DType::BF16, DType::F32]);
        let q = random.tensor(&[b, h * group, s_q, d], dtype);
        let out = random.pick(&[DType::F16, DType::BF16, DType::F32]);
        let options = options(d, random.below(3) != 0, random.pick(&[0, 0, 1, 50, 130]), out);
        for isa in Isa::here() {
            check(isa, &q, &segments, options, &format!("seed {seed}: S_q {s_q} {options:?}"));
        }
    }
}

#[test]
fn more_queries_than_tokens_and_one_token() {
    for isa in Isa::here() {
        for s in [0, 1, 5] {
            let mut random = Random::new(7);
            let (k, v) = (random.tensor(&[1, 2, s, 64], DType::F16), random.tensor(&[1, 2, s, 64], DType::F16));
            let q = random.tensor(&[1, 4, 40, 64], DType::F16);
            let plain = Store::Plain(DType::F16);
            let segment = Segment::full(plain.rows(&k), plain.rows(&v), 40);
            check(isa, &q, &[segment], options(64, true, 0, DType::F16), &format!("{s} tokens"));
        }
    }
}

#[test]
fn the_same_bits_for_any_number_of_threads() {
    let mut random = Random::new(3);
    let (k, v) = (random.tensor(&[2, 2, 500, 64], DType::F16), random.tensor(&[2, 2, 500, 64], DType::F16));
    let q = random.tensor(&[2, 8, 300, 64], DType::F16);
    let segment = Segment::full(Store::kivi(4, Axis::Tokens).rows(&k), Store::kivi(2, Axis::Channels).rows(&v), 300);
    let options = options(64, true, 0, DType::F16);
    for isa in Isa::here() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            bits(&pool.install(|| attend(isa, &q, std::slice::from_ref(&segment), options).unwrap()))
        };
        assert!(run(1) == run(3), "{isa}");
    }
}

#[test]
fn a_future_key_changes_nothing() {
    let mut random = Random::new(4);
    let (k, v) = (random.tensor(&[1, 1, 100, 64], DType::F32), random.tensor(&[1, 1, 100, 64], DType::F32));
    let q = random.tensor(&[1, 1, 100, 64], DType::F32);
    let plain = Store::Plain(DType::F32);
    let options = options(64, true, 0, DType::F32);
    let mut changed = k.clone();
    changed.as_mut_slice::<f32>().unwrap()[99 * 64..].fill(1000.0);
    for isa in Isa::here() {
        let run = |k: &Tensor| attend(isa, &q, &[Segment::full(plain.rows(k), plain.rows(&v), 100)], options).unwrap();
        let (a, b) = (run(&k).out.to_vec::<f32>().unwrap(), run(&changed).out.to_vec::<f32>().unwrap());
        assert_eq!(a[..99 * 64], b[..99 * 64], "{isa}");
        assert_ne!(a[99 * 64..], b[99 * 64..], "{isa}");
    }
}
