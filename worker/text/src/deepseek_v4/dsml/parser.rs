//! Finds reasoning, content and calls in generated text, however it is cut into chunks.
//!
//! Text waits in a buffer only while it could become a tag: each character is looked at a bounded number of times.

use std::collections::VecDeque;

use super::markdown::Code;
use super::tags::{Lexed, Name, Tag, lex, may_begin};
use super::value::{is_object, json_text, minify};
use super::{End, Event, Kind, Options, ToolCall};
use crate::deepseek_v4::{DSML, END_THINK, THINK};

mod call;
mod decide;
mod live;
mod observe;
mod reasoning;

use call::{Call, close_parameter, object, open_parameter};
use decide::Verdict;
use live::Live;

/// The text of the calls being read, to tell a quotation.
#[derive(Debug, Default)]
struct Region {
    reading: bool,
    /// From its first tag on, with the white space before it.
    text: String,
    space: String,
    /// How much of the text was shown, as a quotation.
    shown: usize,
    /// It repeats nothing that someone else said, however it goes on.
    certain: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before anything, where a repeated `<think>` is not reasoning.
    ThinkingStart,
    Thinking,
    Content,
    /// Inside a block, between calls.
    Block,
    /// Inside a call.
    Call,
    /// A tag ended the answer.
    Stopped,
}

/// A streaming parser of one answer.
#[derive(Debug)]
pub struct Parser {
    options: Options,
    state: State,
    buffer: String,
    /// White space that is shown only if text follows.
    space: String,
    code: Code,
    /// Only white space since the line began, or since a call.
    fresh: bool,
    /// Only white space since a call.
    after_call: bool,
    /// Content was shown.
    spoken: bool,
    in_block: bool,
    call: Option<Call>,
    live: Live,
    region: Region,
    calls: usize,
    cut: bool,
    waiting: bool,
    /// A block's own closer was read after a call.
    closed: bool,
    events: Vec<Event>,
    spans: Vec<(usize, Kind)>,
    /// Bytes of text that are no longer in the buffer.
    consumed: usize,
    /// Where markers that came as tokens of their own begin, in bytes of all text.
    markers: VecDeque<usize>,
}

impl Parser {
    /// A parser for an answer to a request with these options.
    pub fn new(options: Options) -> Self {
        let state = if options.thinking { State::ThinkingStart } else { State::Content };
        Self {
            options,
            state,
            buffer: String::new(),
            space: String::new(),
            code: Code::default(),
            fresh: true,
            after_call: false,
            spoken: false,
            in_block: false,
            call: None,
            live: Live::default(),
            region: Region::default(),
            calls: 0,
            cut: false,
            waiting: false,
            closed: false,
            events: Vec::new(),
            spans: Vec::new(),
            consumed: 0,
            markers: VecDeque::new(),
        }
    }

    /// Takes the next piece of the answer and says what is certain now. Neighbouring pieces of one kind are joined.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        if self.state != State::Stopped {
            self.buffer += text;
            self.run(None);
        }
        std::mem::take(&mut self.events)
    }

    /// Takes the token of DSML's marker. Unlike the same letters in a text it is markup: outside of code, it is not shown when it
    /// turns out to belong to no tag.
    pub fn push_marker(&mut self) -> Vec<Event> {
        self.markers.push_back(self.consumed + self.buffer.len());
        self.push(DSML)
    }

    /// Ends the answer: says what is left.
    pub fn finish(&mut self, end: End) -> Vec<Event> {
        if self.state != State::Stopped {
            self.run(Some(end));
            match (self.call.take(), end) {
                (Some(call), End::Stop) => self.end_call(call, true),
                (Some(_), End::Length) => self.cut = true,
                (None, _) => {}
            }
            if self.calls == 0 && !self.cut {
                let space = std::mem::take(&mut self.space);
                self.emit_content(&space);
            }
            self.state = State::Stopped;
        }
        std::mem::take(&mut self.events)
    }

    fn run(&mut self, end: Option<End>) {
        self.waiting = false;
        while !self.buffer.is_empty() {
            let before = (self.buffer.len(), self.state);
            match self.state {
                State::ThinkingStart => self.thinking_start(end),
                State::Thinking => self.thinking(end),
                State::Content => self.content(end),
                State::Block => self.block(end),
                State::Call => self.in_call(end),
                State::Stopped => self.discard(),
            }
            self.tell();
            if before == (self.buffer.len(), self.state) {
                break;
            }
        }
    }

    /// Takes markup, or a part of a call.
    fn take(&mut self, len: usize) -> String {
        self.spans.push((len, Kind::Markup));
        self.cut_off(len)
    }

    /// Drops a tag or marker in content that means nothing.
    fn drop_slip(&mut self, len: usize) {
        self.spans.push((len, Kind::Slip));
        self.cut_off(len);
    }

    /// Drops what is left.
    fn discard(&mut self) {
        self.spans.push((self.buffer.len(), Kind::Markup));
        self.consumed += self.buffer.len();
        self.buffer.clear();
    }

    fn cut_off(&mut self, len: usize) -> String {
        let rest = self.buffer.split_off(len);
        let taken = std::mem::replace(&mut self.buffer, rest);
        self.consumed += len;
        if self.region.reading && !self.options.quoted.is_empty() {
            self.region.text += &taken;
        }
        taken
    }

    fn emit_reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(Event::Reasoning(last)) => *last += text,
            _ => self.events.push(Event::Reasoning(text.to_owned())),
        }
    }

    fn emit_content(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(Event::Content(last)) => *last += text,
            _ => self.events.push(Event::Content(text.to_owned())),
        }
    }

    /// Shows the first `len` bytes as content, their last white space when text follows.
    fn say(&mut self, len: usize) {
        let text = self.cut_off(len);
        let shown = text.trim_end();
        let lead = shown.len() - shown.trim_start().len();
        self.spans.extend([
            (lead, Kind::Space),
            (shown.len() - lead, Kind::Content),
            (text.len() - shown.len(), Kind::Space),
        ]);
        if !shown.is_empty() {
            let space = std::mem::take(&mut self.space);
            self.emit_content(&space);
            self.emit_content(shown);
            self.spoken = true;
            self.after_call = false;
        }
        self.space += &text[shown.len()..];
        for c in text.chars() {
            match c {
                '\n' => self.fresh = true,
                c if !c.is_whitespace() => self.fresh = false,
                _ => {}
            }
        }
    }

    fn content(&mut self, end: Option<End>) {
        let plain = self.code.scan(&self.buffer, self.fresh, end.is_some());
        if plain > 0 {
            return self.say(plain);
        }
        if !self.buffer.starts_with(may_begin) {
            return;
        }
        if !self.spoken && self.calls == 0 {
            for (tag, next) in [(THINK, State::Thinking), (END_THINK, State::Content)] {
                if self.buffer.starts_with(tag) {
                    self.take(tag.len());
                    self.space.clear();
                    self.state = next;
                    return;
                }
                if end.is_none() && tag.starts_with(&self.buffer) {
                    return;
                }
            }
        }
        let first = self.buffer.chars().next().map_or(0, char::len_utf8);
        if self.options.held {
            // A tag has its marker's token at its beginning.
            let may_come = end.is_none() && matches!(self.buffer.as_str(), "<" | "</");
            if may_come {
                return;
            }
            if self.next_marker().is_none_or(|at| at > "</".len()) {
                return self.say(first);
            }
        }
        match lex(&self.buffer) {
            Lexed::No if self.is_marker() => self.drop_slip(DSML.len()),
            Lexed::No => self.say(first),
            Lexed::Partial { marked } => match end {
                None => {}
                // The beginning of a tag that will never be one.
                Some(_) if marked => {
                    self.cut = true;
                    self.space.clear();
                    self.discard();
                }
                Some(_) => self.say(first),
            },
            Lexed::Tag(len, tag) => match self.judge(&tag, len, end) {
                Verdict::Wait => self.waiting = true,
                Verdict::Text => self.say(len),
                _ if self.options.tools.is_empty() && (tag.marked || !tag.closes) => {
                    self.events.push(Event::Stop);
                    self.state = State::Stopped;
                    self.discard();
                }
                Verdict::Drop => self.drop_slip(len),
                Verdict::Enter => {
                    let space = std::mem::take(&mut self.space);
                    self.region = Region { reading: true, space, ..Region::default() };
                    self.take(len);
                    self.in_block = tag.name == Name::Block;
                    self.state = State::Block;
                    if tag.name != Name::Block {
                        self.begin_call(tag, false);
                    }
                }
            },
        }
    }

    /// True when the buffer begins with a marker that came as a token.
    fn is_marker(&mut self) -> bool {
        self.next_marker() == Some(0) && self.buffer.starts_with(DSML)
    }

    /// Where in the buffer the first marker is that came as a token.
    fn next_marker(&mut self) -> Option<usize> {
        while self.markers.front().is_some_and(|at| *at < self.consumed) {
            self.markers.pop_front();
        }
        self.markers.front().map(|at| at - self.consumed)
    }

    fn block(&mut self, end: Option<End>) {
        let len = self.buffer.len() - self.buffer.trim_start().len();
        self.take(len);
        if self.buffer.is_empty() {
            return;
        }
        let lexed = if self.buffer.starts_with(may_begin) { lex(&self.buffer) } else { Lexed::No };
        match lexed {
            // The block's closer was forgotten.
            Lexed::No => self.leave(),
            Lexed::Partial { .. } => {
                if let Some(end) = end {
                    self.cut = end == End::Length;
                    self.discard();
                }
            }
            Lexed::Tag(len, tag) => {
                let held = self.options.held && self.next_marker().is_some_and(|at| at < len);
                self.take(len);
                match tag.name {
                    Name::Block if tag.closes => self.close_block(),
                    Name::Invoke | Name::Unknown if !tag.closes => self.begin_call(tag, held),
                    _ => {}
                }
            }
        }
    }

    /// True when the calls so far repeat what someone else said; they are shown then.
    fn is_quotation(&mut self) -> bool {
        let text = self.region.text.trim();
        if text.is_empty() || !self.options.quoted.iter().any(|q| q.contains(text)) {
            return false;
        }
        self.show_quotation();
        true
    }

    fn show_quotation(&mut self) {
        let region = std::mem::take(&mut self.region);
        self.emit_content(&region.space);
        self.emit_content(&region.text[region.shown..]);
        self.spoken = true;
        self.region = Region { shown: region.text.len(), space: String::new(), ..region };
    }

    /// Back to content.
    fn leave(&mut self) {
        let quotes = self.region.shown > 0;
        if quotes {
            self.show_quotation();
        }
        self.region = Region::default();
        self.in_block = false;
        self.state = State::Content;
        self.space.clear();
        self.fresh = true;
        self.after_call = !quotes;
        self.code = Code::default();
    }

    fn close_block(&mut self) {
        self.closed |= self.calls > 0;
        self.leave();
    }

    fn begin_call(&mut self, tag: Tag, held: bool) {
        let Some(name) = tag.called else { return };
        self.live = Live::default();
        let call =
            Call { name, marked: tag.marked, held, parameters: Vec::new(), stray: String::new(), open: Vec::new() };
        if tag.self_closed {
            self.end_call(call, false);
        } else {
            self.call = Some(call);
            self.state = State::Call;
        }
    }

    /// Closes what is open and reports the call. `forgotten`: its closers never came.
    fn end_call(&mut self, mut call: Call, forgotten: bool) {
        if forgotten && call.open.last().is_some_and(|p| p.string == Some(false) && json_text(&p.body).is_none()) {
            self.cut = true;
            return;
        }
        while close_parameter(&mut call, true, self.options.decode_entities) {}
        if self.is_quotation() {
            return self.after_one();
        }
        let stray = call.stray.trim();
        let arguments =
            if call.parameters.is_empty() && is_object(stray) { minify(stray) } else { object(&call.parameters) };
        self.tell_rest(&call, &arguments);
        self.events.push(Event::Call(ToolCall { name: call.name, arguments }));
        // What was shown before it was a quotation; this is none.
        self.region.shown = 0;
        self.calls += 1;
        self.after_one();
    }

    fn after_one(&mut self) {
        if self.in_block {
            self.state = State::Block;
        } else {
            self.leave();
        }
    }

    fn in_call(&mut self, end: Option<End>) {
        let Some(mut call) = self.call.take() else {
            self.state = State::Block;
            return;
        };
        if call.held {
            return self.in_held_call(call, end);
        }
        let at = self.buffer.find(may_begin).unwrap_or(self.buffer.len());
        if at > 0 {
            call.push(&self.take(at));
            self.call = Some(call);
            return;
        }
        let first = self.buffer.chars().next().map_or(0, char::len_utf8);
        let structural = match lex(&self.buffer) {
            Lexed::No => None,
            Lexed::Partial { marked } => match end {
                None => {
                    self.call = Some(call);
                    return;
                }
                // A closer that was cut.
                Some(_) if marked || self.buffer.starts_with("</") => {
                    self.discard();
                    self.call = Some(call);
                    return;
                }
                Some(_) => None,
            },
            Lexed::Tag(len, tag) => match self.is_structural(&call, &tag, len, end) {
                None => {
                    self.waiting = true;
                    self.call = Some(call);
                    return;
                }
                Some(true) => Some((len, tag)),
                Some(false) => None,
            },
        };
        let Some((len, tag)) = structural else {
            call.push(&self.take(first));
            self.call = Some(call);
            return;
        };
        self.take(len);
        self.apply(call, tag);
    }

    /// In a call that a grammar holds.
    fn in_held_call(&mut self, mut call: Call, end: Option<End>) {
        let marker = self.next_marker();
        let before = &self.buffer[..marker.unwrap_or(self.buffer.len())];
        // A tag may begin at the end of what there is.
        let begun = before.strip_suffix("</").or_else(|| before.strip_suffix('<'));
        let (len, closes) = (before.len(), before == "</");
        let mut plain = begun.unwrap_or(before).len();
        if plain == 0 && marker.is_some() {
            match lex(&self.buffer) {
                Lexed::Tag(len, tag) => {
                    self.take(len);
                    return self.apply(call, tag);
                }
                Lexed::Partial { .. } if end.is_some() => self.discard(),
                Lexed::Partial { .. } => {}
                Lexed::No => plain = len + DSML.len(),
            }
        } else if plain == 0 && end.is_some() {
            // A closer that was cut.
            if closes {
                self.discard();
            } else {
                plain = len;
            }
        }
        if plain > 0 {
            call.push(&self.take(plain));
        }
        self.call = Some(call);
    }

    fn apply(&mut self, mut call: Call, tag: Tag) {
        let decode = self.options.decode_entities;
        match tag.name {
            // A closer that lost its slash has no name.
            Name::Parameter if tag.closes || (tag.called.is_none() && !call.open.is_empty()) => {
                close_parameter(&mut call, false, decode);
            }
            Name::Unknown if tag.closes && !call.open.is_empty() => {
                close_parameter(&mut call, false, decode);
            }
            Name::Parameter => open_parameter(&mut call, tag, decode),
            Name::Unknown if !tag.closes => open_parameter(&mut call, tag, decode),
            Name::Invoke if !tag.closes && tag.called.is_some() => {
                self.end_call(call, false);
                self.in_block |= self.state == State::Block;
                self.begin_call(tag, false);
                return;
            }
            Name::Invoke | Name::Unknown => return self.end_call(call, false),
            Name::Block => {
                self.end_call(call, false);
                if tag.closes {
                    self.close_block();
                } else {
                    self.in_block = true;
                    self.state = State::Block;
                }
                return;
            }
        }
        self.call = Some(call);
    }
}
