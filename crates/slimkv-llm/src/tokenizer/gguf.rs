//! The tokenizer inside a GGUF file.

use candle_core::quantized::gguf_file::Value;
use tokenizers::models::bpe::{BPE, Vocab};

use super::pretokenize::PreTokenizer;
use super::{AddedTokens, Dialect, Piece, Tokenizer, ends, sentencepiece};
use crate::weights::Gguf;
use crate::{Error, Result};

/// The kinds of `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    fn of(value: &Value) -> Option<Self> {
        let number = match *value {
            Value::I32(v) => u64::try_from(v).ok()?,
            _ => value.to_u64().ok()?,
        };
        Some(match number {
            1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            // 0 is "undefined" in files of old converters.
            0 | 5 => Kind::Unused,
            6 => Kind::Byte,
            _ => return None,
        })
    }
}

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const PRE: &str = "tokenizer.ggml.pre";

impl Tokenizer {
    pub(crate) fn from_gguf(gguf: &Gguf) -> Result<Tokenizer> {
        let tokens = gguf.array(TOKENS, "an array of texts", |v| v.to_string().ok())?;
        let tokens: Vec<String> = gguf.required(TOKENS, "the vocabulary", tokens)?.into_iter().cloned().collect();
        let kinds = gguf.array(TYPES, "an array of numbers from 1 to 6", Kind::of)?;
        let kinds = kinds.unwrap_or_else(|| vec![Kind::Normal; tokens.len()]);
        if kinds.len() != tokens.len() {
            return Err(gguf.bad(TYPES, format!("{} elements, as many as tokens", tokens.len()), kinds.len()));
        }
        match gguf.required(MODEL, "the kind of tokenizer", gguf.text(MODEL)?)? {
            "gpt2" => byte_level(gguf, tokens, &kinds),
            "llama" => scored(gguf, tokens, &kinds),
            other => Err(gguf.bad(MODEL, "`gpt2` or `llama`", format!("`{other}`"))),
        }
    }
}

fn byte_level(gguf: &Gguf, tokens: Vec<String>, kinds: &[Kind]) -> Result<Tokenizer> {
    let name = gguf.text(PRE)?.unwrap_or("default");
    let pre = PreTokenizer::named(name)
        .ok_or_else(|| gguf.bad(PRE, format!("one of {}", PreTokenizer::names()), format!("`{name}`")))?;
    let merges = gguf.array(MERGES, "an array of pairs of texts", |v| {
        let (left, right) = v.to_string().ok()?.split_once(' ')?;
        Some((left.to_string(), right.to_string()))
    })?;
    let merges = gguf.required(MERGES, "the merges of the vocabulary", merges)?;
    let bpe = BPE::builder()
        .vocab_and_merges(mergeable_vocab(&tokens, kinds), merges)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(|e| gguf.bad(MERGES, "merges of vocabulary entries", e))?;
    let mut inner = tokenizers::Tokenizer::new(bpe);
    inner.with_pre_tokenizer(Some(pre.build().map_err(tokenize_error)?));
    inner.with_normalizer(pre.normalizer()).map_err(tokenize_error)?;
    assemble(gguf, inner, tokens, kinds, Dialect::ByteLevel, pre.add_bos)
}

fn scored(gguf: &Gguf, tokens: Vec<String>, kinds: &[Kind]) -> Result<Tokenizer> {
    let scores = gguf.array(SCORES, "an array of numbers", |v| v.to_f32().ok())?;
    let scores = gguf.required(SCORES, "the scores of the vocabulary", scores)?;
    if scores.len() != tokens.len() {
        return Err(gguf.bad(SCORES, format!("{} elements, as many as tokens", tokens.len()), scores.len()));
    }
    let prefix_space = gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let merges = sentencepiece::merges(&tokens, &scores, |i| kinds[i] == Kind::Normal);
    let mut builder =
        BPE::builder().vocab_and_merges(mergeable_vocab(&tokens, kinds), merges).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = kinds.iter().position(|&kind| kind == Kind::Unknown) {
        builder = builder.unk_token(tokens[unknown].clone());
    }
    let bpe = builder.build().map_err(|e| gguf.bad(TOKENS, "a vocabulary with scores", e))?;
    let mut inner = tokenizers::Tokenizer::new(bpe);
    let normalizer = sentencepiece::normalizer(prefix_space).map_err(tokenize_error)?;
    inner.with_normalizer(Some(normalizer)).map_err(tokenize_error)?;
    assemble(gguf, inner, tokens, kinds, Dialect::SentencePiece { prefix_space }, true)
}

/// What text can merge to: everything but control tokens.
fn mergeable_vocab(tokens: &[String], kinds: &[Kind]) -> Vocab {
    (0..tokens.len()).filter(|&i| kinds[i] != Kind::Control).map(|i| (tokens[i].clone(), i as u32)).collect()
}

fn assemble(
    gguf: &Gguf,
    inner: tokenizers::Tokenizer,
    tokens: Vec<String>,
    kinds: &[Kind],
    dialect: Dialect,
    adds_bos_by_default: bool,
) -> Result<Tokenizer> {
    let id = |name: &str| -> Result<Option<u32>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match gguf.number(&key)? {
            Some(id) if id >= tokens.len() => Err(gguf.bad(&key, format!("below {}", tokens.len()), id)),
            id => Ok(id.map(|id| id as u32)),
        }
    };
    let (bos, eos, eot) = (id("bos")?, id("eos")?, id("eot")?);
    let control = (0..tokens.len()).filter(|&i| kinds[i] == Kind::Control).map(|i| (i as u32, tokens[i].clone()));
    let eos = ends(eos.into_iter().chain(eot), control);
    let mut added = AddedTokens::default();
    let mut pieces = Vec::with_capacity(tokens.len());
    for (i, text) in tokens.into_iter().enumerate() {
        let bytes = match kinds[i] {
            Kind::Control | Kind::Unknown => Vec::new(),
            Kind::UserDefined => text.clone().into_bytes(),
            Kind::Normal | Kind::Unused | Kind::Byte => dialect.spell(&text),
        };
        if matches!(kinds[i], Kind::Control | Kind::UserDefined) {
            added.insert(&text, i as u32, kinds[i] == Kind::Control);
        }
        pieces.push(Piece { text, bytes });
    }
    let add_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos_by_default);
    Ok(Tokenizer { inner, pieces, added, dialect, bos, eos, add_bos })
}

fn tokenize_error(error: impl std::fmt::Display) -> Error {
    Error::Tokenize(error.to_string())
}
