//! How the program fails: one line on stderr and an exit code that says whose turn it is.

use std::path::Path;

/// What a command returns.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Why a command stopped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The call was wrong; another call would work. Exit code 2.
    #[error("{0}")]
    BadInput(String),
    /// The call was right, and something else failed. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// Ctrl-C. Exit code 130.
    #[error("interrupted")]
    Interrupted,
}

impl Failure {
    /// The exit code of the program.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::BadInput(_) => 2,
            Failure::Failed(_) => 1,
            Failure::Interrupted => 130,
        }
    }

    /// A bad call in the words of the contract: who, which argument, what was expected, what was found.
    pub fn argument(
        op: impl std::fmt::Display,
        arg: impl std::fmt::Display,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Self {
        Failure::BadInput(format!("{op}: argument `{arg}`: expected {expected}, found {found}"))
    }

    /// A file that the user named and that cannot be read.
    pub fn unreadable(op: impl std::fmt::Display, arg: &str, path: &Path, why: impl std::fmt::Display) -> Self {
        Failure::argument(op, arg, "a readable file", format!("{}: {why}", path.display()))
    }

    /// The message on one line, whatever a library put into it.
    pub fn one_line(&self) -> String {
        self.to_string().lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
    }
}

impl From<slimkv::Error> for Failure {
    fn from(error: slimkv::Error) -> Self {
        use slimkv::Error as E;
        match error {
            E::DeviceUnavailable { .. } | E::DeviceFailed { .. } => Failure::Failed(error.to_string()),
            _ => Failure::BadInput(error.to_string()),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Failure::Failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_that_names_all_four() {
        let failure = Failure::argument("kivi_group_quantize", "bits", "1, 2, 3, 4 or 8", "5\n  of them");
        assert_eq!(
            failure.one_line(),
            "kivi_group_quantize: argument `bits`: expected 1, 2, 3, 4 or 8, found 5 of them"
        );
        assert_eq!(failure.exit_code(), 2);
    }
}
