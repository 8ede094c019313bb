//! Caches made of formats and attention: append tokens, attend to them, forget some of them.
//!
//! ```
//! use slimkv::{Device, Tensor, cache::{Geometry, KvCache}};
//! let device = Device::cpu();
//! let geometry = Geometry { layers: 2, kv_heads: 2, head_dim: 64, batch: 1 };
//! let mut cache = KvCache::new("kivi:4".parse()?, geometry, &device)?;
//! let (k, v) = (Tensor::zeros(slimkv::DType::F32, &[1, 2, 5, 64], &device)?, Tensor::zeros(slimkv::DType::F32, &[1, 2, 5, 64], &device)?);
//! let q = Tensor::zeros(slimkv::DType::F32, &[1, 8, 5, 64], &device)?;
//! for layer in 0..geometry.layers {
//!     cache.layer(layer).append(&k, &v)?;
//!     let out = cache.layer(layer).attend(&q, 0.125)?;
//!     assert_eq!(out.shape(), [1, 8, 5, 64]);
//! }
//! assert_eq!(cache.len(), 5);
//! # Ok::<(), slimkv::Error>(())
//! ```

mod layer;
mod method;

use crate::attend::{Attended, Options};
use crate::format::RowShape;
use crate::{DType, Device, Error, Result, Tensor};
use layer::Layer;

pub use method::{Kivi, LayerMethod, Method};

/// The shape of a model's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Layers.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Sequences; each has its own length.
    pub batch: usize,
}

/// The keys and values of every layer of a model, stored by a [`Method`].
///
/// * The bytes reported are the bytes allocated: a packed cache never holds a full-precision copy, and grows in blocks
///   without copying what it holds.
/// * The contents depend on the tokens alone, never on how they were chunked into calls.
/// * A call that returns an error leaves the cache as it was.
#[derive(Debug)]
pub struct KvCache {
    method: Method,
    geometry: Geometry,
    device: Device,
    layers: Vec<Layer>,
    /// One spare tail for all layers: a tail moves down into it and the two change places.
    spare: Option<layer::Tail>,
}

/// How queries attend to a layer; [`Attend::new`] has the usual settings.
#[derive(Debug, Clone, Copy)]
pub struct Attend<'a> {
    /// Factor of every score, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Whether a query sees only tokens up to its own. Default true.
    pub causal: bool,
    /// Tokens up to its own that a query sees; 0, the default, means all.
    pub window: usize,
    /// The dtype of the output; default that of the queries.
    pub out_dtype: Option<DType>,
    /// Queries of each sequence, where they differ: query `i` of a sequence with `n` of them is its `n - i`-th newest
    /// token. Rows past a sequence's own count hold no meaning. Default: all rows.
    pub query_lens: Option<&'a [usize]>,
}

impl Attend<'_> {
    /// Causal attention of every row, without a window.
    pub fn new(scale: f32) -> Self {
        Attend { scale, causal: true, window: 0, out_dtype: None, query_lens: None }
    }
}

impl KvCache {
    /// An empty cache. Nothing is allocated before the first token.
    pub fn new(method: Method, geometry: Geometry, device: &Device) -> Result<Self> {
        const OP: &str = "KvCache::new";
        method.check()?;
        for (arg, n) in [
            ("layers", geometry.layers),
            ("kv_heads", geometry.kv_heads),
            ("head_dim", geometry.head_dim),
            ("batch", geometry.batch),
        ] {
            if n == 0 {
                return Err(Error::value(OP, arg, "at least 1", n));
            }
        }
        let layers =
            (0..geometry.layers).map(|i| Layer::new(method.layer(i, geometry.layers), geometry, device)).collect();
        Ok(KvCache { method, geometry, device: device.clone(), layers, spare: None })
    }

    /// The method.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// The geometry.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The device of the rows.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// One layer. An index past the last layer is reported by the calls on it.
    pub fn layer(&mut self, index: usize) -> LayerMut<'_> {
        LayerMut { cache: self, index }
    }

    /// Tokens of sequence 0 that every layer holds.
    pub fn len(&self) -> usize {
        self.sequence_len(0)
    }

    /// Whether sequence 0 is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of one sequence that every layer holds; 0 for a sequence that does not exist.
    pub fn sequence_len(&self, sequence: usize) -> usize {
        self.layers.iter().map(|l| l.len(sequence)).min().unwrap_or(0)
    }

    /// Bytes allocated on the device for this cache.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(Layer::bytes).sum::<usize>() + self.spare.as_ref().map_or(0, layer::Tail::bytes)
    }

    /// Makes room for `tokens` tokens a sequence, in one block where blocks are missing. Attention over few blocks takes
    /// fewer launches on a GPU.
    pub fn reserve(&mut self, tokens: usize) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| layer.reserve(tokens, true))
    }

    /// Forgets all but the first `tokens` tokens of every sequence, in every layer: a rejected speculation, or an edited
    /// prompt. Sequences that are shorter stay as they are.
    ///
    /// Tokens that were packed stay as coarse as they are: where a cut falls inside a group, the rest of the group comes
    /// back to the exact tail as its decoded values.
    pub fn truncate(&mut self, tokens: usize) -> Result<()> {
        for sequence in 0..self.geometry.batch {
            self.truncate_sequence(sequence, tokens)?;
        }
        Ok(())
    }

    /// [`KvCache::truncate`] for one sequence.
    pub fn truncate_sequence(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        if sequence >= self.geometry.batch {
            let expected = format!("below the batch of {}", self.geometry.batch);
            return Err(Error::value("KvCache::truncate", "sequence", expected, sequence));
        }
        self.layers.iter_mut().try_for_each(|layer| layer.truncate(sequence, tokens))
    }

    /// Forgets everything and gives the memory back.
    pub fn clear(&mut self) {
        self.spare = None;
        for (i, layer) in self.layers.iter_mut().enumerate() {
            *layer = Layer::new(self.method.layer(i, self.geometry.layers), self.geometry, &self.device);
        }
    }

    /// Bytes that a cache of this method holds after `tokens` tokens a sequence arrived, without building it.
    pub fn bytes_for(method: &Method, geometry: Geometry, tokens: usize, device: &Device) -> usize {
        let layers: usize = (0..geometry.layers)
            .map(|i| Layer::bytes_for(method.layer(i, geometry.layers), geometry, tokens, device))
            .sum();
        layers + layer::spare_bytes_for(method, geometry, tokens)
    }
}

/// One layer of a [`KvCache`].
#[derive(Debug)]
pub struct LayerMut<'a> {
    cache: &'a mut KvCache,
    index: usize,
}

impl LayerMut<'_> {
    /// Appends `n` tokens to every sequence: `k`, `v` `[batch, kv_heads, n, head_dim]` of f16, bf16 or f32.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        let n = k.shape().get(2).copied().unwrap_or(0);
        let counts = vec![n; self.cache.geometry.batch];
        self.append_ragged(k, v, &counts)
    }

    /// Appends the first `counts[b]` of the `n` rows to sequence `b`.
    pub fn append_ragged(&mut self, k: &Tensor, v: &Tensor, counts: &[usize]) -> Result<()> {
        const OP: &str = "KvCache::append";
        let KvCache { layers, spare, geometry, device, .. } = &mut *self.cache;
        let layer = get(OP, layers, self.index)?;
        let (k, v) = (layer::incoming(OP, "k", k, *geometry, device)?, layer::incoming(OP, "v", v, *geometry, device)?);
        let (rows, found) = (k.shape().capacity, v.shape().capacity);
        if rows != found {
            return Err(Error::value(OP, "v", format!("as many tokens as the keys ({rows})"), found));
        }
        if counts.len() != geometry.batch || counts.iter().any(|&n| n > rows) {
            let expected = format!("{} numbers up to {rows}", geometry.batch);
            return Err(Error::value(OP, "counts", expected, format!("{counts:?}")));
        }
        layer.append(OP, &k, &v, counts, spare)
    }

    /// Causal attention of the newest `n` tokens: `q` `[batch, q_heads, n, head_dim]`. The result has shape and dtype of
    /// `q`.
    pub fn attend(&mut self, q: &Tensor, scale: f32) -> Result<Tensor> {
        Ok(self.attend_with(q, Attend::new(scale))?.out)
    }

    /// Attention with every setting, and with the log-sum-exp of the scores.
    pub fn attend_with(&mut self, q: &Tensor, attend: Attend<'_>) -> Result<Attended> {
        const OP: &str = "KvCache::attend";
        let geometry = self.cache.geometry;
        let layer = get(OP, &mut self.cache.layers, self.index)?;
        let s_q = match q.shape() {
            &[b, _, s_q, d] if (b, d) == (geometry.batch, geometry.head_dim) => s_q,
            found => {
                let expected = format!("[{}, q_heads, n, {}]", geometry.batch, geometry.head_dim);
                return Err(Error::shape(OP, "q", expected, found));
            }
        };
        if let Some(lens) = attend.query_lens
            && (lens.len() != geometry.batch || lens.iter().any(|&n| n > s_q))
        {
            let expected = format!("{} numbers up to {s_q}", geometry.batch);
            return Err(Error::value(OP, "query_lens", expected, format!("{lens:?}")));
        }
        let segments = layer.segments(|b| attend.query_lens.map_or(s_q, |lens| lens[b]))?;
        let options = Options {
            scale: attend.scale,
            causal: attend.causal,
            window: attend.window,
            out_dtype: attend.out_dtype.unwrap_or(q.dtype()),
        };
        crate::attend::attend(OP, q, &segments, options)
    }

    /// Tokens of one sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.cache.layers.get(self.index).map_or(0, |l| l.len(sequence))
    }

    /// Whether no sequence has a token.
    pub fn is_empty(&self) -> bool {
        (0..self.cache.geometry.batch).all(|b| self.len(b) == 0)
    }

    /// Bytes allocated for this layer.
    pub fn bytes(&self) -> usize {
        self.cache.layers.get(self.index).map_or(0, Layer::bytes)
    }
}

fn get<'a>(op: &'static str, layers: &'a mut [Layer], index: usize) -> Result<&'a mut Layer> {
    let n = layers.len();
    layers.get_mut(index).ok_or_else(|| Error::value(op, "layer", format!("below {n}"), index))
}

/// The geometry of `capacity` rows of a layer.
fn row_shape(geometry: Geometry, capacity: usize) -> RowShape {
    RowShape { batch: geometry.batch, heads: geometry.kv_heads, capacity, head_dim: geometry.head_dim }
}
