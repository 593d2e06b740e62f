//! Who starts another worker when one ends.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use super::process::NOTIFY_PREFIX;

/// Of a running worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// `ds4 serve`, by its pid.
    Serve(u32),
    /// A service manager such as systemd, which asked to be told of its start.
    Manager,
    /// Nobody: it was started by hand, or its `ds4 serve` was killed.
    Nobody,
    /// This user may not look, or it lives among other pids (a container).
    Unknown,
}

/// The keeper of the worker `pid` in runtime directory `dir`.
pub fn keeper(dir: &Path, pid: u32) -> Keeper {
    match super::supervisor(dir) {
        Some(serve) => Keeper::Serve(serve),
        None => std::fs::read(format!("/proc/{pid}/environ")).map_or(Keeper::Unknown, |e| without_serve(&e, pid)),
    }
}

/// From the environment that a worker was started with, when no `ds4 serve` is alive.
fn without_serve(environ: &[u8], pid: u32) -> Keeper {
    let get = |name: &str| {
        let value = environ.split(|b| *b == 0).find_map(|v| v.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        value.filter(|v| !v.is_empty()).map(|v| OsString::from_vec(v.to_vec()))
    };
    // INVOCATION_ID says nothing: whatever is started in a terminal below a user's systemd inherits it.
    let by_systemd = get("SYSTEMD_EXEC_PID").is_some_and(|p| p == pid.to_string().as_str());
    let of_serve = |socket: &OsStr| {
        Path::new(socket).file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(NOTIFY_PREFIX.as_bytes()))
    };
    match get("NOTIFY_SOCKET") {
        _ if by_systemd => Keeper::Manager,
        Some(socket) if !of_serve(&socket) => Keeper::Manager,
        _ => Keeper::Nobody,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_is_told_by_what_it_asked_its_worker_for() {
        let of = |environ: &str| without_serve(environ.replace(' ', "\0").as_bytes(), 7);
        assert_eq!(of("A=1 NOTIFY_SOCKET=/run/systemd/notify B=2"), Keeper::Manager);
        assert_eq!(of("NOTIFY_SOCKET=@abstract"), Keeper::Manager);
        assert_eq!(of("SYSTEMD_EXEC_PID=7"), Keeper::Manager);
        // A `ds4 serve` that is dead; and what a shell below systemd passes on.
        assert_eq!(of("NOTIFY_SOCKET=/run/user/1/ds4/notify.worker.12"), Keeper::Nobody);
        assert_eq!(of("INVOCATION_ID=aa SYSTEMD_EXEC_PID=6 NOTIFY_SOCKET="), Keeper::Nobody);
        assert_eq!(of(""), Keeper::Nobody);
    }

    #[test]
    fn a_process_that_cannot_be_looked_at_is_not_called_alone() {
        assert_eq!(keeper(Path::new("/nowhere"), u32::MAX), Keeper::Unknown);
    }
}
