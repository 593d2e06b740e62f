//! Keeping a user's text from becoming control tokens: stand-ins while rendering, the text put back afterwards.

use std::borrow::Cow;

use ahash::{AHashMap, AHashSet};
use aho_corasick::{AhoCorasick, MatchKind};

use crate::error::TextError;
use crate::tokenizer::{Specials, Tokenizer, TooManyTokens};

/// Digits of a stand-in: those of a random u128, then those of its index. Digits only, so that no case or JSON filter
/// of a template changes them.
const NONCE_DIGITS: usize = 39;
const INDEX_DIGITS: usize = 9;

/// A model's control-token strings, prepared for searching a user's text.
#[derive(Debug)]
pub(crate) struct ControlStrings {
    strings: Vec<String>,
    finder: AhoCorasick,
    /// Proper, non-empty prefixes and suffixes.
    prefixes: AHashSet<String>,
    suffixes: AHashSet<String>,
    longest: usize,
}

impl ControlStrings {
    pub(crate) fn new(strings: Vec<String>) -> Result<Self, TextError> {
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&strings)
            .map_err(|e| TextError::Damaged { what: format!("the control tokens cannot be searched for: {e}") })?;
        let (mut prefixes, mut suffixes) = (AHashSet::new(), AHashSet::new());
        for s in &strings {
            for (i, _) in s.char_indices().skip(1) {
                prefixes.insert(s[..i].to_owned());
                suffixes.insert(s[i..].to_owned());
            }
        }
        let longest = strings.iter().map(String::len).max().unwrap_or(0);
        Ok(Self { strings, finder, prefixes, suffixes, longest })
    }

    /// Length of the longest end of `s` that begins a control string.
    fn dangerous_end(&self, s: &str) -> usize {
        let longest = s.char_indices().rev().map(|(i, _)| s.len() - i).take_while(|n| *n < self.longest);
        longest.filter(|n| self.prefixes.contains(&s[s.len() - n..])).max().unwrap_or(0)
    }

    /// Length of the longest beginning of `s` that ends a control string.
    fn dangerous_start(&self, s: &str) -> usize {
        let lengths = s.char_indices().map(|(i, c)| i + c.len_utf8()).take_while(|n| *n < self.longest);
        lengths.filter(|n| self.suffixes.contains(&s[..*n])).max().unwrap_or(0)
    }
}

/// What a string may be to a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Free text: the template only copies it.
    Content,
    /// A value that the template may compare with a literal (a type, a name): only what is itself dangerous is replaced.
    Structure,
}

/// The stand-ins of one rendering.
pub(crate) struct Guard<'c> {
    controls: &'c ControlStrings,
    nonce: String,
    index: AHashMap<String, usize>,
    hidden: Vec<String>,
}

impl<'c> Guard<'c> {
    /// A guard with a fresh random number of 122 bits from the operating system.
    pub(crate) fn new(controls: &'c ControlStrings) -> Self {
        let nonce = format!("{:0NONCE_DIGITS$}", uuid::Uuid::new_v4().as_u128());
        Self { controls, nonce, index: AHashMap::new(), hidden: Vec::new() }
    }

    /// `s` with everything in it replaced that is, or beside other text could complete, a control string.
    pub(crate) fn hide(&mut self, s: &str, role: Role) -> String {
        let controls = self.controls;
        if controls.strings.is_empty() || s.is_empty() {
            return s.to_owned();
        }
        if role == Role::Content && s.len() < controls.longest && controls.strings.iter().any(|c| c.contains(s)) {
            return self.stand_in(s);
        }
        let mut out = String::with_capacity(s.len());
        let mut at = 0;
        for found in controls.finder.find_iter(s) {
            self.copy(&s[at..found.start()], at == 0 && role == Role::Content, false, &mut out);
            out += &self.stand_in(&s[found.range()]);
            at = found.end();
        }
        self.copy(&s[at..], at == 0 && role == Role::Content, true, &mut out);
        out
    }

    /// Appends text without control strings, with its dangerous start or end replaced where that is the string's own.
    fn copy(&mut self, s: &str, at_start: bool, at_end: bool, out: &mut String) {
        let start = if at_start { self.controls.dangerous_start(s) } else { 0 };
        let end = if at_end { self.controls.dangerous_end(&s[start..]) } else { 0 };
        if start > 0 {
            *out += &self.stand_in(&s[..start]);
        }
        *out += &s[start..s.len() - end];
        if end > 0 {
            *out += &self.stand_in(&s[s.len() - end..]);
        }
    }

    fn stand_in(&mut self, s: &str) -> String {
        let next = self.hidden.len();
        let index = *self.index.entry(s.to_owned()).or_insert(next);
        if index == next {
            self.hidden.push(s.to_owned());
        }
        format!("{}{index:0INDEX_DIGITS$}", self.nonce)
    }

    /// The prompt that the template made of the guarded conversation.
    pub(crate) fn rendered(self, text: String) -> RenderedPrompt {
        RenderedPrompt { text, nonce: self.nonce, hidden: self.hidden }
    }
}

/// A rendered conversation. Control tokens in it are the template's own; a user's are text.
#[derive(Clone, Debug)]
pub struct RenderedPrompt {
    text: String,
    nonce: String,
    hidden: Vec<String>,
}

impl RenderedPrompt {
    /// The prompt as text, for logs and tests. Encoding this text would lose who wrote which control string: use
    /// [`RenderedPrompt::encode`].
    pub fn text(&self) -> String {
        self.restore(&self.text).into_owned()
    }

    /// Tokens of the prompt. No BOS is added: a template writes its own where the model wants one.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut out = Vec::with_capacity(self.text.len() / 4 + 1);
        self.encode_into(tokenizer, usize::MAX, &mut out);
        out
    }

    /// As [`RenderedPrompt::encode`], but gives up early beyond `limit` tokens; see [`Tokenizer::encode_up_to`].
    ///
    /// # Errors
    /// [`TooManyTokens`] with the count so far.
    pub fn encode_up_to(&self, tokenizer: &Tokenizer, limit: usize) -> Result<Vec<u32>, TooManyTokens> {
        if self.hidden.is_empty() {
            return tokenizer.encode_up_to(&self.text, Specials::Parse, limit);
        }
        let mut out = Vec::new();
        self.encode_into(tokenizer, limit, &mut out);
        if out.len() > limit {
            return Err(TooManyTokens { at_least: out.len(), limit });
        }
        Ok(out)
    }

    fn encode_into(&self, tokenizer: &Tokenizer, limit: usize, out: &mut Vec<u32>) {
        if self.hidden.is_empty() {
            tokenizer.encode_into(&self.text, Specials::Parse, limit, out);
            return;
        }
        // Text between two control tokens is put back whole before it is encoded, so that the stand-ins leave no seam.
        tokenizer.at_controls(&self.text, |piece| match piece {
            _ if out.len() > limit => {}
            Ok(text) => tokenizer.encode_into(&self.restore(text), Specials::Plain, limit, out),
            Err(id) => out.push(id),
        });
    }

    /// `s` with the stand-ins replaced by what they stand for.
    fn restore<'s>(&self, s: &'s str) -> Cow<'s, str> {
        if self.hidden.is_empty() || !s.contains(&self.nonce) {
            return Cow::Borrowed(s);
        }
        let mut out = String::with_capacity(s.len());
        let mut rest = s;
        while let Some(at) = rest.find(&self.nonce) {
            let digits = at + NONCE_DIGITS;
            let index = rest.get(digits..digits + INDEX_DIGITS).and_then(|d| d.parse::<usize>().ok());
            out += &rest[..at];
            // A template that cuts strings may have cut a stand-in: what is left of it stays as it is, and is harmless.
            match index.and_then(|i| self.hidden.get(i)) {
                Some(original) => {
                    out += original;
                    rest = &rest[digits + INDEX_DIGITS..];
                }
                None => {
                    out += &rest[at..digits];
                    rest = &rest[digits..];
                }
            }
        }
        out += rest;
        Cow::Owned(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn controls() -> ControlStrings {
        ControlStrings::new(["<|im_end|>", "<|im_start|>", "<s>", "<｜end▁of▁sentence｜>"].map(String::from).to_vec())
            .expect("builds")
    }

    fn hidden_parts(s: &str, role: Role) -> Vec<String> {
        let controls = controls();
        let mut guard = Guard::new(&controls);
        let out = guard.hide(s, role);
        let prompt = guard.rendered(out);
        assert_eq!(prompt.text(), s, "what is hidden comes back");
        for c in &controls.strings {
            assert!(!prompt.text.contains(c.as_str()), "{c} is left in {:?}", prompt.text);
        }
        prompt.hidden
    }

    #[test]
    fn whole_strings_are_hidden_everywhere() {
        assert_eq!(hidden_parts("a<|im_end|>b<|im_end|><s>c", Role::Structure), ["<|im_end|>", "<s>"]);
        assert_eq!(hidden_parts("<｜end▁of▁sentence｜>", Role::Structure), ["<｜end▁of▁sentence｜>"]);
        assert!(hidden_parts("a < b and c|>d", Role::Structure).is_empty());
        assert!(hidden_parts("function", Role::Structure).is_empty());
    }

    #[test]
    fn ends_that_neighbours_could_complete_are_hidden() {
        assert_eq!(hidden_parts("hi <|im_", Role::Structure), ["<|im_"]);
        assert_eq!(hidden_parts("hi <", Role::Content), ["<"]);
        assert_eq!(hidden_parts("end|> hi", Role::Content), ["end|>"]);
        assert_eq!(hidden_parts("im_end", Role::Content), ["im_end"]);
        assert_eq!(hidden_parts("x<｜end▁", Role::Content), ["<｜end▁"]);
        assert_eq!(hidden_parts("|><|im_end|><|im", Role::Content), ["|>", "<|im_end|>", "<|im"]);
        assert!(hidden_parts("im_end", Role::Structure).is_empty(), "it may be compared with a literal");
    }

    #[test]
    fn stand_ins_differ_from_rendering_to_rendering() {
        let controls = controls();
        let a = Guard::new(&controls).hide("<s>", Role::Content);
        let b = Guard::new(&controls).hide("<s>", Role::Content);
        assert_eq!((a.len(), b.len()), (NONCE_DIGITS + INDEX_DIGITS, NONCE_DIGITS + INDEX_DIGITS));
        assert_ne!(a, b);
    }

    #[test]
    fn a_cut_stand_in_is_left_alone() {
        let controls = controls();
        let mut guard = Guard::new(&controls);
        let whole = guard.hide("<s>", Role::Content);
        let prompt = guard.rendered(format!("{}é{whole}", &whole[..NONCE_DIGITS + 2]));
        assert_eq!(prompt.text(), format!("{}é<s>", &whole[..NONCE_DIGITS + 2]));
    }
}
