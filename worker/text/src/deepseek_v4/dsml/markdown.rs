//! Code in Markdown: tags inside are quoted, and stay text.

use super::tags::may_begin;

/// Whether the text is inside a code block or a code span. A span ends with its line, so that a stray backtick does not hide a
/// call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Code {
    fence: Option<(char, usize)>,
    span: usize,
}

impl Code {
    /// Length of the beginning of `text` that is certainly not a tag's; what it opens or closes is remembered. It ends before
    /// a character that may begin a tag, and before backticks that may go on. `fresh`: the line has had nothing but white
    /// space; `end`: nothing follows.
    pub(super) fn scan(&mut self, text: &str, mut fresh: bool, end: bool) -> usize {
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            if matches!(c, '`' | '~') {
                let run = text[at..].chars().take_while(|x| *x == c).count();
                if at + run == text.len() && !end {
                    return at;
                }
                self.ticks(c, run, fresh);
                at += run;
                fresh = false;
                continue;
            }
            if may_begin(c) && self.fence.is_none() && self.span == 0 {
                return at;
            }
            if c == '\n' {
                self.span = 0;
                fresh = true;
            } else if !c.is_whitespace() {
                fresh = false;
            }
            at += c.len_utf8();
        }
        at
    }

    fn ticks(&mut self, c: char, run: usize, fresh: bool) {
        match self.fence {
            Some((open, len)) if fresh && open == c && run >= len => self.fence = None,
            Some(_) => {}
            None if fresh && run >= 3 => self.fence = Some((c, run)),
            None if c == '`' && self.span == 0 => self.span = run,
            None if c == '`' && self.span == run => self.span = 0,
            None => {}
        }
    }
}
