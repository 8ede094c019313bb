//! Merging attention over disjoint sets of tokens.
