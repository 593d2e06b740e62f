//! Which epochs of which models exist, in which state, and who holds leases on them.
//!
//! The ledger does no input or output. An epoch goes `LOADING → READY → DRAINING → released`, or `LOADING → FAILED`; it
//! becomes visible to clients of the broker at READY, all at once. The memory of an epoch is the descriptors in its
//! [`Held`]: it goes when the ledger drops them, which is when the epoch is draining and its last lease has ended.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ds4_os::seqpacket::PeerCredentials;
use ds4_proto::broker::{Message, codes};
use ds4_proto::v1;
use tokio::sync::{broadcast, watch};

use crate::Failure;
use crate::report::Plan;

/// Failed loads that are remembered for people to look at.
const KEEP_FAILED: usize = 16;
/// Leases at one time over all models.
pub const MAX_LEASES: usize = 1024;

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
    path: PathBuf,
    state: v1::ModelState,
    failure: Option<Failure>,
    held: Option<Arc<Held>>,
    total_bytes: u64,
    done_bytes: u64,
    loaded: Duration,
    leases: BTreeMap<u64, LeaseEntry>,
    drain: watch::Sender<DrainNotice>,
}

struct LeaseEntry {
    peer: PeerCredentials,
    client: String,
    since: Instant,
}

#[derive(Default)]
struct State {
    epochs: BTreeMap<u64, Epoch>,
    last_epoch: u64,
    last_lease: u64,
    sequence: u64,
    stopping: bool,
}

/// The ledger, shared by the broker, the control service and the loads.
pub struct Ledger {
    state: Mutex<State>,
    events: broadcast::Sender<v1::WatchEvent>,
    /// Counts changes, so that waiting for a condition needs no polling.
    changes: watch::Sender<u64>,
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
            path: path.to_owned(),
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

    /// Starts draining the READY epochs of `model` (only `epoch` when it is not 0); returns them and their leases.
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
        let wanted: Vec<u64> = matching
            .iter()
            .filter(|(_, s)| matches!(s, v1::ModelState::Ready | v1::ModelState::Draining))
            .map(|(id, _)| *id)
            .collect();
        if wanted.is_empty() {
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
        if state.epochs.get(&id).is_some_and(done)
            && let Some(entry) = state.epochs.remove(&id)
        {
            state.sequence += 1;
            let model = v1::Model { state: v1::ModelState::Released.into(), ..row(id, &entry) };
            let _ = self.events.send(v1::WatchEvent { model: Some(model), sequence: state.sequence });
            self.changes.send_modify(|n| *n = n.wrapping_add(1));
        }
    }

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

    fn end_lease(&self, epoch: u64, lease: u64) {
        let mut state = self.lock();
        if state.epochs.get_mut(&epoch).is_some_and(|e| e.leases.remove(&lease).is_some()) {
            self.announce(&mut state, epoch);
            self.release_if_done(&mut state, epoch);
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

    /// All epochs.
    pub fn models(&self) -> Vec<v1::Model> {
        self.lock().epochs.iter().map(|(id, e)| row(*id, e)).collect()
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

    /// Bytes of weights held.
    pub fn weight_bytes(&self) -> u64 {
        self.lock().epochs.values().filter_map(|e| e.held.as_ref()).map(|h| h.bytes).sum()
    }

    /// The present state of every epoch, and changes from then on, without a gap.
    pub fn watch(&self) -> (Vec<v1::WatchEvent>, broadcast::Receiver<v1::WatchEvent>) {
        let state = self.lock();
        let sequence = state.sequence;
        let now = state.epochs.iter().map(|(id, e)| v1::WatchEvent { model: Some(row(*id, e)), sequence }).collect();
        (now, self.events.subscribe())
    }
}

fn row(id: u64, e: &Epoch) -> v1::Model {
    let held = e.held.as_deref();
    v1::Model {
        name: e.name.clone(),
        family: e.family.clone(),
        artifact: e.artifact.clone(),
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

fn held_names(state: &State) -> String {
    let mut names: Vec<&str> =
        state.epochs.values().filter(|e| e.state == v1::ModelState::Ready).map(|e| e.name.as_str()).collect();
    names.dedup();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// The newest READY epoch of `model`, or of the only model when it is empty.
fn find_ready(state: &State, model: &str) -> Result<u64, Message> {
    let ready = |e: &Epoch| e.state == v1::ModelState::Ready;
    let mut names: Vec<&str> = state.epochs.values().filter(|e| ready(e)).map(|e| e.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    if model.is_empty() && names.len() > 1 {
        let text = format!("the owner holds several models ({}); name one", names.join(", "));
        return Err(Message::refused(codes::AMBIGUOUS_MODEL, text, 0));
    }
    let named = |e: &Epoch| model.is_empty() || e.name == model;
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
    if let Some(e) = other(v1::ModelState::Failed) {
        let cause = e.failure.as_ref().map(ToString::to_string).unwrap_or_default();
        let text = format!("the load of model {:?} failed: {cause}", e.name);
        return Err(Message::refused(codes::MODEL_FAILED, text, 0));
    }
    if model.is_empty() {
        let text = "the owner holds no model; load one with `ds4 ctl load PATH` or start the owner with --model PATH";
        return Err(Message::refused(codes::NO_MODEL, text, 1000));
    }
    let text = format!("the owner holds no model {model:?}; it holds {}", held_names(state));
    Err(Message::refused(codes::UNKNOWN_MODEL, text, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerCredentials = PeerCredentials { pid: 4242, uid: 1, gid: 1 };

    fn held(seed: u8) -> Held {
        Held {
            manifest: ds4_os::memfd::sealed("test", b"manifest").unwrap(),
            manifest_len: 8,
            chunks: vec![ds4_os::memfd::sealed("test", &[seed; 16]).unwrap()],
            bytes: 16,
            blake3: blake3::Hash::from([seed; 32]).to_hex().to_string(),
            known: false,
        }
    }

    fn load(ledger: &Ledger, name: &str, seed: u8) -> u64 {
        let epoch = ledger.next_epoch();
        ledger.begin(epoch, name, Path::new("/models/x.gguf"));
        ledger.publish(epoch, held(seed), Duration::from_secs(1));
        epoch
    }

    fn code(result: Result<(Lease, Arc<Held>), Message>) -> String {
        match result.map(drop) {
            Err(Message::Refused { code, sentence, .. }) => {
                assert!(sentence.len() > 20, "{sentence}");
                code
            }
            other => panic!("no refusal: {other:?}"),
        }
    }

    #[test]
    fn nothing_is_visible_before_ready() {
        let ledger = Arc::new(Ledger::default());
        assert_eq!(code(ledger.lease("", None, PEER, "w")), "no_model");
        let epoch = ledger.next_epoch();
        ledger.begin(epoch, "m", Path::new("/m"));
        assert_eq!(code(ledger.lease("", None, PEER, "w")), "model_loading");
        assert_eq!(code(ledger.lease("m", None, PEER, "w")), "model_loading");
        assert_eq!(code(ledger.lease("n", None, PEER, "w")), "unknown_model");
        ledger.publish(epoch, held(1), Duration::ZERO);
        let (lease, descriptors) = ledger.lease("", None, PEER, "w").unwrap();
        assert_eq!((lease.epoch, lease.model.as_str(), descriptors.chunks.len()), (epoch, "m", 1));
    }

    #[test]
    fn l4_a_failed_load_is_not_served_and_says_why() {
        let ledger = Arc::new(Ledger::default());
        let epoch = ledger.next_epoch();
        ledger.begin(epoch, "m", Path::new("/m"));
        ledger.fail(epoch, &Failure::model("truncated_file", "it ends early"));
        match ledger.lease("m", None, PEER, "w").map(drop) {
            Err(Message::Refused { code, sentence, .. }) => {
                assert_eq!(code, "model_failed");
                assert!(sentence.contains("it ends early") && sentence.contains("truncated_file"), "{sentence}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(ledger.models()[0].error_code, "truncated_file");
        // A new attempt from the same path replaces the old failure.
        load(&ledger, "m", 1);
        ledger.begin(9, "m", Path::new("/m"));
        assert!(ledger.models().iter().all(|m| m.error_code.is_empty()));
    }

    #[test]
    fn failures_are_remembered_up_to_a_bound() {
        let ledger = Ledger::default();
        for i in 0..100 {
            let epoch = ledger.next_epoch();
            ledger.begin(epoch, "m", Path::new(&format!("/{i}")));
            ledger.fail(epoch, &Failure::model("x", "y"));
        }
        assert_eq!(ledger.models().len(), KEEP_FAILED);
        assert_eq!(ledger.models().last().unwrap().path, "/99");
    }

    #[test]
    fn l2_other_content_than_expected_is_refused_with_both_hashes() {
        let ledger = Arc::new(Ledger::default());
        load(&ledger, "m", 7);
        assert!(ledger.lease("m", Some(&[7; 32]), PEER, "w").is_ok());
        match ledger.lease("m", Some(&[8; 32]), PEER, "w").map(drop) {
            Err(Message::Refused { code, sentence, .. }) => {
                assert_eq!(code, "content_mismatch");
                assert!(sentence.contains(&"07".repeat(32)) && sentence.contains(&"08".repeat(32)), "{sentence}");
            }
            other => panic!("{other:?}"),
        }
        assert!(ledger.leases().is_empty());
    }

    #[test]
    fn a_new_epoch_drains_the_old_one_whose_memory_goes_with_its_last_lease() {
        let ledger = Arc::new(Ledger::default());
        let first = load(&ledger, "m", 1);
        let (one, held_by_broker) = ledger.lease("m", None, PEER, "w1").unwrap();
        let (two, _) = ledger.lease("m", None, PEER, "w2").unwrap();
        let old = Arc::downgrade(&held_by_broker);
        drop(held_by_broker);
        let second = load(&ledger, "m", 2);
        assert_eq!(one.drain.borrow().as_ref().unwrap().0, 0);
        assert_eq!(ledger.lease("", None, PEER, "w3").unwrap().0.epoch, second);
        drop(one);
        assert!(old.upgrade().is_some());
        assert_eq!(ledger.holding(), [first, second]);
        drop(two);
        assert!(old.upgrade().is_none());
        assert_eq!(ledger.holding(), [second]);
    }

    #[test]
    fn an_epoch_without_leases_is_released_at_once() {
        let ledger = Arc::new(Ledger::default());
        load(&ledger, "m", 1);
        load(&ledger, "other", 2);
        assert_eq!(code(ledger.lease("", None, PEER, "w")), "ambiguous_model");
        assert_eq!(ledger.drain("m", 0, 5, "test").unwrap().1, 0);
        assert_eq!(ledger.models().len(), 1);
        assert_eq!(code(ledger.lease("m", None, PEER, "w")), "unknown_model");
        assert!(ledger.drain("m", 0, 5, "test").unwrap_err().contains("held are other"));
        assert!(ledger.drain("other", 77, 5, "test").unwrap_err().contains("epoch 77"));
    }

    #[tokio::test]
    async fn l6_release_is_awaited_until_the_last_reader_is_gone() {
        let ledger = Arc::new(Ledger::default());
        let epoch = load(&ledger, "m", 1);
        let (lease, _) = ledger.lease("m", None, PEER, "w").unwrap();
        let (epochs, leases) = ledger.drain("m", 0, 3, "test").unwrap();
        assert_eq!((epochs.as_slice(), leases), (&[epoch][..], 1));
        assert_eq!(lease.drain.borrow().as_ref().unwrap().0, 3);
        assert_eq!(code(ledger.lease("m", None, PEER, "w")), "model_draining");
        let released = ledger.released(&epochs);
        tokio::pin!(released);
        let early = tokio::time::timeout(Duration::from_millis(50), &mut released).await;
        assert!(early.is_err());
        assert_eq!(ledger.holders(&epochs), [PEER]);
        drop(lease);
        tokio::time::timeout(Duration::from_secs(5), released).await.unwrap();
    }

    #[test]
    fn a_stopping_owner_grants_nothing() {
        let ledger = Arc::new(Ledger::default());
        load(&ledger, "m", 1);
        let (lease, _) = ledger.lease("m", None, PEER, "w").unwrap();
        ledger.stop(9);
        assert_eq!(code(ledger.lease("m", None, PEER, "w")), "owner_stopping");
        assert_eq!(lease.drain.borrow().as_ref().unwrap().0, 9);
        drop(lease);
        assert!(ledger.holding().is_empty());
    }

    #[test]
    fn leases_are_bounded() {
        let ledger = Arc::new(Ledger::default());
        load(&ledger, "m", 1);
        let leases: Vec<_> = (0..MAX_LEASES).map(|_| ledger.lease("m", None, PEER, "w").unwrap()).collect();
        assert_eq!(code(ledger.lease("m", None, PEER, "w")), "too_many_leases");
        drop(leases);
        assert!(ledger.lease("m", None, PEER, "w").is_ok());
    }

    #[test]
    fn watchers_see_every_state_in_order() {
        let ledger = Arc::new(Ledger::default());
        let (now, mut events) = ledger.watch();
        assert!(now.is_empty());
        load(&ledger, "m", 1);
        ledger.drain("m", 0, 1, "test").unwrap();
        let mut seen = Vec::new();
        let mut last = 0;
        while let Ok(event) = events.try_recv() {
            assert!(event.sequence > last);
            last = event.sequence;
            seen.push(event.model.unwrap().state());
        }
        use v1::ModelState::{Draining, Loading, Ready, Released};
        assert_eq!(seen, [Loading, Ready, Draining, Released]);
    }
}
