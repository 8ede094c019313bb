//! The attentions that every GPU must get right.

use slimkv::DType::{BF16, F16, F32};
use slimkv::format::Axis;

use super::{Case, Kind};

/// Declares lists of cases as functions, and `ALL` of them by name.
macro_rules! lists {
    ($($name:ident($push:ident) $body:block)*) => {
        /// Every list of cases, by name.
        pub const ALL: &[(&str, fn() -> Vec<Case>)] = &[$((stringify!($name), $name)),*];
        $(pub fn $name() -> Vec<Case> {
            let mut cases = Vec::new();
            let mut $push = |case: Case| cases.push(case);
            $body
            cases
        })*
    };
}

fn affine(bits: u32, axis: Axis) -> Kind {
    Kind::Affine { bits, packed: true, group: 32, axis, params: F16 }
}

lists! {
    plain_rows_of_every_dtype(push) {
        for dtype in [F16, BF16, F32] {
            let kind = Kind::Plain(dtype);
            push(Case { keys: kind, values: kind, q_dtype: dtype, segments: vec![vec![37, 200]], ..Case::default() });
        }
    }

    affine_rows_of_every_width(push) {
        for bits in [1, 2, 3, 4, 8] {
            for packed in [true, false] {
                let params = if packed { F16 } else { F32 };
                let keys = Kind::Affine { bits, packed, group: 32, axis: Axis::Tokens, params };
                let values = Kind::Affine { bits, packed, group: 32, axis: Axis::Channels, params };
                push(Case { keys, values, segments: vec![vec![150, 3]], ..Case::default() });
            }
        }
    }

    every_pair_of_formats(push) {
        let keys = [Kind::Plain(F16), Kind::Plain(F32), affine(1, Axis::Tokens), affine(4, Axis::Tokens), affine(3, Axis::Channels)];
        let values = [Kind::Plain(F16), Kind::Plain(BF16), affine(2, Axis::Channels), affine(4, Axis::Channels), affine(8, Axis::Tokens)];
        for keys in keys {
            for values in values {
                push(Case { keys, values, segments: vec![vec![70]], ..Case::default() });
            }
        }
    }

    every_head_dimension(push) {
        for head_dim in [1, 5, 20, 64, 80, 96, 128, 129, 256] {
            for kind in [Kind::Plain(F16), affine(4, Axis::Tokens), affine(3, Axis::Channels)] {
                push(Case { head_dim, keys: kind, values: kind, segments: vec![vec![40]], ..Case::default() });
            }
        }
    }

    groups_of_any_size(push) {
        for group in [1, 7, 12, 64, 100] {
            for (head_dim, packed) in [(64, true), (50, false)] {
                let keys = Kind::Affine { bits: 4, packed, group, axis: Axis::Tokens, params: F16 };
                let values = Kind::Affine { bits: 2, packed, group, axis: Axis::Channels, params: F32 };
                push(Case { head_dim, keys, values, segments: vec![vec![33]], ..Case::default() });
            }
        }
    }

    query_rows_up_to_the_limit(push) {
        for (q_heads, kv_heads, s_q) in [(1, 1, 1), (9, 3, 1), (8, 1, 2), (16, 1, 1), (3, 3, 16), (6, 2, 5)] {
            for causal in [true, false] {
                push(Case { q_heads, kv_heads, s_q, causal, segments: vec![vec![140, 9]], ..Case::default() });
            }
        }
    }

    lengths_down_to_nothing(push) {
        for segments in [vec![vec![0]], vec![vec![1]], vec![vec![0, 1, 700]], vec![vec![0, 130], vec![300, 0], vec![1, 1]]] {
            for s_q in [1, 3] {
                push(Case { segments: segments.clone(), s_q, ..Case::default() });
            }
        }
    }

    windows(push) {
        for window in [1, 2, 100, 1000] {
            for causal in [true, false] {
                push(Case { segments: vec![vec![260, 20], vec![17, 5]], window, causal, s_q: 2, ..Case::default() });
            }
        }
    }

    half_outputs(push) {
        for out_dtype in [F16, BF16] {
            for head_dim in [64, 128] {
                let (keys, values) = (affine(4, Axis::Tokens), affine(4, Axis::Channels));
                for (keys, values) in [(keys, values), (Kind::Plain(F16), Kind::Plain(F16)), (affine(2, Axis::Tokens), affine(8, Axis::Channels))] {
                    push(Case { keys, values, out_dtype, head_dim, segments: vec![vec![300, 33]], ..Case::default() });
                }
            }
        }
    }

    many_queries(push) {
        for (s_q, len) in [(40, 40), (33, 200), (50, 20)] {
            for (keys, values) in [
                (Kind::Plain(F16), Kind::Plain(F16)),
                (affine(4, Axis::Tokens), affine(2, Axis::Channels)),
            ] {
                for (causal, window) in [(true, 0), (false, 0), (true, 16)] {
                    let segments = vec![vec![len, 7], vec![11, 0]];
                    push(Case { s_q, keys, values, segments, causal, window, head_dim: 80, ..Case::default() });
                }
            }
        }
        // Every size of tile, up to where none fits.
        for head_dim in [16, 30, 64, 128, 256] {
            let (keys, values) = (affine(4, Axis::Tokens), Kind::Plain(BF16));
            push(Case { s_q: 37, keys, values, head_dim, segments: vec![vec![150]], q_dtype: F32, ..Case::default() });
        }
    }
}
