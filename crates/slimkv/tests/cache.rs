//! The caches: what they hold, what they weigh, and that only tokens - not calls - decide it.

mod common;

use common::{Random, Tolerance, devices, difference};
use proptest::prelude::*;
use slimkv::attend::{Options, Segment, Span, oracle};
use slimkv::cache::{Attend, Geometry, KvCache, Method};
use slimkv::format::{Plain, Rows};
use slimkv::{DType, Device, DeviceKind, Error, Tensor};

const METHODS: [&str; 9] = [
    "fp16",
    "kivi:8",
    "kivi:4",
    "kivi:3",
    "kivi:2",
    "kivi:1",
    "kivi:k8v4,group=64,residual=0",
    "kivi:k2v4,group=16,residual=40",
    "kivi:2,first=1:8,last=1:fp16",
];

/// The methods to try: all of them on the CPU, one of each kind on a GPU, which may be a software driver.
fn methods(device: &Device) -> Vec<&'static str> {
    match device.kind() {
        DeviceKind::Cpu => METHODS.to_vec(),
        _ => vec!["fp16", "kivi:4", "kivi:k2v4,group=16,residual=40", "kivi:2,first=1:8,last=1:fp16"],
    }
}

/// Rows `[from, to)` of the token axis of `[B, H, n, D]`.
fn rows(t: &Tensor, from: usize, to: usize) -> Tensor {
    let &[b, h, n, d] = t.shape() else { panic!() };
    let values = t.to_f32_vec().unwrap();
    let picked: Vec<f32> =
        (0..b * h).flat_map(|m| values[(m * n + from) * d..(m * n + to) * d].iter().copied()).collect();
    Tensor::from_vec(picked, &[b, h, to - from, d]).unwrap().to_device(&t.device()).unwrap()
}

/// Sequence `b` of a batch.
fn sequence(t: &Tensor, b: usize) -> Tensor {
    let size = t.len() / t.shape()[0];
    let mut shape = t.shape().to_vec();
    shape[0] = 1;
    let values = t.to_f32_vec().unwrap()[b * size..(b + 1) * size].to_vec();
    Tensor::from_vec(values, &shape).unwrap().to_float(t.dtype()).unwrap().to_device(&t.device()).unwrap()
}

struct Data {
    geometry: Geometry,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    scale: f32,
}

fn data(tokens: usize, batch: usize, head_dim: usize, device: &Device) -> Data {
    let geometry = Geometry { layers: 3, kv_heads: 2, head_dim, batch };
    let mut random = Random(tokens as u64 + 1000 * batch as u64);
    let shape = [batch, 2, tokens, head_dim];
    Data {
        geometry,
        k: random.tensor(DType::F32, &shape, device),
        v: random.tensor(DType::F32, &shape, device),
        q: random.tensor(DType::F32, &[batch, 4, 1, head_dim], device),
        scale: 1.0 / (head_dim as f32).sqrt(),
    }
}

fn method(text: &str) -> Method {
    text.parse().unwrap()
}

fn append_in_chunks(cache: &mut KvCache, data: &Data, chunks: &[usize]) {
    for layer in 0..data.geometry.layers {
        let mut at = 0;
        for &n in chunks {
            cache.layer(layer).append(&rows(&data.k, at, at + n), &rows(&data.v, at, at + n)).unwrap();
            at += n;
        }
    }
}

fn outputs(cache: &mut KvCache, data: &Data) -> Vec<Tensor> {
    (0..data.geometry.layers).map(|i| cache.layer(i).attend(&data.q, data.scale).unwrap()).collect()
}

fn assert_same_bits(found: &[Tensor], expected: &[Tensor], label: &str) {
    for (layer, (f, e)) in found.iter().zip(expected).enumerate() {
        if let Some(d) = difference(f, e, Tolerance::Exact) {
            panic!("{label}, layer {layer}: {d}");
        }
    }
}

#[test]
fn chunks_do_not_change_the_result() {
    let tokens = 333;
    for device in devices() {
        let data = data(tokens, 1, 64, &device);
        for text in methods(&device) {
            let mut whole = KvCache::new(method(text), data.geometry, &device).unwrap();
            append_in_chunks(&mut whole, &data, &[tokens]);
            let expected = outputs(&mut whole, &data);
            let mut one_by_one = vec![1; tokens];
            if device.kind() != DeviceKind::Cpu {
                // The steps that matter: a tail that fills, and one that is packed and moves.
                one_by_one.splice(..tokens - 40, [tokens - 40]);
            }
            for chunks in [one_by_one, vec![32, 1, 300], vec![128, 160, 45], vec![0, 200, 0, 133]] {
                let mut cache = KvCache::new(method(text), data.geometry, &device).unwrap();
                append_in_chunks(&mut cache, &data, &chunks);
                assert_eq!(cache.len(), tokens);
                assert_same_bits(&outputs(&mut cache, &data), &expected, &format!("{text} on {device}"));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_chunks_give_the_same_result(
        text in prop::sample::select(METHODS.to_vec()), chunks in prop::collection::vec(0usize..150, 1..8),
    ) {
        let device = Device::cpu();
        let tokens = chunks.iter().sum();
        let data = data(tokens, 1, 32, &device);
        let mut whole = KvCache::new(method(text), data.geometry, &device).unwrap();
        append_in_chunks(&mut whole, &data, &[tokens]);
        let mut cache = KvCache::new(method(text), data.geometry, &device).unwrap();
        append_in_chunks(&mut cache, &data, &chunks);
        assert_same_bits(&outputs(&mut cache, &data), &outputs(&mut whole, &data), text);
        prop_assert_eq!(cache.bytes(), whole.bytes());
    }
}

#[test]
fn the_fp16_cache_is_attention_over_f16_rows() {
    for device in devices() {
        let data = data(1500, 1, 80, &device);
        let mut cache = KvCache::new(method("fp16"), data.geometry, &device).unwrap();
        append_in_chunks(&mut cache, &data, &[700, 800]);
        let q = Random(3).tensor(DType::F32, &[1, 6, 5, 80], &device);
        for window in [0, 7, 1200] {
            let attend = Attend { window, ..Attend::new(data.scale) };
            let found = cache.layer(1).attend_with(&q, attend).unwrap();
            let f16 = |t: &Tensor| Rows::Plain(Plain::new("test", "k", t.to_float(DType::F16).unwrap()).unwrap());
            let options = Options { scale: data.scale, causal: true, window, out_dtype: DType::F32 };
            let segment = Segment::full(f16(&data.k), f16(&data.v), 5);
            let exact = oracle::attend("test", &q, &[segment], options).unwrap().rounded(&q, options).unwrap();
            let host = |t: &Tensor| t.to_device(&Device::cpu()).unwrap();
            assert_eq!(difference(&host(&found.out), &exact.out, Tolerance::Close(2e-5)), None, "{device} {window}");
            assert_eq!(difference(&host(&found.lse), &exact.lse, Tolerance::Close(2e-5)), None, "{device} {window}");
        }
    }
}

#[test]
fn every_width_is_as_close_as_its_step() {
    for device in devices() {
        let data = data(700, 1, 64, &device);
        let mut exact = KvCache::new(method("fp16"), data.geometry, &device).unwrap();
        append_in_chunks(&mut exact, &data, &[700]);
        let exact = common::numbers(&outputs(&mut exact, &data)[0]);
        let mut last = 0.0;
        for text in ["kivi:8", "kivi:4", "kivi:3", "kivi:2", "kivi:1"] {
            let mut cache = KvCache::new(method(text), data.geometry, &device).unwrap();
            append_in_chunks(&mut cache, &data, &[700]);
            let found = common::numbers(&outputs(&mut cache, &data)[0]);
            let error = found.iter().zip(&exact).map(|(f, e)| (f - e).powi(2)).sum::<f64>().sqrt();
            assert!(error > last, "{text} on {device}: {error} should exceed {last}");
            last = error;
        }
        assert!(last.is_finite());
    }
}

#[test]
fn the_newest_tokens_are_exact() {
    let device = Device::cpu();
    let data = data(120, 1, 64, &device);
    let run = |text| {
        let mut cache = KvCache::new(method(text), data.geometry, &device).unwrap();
        append_in_chunks(&mut cache, &data, &[120]);
        outputs(&mut cache, &data)
    };
    assert_same_bits(&run("kivi:1"), &run("fp16"), "120 tokens are within the residual of 128");
}

#[test]
fn sequences_of_a_batch_are_alone() {
    for device in devices() {
        let data = data(400, 3, 64, &device);
        let lens = [400, 0, 257];
        for text in methods(&device) {
            let mut batch = KvCache::new(method(text), data.geometry, &device).unwrap();
            for layer in 0..3 {
                batch.layer(layer).append_ragged(&data.k, &data.v, &lens).unwrap();
                batch.layer(layer).append_ragged(&rows(&data.k, 0, 9), &rows(&data.v, 0, 9), &[0, 9, 3]).unwrap();
            }
            let found = batch.layer(1).attend(&data.q, data.scale).unwrap();
            for (b, (first, second)) in [(400, 0), (0, 9), (257, 3)].into_iter().enumerate() {
                assert_eq!(batch.sequence_len(b), first + second);
                let alone = Geometry { batch: 1, ..data.geometry };
                let mut cache = KvCache::new(method(text), alone, &device).unwrap();
                let (k, v) = (sequence(&data.k, b), sequence(&data.v, b));
                cache.layer(1).append(&rows(&k, 0, first), &rows(&v, 0, first)).unwrap();
                cache.layer(1).append(&rows(&k, 0, second), &rows(&v, 0, second)).unwrap();
                let expected = cache.layer(1).attend(&sequence(&data.q, b), data.scale).unwrap();
                assert_same_bits(&[sequence(&found, b)], &[expected], &format!("{text} on {device}, sequence {b}"));
            }
        }
    }
}

#[test]
fn ragged_queries_stand_at_their_own_ends() {
    for device in devices() {
        let data = data(50, 2, 64, &device);
        let mut cache = KvCache::new(method("kivi:4,residual=0"), data.geometry, &device).unwrap();
        cache.layer(0).append_ragged(&data.k, &data.v, &[50, 20]).unwrap();
        let q = Random(5).tensor(DType::F32, &[2, 4, 3, 64], &device);
        let attend = Attend { query_lens: Some(&[3, 1]), ..Attend::new(data.scale) };
        let ragged = cache.layer(0).attend_with(&q, attend).unwrap().out;
        let mut alone =
            KvCache::new(method("kivi:4,residual=0"), Geometry { batch: 1, ..data.geometry }, &device).unwrap();
        alone.layer(0).append(&rows(&sequence(&data.k, 1), 0, 20), &rows(&sequence(&data.v, 1), 0, 20)).unwrap();
        let expected = alone.layer(0).attend(&rows(&sequence(&q, 1), 0, 1), data.scale).unwrap();
        let found = rows(&sequence(&ragged, 1), 0, 1);
        assert_eq!(difference(&found, &expected, Tolerance::Close(2e-5)), None, "{device}");
    }
}

#[test]
fn truncation_within_the_tail_is_exact() {
    for device in devices() {
        let data = data(600, 1, 64, &device);
        for text in methods(&device) {
            let mut cache = KvCache::new(method(text), data.geometry, &device).unwrap();
            append_in_chunks(&mut cache, &data, &[300]);
            let expected = outputs(&mut cache, &data);
            // A speculation of eight tokens is rejected.
            for layer in 0..3 {
                cache.layer(layer).append(&rows(&data.k, 500, 508), &rows(&data.v, 500, 508)).unwrap();
            }
            cache.truncate(300).unwrap();
            assert_eq!(cache.len(), 300);
            // Where no group was completed by the rejected tokens, nothing can tell that they were there.
            if matches!(text, "fp16" | "kivi:8" | "kivi:4" | "kivi:3" | "kivi:2" | "kivi:1") {
                assert_same_bits(&outputs(&mut cache, &data), &expected, &format!("{text} on {device}"));
            }
        }
    }
}

#[test]
fn truncation_into_packed_tokens_keeps_them() {
    for device in devices() {
        let data = data(600, 1, 64, &device);
        for (text, tolerance) in [("fp16", 0.0), ("kivi:8", 2e-3), ("kivi:2", 2e-3)] {
            let keeps = [0, 1, 31, 32, 100, 333, 471, 472, 500];
            let keeps = if device.kind() == DeviceKind::Cpu { &keeps[..] } else { &keeps[6..] };
            for &keep in keeps {
                let mut cache = KvCache::new(method(text), data.geometry, &device).unwrap();
                append_in_chunks(&mut cache, &data, &[600]);
                // What the cache holds of the first tokens, seen through a mask in place of a truncation.
                let attend = Attend { causal: true, query_lens: None, ..Attend::new(data.scale) };
                let padding = rows(&data.q, 0, 1).to_f32_vec().unwrap();
                let queries = 601 - keep.max(1);
                let q: Vec<f32> = (0..4).flat_map(|h| padding[h * 64..(h + 1) * 64].repeat(queries)).collect();
                let q = Tensor::from_vec(q, &[1, 4, queries, 64]).unwrap().to_device(&device).unwrap();
                let masked = rows(&cache.layer(0).attend_with(&q, attend).unwrap().out, 0, 1);
                cache.truncate(keep).unwrap();
                assert_eq!(cache.len(), keep);
                let found = cache.layer(0).attend(&data.q, data.scale).unwrap();
                if keep == 0 {
                    assert!(common::numbers(&found).iter().all(|&x| x == 0.0));
                } else {
                    let close = Tolerance::Close(tolerance + 2e-5);
                    assert_eq!(difference(&found, &masked, close), None, "{text} {keep} on {device}");
                }
                // And it goes on from there.
                cache.layer(0).append(&rows(&data.k, 0, 300), &rows(&data.v, 0, 300)).unwrap();
                assert_eq!(cache.layer(0).len(0), keep + 300);
            }
        }
    }
}

#[test]
fn clear_gives_everything_back() {
    for device in devices() {
        let data = data(300, 1, 64, &device);
        let mut cache = KvCache::new(method("kivi:4"), data.geometry, &device).unwrap();
        assert_eq!(cache.bytes(), 0);
        append_in_chunks(&mut cache, &data, &[300]);
        let expected = outputs(&mut cache, &data);
        cache.clear();
        assert_eq!((cache.bytes(), cache.len()), (0, 0));
        append_in_chunks(&mut cache, &data, &[300]);
        assert_same_bits(&outputs(&mut cache, &data), &expected, "after clear");
    }
}

#[test]
fn the_estimate_is_what_gets_allocated() {
    for device in devices() {
        for text in methods(&device) {
            for tokens in [1, 100, 129, 200, 1200, 3000] {
                let data = data(tokens, 2, 64, &device);
                let mut cache = KvCache::new(method(text), data.geometry, &device).unwrap();
                append_in_chunks(&mut cache, &data, &[tokens]);
                let estimate = KvCache::bytes_for(&method(text), data.geometry, tokens, &device);
                assert_eq!(cache.bytes(), estimate, "{text}, {tokens} tokens on {device}");
            }
        }
    }
}

#[test]
fn reserved_room_is_one_block_and_changes_no_result() {
    for device in devices() {
        let data = data(2500, 1, 64, &device);
        let mut grown = KvCache::new(method("kivi:4"), data.geometry, &device).unwrap();
        let mut reserved = KvCache::new(method("kivi:4"), data.geometry, &device).unwrap();
        reserved.reserve(2500).unwrap();
        append_in_chunks(&mut grown, &data, &[2500]);
        append_in_chunks(&mut reserved, &data, &[2500]);
        for (f, e) in outputs(&mut reserved, &data).iter().zip(&outputs(&mut grown, &data)) {
            assert_eq!(difference(f, e, Tolerance::Close(1e-5)), None, "{device}");
        }
    }
}

#[test]
fn bad_input_is_named_and_changes_nothing() {
    let device = Device::cpu();
    let data = data(40, 1, 64, &device);
    let mut cache = KvCache::new(method("kivi:4"), data.geometry, &device).unwrap();
    append_in_chunks(&mut cache, &data, &[40]);
    let (expected, bytes) = (outputs(&mut cache, &data), cache.bytes());
    let wide = Tensor::zeros(DType::F32, &[1, 2, 3, 65], &device).unwrap();
    let heads = Tensor::zeros(DType::F32, &[1, 3, 3, 64], &device).unwrap();
    let integers = Tensor::zeros(DType::U8, &[1, 2, 3, 64], &device).unwrap();
    let three = Tensor::zeros(DType::F32, &[1, 2, 3, 64], &device).unwrap();
    let flat = Tensor::zeros(DType::F32, &[6], &device).unwrap();
    let named = |result: slimkv::Result<()>, arg: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.starts_with("KvCache::") && text.contains(&format!("`{arg}`")), "{text}");
    };
    named(cache.layer(0).append(&wide, &three), "k");
    named(cache.layer(0).append(&three, &wide), "v");
    named(cache.layer(0).append(&heads, &three), "k");
    named(cache.layer(0).append(&integers, &three), "k");
    named(cache.layer(0).append(&flat, &three), "k");
    named(cache.layer(0).append(&three, &rows(&data.v, 0, 2)), "v");
    named(cache.layer(3).append(&three, &three), "layer");
    named(cache.layer(0).append_ragged(&three, &three, &[4]), "counts");
    named(cache.layer(0).append_ragged(&three, &three, &[1, 1]), "counts");
    named(cache.layer(0).attend(&flat, 1.0).map(drop), "q");
    named(cache.layer(0).attend(&wide, 1.0).map(drop), "q");
    named(cache.layer(0).attend(&heads, 1.0).map(drop), "q");
    named(cache.layer(0).attend(&data.q, f32::NAN).map(drop), "scale");
    named(cache.truncate_sequence(1, 0), "sequence");
    assert!(matches!(
        KvCache::new(method("fp16"), Geometry { head_dim: 0, ..data.geometry }, &device),
        Err(Error::Value { arg: "head_dim", .. })
    ));
    assert_eq!((cache.len(), cache.bytes()), (40, bytes));
    assert_same_bits(&outputs(&mut cache, &data), &expected, "after errors");
}

#[test]
fn spans_past_the_capacity_are_refused() {
    let device = Device::cpu();
    let k = Tensor::zeros(DType::F16, &[1, 1, 4, 64], &device).unwrap();
    let rows = || Rows::Plain(Plain::new("test", "k", k.clone()).unwrap());
    let segment = Segment { keys: rows(), values: rows(), spans: vec![Span { len: 5, q_offset: 0 }] };
    let q = Tensor::zeros(DType::F16, &[1, 1, 1, 64], &device).unwrap();
    let options = Options { scale: 1.0, causal: false, window: 0, out_dtype: DType::F16 };
    assert!(matches!(slimkv::attend::attend("test", &q, &[segment], options), Err(Error::Value { arg: "spans", .. })));
}
