//! Calls told while they are read: the name at once, arguments as far as nothing can change them.
//!
//! What is told of a call, joined, is an object equal to the one that the complete call has. It may have a member twice, of
//! which the last counts, as for every reader of JSON.

use super::super::Event;
use super::super::value::string_text;
use super::Parser;
use super::call::Call;

/// How much of a call was told.
#[derive(Debug, Default)]
pub(super) struct Live {
    begun: bool,
    /// Parameters told from beginning to end.
    members: usize,
    /// The next one has begun to be told.
    inside: bool,
    /// Of its body, and of its value's text, which begins with a quote.
    body: usize,
    text: usize,
}

impl Live {
    /// What is certain now and was not told.
    fn news(&mut self, call: &Call, decode: bool) -> String {
        let mut out = String::new();
        for (name, value) in &call.parameters[self.members..] {
            if !self.inside {
                self.begin(name, &mut out);
            }
            out += &value[self.text..];
            (self.inside, self.body, self.text) = (false, 0, 0);
            self.members += 1;
        }
        // An open one is told only when it is a string that cannot become anything else.
        let [open] = call.open.as_slice() else { return out };
        let Some(name) = open.name.as_ref().filter(|_| open.string == Some(true) && !decode) else { return out };
        if !self.inside {
            self.begin(name, &mut out);
            out.push('"');
            (self.inside, self.text) = (true, 1);
        }
        // White space is not part of a value whose closer is missing.
        let certain = open.body.trim_end().len();
        if certain > self.body {
            let text = string_text(&open.body[self.body..certain]);
            let text = &text[1..text.len() - 1];
            out += text;
            self.body = certain;
            self.text += text.len();
        }
        out
    }

    fn begin(&self, name: &str, out: &mut String) {
        out.push(if self.members == 0 { '{' } else { ',' });
        *out += &string_text(name);
        out.push(':');
    }
}

impl Parser {
    /// Tells what is certain of the call that is being read.
    pub(super) fn tell(&mut self) {
        if self.options.live
            && let Some(call) = self.call.take()
        {
            self.tell_of(&call);
            self.call = Some(call);
        }
    }

    /// Tells what was not told of a complete call.
    pub(super) fn tell_rest(&mut self, call: &Call, arguments: &str) {
        if !self.options.live {
            return;
        }
        self.tell_of(call);
        let rest = if self.live.members == 0 { arguments } else { "}" };
        self.events.push(Event::Arguments(rest.to_owned()));
    }

    fn tell_of(&mut self, call: &Call) {
        if !self.is_certain() {
            return;
        }
        if !std::mem::replace(&mut self.live.begun, true) {
            self.events.push(Event::Begin(call.name.clone()));
        }
        let news = self.live.news(call, self.options.decode_entities);
        match self.events.last_mut() {
            _ if news.is_empty() => {}
            Some(Event::Arguments(last)) => *last += &news,
            _ => self.events.push(Event::Arguments(news)),
        }
    }

    /// True when what is being read repeats nobody, however it goes on.
    fn is_certain(&mut self) -> bool {
        let text = self.region.text.trim();
        self.region.certain |= !self.options.quoted.iter().any(|q| q.contains(text));
        self.region.certain
    }
}
