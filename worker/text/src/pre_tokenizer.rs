//! Pre-tokenizers: how text is cut into words before merging, as named by `tokenizer.ggml.pre`.
//!
//! Each is a list of stages. A stage cuts every piece of the stage before into its matches and what lies between them.
//! The stages are given by regular expressions in the models' own tokenizer files (quoted at each variant); they are
//! scanned by hand here because a backtracking engine gives up on, or takes gigabytes for, megabytes of spaces, and a
//! linear one lacks the look-ahead. Every scan looks at a character a bounded number of times per stage.

use crate::char_class::{LETTER, MARK, NUMBER, PUNCTUATION, SPACE, SYMBOL, of};

/// One stage; `match_len` is its regular expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// `\p{N}{1,n}` (n = `usize::MAX`: `\p{N}+`).
    Numbers(usize),
    /// `[0-9][0-9][0-9]`.
    ThreeAsciiDigits,
    /// `[\p{P}\$\+<=>\^~\|]+`.
    PunctuationRuns,
    /// `[一-龥぀-ゟ゠-ヿ]+`.
    CjkRuns,
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)`, and `|\s+`, which cuts nothing more:
    /// a single space that the others leave is a piece either way.
    Gpt2,
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,n}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`.
    Cl100k(usize),
    /// ``[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+``.
    DeepSeek,
}

/// Pre-tokenizers by their GGUF names. Those of one line cut alike.
const KNOWN: &[(&[&str], &[Stage])] = &[
    (
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        &[Stage::Numbers(1), Stage::Gpt2],
    ),
    (&["gpt-2", "phi-2", "mpt", "olmo", "jais"], &[Stage::Gpt2]),
    (&["llama-bpe", "llama3", "llama-v3", "falcon3"], &[Stage::Cl100k(3)]),
    (&["qwen2", "deepseek-r1-qwen", "megrez"], &[Stage::Cl100k(1)]),
    (&["deepseek-v3", "joyai-llm"], &[Stage::Numbers(3), Stage::CjkRuns, Stage::DeepSeek]),
    (&["default"], &[Stage::PunctuationRuns, Stage::Gpt2, Stage::Numbers(usize::MAX), Stage::ThreeAsciiDigits]),
];

/// A pre-tokenizer, chosen by name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PreTokenizer {
    stages: &'static [Stage],
    whole_words: bool,
}

impl PreTokenizer {
    /// The pre-tokenizer of this GGUF name, or `None` for one that is not implemented.
    pub(crate) fn by_name(name: &str) -> Option<Self> {
        let (names, stages) = KNOWN.iter().find(|(names, _)| names.contains(&name))?;
        Some(Self { stages, whole_words: names.contains(&"llama-bpe") })
    }

    /// Names that [`PreTokenizer::by_name`] knows, for messages.
    pub(crate) fn names() -> String {
        KNOWN.iter().flat_map(|(names, _)| *names).copied().collect::<Vec<_>>().join(", ")
    }

    /// True when a word that is in the vocabulary is that token, whatever the merges say (Llama 3's `ignore_merges`).
    pub(crate) fn whole_words(self) -> bool {
        self.whole_words
    }

    /// Calls `word` for every piece of `text`, in order; joined they are `text`.
    pub(crate) fn split<'t>(self, text: &'t str, word: &mut impl FnMut(&'t str)) {
        split(self.stages, text, word);
    }
}

fn split<'t>(stages: &[Stage], text: &'t str, word: &mut impl FnMut(&'t str)) {
    let Some((stage, later)) = stages.split_first() else {
        if !text.is_empty() {
            word(text);
        }
        return;
    };
    let (mut gap, mut at) = (0, 0);
    while let Some(c) = text[at..].chars().next() {
        let len = stage.match_len(&text[at..], c);
        if len == 0 {
            at += c.len_utf8();
            continue;
        }
        split(later, &text[gap..at], word);
        split(later, &text[at..at + len], word);
        at += len;
        gap = at;
    }
    split(later, &text[gap..], word);
}

/// Length of the longest prefix of `s` whose characters satisfy `f`.
fn run(s: &str, f: impl Fn(char) -> bool) -> usize {
    s.char_indices().find(|(_, c)| !f(*c)).map_or(s.len(), |(i, _)| i)
}

/// As [`run`], of at most `most` characters.
fn run_up_to(s: &str, most: usize, f: impl Fn(char) -> bool) -> usize {
    let mut len = 0;
    for c in s.chars().take(most) {
        if !f(c) {
            break;
        }
        len += c.len_utf8();
    }
    len
}

fn is(c: char, classes: u8) -> bool {
    of(c) & classes != 0
}

fn is_newline(c: char) -> bool {
    matches!(c, '\r' | '\n')
}

/// `'s|'t|'re|'ve|'m|'ll|'d`; with `fold`, in any case, where ſ (U+017F) is an s too.
fn contraction(s: &str, fold: bool) -> usize {
    let Some(rest) = s.strip_prefix('\'') else { return 0 };
    let mut chars = rest.chars().map(|c| match c {
        'ſ' if fold => 's',
        _ if fold => c.to_ascii_lowercase(),
        _ => c,
    });
    let letters = match (chars.next(), chars.next()) {
        (Some('s' | 't' | 'm' | 'd'), _) => 1,
        (Some('r' | 'v'), Some('e')) | (Some('l'), Some('l')) => 2,
        _ => return 0,
    };
    1 + rest.chars().take(letters).map(char::len_utf8).sum::<usize>()
}

/// `\s+(?!\S)`: white space that leaves its last character to the word after it.
fn trailing_space(s: &str) -> usize {
    let len = run(s, |c| is(c, SPACE));
    if len == s.len() {
        return len;
    }
    s[..len].char_indices().next_back().map_or(0, |(i, _)| i)
}

/// `\s*[\r\n]+|\s+(?!\S)|\s+`: white space up to its last line break, else up to the next word.
fn lines_and_space(s: &str) -> usize {
    let len = run(s, |c| is(c, SPACE));
    match s[..len].rfind(is_newline) {
        Some(last) => last + 1,
        None => match trailing_space(s) {
            0 => len,
            n => n,
        },
    }
}

/// ` ?[class]+`, with the class as a predicate.
fn optional_space_then(s: &str, f: impl Fn(char) -> bool) -> usize {
    let space = usize::from(s.starts_with(' '));
    match run(&s[space..], &f) {
        // The space may be in the class itself.
        0 => run(s, f),
        n => space + n,
    }
}

impl Stage {
    /// Length in bytes of the match that begins at the start of `s`, or 0; `first` is its first character.
    fn match_len(self, s: &str, first: char) -> usize {
        match self {
            Stage::Numbers(most) => run_up_to(s, most, |c| is(c, NUMBER)),
            Stage::ThreeAsciiDigits => match run_up_to(s, 3, |c| c.is_ascii_digit()) {
                3 => 3,
                _ => 0,
            },
            Stage::PunctuationRuns => {
                run(s, |c| is(c, PUNCTUATION) || matches!(c, '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|'))
            }
            Stage::CjkRuns => run(s, |c| matches!(c, '一'..='龥' | '\u{3040}'..='ゟ' | '゠'..='ヿ')),
            Stage::Gpt2 => gpt2(s, first),
            Stage::Cl100k(digits) => cl100k(s, first, digits),
            Stage::DeepSeek => deepseek(s, first),
        }
    }
}

/// Tries each in order and returns the first that matched.
macro_rules! first_of {
    ($last:expr) => { $last };
    ($head:expr, $($tail:expr),+) => { match $head { 0 => first_of!($($tail),+), n => n } };
}

fn gpt2(s: &str, first: char) -> usize {
    let class = match first {
        ' ' => s[1..].chars().next().map_or(SPACE, of),
        c => of(c),
    };
    first_of!(
        contraction(s, false),
        match class {
            c if c & LETTER != 0 => optional_space_then(s, |c| is(c, LETTER)),
            c if c & NUMBER != 0 => optional_space_then(s, |c| is(c, NUMBER)),
            c if c & SPACE == 0 => optional_space_then(s, |c| !is(c, LETTER | NUMBER | SPACE)),
            _ => trailing_space(s),
        }
    )
}

fn cl100k(s: &str, first: char, digits: usize) -> usize {
    let letters = |from: usize| run(&s[from..], |c| is(c, LETTER));
    first_of!(
        contraction(s, true),
        match first {
            c if is(c, LETTER) => letters(0),
            c if is_newline(c) || is(c, NUMBER) => 0,
            c => match letters(c.len_utf8()) {
                0 => 0,
                n => c.len_utf8() + n,
            },
        },
        run_up_to(s, digits, |c| is(c, NUMBER)),
        with_newlines(s, optional_space_then(s, |c| !is(c, LETTER | NUMBER | SPACE))),
        lines_and_space(s)
    )
}

/// `…[\r\n]*` after a match of `len` bytes; 0 stays 0.
fn with_newlines(s: &str, len: usize) -> usize {
    match len {
        0 => 0,
        _ => len + run(&s[len..], is_newline),
    }
}

fn deepseek(s: &str, first: char) -> usize {
    let word = |from: usize| run(&s[from..], |c| is(c, LETTER | MARK));
    first_of!(
        if first.is_ascii_punctuation() {
            match run(&s[1..], |c| c.is_ascii_alphabetic()) {
                0 => 0,
                n => 1 + n,
            }
        } else {
            0
        },
        if is_newline(first) || is(first, LETTER | PUNCTUATION | SYMBOL) {
            word(0)
        } else {
            // A mark may be the optional character or the first of the run: either way the match is the same.
            match word(first.len_utf8()) {
                0 => word(0),
                n => first.len_utf8() + n,
            }
        },
        with_newlines(s, optional_space_then(s, |c| is(c, PUNCTUATION | SYMBOL))),
        lines_and_space(s)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Rng, fixture};

    fn pieces(name: &str, text: &str) -> Vec<String> {
        let mut out = Vec::new();
        PreTokenizer::by_name(name).expect(name).split(text, &mut |w| out.push(w.to_owned()));
        out
    }

    /// Expected cuts come from Python's `regex` module running the models' own expressions
    /// (`tests/oracles/pre_tokenizer_fixtures.py`).
    #[test]
    fn cuts_equal_the_regular_expressions() {
        let cases = fixture("tokenizer/pre_tokenizers.json");
        let mut seen = 0;
        for case in cases.as_array().expect("array") {
            let text = case["text"].as_str().expect("text");
            for (name, cuts) in case["pieces"].as_object().expect("pieces") {
                let want: Vec<&str> = cuts.as_array().expect("cuts").iter().map(|p| p.as_str().expect("str")).collect();
                assert_eq!(pieces(name, text), want, "{name} of {text:?}");
                seen += 1;
            }
        }
        assert!(seen > 1500, "{seen} comparisons");
    }

    #[test]
    fn every_name_keeps_every_character() {
        let alphabet: Vec<char> =
            " \u{85}\u{3000}\r\n\t'sStrevmlldſaé漢ひ1٣½!$+|_-—\u{301}\u{200d}😀\0".chars().collect();
        let mut rng = Rng::new(3);
        for (names, _) in KNOWN {
            for _ in 0..3000 {
                let text: String = (0..rng.below(24)).map(|_| alphabet[rng.below(alphabet.len())]).collect();
                let got = pieces(names[0], &text);
                assert_eq!(got.concat(), text);
                assert!(got.iter().all(|p| !p.is_empty()));
            }
        }
    }

    #[test]
    fn megabytes_of_one_kind_are_linear() {
        for (names, _) in KNOWN {
            for unit in [" ", "\n", " \n", "a", "1", "!", "漢", "'", "\u{301}", " a", "'s", "\0"] {
                let text = unit.repeat(1_000_000 / unit.len());
                let start = std::time::Instant::now();
                let mut n = 0;
                PreTokenizer::by_name(names[0]).expect("known").split(&text, &mut |w| n += w.len());
                assert_eq!(n, text.len());
                // About 10 ms; a quadratic scan would take minutes.
                assert!(start.elapsed().as_millis() < 2000, "{} took {:?} for {unit:?}", names[0], start.elapsed());
            }
        }
    }
}
