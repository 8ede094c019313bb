//! Attention on every GPU that is there, against the float64 oracle.

mod gpu;

use gpu::{Case, cases, devices, segment_to};
use slimkv::attend::{self, Segment};
use slimkv::{DType, Device, Tensor};

macro_rules! against_the_oracle {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            for device in devices() {
                for case in cases::$name() {
                    case.check(&device);
                }
            }
        }
    )*};
}
against_the_oracle!(
    plain_rows_of_every_dtype
    affine_rows_of_every_width
    every_pair_of_formats
    every_head_dimension
    groups_of_any_size
    query_rows_up_to_the_limit
    lengths_down_to_nothing
    windows
    half_outputs
    many_queries
);

#[test]
fn the_list_of_cases_is_complete() {
    assert_eq!(cases::ALL.len(), 10);
}

#[test]
fn a_result_depends_on_its_own_sequence_alone() {
    for device in devices() {
        gpu::rows::same_alone_as_in_a_batch(&device);
    }
}

#[test]
fn a_query_row_that_is_not_finite_leaves_the_others_alone() {
    for device in devices() {
        for segments in [vec![vec![300]], vec![vec![70], vec![9]]] {
            Case { segments, ..Case::default() }.check_row_that_is_not_finite(&device);
        }
    }
}

#[test]
fn what_no_device_serves_is_an_error() {
    for device in devices() {
        let case = Case { segments: vec![vec![5]], ..Case::default() };
        let (q, segments, options) = case.build(1);
        let there: Vec<Segment> = segments.iter().map(|s| segment_to(s, &device)).collect();
        let error = attend::attend("test", &q, &there, options).unwrap_err();
        assert!(error.to_string().contains("expected a tensor on cpu"), "{error}");
        let huge = Tensor::zeros(DType::F32, &[1 << 40], &device).unwrap_err();
        assert!(huge.to_string().contains("bytes in one tensor"), "{huge}");
    }
    for text in ["cuda:99", "vulkan:99"] {
        let error = text.parse::<Device>().unwrap_err();
        assert!(error.to_string().starts_with(&format!("device {text}: ")), "{error}");
    }
}
