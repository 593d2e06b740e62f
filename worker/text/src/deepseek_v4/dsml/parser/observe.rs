//! What others ask a parser about.

use super::super::tags::{Lexed, lex, may_begin};
use super::super::{Kind, Position};
use super::{Parser, State};

impl Parser {
    /// Number of calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// True when a call was begun that is not reported, because the answer ended inside it.
    pub fn cut(&self) -> bool {
        self.cut
    }

    /// Where the next token falls, judged by all that was pushed.
    pub fn position(&self) -> Position {
        let held = match lex_held(&self.buffer) {
            Some(Lexed::Partial { marked }) => marked,
            Some(Lexed::Tag(..)) => self.waiting,
            _ => false,
        };
        match self.state {
            State::ThinkingStart | State::Thinking | State::Stopped => Position::Free,
            State::Content if held && !self.options.tools.is_empty() => Position::Structure,
            State::Content => Position::Free,
            State::Block => Position::Structure,
            State::Call => match self.call.as_ref().and_then(|c| c.open.last()) {
                None => Position::Structure,
                // A closing tag of two bytes or more has begun.
                Some(_) if held || self.buffer.starts_with("</") => Position::Structure,
                Some(p) if p.string == Some(false) && !p.in_string => Position::Structure,
                Some(_) => Position::Payload,
            },
        }
    }

    /// What the text that was decided on since the last time is: lengths in bytes, in the order of the text.
    pub fn take_spans(&mut self) -> Vec<(usize, Kind)> {
        std::mem::take(&mut self.spans)
    }

    /// True while what comes is reasoning.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::ThinkingStart | State::Thinking)
    }

    /// True when a block of calls was closed by its own tag: as in training, the answer ends there.
    pub fn closed(&self) -> bool {
        self.closed
    }

    /// True where the token that begins reasoning (`closes`: ends it) means something, or is part of a value; elsewhere it is
    /// the model's slip. `unfinished`: a part of a character was generated that was not pushed yet.
    pub fn has_place_for_think(&self, closes: bool, unfinished: bool) -> bool {
        match self.state {
            State::ThinkingStart => closes || !unfinished,
            State::Thinking => closes,
            State::Content => !self.spoken && !unfinished && self.calls == 0,
            State::Block | State::Call | State::Stopped => true,
        }
    }
}

fn lex_held(buffer: &str) -> Option<Lexed> {
    buffer.starts_with(may_begin).then(|| lex(buffer))
}
