//! Where each token of an answer went, told from where the parser put its text.

use std::collections::VecDeque;

use super::dsml::Kind;
use crate::answer::Part;

/// Tokens whose place is not certain yet, and the spans of text that were placed.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// For each waiting token, where its text ends; `None`: it has none.
    tokens: VecDeque<Option<usize>>,
    /// End and kind of each span.
    spans: VecDeque<(usize, Kind)>,
    /// End of the last token that was settled.
    from: usize,
}

impl Ledger {
    /// A token whose text ends at byte `end` of all text; `None` when it shows nothing.
    pub(super) fn token(&mut self, end: Option<usize>) {
        self.tokens.push_back(end);
    }

    /// The last token's text ends at byte `end`: what follows does not go on with its unfinished character.
    pub(super) fn last_ends_at(&mut self, end: usize) {
        if let Some(last) = self.tokens.iter_mut().rev().flatten().next() {
            *last = end;
        }
    }

    /// The next `len` bytes are of this kind.
    pub(super) fn place(&mut self, len: usize, kind: Kind) {
        if len == 0 {
            return;
        }
        let start = self.placed();
        match self.spans.back_mut() {
            Some((end, last)) if *last == kind => *end += len,
            _ => self.spans.push_back((start + len, kind)),
        }
    }

    fn placed(&self) -> usize {
        self.spans.back().map_or(self.from, |(end, _)| *end)
    }

    /// The tokens that are certain now. `last`: nothing follows; what white space at the end is, and text that was not placed
    /// is hidden.
    pub(super) fn settle(&mut self, last: Option<Part>) -> Vec<Part> {
        let mut settled = Vec::new();
        while let Some(token) = self.tokens.front() {
            let Some(end) = *token else {
                settled.push(Part::Hidden);
                self.tokens.pop_front();
                continue;
            };
            if self.placed() < end && last.is_none() {
                break;
            }
            let Some(part) = self.part(end).or(last) else { break };
            settled.push(part);
            self.tokens.pop_front();
            self.from = end.max(self.from);
            while self.spans.len() > 1 && self.spans.front().is_some_and(|(to, _)| *to <= self.from) {
                self.spans.pop_front();
            }
        }
        settled
    }

    /// The part of a token that ends at `end`: what any of its bytes are. White space is what follows it; `None` when nothing
    /// did yet.
    fn part(&self, end: usize) -> Option<Part> {
        let mut start = 0;
        let (mut space, mut slip) = (false, false);
        let mut part = Part::Hidden;
        for (to, kind) in &self.spans {
            let inside = *to > self.from && start < end;
            match kind {
                Kind::Content if inside || space => return Some(Part::Text),
                Kind::Reasoning if inside => part = Part::Reasoning,
                // Such a token would show its markup beside its white space.
                Kind::Slip if inside => (slip, space) = (true, false),
                Kind::Space if inside && !slip => space = true,
                Kind::Space | Kind::Slip => {}
                _ if !inside && space => return Some(part),
                _ => {}
            }
            start = *to;
        }
        (!space || part == Part::Reasoning).then_some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deepseek_v4_tokens_are_settled_in_order_and_once() {
        let mut l = Ledger::default();
        // "ab" thought, "</think>" markup, "x" and two line breaks, then a tag.
        for end in [Some(2), Some(10), Some(11), None, Some(13)] {
            l.token(end);
        }
        assert_eq!(l.settle(None), []);
        l.place(2, Kind::Reasoning);
        assert_eq!(l.settle(None), [Part::Reasoning]);
        l.place(8, Kind::Markup);
        l.place(1, Kind::Content);
        l.place(1, Kind::Space);
        l.place(0, Kind::Content);
        l.place(1, Kind::Space);
        assert_eq!(l.settle(None), [Part::Hidden, Part::Text, Part::Hidden]);
        l.token(Some(20));
        assert_eq!(l.settle(None), []);
        l.place(7, Kind::Markup);
        assert_eq!(l.settle(None), [Part::Hidden, Part::Hidden], "white space before a call is not shown");
        l.token(Some(22));
        l.place(2, Kind::Space);
        assert_eq!(l.settle(None), []);
        l.token(Some(25));
        l.place(3, Kind::Content);
        assert_eq!(l.settle(None), [Part::Text, Part::Text]);
        l.token(Some(30));
        l.place(1, Kind::Space);
        assert_eq!(l.settle(Some(Part::Hidden)), [Part::Hidden]);
        assert_eq!(l.settle(Some(Part::Text)), []);
    }

    #[test]
    fn deepseek_v4_an_unfinished_character_ends_with_its_token() {
        let mut l = Ledger::default();
        // Two tokens of one byte that are shown as one replacement of three, then a tag.
        for end in [Some(1), None, Some(1)] {
            l.token(end);
        }
        l.last_ends_at(3);
        l.token(Some(11));
        l.place(3, Kind::Reasoning);
        assert_eq!(l.settle(None), [Part::Reasoning, Part::Hidden, Part::Reasoning]);
        l.place(8, Kind::Markup);
        assert_eq!(l.settle(None), [Part::Hidden]);
    }

    #[test]
    fn deepseek_v4_a_token_across_two_kinds_is_text_before_it_is_anything_else() {
        let mut l = Ledger::default();
        l.token(Some(4));
        l.place(2, Kind::Content);
        assert_eq!(l.settle(None), []);
        l.place(2, Kind::Space);
        assert_eq!(l.settle(None), [Part::Text]);
        l.token(Some(8));
        l.place(3, Kind::Markup);
        l.place(1, Kind::Content);
        assert_eq!(l.settle(None), [Part::Text]);
    }
}
