//! Text for people on standard streams that may be closed or full: the print macros panic there, and a lost line is no
//! reason to end a process that serves.

use std::fmt;
use std::io::{self, Write as _};

/// Writes a line to standard error; one that cannot be written is lost.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::say::line(format_args!($($text)*)) };
}

/// Writes to standard output what a command was asked for, at once and as it is. An error is the caller's to report.
#[macro_export]
macro_rules! show {
    ($($text:tt)*) => { $crate::say::output(format_args!($($text)*)) };
}

/// What [`say!`] does, in one piece, so that lines of several processes do not mix.
pub fn line(text: fmt::Arguments<'_>) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// What [`show!`] does.
///
/// # Errors
/// It cannot be written: the reader has left, or the disk is full.
pub fn output(text: fmt::Arguments<'_>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.to_string().as_bytes())?;
    out.flush()
}

/// A reader that has seen enough (`| head`) is an end and no failure.
///
/// # Errors
/// Others than that.
pub fn unless_closed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_has_left_is_an_end_and_a_full_disk_is_not() {
        let failed = |kind: io::ErrorKind| unless_closed(Err(kind.into())).map_err(|e| e.kind());
        assert_eq!(failed(io::ErrorKind::BrokenPipe), Ok(()));
        assert_eq!(failed(io::ErrorKind::StorageFull), Err(io::ErrorKind::StorageFull));
    }
}
