//! The definition of attention, in float64 plain loops over the decoded rows.

use super::{Options, Segment, check};
use crate::{Result, Tensor};

/// What the oracle computes, unrounded.
#[derive(Debug, Clone)]
pub struct Exact {
    /// `[B, Hq, Sq, D]`.
    pub out: Vec<f64>,
    /// `[B, Hq, Sq]`.
    pub lse: Vec<f64>,
}

/// Attention by the definition: slow, and right.
pub fn attend(op: &'static str, q: &Tensor, segments: &[Segment], options: Options) -> Result<Exact> {
    let g = check(op, q, segments, options)?;
    let d = g.head_dim;
    let queries = q.to_f32_vec()?;
    let decoded = segments
        .iter()
        .map(|s| Ok((s.keys.decode_oracle()?, s.values.decode_oracle()?)))
        .collect::<Result<Vec<_>>>()?;
    let mut out = vec![0.0; g.batch * g.q_heads * g.s_q * d];
    let mut lse = vec![f64::NEG_INFINITY; g.batch * g.q_heads * g.s_q];
    for b in 0..g.batch {
        for h in 0..g.q_heads {
            let kv_head = h / g.group();
            for i in 0..g.s_q {
                let row = (b * g.q_heads + h) * g.s_q + i;
                let query = &queries[row * d..][..d];
                let mut seen: Vec<(f64, &[f32])> = Vec::new();
                for (segment, (keys, values)) in segments.iter().zip(&decoded) {
                    let capacity = segment.keys.shape().capacity;
                    let span = segment.spans[b];
                    let position = span.q_offset + i as i64;
                    for t in 0..span.len {
                        let visible = (!options.causal || t as i64 <= position)
                            && (options.window == 0 || t as i64 > position - options.window as i64);
                        if visible {
                            let at = ((b * g.kv_heads + kv_head) * capacity + t) * d;
                            let key = &keys[at..at + d];
                            let dot: f64 = query.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                            seen.push((dot * f64::from(options.scale), &values[at..at + d]));
                        }
                    }
                }
                let max = seen.iter().map(|s| s.0).fold(f64::NEG_INFINITY, f64::max);
                if max == f64::NEG_INFINITY {
                    continue;
                }
                let sum: f64 = seen.iter().map(|s| (s.0 - max).exp()).sum();
                lse[row] = max + sum.ln();
                for (score, value) in seen {
                    let weight = (score - max).exp() / sum;
                    for (o, &v) in out[row * d..][..d].iter_mut().zip(value) {
                        *o += weight * f64::from(v);
                    }
                }
            }
        }
    }
    Ok(Exact { out, lse })
}

impl Exact {
    /// The result rounded once, as an operation returns it.
    pub fn rounded(&self, q: &Tensor, options: Options) -> Result<super::Attended> {
        let out: Vec<f32> = self.out.iter().map(|&x| x as f32).collect();
        let lse: Vec<f32> = self.lse.iter().map(|&x| x as f32).collect();
        Ok(super::Attended {
            out: Tensor::from_vec(out, q.shape())?.to_float(options.out_dtype)?,
            lse: Tensor::from_vec(lse, &q.shape()[..3])?,
        })
    }
}
