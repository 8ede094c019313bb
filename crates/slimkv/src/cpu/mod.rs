//! The SIMD vocabulary: instruction sets, their choice at run time, and thread splits.

/// The processor's name and the instruction set in use.
pub fn name() -> String {
    "cpu".into()
}
