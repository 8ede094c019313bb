//! Text to tokens and back.

mod added;
mod bytes;
mod gguf;
mod json;
mod pretokenize;
mod sentencepiece;
mod stream;

use added::AddedTokens;
use bytes::Dialect;
pub use stream::TextStream;

use crate::{Error, Result};

/// How text is read by [`Tokenizer::encode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// Plain text: what looks like a control token is text too, and no BOS is added.
    Text,
    /// A prompt, or a rendered chat: control tokens are read as such, and BOS comes first, once, if the model wants it.
    Prompt,
}

/// The tokenizer of a model, from GGUF metadata or from `tokenizer.json`.
pub struct Tokenizer {
    /// Splits and merges plain text; it knows no added tokens.
    inner: tokenizers::Tokenizer,
    pieces: Vec<Piece>,
    added: AddedTokens,
    dialect: Dialect,
    bos: Option<u32>,
    eos: Vec<u32>,
    add_bos: bool,
}

/// One entry of the vocabulary.
#[derive(Debug, Clone, Default)]
struct Piece {
    /// As it stands in the vocabulary.
    text: String,
    /// What it adds to the output; nothing for a control token.
    bytes: Vec<u8>,
}

/// Control tokens that end a turn or a text, whichever the metadata names.
const ENDS: [&str; 9] = [
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end▁of▁sentence|>",
];

impl Tokenizer {
    /// The tokens of `text`.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for fragment in self.added.split(text, special == Special::Prompt) {
            match fragment {
                added::Fragment::Token(id) => tokens.push(id),
                added::Fragment::Text(text) => {
                    let encoding = self.inner.encode_fast(text, false).map_err(|e| Error::Tokenize(e.to_string()))?;
                    tokens.extend_from_slice(encoding.get_ids());
                }
            }
        }
        let bos = self.bos.filter(|_| special == Special::Prompt && self.add_bos);
        if let Some(bos) = bos.filter(|bos| tokens.first() != Some(bos)) {
            tokens.insert(0, bos);
        }
        Ok(tokens)
    }

    /// The text of `tokens`. Control tokens add nothing, and bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut stream = self.stream();
        let mut text: String = tokens.iter().filter_map(|&token| stream.push(token)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// A decoder that takes one token at a time and never gives out half a character.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// The token that begins a sequence.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether a prompt begins with [`Tokenizer::bos`].
    pub fn adds_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }

    /// The tokens that end a turn or a text.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// The number of tokens.
    pub fn vocab(&self) -> usize {
        self.pieces.len()
    }

    /// A token as it stands in the vocabulary.
    pub fn token(&self, id: u32) -> Option<&str> {
        self.pieces.get(id as usize).map(|piece| piece.text.as_str())
    }

    /// What a token adds to the output.
    fn bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id as usize).map_or(&[], |piece| &piece.bytes)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab", &self.vocab())
            .field("dialect", &self.dialect)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// The ids of `named` and of every control token whose name means an end, in order, each once.
fn ends(named: impl IntoIterator<Item = u32>, control: impl Iterator<Item = (u32, String)>) -> Vec<u32> {
    let by_name = control.filter(|(_, text)| ENDS.contains(&text.as_str())).map(|(id, _)| id);
    let mut eos: Vec<u32> = Vec::new();
    for id in named.into_iter().chain(by_name) {
        if !eos.contains(&id) {
            eos.push(id);
        }
    }
    eos
}
