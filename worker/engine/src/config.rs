//! Settings of the engine.

use std::time::Duration;

/// How the engine is sized. [`Default`] suits a small model on a CPU.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Longest sequence (prompt and output) in tokens; clamped to what the model was trained for.
    pub context: usize,
    /// Number of banks: sequences that run at the same time. At least 1.
    pub max_batch: usize,
    /// Requests that may wait for a bank. At least 1.
    pub max_queue: usize,
    /// Most prompt tokens in one step while nothing decodes.
    pub prefill_chunk: usize,
    /// Most prompt tokens in one step beside decoding requests: bounds the gap between their tokens.
    pub prefill_chunk_busy: usize,
    /// Events that may wait for a client before its request is paused. At least 4.
    pub event_capacity: usize,
    /// A client whose channel stays full this long is cancelled.
    pub stall_timeout: Duration,
    /// Committed bank memory above which idle banks give rows back, in bytes. `None`: 64 MiB or one full context,
    /// whichever is more. Running sequences are never limited by it.
    pub idle_keep_bytes: Option<usize>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            context: 8192,
            max_batch: 16,
            max_queue: 256,
            prefill_chunk: 256,
            prefill_chunk_busy: 64,
            event_capacity: 64,
            stall_timeout: Duration::from_secs(30),
            idle_keep_bytes: None,
        }
    }
}

impl EngineConfig {
    /// The same settings with every value in its allowed range.
    pub(crate) fn normalised(mut self, model_context: usize) -> Self {
        self.context = self.context.clamp(2, model_context.max(2));
        self.max_batch = self.max_batch.max(1);
        self.max_queue = self.max_queue.max(1);
        self.prefill_chunk = self.prefill_chunk.max(1);
        self.prefill_chunk_busy = self.prefill_chunk_busy.clamp(1, self.prefill_chunk);
        self.event_capacity = self.event_capacity.max(4);
        self
    }

    /// The soft limit on committed bank bytes for a state of `bytes_per_token`.
    pub(crate) fn keep_bytes(&self, bytes_per_token: usize) -> usize {
        self.idle_keep_bytes.unwrap_or_else(|| (64 << 20).max(self.context.saturating_mul(bytes_per_token)))
    }
}
