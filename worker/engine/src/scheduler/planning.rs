//! Who gets a bank, and what the next step computes.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ds4_kernels::{Device, DeviceError};
use ds4_models::speculation::Sequence;

use super::{Entry, Scheduler};
use crate::active::{Active, Phase};
use crate::request::{EngineError, Event};
use crate::stats::add;

impl<D: Device> Scheduler<D> {
    /// Gives the requests that wait longest the banks that are free.
    pub(super) fn admit(&mut self) {
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
    pub(super) fn build_plan(&mut self) {
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
}
