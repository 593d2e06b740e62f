//! What a tag is: a call's, the model's slip, or text.

use super::super::End;
use super::super::tags::{Lexed, Name, Tag, lex, may_begin};
use super::Parser;
use super::call::Call;

/// What to do with a tag in content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Text,
    Drop,
    Enter,
    Wait,
}

/// The next thing after a tag.
enum Next {
    Nothing,
    Undecided,
    Tag(Tag, usize),
    Brace,
    Prose,
}

impl Parser {
    /// What follows after `len` bytes of the buffer.
    fn next(&self, len: usize) -> Next {
        let rest = &self.buffer[len..];
        let trimmed = rest.trim_start();
        let offset = self.buffer.len() - trimmed.len();
        match trimmed.chars().next() {
            None => Next::Nothing,
            Some('{') => Next::Brace,
            Some(c) if may_begin(c) => match lex(trimmed) {
                Lexed::No => Next::Prose,
                Lexed::Partial { .. } => Next::Undecided,
                Lexed::Tag(n, tag) => Next::Tag(tag, offset + n),
            },
            Some(_) => Next::Prose,
        }
    }

    /// What a tag in content is. A tag is a call's when a call goes on after it; a lone one at the beginning of a line is the
    /// model's slip and not shown; a lone one in a sentence is text.
    pub(super) fn judge(&self, tag: &Tag, len: usize, end: Option<End>) -> Verdict {
        let lone = if tag.marked && self.fresh { Verdict::Drop } else { Verdict::Text };
        if tag.closes {
            return if tag.marked || self.after_call { Verdict::Drop } else { Verdict::Text };
        }
        let offered = |t: &Tag| t.called.as_ref().is_some_and(|n| self.options.tools.contains(n));
        match tag.name {
            Name::Parameter | Name::Unknown => lone,
            Name::Block if tag.self_closed => lone,
            Name::Block => match self.next(len) {
                Next::Nothing | Next::Undecided if end.is_none() => Verdict::Wait,
                Next::Nothing | Next::Undecided if tag.marked && self.fresh => Verdict::Enter,
                Next::Tag(next, _) if next.marked && tag.marked => Verdict::Enter,
                Next::Tag(next, _) if next.name == Name::Invoke && !next.closes && next.called.is_some() => {
                    let known = tag.marked || next.marked || self.options.tools.is_empty() || offered(&next);
                    if known { Verdict::Enter } else { Verdict::Text }
                }
                _ => lone,
            },
            Name::Invoke if tag.called.is_none() => lone,
            Name::Invoke if !tag.marked && !offered(tag) && !self.options.tools.is_empty() => Verdict::Text,
            Name::Invoke if tag.self_closed => Verdict::Enter,
            Name::Invoke => match self.next(len) {
                Next::Nothing | Next::Undecided if end.is_none() => Verdict::Wait,
                Next::Nothing | Next::Undecided => {
                    if tag.marked && self.fresh {
                        Verdict::Enter
                    } else {
                        lone
                    }
                }
                Next::Tag(..) | Next::Brace => Verdict::Enter,
                Next::Prose => lone,
            },
        }
    }

    /// Whether a tag inside a call is the call's own or part of a value; `None` when what follows must tell.
    pub(super) fn is_structural(&self, call: &Call, tag: &Tag, len: usize, end: Option<End>) -> Option<bool> {
        let Some(parameter) = call.open.last() else {
            // Inside a JSON body, only tags of the call's own kind end it.
            return Some(tag.marked || !call.marked || !call.stray.trim_start().starts_with('{'));
        };
        if tag.marked || !parameter.marked {
            return Some(match tag.name {
                Name::Block => tag.closes,
                Name::Unknown => tag.closes,
                Name::Invoke | Name::Parameter => true,
            });
        }
        // A plain closer in a marked call: a value may well contain it. It counts when the call goes on, or the text ends.
        if !tag.closes || tag.name == Name::Unknown {
            return Some(false);
        }
        let (mut level, mut at) = (tag.name, len);
        loop {
            match self.next(at) {
                Next::Nothing | Next::Undecided => return end.map(|e| e == End::Stop),
                Next::Brace | Next::Prose => return Some(level == Name::Block),
                Next::Tag(next, after) => {
                    let goes_on = match (level, next.name, next.closes) {
                        (Name::Parameter, Name::Parameter, closes) => !closes && next.called.is_some(),
                        (Name::Parameter, Name::Invoke | Name::Block, _) => true,
                        (Name::Invoke, Name::Invoke, closes) => !closes,
                        (Name::Invoke, Name::Block, closes) => closes,
                        _ => false,
                    };
                    if next.marked || !goes_on || !next.closes {
                        return Some(goes_on && next.marked);
                    }
                    (level, at) = (next.name, after);
                }
            }
        }
    }
}
