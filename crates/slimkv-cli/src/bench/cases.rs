//! What each kind of benchmark runs.

use slimkv::attend::{self, Options, Segment};
use slimkv::cache::{Attend, Geometry, KvCache, LayerMethod, Method};
use slimkv::format::{RowCopy, RowFormat, RowShape, Rows};
use slimkv::{DType, Device, DeviceKind, Tensor};

use super::clock::{self, Flush, Timing, rotation, time};
use super::rows::{Part, first_head, random_f16, random_rows};
use super::{Measured, Shape};
use crate::failure::Outcome;

const OP: &str = "bench";
const DEQUANTISE: &str = "dequantise + attend";
const FP16: &str = "fp16 attend";
const FP16_FORMAT: RowFormat = RowFormat::Plain(DType::F16);

/// One case of a benchmark.
pub struct Case<'a> {
    pub shape: &'a Shape,
    pub method: &'a Method,
    pub device: &'a Device,
    pub warm: bool,
}

impl Case<'_> {
    fn formats(&self) -> (RowFormat, RowFormat) {
        self.method.layer(0, 1).formats()
    }

    fn row_shape(&self) -> RowShape {
        let Shape { b, hkv, d, s, .. } = *self.shape;
        RowShape { batch: b, heads: hkv, capacity: s, head_dim: d }
    }

    fn options(&self) -> Options {
        let scale = 1.0 / (self.shape.d as f32).sqrt();
        Options { scale, causal: self.shape.sq > 1, window: 0, out_dtype: DType::F16 }
    }

    /// As many caches as it takes for each visit to be cold.
    fn segments(&self, (keys, values): (RowFormat, RowFormat)) -> Outcome<Vec<Segment>> {
        let shape = self.row_shape();
        let count = rotation(self.device, keys.byte_len(shape) + values.byte_len(shape), self.warm);
        (0..count as u64)
            .map(|i| {
                let keys = random_rows(keys, 2 * i + 1, shape, self.device)?;
                let values = random_rows(values, 2 * i + 2, shape, self.device)?;
                Ok(Segment::full(keys, values, self.shape.sq))
            })
            .collect()
    }

    fn queries(&self) -> Outcome<Tensor> {
        let Shape { b, hq, d, sq, .. } = *self.shape;
        random_f16(0, &[b, hq, sq, d], self.device)
    }
}

/// The fp16 time at one shape, measured once for all formats.
#[derive(Default)]
pub struct Fp16(Option<f64>);

/// Attention over packed rows.
pub fn attend(case: &Case, fp16: &mut Fp16) -> Outcome<Measured> {
    let formats = case.formats();
    let plain = formats == (FP16_FORMAT, FP16_FORMAT);
    let fp16_us = match fp16.0 {
        Some(us) => us,
        None if plain => 0.0,
        None => {
            let us = attend_time(case, &case.segments((FP16_FORMAT, FP16_FORMAT))?)?.median_us;
            *fp16.0.insert(us)
        }
    };
    let segments = case.segments(formats)?;
    let timing = attend_time(case, &segments)?;
    let baselines = match plain {
        true => vec![(FP16, *fp16.0.insert(timing.median_us))],
        false => vec![(DEQUANTISE, dequantise_time(case, &segments)?), (FP16, fp16_us)],
    };
    let bytes = segments[0].keys.byte_len() + segments[0].values.byte_len();
    Ok(Measured { timing, bytes, max_abs_error: attend_error(case, &segments[0])?, baselines })
}

fn attend_time(case: &Case, segments: &[Segment]) -> Outcome<Timing> {
    let q = case.queries()?;
    time(
        case.device,
        || (),
        |i| {
            let segment = &segments[i % segments.len()..][..1];
            attend::attend(OP, &q, segment, case.options())?;
            Ok(())
        },
    )
}

/// What a cache without fused kernels does: decode all rows to f16, then attend to those.
fn dequantise_time(case: &Case, segments: &[Segment]) -> Outcome<f64> {
    let q = case.queries()?;
    let shape = case.row_shape();
    let mut plain = Segment::full(
        FP16_FORMAT.allocate(shape, case.device)?,
        FP16_FORMAT.allocate(shape, case.device)?,
        case.shape.sq,
    );
    let copies = vec![RowCopy { from: 0, to: 0, rows: shape.capacity }; shape.batch];
    let timing = time(
        case.device,
        || (),
        |i| {
            let packed = &segments[i % segments.len()];
            plain.keys.write(OP, &packed.keys, &copies)?;
            plain.values.write(OP, &packed.values, &copies)?;
            attend::attend(OP, &q, std::slice::from_ref(&plain), case.options())?;
            Ok(())
        },
    )?;
    Ok(timing.median_us)
}

/// The largest distance from the oracle, over the query heads of one KV head.
fn attend_error(case: &Case, segment: &Segment) -> Outcome<f64> {
    let q = case.queries()?;
    let found = attend::attend(OP, &q, std::slice::from_ref(segment), case.options())?;
    let part = Part::of(case.shape, &q, segment)?;
    let exact = attend::oracle::attend(OP, &part.q, std::slice::from_ref(&part.segment), case.options())?;
    let found = super::rows::front(&found.out, part.q.shape())?.to_f32_vec()?;
    Ok(found.iter().zip(&exact.out).map(|(f, e)| (f64::from(*f) - e).abs()).fold(0.0, f64::max))
}

/// Quantising and packing rows that are there as f16.
pub fn encode(case: &Case) -> Outcome<Measured> {
    let shape = case.row_shape();
    let formats = case.formats();
    let bytes = case_bytes(formats, shape) + case_bytes((FP16_FORMAT, FP16_FORMAT), shape);
    let count = rotation(case.device, bytes, case.warm);
    let sources = (0..2 * count as u64)
        .map(|i| random_rows(FP16_FORMAT, i + 1, shape, case.device))
        .collect::<Outcome<Vec<_>>>()?;
    let run = |(keys, values): (RowFormat, RowFormat)| -> Outcome<(Timing, Rows, Rows)> {
        let allocate = |format: RowFormat| -> slimkv::Result<Vec<Rows>> {
            (0..count).map(|_| format.allocate(shape, case.device)).collect()
        };
        let (mut keys, mut values) = (allocate(keys)?, allocate(values)?);
        let copies = vec![RowCopy { from: 0, to: 0, rows: shape.capacity }; shape.batch];
        let timing = time(
            case.device,
            || (),
            |i| {
                let i = i % count;
                keys[i].write(OP, &sources[2 * i], &copies)?;
                values[i].write(OP, &sources[2 * i + 1], &copies)?;
                Ok(())
            },
        )?;
        Ok((timing, keys.swap_remove(0), values.swap_remove(0)))
    };
    let (timing, keys, values) = run(formats)?;
    let (copy, ..) = run((FP16_FORMAT, FP16_FORMAT))?;
    let error = encode_error(&keys, &sources[0])?.max(encode_error(&values, &sources[1])?);
    Ok(Measured { timing, bytes, max_abs_error: error, baselines: vec![("fp16 copy", copy.median_us)] })
}

/// The largest distance between the rows as they decode and as the oracle's own codes decode: 0 where codes are exact.
fn encode_error(rows: &Rows, source: &Rows) -> Outcome<f64> {
    use slimkv::format::affine::oracle;
    let found = first_head(rows)?.decode_oracle()?;
    let values = first_head(source)?.decode_oracle()?;
    let expected = match rows {
        Rows::Affine(rows) => {
            let shape = rows.shape();
            let levels = (1 << rows.bits()) - 1;
            let params = rows.scale().dtype();
            let (tokens, channels) = (shape.capacity, shape.head_dim);
            let (axis, group) = (rows.axis(), rows.group());
            let quantized = oracle::quantize(&values, tokens, channels, axis, group, levels, 1e-8, params);
            let columns = axis.param_shape(tokens, channels, group)[1];
            let param = |i: usize| match axis {
                slimkv::format::Axis::Tokens => i / channels / group * columns + i % channels,
                slimkv::format::Axis::Channels => i / channels * columns + i % channels / group,
            };
            quantized.codes.iter().enumerate().map(|(i, &code)| quantized.params[param(i)].decode(code)).collect()
        }
        _ => values,
    };
    Ok(found.iter().zip(&expected).map(|(f, e)| f64::from(f - e).abs()).fold(0.0, f64::max))
}

fn case_bytes((keys, values): (RowFormat, RowFormat), shape: RowShape) -> usize {
    keys.byte_len(shape) + values.byte_len(shape)
}

/// Tokens whose appends are timed together, so that each sample holds its share of packing whole groups.
const APPENDS: usize = 256;

/// One token more in a cache that holds `s` tokens.
pub fn append(case: &Case) -> Outcome<Measured> {
    let timing = append_time(case, case.method.clone())?;
    let fp16 = append_time(case, LayerMethod::Fp16.into())?;
    let token = RowShape { capacity: 1, ..case.row_shape() };
    let (keys, values) = case.formats();
    let bits = keys.bits_per_value(token.head_dim) + values.bits_per_value(token.head_dim);
    let bytes = (bits / 8.0 * (token.batch * token.heads * token.head_dim) as f64).round() as usize;
    Ok(Measured { timing, bytes, max_abs_error: append_error(case)?, baselines: vec![("fp16 append", fp16.median_us)] })
}

fn geometry(shape: &Shape) -> Geometry {
    Geometry { layers: 1, kv_heads: shape.hkv, head_dim: shape.d, batch: shape.b }
}

fn append_time(case: &Case, method: Method) -> Outcome<Timing> {
    let Shape { b, hkv, d, s, .. } = *case.shape;
    let mut cache = KvCache::new(method, geometry(case.shape), case.device)?;
    let (k, v) = (random_f16(1, &[b, hkv, s, d], case.device)?, random_f16(2, &[b, hkv, s, d], case.device)?);
    cache.layer(0).append(&k, &v)?;
    let token = [b, hkv, 1, d];
    let (k, v) = (random_f16(3, &token, case.device)?, random_f16(4, &token, case.device)?);
    let flush = (!case.warm && case.device.kind() == DeviceKind::Cpu).then(|| Flush::new(clock::COLD_CPU));
    let timing = time(
        case.device,
        || flush.iter().for_each(Flush::read),
        |_| {
            for _ in 0..APPENDS {
                cache.layer(0).append(&k, &v)?;
            }
            Ok(())
        },
    )?;
    let one = |us: f64| us / APPENDS as f64;
    Ok(Timing { median_us: one(timing.median_us), min_us: one(timing.min_us) })
}

/// The largest difference between attention over tokens that came one by one and over the same tokens in one call.
fn append_error(case: &Case) -> Outcome<f64> {
    const TOKENS: usize = 300;
    let Shape { b, hq, hkv, d, .. } = *case.shape;
    let q = random_f16(5, &[b, hq, 1, d], case.device)?;
    let tokens = |n: u64, tokens: usize| random_f16(n, &[b, hkv, tokens, d], case.device);
    let mut results = Vec::new();
    for step in [TOKENS, 1] {
        let mut cache = KvCache::new(case.method.clone(), geometry(case.shape), case.device)?;
        let (k, v) = (tokens(6, TOKENS)?, tokens(7, TOKENS)?);
        for start in (0..TOKENS).step_by(step) {
            let part = |t: &Tensor| slice_tokens(t, start, step);
            cache.layer(0).append(&part(&k)?, &part(&v)?)?;
        }
        results.push(cache.layer(0).attend_with(&q, Attend::new(1.0 / (d as f32).sqrt()))?.out.to_f32_vec()?);
    }
    Ok(results[0].iter().zip(&results[1]).map(|(a, b)| f64::from(a - b).abs()).fold(0.0, f64::max))
}

/// Tokens `start..start + count` of `[B, H, S, D]`.
fn slice_tokens(tensor: &Tensor, start: usize, count: usize) -> Outcome<Tensor> {
    let &[b, h, s, d] = tensor.shape() else { unreachable!("made with four axes") };
    let row = d * tensor.dtype().size();
    let bytes = tensor.to_bytes()?;
    let cut: Vec<u8> = (0..b * h).flat_map(|i| &bytes[(i * s + start) * row..][..count * row]).copied().collect();
    Ok(Tensor::from_bytes(tensor.dtype(), &cut, &[b, h, count, d], &tensor.device())?)
}
