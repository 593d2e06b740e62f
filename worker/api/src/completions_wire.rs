//! `/v1/completions`: the wire. Chunks and whole answers are both `text_completion`; log-probabilities have the legacy shape.

use std::sync::Arc;

use ds4_engine::{FinishReason, TokenLogprob};
use ds4_text::{Part, Piece};
use serde::Serialize;

use crate::backend::Backend;
use crate::wire::{Choice, TimingsWire, Usage, Wire, event, finite, reason_name, token_text};

/// The projection of one completions request.
pub struct CompletionsWire {
    /// `cmpl-…`.
    pub id: String,
    /// Unix time of the request, in seconds.
    pub created: u64,
    /// For token texts and the model's name.
    pub backend: Arc<dyn Backend>,
    /// A usage chunk follows: every other chunk says `"usage": null`.
    pub include_usage: bool,
    /// Log-probabilities were asked for.
    pub logprobs: bool,
    /// Prompt texts to put first; choice `i` belongs to prompt `i / n`.
    pub echo: Option<Vec<String>>,
    /// Choices per prompt.
    pub n: usize,
    /// Characters of token text sent so far, per choice: the legacy shape reports each token's offset.
    pub offsets: Vec<usize>,
}

#[derive(Serialize)]
struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<TextChoice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<&'a Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<&'a TimingsWire>,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<LegacyLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct LegacyLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Top>,
    text_offset: Vec<usize>,
}

/// Names and values, best first: an object of f32, which read as those of `token_logprobs` do.
#[derive(Default)]
struct Top(Vec<(String, f32)>);

impl Serialize for Top {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, logprob)| (name, logprob)))
    }
}

impl CompletionsWire {
    fn echo_of(&self, index: usize) -> Option<&str> {
        Some(self.echo.as_ref()?.get(index / self.n.max(1))?)
    }

    /// Bytes that are no text of their own are spelt out, as OpenAI does: `bytes:\xf0\x9f`.
    fn legacy_text(&self, token: u32) -> (String, usize) {
        let (text, bytes) = token_text(&*self.backend, token);
        // Characters that begin in this token: continuation bytes belong to an earlier one.
        let chars = bytes.iter().filter(|b| (**b & 0xC0) != 0x80).count();
        if std::str::from_utf8(&bytes).is_ok() {
            return (text, chars);
        }
        let mut spelt = String::from("bytes:");
        for b in bytes {
            spelt.push_str(&format!("\\x{b:02x}"));
        }
        (spelt, chars)
    }

    fn legacy(&self, tokens: &[(Part, TokenLogprob)], offset: &mut usize) -> LegacyLogprobs {
        let mut out = LegacyLogprobs::default();
        for (_, t) in tokens {
            let (text, chars) = self.legacy_text(t.token);
            let mut top = Top::default();
            for (token, logprob) in &t.top {
                let text = self.legacy_text(*token).0;
                // Two tokens may read the same: the likelier one, which comes first, keeps the name.
                if top.0.iter().all(|(name, _)| *name != text) {
                    top.0.push((text, finite(*logprob)));
                }
            }
            out.tokens.push(text);
            out.token_logprobs.push(finite(t.logprob));
            out.top_logprobs.push(top);
            out.text_offset.push(*offset);
            *offset += chars;
        }
        out
    }

    fn body<'a>(
        &'a self,
        choices: Vec<TextChoice<'a>>,
        usage: Option<Option<&'a Usage>>,
        timings: Option<&'a TimingsWire>,
    ) -> Body<'a> {
        let model = &self.backend.model().name;
        Body { id: &self.id, object: "text_completion", created: self.created, model, choices, usage, timings }
    }

    fn chunk(&self, choice: TextChoice<'_>, timings: Option<&TimingsWire>, out: &mut Vec<u8>) {
        event(out, &self.body(vec![choice], self.include_usage.then_some(None), timings));
    }
}

impl Wire for CompletionsWire {
    fn open(&mut self, index: usize, out: &mut Vec<u8>) {
        if let Some(text) = self.echo_of(index) {
            self.chunk(TextChoice { index, text, logprobs: None, finish_reason: None }, None, out);
        }
    }

    fn delta(&mut self, index: usize, pieces: &[Piece], logprobs: &[(Part, TokenLogprob)], out: &mut Vec<u8>) {
        let mut offset = self.offsets.get(index).copied().unwrap_or(0);
        let logprobs = (!logprobs.is_empty()).then(|| self.legacy(logprobs, &mut offset));
        if let Some(slot) = self.offsets.get_mut(index) {
            *slot = offset;
        }
        // On this surface answers are plain text.
        let text: String = pieces.iter().map(|p| if let Piece::Text(text) = p { text.as_str() } else { "" }).collect();
        self.chunk(TextChoice { index, text: &text, logprobs, finish_reason: None }, None, out);
    }

    fn close(&mut self, index: usize, reason: FinishReason, timings: &TimingsWire, out: &mut Vec<u8>) {
        let choice = TextChoice { index, text: "", logprobs: None, finish_reason: Some(reason_name(reason)) };
        self.chunk(choice, Some(timings), out);
    }

    fn usage(&mut self, usage: &Usage, timings: &TimingsWire, out: &mut Vec<u8>) {
        event(out, &self.body(Vec::new(), Some(Some(usage)), Some(timings)));
    }

    fn response(&self, choices: &[Choice], usage: &Usage, timings: &TimingsWire) -> Vec<u8> {
        let texts: Vec<String> =
            choices.iter().enumerate().map(|(i, c)| [self.echo_of(i).unwrap_or(""), &c.text].concat()).collect();
        let choices = choices
            .iter()
            .zip(&texts)
            .enumerate()
            .map(|(index, (c, text))| TextChoice {
                index,
                text,
                logprobs: self.logprobs.then(|| self.legacy(&c.logprobs, &mut 0)),
                finish_reason: c.reason.map(reason_name),
            })
            .collect();
        serde_json::to_vec(&self.body(choices, Some(Some(usage)), Some(timings))).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_probability_reads_alike_wherever_it_stands() {
        let out = LegacyLogprobs {
            token_logprobs: vec![-0.1],
            top_logprobs: vec![Top(vec![("b".into(), -0.1), ("a".into(), -7.3)])],
            ..LegacyLogprobs::default()
        };
        let text = serde_json::to_string(&out).unwrap();
        assert!(text.contains(r#""token_logprobs":[-0.1],"top_logprobs":[{"b":-0.1,"a":-7.3}]"#), "{text}");
    }
}
