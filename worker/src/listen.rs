//! Sockets of a worker: HTTP (inherited or bound), control, and the lock that makes it the only one of its directory.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use ds4_os::seqpacket::check_path;
use ds4_os::wait::{is_socket, leads_to};
use ds4_settings::WORKER_SOCKET;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{Backlog, listen};
use tokio::net::TcpListener;

use crate::config::Options;
use crate::failure::Failure;

/// The HTTP listener and whether somebody else keeps it open across our restarts.
pub struct Http {
    pub listener: std::net::TcpListener,
    pub inherited: bool,
}

impl Http {
    /// Takes the socket named `http` (or the only one) that was passed to this process, else binds `options.http`.
    ///
    /// # Errors
    /// The address is in use or not ours, or the passed socket is not usable.
    pub fn open(options: &Options) -> Result<Self, Failure> {
        let mut passed = ds4_os::activation::inherited().map_err(Failure::usage)?;
        let at = passed.iter().position(|(name, _)| name == "http").or((passed.len() == 1).then_some(0));
        let http = match at {
            Some(at) => Self { listener: adopt(passed.swap_remove(at).1)?, inherited: true },
            None if !passed.is_empty() => {
                let names: Vec<&str> = passed.iter().map(|(n, _)| n.as_str()).collect();
                return Err(Failure::usage(format!(
                    "none of the passed sockets is named http: {}; set FileDescriptorName=http",
                    names.join(", ")
                )));
            }
            None => Self { listener: bind(options)?, inherited: false },
        };
        let addr = http.listener.local_addr().map_err(Failure::other)?;
        if http.inherited && !addr.ip().is_loopback() && !options.allow_remote {
            return Err(Failure::usage(format!(
                "the passed socket listens on {addr}, which other machines can reach, and the API asks for no keys: \
                 listen on 127.0.0.1, or say --allow-remote"
            )));
        }
        http.listener.set_nonblocking(true).map_err(Failure::other)?;
        Ok(http)
    }

    /// Hands it to the runtime.
    ///
    /// # Errors
    /// The runtime cannot watch it.
    pub fn into_tokio(self) -> Result<(TcpListener, bool), Failure> {
        let listener = TcpListener::from_std(self.listener).map_err(Failure::other)?;
        Ok((listener, self.inherited))
    }
}

fn bind(options: &Options) -> Result<std::net::TcpListener, Failure> {
    let addr = options.http;
    // The standard library sets SO_REUSEADDR, so a predecessor's closed connections are no hindrance.
    let listener = std::net::TcpListener::bind(addr).map_err(|e| {
        let hint = match e.kind() {
            io::ErrorKind::AddrInUse => "; another server has it: stop that, or choose another --http",
            _ => "; choose another --http",
        };
        Failure::usage(format!("cannot listen on {addr}: {e}{hint}"))
    })?;
    // Its queue of 128 is short for a burst of clients that all come back after a restart.
    Backlog::new(4096)
        .and_then(|backlog| listen(&listener, backlog))
        .map_err(|e| Failure::usage(format!("cannot listen on {addr}: {e}")))?;
    Ok(listener)
}

fn adopt(fd: OwnedFd) -> Result<std::net::TcpListener, Failure> {
    let listener = std::net::TcpListener::from(fd);
    let accepting = nix::sys::socket::getsockopt(&listener, nix::sys::socket::sockopt::AcceptConn).unwrap_or(false);
    if !accepting || listener.local_addr().is_err() {
        return Err(Failure::usage("the passed socket is no listening TCP socket; check ListenStream= of the unit"));
    }
    Ok(listener)
}

/// The runtime directory's place for one worker; its socket goes when it is dropped.
pub struct Control {
    dir: PathBuf,
    lock: Flock<File>,
}

const LOCK: &str = "worker.lock";

impl Control {
    /// Takes the directory's worker lock and binds the control socket for our user only.
    ///
    /// # Errors
    /// The directory cannot be used, or another worker is alive in it.
    pub fn open(dir: &Path) -> Result<(Self, UnixListener), Failure> {
        let bad = |e: &dyn std::fmt::Display| {
            Failure::usage(format!("the runtime directory {} cannot be used: {e}; choose another", dir.display()))
        };
        check_path(&dir.join(WORKER_SOCKET)).map_err(|e| bad(&e))?;
        fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(|e| bad(&e))?;
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(dir.join(LOCK));
        let lock = match Flock::lock(file.map_err(|e| bad(&e))?, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, nix::Error::EWOULDBLOCK)) => {
                return Err(Failure::usage(format!(
                    "another worker serves in {}; stop it (`ds4 ctl drain`), or choose another --runtime-dir",
                    dir.display()
                )));
            }
            Err((_, e)) => return Err(bad(&e)),
        };
        let listener = bind_control(dir)?;
        Ok((Self { dir: dir.to_owned(), lock }, listener))
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// False once somebody removed the directory, the lock or the socket: nobody finds this worker there then.
    pub fn intact(&self) -> bool {
        leads_to(&self.dir.join(LOCK), &self.lock) && is_socket(&self.dir.join(WORKER_SOCKET))
    }

    /// Makes again what was removed.
    ///
    /// # Errors
    /// As of [`Self::open`], another worker that has begun there among them.
    pub fn renew(&mut self) -> Result<UnixListener, Failure> {
        if leads_to(&self.dir.join(LOCK), &self.lock) {
            return bind_control(&self.dir);
        }
        let dir = self.dir.clone();
        let (renewed, listener) = Self::open(&dir)?;
        *self = renewed;
        Ok(listener)
    }
}

/// Binds the control socket, for our user only; the caller holds the lock.
fn bind_control(dir: &Path) -> Result<UnixListener, Failure> {
    let path = dir.join(WORKER_SOCKET);
    let bad = |e: &dyn std::fmt::Display| {
        Failure::usage(format!("the runtime directory {} cannot be used: {e}; choose another", dir.display()))
    };
    match fs::symlink_metadata(&path) {
        // It is a dead worker's.
        Ok(meta) if meta.file_type().is_socket() => fs::remove_file(&path).map_err(|e| bad(&e))?,
        Ok(_) => return Err(bad(&format_args!("{} is in the way and no socket", path.display()))),
        Err(_) => {}
    }
    let listener = UnixListener::bind(&path).map_err(|e| bad(&e))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(|e| bad(&e))?;
    listener.set_nonblocking(true).map_err(|e| bad(&e))?;
    Ok(listener)
}

impl Drop for Control {
    fn drop(&mut self) {
        // Where the lock was removed, the socket may be another worker's.
        if leads_to(&self.dir.join(LOCK), &self.lock) {
            let _ = fs::remove_file(self.dir.join(WORKER_SOCKET));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_worker_a_directory_and_a_dead_one_s_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (control, _listener) = Control::open(dir.path()).unwrap();
        let e = Control::open(dir.path()).err().unwrap();
        assert_eq!(e.exit, 2);
        assert!(e.message.contains("another worker"), "{e}");
        drop(control);
        assert!(!dir.path().join(WORKER_SOCKET).exists());
        drop(UnixListener::bind(dir.path().join(WORKER_SOCKET)).unwrap());
        assert!(Control::open(dir.path()).is_ok());
    }

    #[test]
    fn what_was_removed_is_made_again_unless_another_worker_has_begun_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let (mut control, _first) = Control::open(&path).unwrap();
        assert!(control.intact());
        for lost in [WORKER_SOCKET, LOCK, ""] {
            let lost = path.join(lost);
            if lost == path { fs::remove_dir_all(lost) } else { fs::remove_file(lost) }.unwrap();
            assert!(!control.intact());
            let _listener = control.renew().unwrap();
            assert!(control.intact() && std::os::unix::net::UnixStream::connect(path.join(WORKER_SOCKET)).is_ok());
            assert!(Control::open(&path).is_err());
        }
        fs::remove_dir_all(&path).unwrap();
        let _other = Control::open(&path).unwrap();
        assert!(control.renew().err().unwrap().message.contains("another worker"));
    }

    #[test]
    fn l8_a_directory_that_cannot_be_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        let e = Control::open(&file.join("sub")).err().unwrap();
        assert!(e.message.contains(file.to_str().unwrap()), "{e}");
    }

    #[test]
    fn l4_a_taken_port_is_named() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = taken.local_addr().unwrap();
        let args = ["ds4-worker", "--config", "/dev/null", "--http", &addr.to_string()].map(str::to_owned);
        let (cli, origins) = ds4_settings::try_parse_from::<crate::config::Cli, _, _>(args).unwrap();
        let (options, _) = crate::config::resolve(&cli, &origins).unwrap();
        let e = Http::open(&options).err().unwrap();
        assert_eq!(e.exit, 2);
        assert!(e.message.contains(&addr.to_string()) && e.message.contains("--http"), "{e}");
    }
}
