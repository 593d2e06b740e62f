//! The engine thread: queue, admission, steps, cancellation, drain.
//!
//! It owns all mutable state and takes no lock. A step is one decode row of every request that can take a token (more with
//! guesses ahead, see [`ds4_models::speculation`]), plus at most a chunk of prompt tokens in order of admission: a later prompt starts only when the ones before it are whole (or lack
//! only a last token that is a step of its own), so at most one prompt is ever half computed. Between steps it notices
//! clients that left. With nothing to compute it sleeps on its command channel.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use ds4_kernels::ops::{RowQuery, RowSummary};
use ds4_kernels::{BatchPlan, Device, DeviceError};
use ds4_models::ModelError;
use ds4_models::speculation::{DraftCounts, DraftRequest, Sequence, Verdict};

use crate::active::{Active, Outcome, Phase};
use crate::engine::{Engine, memory_or_error};
use crate::handle::{Command, EngineState, Shared, Submission};
use crate::request::{EngineError, Event};
use crate::row::Row;
use crate::sampler::Scratch;
use crate::stats::add;

/// Step time over which the decode rate is averaged.
const RATE_WINDOW: Duration = Duration::from_secs(1);

/// A span of the current plan: whose it is, its first logits row of those that decide tokens, and, when it ends with guesses,
/// the bank before them.
struct Entry<D: Device> {
    active: usize,
    logits: Option<usize>,
    before: Option<D::Checkpoint>,
}

/// What a step made of one request.
enum Decided {
    /// It goes on; the drafter may be shown this.
    Goes(Option<DraftRequest>),
    /// It is over: its terminal event, and whether its rows may be reused.
    Ends(Event, bool),
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

    fn admit(&mut self) {
        let stats = &self.shared.stats;
        while let Some(next) = self.queue.front() {
            let Some(got) =
                self.engine.banks.admit(&self.engine.device, next.request.logits.reusable(&next.request.prompt))
            else {
                break;
            };
            let Some(submission) = self.queue.pop_front() else { break };
            if got.cached > 0 {
                add(&stats.prefix_hits, 1);
                add(&stats.cached_tokens, got.cached);
                add(&stats.rewinds, usize::from(got.rewound));
            }
            self.active.push(Active::admit(submission, got.bank, got.cached, Instant::now()));
            // In this order a request is always counted somewhere: an engine that looks idle is idle.
            stats.running.store(self.active.len(), Relaxed);
            stats.release_queue_slot();
        }
    }

    /// Fills the plan and its entries. A request whose rows cannot be committed fails alone.
    fn build_plan(&mut self) {
        self.plan.clear();
        self.entries.clear();
        let mut unplaced = Vec::new();
        let (engine, plan, entries) = (&mut self.engine, &mut self.plan, &mut self.entries);
        for (i, a) in self.active.iter_mut().enumerate() {
            let Phase::Decode(token) = a.phase else { continue };
            if !a.events.has_room(a.events_a_step()) {
                a.paused.get_or_insert_with(Instant::now);
                continue;
            }
            a.paused = None;
            let pos = engine.banks.len(a.bank);
            let room = a.events.room() / a.events_a_step();
            let sequence = a.sequence.get_or_insert_with(|| Sequence::new(token));
            sequence.limit_drafts(room.saturating_sub(1));
            let before = engine.place(a.bank, pos, sequence);
            match engine.banks.commit(&engine.device, a.bank, pos + sequence.rows()) {
                Ok(()) => {
                    let logits = Some(sequence.push(plan, a.bank, pos));
                    entries.push(Entry { active: i, logits, before });
                }
                Err(e) => unplaced.push((i, e)),
            }
        }
        let mut budget =
            if entries.is_empty() { engine.config.prefill_chunk } else { engine.config.prefill_chunk_busy };
        for (i, a) in self.active.iter_mut().enumerate() {
            let Phase::Prefill(from) = a.phase else { continue };
            if budget == 0 {
                break;
            }
            let mut to = a.request.prompt.len().min(from + budget);
            if let Some(cut) = a.cut_for_logits(from, to) {
                if cut == from {
                    a.paused.get_or_insert_with(Instant::now);
                    continue;
                }
                a.paused = None;
                to = cut;
            }
            to = engine.banks.prompt_end(from, to, a.request.prompt.len());
            budget -= to - from;
            match engine.banks.commit(&engine.device, a.bank, to) {
                Ok(()) => {
                    let whole = to == a.request.prompt.len();
                    let first_row = plan.rows();
                    let inside = a.request.logits.within(from, to).iter().map(|p| first_row + p - from);
                    plan.wanted.extend(inside);
                    let logits = plan.push(a.bank, from, &a.request.prompt[from..to], whole);
                    entries.push(Entry { active: i, logits, before: None });
                }
                Err(e) => unplaced.push((i, e)),
            }
        }
        if !unplaced.is_empty() {
            self.fail_unplaced(unplaced);
        }
    }

    /// Ends requests that memory was refused to, and plans again without them.
    fn fail_unplaced(&mut self, unplaced: Vec<(usize, DeviceError)>) {
        let failed = |(i, e): (usize, DeviceError)| (i, Event::Failed(EngineError::OutOfMemory(e.to_string())), false);
        self.end(unplaced.into_iter().map(failed).collect());
        self.build_plan();
    }

    /// Runs the plan, draws the tokens, ends what is finished.
    fn step(&mut self) -> Result<(), String> {
        let started = Instant::now();
        match self.engine.forward(&self.plan) {
            Err(ModelError::Device(e @ DeviceError::OutOfMemory { .. })) => {
                self.fail_step(&e);
                return Ok(());
            }
            other => other.map_err(|e| e.to_string())?,
        }
        let prefilled = self.keep_prompt_rows();
        add(&self.shared.stats.prefill_tokens, prefilled);
        self.send_prompt_logits();
        self.summarise();
        let mut decoded = 0;
        let mut ended = Vec::new();
        let mut guesses = Vec::new();
        for i in 0..self.entries.len() {
            let active = self.entries[i].active;
            match self.decide(i, &mut decoded) {
                Decided::Goes(request) => guesses.extend(request.map(|r| (active, r))),
                Decided::Ends(event, keep) => ended.push((active, event, keep)),
            }
        }
        add(&self.shared.stats.decode_tokens, decoded);
        self.guess(&guesses);
        self.record_step(started.elapsed(), decoded as u64);
        self.end(ended);
        Ok(())
    }

    /// Ends the requests of a step that memory was refused to in its middle: their banks hold nothing that can be relied on.
    /// Everybody else goes on.
    fn fail_step(&mut self, error: &DeviceError) {
        tracing::warn!(rows = self.plan.rows(), error = %error, "a step failed");
        let failed = |e: &Entry<D>| (e.active, Event::Failed(EngineError::OutOfMemory(error.to_string())), false);
        let ended = self.entries.iter().map(failed).collect();
        self.end(ended);
    }

    /// Records the prompt tokens of the step; returns their number.
    fn keep_prompt_rows(&mut self) -> usize {
        let mut prefilled = 0;
        for (span, entry) in self.plan.spans.iter().zip(&self.entries) {
            let a = &mut self.active[entry.active];
            let Phase::Prefill(from) = &mut a.phase else { continue };
            let rows = span.first_row..span.first_row + span.rows;
            self.engine.banks.extend(span.bank, &self.plan.tokens[rows]);
            *from += span.rows;
            prefilled += span.rows;
            let turn = *from + 1 == a.request.prompt.len();
            self.engine.banks.checkpoint(&self.engine.device, span.bank, turn);
        }
        prefilled
    }

    /// Asks the device for what the step's decisions need of their logits rows, all at once.
    fn summarise(&mut self) {
        self.queries.clear();
        self.summaries.clear();
        let vocab = self.engine.model.shape().vocab;
        for entry in &self.entries {
            let (a, Some(first)) = (&self.active[entry.active], entry.logits) else { continue };
            let drafts = a.sequence.as_ref().map_or(0, |s| s.drafts().len());
            self.queries.extend((0..=drafts).filter_map(|ahead| a.query(first + ahead, ahead, vocab)));
        }
        self.queries.sort_unstable_by_key(|q| q.row);
        if self.queries.is_empty() {
            return;
        }
        let (engine, queries, summaries) = (&self.engine, &self.queries, &mut self.summaries);
        let asked = memory_or_error(|| {
            engine.device.summarise(engine.model.logits(), queries, summaries);
            Ok(())
        });
        if let Err(e) = asked {
            // Rows are read one by one then.
            tracing::warn!(error = %e, "no summaries of logits in this step");
            self.summaries.clear();
        }
    }

    /// Draws the tokens that entry `i`'s logits decide, keeps the rows that turned out right and undoes the others.
    fn decide(&mut self, i: usize, decoded: &mut usize) -> Decided {
        let (span, entry) = (self.plan.spans[i], &self.entries[i]);
        let a = &mut self.active[entry.active];
        let prompt = match a.phase {
            Phase::Prefill(to) => Some(to),
            Phase::Decode(_) => None,
        };
        let mut outcome = Outcome::Continues;
        for row in entry.logits.into_iter().flat_map(|first| first..) {
            let (device, logits) = (&self.engine.device, self.engine.model.logits());
            let read = |out: &mut Vec<f32>| device.read(logits, row, out);
            let summary = self.queries.binary_search_by_key(&row, |q| q.row).ok().and_then(|i| self.summaries.get(i));
            let mut row = Row::new(self.engine.model.shape().vocab, summary, &read, &mut self.row);
            outcome = a.take_logits(&mut row, &*self.engine.vocab, &mut self.scratch);
            *decoded += usize::from(!matches!(outcome, Outcome::Broken(_)));
            let (Outcome::Continues, Phase::Decode(token), None) = (&outcome, a.phase, prompt) else { break };
            if a.sequence.as_mut().is_none_or(|s| s.decide(token) == Verdict::Last) {
                break;
            }
        }
        let goes = matches!(outcome, Outcome::Continues);
        let mut shown = prompt.map(|to| self.engine.shown(span.first_pos, to, a.request.prompt.len()));
        if prompt.is_none()
            && let Some(sequence) = &mut a.sequence
        {
            let settled = if goes { sequence.settle() } else { sequence.end() };
            let DraftCounts { drafted, accepted } = settled.counts;
            self.shared.stats.drafted_tokens.fetch_add(drafted, Relaxed);
            self.shared.stats.accepted_tokens.fetch_add(accepted, Relaxed);
            shown = Some((settled.first_new, settled.new_rows));
            match &entry.before {
                Some(before) if settled.rewind => self.engine.banks.undo(&self.engine.device, span.bank, before),
                _ => {
                    let rows = span.first_row..span.first_row + span.rows;
                    self.engine.banks.extend(span.bank, &self.plan.tokens[rows]);
                    self.engine.banks.checkpoint(&self.engine.device, span.bank, false);
                }
            }
        }
        match outcome {
            Outcome::Finished(event) => Decided::Ends(event, true),
            Outcome::Broken(event) => Decided::Ends(event, false),
            Outcome::Continues => Decided::Goes(self.draft_request(i, prompt, shown)),
        }
    }

    /// What the drafter is to be shown of entry `i`, whose prompt reaches `prompt` or is whole, and asked for.
    fn draft_request(&self, i: usize, prompt: Option<usize>, shown: Option<(usize, usize)>) -> Option<DraftRequest> {
        let (span, a) = (self.plan.spans[i], &self.active[self.entries[i].active]);
        let drafting = self.engine.drafting.as_ref().filter(|_| a.guessable())?;
        let (first, rows) = shown.filter(|(_, rows)| *rows > 0)?;
        let (next, drafts) = match (a.phase, prompt) {
            (Phase::Decode(token), _) => {
                let fresh = Sequence::new(token);
                let sequence = a.sequence.as_ref().unwrap_or(&fresh);
                let (len, context) = (self.engine.banks.len(a.bank), self.engine.config.context);
                let wanted = if a.guessable_now() { drafting.drafts } else { 0 };
                (token, sequence.room(wanted, len, context, a.left()))
            }
            (Phase::Prefill(to), _) => (*a.request.prompt.get(to)?, 0),
        };
        let (first_row, first_pos) = (span.first_row + first, span.first_pos + first);
        Some(DraftRequest { bank: a.bank, first_row, first_pos, rows, next, drafts })
    }

    /// Shows the drafter what is new and gives its guesses to the requests (by index) that they are for.
    fn guess(&mut self, wanted: &[(usize, DraftRequest)]) {
        let engine = &mut self.engine;
        let Some(drafting) = &mut engine.drafting else { return };
        let requests: Vec<DraftRequest> = wanted.iter().map(|(_, r)| *r).collect();
        let vocab = &*engine.vocab;
        let ends = |token| vocab.is_eog(token);
        let guesses = drafting.guess(&engine.device, &mut *engine.model, &self.plan, &requests, &ends);
        for ((active, request), guesses) in wanted.iter().zip(guesses) {
            // None were asked for beside a prompt that is not whole.
            if request.drafts > 0 {
                let sequence = &mut self.active[*active].sequence;
                sequence.get_or_insert_with(|| Sequence::new(request.next)).set_drafts(guesses);
            }
        }
    }

    /// Sends the rows that were asked for inside of prompts.
    fn send_prompt_logits(&mut self) {
        let mut next = 0;
        for (span, entry) in self.plan.spans.iter().zip(&self.entries) {
            while let Some(row) = self.plan.wanted.get(next).filter(|r| **r < span.first_row + span.rows) {
                let prompt = matches!(self.active[entry.active].phase, Phase::Prefill(_));
                if prompt && entry.logits != Some(next) {
                    self.engine.device.read(self.engine.model.logits(), next, &mut self.row);
                    let position = span.first_pos + row - span.first_row;
                    let row = self.row.clone();
                    self.active[entry.active].events.send(Event::Logits { position, row });
                }
                next += 1;
            }
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

    fn record_step(&mut self, took: Duration, decoded: u64) {
        self.shared.stats.record_step(took);
        self.window.0 += decoded;
        self.window.1 += took;
        if self.window.1 >= RATE_WINDOW {
            self.shared.stats.record_rate(self.window.0, self.window.1);
            self.window = (0, Duration::ZERO);
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
