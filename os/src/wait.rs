//! SOCK_SEQPACKET connections under tokio, and stream sockets whose path may have to be bound again.
#![allow(unsafe_code, reason = "registration of a descriptor with the runtime")]

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use crate::seqpacket::{Connection, Listener, Received, SocketError};

/// How often those who listen in a directory look whether they can be found there.
pub const LOOK: Duration = Duration::from_secs(1);

/// True while `path` leads to this open file: not once it, or its directory, was removed.
pub fn leads_to(path: &Path, file: &File) -> bool {
    let (Ok(there), Ok(ours)) = (std::fs::metadata(path), file.metadata()) else { return false };
    (there.dev(), there.ino()) == (ours.dev(), ours.ino())
}

/// True when a socket is at `path`.
pub fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket())
}

/// Passes on what is accepted, for as long as somebody takes it: a server of such a channel serves several listeners.
pub async fn feed(listener: UnixListener, to: mpsc::Sender<io::Result<UnixStream>>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if to.send(Ok(stream)).await.is_err() {
                    return;
                }
            }
            // Usually out of descriptors; some will be closed.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// A connection whose operations wait without blocking the thread.
pub struct AsyncConnection(AsyncFd<Connection>);

fn registration(source: io::Error) -> SocketError {
    SocketError::Io { what: "wait for a socket", source }
}

impl AsyncConnection {
    /// Registers `connection` with the current runtime.
    ///
    /// # Errors
    /// The runtime cannot watch it.
    pub fn new(connection: Connection) -> Result<Self, SocketError> {
        connection.set_nonblocking()?;
        // SAFETY: a Connection owns one descriptor, always returns that one, and closes it only when dropped.
        let registered = unsafe { AsyncFd::register(connection) };
        Ok(Self(registered.map_err(|e| registration(e.into()))?))
    }

    /// The connection itself.
    pub fn get(&self) -> &Connection {
        self.0.get_ref()
    }

    /// See [`Connection::recv`].
    ///
    /// # Errors
    /// As there, without would-block.
    pub async fn recv(&self, max: usize) -> Result<Option<Received>, SocketError> {
        loop {
            let mut ready = self.0.readable().await.map_err(registration)?;
            match self.get().recv(max) {
                Err(e) if e.would_block() => ready.clear_ready(),
                other => return other,
            }
        }
    }

    /// See [`Connection::send`].
    ///
    /// # Errors
    /// As there, without would-block.
    pub async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        loop {
            let mut ready = self.0.writable().await.map_err(registration)?;
            match self.get().send(bytes, fds) {
                Err(e) if e.would_block() => ready.clear_ready(),
                other => return other,
            }
        }
    }
}

/// A listener that waits without blocking the thread.
pub struct AsyncListener(AsyncFd<Listener>);

impl AsyncListener {
    /// Registers `listener` with the current runtime.
    ///
    /// # Errors
    /// The runtime cannot watch it.
    pub fn new(listener: Listener) -> Result<Self, SocketError> {
        listener.set_nonblocking()?;
        // SAFETY: a Listener owns one descriptor, always returns that one, and closes it only when dropped.
        let registered = unsafe { AsyncFd::register(listener) };
        Ok(Self(registered.map_err(|e| registration(e.into()))?))
    }

    /// See [`Listener::accept`].
    ///
    /// # Errors
    /// As there, without would-block.
    pub async fn accept(&self) -> Result<Connection, SocketError> {
        loop {
            let mut ready = self.0.readable().await.map_err(registration)?;
            match self.0.get_ref().accept() {
                Err(e) if e.would_block() => ready.clear_ready(),
                other => return other,
            }
        }
    }
}
