//! The ledger as clients of the control service see it.

use std::collections::BTreeSet;

use ds4_proto::v1;
use tokio::sync::broadcast;

use super::{Epoch, Ledger, State};

impl Ledger {
    /// All epochs.
    pub fn models(&self) -> Vec<v1::Model> {
        self.lock().epochs.iter().map(|(id, e)| row(*id, e)).collect()
    }

    /// Whose memory the READY epochs are in; `None` when there are none.
    pub fn backends(&self) -> Option<String> {
        let state = self.lock();
        let ready = state.epochs.values().filter(|e| e.state == v1::ModelState::Ready);
        let names: BTreeSet<&str> = ready.map(|e| e.backend.as_str()).collect();
        (!names.is_empty()).then(|| names.into_iter().collect::<Vec<_>>().join(", "))
    }

    /// All leases.
    pub fn leases(&self) -> Vec<v1::Lease> {
        let state = self.lock();
        let all = state.epochs.iter().flat_map(|(id, e)| e.leases.iter().map(move |(lease, l)| (id, e, lease, l)));
        all.map(|(id, e, lease, l)| v1::Lease {
            id: *lease,
            pid: u32::try_from(l.peer.pid).unwrap_or(0),
            uid: l.peer.uid,
            model: e.name.clone(),
            epoch: *id,
            age_s: l.since.elapsed().as_secs(),
            client: l.client.clone(),
        })
        .collect()
    }

    /// The present state of every epoch, and changes from then on, without a gap.
    pub fn watch(&self) -> (Vec<v1::WatchEvent>, broadcast::Receiver<v1::WatchEvent>) {
        let state = self.lock();
        let sequence = state.sequence;
        let now = state.epochs.iter().map(|(id, e)| v1::WatchEvent { model: Some(row(*id, e)), sequence }).collect();
        (now, self.events.subscribe())
    }
}

/// An epoch as a row of the listing.
pub(super) fn row(id: u64, e: &Epoch) -> v1::Model {
    let held = e.held.as_deref();
    v1::Model {
        name: e.name.clone(),
        family: e.family.clone(),
        artifact: e.artifact.clone(),
        synthetic: e.synthetic,
        blake3: held.map(|h| h.blake3.clone()).unwrap_or_default(),
        epoch: id,
        state: e.state.into(),
        error_code: e.failure.as_ref().map(|f| f.code.clone()).unwrap_or_default(),
        error: e.failure.as_ref().map(|f| f.message.clone()).unwrap_or_default(),
        bytes: e.total_bytes,
        chunks: held.map_or(0, |h| u32::try_from(h.chunks.len()).unwrap_or(u32::MAX)),
        leases: u32::try_from(e.leases.len()).unwrap_or(u32::MAX),
        known_hash: held.is_some_and(|h| h.known),
        done_bytes: e.done_bytes,
        path: e.path.display().to_string(),
        loaded_s: e.loaded.as_secs_f64(),
    }
}

/// Names of the READY models, for refusals.
pub(super) fn held_names(state: &State) -> String {
    let mut names: Vec<&str> =
        state.epochs.values().filter(|e| e.state == v1::ModelState::Ready).map(|e| e.name.as_str()).collect();
    names.dedup();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
