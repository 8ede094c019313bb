//! Decode attention with half outputs, where a GPU with tensor cores takes its own kernel, against the float64 oracle.

mod gpu;

use gpu::{Case, Kind, devices};
use slimkv::DType::{BF16, F16, F32};
use slimkv::attend;
use slimkv::format::Axis;

fn affine(bits: u32, group: usize, axis: Axis) -> Kind {
    Kind::Affine { bits, packed: true, group, axis, params: F16 }
}

fn keys(bits: u32) -> Kind {
    affine(bits, 32, Axis::Tokens)
}

fn values(bits: u32) -> Kind {
    affine(bits, 32, Axis::Channels)
}

/// Several warps' worth of tiles, ragged ends, one sequence shorter than a tile.
fn case() -> Case {
    Case { out_dtype: F16, head_dim: 128, q_heads: 8, kv_heads: 2, segments: vec![vec![1003, 5]], ..Case::default() }
}

#[test]
fn widths() {
    for device in devices() {
        for bits in [1, 2, 3, 4, 8] {
            for head_dim in [64, 128, 256] {
                Case { keys: keys(bits), values: values(bits), head_dim, ..case() }.check(&device);
            }
        }
    }
}

#[test]
fn pairs_of_formats() {
    for device in devices() {
        for k in [keys(2), keys(8), Kind::Plain(F16)] {
            for v in [values(1), values(4), Kind::Plain(F16)] {
                Case { keys: k, values: v, ..case() }.check(&device);
            }
        }
    }
}

#[test]
fn bf16() {
    for device in devices() {
        for (k, v) in
            [(Kind::Plain(BF16), Kind::Plain(BF16)), (keys(4), Kind::Plain(BF16)), (Kind::Plain(BF16), values(4))]
        {
            for out_dtype in [F16, BF16] {
                Case { keys: k, values: v, q_dtype: BF16, out_dtype, ..case() }.check(&device);
            }
        }
        Case { q_dtype: F32, keys: keys(4), values: values(4), ..case() }.check(&device);
    }
}

#[test]
fn head_dimensions() {
    for device in devices() {
        for head_dim in [16, 48, 80, 96, 112, 192] {
            let plain = Kind::Plain(F16);
            Case { keys: plain, values: plain, head_dim, ..case() }.check(&device);
            Case { keys: keys(4), values: affine(4, 16, Axis::Channels), head_dim, ..case() }.check(&device);
        }
    }
}

#[test]
fn groups() {
    for device in devices() {
        for (k, v) in [(64, 64), (128, 128), (128, 32), (16, 16), (96, 64)] {
            for bits in [2, 4] {
                let (keys, values) = (affine(bits, k, Axis::Tokens), affine(bits, v, Axis::Channels));
                Case { keys, values, ..case() }.check(&device);
            }
        }
    }
}

#[test]
fn query_rows_causality_and_windows() {
    for device in devices() {
        for (q_heads, s_q) in [(2, 1), (2, 16), (6, 3), (8, 4), (16, 2), (32, 1)] {
            for (causal, window) in [(true, 0), (true, 100), (false, 0), (false, 7)] {
                let segments = vec![vec![645, 40], vec![9, 0]];
                Case { keys: keys(4), values: values(2), q_heads, s_q, causal, window, segments, ..case() }
                    .check(&device);
            }
        }
    }
}

/// A sequence's result has the same bits alone, in a batch, and again.
#[test]
fn results_do_not_depend_on_the_batch() {
    for device in devices() {
        let both = Case { keys: keys(4), values: values(4), segments: vec![vec![2100, 2100]], ..case() };
        let (q, there, options) = both.build_on(1, &device);
        let run = |there: &[attend::Segment]| {
            let got = attend::attend("test", &q, there, options).unwrap();
            (got.out.to_bytes().unwrap(), got.lse.to_bytes().unwrap())
        };
        let first = run(&there);
        assert_eq!(first, run(&there));
        let mut shorter = there.clone();
        shorter[0].spans[1].len = 70;
        shorter[0].spans[1].q_offset = 69;
        let beside = run(&shorter);
        let half = |bytes: &[u8]| bytes[..bytes.len() / 2].to_vec();
        assert_eq!((half(&first.0), half(&first.1)), (half(&beside.0), half(&beside.1)));
        assert_ne!(first.0, beside.0);
    }
}

#[test]
fn a_query_row_that_is_not_finite_leaves_the_others_alone() {
    for device in devices() {
        for (k, v) in [(Kind::Plain(F16), Kind::Plain(F16)), (keys(4), values(4)), (keys(2), values(2))] {
            Case { keys: k, values: v, segments: vec![vec![700], vec![9]], ..case() }
                .check_row_that_is_not_finite(&device);
        }
    }
}

/// Any KV head's last cube merges, and what it reads of the others must be this call's.
#[test]
fn calls_of_different_shapes_and_threads_do_not_disturb_each_other() {
    let shapes = [(8, 2, 128, 1003, 5), (32, 8, 64, 300, 2000), (16, 1, 256, 9000, 0), (4, 4, 80, 77, 650)];
    for device in devices() {
        let cases: Vec<_> = shapes
            .into_iter()
            .map(|(q_heads, kv_heads, head_dim, first, second)| {
                let segments = vec![vec![first], vec![second]];
                let (keys, values) = (Kind::Plain(F16), Kind::Plain(F16));
                Case { keys, values, q_heads, kv_heads, head_dim, segments, ..case() }.build_on(3, &device)
            })
            .collect();
        let run = |i: usize| {
            let (q, segments, options) = &cases[i];
            attend::attend("test", q, segments, *options).unwrap()
        };
        let bytes = |got: attend::Attended| (got.out.to_bytes().unwrap(), got.lse.to_bytes().unwrap());
        let first: Vec<_> = (0..cases.len()).map(|i| bytes(run(i))).collect();
        let (run, bytes, first) = (&run, &bytes, &first);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for round in 0..20 {
                        // Queued together, so that a launch follows the one before at once.
                        let all: Vec<_> = (0..first.len()).map(|i| (i + thread + round) % first.len()).collect();
                        let got: Vec<_> = all.iter().map(|&i| run(i)).collect();
                        for (i, got) in all.into_iter().zip(got) {
                            assert!(bytes(got) == first[i], "{:?} in round {round} of thread {thread}", shapes[i]);
                        }
                    }
                });
            }
        });
    }
}
