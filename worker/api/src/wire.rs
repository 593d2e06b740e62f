//! The seam between the one internal event stream and what a surface puts on the wire.

use std::time::Duration;

use ds4_engine::{FinishReason, Timings, TokenLogprob};
use ds4_text::{Part, Piece};
use serde::Serialize;

use crate::backend::Backend;

/// One finished choice, for answers that are not streamed.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// All of its text.
    pub text: String,
    /// All of its reasoning.
    pub reasoning: String,
    /// Its calls of tools. Whoever answers leaves out the incomplete: half a command must not be run.
    pub calls: Vec<Call>,
    /// The log-probabilities of every token of text and reasoning, when asked for.
    pub logprobs: Vec<(Part, TokenLogprob)>,
    /// Why it ended.
    pub reason: Option<FinishReason>,
    /// Its counts and times.
    pub timings: Timings,
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// Name of the tool.
    pub name: String,
    /// Arguments as the text of a JSON object.
    pub arguments: String,
    /// It was not cut short.
    pub complete: bool,
}

impl Choice {
    /// Adds newly released pieces.
    pub fn add(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Text(text) => self.text.push_str(&text),
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::Call(name) => self.calls.push(Call { name, ..Call::default() }),
                Piece::Arguments(text) => {
                    if let Some(call) = self.calls.last_mut() {
                        call.arguments.push_str(&text);
                    }
                }
                Piece::CallEnd => {
                    if let Some(call) = self.calls.last_mut() {
                        call.complete = true;
                    }
                }
            }
        }
    }
}

/// A surface's projection of events. Writes whole SSE events (`data: …\n\n`) into `out`.
pub trait Wire: Send + Unpin + 'static {
    /// The first chunk of a choice.
    fn open(&mut self, index: usize, out: &mut Vec<u8>);

    /// Newly released pieces and, when asked for, log-probabilities of tokens of text and reasoning.
    fn delta(&mut self, index: usize, pieces: &[Piece], logprobs: &[(Part, TokenLogprob)], out: &mut Vec<u8>);

    /// The last chunk of a choice.
    fn close(&mut self, index: usize, reason: FinishReason, timings: &TimingsWire, out: &mut Vec<u8>);

    /// The usage chunk, when asked for.
    fn usage(&mut self, usage: &Usage, timings: &TimingsWire, out: &mut Vec<u8>);

    /// The whole answer at once, as JSON.
    fn response(&self, choices: &[Choice], usage: &Usage, timings: &TimingsWire) -> Vec<u8>;
}

/// Appends `value` as one SSE data event.
pub(crate) fn event(out: &mut Vec<u8>, value: &impl Serialize) {
    let start = out.len();
    out.extend_from_slice(b"data: ");
    if let Err(e) = serde_json::to_writer(&mut *out, value) {
        tracing::error!("an event could not be serialised: {e}");
        out.truncate(start);
        return;
    }
    out.extend_from_slice(b"\n\n");
}

/// OpenAI's name of a finish reason.
pub(crate) fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Length => "length",
    }
}

/// Token counts as OpenAI reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Prompt tokens, each prompt counted once however many choices it has.
    pub prompt_tokens: usize,
    /// Tokens generated, over all choices.
    pub completion_tokens: usize,
    /// Their sum.
    pub total_tokens: usize,
    /// Breakdown of the prompt.
    pub prompt_tokens_details: PromptDetails,
    /// Breakdown of what was generated, for answers that have parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionDetails>,
}

/// Breakdown of generated tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionDetails {
    /// Tokens of reasoning.
    pub reasoning_tokens: usize,
}

/// Breakdown of prompt tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptDetails {
    /// Prompt tokens that were not computed anew.
    pub cached_tokens: usize,
}

impl Usage {
    /// Counts of a request with `prompt_tokens` whose choices ended as `choices`. With several choices per prompt the
    /// cached tokens are those of the luckiest choice, so that they never exceed the prompt. `parts`: the answers have them.
    pub fn new(prompt_tokens: usize, n: usize, choices: &[&Timings], parts: bool) -> Self {
        let completion_tokens = choices.iter().map(|t| t.completion_tokens).sum();
        let cached_tokens =
            choices.chunks(n.max(1)).map(|c| c.iter().map(|t| t.cached_tokens).max().unwrap_or(0)).sum();
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens },
            completion_tokens_details: parts
                .then(|| CompletionDetails { reasoning_tokens: choices.iter().map(|t| t.reasoning_tokens).sum() }),
        }
    }
}

/// Times of a choice, or of a whole request: counts are summed, times are those of its slowest choice.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TimingsWire {
    /// Prompt tokens computed (cached ones are not).
    pub prompt_n: usize,
    /// Prompt tokens that were not computed anew.
    pub cached_n: usize,
    /// From admission to the first token.
    pub prompt_ms: f64,
    /// Prompt tokens computed per second.
    pub prompt_per_second: f64,
    /// Tokens generated.
    pub predicted_n: usize,
    /// From the first token to the last.
    pub predicted_ms: f64,
    /// Tokens after the first one per second of `predicted_ms`; 0 for a lone token.
    pub predicted_per_second: f64,
    /// From submission to admission.
    pub queued_ms: f64,
}

impl TimingsWire {
    /// Sums up `choices`.
    pub fn new(choices: &[&Timings]) -> Self {
        let sum = |f: fn(&Timings) -> usize| choices.iter().map(|t| f(t)).sum::<usize>();
        let max = |f: fn(&Timings) -> Duration| choices.iter().map(|t| f(t)).max().unwrap_or_default();
        let (prefill, decode) = (max(|t| t.prefill), max(|t| t.decode));
        let prompt_n = sum(|t| t.prompt_tokens.saturating_sub(t.cached_tokens));
        Self {
            prompt_n,
            cached_n: sum(|t| t.cached_tokens),
            prompt_ms: ms(prefill),
            prompt_per_second: rate(prompt_n, prefill),
            predicted_n: sum(|t| t.completion_tokens),
            predicted_ms: ms(decode),
            predicted_per_second: rate(sum(|t| t.completion_tokens.saturating_sub(1)), decode),
            queued_ms: ms(max(|t| t.queued)),
        }
    }
}

/// Milliseconds with microsecond resolution.
pub(crate) fn ms(d: Duration) -> f64 {
    (d.as_secs_f64() * 1e6).round() / 1e3
}

#[allow(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
fn rate(n: usize, d: Duration) -> f64 {
    if d.is_zero() { 0.0 } else { (n as f64 / d.as_secs_f64() * 1e3).round() / 1e3 }
}

/// A token as text, where it is text.
pub(crate) fn token_text(backend: &dyn Backend, token: u32) -> (String, Vec<u8>) {
    let bytes = backend.token_bytes(token);
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

/// JSON has no infinities; OpenAI writes this for "never".
pub(crate) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(-9999.0) } else { -9999.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_from_counts_and_times() {
        let t = Timings {
            prompt_tokens: 110,
            cached_tokens: 10,
            completion_tokens: 11,
            reasoning_tokens: 4,
            queued: Duration::from_millis(3),
            prefill: Duration::from_millis(500),
            decode: Duration::from_millis(100),
        };
        let w = TimingsWire::new(&[&t]);
        assert_eq!((w.prompt_n, w.cached_n, w.predicted_n), (100, 10, 11));
        assert_eq!((w.prompt_per_second, w.predicted_per_second, w.queued_ms), (200.0, 100.0, 3.0));
        let two = TimingsWire::new(&[&t, &Timings { decode: Duration::from_millis(200), ..t.clone() }]);
        assert_eq!((two.predicted_n, two.predicted_ms, two.predicted_per_second), (22, 200.0, 100.0));
        assert_eq!(TimingsWire::new(&[&Timings::default()]).predicted_per_second, 0.0);
    }

    #[test]
    fn usage_counts_a_prompt_once_and_never_more_cached_than_prompt() {
        let t = Timings { prompt_tokens: 10, cached_tokens: 8, completion_tokens: 5, ..Timings::default() };
        let t = Timings { reasoning_tokens: 2, ..t };
        let u = Usage::new(10, 2, &[&t, &t], true);
        assert_eq!(u.completion_tokens_details, Some(CompletionDetails { reasoning_tokens: 4 }));
        assert_eq!((u.prompt_tokens, u.completion_tokens, u.total_tokens), (10, 10, 20));
        assert_eq!(u.prompt_tokens_details.cached_tokens, 8);
    }
}
