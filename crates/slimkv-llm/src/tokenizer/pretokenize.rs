//! The pre-tokenizers of byte-level vocabularies, by the names that GGUF files use for them.

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};

/// How text is cut into words before pairs are merged.
pub(super) struct PreTokenizer {
    /// Names in `tokenizer.ggml.pre`.
    pub names: &'static [&'static str],
    /// Applied one after the other; each cuts what the ones before it left whole.
    patterns: &'static [&'static str],
    /// Whether the text is normalised to NFC first.
    nfc: bool,
    /// Whether a word that is in the vocabulary is one token whatever the merges say.
    pub ignore_merges: bool,
    /// Whether a prompt begins with BOS if the metadata says nothing.
    pub add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const KNOWN: [PreTokenizer; 5] = [
    PreTokenizer { names: &["gpt-2"], patterns: &[GPT2], nfc: false, ignore_merges: false, add_bos: false },
    PreTokenizer {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell"],
        patterns: &[r"\p{N}", GPT2],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        patterns: &[LLAMA3],
        nfc: false,
        ignore_merges: true,
        add_bos: true,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen"],
        patterns: &[QWEN2],
        nfc: true,
        ignore_merges: false,
        add_bos: false,
    },
];

impl PreTokenizer {
    /// The pre-tokenizer of that name.
    pub fn named(name: &str) -> Option<&'static PreTokenizer> {
        KNOWN.iter().find(|known| known.names.contains(&name))
    }

    /// Every name, for errors.
    pub fn names() -> String {
        KNOWN.iter().flat_map(|known| known.names).copied().collect::<Vec<_>>().join(", ")
    }

    /// The normaliser that the text goes through first.
    pub fn normalizer(&self) -> Option<NormalizerWrapper> {
        self.nfc.then(|| NFC.into())
    }

    /// The cuts, then the spelling of bytes as characters.
    pub fn build(&self) -> tokenizers::Result<PreTokenizerWrapper> {
        let mut steps = Vec::<PreTokenizerWrapper>::new();
        for pattern in self.patterns {
            let pattern = SplitPattern::Regex((*pattern).into());
            steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
        }
        steps.push(ByteLevel::new(false, true, false).into());
        Ok(Sequence::new(steps).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

    /// The words of [`TEXT`] between bars, with bytes spelt as bytes again.
    fn words(name: &str) -> String {
        let mut cut = PreTokenizedString::from(TEXT);
        PreTokenizer::named(name).unwrap().build().unwrap().pre_tokenize(&mut cut).unwrap();
        let spell = |word: &str| String::from_utf8(super::super::Dialect::ByteLevel.spell(word)).unwrap();
        let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(word, ..)| spell(word)).collect::<Vec<_>>().join("|")
    }

    const TEXT: &str = "It's 12345 o'CLOCK,  I'LL go!\n\n  ünïcödé x_1";

    #[test]
    fn gpt2_keeps_numbers_whole() {
        assert_eq!(words("gpt-2"), "It|'s| 12345| o|'|CLOCK|,| | I|'|LL| go|!|\n\n | ünïcödé| x|_|1");
    }

    #[test]
    fn smollm_takes_digits_one_by_one() {
        assert_eq!(words("smollm"), "It|'s| |1|2|3|4|5| o|'|CLOCK|,| | I|'|LL| go|!|\n\n | ünïcödé| x|_|1");
    }

    #[test]
    fn llama3_takes_three_digits_and_any_case_of_contractions() {
        assert_eq!(words("llama-bpe"), "It|'s| |123|45| o|'CLOCK|,| | I|'LL| go|!\n\n| | ünïcödé| x|_|1");
    }

    #[test]
    fn qwen2_takes_one_digit() {
        assert_eq!(words("qwen2"), "It|'s| |1|2|3|4|5| o|'CLOCK|,| | I|'LL| go|!\n\n| | ünïcödé| x|_|1");
    }

    #[test]
    fn an_unknown_name_is_not_guessed() {
        assert!(PreTokenizer::named("tekken").is_none());
        assert!(PreTokenizer::names().contains("smollm"));
    }
}
