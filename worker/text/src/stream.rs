//! Bytes in, text out: UTF-8 that arrives in pieces, behind the stop matcher.

use crate::stop::StopMatcher;

/// What [`TextStream::push`] releases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Text that may be shown now.
    pub text: String,
    /// A stop string is complete; `text` is the last of the output.
    pub stopped: bool,
}

/// Streaming detokeniser of one choice. The texts released, joined, equal `String::from_utf8_lossy` of the output bytes
/// (all bytes, or those before the first stop string), however the bytes were cut.
#[derive(Clone, Debug)]
pub struct TextStream {
    matcher: StopMatcher,
    /// Bytes past the matcher that do not yet make a character: at most 3 between calls.
    pending: Vec<u8>,
}

impl TextStream {
    /// A stream that ends at the first of `stops`. See [`StopMatcher`] for which is first.
    pub fn new(stops: Vec<Vec<u8>>) -> Self {
        Self { matcher: StopMatcher::new(stops), pending: Vec::new() }
    }

    /// Takes the bytes of one or more tokens. After a stop, further bytes are ignored.
    pub fn push(&mut self, bytes: &[u8]) -> Pushed {
        if self.matcher.stopped() {
            return Pushed { text: String::new(), stopped: true };
        }
        let stopped = self.matcher.push(bytes, &mut self.pending);
        let mut text = take_complete(&mut self.pending);
        if stopped {
            text.push_str(&String::from_utf8_lossy(&std::mem::take(&mut self.pending)));
        }
        Pushed { text, stopped }
    }

    /// True when bytes of a character are held that is not complete.
    pub(crate) fn is_inside_character(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Releases the bytes of an incomplete character as U+FFFD if `next` does not go on with it; then the same bytes pushed
    /// after it give the same text as without this call. Only for a stream without stop strings, which holds no other bytes.
    pub(crate) fn break_off(&mut self, next: &[u8]) -> String {
        let held = self.pending.len();
        let broken = held > 0 && {
            let joined: Vec<u8> = self.pending.iter().chain(next).copied().collect();
            // What is held is the beginning of a character: when not all of it is refused together, nothing is.
            joined.utf8_chunks().next().is_some_and(|c| c.valid().is_empty() && c.invalid().len() == held)
        };
        // A short `next` may leave the character incomplete, which is an invalid end of the same length only when it is empty.
        if broken && !next.is_empty() {
            return String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned();
        }
        String::new()
    }

    /// The output has ended: the text that was still held back. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        self.matcher.finish(&mut self.pending);
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Takes all of `pending` but an incomplete character at its end; what can never become one turns into U+FFFD, one for
/// each maximal part as `from_utf8_lossy` does.
fn take_complete(pending: &mut Vec<u8>) -> String {
    let incomplete = pending.utf8_chunks().last().map_or(0, |last| {
        let tail = last.invalid();
        match std::str::from_utf8(tail) {
            Err(e) if e.error_len().is_none() => tail.len(),
            _ => 0,
        }
    });
    let tail = pending.split_off(pending.len() - incomplete);
    let text = String::from_utf8_lossy(pending).into_owned();
    *pending = tail;
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop;
    use crate::test_support::Rng;

    fn stream(all: &[u8], stops: &[Vec<u8>], mut cut: impl FnMut() -> usize) -> (String, bool) {
        let mut s = TextStream::new(stops.to_vec());
        let (mut text, mut stopped, mut at) = (String::new(), false, 0);
        while at < all.len() {
            let n = cut().clamp(1, all.len() - at);
            let p = s.push(&all[at..at + n]);
            text += &p.text;
            stopped |= p.stopped;
            at += n;
        }
        text += &s.finish();
        assert_eq!(s.finish(), "", "finish is final");
        (text, stopped)
    }

    #[test]
    fn characters_are_whole_and_released_at_once() {
        let mut s = TextStream::new(Vec::new());
        let bytes = "👩‍💻".as_bytes();
        let mut texts = Vec::new();
        for b in bytes {
            texts.push(s.push(&[*b]).text);
        }
        let shown: Vec<_> = texts.iter().filter(|t| !t.is_empty()).cloned().collect();
        assert_eq!(shown, ["👩", "\u{200d}", "💻"]);
        assert_eq!(texts[3], "👩", "not later than its last byte");
    }

    #[test]
    fn an_incomplete_character_is_broken_off_by_what_does_not_go_on_with_it() {
        for (held, next, broken) in [
            (&b"\xe6"[..], &b"</think>"[..], true),
            (b"\xe6\xbc", b"\xef\xbd\x9c", true),
            (b"\xf0\x9f\x98", b"a", true),
            (b"\xe0", b"\x80", true),
            (b"\xe6", b"\xbc\xa2", false),
            (b"\xe6", b"\xbc", false),
            (b"\xf0\x9f", b"\x98\x80x", false),
            // The character goes on and breaks inside of the next bytes, whose text that is then.
            (b"\xf0", b"\x9fx", false),
            (b"\xe6", b"", false),
            (b"", b"\xe6", false),
        ] {
            let mut s = TextStream::new(Vec::new());
            assert_eq!(s.push(held).text, "");
            let text = s.break_off(next);
            assert_eq!(text, if broken { "\u{fffd}" } else { "" }, "{held:?} {next:?}");
            let all = text + &s.push(next).text + &s.finish();
            assert_eq!(all, String::from_utf8_lossy(&[held, next].concat()), "{held:?} {next:?}");
        }
    }

    #[test]
    fn invalid_bytes_are_replaced_as_in_the_whole() {
        for bytes in [
            &b"a\xffb"[..],
            b"\xe2\x82",
            b"\xe2\x82\x41",
            b"\xf0\x9f\x98",
            b"\xc0\x80",
            b"\xed\xa0\x80z",
            b"\xf4\x90\x80\x80",
        ] {
            for step in 1..=4 {
                assert_eq!(stream(bytes, &[], || step).0, String::from_utf8_lossy(bytes), "{bytes:?} by {step}");
            }
        }
    }

    #[test]
    fn a_stop_may_begin_inside_a_character() {
        // The last two bytes of € and "x".
        let stops = [vec![0x82, 0xac, b'x']];
        for step in 1..6 {
            assert_eq!(stream("a€x".as_bytes(), &stops, || step), ("a\u{fffd}".into(), true));
            assert_eq!(stream("a€y".as_bytes(), &stops, || step), ("a€y".into(), false));
        }
    }

    #[test]
    fn random_splits_join_to_the_unstreamed_text() {
        let alphabet: Vec<Vec<u8>> = [
            "a",
            "b",
            " ",
            "\n",
            "é",
            "漢",
            "字",
            "한",
            "😀",
            "👩‍💻",
            "🇫🇷",
            "\u{200d}",
            "\u{fe0f}",
            "e\u{301}",
            "<|",
            "|>",
        ]
        .iter()
        .map(|s| s.as_bytes().to_vec())
        .chain([vec![0xff], vec![0xe2, 0x82], vec![0xf0, 0x9f], vec![0x80]])
        .collect();
        let mut rng = Rng::new(11);
        let mut stopped_cases = 0;
        for _ in 0..20_000 {
            let all: Vec<u8> = (0..rng.below(14)).flat_map(|_| alphabet[rng.below(alphabet.len())].clone()).collect();
            let stops: Vec<Vec<u8>> = (0..rng.below(4))
                .map(|_| {
                    if all.is_empty() || rng.below(2) == 0 {
                        return alphabet[rng.below(alphabet.len())].clone();
                    }
                    // Part of the text itself, cut anywhere, inside characters too.
                    let start = rng.below(all.len());
                    all[start..(start + 1 + rng.below(6)).min(all.len())].to_vec()
                })
                .collect();
            let (bytes, stopped) = stop::tests::reference(&all, &stops);
            let got = stream(&all, &stops, || 1 + rng.below(6));
            assert_eq!(got, (String::from_utf8_lossy(&bytes).into_owned(), stopped), "{stops:?} in {all:?}");
            stopped_cases += usize::from(stopped);
        }
        assert!((4_000..16_000).contains(&stopped_cases), "the cases are lopsided: {stopped_cases}");
    }
}
