//! `/v1/chat/completions`: the wire. Chunks are `chat.completion.chunk`, whole answers `chat.completion`.

use std::sync::Arc;

use ds4_engine::{FinishReason, TokenLogprob};
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
}

#[derive(Serialize)]
struct Logprobs {
    content: Vec<ContentLogprob>,
    refusal: Option<()>,
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
    content: &'a str,
    refusal: Option<()>,
}

impl ChatWire {
    fn one(&self, token: u32, logprob: f32) -> OneLogprob {
        let (text, bytes) = token_text(&*self.backend, token);
        OneLogprob { token: text, logprob: finite(logprob), bytes }
    }

    fn logprobs<'t>(&self, tokens: impl IntoIterator<Item = &'t TokenLogprob>) -> Logprobs {
        let content = tokens
            .into_iter()
            .map(|t| ContentLogprob {
                token: self.one(t.token, t.logprob),
                top_logprobs: t.top.iter().map(|(token, logprob)| self.one(*token, *logprob)).collect(),
            })
            .collect();
        Logprobs { content, refusal: None }
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
        let delta = Delta { role: Some("assistant"), content: Some("") };
        self.chunk(&[ChunkChoice { index, delta, logprobs: None, finish_reason: None }], None, None, out);
    }

    fn delta(&mut self, index: usize, text: &str, logprob: Option<&TokenLogprob>, out: &mut Vec<u8>) {
        let logprobs = logprob.map(|l| self.logprobs([l]));
        let delta = Delta { role: None, content: Some(text) };
        self.chunk(&[ChunkChoice { index, delta, logprobs, finish_reason: None }], None, None, out);
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
                message: Message { role: "assistant", content: &c.text, refusal: None },
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
