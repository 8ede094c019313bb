//! The one error type of the library.
//!
//! Every variant that speaks of an operation names the operation, the argument, what was expected and what was found,
//! so that one line is enough to correct a call.

use crate::{DType, Device};

/// A result whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong. Nothing is written, appended or lost when one of these is returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument has the wrong shape.
    #[error("{op}: argument `{arg}`: expected shape {expected}, found {found:?}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// The shape that the operation wants, in words.
        expected: String,
        /// The shape that was passed.
        found: Vec<usize>,
    },
    /// An argument has the wrong element type.
    #[error("{op}: argument `{arg}`: expected dtype {expected}, found {found}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// The accepted dtypes.
        expected: String,
        /// The dtype that was passed.
        found: DType,
    },
    /// A scalar argument is out of range, or two arguments contradict each other.
    #[error("{op}: argument `{arg}`: expected {expected}, found {found}")]
    Value {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// The accepted values.
        expected: String,
        /// The value that was passed.
        found: String,
    },
    /// A required argument was left out.
    #[error("{op}: argument `{arg}`: expected {expected}, found nothing")]
    Missing {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// What it would have been.
        expected: String,
    },
    /// Two arguments live on different devices.
    #[error("{op}: argument `{arg}`: expected a tensor on {expected}, found one on {found}")]
    DeviceMismatch {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// The device of the other arguments.
        expected: Device,
        /// The device of this one.
        found: Device,
    },
    /// The device cannot serve this request. There is never a silent fallback.
    #[error("{op}: argument `{arg}`: {device} serves {expected}, found {found}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// The argument that asks for too much.
        arg: &'static str,
        /// The device.
        device: Device,
        /// What the device serves.
        expected: String,
        /// What was asked.
        found: String,
    },
    /// The device is not there, or cannot be used.
    #[error("device {device}: {reason}")]
    DeviceUnavailable {
        /// The device as it was asked for.
        device: String,
        /// Why, in words a user can act on.
        reason: String,
    },
    /// The device failed while it worked.
    #[error("{op}: {device} failed: {reason}")]
    DeviceFailed {
        /// The operation.
        op: &'static str,
        /// The device.
        device: Device,
        /// What the driver or runtime said.
        reason: String,
    },
    /// The text of a method, device or shape could not be read.
    #[error("{what} `{text}`: expected {expected}")]
    Parse {
        /// What was being read: a method, a device.
        what: &'static str,
        /// The text.
        text: String,
        /// What is accepted.
        expected: String,
    },
}

impl Error {
    /// A [`Error::Shape`], for checks that are written in one line.
    pub(crate) fn shape(op: &'static str, arg: &'static str, expected: impl Into<String>, found: &[usize]) -> Self {
        Error::Shape { op, arg, expected: expected.into(), found: found.to_vec() }
    }

    /// A [`Error::DType`].
    pub(crate) fn dtype(op: &'static str, arg: &'static str, expected: impl Into<String>, found: DType) -> Self {
        Error::DType { op, arg, expected: expected.into(), found }
    }

    /// A [`Error::Value`].
    pub(crate) fn value(
        op: &'static str,
        arg: &'static str,
        expected: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Self {
        Error::Value { op, arg, expected: expected.into(), found: found.to_string() }
    }
}
