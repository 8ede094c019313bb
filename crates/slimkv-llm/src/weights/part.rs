//! The tensors of a model and what the two file formats call them.

use crate::config::Config;

/// One tensor of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Token embedding `[vocab, hidden]`.
    Embedding,
    /// Norm before the output projection `[hidden]`.
    OutputNorm,
    /// Output projection `[vocab, hidden]`; absent if it is the embedding.
    Output,
    /// A tensor of one transformer block.
    Layer(usize, LayerPart),
}

/// One tensor of a transformer block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerPart {
    AttentionNorm,
    Query,
    Key,
    Value,
    QueryBias,
    KeyBias,
    ValueBias,
    QueryNorm,
    KeyNorm,
    AttentionOutput,
    FfnNorm,
    Gate,
    Up,
    Down,
}

impl LayerPart {
    /// Each part, its name in GGUF after `blk.N.`, and its name in safetensors after `model.layers.N.`.
    const NAMES: [(LayerPart, &str, &str); 14] = [
        (LayerPart::AttentionNorm, "attn_norm.weight", "input_layernorm.weight"),
        (LayerPart::Query, "attn_q.weight", "self_attn.q_proj.weight"),
        (LayerPart::Key, "attn_k.weight", "self_attn.k_proj.weight"),
        (LayerPart::Value, "attn_v.weight", "self_attn.v_proj.weight"),
        (LayerPart::QueryBias, "attn_q.bias", "self_attn.q_proj.bias"),
        (LayerPart::KeyBias, "attn_k.bias", "self_attn.k_proj.bias"),
        (LayerPart::ValueBias, "attn_v.bias", "self_attn.v_proj.bias"),
        (LayerPart::QueryNorm, "attn_q_norm.weight", "self_attn.q_norm.weight"),
        (LayerPart::KeyNorm, "attn_k_norm.weight", "self_attn.k_norm.weight"),
        (LayerPart::AttentionOutput, "attn_output.weight", "self_attn.o_proj.weight"),
        (LayerPart::FfnNorm, "ffn_norm.weight", "post_attention_layernorm.weight"),
        (LayerPart::Gate, "ffn_gate.weight", "mlp.gate_proj.weight"),
        (LayerPart::Up, "ffn_up.weight", "mlp.up_proj.weight"),
        (LayerPart::Down, "ffn_down.weight", "mlp.down_proj.weight"),
    ];

    fn names(self) -> (&'static str, &'static str) {
        let &(_, gguf, hf) = Self::NAMES.iter().find(|(part, ..)| *part == self).expect("every part has a row");
        (gguf, hf)
    }

    fn belongs_to(self, config: &Config) -> bool {
        match self {
            LayerPart::QueryBias | LayerPart::KeyBias | LayerPart::ValueBias => config.architecture.has_qkv_bias(),
            LayerPart::QueryNorm | LayerPart::KeyNorm => config.architecture.has_qk_norm(),
            _ => true,
        }
    }
}

impl Part {
    /// Every part that a model of this description has.
    pub fn all(config: &Config) -> impl Iterator<Item = Part> {
        let layer_parts = LayerPart::NAMES.map(|(part, ..)| part).into_iter().filter(|p| p.belongs_to(config));
        let layer_parts: Vec<LayerPart> = layer_parts.collect();
        let layers =
            (0..config.layers).flat_map(move |i| layer_parts.clone().into_iter().map(move |p| Part::Layer(i, p)));
        let output = (!config.tied_embeddings).then_some(Part::Output);
        [Part::Embedding, Part::OutputNorm].into_iter().chain(output).chain(layers)
    }

    /// The name in a GGUF file.
    pub fn gguf_name(self) -> String {
        match self {
            Part::Embedding => "token_embd.weight".into(),
            Part::OutputNorm => "output_norm.weight".into(),
            Part::Output => "output.weight".into(),
            Part::Layer(i, part) => format!("blk.{i}.{}", part.names().0),
        }
    }

    /// The name in a safetensors file.
    pub fn safetensors_name(self) -> String {
        match self {
            Part::Embedding => "model.embed_tokens.weight".into(),
            Part::OutputNorm => "model.norm.weight".into(),
            Part::Output => "lm_head.weight".into(),
            Part::Layer(i, part) => format!("model.layers.{i}.{}", part.names().1),
        }
    }
}
