//! What an evaluation says: one record a method, as JSON and as a table.

use serde::{Deserialize, Serialize};

use crate::text::{self, Table};

/// The measurements of one method. The names are the keys of the JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The method as it was asked for.
    pub method: String,
    /// Bits of a cached value, parameters included, averaged over keys, values and layers.
    pub bits_per_value: f64,
    /// `exp(nll)`.
    pub perplexity: f64,
    /// Mean negative log-likelihood of the next token, in nats.
    pub nll: f64,
    /// Mean Kullback-Leibler divergence from the predictions with the fp16 cache, in nats.
    pub kl_mean: f64,
    /// Its 99th percentile over positions.
    pub kl_p99: f64,
    /// How often the likeliest token is the same as with the fp16 cache.
    pub top1: f64,
    /// Bytes that the cache holds at the end, divided by the tokens in it.
    pub bytes_per_token: f64,
    /// Bytes that the cache holds at the end.
    pub cache_bytes: u64,
    /// The largest resident set of the process that ran this method alone: weights, cache, activations, logits.
    pub peak_rss_bytes: u64,
    /// Tokens read in batches, a second.
    pub prefill_tokens_per_s: f64,
    /// Tokens read one at a time after the text, a second.
    pub decode_tokens_per_s: f64,
    /// Where attention ran and the cache lay.
    pub device: String,
}

/// The table for people.
pub fn table(records: &[Record]) -> Table {
    let mut table = Table::new(&[
        "method",
        "bits",
        "perplexity",
        "KL mean",
        "KL p99",
        "top-1",
        "bytes/token",
        "cache",
        "peak RSS",
        "prefill t/s",
        "decode t/s",
    ]);
    for r in records {
        table.row(vec![
            r.method.clone(),
            format!("{:.2}", r.bits_per_value),
            format!("{:.3}", r.perplexity),
            format!("{:.5}", r.kl_mean),
            format!("{:.4}", r.kl_p99),
            format!("{:.2} %", 100.0 * r.top1),
            text::thousands(r.bytes_per_token.round() as u64),
            text::bytes(r.cache_bytes),
            text::bytes(r.peak_rss_bytes),
            format!("{:.1}", r.prefill_tokens_per_s),
            format!("{:.1}", r.decode_tokens_per_s),
        ]);
    }
    table
}
