//! The engine thread: queue, admission, steps, cancellation, drain.
//!
//! It owns all mutable state and takes no lock. A step is one decode row of every request that can take a token (more with
//! guesses ahead, see [`ds4_models::speculation`]), plus at most a chunk of prompt tokens in order of admission: a later prompt
//! starts only when the ones before it are whole (or lack only a last token that is a step of its own), so at most one prompt
//! is ever half computed. Between steps it notices clients that left. With nothing to compute it sleeps on its command channel.

mod planning;
mod step;

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use ds4_kernels::ops::{RowQuery, RowSummary};
use ds4_kernels::{BatchPlan, Device};

use crate::active::{Active, Phase};
use crate::engine::Engine;
use crate::handle::{Command, EngineState, Shared, Submission};
use crate::request::{EngineError, Event};
use crate::sampler::Scratch;
use crate::stats::add;

/// A span of the current plan: whose it is, its first logits row of those that decide tokens, and, when it ends with guesses,
/// the bank before them.
struct Entry<D: Device> {
    active: usize,
    logits: Option<usize>,
    before: Option<D::Checkpoint>,
}

/// The state of the engine thread.
pub(crate) struct Scheduler<D: Device> {
    engine: Engine<D>,
    shared: Arc<Shared>,
    commands: Receiver<Command>,
    queue: VecDeque<Submission>,
    active: Vec<Active>,
    /// End of a drain, once one was asked for.
    drain: Option<Instant>,
    shutdown: bool,
    /// No handle is left that could submit.
    abandoned: bool,
    plan: BatchPlan,
    entries: Vec<Entry<D>>,
    row: Vec<f32>,
    /// What is asked of the step's logits rows, and the answers.
    queries: Vec<RowQuery>,
    summaries: Vec<RowSummary>,
    scratch: Scratch,
    window: (u64, Duration),
}

impl<D: Device> Scheduler<D> {
    /// Takes an engine over.
    pub fn new(engine: Engine<D>, shared: Arc<Shared>, commands: Receiver<Command>) -> Self {
        Self {
            engine,
            shared,
            commands,
            queue: VecDeque::new(),
            active: Vec::new(),
            drain: None,
            shutdown: false,
            abandoned: false,
            plan: BatchPlan::default(),
            entries: Vec::new(),
            row: Vec::new(),
            queries: Vec::new(),
            summaries: Vec::new(),
            scratch: Scratch::default(),
            window: (0, Duration::ZERO),
        }
    }

    /// The thread's body. Whatever happens, every request hears of it and the state becomes final.
    pub fn run_to_end(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run())).unwrap_or_else(|panic| Err(panic_text(&*panic)));
        let (state, error) = match outcome {
            Ok(()) => (EngineState::Stopped, EngineError::Draining),
            Err(why) => {
                tracing::error!(error = %why, "engine failed");
                (EngineState::Failed(why.clone()), EngineError::Internal(why))
            }
        };
        // New submissions are refused before the last ones in the channel are told.
        let shared = Arc::clone(&self.shared);
        shared.state.send_if_modified(|s| {
            let running = *s == EngineState::Running;
            if running {
                *s = EngineState::Draining;
            }
            running
        });
        self.end_all(&error);
        drop(self);
        shared.state.send_replace(state);
    }

    fn run(&mut self) -> Result<(), String> {
        let mut runnable = false;
        loop {
            self.receive(!runnable);
            self.reap_queue();
            self.cancel_gone();
            if self.shutdown || self.drained() {
                return Ok(());
            }
            self.admit();
            self.build_plan();
            self.publish();
            runnable = !self.plan.spans.is_empty();
            if runnable {
                self.step()?;
            }
        }
    }

    /// Takes all waiting commands; with `wait`, sleeps until there is one or a deadline passes.
    fn receive(&mut self, wait: bool) {
        if wait && !self.abandoned {
            let command = match self.next_deadline() {
                None => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => self.commands.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            match command {
                Ok(command) => self.obey(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.abandoned = true,
            }
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.abandoned = true;
                    break;
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.queue.push_back(*submission),
            Command::Wake => {}
            Command::Drain(deadline) => {
                // A second drain may shorten the first, not prolong it.
                self.drain = Some(self.drain.map_or(deadline, |d| d.min(deadline)));
            }
            Command::Shutdown => self.shutdown = true,
        }
    }

    /// When the thread must wake although nobody tells it anything.
    fn next_deadline(&self) -> Option<Instant> {
        let patience = self.engine.config.stall_timeout;
        self.active.iter().filter_map(|a| a.paused).map(|since| since + patience).chain(self.drain).min()
    }

    /// A2: clients that left while queued must not hold places, nor ever reach a bank.
    fn reap_queue(&mut self) {
        let before = self.queue.len();
        self.queue.retain(|s| !s.events.is_closed());
        let reaped = before - self.queue.len();
        if reaped > 0 {
            add(&self.shared.stats.reaped, reaped);
            self.shared.stats.queued.fetch_sub(reaped, Relaxed);
        }
    }

    /// A1: clients that left while running give their bank up, rows kept for reuse. Clients that stopped reading are
    /// ended after `stall_timeout`.
    fn cancel_gone(&mut self) {
        let patience = self.engine.config.stall_timeout;
        let now = Instant::now();
        let stats = &self.shared.stats;
        let (engine, active) = (&mut self.engine, &mut self.active);
        active.retain_mut(|a| {
            if a.events.is_closed() {
                let counter = match a.phase {
                    Phase::Prefill(_) => &stats.cancelled_prefill,
                    Phase::Decode(_) => &stats.cancelled_decode,
                };
                add(counter, 1);
                tracing::debug!(id = %a.request.id, phase = ?a.phase, "cancelled: the client left");
            } else if a.paused.is_some_and(|since| now.saturating_duration_since(since) >= patience) {
                a.fail(EngineError::Stalled { seconds: patience.as_secs() });
                add(&stats.stalled, 1);
                add(&stats.failed, 1);
            } else {
                return true;
            }
            engine.banks.release(&engine.device, a.bank, true);
            false
        });
    }

    /// True when a drain, or the departure of every handle, has nothing left to wait for. What waits in the queue is served
    /// in a drain too: a stream has had its 200 by then, so that its client could not be sent to the successor.
    fn drained(&self) -> bool {
        let idle = self.active.is_empty() && self.queue.is_empty();
        match self.drain {
            Some(deadline) => idle || Instant::now() >= deadline,
            None => self.abandoned && idle,
        }
    }

    /// Ends requests, given by index with their terminal event and whether their rows may be reused.
    fn end(&mut self, mut ended: Vec<(usize, Event, bool)>) {
        ended.sort_by_key(|(i, ..)| std::cmp::Reverse(*i));
        let stats = &self.shared.stats;
        let mut last_words = Vec::with_capacity(ended.len());
        for (i, event, keep) in ended {
            let a = self.active.remove(i);
            add(if keep { &stats.finished } else { &stats.failed }, 1);
            self.engine.banks.release(&self.engine.device, a.bank, keep);
            last_words.push((a.events, event));
        }
        self.engine.banks.rebalance(&self.engine.device);
        self.publish();
        for (events, event) in last_words {
            events.send(event);
        }
    }

    fn publish(&self) {
        let stats = &self.shared.stats;
        stats.running.store(self.active.len(), Relaxed);
        stats.paused.store(self.active.iter().filter(|a| a.paused.is_some()).count(), Relaxed);
        stats.bank_bytes.store(self.engine.committed(), Relaxed);
        stats.checkpoint_bytes.store(self.engine.banks.checkpoint_bytes(), Relaxed);
        stats.idle_banks.store(self.engine.banks.idle(), Relaxed);
    }

    /// Tells every request that is left, those still in the command channel included.
    fn end_all(&mut self, error: &EngineError) {
        while let Ok(command) = self.commands.try_recv() {
            self.obey(command);
        }
        let stats = &self.shared.stats;
        for submission in self.queue.drain(..) {
            stats.release_queue_slot();
            add(&stats.failed, 1);
            submission.events.send(Event::Failed(error.clone()));
        }
        for a in self.active.drain(..) {
            add(&stats.failed, 1);
            a.fail(error.clone());
        }
        stats.running.store(0, Relaxed);
        stats.paused.store(0, Relaxed);
    }
}

/// The message of a panic.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panic in the engine thread: {}", text.unwrap_or("no message"))
}
