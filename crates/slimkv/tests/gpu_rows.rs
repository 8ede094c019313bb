//! Rows on every GPU that is there: written, quantised, decoded and merged exactly as on the CPU.

mod gpu;

use gpu::{devices, rows};

macro_rules! on_every_gpu {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            for device in devices() {
                rows::$name(&device);
            }
        }
    )*};
}
on_every_gpu!(
    buffers_come_back
    dropped_buffers_are_given_back
    plain_rows_are_converted
    rows_are_quantised_bit_for_bit
    rows_are_decoded_bit_for_bit
    arrays_are_quantised_bit_for_bit
    codes_are_packed
    partial_results_are_merged
    shared_memory_is_not_written
);

#[test]
fn every_check_is_listed() {
    assert_eq!(rows::ALL.len(), 10);
}
