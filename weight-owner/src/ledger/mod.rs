//! Which epochs of which models exist, in which state, and who holds leases on them.
//!
//! The ledger does no input or output. An epoch goes `LOADING → READY → DRAINING → released`, or `LOADING → FAILED`; it
//! becomes visible to clients of the broker at READY, all at once. The memory of an epoch is the descriptors in its
//! [`Held`]: it goes when the ledger drops them, which is when the epoch is draining and its last lease has ended.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ds4_os::seqpacket::PeerCredentials;
use ds4_proto::v1;
use tokio::sync::{broadcast, watch};

use crate::Failure;
use crate::report::Plan;

mod leases;
mod view;

use leases::LeaseEntry;
pub use leases::{Lease, MAX_LEASES};
use view::{held_names, row};

/// Failed loads that are remembered for people to look at.
const KEEP_FAILED: usize = 16;
/// Descriptors of one epoch.
#[derive(Debug)]
pub struct Held {
    /// The encoded manifest, sealed.
    pub manifest: OwnedFd,
    /// Its length in bytes.
    pub manifest_len: u64,
    /// The chunks, sealed, in the manifest's order.
    pub chunks: Vec<OwnedFd>,
    /// Bytes of all chunks.
    pub bytes: u64,
    /// Content hash in hexadecimal.
    pub blake3: String,
    /// The catalog knows the hash.
    pub known: bool,
}

/// What the holder of a lease must be told: seconds until SIGTERM (0: none comes) and why.
pub type DrainNotice = Option<(u32, String)>;

struct Epoch {
    name: String,
    family: String,
    artifact: String,
    synthetic: bool,
    path: PathBuf,
    /// Whose memory; empty until it is planned.
    backend: String,
    state: v1::ModelState,
    failure: Option<Failure>,
    held: Option<Arc<Held>>,
    total_bytes: u64,
    done_bytes: u64,
    loaded: Duration,
    leases: BTreeMap<u64, LeaseEntry>,
    drain: watch::Sender<DrainNotice>,
}

#[derive(Default)]
struct State {
    epochs: BTreeMap<u64, Epoch>,
    last_epoch: u64,
    last_lease: u64,
    sequence: u64,
    /// Something was READY once.
    published: bool,
    stopping: bool,
}

/// The ledger, shared by the broker, the control service and the loads.
pub struct Ledger {
    state: Mutex<State>,
    events: broadcast::Sender<v1::WatchEvent>,
    /// Counts changes, so that waiting for a condition needs no polling.
    changes: watch::Sender<u64>,
}

/// A READY epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Its number.
    pub epoch: u64,
    /// Name of the model.
    pub model: String,
    /// Where it was loaded from.
    pub path: PathBuf,
    /// Content hash in hexadecimal.
    pub blake3: String,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { state: Mutex::default(), events: broadcast::channel(256).0, changes: watch::channel(0).0 }
    }
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under the lock leaves the state half-changed, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells watchers about epoch `id` as it is now.
    fn announce(&self, state: &mut State, id: u64) {
        state.sequence += 1;
        if let Some(epoch) = state.epochs.get(&id) {
            let event = v1::WatchEvent { model: Some(row(id, epoch)), sequence: state.sequence };
            // No watchers is fine.
            let _ = self.events.send(event);
        }
        self.changes.send_modify(|n| *n = n.wrapping_add(1));
    }

    /// A number for a load that begins. Numbers grow and are never used twice.
    pub fn next_epoch(&self) -> u64 {
        let mut state = self.lock();
        state.last_epoch += 1;
        state.last_epoch
    }

    /// Enters a load. Failures of earlier loads from the same path are forgotten.
    pub fn begin(&self, epoch: u64, name: &str, path: &Path) {
        let mut state = self.lock();
        state.epochs.retain(|_, e| e.failure.is_none() || e.path != path);
        let entry = Epoch {
            name: name.to_owned(),
            family: String::new(),
            artifact: String::new(),
            synthetic: false,
            path: path.to_owned(),
            backend: String::new(),
            state: v1::ModelState::Loading,
            failure: None,
            held: None,
            total_bytes: 0,
            done_bytes: 0,
            loaded: Duration::ZERO,
            leases: BTreeMap::new(),
            drain: watch::channel(None).0,
        };
        state.epochs.insert(epoch, entry);
        self.announce(&mut state, epoch);
    }

    /// What the loader found out.
    pub fn planned(&self, epoch: u64, plan: &Plan) {
        let mut state = self.lock();
        if let Some(entry) = state.epochs.get_mut(&epoch) {
            entry.name.clone_from(&plan.model);
            entry.family.clone_from(&plan.family);
            entry.artifact.clone_from(&plan.artifact);
            entry.synthetic = plan.synthetic;
            entry.backend.clone_from(&plan.backend);
            entry.total_bytes = plan.weight_bytes;
            self.announce(&mut state, epoch);
        }
    }

    /// How far the loader is. Not announced to watchers: the Load stream is for that.
    pub fn progress(&self, epoch: u64, done_bytes: u64) {
        if let Some(entry) = self.lock().epochs.get_mut(&epoch) {
            entry.done_bytes = done_bytes;
        }
    }

    /// Removes a load that turned out to be unnecessary.
    pub fn forget(&self, epoch: u64) {
        let mut state = self.lock();
        state.epochs.remove(&epoch);
        self.announce(&mut state, epoch);
    }

    /// Ends a load without success.
    pub fn fail(&self, epoch: u64, failure: &Failure) {
        let mut state = self.lock();
        let Some(entry) = state.epochs.get_mut(&epoch) else { return };
        entry.state = v1::ModelState::Failed;
        entry.failure = Some(failure.clone());
        self.announce(&mut state, epoch);
        let failed: Vec<u64> = state.epochs.iter().filter(|(_, e)| e.failure.is_some()).map(|(id, _)| *id).collect();
        for id in failed.iter().take(failed.len().saturating_sub(KEEP_FAILED)) {
            state.epochs.remove(id);
        }
    }

    /// Publishes a load: READY, visible to clients. Other READY epochs of the same name start draining, without deadline.
    pub fn publish(&self, epoch: u64, held: Held, loaded: Duration) {
        let mut state = self.lock();
        let Some(entry) = state.epochs.get_mut(&epoch) else { return };
        entry.done_bytes = held.bytes;
        entry.total_bytes = held.bytes;
        entry.held = Some(Arc::new(held));
        entry.loaded = loaded;
        entry.state = v1::ModelState::Ready;
        let name = entry.name.clone();
        state.published = true;
        self.announce(&mut state, epoch);
        let old: Vec<u64> = state
            .epochs
            .iter()
            .filter(|(id, e)| **id != epoch && e.name == name && e.state == v1::ModelState::Ready)
            .map(|(id, _)| *id)
            .collect();
        for id in old {
            self.drain_locked(&mut state, id, 0, &format!("epoch {epoch} of {name} has replaced it"));
        }
    }

    /// READY epochs.
    pub fn ready(&self) -> Vec<Ready> {
        let state = self.lock();
        let ready = state.epochs.iter().filter(|(_, e)| e.state == v1::ModelState::Ready);
        ready
            .filter_map(|(id, e)| {
                let blake3 = e.held.as_ref()?.blake3.clone();
                Some(Ready { epoch: *id, model: e.name.clone(), path: e.path.clone(), blake3 })
            })
            .collect()
    }

    /// Starts draining the READY epochs of `model` (only `epoch` when it is not 0) and forgets its FAILED ones; returns all of
    /// them, and the leases on the former.
    ///
    /// # Errors
    /// A sentence when there is no such epoch.
    pub fn drain(&self, model: &str, epoch: u64, deadline_s: u32, why: &str) -> Result<(Vec<u64>, usize), String> {
        let mut state = self.lock();
        let matching: Vec<(u64, v1::ModelState)> = state
            .epochs
            .iter()
            .filter(|(id, e)| e.name == model && (epoch == 0 || **id == epoch))
            .map(|(id, e)| (*id, e.state))
            .collect();
        let failed = matching.iter().filter(|(_, s)| *s == v1::ModelState::Failed).map(|(id, _)| *id);
        let failed: Vec<u64> = failed.collect();
        let mut wanted: Vec<u64> = matching
            .iter()
            .filter(|(_, s)| matches!(s, v1::ModelState::Ready | v1::ModelState::Draining))
            .map(|(id, _)| *id)
            .collect();
        if wanted.is_empty() && failed.is_empty() {
            let which = if epoch == 0 { String::new() } else { format!("epoch {epoch} of ") };
            return Err(match matching.first() {
                Some((_, s)) => format!("{which}{model:?} is {}, not READY", s.as_str_name()),
                None => format!("no model {which}{model:?} is held; held are {}", held_names(&state)),
            });
        }
        let leases = wanted.iter().filter_map(|id| state.epochs.get(id)).map(|e| e.leases.len()).sum();
        for id in &wanted {
            self.drain_locked(&mut state, *id, deadline_s, why);
        }
        for id in failed {
            self.remove(&mut state, id);
            wanted.push(id);
        }
        Ok((wanted, leases))
    }

    /// Refuses new leases and loads from now on and drains every epoch.
    pub fn stop(&self, deadline_s: u32) {
        let mut state = self.lock();
        state.stopping = true;
        let ids: Vec<u64> = state.epochs.iter().filter(|(_, e)| e.held.is_some()).map(|(id, _)| *id).collect();
        for id in ids {
            self.drain_locked(&mut state, id, deadline_s, "the weight owner is stopping");
        }
        self.changes.send_modify(|n| *n = n.wrapping_add(1));
    }

    /// True once [`Self::stop`] was called.
    pub fn stopping(&self) -> bool {
        self.lock().stopping
    }

    fn drain_locked(&self, state: &mut State, id: u64, deadline_s: u32, why: &str) {
        if let Some(entry) = state.epochs.get_mut(&id) {
            entry.state = v1::ModelState::Draining;
            entry.drain.send_replace(Some((deadline_s, why.to_owned())));
        }
        self.announce(state, id);
        self.release_if_done(state, id);
    }

    /// Drops a draining epoch without leases, and with it the memory.
    fn release_if_done(&self, state: &mut State, id: u64) {
        let done = |e: &Epoch| e.state == v1::ModelState::Draining && e.leases.is_empty();
        if state.epochs.get(&id).is_some_and(done) {
            self.remove(state, id);
        }
    }

    /// Drops an epoch and tells watchers that it is gone.
    fn remove(&self, state: &mut State, id: u64) {
        if let Some(entry) = state.epochs.remove(&id) {
            state.sequence += 1;
            let model = v1::Model { state: v1::ModelState::Released.into(), ..row(id, &entry) };
            let _ = self.events.send(v1::WatchEvent { model: Some(model), sequence: state.sequence });
            self.changes.send_modify(|n| *n = n.wrapping_add(1));
        }
    }

    /// Processes that hold leases on `epochs`.
    pub fn holders(&self, epochs: &[u64]) -> Vec<PeerCredentials> {
        let state = self.lock();
        epochs.iter().filter_map(|id| state.epochs.get(id)).flat_map(|e| e.leases.values().map(|l| l.peer)).collect()
    }

    /// Epochs that hold memory.
    pub fn holding(&self) -> Vec<u64> {
        self.lock().epochs.iter().filter(|(_, e)| e.held.is_some()).map(|(id, _)| *id).collect()
    }

    /// Drops what is left, whoever still maps it.
    pub fn clear(&self) {
        self.lock().epochs.clear();
    }

    /// Waits until none of `epochs` holds memory any more.
    pub async fn released(&self, epochs: &[u64]) {
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            let gone = {
                let state = self.lock();
                epochs.iter().all(|id| state.epochs.get(id).is_none_or(|e| e.held.is_none()))
            };
            if gone || changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Bytes of weights held.
    pub fn weight_bytes(&self) -> u64 {
        self.lock().epochs.values().filter_map(|e| e.held.as_ref()).map(|h| h.bytes).sum()
    }
}

#[cfg(test)]
mod tests;
