//! The lease: the connection to the owner, and what the owner says on it later.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ds4_os::seqpacket::Connection;
use ds4_proto::broker::{MAX_FRAME, Message};

/// What happened on a lease's connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The owner wants the lease back: finish and go.
    Drain {
        /// Time until SIGTERM; zero: none comes.
        deadline: Duration,
        /// Why.
        reason: String,
    },
    /// The owner is gone. The weights stay mapped and valid, so a worker goes on serving.
    OwnerGone,
}

/// A claim on a model's memory. It ends when it is dropped, or with the process.
#[derive(Debug)]
pub struct Lease {
    connection: Arc<Connection>,
    /// Identifies it in the owner's logs and listings.
    pub id: u64,
    /// Epoch of the model.
    pub epoch: u64,
}

impl Lease {
    pub(crate) fn new(connection: Connection, id: u64, epoch: u64) -> Self {
        Self { connection: Arc::new(connection), id, epoch }
    }

    /// Hands everything that the owner says from now on to `notice`, on a thread of its own, which ends with the owner
    /// or the lease.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn watch(&self, mut notice: impl FnMut(Notice) + Send + 'static) -> io::Result<()> {
        let connection = Arc::clone(&self.connection);
        // The handshake's timeout must not end the watch.
        connection.set_timeout(None).map_err(io::Error::other)?;
        thread::Builder::new().name("lease".into()).stack_size(128 << 10).spawn(move || {
            loop {
                match connection.recv(MAX_FRAME) {
                    Ok(Some(message)) => {
                        // What this version does not understand is no reason to stop serving.
                        if let Ok(Message::Drain { deadline_s, reason }) = Message::decode(&message.bytes) {
                            notice(Notice::Drain { deadline: Duration::from_secs(deadline_s.into()), reason });
                        }
                    }
                    Err(e) if e.kind() == Some(io::ErrorKind::Interrupted) => {}
                    Ok(None) | Err(_) => {
                        notice(Notice::OwnerGone);
                        return;
                    }
                }
            }
        })?;
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A courtesy: the owner closes, which also ends a watching thread. A dead owner needs no goodbye.
        let _ = self.connection.send(&Message::Goodbye.encode(), &[]);
    }
}
