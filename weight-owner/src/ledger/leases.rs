//! Leases: who may use the memory of an epoch, and until when.

use std::sync::Arc;
use std::time::Instant;

use ds4_manifests::Catalog;
use ds4_os::seqpacket::PeerCredentials;
use ds4_proto::broker::{Message, codes};
use ds4_proto::v1;
use tokio::sync::watch;

use super::view::held_names;
use super::{DrainNotice, Epoch, Held, Ledger, State};

/// Leases at one time over all models.
pub const MAX_LEASES: usize = 1024;

/// A lease as the ledger keeps it.
pub(super) struct LeaseEntry {
    pub peer: PeerCredentials,
    pub client: String,
    pub since: Instant,
}

/// A granted lease; dropping it ends the lease.
pub struct Lease {
    ledger: Arc<Ledger>,
    /// Its number.
    pub id: u64,
    /// The epoch that it is on.
    pub epoch: u64,
    /// Name of the model.
    pub model: String,
    /// Says when the holder should go.
    pub drain: watch::Receiver<DrainNotice>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ledger.end_lease(self.epoch, self.id);
    }
}

impl Ledger {
    /// Grants a lease on the READY epoch of `model` (empty: the only one), or says why not.
    ///
    /// # Errors
    /// The [`Message::Refused`] for the client.
    pub fn lease(
        self: &Arc<Self>,
        model: &str,
        expected: Option<&[u8; 32]>,
        peer: PeerCredentials,
        client: &str,
    ) -> Result<(Lease, Arc<Held>), Message> {
        let mut state = self.lock();
        if state.stopping {
            return Err(Message::refused(
                codes::OWNER_STOPPING,
                "the weight owner is stopping; retry when it is back",
                1000,
            ));
        }
        if state.epochs.values().map(|e| e.leases.len()).sum::<usize>() >= MAX_LEASES {
            let text = format!("the weight owner serves {MAX_LEASES} leases already; stop a worker");
            return Err(Message::refused(codes::TOO_MANY_LEASES, text, 1000));
        }
        let id = find_ready(&state, model)?;
        state.last_lease += 1;
        let lease_id = state.last_lease;
        let held = state.epochs.get(&id).and_then(|e| e.held.clone());
        let (Some(entry), Some(held)) = (state.epochs.get_mut(&id), held) else {
            return Err(Message::refused(codes::NO_MODEL, "the model has just gone; retry", 1000));
        };
        if let Some(expected) = expected.map(|e| blake3::Hash::from(*e).to_hex())
            && held.blake3 != *expected
        {
            let text = format!(
                "model {:?} (epoch {id}) has content {}, but this client expects {expected}; load the right file, or drop the \
                 expectation",
                entry.name, held.blake3
            );
            return Err(Message::refused(codes::CONTENT_MISMATCH, text, 0));
        }
        entry.leases.insert(lease_id, LeaseEntry { peer, client: client.to_owned(), since: Instant::now() });
        let lease = Lease {
            ledger: Arc::clone(self),
            id: lease_id,
            epoch: id,
            model: entry.name.clone(),
            drain: entry.drain.subscribe(),
        };
        self.announce(&mut state, id);
        Ok((lease, held))
    }

    pub(super) fn end_lease(&self, epoch: u64, lease: u64) {
        let mut state = self.lock();
        if state.epochs.get_mut(&epoch).is_some_and(|e| e.leases.remove(&lease).is_some()) {
            self.announce(&mut state, epoch);
            self.release_if_done(&mut state, epoch);
        }
    }
}

/// The newest READY epoch of `model`, or of the only model when it is empty. Companions of models, such as prediction blocks,
/// are only found by their names.
fn find_ready(state: &State, model: &str) -> Result<u64, Message> {
    let ready = |e: &Epoch| e.state == v1::ModelState::Ready;
    let alone = |e: &Epoch| Catalog::builtin().drafter(&e.family).is_none();
    let mut names: Vec<&str> =
        state.epochs.values().filter(|e| ready(e) && alone(e)).map(|e| e.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    if model.is_empty() && names.len() > 1 {
        let text = format!("the owner holds several models ({}); name one", names.join(", "));
        return Err(Message::refused(codes::AMBIGUOUS_MODEL, text, 0));
    }
    let named = |e: &Epoch| if model.is_empty() { alone(e) } else { e.name == model };
    if let Some((id, _)) = state.epochs.iter().rev().find(|(_, e)| named(e) && ready(e)) {
        return Ok(*id);
    }
    let other = |s: v1::ModelState| state.epochs.values().rev().find(|e| named(e) && e.state == s);
    if let Some(e) = other(v1::ModelState::Loading) {
        let percent = (u128::from(e.done_bytes) * 100).checked_div(u128::from(e.total_bytes)).unwrap_or(0);
        let text = format!("model {:?} is being loaded ({percent} %); retry", e.name);
        return Err(Message::refused(codes::MODEL_LOADING, text, 100));
    }
    if let Some(e) = other(v1::ModelState::Draining) {
        let text = format!("model {:?} is being unloaded; retry when it is loaded again", e.name);
        return Err(Message::refused(codes::MODEL_DRAINING, text, 1000));
    }
    // A worker that takes whatever is held is not to give up for good over a load that failed beside its model: it waits for
    // the next one.
    let blamed = |_: &&Epoch| !model.is_empty() || !state.published;
    if let Some(e) = other(v1::ModelState::Failed).filter(blamed) {
        let cause = e.failure.as_ref().map(ToString::to_string).unwrap_or_default();
        let text = format!("the load of model {:?} failed: {cause}", e.name);
        return Err(Message::refused(codes::MODEL_FAILED, text, 0));
    }
    let block = state.epochs.values().find(|e| ready(e) && !alone(e)).filter(|_| model.is_empty());
    if let Some(block) = block {
        let text = format!(
            "the owner holds {:?} only, which is a prediction block and not a model: load the model that it guesses for with \
             `ds4 ctl load PATH`, and name the block with the worker's --mtp",
            block.name
        );
        return Err(Message::refused(codes::NO_MODEL, text, 1000));
    }
    if model.is_empty() {
        let text = "the owner holds no model; load one with `ds4 ctl load PATH` or start the owner with --model PATH";
        return Err(Message::refused(codes::NO_MODEL, text, 1000));
    }
    let text = format!("the owner holds no model {model:?}; it holds {}", held_names(state));
    Err(Message::refused(codes::UNKNOWN_MODEL, text, 0))
}
