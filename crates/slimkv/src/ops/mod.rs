//! The operations by their public names, and the registry that lists them.
//!
//! An operation is a pure function from arrays to arrays, with the same name and the same arguments in Rust, on the
//! command line and in the tests, on every device. The functions here are thin: checks of names and shapes, then
//! [`format`](crate::format) and [`attend`](crate::attend) do the work.
//!
//! ```
//! use slimkv::{Tensor, ops};
//! let codes = Tensor::from_vec(vec![0u8, 1, 2, 3], &[4])?;
//! let packed = ops::packing::turboquant_bit_pack(&codes, 2)?;
//! assert_eq!(packed.to_vec::<u32>()?, [228]);
//! # Ok::<(), slimkv::Error>(())
//! ```

pub mod affine;
pub mod attention;
pub mod packing;
mod registry;

pub use registry::{Inputs, Operation, ResultArg, ScalarArg, TensorArg, find, registry};
