//! Unix sockets of type SOCK_SEQPACKET: whole messages with descriptors attached.
//!
//! Hazards that are handled here, each by an error: a message longer than the receiver's buffer (`MSG_TRUNC`), descriptors
//! that did not fit (`MSG_CTRUNC`: the kernel drops the rest, so what arrived is closed and the message refused),
//! descriptors leaking into children (`MSG_CMSG_CLOEXEC`), and a peer that goes away while we send (`MSG_NOSIGNAL`).
//! Source: unix(7), recvmsg(2).
#![allow(unsafe_code, reason = "received descriptors become owned")]

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, sockopt,
};
use nix::sys::time::TimeVal;

/// Descriptors in one message, the kernel's SCM_MAX_FD.
pub const MAX_FDS: usize = 253;
/// Longest path that fits a Unix socket address with its terminating zero.
pub const MAX_PATH: usize = 107;

/// What can go wrong on such a socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path does not fit an address.
    #[error("the socket path {} is {} bytes long and {MAX_PATH} are allowed; choose a shorter runtime directory", path.display(), path.as_os_str().len())]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The kernel refused.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The peer's message is longer than any message of the protocol.
    #[error("the peer sent a message of more than {0} bytes")]
    MessageTooLong(usize),
    /// Descriptors were lost on the way.
    #[error("descriptors of a message were lost: this process may be at its limit of open files; raise RLIMIT_NOFILE")]
    DescriptorsLost,
    /// More than [`MAX_FDS`].
    #[error("{0} descriptors do not fit one message ({MAX_FDS} do)")]
    TooManyDescriptors(usize),
}

impl SocketError {
    /// True when a non-blocking operation would block, or a timeout ran out.
    pub fn would_block(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::WouldBlock)
    }

    /// The underlying kind of a kernel error.
    pub fn kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Io { source, .. } => Some(source.kind()),
            _ => None,
        }
    }
}

fn io_error(what: &'static str) -> impl FnOnce(Errno) -> SocketError {
    move |e| SocketError::Io { what, source: e.into() }
}

/// Who is at the other end, as the kernel recorded at connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process.
    pub pid: i32,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

/// A received message.
#[derive(Debug)]
pub struct Received {
    /// Its bytes, never empty.
    pub bytes: Vec<u8>,
    /// Descriptors that came with it, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
}

impl Connection {
    /// Connects to the listener at `path`.
    ///
    /// # Errors
    /// ENOENT: no socket there; ECONNREFUSED: a socket file whose owner is gone; EACCES: not our user's.
    pub fn connect(path: &Path) -> Result<Self, SocketError> {
        let address = address(path)?;
        let fd = new_socket()?;
        socket::connect(fd.as_raw_fd(), &address).map_err(io_error("connect"))?;
        Ok(Self { fd })
    }

    /// Two ends that are connected to each other, close-on-exec.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn pair() -> Result<(Self, Self), SocketError> {
        let (a, b) = socket::socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(io_error("socketpair"))?;
        Ok((Self { fd: a }, Self { fd: b }))
    }

    /// Takes over a connected descriptor, e.g. one that was inherited.
    ///
    /// # Errors
    /// It is not a SOCK_SEQPACKET socket.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, SocketError> {
        match socket::getsockopt(&fd, sockopt::SockType).map_err(io_error("getsockopt"))? {
            SockType::SeqPacket => Ok(Self { fd }),
            _ => Err(SocketError::Io { what: "take over a socket", source: io::ErrorKind::InvalidInput.into() }),
        }
    }

    /// Sends one message with up to [`MAX_FDS`] descriptors; the caller's descriptors stay open.
    ///
    /// # Errors
    /// EPIPE when the peer is gone; would-block when non-blocking or timed out; ETOOMANYREFS when more descriptors are in
    /// flight than RLIMIT_NOFILE.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        if fds.len() > MAX_FDS {
            return Err(SocketError::TooManyDescriptors(fds.len()));
        }
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &rights[..0] } else { &rights[..] };
        let iov = [IoSlice::new(bytes)];
        loop {
            match socket::sendmsg::<()>(self.fd.as_raw_fd(), &iov, control, MsgFlags::MSG_NOSIGNAL, None) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(io_error("send")(e)),
            }
        }
    }

    /// Receives one message of at most `max` bytes; `None` when the peer has closed (or sent an empty message, which no
    /// protocol of ours has).
    ///
    /// # Errors
    /// See [`SocketError`]; would-block when non-blocking or timed out. ECONNRESET when the peer closed with our messages
    /// unread.
    pub fn recv(&self, max: usize) -> Result<Option<Received>, SocketError> {
        let mut bytes = vec![0; max];
        let mut control = nix::cmsg_space!([RawFd; MAX_FDS]);
        let mut fds = Vec::new();
        let (len, flags) = loop {
            let mut iov = [IoSliceMut::new(&mut bytes)];
            match socket::recvmsg::<()>(self.fd.as_raw_fd(), &mut iov, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC) {
                Ok(message) => {
                    for part in message.cmsgs().map_err(|_| SocketError::DescriptorsLost)? {
                        if let ControlMessageOwned::ScmRights(raw) = part {
                            // SAFETY: the kernel has just installed these descriptors for us and nobody else knows them.
                            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                        }
                    }
                    break (message.bytes, message.flags);
                }
                Err(Errno::EINTR) => {}
                Err(e) => return Err(io_error("receive")(e)),
            }
        };
        if flags.contains(MsgFlags::MSG_CTRUNC) {
            return Err(SocketError::DescriptorsLost);
        }
        if flags.contains(MsgFlags::MSG_TRUNC) {
            return Err(SocketError::MessageTooLong(max));
        }
        if len == 0 {
            return Ok(None);
        }
        bytes.truncate(len);
        Ok(Some(Received { bytes, fds }))
    }

    /// Bounds every later [`Self::send`] and [`Self::recv`]; `None` waits for ever.
    ///
    /// # Errors
    /// None in practice.
    pub fn set_timeout(&self, limit: Option<Duration>) -> Result<(), SocketError> {
        // Zero would mean "for ever" to the kernel.
        let limit = limit.map_or(Duration::ZERO, |d| d.max(Duration::from_millis(1)));
        let seconds = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
        let value = TimeVal::new(seconds, i64::from(limit.subsec_micros()));
        socket::setsockopt(&self.fd, sockopt::ReceiveTimeout, &value).map_err(io_error("setsockopt"))?;
        socket::setsockopt(&self.fd, sockopt::SendTimeout, &value).map_err(io_error("setsockopt"))
    }

    /// Makes operations return at once.
    ///
    /// # Errors
    /// None in practice.
    pub fn set_nonblocking(&self) -> Result<(), SocketError> {
        set_nonblocking(&self.fd)
    }

    /// Who is at the other end.
    ///
    /// # Errors
    /// None in practice.
    pub fn peer(&self) -> Result<PeerCredentials, SocketError> {
        let c = socket::getsockopt(&self.fd, sockopt::PeerCredentials).map_err(io_error("SO_PEERCRED"))?;
        Ok(PeerCredentials { pid: c.pid(), uid: c.uid(), gid: c.gid() })
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl From<Connection> for OwnedFd {
    fn from(connection: Connection) -> Self {
        connection.fd
    }
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
}

impl Listener {
    /// Binds `path`, which must not exist, with a backlog of 128. The file's mode follows the umask.
    ///
    /// # Errors
    /// EADDRINUSE: something is at `path` already; ENOENT, ENOTDIR, EACCES of its directory.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let address = address(path)?;
        let fd = new_socket()?;
        socket::bind(fd.as_raw_fd(), &address).map_err(io_error("bind"))?;
        socket::listen(&fd, Backlog::new(128).map_err(io_error("backlog"))?).map_err(io_error("listen"))?;
        Ok(Self { fd })
    }

    /// The next connection, close-on-exec and blocking.
    ///
    /// # Errors
    /// Would-block when non-blocking; EMFILE when out of descriptors.
    pub fn accept(&self) -> Result<Connection, SocketError> {
        loop {
            match socket::accept4(&self.fd, SockFlag::SOCK_CLOEXEC) {
                Ok(fd) => return Ok(Connection { fd }),
                Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                Err(e) => return Err(io_error("accept")(e)),
            }
        }
    }

    /// Makes [`Self::accept`] return at once.
    ///
    /// # Errors
    /// None in practice.
    pub fn set_nonblocking(&self) -> Result<(), SocketError> {
        set_nonblocking(&self.fd)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Checks that `path` fits a socket address.
///
/// # Errors
/// [`SocketError::PathTooLong`].
pub fn check_path(path: &Path) -> Result<(), SocketError> {
    if path.as_os_str().len() > MAX_PATH {
        return Err(SocketError::PathTooLong { path: path.to_owned() });
    }
    Ok(())
}

fn address(path: &Path) -> Result<UnixAddr, SocketError> {
    check_path(path)?;
    UnixAddr::new(path).map_err(io_error("socket address"))
}

fn new_socket() -> Result<OwnedFd, SocketError> {
    socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).map_err(io_error("socket"))
}

fn set_nonblocking(fd: &OwnedFd) -> Result<(), SocketError> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = fcntl(fd, FcntlArg::F_GETFL).map_err(io_error("F_GETFL"))?;
    let flags = OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK;
    fcntl(fd, FcntlArg::F_SETFL(flags)).map(drop).map_err(io_error("F_SETFL"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn open_files() -> usize {
        crate::stats::fd_count(None).unwrap()
    }

    fn cloexec(fd: &OwnedFd) -> bool {
        use nix::fcntl::{FcntlArg, fcntl};
        fcntl(fd, FcntlArg::F_GETFD).unwrap() & libc::FD_CLOEXEC != 0
    }

    #[test]
    fn messages_keep_their_boundaries_and_descriptors() {
        let (a, b) = Connection::pair().unwrap();
        let memory = crate::memfd::sealed("test", b"content").unwrap();
        a.send(b"one", &[memory.as_fd()]).unwrap();
        a.send(b"two", &[]).unwrap();
        let one = b.recv(64).unwrap().unwrap();
        assert_eq!((one.bytes.as_slice(), one.fds.len()), (&b"one"[..], 1));
        assert!(cloexec(&one.fds[0]));
        assert_eq!(crate::memfd::check_sealed(&one.fds[0], 7).unwrap(), 7);
        let two = b.recv(64).unwrap().unwrap();
        assert_eq!((two.bytes.as_slice(), two.fds.len()), (&b"two"[..], 0));
        drop(a);
        assert!(b.recv(64).unwrap().is_none());
    }

    #[test]
    fn the_largest_number_of_descriptors_goes_through_and_one_more_is_refused() {
        let (a, b) = Connection::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        a.send(b"x", &vec![file.as_fd(); MAX_FDS]).unwrap();
        assert_eq!(b.recv(8).unwrap().unwrap().fds.len(), MAX_FDS);
        let err = a.send(b"x", &vec![file.as_fd(); MAX_FDS + 1]).unwrap_err();
        assert!(matches!(err, SocketError::TooManyDescriptors(254)), "{err}");
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_and_its_descriptors_closed() {
        let (a, b) = Connection::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let before = open_files();
        a.send(&[1; 65], &[file.as_fd(); 5]).unwrap();
        assert!(matches!(b.recv(64), Err(SocketError::MessageTooLong(64))));
        assert_eq!(open_files(), before);
        a.send(&[1; 64], &[]).unwrap();
        assert_eq!(b.recv(64).unwrap().unwrap().bytes.len(), 64);
    }

    #[test]
    fn a_silent_peer_costs_a_timeout_not_a_hang() {
        let (_a, b) = Connection::pair().unwrap();
        b.set_timeout(Some(Duration::from_millis(30))).unwrap();
        let start = Instant::now();
        let err = b.recv(64).unwrap_err();
        assert!(err.would_block(), "{err}");
        assert!(start.elapsed() >= Duration::from_millis(25) && start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn listener_and_credentials() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(Listener::bind(&path).unwrap_err().kind(), Some(io::ErrorKind::AddrInUse));
        listener.set_nonblocking().unwrap();
        assert!(listener.accept().unwrap_err().would_block());
        let client = Connection::connect(&path).unwrap();
        let server = listener.accept().unwrap();
        let peer = server.peer().unwrap();
        assert_eq!(peer.uid, nix::unistd::geteuid().as_raw());
        assert_eq!(u32::try_from(peer.pid).unwrap(), std::process::id());
        client.send(b"hi", &[]).unwrap();
        assert_eq!(server.recv(8).unwrap().unwrap().bytes, b"hi");
        drop((listener, server));
        assert_eq!(Connection::connect(&path).unwrap_err().kind(), Some(io::ErrorKind::ConnectionRefused));
    }

    #[test]
    fn a_long_path_is_named_with_the_limit() {
        let path = PathBuf::from(format!("/{}", "x".repeat(200)));
        let err = Listener::bind(&path).unwrap_err().to_string();
        assert!(err.contains("201 bytes") && err.contains("107 are allowed"), "{err}");
        assert!(Connection::connect(&path).is_err());
    }

    #[test]
    fn sending_to_a_closed_peer_is_an_error_not_a_signal() {
        let (a, b) = Connection::pair().unwrap();
        drop(b);
        assert_eq!(a.send(b"x", &[]).unwrap_err().kind(), Some(io::ErrorKind::BrokenPipe));
    }

    #[test]
    fn only_seqpacket_descriptors_are_taken_over() {
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Connection::from_fd(stream.into()).is_err());
        let (a, _b) = Connection::pair().unwrap();
        assert!(Connection::from_fd(a.into()).is_ok());
    }
}
