//! The broker: leases and descriptors for workers. The protocol is described in [`ds4_proto::broker`].

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use ds4_os::seqpacket::{Connection, Listener, MAX_FDS, PeerCredentials, SocketError};
use ds4_proto::broker::{HELLO_TIMEOUT_S, MAX_FRAME, Message, codes};
use tokio::sync::Semaphore;

use crate::ledger::{Held, Lease, Ledger};
use ds4_os::wait::{AsyncConnection, AsyncListener};

/// Connections that have not said Hello yet; more wait in the kernel's backlog.
const MAX_STRANGERS: usize = 64;
/// How long a peer may take to make room for what we send.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Who may attach: root, the owner's own user, and those that it was told.
#[derive(Clone, Debug)]
pub struct Allowed {
    own: u32,
    others: Vec<u32>,
}

impl Allowed {
    /// The owner's own user and `others`.
    pub fn new(others: Vec<u32>) -> Self {
        Self { own: nix::unistd::geteuid().as_raw(), others }
    }

    fn admits(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own || self.others.contains(&uid)
    }
}

/// Serves the broker socket until the task is dropped.
///
/// # Errors
/// The listener cannot be watched.
pub async fn serve(listener: Listener, ledger: Arc<Ledger>, allowed: Allowed) -> Result<(), SocketError> {
    let listener = AsyncListener::new(listener)?;
    let strangers = Arc::new(Semaphore::new(MAX_STRANGERS));
    loop {
        let Ok(permit) = Arc::clone(&strangers).acquire_owned().await else { return Ok(()) };
        let connection = match listener.accept().await {
            Ok(connection) => connection,
            Err(e) => {
                // Usually out of descriptors; some will be closed.
                tracing::warn!("broker cannot accept: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (ledger, allowed) = (Arc::clone(&ledger), allowed.clone());
        tokio::spawn(async move {
            let greeted = greet(connection, &ledger, &allowed).await;
            drop(permit);
            if let Some(attached) = greeted {
                attached.keep().await;
            }
        });
    }
}

/// A lease and its connection.
struct Attached {
    connection: AsyncConnection,
    lease: Lease,
    peer: PeerCredentials,
    client: String,
}

/// From a fresh connection to a lease with all descriptors sent, or to a refusal.
async fn greet(connection: Connection, ledger: &Arc<Ledger>, allowed: &Allowed) -> Option<Attached> {
    let peer = match connection.peer() {
        Ok(peer) => peer,
        Err(e) => {
            tracing::warn!("broker cannot tell who a peer is: {e}");
            return None;
        }
    };
    let connection = match AsyncConnection::new(connection) {
        Ok(connection) => connection,
        Err(e) => {
            tracing::warn!("broker cannot watch a connection: {e}");
            return None;
        }
    };
    let asked = match allowed.admits(peer.uid) {
        true => hello(&connection).await,
        false => {
            // Its Hello is read and dropped: closing a socket with something unread in it resets the peer, which would then
            // see ECONNRESET instead of the refusal (L7).
            let _ = tokio::time::timeout(SEND_TIMEOUT, connection.recv(MAX_FRAME)).await;
            Err(Message::refused(
                codes::PEER_NOT_ALLOWED,
                format!(
                    "user {} may not attach to this weight owner; start it with --allow-uid {}",
                    peer.uid, peer.uid
                ),
                0,
            ))
        }
    };
    let granted = match asked {
        Ok(None) => return None,
        Ok(Some((model, expected, client))) => {
            ledger.lease(&model, expected.as_ref(), peer, &client).map(|(lease, held)| (lease, held, client))
        }
        Err(refusal) => Err(refusal),
    };
    match granted {
        Ok((lease, held, client)) => {
            match tokio::time::timeout(SEND_TIMEOUT, hand_over(&connection, &lease, &held)).await {
                Ok(Ok(())) => {
                    tracing::info!(
                        lease = lease.id,
                        model = lease.model,
                        epoch = lease.epoch,
                        pid = peer.pid,
                        client,
                        "attached"
                    );
                    Some(Attached { connection, lease, peer, client })
                }
                Ok(Err(e)) => {
                    tracing::warn!(pid = peer.pid, client, "attach failed: {e}");
                    None
                }
                Err(_) => {
                    tracing::warn!(pid = peer.pid, client, "attach failed: the peer does not read");
                    None
                }
            }
        }
        Err(refusal) => {
            if let Message::Refused { code, sentence, .. } = &refusal {
                tracing::info!(pid = peer.pid, uid = peer.uid, code, "refused: {sentence}");
            }
            // The peer may be gone; nobody else needs to know.
            let _ = tokio::time::timeout(SEND_TIMEOUT, connection.send(&refusal.encode(), &[])).await;
            None
        }
    }
}

type Hello = (String, Option<[u8; 32]>, String);

/// The client's Hello; `None` when it went away without one.
async fn hello(connection: &AsyncConnection) -> Result<Option<Hello>, Message> {
    let limit = Duration::from_secs(HELLO_TIMEOUT_S);
    let bad = |text: String| Message::refused(codes::BAD_MESSAGE, text, 0);
    let message = match tokio::time::timeout(limit, connection.recv(MAX_FRAME)).await {
        Ok(Ok(Some(message))) => message,
        Ok(Ok(None)) => return Ok(None),
        Ok(Err(SocketError::Io { .. })) => return Ok(None),
        Ok(Err(e)) => return Err(bad(e.to_string())),
        Err(_) => {
            let text = format!("no Hello within {HELLO_TIMEOUT_S} s of connecting");
            return Err(Message::refused(codes::HELLO_TIMEOUT, text, 0));
        }
    };
    match Message::decode(&message.bytes) {
        Ok(Message::Hello { model, expected, client }) => Ok(Some((model, expected, client))),
        Ok(_) => Err(bad("a conversation begins with Hello".into())),
        Err(e @ ds4_proto::broker::DecodeError::Version(_)) => {
            Err(Message::refused(codes::PROTOCOL_VERSION, e.to_string(), 0))
        }
        Err(e) => Err(bad(e.to_string())),
    }
}

/// Welcome, manifest and chunks.
async fn hand_over(connection: &AsyncConnection, lease: &Lease, held: &Held) -> Result<(), SocketError> {
    let welcome = Message::Welcome {
        lease: lease.id,
        epoch: lease.epoch,
        chunks: u32::try_from(held.chunks.len()).unwrap_or(u32::MAX),
        manifest_len: held.manifest_len,
        model: lease.model.clone(),
    };
    connection.send(&welcome.encode(), &[held.manifest.as_fd()]).await?;
    let mut first = 0;
    for group in held.chunks.chunks(MAX_FDS) {
        let fds: Vec<BorrowedFd<'_>> = group.iter().map(AsFd::as_fd).collect();
        let count = u32::try_from(fds.len()).unwrap_or(u32::MAX);
        connection.send(&Message::Chunks { first, count }.encode(), &fds).await?;
        first += count;
    }
    Ok(())
}

impl Attached {
    /// Holds the lease until the peer is gone.
    async fn keep(mut self) {
        let how = loop {
            tokio::select! {
                message = self.connection.recv(MAX_FRAME) => break match message {
                    Ok(None) => "closed",
                    Ok(Some(m)) if Message::decode(&m.bytes) == Ok(Message::Goodbye) => "goodbye",
                    Ok(Some(_)) => "sent something else than Goodbye",
                    Err(e) if e.kind() == Some(std::io::ErrorKind::ConnectionReset) => "closed",
                    Err(_) => "receive error",
                },
                changed = self.lease.drain.changed() => {
                    let notice = self.lease.drain.borrow_and_update().clone();
                    // The epoch cannot go before its leases, so an error means that the owner is ending.
                    let (Ok(()), Some((deadline_s, reason))) = (changed, notice) else { continue };
                    let text = Message::Drain { deadline_s, reason }.encode();
                    // A worker that does not read still gets its SIGTERM at the deadline.
                    let _ = tokio::time::timeout(SEND_TIMEOUT, self.connection.send(&text, &[])).await;
                }
            }
        };
        let (lease, pid, client) = (self.lease.id, self.peer.pid, &self.client);
        tracing::info!(lease, model = self.lease.model, epoch = self.lease.epoch, pid, client, how, "detached");
    }
}
