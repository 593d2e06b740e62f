//! SOCK_SEQPACKET connections under tokio.
#![allow(unsafe_code, reason = "registration of a descriptor with the runtime")]

use std::io;
use std::os::fd::BorrowedFd;

use tokio::io::unix::AsyncFd;

use crate::seqpacket::{Connection, Listener, Received, SocketError};

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
