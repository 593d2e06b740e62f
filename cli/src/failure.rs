//! Errors that carry the exit code that a script will see.

use std::fmt;

/// A message for a person and an exit code for a script; anything else exits with 1.
#[derive(Debug)]
pub struct Failure {
    /// Exit code.
    pub code: u8,
    message: String,
}

impl Failure {
    /// An `anyhow` error that makes `ds4` exit with `code`.
    pub fn error(code: u8, message: impl fmt::Display) -> anyhow::Error {
        Self { code, message: message.to_string() }.into()
    }

    /// Exit code of any error.
    pub fn code_of(error: &anyhow::Error) -> u8 {
        error.chain().find_map(|e| e.downcast_ref::<Self>()).map_or(1, |f| f.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}
