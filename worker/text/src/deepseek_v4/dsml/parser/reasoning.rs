//! The reasoning before an answer. Tags inside of it are quoted, whatever they are.

use super::super::{End, Kind};
use super::{Parser, State};
use crate::deepseek_v4::{END_THINK, THINK};

impl Parser {
    pub(super) fn thinking_start(&mut self, end: Option<End>) {
        let trimmed = self.buffer.trim_start();
        if trimmed.starts_with(THINK) {
            let len = self.buffer.len() - trimmed.len() + THINK.len();
            self.take(len);
            self.state = State::Thinking;
        } else if end.is_some() || !THINK.starts_with(trimmed) {
            self.state = State::Thinking;
        }
    }

    pub(super) fn thinking(&mut self, end: Option<End>) {
        if let Some(at) = self.buffer.find(END_THINK) {
            let text = self.cut_off(at);
            self.spans.push((at, Kind::Reasoning));
            self.emit_reasoning(&text);
            self.take(END_THINK.len());
            self.state = State::Content;
            return;
        }
        let mut keep = 0;
        if end.is_none() {
            keep = (1..END_THINK.len()).rev().find(|n| self.buffer.ends_with(&END_THINK[..*n])).unwrap_or(0);
        }
        let text = self.cut_off(self.buffer.len() - keep);
        self.spans.push((text.len(), Kind::Reasoning));
        self.emit_reasoning(&text);
    }
}
