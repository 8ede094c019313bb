//! A transformer whose attention and KV cache are slimkv's.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Device;
use slimkv::Tensor;
use slimkv::cache::{Geometry, KvCache};

use crate::chat::ChatTemplate;
use crate::config::{Config, Rotation};
use crate::dense::{Activations, Linear, ops};
use crate::tokenizer::Tokenizer;
use crate::weights::{LayerPart, Part, Source, open};
use crate::{Error, Result};

/// How a model is loaded.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// A limit on the length of a sequence, below the model's own.
    pub context: Option<usize>,
}

/// A loaded model. It holds no state of a sequence: that is the cache.
pub struct Model {
    config: Config,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    embedding: Linear,
    blocks: Vec<Block>,
    output_norm: Vec<f32>,
    /// `None` if the embedding serves as output projection.
    output: Option<Linear>,
    frequencies: Vec<f32>,
}

struct Block {
    attention_norm: Vec<f32>,
    query: Linear,
    key: Linear,
    value: Linear,
    query_norm: Option<Vec<f32>>,
    key_norm: Option<Vec<f32>>,
    attention_output: Linear,
    ffn_norm: Vec<f32>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Which rows of logits a forward pass computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// One row for each token.
    All,
    /// One row, for the last token.
    Last,
}

/// Unnormalised log-probabilities of the next token, a row for each position asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    data: Vec<f32>,
    vocab: usize,
}

impl Logits {
    pub(crate) fn new(data: Vec<f32>, vocab: usize) -> Self {
        Logits { data, vocab }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.data.len() / self.vocab
    }

    /// Elements of a row.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// One row.
    ///
    /// # Panics
    ///
    /// If `i` is not below [`Logits::rows`].
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.vocab..(i + 1) * self.vocab]
    }

    /// The last row.
    pub fn last(&self) -> &[f32] {
        self.row(self.rows() - 1)
    }

    /// The last row, taken out.
    pub(crate) fn into_last(mut self) -> Vec<f32> {
        self.data.split_off(self.data.len() - self.vocab)
    }
}

/// The final hidden states `[n, hidden]` of a forward pass: what the output projection takes.
pub(crate) struct Hidden(Activations);

impl Model {
    /// Loads a `.gguf` file, or a directory with `config.json`, `tokenizer.json` and safetensors.
    pub fn load(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Model> {
        let mut source = open(path.as_ref())?;
        let mut config = source.config()?;
        source.check_names(&config)?;
        let tokenizer = source.tokenizer()?;
        if let Some(context) = options.context {
            if context == 0 || context > config.context {
                return Err(Error::Argument {
                    op: "Model::load",
                    arg: "context",
                    expected: format!("1 to the model's own {}", config.context),
                    found: context.to_string(),
                });
            }
            config.context = context;
        }
        let source = source.as_mut();
        let hidden = config.hidden;
        Ok(Model {
            chat_template: source.chat_template(&tokenizer)?,
            tokenizer,
            embedding: matrix(source, Part::Embedding, config.vocab, hidden, None)?,
            blocks: (0..config.layers).map(|i| Block::load(source, &config, i)).collect::<Result<_>>()?,
            output_norm: vector(source, Part::OutputNorm, hidden)?,
            output: match config.tied_embeddings {
                true => None,
                false => Some(matrix(source, Part::Output, config.vocab, hidden, None)?),
            },
            frequencies: config.rope.frequencies(config.head_dim),
            config,
        })
    }

    /// The numbers that describe the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The geometry of a cache for `batch` sequences.
    pub fn geometry(&self, batch: usize) -> Geometry {
        self.config.geometry(batch)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template; a plain layout if the model has none.
    pub fn chat_template(&self) -> &ChatTemplate {
        &self.chat_template
    }

    /// Runs `tokens` at the positions `cache.len()..`, appends their keys and values to `cache` and returns logits.
    ///
    /// The cache has the [`Model::geometry`] of one sequence. After an error it holds as many tokens as before.
    pub fn forward(&self, tokens: &[u32], cache: &mut KvCache, want: Want) -> Result<Logits> {
        let hidden = self.hidden(tokens, cache, None)?;
        match want {
            Want::All => self.logits(&hidden, 0, tokens.len()),
            Want::Last => self.logits(&hidden, tokens.len() - 1, 1),
        }
    }

    /// [`Model::forward`] without the output projection. Stops between layers when `cancel` turns true.
    pub(crate) fn hidden(&self, tokens: &[u32], cache: &mut KvCache, cancel: Option<&AtomicBool>) -> Result<Hidden> {
        self.check(tokens, cache)?;
        let before = cache.len();
        let result = self.run(tokens, cache, before, cancel);
        if result.is_err() {
            cache.truncate(before)?;
        }
        result
    }

    /// The logits of `count` rows from row `first` on.
    pub(crate) fn logits(&self, hidden: &Hidden, first: usize, count: usize) -> Result<Logits> {
        let output = self.output.as_ref().unwrap_or(&self.embedding);
        Ok(Logits::new(output.forward(&hidden.0.narrow(first, count))?.data, self.config.vocab))
    }

    fn check(&self, tokens: &[u32], cache: &KvCache) -> Result<()> {
        const OP: &str = "Model::forward";
        let bad = |arg, expected: String, found: String| Error::Argument { op: OP, arg, expected, found };
        if tokens.is_empty() {
            return Err(bad("tokens", "at least one".into(), "none".into()));
        }
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= self.config.vocab) {
            return Err(bad("tokens", format!("tokens below {}", self.config.vocab), token.to_string()));
        }
        if cache.geometry() != self.geometry(1) {
            return Err(bad("cache", format!("{:?}", self.geometry(1)), format!("{:?}", cache.geometry())));
        }
        let (tokens, context) = (cache.len() + tokens.len(), self.config.context);
        if tokens > context {
            return Err(Error::ContextFull { tokens, context });
        }
        Ok(())
    }

    fn run(&self, tokens: &[u32], cache: &mut KvCache, first: usize, cancel: Option<&AtomicBool>) -> Result<Hidden> {
        let rotation = Rotation::new(&self.frequencies, self.config.rope.pairs, first, tokens.len());
        let mut x = self.embedding.gather(tokens)?;
        for (i, block) in self.blocks.iter().enumerate() {
            if cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
                return Err(Error::Cancelled);
            }
            block.forward(&self.config, &mut x, &rotation, cache, i)?;
        }
        Ok(Hidden(ops::rms_norm(&x, &self.output_norm, self.config.rms_eps)))
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("config", &self.config)
            .field("tokenizer", &self.tokenizer)
            .finish_non_exhaustive()
    }
}

impl Block {
    fn load(source: &mut dyn Source, config: &Config, i: usize) -> Result<Self> {
        let part = |part| Part::Layer(i, part);
        let (hidden, ffn, head_dim) = (config.hidden, config.ffn, config.head_dim);
        let (q_width, kv_width) = (config.heads * head_dim, config.kv_heads * head_dim);
        let bias = |part| config.architecture.has_qkv_bias().then_some(Part::Layer(i, part));
        let mut head_norm = |part| match config.architecture.has_qk_norm() {
            true => vector(source, Part::Layer(i, part), head_dim).map(Some),
            false => Ok(None),
        };
        Ok(Block {
            query_norm: head_norm(LayerPart::QueryNorm)?,
            key_norm: head_norm(LayerPart::KeyNorm)?,
            attention_norm: vector(source, part(LayerPart::AttentionNorm), hidden)?,
            query: matrix(source, part(LayerPart::Query), q_width, hidden, bias(LayerPart::QueryBias))?,
            key: matrix(source, part(LayerPart::Key), kv_width, hidden, bias(LayerPart::KeyBias))?,
            value: matrix(source, part(LayerPart::Value), kv_width, hidden, bias(LayerPart::ValueBias))?,
            attention_output: matrix(source, part(LayerPart::AttentionOutput), hidden, q_width, None)?,
            ffn_norm: vector(source, part(LayerPart::FfnNorm), hidden)?,
            gate: matrix(source, part(LayerPart::Gate), ffn, hidden, None)?,
            up: matrix(source, part(LayerPart::Up), ffn, hidden, None)?,
            down: matrix(source, part(LayerPart::Down), hidden, ffn, None)?,
        })
    }

    /// Adds the attention of layer `i` and the feed-forward network to `x`.
    fn forward(
        &self,
        config: &Config,
        x: &mut Activations,
        rotation: &Rotation,
        cache: &mut KvCache,
        i: usize,
    ) -> Result<()> {
        let h = ops::rms_norm(x, &self.attention_norm, config.rms_eps);
        ops::add(&mut x.data, &self.attention(config, &h, rotation, cache, i)?.data);
        let h = ops::rms_norm(x, &self.ffn_norm, config.rms_eps);
        let [mut gate, up] = Linear::forward_all([&self.gate, &self.up], &h)?;
        ops::swiglu(&mut gate, &up);
        ops::add(&mut x.data, &self.down.forward(&gate)?.data);
        Ok(())
    }

    fn attention(
        &self,
        config: &Config,
        x: &Activations,
        rotation: &Rotation,
        cache: &mut KvCache,
        i: usize,
    ) -> Result<Activations> {
        let norm = |weight: &Option<Vec<f32>>, head: &mut [f32]| {
            if let Some(weight) = weight {
                ops::rms_norm_row(head, weight, config.rms_eps);
            }
        };
        let [q, k, v] = Linear::forward_all([&self.query, &self.key, &self.value], x)?;
        let q = heads_first(&q, config.head_dim, |token, head| {
            norm(&self.query_norm, head);
            rotation.apply(token, head);
        });
        let k = heads_first(&k, config.head_dim, |token, head| {
            norm(&self.key_norm, head);
            rotation.apply(token, head);
        });
        let v = heads_first(&v, config.head_dim, |_, _| ());

        let device = cache.device().clone();
        let tensor = |data: Vec<f32>, heads: usize| -> Result<Tensor> {
            Ok(Tensor::from_vec(data, &[1, heads, x.rows(), config.head_dim])?.to_device(&device)?)
        };
        let mut layer = cache.layer(i);
        layer.append(&tensor(k, config.kv_heads)?, &tensor(v, config.kv_heads)?)?;
        let out = layer.attend(&tensor(q, config.heads)?, 1.0 / (config.head_dim as f32).sqrt())?;
        self.attention_output.forward(&tokens_first(&out.to_vec()?, config.heads, config.head_dim))
    }
}

/// `[n, heads, D]` to `[heads, n, D]`; `f(token, head)` changes each head on the way.
fn heads_first(x: &Activations, head_dim: usize, f: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    let (n, heads) = (x.rows(), x.cols / head_dim);
    let mut out = vec![0.0; x.data.len()];
    ops::each_row(&mut out, n * head_dim, |head, rows| {
        for (token, row) in rows.chunks_mut(head_dim).enumerate() {
            row.copy_from_slice(&x.data[(token * heads + head) * head_dim..][..head_dim]);
            f(token, row);
        }
    });
    out
}

/// `[heads, n, D]` to `[n, heads, D]`.
fn tokens_first(x: &[f32], heads: usize, head_dim: usize) -> Activations {
    let (n, cols) = (x.len() / (heads * head_dim), heads * head_dim);
    let mut data = vec![0.0; x.len()];
    ops::each_row(&mut data, cols, |token, row| {
        for (head, row) in row.chunks_mut(head_dim).enumerate() {
            row.copy_from_slice(&x[(head * n + token) * head_dim..][..head_dim]);
        }
    });
    Activations { data, cols }
}

fn matrix(source: &mut dyn Source, part: Part, rows: usize, cols: usize, bias: Option<Part>) -> Result<Linear> {
    let bias = bias.map(|bias| vector(source, bias, rows)).transpose()?;
    Linear::new(source.tensor(part, &[rows, cols])?, bias)
}

fn vector(source: &mut dyn Source, part: Part, len: usize) -> Result<Vec<f32>> {
    Ok(source.tensor(part, &[len])?.dequantize(&Device::Cpu)?.to_vec1()?)
}
