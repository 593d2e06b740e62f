//! One TCP connection under hyper: it notices a peer that left or stopped reading, and knows when hyper answered by itself.
//!
//! hyper sees a FIN only while it has nothing unread in its buffer (a client that pipelined a byte too many and left would
//! keep its generation running), and then drops the exchange at once (a client that only half-closed would lose even a
//! short answer). So the socket is watched beside hyper, and a FIN means the same thing always.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// Most bytes of a request head that are kept for inspection.
const KEPT: usize = 64 << 10;

/// What hyper, the service and the watcher share.
#[derive(Debug)]
pub struct Conn {
    stream: TcpStream,
    /// Status of an answer that hyper gave by itself and that was withheld; 0: none.
    own_status: AtomicU16,
    /// Bytes read since the last request head was complete.
    head: Mutex<Vec<u8>>,
    keep_head: AtomicBool,
}

impl Conn {
    /// Wraps a connected socket.
    pub fn new(stream: TcpStream) -> Arc<Self> {
        Arc::new(Self {
            stream,
            own_status: AtomicU16::new(0),
            head: Mutex::new(Vec::new()),
            keep_head: AtomicBool::new(true),
        })
    }

    /// Completes once the peer has closed its side (or both), whether or not unread bytes are waiting.
    pub async fn peer_left(&self) {
        loop {
            match self.stream.ready(Interest::READABLE).await {
                Ok(ready) if ready.is_read_closed() => return,
                // Unread bytes keep the socket readable: look again later instead of spinning.
                Ok(_) => tokio::time::sleep(Duration::from_millis(250)).await,
                Err(_) => return,
            }
        }
    }

    /// The status of an answer that hyper wanted to give by itself (to a malformed head), if it did.
    pub fn own_status(&self) -> Option<u16> {
        Some(self.own_status.load(Relaxed)).filter(|s| *s != 0)
    }

    /// A request head was parsed: stops keeping what is read. True when the raw head announced a length and an encoding,
    /// of which hyper silently drops the length; such a request may be an attempt at smuggling (RFC 9112, 6.3).
    pub fn head_parsed(&self, has_transfer_encoding: bool) -> bool {
        self.keep_head.store(false, Relaxed);
        let head = std::mem::take(&mut *self.head.lock().unwrap_or_else(PoisonError::into_inner));
        has_transfer_encoding && has_content_length(&head)
    }

    /// The answer's head is ready: the next bytes read belong to the next request.
    pub fn answered(&self) {
        self.keep_head.store(true, Relaxed);
    }

    /// Writes `bytes` if the socket takes them at once; for last words.
    pub fn last_words(&self, bytes: &[u8]) {
        // The connection ends whether or not the peer still hears.
        let _ = self.stream.try_write(bytes);
    }

    /// Closes our side and discards what the peer still sends, for at most `patience`: a close with unread bytes would
    /// reset the connection, and the peer could lose the answer that was just sent.
    pub async fn linger(&self, patience: Duration) {
        if self.shutdown().is_err() {
            return;
        }
        let drain = async {
            let mut sink = vec![0u8; 64 << 10];
            loop {
                match self.stream.try_read(&mut sink) {
                    Ok(0) => return,
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        if self.stream.readable().await.is_err() {
                            return;
                        }
                    }
                    Err(_) => return,
                }
            }
        };
        let _ = tokio::time::timeout(patience, drain).await;
    }

    fn shutdown(&self) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        nix::sys::socket::shutdown(self.stream.as_raw_fd(), nix::sys::socket::Shutdown::Write).map_err(io::Error::from)
    }
}

/// Looks for a `content-length` line in the first head of `raw`.
fn has_content_length(raw: &[u8]) -> bool {
    let end = raw.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or(raw.len());
    raw[..end].split(|b| *b == b'\n').any(|line| {
        line.split(|b| *b == b':').next().is_some_and(|name| name.trim_ascii().eq_ignore_ascii_case(b"content-length"))
    })
}

/// hyper's end of a [`Conn`].
#[derive(Debug)]
pub struct ConnIo {
    conn: Arc<Conn>,
    stall_timeout: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl ConnIo {
    /// An end whose writes fail once the peer took nothing for `stall_timeout`.
    pub fn new(conn: Arc<Conn>, stall_timeout: Duration) -> Self {
        Self { conn, stall_timeout, stalled: None }
    }

    /// Withholds an answer of hyper's own. Ours carry a request id, and no body of ours begins like a status line.
    fn withhold(&self, buf: &[u8]) -> bool {
        if !buf.starts_with(b"HTTP/1.") || buf.get(9) != Some(&b'4') {
            return false;
        }
        let end = buf.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or(buf.len());
        if buf[..end].windows(14).any(|w| w.eq_ignore_ascii_case(b"\r\nx-request-id")) {
            return false;
        }
        let status = buf.get(9..12).and_then(|s| std::str::from_utf8(s).ok()).and_then(|s| s.parse().ok());
        self.conn.own_status.store(status.unwrap_or(400), Relaxed);
        true
    }

    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.conn.stream.poll_write_ready(cx)? {
                Poll::Ready(()) => match write(&self.conn.stream) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    result => {
                        self.stalled = None;
                        return Poll::Ready(result);
                    }
                },
                Poll::Pending => {
                    let patience = self.stall_timeout;
                    let stalled = self
                        .stalled
                        .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + patience)));
                    ready!(stalled.as_mut().poll(cx));
                    return Poll::Ready(Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("the client took no byte for {} s", patience.as_secs_f64()),
                    )));
                }
            }
        }
    }
}

impl AsyncRead for ConnIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let conn = &self.conn;
        loop {
            ready!(conn.stream.poll_read_ready(cx))?;
            match conn.stream.try_read(buf.initialize_unfilled()) {
                Ok(n) => {
                    if conn.keep_head.load(Relaxed) {
                        let mut head = conn.head.lock().unwrap_or_else(PoisonError::into_inner);
                        let room = KEPT.saturating_sub(head.len()).min(n);
                        head.extend_from_slice(&buf.initialize_unfilled()[..room]);
                    }
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl AsyncWrite for ConnIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.withhold(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        self.poll_write_with(cx, |s| s.try_write(buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(first) = bufs.iter().find(|b| !b.is_empty())
            && self.withhold(first)
        {
            return Poll::Ready(Ok(bufs.iter().map(|b| b.len()).sum()));
        }
        self.poll_write_with(cx, |s| s.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The peer may have gone first; then there is nothing left to close. `Conn::linger` closes for good.
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_found_in_the_head_only() {
        assert!(has_content_length(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"));
        assert!(has_content_length(b"POST / HTTP/1.1\r\nA: b\r\ncontent-length:3\r\n"));
        assert!(!has_content_length(b"POST / HTTP/1.1\r\nX-Content-Length: 3\r\n\r\ncontent-length: 3\r\n"));
    }
}
