//! Tokens that are found in the text before anything else happens to it.

use std::collections::HashMap;

/// Strings that are one token each: control tokens, read only where special tokens are wanted, and user-defined ones.
#[derive(Debug, Default)]
pub(super) struct AddedTokens {
    /// By first byte, longest first.
    by_first: HashMap<u8, Vec<Added>>,
}

#[derive(Debug)]
struct Added {
    text: String,
    id: u32,
    control: bool,
}

/// A piece of text, or a token found in it.
#[derive(Debug, PartialEq)]
pub(super) enum Fragment<'a> {
    Text(&'a str),
    Token(u32),
}

impl AddedTokens {
    pub fn insert(&mut self, text: &str, id: u32, control: bool) {
        if let Some(&first) = text.as_bytes().first() {
            let list = self.by_first.entry(first).or_default();
            let at = list.partition_point(|other| other.text.len() >= text.len());
            list.insert(at, Added { text: text.into(), id, control });
        }
    }

    /// Cuts `text` at every added token, leftmost and longest first.
    pub fn split<'a>(&self, text: &'a str, with_control: bool) -> Vec<Fragment<'a>> {
        let mut fragments = Vec::new();
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            let candidates = self.by_first.get(&text.as_bytes()[at]).map_or(&[][..], Vec::as_slice);
            let found = candidates.iter().find(|added| {
                (with_control || !added.control) && text.as_bytes()[at..].starts_with(added.text.as_bytes())
            });
            match found {
                None => at += 1,
                Some(added) => {
                    if start < at {
                        fragments.push(Fragment::Text(&text[start..at]));
                    }
                    fragments.push(Fragment::Token(added.id));
                    at += added.text.len();
                    start = at;
                }
            }
        }
        if start < text.len() {
            fragments.push(Fragment::Text(&text[start..]));
        }
        fragments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_at_the_longest_token_and_leaves_control_tokens_in_plain_text() {
        let mut added = AddedTokens::default();
        added.insert("<a>", 1, true);
        added.insert("<a><b>", 2, true);
        added.insert("  ", 3, false);
        assert_eq!(
            added.split("é<a><b>x<a>", true),
            [Fragment::Text("é"), Fragment::Token(2), Fragment::Text("x"), Fragment::Token(1)]
        );
        assert_eq!(added.split("x<a>  y", false), [Fragment::Text("x<a>"), Fragment::Token(3), Fragment::Text("y")]);
        assert!(added.split("", true).is_empty());
    }
}
