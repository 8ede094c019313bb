//! Attention over uncompressed rows, and the merge of two attentions.

use crate::attend::{Attended, Options, Segment, attend, merge};
use crate::format::{Plain, Rows};
use crate::{Error, Result, Tensor};

/// Attention of `q` `[B, Hq, Sq, D]` over `k`, `v` `[B, Hkv, S, D]`, all f16, bf16 or f32 (FlashAttention,
/// arXiv 2205.14135). `out` has the dtype of `q`; `lse` is f32 `[B, Hq, Sq]`. `scale` defaults to `1 / sqrt(D)`.
///
/// With `causal` the queries are the last `Sq` tokens, and each sees tokens up to its own.
pub fn flash_prefill_attend(q: &Tensor, k: &Tensor, v: &Tensor, scale: Option<f32>, causal: bool) -> Result<Attended> {
    const OP: &str = "flash_prefill_attend";
    let &[_, _, s_q, head_dim] = q.shape() else {
        return Err(Error::shape(OP, "q", "[B, Hq, Sq, D]", q.shape()));
    };
    let keys = Rows::Plain(Plain::new(OP, "k", k.clone())?);
    let values = Rows::Plain(Plain::new(OP, "v", v.clone())?);
    let scale = scale.unwrap_or(1.0 / (head_dim as f32).sqrt());
    let options = Options { scale, causal, window: 0, out_dtype: q.dtype() };
    attend(OP, q, &[Segment::full(keys, values, s_q)], options)
}

/// Joins attentions over two disjoint sets of tokens: `out` `[..., D]` and `lse` f32 `[...]` of each side. A side that saw
/// no token (`lse = -inf`) returns the other one bit for bit.
pub fn merge_attention(out_a: &Tensor, lse_a: &Tensor, out_b: &Tensor, lse_b: &Tensor) -> Result<Attended> {
    merge::merge("merge_attention", out_a, lse_a, out_b, lse_b)
}
