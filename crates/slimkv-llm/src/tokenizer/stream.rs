//! Tokens to text while they come, never half a character.

use super::{Dialect, Tokenizer};

/// Decodes token after token. A character whose bytes are spread over tokens is held back until it is whole.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    pending: Vec<u8>,
    /// Whether the next byte is the first of the text.
    at_start: bool,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        TextStream { tokenizer, pending: Vec::new(), at_start: true }
    }

    /// Takes one token and gives the text that is whole now, if there is any.
    pub fn push(&mut self, token: u32) -> Option<String> {
        let mut bytes = self.tokenizer.bytes(token);
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            if self.tokenizer.dialect == (Dialect::SentencePiece { prefix_space: true }) {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.pending.extend_from_slice(bytes);
        let text = take_whole(&mut self.pending);
        (!text.is_empty()).then_some(text)
    }

    /// What is left: U+FFFD for a character that never became whole.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Takes all whole characters out of `pending`. Bytes that no further byte can make valid become U+FFFD.
fn take_whole(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(pending) {
            Ok(valid) => {
                text.push_str(valid);
                pending.clear();
                return text;
            }
            Err(error) => {
                let valid: Vec<u8> = pending.drain(..error.valid_up_to()).collect();
                text.push_str(&String::from_utf8_lossy(&valid));
                match error.error_len() {
                    None => return text,
                    Some(bad) => {
                        pending.drain(..bad);
                        text.push(char::REPLACEMENT_CHARACTER);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_held_back_until_they_are_whole() {
        let mut pending = "aé".as_bytes()[..2].to_vec();
        assert_eq!(take_whole(&mut pending), "a");
        pending.push(0xA9);
        assert_eq!(take_whole(&mut pending), "é");
        assert!(pending.is_empty());
    }

    #[test]
    fn bytes_that_cannot_become_valid_are_replaced_at_once() {
        let mut pending = vec![0xFF, b'x', 0xE2, 0x82];
        assert_eq!(take_whole(&mut pending), "\u{FFFD}x");
        assert_eq!(pending, [0xE2, 0x82]);
    }
}
