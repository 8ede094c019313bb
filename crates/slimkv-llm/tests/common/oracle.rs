//! The forward pass by its definition: plain loops in f64, no cache.

use super::common::*;
use candle_core::DType;

type Rows = Vec<Vec<f64>>;

/// Logits of every position.
pub fn logits(model: &Tiny, tokens: &[u32]) -> Rows {
    let get = |name: &str| -> Rows {
        let tensor = &model.tensors[name];
        let tensor = if tensor.rank() == 1 { tensor.unsqueeze(0).unwrap() } else { tensor.clone() };
        let rows = tensor.to_dtype(DType::F64).unwrap().to_vec2::<f64>();
        rows.unwrap()
    };
    let embedding = get("model.embed_tokens.weight");
    let mut x: Rows = tokens.iter().map(|&t| embedding[t as usize].clone()).collect();
    for i in 0..LAYERS {
        let part = |name: &str| get(&format!("model.layers.{i}.{name}"));
        let vector = |name: &str| part(name).remove(0);
        let h = rms(&x, &vector("input_layernorm.weight"));
        let project = |h: &Rows, side: &str| {
            let mut y = product(h, &part(&format!("self_attn.{side}_proj.weight")));
            if model.architecture == "qwen2" {
                let bias = vector(&format!("self_attn.{side}_proj.bias"));
                y.iter_mut().for_each(|row| row.iter_mut().zip(&bias).for_each(|(y, b)| *y += b));
            }
            y
        };
        let heads = |rows: Rows, norm: &str| -> Vec<Rows> {
            // [position][head][channel], normalised and rotated.
            let head = |p: usize, slice: &[f64]| {
                let mut slice = slice.to_vec();
                if model.architecture == "qwen3" {
                    slice = rms(&vec![slice], &vector(&format!("self_attn.{norm}.weight"))).remove(0);
                }
                rotate(&slice, p)
            };
            rows.iter().enumerate().map(|(p, row)| row.chunks(HEAD_DIM).map(|s| head(p, s)).collect()).collect()
        };
        let (q, k, v) = (heads(project(&h, "q"), "q_norm"), heads(project(&h, "k"), "k_norm"), project(&h, "v"));
        let attended: Rows = (0..tokens.len())
            .map(|p| {
                let head = |head: usize| {
                    let kv = head / (HEADS / KV_HEADS);
                    let scores: Vec<f64> =
                        (0..=p).map(|t| dot(&q[p][head], &k[t][kv]) / (HEAD_DIM as f64).sqrt()).collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    let channel = |d: usize| (0..=p).map(|t| weights[t] * v[t][kv * HEAD_DIM + d]).sum::<f64>() / total;
                    (0..HEAD_DIM).map(channel).collect::<Vec<f64>>()
                };
                (0..HEADS).flat_map(head).collect()
            })
            .collect();
        add(&mut x, &product(&attended, &part("self_attn.o_proj.weight")));
        let h = rms(&x, &vector("post_attention_layernorm.weight"));
        let (mut gate, up) = (product(&h, &part("mlp.gate_proj.weight")), product(&h, &part("mlp.up_proj.weight")));
        for (gate, up) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
            *gate = *gate / (1.0 + (-*gate).exp()) * up;
        }
        add(&mut x, &product(&gate, &part("mlp.down_proj.weight")));
    }
    let h = rms(&x, &get("model.norm.weight")[0]);
    product(&h, &get(if model.tied { "model.embed_tokens.weight" } else { "lm_head.weight" }))
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn product(x: &Rows, weight: &Rows) -> Rows {
    x.iter().map(|x| weight.iter().map(|w| dot(x, w)).collect()).collect()
}

fn add(x: &mut Rows, y: &Rows) {
    x.iter_mut().flatten().zip(y.iter().flatten()).for_each(|(x, y)| *x += y);
}

fn rms(x: &Rows, weight: &[f64]) -> Rows {
    let norm = |row: &Vec<f64>| {
        let scale = 1.0 / (dot(row, row) / row.len() as f64 + EPS).sqrt();
        row.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
    };
    x.iter().map(norm).collect()
}

/// Channels `i` and `i + D/2` form a pair.
fn rotate(x: &[f64], position: usize) -> Vec<f64> {
    let half = HEAD_DIM / 2;
    let mut y = x.to_vec();
    for i in 0..half {
        let angle = position as f64 * ROPE_BASE.powf(-2.0 * i as f64 / HEAD_DIM as f64);
        y[i] = x[i] * angle.cos() - x[i + half] * angle.sin();
        y[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin();
    }
    y
}
