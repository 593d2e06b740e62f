//! Settings of the engine.

use std::time::Duration;

use ds4_kernels::StateSpec;
use ds4_models::speculation::MAX_DRAFTS;

use crate::checkpoints::CheckpointPolicy;

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
    /// Committed bank memory above which idle banks give rows back, in bytes. `None`: 64 MiB or one full context with its
    /// checkpoints, whichever is more. Running sequences are never limited by it.
    pub idle_keep_bytes: Option<usize>,
    /// For families whose state cannot be truncated: most checkpoints of one bank, from which a prompt that shares only a
    /// beginning with it is continued. 0: none are taken.
    pub checkpoints: usize,
    /// Tokens after which a growing sequence gets a checkpoint. At least 1.
    pub checkpoint_interval: usize,
    /// Most bytes of the checkpoints of all banks.
    pub checkpoint_bytes: usize,
    /// Most tokens that are guessed ahead in a step of a greedy request, when the model was given a drafter; at most
    /// [`MAX_DRAFTS`]. 0: none.
    pub drafts: usize,
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
            checkpoints: 8,
            // One of DeepSeek V4 Flash is 18 MB: copied in milliseconds, where this many tokens of a prompt take seconds.
            checkpoint_interval: 1024,
            checkpoint_bytes: 512 << 20,
            drafts: 1,
        }
    }
}

impl EngineConfig {
    /// The same with steps of up to `tokens` prompt tokens; of a quarter of them beside decoding requests.
    #[must_use]
    pub fn with_prefill_chunk(self, tokens: usize) -> Self {
        Self { prefill_chunk: tokens, prefill_chunk_busy: tokens.div_ceil(4), ..self }
    }

    /// The same settings with every value in its allowed range.
    pub(crate) fn normalised(mut self, model_context: usize) -> Self {
        self.context = self.context.clamp(2, model_context.max(2));
        self.max_batch = self.max_batch.max(1);
        self.max_queue = self.max_queue.max(1);
        self.prefill_chunk = self.prefill_chunk.max(1);
        self.prefill_chunk_busy = self.prefill_chunk_busy.clamp(1, self.prefill_chunk);
        self.event_capacity = self.event_capacity.max(4);
        self.checkpoint_interval = self.checkpoint_interval.max(1);
        self.drafts = self.drafts.min(MAX_DRAFTS);
        self
    }

    /// What is kept of checkpoints.
    pub(crate) fn checkpoint_policy(&self) -> CheckpointPolicy {
        CheckpointPolicy {
            interval: self.checkpoint_interval,
            per_bank: self.checkpoints,
            bytes: self.checkpoint_bytes,
        }
    }

    /// Bytes that checkpoints of `state` can come to in all.
    pub fn checkpoint_limit(&self, state: &StateSpec) -> usize {
        let of_one = state.checkpoint_bytes(self.context).saturating_mul(self.checkpoints);
        of_one.saturating_mul(self.max_batch).min(self.checkpoint_bytes)
    }

    /// The soft limit on committed bank bytes for a state of `spec`.
    pub(crate) fn keep_bytes(&self, spec: &StateSpec) -> usize {
        let checkpoints =
            spec.checkpoint_bytes(self.context).saturating_mul(self.checkpoints).min(self.checkpoint_bytes);
        let one = spec.bytes(self.context).saturating_add(checkpoints);
        self.idle_keep_bytes.unwrap_or_else(|| (64 << 20).max(one))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::{mock_spec, mock_windowed_spec};

    #[test]
    fn deepseek_v4_checkpoints_are_budgeted_where_there_are_any() {
        let config = EngineConfig { max_batch: 3, checkpoints: 5, ..EngineConfig::default() };
        assert_eq!(config.checkpoint_limit(&mock_spec()), 0);
        // Four rows of two f32 each.
        assert_eq!(config.checkpoint_limit(&mock_windowed_spec()), 3 * 5 * 32);
        assert_eq!(EngineConfig { checkpoint_bytes: 100, ..config }.checkpoint_limit(&mock_windowed_spec()), 100);
    }

    #[test]
    fn deepseek_v4_one_context_and_its_checkpoints_are_kept() {
        let config = EngineConfig { context: 10 << 20, checkpoints: 5, ..EngineConfig::default() };
        assert_eq!(config.keep_bytes(&mock_spec()), 80 << 20);
        assert_eq!(config.keep_bytes(&mock_windowed_spec()), (80 << 20) + 32 + 5 * 32);
    }
}
