//! What a client asks of the engine and what it hears back.

use std::sync::Arc;
use std::time::Duration;

use ds4_text::{AnswerFormat, Read};

/// Sampling parameters, already validated by [`SamplingParams::validate`].
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 means greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Nucleus mass in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the best token's probability; 0 keeps all.
    pub min_p: f32,
    /// Seed; the same seed, prompt and parameters give the same text. `None` draws one.
    pub seed: Option<u64>,
    /// OpenAI frequency penalty.
    pub frequency_penalty: f32,
    /// OpenAI presence penalty.
    pub presence_penalty: f32,
    /// Multiplicative repetition penalty over prompt and output; 1 is off.
    pub repetition_penalty: f32,
    /// Additive logit bias per token id.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

/// One sequence to generate.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Request id, for logs.
    pub id: String,
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, at least 1; the engine clamps it to what the context leaves.
    pub max_tokens: usize,
    /// Sampler settings.
    pub sampling: SamplingParams,
    /// Stop strings as bytes; the matched text is not released.
    pub stop: Vec<Vec<u8>>,
    /// How the answer is read, for a prompt whose answer has parts or a language of its own; `None`: it is plain text.
    pub format: Option<Arc<dyn AnswerFormat>>,
    /// `Some(k)`: report each token's logprob and the k most likely alternatives (k may be 0).
    pub logprobs: Option<u32>,
    /// Keep generating past end-of-sequence tokens (benchmarks).
    pub ignore_eos: bool,
    /// Raw logits rows to report, for debugging and scoring.
    pub logits: LogitsWanted,
}

/// Which rows of raw logits a request's receiver gets as [`Event::Logits`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogitsWanted {
    /// The row that each generated token is drawn from, sent just before the token.
    pub steps: bool,
    /// Indices of prompt tokens, ascending and below the last one's, after which the row is wanted. From the first of
    /// them on, the prompt is computed anew whatever a bank holds of it.
    pub prompt: Vec<usize>,
}

impl LogitsWanted {
    /// How many leading tokens of a `prompt` may be taken from a bank that holds them.
    pub(crate) fn reusable<'p>(&self, prompt: &'p [u32]) -> &'p [u32] {
        // The last token given to the bank table is always computed.
        self.prompt.first().and_then(|first| prompt.get(..=*first)).unwrap_or(prompt)
    }

    /// The wanted indices among `from..to`.
    pub(crate) fn within(&self, from: usize, to: usize) -> &[usize] {
        let at = |end: usize| self.prompt.partition_point(|p| *p < end);
        &self.prompt[at(from)..at(to)]
    }
}

/// A token's log-probability under the unmodified model distribution, and its rivals.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub token: u32,
    /// Natural-log probability.
    pub logprob: f32,
    /// Most likely tokens with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End-of-sequence token or stop string.
    Stop,
    /// As [`FinishReason::Stop`], after calls of tools.
    ToolCalls,
    /// `max_tokens` or the context's end.
    Length,
}

/// Token counts and times of one finished request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timings {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens that were not computed anew.
    pub cached_tokens: usize,
    /// Generated tokens, the end-of-sequence token included.
    pub completion_tokens: usize,
    /// Those of them that are reasoning.
    pub reasoning_tokens: usize,
    /// Time from submission to admission.
    pub queued: Duration,
    /// Time from admission to the first token.
    pub prefill: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
}

/// What the engine tells a request's receiver. Dropping the receiver cancels the request within one step.
#[derive(Clone, Debug)]
pub enum Event {
    /// The request left the queue and its prefill begins.
    Admitted,
    /// One generated token.
    Token {
        /// Token id.
        token: u32,
        /// What may be shown now, possibly nothing: complete UTF-8, and nothing that could still become a stop string.
        read: Read,
        /// Present when logprobs were asked for. What part of the answer it belongs to, `read` of this event or of a later
        /// one says.
        logprob: Option<TokenLogprob>,
    },
    /// A row of logits as the model gave it, not sanitised; only when [`GenerateRequest::logits`] asks for it.
    Logits {
        /// Index in the sequence (prompt, then output) of the token after which it was computed: it predicts the next one.
        position: usize,
        /// One logit for each token of the model's output, in id order.
        row: Vec<f32>,
    },
    /// The end.
    Done {
        /// What was still held back.
        read: Read,
        /// Why it ended.
        reason: FinishReason,
        /// Counts and times.
        timings: Timings,
    },
    /// The request failed after it was accepted.
    Failed(EngineError),
}

/// Typed refusals and failures.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The queue is full; retry later.
    #[error("the queue is full ({limit} requests waiting); retry later or raise --max-queue")]
    QueueFull {
        /// Configured limit.
        limit: usize,
    },
    /// The prompt leaves no room for output.
    #[error("the prompt has {prompt} tokens and the context is {context}; shorten it or raise --ctx")]
    ContextExceeded {
        /// Prompt tokens.
        prompt: usize,
        /// Context length.
        context: usize,
    },
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A parameter is out of range.
    #[error("{name} is {value}: {rule}")]
    BadParameter {
        /// Parameter name as in the API.
        name: &'static str,
        /// Offending value.
        value: String,
        /// What is allowed.
        rule: &'static str,
    },
    /// The worker is draining.
    #[error("the worker is draining; retry against its successor")]
    Draining,
    /// The client stopped reading its events.
    #[error("cancelled: the client read nothing for {seconds} s while events were waiting for it")]
    Stalled {
        /// Configured patience, in seconds.
        seconds: u64,
    },
    /// Memory for the sequence could not be had.
    #[error("{0}")]
    OutOfMemory(String),
    /// The grammar that an answer is held to became too complex on the way.
    #[error("the answer cannot be held to its schema any further: {0}")]
    Unenforceable(String),
    /// Something broke inside; the worker ends.
    #[error("internal error: {0}")]
    Internal(String),
}
