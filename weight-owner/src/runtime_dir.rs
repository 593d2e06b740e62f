//! The runtime directory: one owner per directory, its sockets and their permissions.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use ds4_os::seqpacket::{Listener, check_path};
use ds4_os::wait::{is_socket, leads_to};
use ds4_settings::{BROKER_SOCKET, OWNER_SOCKET};
use nix::fcntl::{Flock, FlockArg};

use crate::Failure;

const LOCK: &str = "owner.lock";

/// Holds the directory's lock and removes the sockets when dropped.
pub struct RuntimeDir {
    path: PathBuf,
    lock: Flock<File>,
}

impl RuntimeDir {
    /// Creates `path` when it is missing (mode 0755: the sockets have modes of their own) and takes its lock.
    ///
    /// # Errors
    /// Not a directory, not writable, a socket path too long, or another owner is alive there.
    pub fn claim(path: &Path) -> Result<Self, Failure> {
        let bad = |what: &str, e: &dyn std::fmt::Display| {
            Failure::usage("runtime_dir", format!("{what} {}: {e}; choose another --runtime-dir", path.display()))
        };
        for socket in [BROKER_SOCKET, OWNER_SOCKET] {
            check_path(&path.join(socket)).map_err(|e| bad("unusable runtime directory", &e))?;
        }
        match fs::DirBuilder::new().recursive(true).mode(0o755).create(path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(bad("the runtime directory is a file", &"not a directory"));
            }
            Err(e) => return Err(bad("cannot create the runtime directory", &e)),
        }
        let owner = fs::metadata(path).map_err(|e| bad("unusable runtime directory", &e))?.uid();
        if is_strangers(owner, nix::unistd::geteuid().as_raw()) {
            let whose = format!("it belongs to user {owner}, who can put sockets in the place of ours");
            return Err(bad("unusable runtime directory", &whose));
        }
        let lock = path.join(LOCK);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock)
            .map_err(|e| bad("cannot write to the runtime directory", &e))?;
        let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((mut file, nix::Error::EWOULDBLOCK)) => {
                let mut pid = String::new();
                let _ = file.read_to_string(&mut pid);
                let pid = if pid.trim().is_empty() { "unknown" } else { pid.trim() };
                let text = format!(
                    "another owner (pid {pid}) is listening on {}; stop it or choose another --runtime-dir",
                    path.join(BROKER_SOCKET).display()
                );
                return Err(Failure::usage("owner_running", text));
            }
            Err((_, e)) => return Err(bad("cannot lock the runtime directory", &e)),
        };
        let pid = format!("{}\n", std::process::id());
        let written =
            lock.rewind().and_then(|()| lock.write_all(pid.as_bytes())).and_then(|()| lock.set_len(pid.len() as u64));
        // A full disk shows here, before anything else is done.
        written.map_err(|e| bad("cannot write to the runtime directory", &e))?;
        Ok(Self { path: path.to_owned(), lock })
    }

    /// Binds the broker's socket. `open` lets every user connect, for the peer check to judge them; else only ours may.
    ///
    /// # Errors
    /// Something that is no socket is in the way, or the kernel refuses.
    pub fn broker(&self, open: bool) -> Result<Listener, Failure> {
        let path = self.path.join(BROKER_SOCKET);
        self.clear(&path)?;
        let listener = private(|| Listener::bind(&path)).map_err(|e| bind_failure(&path, &e))?;
        set_mode(&path, if open { 0o666 } else { 0o600 })?;
        Ok(listener)
    }

    /// Binds the control socket, for our user only.
    ///
    /// # Errors
    /// Something that is no socket is in the way, or the kernel refuses.
    pub fn control(&self) -> Result<UnixListener, Failure> {
        let path = self.path.join(OWNER_SOCKET);
        self.clear(&path)?;
        let listener = private(|| UnixListener::bind(&path)).map_err(|e| bind_failure(&path, &e))?;
        set_mode(&path, 0o600)?;
        listener.set_nonblocking(true).map_err(|e| bind_failure(&path, &e))?;
        Ok(listener)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// False once somebody removed the directory, the lock or a socket: nobody finds this owner there then.
    pub fn intact(&self) -> bool {
        leads_to(&self.path.join(LOCK), &self.lock)
            && [BROKER_SOCKET, OWNER_SOCKET].iter().all(|socket| is_socket(&self.path.join(socket)))
    }

    /// Makes again what was removed, and binds both sockets; `open` as for [`Self::broker`].
    ///
    /// # Errors
    /// As of [`Self::claim`], another owner that has begun there among them, and as of the sockets.
    pub fn renew(&mut self, open: bool) -> Result<(Listener, UnixListener), Failure> {
        if !leads_to(&self.path.join(LOCK), &self.lock) {
            *self = Self::claim(&self.path)?;
        }
        Ok((self.broker(open)?, self.control()?))
    }

    /// Removes the socket of an owner that died; we hold the lock, so no live owner has it.
    fn clear(&self, path: &Path) -> Result<(), Failure> {
        match fs::symlink_metadata(path) {
            Ok(meta) if meta.file_type().is_socket() => {
                tracing::info!(path = %path.display(), "replacing the socket of a dead owner");
                fs::remove_file(path).map_err(|e| bind_failure(path, &e))
            }
            Ok(_) => {
                let text = format!(
                    "{} is in the way and no socket; remove it or choose another --runtime-dir",
                    path.display()
                );
                Err(Failure::usage("runtime_dir", text))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(bind_failure(path, &e)),
        }
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        // Where the lock was removed, the sockets may be another owner's.
        if !leads_to(&self.path.join(LOCK), &self.lock) {
            return;
        }
        // The lock file stays: removing it would race with an owner that has just opened it.
        for socket in [BROKER_SOCKET, OWNER_SOCKET] {
            let path = self.path.join(socket);
            if fs::symlink_metadata(&path).is_ok_and(|m| m.file_type().is_socket()) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// Whether a directory of `owner` is one that somebody else made ready for `user`, as anybody can below /tmp. Root may have reasons of its own.
fn is_strangers(owner: u32, user: u32) -> bool {
    owner != user && owner != 0 && user != 0
}

/// Runs `bind` so that the socket file is never more open than 0600.
fn private<T, E>(bind: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    use nix::sys::stat::{Mode, umask};
    let before = umask(Mode::from_bits_truncate(0o177));
    let result = bind();
    umask(before);
    result
}

fn set_mode(path: &Path, mode: u32) -> Result<(), Failure> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(|e| bind_failure(path, &e))
}

fn bind_failure(path: &Path, e: &dyn std::fmt::Display) -> Failure {
    Failure::usage("runtime_dir", format!("cannot listen on {}: {e}; choose another --runtime-dir", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ds4_os::seqpacket::Connection;

    fn code(result: Result<impl Sized, Failure>) -> (String, String, u8) {
        let failure = result.err().unwrap();
        (failure.code, failure.message, failure.exit)
    }

    #[test]
    fn sockets_are_private_or_open_as_asked_and_go_with_the_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let claimed = RuntimeDir::claim(&path).unwrap();
        let mode = |name: &str| fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777;
        let broker = claimed.broker(false).unwrap();
        assert_eq!(mode(BROKER_SOCKET), 0o600);
        drop(broker);
        // The socket file of the first is stale now.
        let _broker = claimed.broker(true).unwrap();
        assert_eq!(mode(BROKER_SOCKET), 0o666);
        let _control = claimed.control().unwrap();
        assert_eq!(mode(OWNER_SOCKET), 0o600);
        assert!(Connection::connect(&path.join(BROKER_SOCKET)).is_ok());
        drop(claimed);
        assert!(!path.join(BROKER_SOCKET).exists() && !path.join(OWNER_SOCKET).exists());
    }

    #[test]
    fn a_live_owner_is_named_and_a_dead_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let first = RuntimeDir::claim(dir.path()).unwrap();
        let (code_, text, exit) = code(RuntimeDir::claim(dir.path()));
        assert_eq!((code_.as_str(), exit), ("owner_running", 2));
        assert!(text.contains(&format!("another owner (pid {})", std::process::id())), "{text}");
        drop(first);
        assert!(RuntimeDir::claim(dir.path()).is_ok());
    }

    #[test]
    fn what_was_removed_is_made_again_unless_another_owner_has_begun_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let mut claimed = RuntimeDir::claim(&path).unwrap();
        let _first = (claimed.broker(false).unwrap(), claimed.control().unwrap());
        assert!(claimed.intact());
        for lost in [BROKER_SOCKET, OWNER_SOCKET, LOCK, ""] {
            let lost = path.join(lost);
            if lost == path { fs::remove_dir_all(lost) } else { fs::remove_file(lost) }.unwrap();
            assert!(!claimed.intact());
            let _sockets = claimed.renew(false).unwrap();
            assert!(claimed.intact());
            assert!(Connection::connect(&path.join(BROKER_SOCKET)).is_ok());
            assert_eq!(code(RuntimeDir::claim(&path)).0, "owner_running");
        }
        fs::remove_dir_all(&path).unwrap();
        let other = RuntimeDir::claim(&path).unwrap();
        let _others = (other.broker(false).unwrap(), other.control().unwrap());
        assert_eq!(code(claimed.renew(false)).0, "owner_running");
        drop(claimed);
    }

    #[test]
    fn l8_impossible_directories_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        for bad in [file.clone(), file.join("below"), PathBuf::from("/proc/ds4")] {
            let (code, text, exit) = code(RuntimeDir::claim(&bad));
            assert_eq!((code.as_str(), exit), ("runtime_dir", 2));
            assert!(text.contains(bad.to_str().unwrap()) && text.contains("--runtime-dir"), "{text}");
        }
        let long = dir.path().join("x".repeat(100));
        let (_, text, _) = code(RuntimeDir::claim(&long));
        assert!(text.contains("107 are allowed"), "{text}");
        assert!(!long.exists());
    }

    #[test]
    fn a_directory_that_a_stranger_made_is_no_place_for_our_sockets() {
        assert!(is_strangers(1001, 1000));
        assert!(!is_strangers(1000, 1000) && !is_strangers(0, 1000) && !is_strangers(1000, 0));
    }

    #[test]
    fn a_foreign_file_in_the_way_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(BROKER_SOCKET);
        fs::write(&path, "precious").unwrap();
        let claimed = RuntimeDir::claim(dir.path()).unwrap();
        let (_, text, _) = code(claimed.broker(false));
        assert!(text.contains("no socket"), "{text}");
        drop(claimed);
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    /// Every write to /dev/full fails with ENOSPC, as on a full file system.
    #[test]
    fn a_full_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", dir.path().join(LOCK)).unwrap();
        let (code, text, exit) = code(RuntimeDir::claim(dir.path()));
        assert_eq!((code.as_str(), exit), ("runtime_dir", 2));
        assert!(text.contains("No space left"), "{text}");
    }
}
