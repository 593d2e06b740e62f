//! A call being read: its parameters and their values.

use super::super::tags::Tag;
use super::super::value::{decode_entities, json_text, string_text};

/// An open parameter.
#[derive(Debug)]
pub(super) struct Parameter {
    pub(super) name: Option<String>,
    pub(super) string: Option<bool>,
    /// Opened with DSML's marker: plain tags inside are its value.
    pub(super) marked: bool,
    pub(super) body: String,
    /// Parameters inside it: it is an object.
    pub(super) children: Vec<(String, String)>,
    pub(super) in_string: bool,
    pub(super) escaped: bool,
}

impl Parameter {
    pub(super) fn push(&mut self, text: &str) {
        for c in text.chars() {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = self.in_string,
                '"' => self.in_string = !self.in_string,
                _ => {}
            }
        }
        self.body += text;
    }
}

/// An open call.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) name: String,
    pub(super) marked: bool,
    /// A grammar holds it, see [`super::Options::held`].
    pub(super) held: bool,
    /// Names and JSON texts.
    pub(super) parameters: Vec<(String, String)>,
    /// Text between its tags: some models write one JSON object there.
    pub(super) stray: String,
    pub(super) open: Vec<Parameter>,
}

impl Call {
    /// Takes what is no tag.
    pub(super) fn push(&mut self, text: &str) {
        match self.open.last_mut() {
            Some(p) => p.push(text),
            None => self.stray += text,
        }
    }
}

pub(super) fn open_parameter(call: &mut Call, tag: Tag, decode: bool) {
    if let Some(p) = call.open.last() {
        let nests = p.string.is_none() && p.body.trim().is_empty();
        if !nests {
            close_parameter(call, true, decode);
        }
    }
    call.open.push(Parameter {
        name: tag.called,
        string: tag.string,
        marked: tag.marked,
        body: tag.value.unwrap_or_default(),
        children: Vec::new(),
        in_string: false,
        escaped: false,
    });
    if tag.self_closed {
        close_parameter(call, false, decode);
    }
}

/// Closes the innermost parameter; false when none is open. `implied`: its closer was forgotten, so the line break before
/// the next tag is not its own.
pub(super) fn close_parameter(call: &mut Call, implied: bool, decode: bool) -> bool {
    let Some(p) = call.open.pop() else { return false };
    let body = if implied { p.body.trim_end() } else { &p.body };
    let value = if !p.children.is_empty() {
        object(&p.children)
    } else {
        let string = || string_text(&if decode { decode_entities(body) } else { body.to_owned() });
        match p.string {
            Some(false) => json_text(body).unwrap_or_else(string),
            _ => string(),
        }
    };
    let Some(name) = p.name else { return true };
    let list = match call.open.last_mut() {
        Some(parent) => &mut parent.children,
        None => &mut call.parameters,
    };
    list.push((name, value));
    true
}

/// The text of an object. Said twice, the last value of a member counts, in the first one's place.
pub(super) fn object(members: &[(String, String)]) -> String {
    let first = |at: usize| members[..at].iter().all(|(k, _)| *k != members[at].0);
    let last = |key: &str| members.iter().rev().find(|(k, _)| k == key).map_or("", |(_, v)| v.as_str());
    let members: Vec<String> = (0..members.len())
        .filter(|at| first(*at))
        .map(|at| format!("{}:{}", string_text(&members[at].0), last(&members[at].0)))
        .collect();
    format!("{{{}}}", members.join(","))
}
