//! The error type of this crate.

use std::path::PathBuf;

/// A result whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between a file and a generated token. Every variant about a file names the file and the key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened, read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not of the format that its name or content promises.
    #[error("{file}: expected {expected}, found {found}")]
    Format {
        /// The file.
        file: PathBuf,
        /// The format.
        expected: &'static str,
        /// What is wrong with it.
        found: String,
    },
    /// The model needs a key or a tensor that the file lacks.
    #[error("{file}: `{key}`: expected {expected}, found nothing")]
    Missing {
        /// The file.
        file: PathBuf,
        /// The metadata key or the tensor.
        key: String,
        /// What it would have been.
        expected: String,
    },
    /// A metadata value is of the wrong type, out of range or of a kind that is not supported.
    #[error("{file}: `{key}`: expected {expected}, found {found}")]
    Value {
        /// The file.
        file: PathBuf,
        /// The metadata key.
        key: String,
        /// What is accepted.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// A tensor has the wrong shape.
    #[error("{file}: tensor `{tensor}`: expected shape {expected:?}, found {found:?}")]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape that the metadata implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor that this architecture does not use: ignoring it would give wrong results.
    #[error("{file}: tensor `{tensor}`: not part of a {architecture} model as this crate knows it")]
    UnknownTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The architecture.
        architecture: String,
    },
    /// An argument of a call is out of range.
    #[error("{op}: argument `{arg}`: expected {expected}, found {found}")]
    Argument {
        /// The function.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// What is accepted.
        expected: String,
        /// What was passed.
        found: String,
    },
    /// The sequence would grow past the context that the model was made for.
    #[error("the sequence would be {tokens} tokens long, and the model's context is {context}")]
    ContextFull {
        /// The length that was asked for.
        tokens: usize,
        /// The limit.
        context: usize,
    },
    /// Text could not be turned into tokens.
    #[error("tokenizer: {0}")]
    Tokenize(String),
    /// The chat template could not be rendered.
    #[error("chat template: {0}")]
    Template(String),
    /// No model was found, and it could not be fetched either.
    #[error("no model: {tried}")]
    NoModel {
        /// Every place that was tried and what it answered, and what the user can do.
        tried: String,
    },
    /// One source could not deliver a file.
    #[error("cannot fetch {what} from {from}: {reason}")]
    Fetch {
        /// The file.
        what: String,
        /// The place.
        from: String,
        /// Why.
        reason: String,
    },
    /// A downloaded file is not the expected one. It was deleted.
    #[error("{what} from {from}: expected sha256 {expected}, found {found}")]
    Checksum {
        /// The file.
        what: String,
        /// The place.
        from: String,
        /// The checksum of the right file.
        expected: String,
        /// The checksum of what came.
        found: String,
    },
    /// The caller asked to stop. Nothing half written is left.
    #[error("cancelled")]
    Cancelled,
    /// The cache or the attention refused.
    #[error(transparent)]
    Cache(#[from] slimkv::Error),
    /// A dense layer failed.
    #[error("dense layers: {0}")]
    Dense(#[from] candle_core::Error),
}

impl Error {
    /// Whether the caller itself asked to stop, so that there is nothing to explain.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Error::Cancelled)
    }

    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, source }
    }
}
