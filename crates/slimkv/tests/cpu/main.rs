//! The CPU kernels against the oracles, on every instruction set of the machine.

mod convert;
mod decode;
mod prefill;
mod support;
