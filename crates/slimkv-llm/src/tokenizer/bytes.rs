//! How the strings of a vocabulary spell bytes.

/// The spelling of a vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// GPT-2: each character stands for one byte.
    ByteLevel,
    /// SentencePiece: `▁` is a space, `<0xAB>` a byte, anything else itself.
    SentencePiece {
        /// Whether encoding puts a space before the text, which decoding takes off again.
        prefix_space: bool,
    },
}

impl Dialect {
    /// The bytes of a vocabulary entry.
    pub fn spell(self, text: &str) -> Vec<u8> {
        match self {
            // A character outside the alphabet means that the entry is plain text.
            Dialect::ByteLevel => text.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| text.into()),
            Dialect::SentencePiece { .. } => match text.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')) {
                Some(hex) if hex.len() == 2 => u8::from_str_radix(hex, 16).map_or_else(|_| text.into(), |b| vec![b]),
                _ => text.replace('▁', " ").into(),
            },
        }
    }
}

/// GPT-2 writes printable bytes as themselves and the other 68, in order, as U+0100 and on.
fn byte_of(character: char) -> Option<u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match character as u32 {
        code @ 0..=0xFF => Some(code as u8).filter(|&b| printable(b)),
        code @ 0x100..0x144 => (0..=255u8).filter(|&b| !printable(b)).nth(code as usize - 0x100),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_is_a_bijection() {
        let bytes: Vec<u8> = (0..0x144u32).filter_map(char::from_u32).filter_map(byte_of).collect();
        let set: std::collections::BTreeSet<u8> = bytes.iter().copied().collect();
        assert_eq!((bytes.len(), set.len()), (256, 256));
        assert_eq!(Dialect::ByteLevel.spell("ĠthéĊ"), [b" th".as_slice(), &[0xE9], b"\n"].concat());
    }

    #[test]
    fn sentencepiece_spells_spaces_and_bytes() {
        let dialect = Dialect::SentencePiece { prefix_space: true };
        assert_eq!(dialect.spell("▁the"), b" the");
        assert_eq!(dialect.spell("<0x0A>"), b"\n");
        assert_eq!(dialect.spell("<0xZZ>"), b"<0xZZ>");
    }
}
