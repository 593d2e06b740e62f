//! One step: the plan is computed, tokens are decided and the next ones guessed.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ds4_kernels::{Device, DeviceError};
use ds4_models::ModelError;
use ds4_models::speculation::{DraftCounts, DraftRequest, Sequence, Verdict};

use super::{Entry, Scheduler};
use crate::active::{Outcome, Phase};
use crate::engine::memory_or_error;
use crate::request::{EngineError, Event};
use crate::row::Row;
use crate::stats::add;

/// Step time over which the decode rate is averaged.
const RATE_WINDOW: Duration = Duration::from_secs(1);

/// What a step made of one request.
enum Decided {
    /// It goes on; the drafter may be shown this.
    Goes(Option<DraftRequest>),
    /// It is over: its terminal event, and whether its rows may be reused.
    Ends(Event, bool),
}

impl<D: Device> Scheduler<D> {
    /// Runs the plan, draws the tokens, ends what is finished.
    pub(super) fn step(&mut self) -> Result<(), String> {
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

    fn record_step(&mut self, took: Duration, decoded: u64) {
        self.shared.stats.record_step(took);
        self.window.0 += decoded;
        self.window.1 += took;
        if self.window.1 >= RATE_WINDOW {
            self.shared.stats.record_rate(self.window.0, self.window.1);
            self.window = (0, Duration::ZERO);
        }
    }
}
