//! Listening sockets that a service manager or supervisor opened for this process.
//!
//! Source: sd_listen_fds(3). Descriptors from 3 on are ours when LISTEN_PID is our pid; LISTEN_FDNAMES names them.
#![allow(unsafe_code, reason = "takes over descriptors that were inherited by number")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

const FIRST: RawFd = 3;
/// No manager passes more.
const MAX: RawFd = 1024;

static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes the inherited sockets, each with its name (`unknown` when none was given), and makes them close-on-exec. Empty
/// when there are none for this process, and on every later call.
///
/// # Errors
/// LISTEN_FDS is malformed, or names a descriptor that is not open.
pub fn inherited() -> io::Result<Vec<(String, OwnedFd)>> {
    let var = |name: &str| std::env::var(name).ok();
    if var("LISTEN_PID").and_then(|p| p.parse().ok()) != Some(std::process::id()) {
        return Ok(Vec::new());
    }
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    let given = var("LISTEN_FDS").unwrap_or_default();
    let count = given.parse::<RawFd>().ok().filter(|n| (0..=MAX).contains(n));
    let count = count.ok_or_else(|| bad(format!("LISTEN_FDS is {given:?}, which is no number of descriptors")))?;
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Ok(Vec::new());
    }
    let names = names(&var("LISTEN_FDNAMES").unwrap_or_default(), usize::try_from(count).unwrap_or(0));
    let mut sockets = Vec::with_capacity(names.len());
    for (fd, name) in (FIRST..FIRST + count).zip(names) {
        // SAFETY: the environment says that this descriptor was opened for this process, nothing else in this process
        // knows its number, and TAKEN makes sure that it is taken only once. If it is not open, the next line fails and
        // the value is never used or closed.
        let owned = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(fd) });
        fcntl(&*owned, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
            .map_err(|e| bad(format!("LISTEN_FDS names descriptor {fd}: {}", io::Error::from(e))))?;
        sockets.push((name, std::mem::ManuallyDrop::into_inner(owned)));
    }
    Ok(sockets)
}

/// `count` names: those given, filled up with `unknown`.
fn names(given: &str, count: usize) -> Vec<String> {
    let given = given.split(':').filter(|n| !n.is_empty()).map(str::to_owned);
    given.chain(std::iter::repeat("unknown".to_owned())).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_filled_up() {
        assert_eq!(names("http:grpc", 3), ["http", "grpc", "unknown"]);
        assert_eq!(names("", 1), ["unknown"]);
        assert_eq!(names("a:b", 1), ["a"]);
    }

    #[test]
    fn another_process_s_sockets_are_left_alone() {
        // The test runner passes no LISTEN_PID of ours.
        assert!(inherited().unwrap().is_empty());
    }
}
