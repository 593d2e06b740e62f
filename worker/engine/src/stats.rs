//! Counters that the engine thread writes and anyone may read: relaxed atomics, no lock.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the step-time histogram's buckets, in seconds; a last bucket takes the rest.
pub const STEP_BOUNDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];

/// A snapshot of the engine's counters. Totals count from the engine's start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Requests with a bank: prefilling, decoding or paused.
    pub running: usize,
    /// Requests waiting for a bank.
    pub queued: usize,
    /// Running requests whose client reads too slowly, now.
    pub paused: usize,
    /// Accepted requests.
    pub requests: u64,
    /// Requests that ended with `Done`.
    pub finished: u64,
    /// Requests that ended with `Failed`, stalls included.
    pub failed: u64,
    /// Requests refused because the queue was full.
    pub refused: u64,
    /// Clients that left while queued: reaped before they took a bank.
    pub reaped: u64,
    /// Clients that left during prefill.
    pub cancelled_prefill: u64,
    /// Clients that left during decode.
    pub cancelled_decode: u64,
    /// Clients cancelled because they stopped reading.
    pub stalled: u64,
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Tokens generated.
    pub decode_tokens: u64,
    /// Tokens guessed ahead and computed with the ones before them.
    pub drafted_tokens: u64,
    /// Guesses among them that came true.
    pub accepted_tokens: u64,
    /// Admissions that reused a prefix of their bank.
    pub prefix_hits: u64,
    /// Prompt tokens that were not computed anew.
    pub cached_tokens: u64,
    /// Admissions among [`EngineStats::prefix_hits`] for which a bank was taken back to a checkpoint.
    pub rewinds: u64,
    /// Bytes committed by all banks now, checkpoints included.
    pub bank_bytes: usize,
    /// Bytes of checkpoints now.
    pub checkpoint_bytes: usize,
    /// Banks that hold rows of an ended sequence for reuse, now.
    pub idle_banks: usize,
    /// Steps run.
    pub steps: u64,
    /// Time spent in steps, in seconds.
    pub step_seconds: f64,
    /// Steps per bucket of [`STEP_BOUNDS`], not cumulative; the last counts those above every bound.
    pub step_buckets: [u64; STEP_BOUNDS.len() + 1],
    /// Generated tokens per second over the last second in which something ran.
    pub decode_tokens_per_second: f64,
}

/// The shared cells behind [`EngineStats`].
#[derive(Debug, Default)]
pub(crate) struct StatsCells {
    pub running: AtomicUsize,
    pub queued: AtomicUsize,
    pub paused: AtomicUsize,
    pub requests: AtomicU64,
    pub finished: AtomicU64,
    pub failed: AtomicU64,
    pub refused: AtomicU64,
    pub reaped: AtomicU64,
    pub cancelled_prefill: AtomicU64,
    pub cancelled_decode: AtomicU64,
    pub stalled: AtomicU64,
    pub prefill_tokens: AtomicU64,
    pub decode_tokens: AtomicU64,
    pub drafted_tokens: AtomicU64,
    pub accepted_tokens: AtomicU64,
    pub prefix_hits: AtomicU64,
    pub cached_tokens: AtomicU64,
    pub rewinds: AtomicU64,
    pub bank_bytes: AtomicUsize,
    pub checkpoint_bytes: AtomicUsize,
    pub idle_banks: AtomicUsize,
    steps: AtomicU64,
    step_nanos: AtomicU64,
    step_buckets: [AtomicU64; STEP_BOUNDS.len() + 1],
    milli_tokens_per_second: AtomicU64,
}

/// Adds `n` to a counter.
pub(crate) fn add(cell: &AtomicU64, n: usize) {
    cell.fetch_add(n as u64, Relaxed);
}

impl StatsCells {
    /// Takes a place in the queue, unless `limit` are taken.
    pub(crate) fn reserve_queue_slot(&self, limit: usize) -> bool {
        self.queued.fetch_update(Relaxed, Relaxed, |n| (n < limit).then_some(n + 1)).is_ok()
    }

    /// Gives a place in the queue back.
    pub(crate) fn release_queue_slot(&self) {
        self.queued.fetch_sub(1, Relaxed);
    }

    /// Records one step.
    pub(crate) fn record_step(&self, took: Duration) {
        let bucket = STEP_BOUNDS.iter().position(|b| took.as_secs_f64() <= *b).unwrap_or(STEP_BOUNDS.len());
        self.step_buckets[bucket].fetch_add(1, Relaxed);
        self.steps.fetch_add(1, Relaxed);
        self.step_nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Publishes the decode rate of a window of `tokens` over `span`.
    pub(crate) fn record_rate(&self, tokens: u64, span: Duration) {
        let nanos = span.as_nanos().max(1);
        let milli = u128::from(tokens) * 1_000_000_000_000 / nanos;
        self.milli_tokens_per_second.store(u64::try_from(milli).unwrap_or(u64::MAX), Relaxed);
    }

    /// A snapshot. Fields are read one after another; they may be of neighbouring steps.
    pub(crate) fn snapshot(&self) -> EngineStats {
        let mut step_buckets = [0; STEP_BOUNDS.len() + 1];
        for (to, from) in step_buckets.iter_mut().zip(&self.step_buckets) {
            *to = from.load(Relaxed);
        }
        // Before `running`: a request moves from the queue to a bank, and must not be missed on the way.
        let queued = self.queued.load(Relaxed);
        EngineStats {
            running: self.running.load(Relaxed),
            queued,
            paused: self.paused.load(Relaxed),
            requests: self.requests.load(Relaxed),
            finished: self.finished.load(Relaxed),
            failed: self.failed.load(Relaxed),
            refused: self.refused.load(Relaxed),
            reaped: self.reaped.load(Relaxed),
            cancelled_prefill: self.cancelled_prefill.load(Relaxed),
            cancelled_decode: self.cancelled_decode.load(Relaxed),
            stalled: self.stalled.load(Relaxed),
            prefill_tokens: self.prefill_tokens.load(Relaxed),
            decode_tokens: self.decode_tokens.load(Relaxed),
            drafted_tokens: self.drafted_tokens.load(Relaxed),
            accepted_tokens: self.accepted_tokens.load(Relaxed),
            prefix_hits: self.prefix_hits.load(Relaxed),
            cached_tokens: self.cached_tokens.load(Relaxed),
            rewinds: self.rewinds.load(Relaxed),
            bank_bytes: self.bank_bytes.load(Relaxed),
            checkpoint_bytes: self.checkpoint_bytes.load(Relaxed),
            idle_banks: self.idle_banks.load(Relaxed),
            steps: self.steps.load(Relaxed),
            step_seconds: Duration::from_nanos(self.step_nanos.load(Relaxed)).as_secs_f64(),
            step_buckets,
            decode_tokens_per_second: self.milli_tokens_per_second.load(Relaxed) as f64 / 1000.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_land_in_their_bucket() {
        let cells = StatsCells::default();
        cells.record_step(Duration::from_millis(1));
        cells.record_step(Duration::from_millis(7));
        cells.record_step(Duration::from_secs(9));
        let s = cells.snapshot();
        assert_eq!((s.step_buckets[0], s.step_buckets[3], s.step_buckets[12]), (1, 1, 1));
        assert_eq!(s.steps, 3);
        assert!((s.step_seconds - 9.008).abs() < 1e-9);
    }

    #[test]
    fn the_queue_limit_is_exact() {
        let cells = StatsCells::default();
        assert!(cells.reserve_queue_slot(2));
        assert!(cells.reserve_queue_slot(2));
        assert!(!cells.reserve_queue_slot(2));
        cells.release_queue_slot();
        assert!(cells.reserve_queue_slot(2));
    }

    #[test]
    fn the_rate_is_tokens_over_time() {
        let cells = StatsCells::default();
        cells.record_rate(150, Duration::from_millis(1500));
        assert_eq!(cells.snapshot().decode_tokens_per_second, 100.0);
    }
}
