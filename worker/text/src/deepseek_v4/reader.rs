//! Reads an answer of DeepSeek V4: reasoning, text and calls out of tokens, and where the sampler must be greedy.

use super::dsml::{self, End, Event, Parser, Position};
use super::forced::{Beginning, Beginnings};
use super::ledger::Ledger;
use super::prompt::Thinking;
use super::{DSML, END_THINK, THINK, held};
use crate::answer::{AnswerFormat, Part, Piece, Read, Reader, Steer};
use crate::chat::{ChatContent, ChatInput, ToolChoice};
use crate::constraint::{Constraint, Unenforceable};
use crate::stream::TextStream;
use crate::tokenizer::{Specials, Tokenizer};

/// How the answers to one prompt are read.
#[derive(Clone, Debug)]
pub(crate) struct Format {
    options: dsml::Options,
    rules: Rules,
    /// What the answer is held to after its reasoning.
    constraint: Option<Constraint>,
}

/// What a reader needs beside its parser.
#[derive(Clone, Debug)]
struct Rules {
    /// Only the first call counts, and it ends the answer.
    single: bool,
    /// The answer must not be empty: it has to call, or to follow a schema.
    owes: bool,
    /// What the answer must begin with, after its reasoning: a call of one of these tools.
    forced: Beginnings,
    think: Option<u32>,
    end_think: Option<u32>,
    dsml: Option<u32>,
}

impl Format {
    /// For the answers to `input` with this thinking mode.
    ///
    /// # Errors
    /// An answer or a call cannot be held to its schema.
    pub(super) fn new(input: &ChatInput, thinking: Thinking, tokenizer: &Tokenizer) -> Result<Self, Unenforceable> {
        let tools = names_of(input);
        let callable = match &input.tool_choice {
            ToolChoice::Named(name) => std::slice::from_ref(name),
            ToolChoice::Required => tools.as_slice(),
            ToolChoice::Auto => &[],
        };
        // A name from a request is checked to be a plain word; one that is not would stay text in `Plain` pieces only.
        let call = |name: &String| format!("\n\n<{DSML}tool_calls>\n<{DSML}invoke name=\"{name}\">\n");
        let forced = callable.iter().map(|name| tokenizer.encode(&call(name), Specials::Parse)).collect();
        let mut constraint = held::constraint(input, tokenizer)?;
        let may_be_empty = |c: &mut Constraint| tokenizer.eos().is_some_and(|eos| c.permits(eos) == Ok(true));
        let owes = !callable.is_empty() || constraint.as_mut().is_some_and(|c| !may_be_empty(c));
        Ok(Self {
            options: dsml::Options {
                thinking: thinking != Thinking::None,
                quoted: if tools.is_empty() { Vec::new() } else { quoted_of(input) },
                tools,
                decode_entities: false,
                live: true,
                held: constraint.is_some(),
            },
            rules: Rules {
                owes,
                single: input.single_call,
                forced: Beginnings::new(forced),
                think: tokenizer.token_id(THINK),
                end_think: tokenizer.token_id(END_THINK),
                dsml: tokenizer.token_id(DSML),
            },
            constraint,
        })
    }
}

/// Names of the tools on offer.
fn names_of(input: &ChatInput) -> Vec<String> {
    let list = input.tools.as_ref().and_then(serde_json::Value::as_array);
    let name = |tool: &serde_json::Value| Some(tool.get("function").unwrap_or(tool)["name"].as_str()?.to_owned());
    list.map_or_else(Vec::new, |list| list.iter().filter_map(name).collect())
}

/// What others than the model said and could be quoted: only texts that hold some markup can be.
fn quoted_of(input: &ChatInput) -> Vec<String> {
    let texts = input.messages.iter().filter(|m| m.role != "assistant").flat_map(|m| match &m.content {
        ChatContent::None => Vec::new(),
        ChatContent::Text(text) => vec![text.as_str()],
        ChatContent::Parts(parts) => parts.iter().filter_map(|p| crate::chat::part_text(p).ok()).collect(),
    });
    texts.filter(|t| t.contains(['<', '｜'])).map(str::to_owned).collect()
}

impl AnswerFormat for Format {
    fn reader(&self, stops: Vec<Vec<u8>>) -> Box<dyn Reader> {
        Box::new(AnswerReader {
            forced: self.rules.forced.begin(),
            constraint: self.constraint.clone(),
            rules: self.rules.clone(),
            parser: Parser::new(self.options.clone()),
            decoder: TextStream::new(Vec::new()),
            visible: TextStream::new(stops),
            ledger: Ledger::default(),
            decoded: 0,
            ended: false,
        })
    }

    fn has_syntax(&self) -> bool {
        !self.options.tools.is_empty()
    }
}

struct AnswerReader {
    rules: Rules,
    parser: Parser,
    /// Bytes to UTF-8.
    decoder: TextStream,
    /// The answer's own text, up to a stop string.
    visible: TextStream,
    ledger: Ledger,
    /// Bytes of text so far.
    decoded: usize,
    /// What is left of the forced beginning.
    forced: Beginning,
    constraint: Option<Constraint>,
    ended: bool,
}

impl AnswerReader {
    /// Whether a control token is part of the answer's language. Others show nothing.
    fn speaks(&self, token: u32) -> bool {
        let token = Some(token);
        if token == self.rules.think || token == self.rules.end_think {
            let unfinished = self.decoder.is_inside_character();
            self.parser.has_place_for_think(token == self.rules.end_think, unfinished)
        } else {
            token == self.rules.dsml
        }
    }

    /// Turns events into pieces, up to the answer's end.
    fn take(&mut self, events: Vec<Event>, pieces: &mut Vec<Piece>) {
        for event in events {
            if self.ended {
                return;
            }
            if !matches!(event, Event::Content(_)) {
                // A stop string does not reach across a call.
                say(self.visible.finish(), pieces);
            }
            match event {
                Event::Content(text) => {
                    let pushed = self.visible.push(text.as_bytes());
                    say(pushed.text, pieces);
                    self.ended |= pushed.stopped;
                }
                Event::Reasoning(text) => pieces.push(Piece::Reasoning(text)),
                Event::Begin(name) => pieces.push(Piece::Call(name)),
                Event::Arguments(text) => pieces.push(Piece::Arguments(text)),
                Event::Call(_) => {
                    pieces.push(Piece::CallEnd);
                    self.ended |= self.rules.single;
                }
                Event::Stop => self.ended = true,
            }
        }
    }

    fn place(&mut self) {
        for (len, kind) in self.parser.take_spans() {
            self.ledger.place(len, kind);
        }
    }
}

fn say(text: String, pieces: &mut Vec<Piece>) {
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
}

impl Reader for AnswerReader {
    fn push(&mut self, token: u32, bytes: &[u8], control: bool) -> Read {
        if !self.parser.is_thinking() {
            self.forced.take(token);
            if let Some(constraint) = &mut self.constraint {
                constraint.take(token);
            }
        }
        let (mut pieces, mut events) = (Vec::new(), Vec::new());
        if (control && !self.speaks(token)) || bytes.is_empty() {
            self.ledger.token(None);
        } else {
            let broken = self.decoder.break_off(bytes);
            if !broken.is_empty() {
                self.decoded += broken.len();
                self.ledger.last_ends_at(self.decoded);
                events = self.parser.push(&broken);
            }
            let text = self.decoder.push(bytes).text;
            self.decoded += text.len();
            // A token that is only the beginning of a character belongs to where the character goes.
            self.ledger.token(Some(self.decoded + usize::from(text.is_empty())));
            events.extend(if text == DSML && Some(token) == self.rules.dsml {
                self.parser.push_marker()
            } else {
                self.parser.push(&text)
            });
        }
        self.take(events, &mut pieces);
        self.place();
        self.ended |= self.parser.closed() || self.constraint.as_ref().is_some_and(Constraint::complete);
        Read { pieces, settled: self.ledger.settle(None), ended: self.ended }
    }

    fn steer(&self) -> Steer<'_> {
        match self.forced.next() {
            [token] if !self.parser.is_thinking() => Steer::Force(*token),
            several @ [_, _, ..] if !self.parser.is_thinking() => Steer::OneOf(several),
            _ if self.parser.position() == Position::Structure => Steer::Greedy,
            _ => Steer::Free,
        }
    }

    fn constraint(&mut self) -> Option<&mut Constraint> {
        if self.parser.is_thinking() { None } else { self.constraint.as_mut() }
    }

    /// Reasoning alone is no answer where one is owed.
    fn instead_of_end(&self) -> Option<u32> {
        self.rules.end_think.filter(|_| self.rules.owes && self.parser.is_thinking())
    }

    fn finish(&mut self, cut: bool) -> Read {
        let mut pieces = Vec::new();
        if !self.ended {
            let tail = self.decoder.finish();
            let mut events = self.parser.push(&tail);
            events.extend(self.parser.finish(if cut { End::Length } else { End::Stop }));
            self.take(events, &mut pieces);
        }
        say(self.visible.finish(), &mut pieces);
        self.place();
        let unfinished = self.parser.calls() > 0 || self.parser.cut();
        let last = if unfinished { Part::Hidden } else { Part::Text };
        Read { pieces, settled: self.ledger.settle(Some(last)), ended: true }
    }
}

#[cfg(test)]
mod tests;
