//! `/v1/chat/completions`: the wire. Chunks are `chat.completion.chunk`, whole answers `chat.completion`.

use std::sync::Arc;

use ds4_engine::{FinishReason, TokenLogprob};
use ds4_text::{Part, Piece};
use serde::Serialize;

use crate::backend::Backend;
use crate::wire::{Choice, TimingsWire, Usage, Wire, event, finite, reason_name, token_text};

/// The projection of one chat request.
pub struct ChatWire {
    /// `chatcmpl-…`.
    pub id: String,
    /// Unix time of the request, in seconds.
    pub created: u64,
    /// For token texts and the model's name.
    pub backend: Arc<dyn Backend>,
    /// A usage chunk follows: every other chunk says `"usage": null`.
    pub include_usage: bool,
    /// Log-probabilities were asked for.
    pub logprobs: bool,
    /// Calls sent so far, per choice.
    pub calls: Vec<usize>,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChunkChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<&'a Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<&'a TimingsWire>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[DeltaCall<'a>; 1]>,
}

/// The beginning of a call, or more of its arguments.
#[derive(Serialize)]
struct DeltaCall<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: DeltaFunction<'a>,
}

#[derive(Serialize)]
struct DeltaFunction<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

#[derive(Serialize)]
struct Logprobs {
    content: Vec<ContentLogprob>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<Vec<ContentLogprob>>,
}

#[derive(Serialize)]
struct ContentLogprob {
    #[serde(flatten)]
    token: OneLogprob,
    top_logprobs: Vec<OneLogprob>,
}

#[derive(Serialize)]
struct OneLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

#[derive(Serialize)]
struct Full<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<FullChoice<'a>>,
    usage: &'a Usage,
    timings: &'a TimingsWire,
}

#[derive(Serialize)]
struct FullChoice<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: Option<&'a str>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<FullCall<'a>>,
}

#[derive(Serialize)]
struct FullCall<'a> {
    id: String,
    r#type: &'static str,
    function: FullFunction<'a>,
}

#[derive(Serialize)]
struct FullFunction<'a> {
    name: &'a str,
    arguments: &'a str,
}

/// An id that no other call has: 122 random bits.
fn call_id() -> String {
    format!("call_{}", uuid::Uuid::new_v4().simple())
}

fn message(choice: &Choice) -> Message<'_> {
    let tool_calls: Vec<FullCall<'_>> = choice
        .calls
        .iter()
        .filter(|c| c.complete)
        .map(|c| FullCall {
            id: call_id(),
            r#type: "function",
            function: FullFunction { name: &c.name, arguments: &c.arguments },
        })
        .collect();
    Message {
        role: "assistant",
        // As at OpenAI: an answer that only calls has no content.
        content: Some(choice.text.as_str()).filter(|t| !t.is_empty() || tool_calls.is_empty()),
        refusal: None,
        reasoning_content: Some(choice.reasoning.as_str()).filter(|t| !t.is_empty()),
        tool_calls,
    }
}

impl ChatWire {
    fn one(&self, token: u32, logprob: f32) -> OneLogprob {
        let (text, bytes) = token_text(&*self.backend, token);
        OneLogprob { token: text, logprob: finite(logprob), bytes }
    }

    fn logprobs(&self, tokens: &[(Part, TokenLogprob)]) -> Logprobs {
        let of = |wanted: Part| -> Vec<ContentLogprob> {
            let these = tokens.iter().filter(|(part, _)| *part == wanted);
            these
                .map(|(_, t)| ContentLogprob {
                    token: self.one(t.token, t.logprob),
                    top_logprobs: t.top.iter().map(|(token, logprob)| self.one(*token, *logprob)).collect(),
                })
                .collect()
        };
        let reasoning = of(Part::Reasoning);
        let reasoning_content = (!reasoning.is_empty()).then_some(reasoning);
        Logprobs { content: of(Part::Text), refusal: None, reasoning_content }
    }

    /// The delta of one piece, if it needs one.
    fn delta_of<'p>(&mut self, index: usize, piece: &'p Piece) -> Option<Delta<'p>> {
        let mut delta = Delta::default();
        let sent = self.calls.get_mut(index);
        match piece {
            Piece::Text(text) => delta.content = Some(text),
            Piece::Reasoning(text) => delta.reasoning_content = Some(text),
            Piece::Call(name) => {
                let at = sent.map_or(0, |sent| {
                    *sent += 1;
                    *sent - 1
                });
                let function = DeltaFunction { name: Some(name), arguments: "" };
                delta.tool_calls =
                    Some([DeltaCall { index: at, id: Some(call_id()), r#type: Some("function"), function }]);
            }
            Piece::Arguments(text) => {
                let at = sent.map_or(0, |sent| sent.saturating_sub(1));
                let function = DeltaFunction { name: None, arguments: text };
                delta.tool_calls = Some([DeltaCall { index: at, id: None, r#type: None, function }]);
            }
            Piece::CallEnd => return None,
        }
        Some(delta)
    }

    fn chunk(
        &self,
        choices: &[ChunkChoice<'_>],
        usage: Option<&Usage>,
        timings: Option<&TimingsWire>,
        out: &mut Vec<u8>,
    ) {
        let chunk = Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.backend.model().name,
            choices,
            usage: self.include_usage.then_some(usage),
            timings,
        };
        event(out, &chunk);
    }
}

impl Wire for ChatWire {
    fn open(&mut self, index: usize, out: &mut Vec<u8>) {
        let delta = Delta { role: Some("assistant"), content: Some(""), ..Delta::default() };
        self.chunk(&[ChunkChoice { index, delta, logprobs: None, finish_reason: None }], None, None, out);
    }

    fn delta(&mut self, index: usize, pieces: &[Piece], logprobs: &[(Part, TokenLogprob)], out: &mut Vec<u8>) {
        let mut logprobs = (!logprobs.is_empty()).then(|| self.logprobs(logprobs));
        for piece in pieces {
            let Some(delta) = self.delta_of(index, piece) else { continue };
            let choice = ChunkChoice { index, delta, logprobs: logprobs.take(), finish_reason: None };
            self.chunk(&[choice], None, None, out);
        }
        if logprobs.is_some() {
            // A token that shows nothing yet.
            let delta = Delta { content: Some(""), ..Delta::default() };
            self.chunk(&[ChunkChoice { index, delta, logprobs, finish_reason: None }], None, None, out);
        }
    }

    fn close(&mut self, index: usize, reason: FinishReason, timings: &TimingsWire, out: &mut Vec<u8>) {
        let finish_reason = Some(reason_name(reason));
        let choice = ChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason };
        self.chunk(&[choice], None, Some(timings), out);
    }

    fn usage(&mut self, usage: &Usage, timings: &TimingsWire, out: &mut Vec<u8>) {
        self.chunk(&[], Some(usage), Some(timings), out);
    }

    fn response(&self, choices: &[Choice], usage: &Usage, timings: &TimingsWire) -> Vec<u8> {
        let choices = choices
            .iter()
            .enumerate()
            .map(|(index, c)| FullChoice {
                index,
                message: message(c),
                logprobs: self.logprobs.then(|| self.logprobs(&c.logprobs)),
                finish_reason: c.reason.map(reason_name),
            })
            .collect();
        let full = Full {
            id: &self.id,
            object: "chat.completion",
            created: self.created,
            model: &self.backend.model().name,
            choices,
            usage,
            timings,
        };
        serde_json::to_vec(&full).unwrap_or_default()
    }
}
