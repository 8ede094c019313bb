//! SentencePiece vocabularies with scores (Llama 2), as pair merging with byte fallback.

use std::collections::HashMap;

use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::{NormalizerWrapper, Sequence};

/// The merges that the scores imply, best first: any two pieces that make up a third may merge, and a merge is as good as
/// the score of its result.
pub(super) fn merges(pieces: &[String], scores: &[f32], mergeable: impl Fn(usize) -> bool) -> Vec<(String, String)> {
    let usable = || (0..pieces.len()).filter(|&i| mergeable(i));
    let index: HashMap<&str, usize> = usable().map(|i| (pieces[i].as_str(), i)).collect();
    let mut merges: Vec<(f32, usize, usize, usize)> = Vec::new();
    for whole in usable() {
        let text = pieces[whole].as_str();
        for (cut, _) in text.char_indices().skip(1) {
            if let (Some(&left), Some(&right)) = (index.get(&text[..cut]), index.get(&text[cut..])) {
                merges.push((scores[whole], whole, left, right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    merges.into_iter().map(|(_, _, left, right)| (pieces[left].clone(), pieces[right].clone())).collect()
}

/// Writes spaces as `▁`, with one before the text if the model wants it.
pub(super) fn normalizer(prefix_space: bool) -> tokenizers::Result<NormalizerWrapper> {
    let spaces: NormalizerWrapper = Replace::new(" ", "▁")?.into();
    Ok(match prefix_space {
        true => Sequence::new(vec![Prepend::new("▁".into()).into(), spaces]).into(),
        false => spaces,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_come_in_the_order_of_scores() {
        let pieces: Vec<String> = ["a", "b", "c", "ab", "bc", "abc", "<x>"].map(String::from).into();
        let scores = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0, 0.0];
        let found = merges(&pieces, &scores, |i| i != 6);
        let expected = [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")];
        assert_eq!(found, expected.map(|(l, r)| (l.to_string(), r.to_string())));
    }
}
