//! Tags as models write them: which they are, and how long.

/// What a tag is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    Block,
    Invoke,
    Parameter,
    /// Marked as DSML, but of no name that is near a known one.
    Unknown,
}

/// A tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    pub(super) name: Name,
    pub(super) closes: bool,
    pub(super) self_closed: bool,
    /// Carries the DSML marker, or what is left of it; else it is plain XML.
    pub(super) marked: bool,
    /// The attribute `name`.
    pub(super) called: Option<String>,
    /// The attribute `string`.
    pub(super) string: Option<bool>,
    /// The attribute `value`, which some models use with self-closed parameters.
    pub(super) value: Option<String>,
}

/// What the beginning of a text is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lexed {
    /// Not a tag.
    No,
    /// It depends on what follows. `marked`: enough is there to know that it can be nothing but DSML.
    Partial { marked: bool },
    /// A tag of this many bytes.
    Tag(usize, Tag),
}

/// Longest tag: a longer one is text. Names of tools have at most 64 characters.
const LONGEST: usize = 4096;

/// A scan over a text that may end before the tag does.
struct Scan<'s> {
    rest: &'s str,
}

impl<'s> Scan<'s> {
    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn bump(&mut self) {
        let mut chars = self.rest.chars();
        chars.next();
        self.rest = chars.as_str();
    }

    fn eat(&mut self, f: impl Fn(char) -> bool) -> &'s str {
        let len = self.rest.find(|c| !f(c)).unwrap_or(self.rest.len());
        let (eaten, rest) = self.rest.split_at(len);
        self.rest = rest;
        eaten
    }

    fn space(&mut self) -> bool {
        !self.eat(char::is_whitespace).is_empty()
    }
}

fn is_bar(c: char) -> bool {
    matches!(c, '｜' | '|' | '│' | '▏')
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

/// Number of single-letter edits between two words, up to 3.
fn distance(a: &str, b: &str) -> usize {
    if a.len().abs_diff(b.len()) > 2 {
        return 3;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let next = (diagonal + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = row[j + 1];
            row[j + 1] = next;
        }
    }
    row[b.len()].min(3)
}

const NAMES: &[(&str, Name)] = &[
    ("toolcalls", Name::Block),
    ("toolcall", Name::Block),
    ("functioncalls", Name::Block),
    ("functioncall", Name::Block),
    ("invoke", Name::Invoke),
    ("invocation", Name::Invoke),
    ("parameter", Name::Parameter),
    ("parameters", Name::Parameter),
    ("param", Name::Parameter),
];

fn lookup(name: &str, marked: bool) -> Option<Name> {
    let plain: String = name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    if let Some((_, known)) = NAMES.iter().find(|(n, _)| *n == plain) {
        return Some(*known);
    }
    if !marked || plain.len() < 4 {
        return None;
    }
    NAMES
        .iter()
        .map(|(n, known)| (distance(&plain, n), *known))
        .min_by_key(|(d, _)| *d)
        .filter(|(d, _)| *d <= 2)
        .map(|(_, k)| k)
}

/// True when `name` may still become a plain tag's name.
fn may_become(name: &str) -> bool {
    let plain: String = name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    NAMES.iter().any(|(n, _)| n.starts_with(&plain))
}

/// True for a character that a tag may begin with.
pub(super) fn may_begin(c: char) -> bool {
    c == '<' || c == '｜'
}

/// What `text` begins with. It begins with a character of [`may_begin`].
pub(super) fn lex(text: &str) -> Lexed {
    match lex_any(text) {
        Lexed::Partial { .. } if text.len() > LONGEST => Lexed::No,
        Lexed::Tag(len, _) if len > LONGEST => Lexed::No,
        lexed => lexed,
    }
}

fn lex_any(text: &str) -> Lexed {
    let mut s = Scan { rest: text };
    let angle = s.peek() == Some('<');
    if angle {
        s.bump();
    }
    let spaced = s.space();
    let mut closes = false;
    let mut slash = |s: &mut Scan<'_>| {
        if s.peek() == Some('/') {
            closes = true;
            s.bump();
            s.space();
        }
    };
    slash(&mut s);
    if s.rest.is_empty() {
        return Lexed::Partial { marked: false };
    }
    // The marker: bars, DSML, bars, of which any may be missing.
    let bars = s.eat(|c| is_bar(c) || c == ' ').contains(is_bar);
    let mut dsml = false;
    let word = &s.rest[..s.rest.find(|c| !is_name(c)).unwrap_or(s.rest.len())];
    if word.len() == s.rest.len() && word.len() < 4 && "dsml".starts_with(&word.to_ascii_lowercase()) {
        return Lexed::Partial { marked: if bars { angle || !word.is_empty() } else { word.len() == 3 } };
    }
    if word.get(..4).is_some_and(|w| w.eq_ignore_ascii_case("dsml")) {
        dsml = true;
        s.rest = &s.rest[4..];
        if !s
            .rest
            .starts_with(|c: char| is_bar(c) || c == ':' || c == '_' || c.is_whitespace() || is_name(c) || c == '>')
            && !s.rest.is_empty()
        {
            return Lexed::No;
        }
        s.eat(|c| is_bar(c) || matches!(c, ':' | ' '));
        s.space();
    }
    let marked = dsml || bars;
    if (!angle && !dsml) || (!marked && spaced) {
        return Lexed::No;
    }
    slash(&mut s);
    let name = s.eat(is_name);
    if s.rest.is_empty() {
        let alive = dsml || may_become(name);
        return if alive { Lexed::Partial { marked: dsml } } else { Lexed::No };
    }
    let known = match lookup(name, dsml) {
        Some(known) => known,
        // The special tokens that have bars but no DSML are others' business.
        None if !dsml => return Lexed::No,
        None => Name::Unknown,
    };
    // `｜DSML｜` in a sentence about it.
    if !angle && known == Name::Unknown {
        return Lexed::No;
    }
    attributes(
        text,
        s,
        Tag { name: known, closes, self_closed: false, marked, called: None, string: None, value: None },
    )
}

fn attributes(text: &str, mut s: Scan<'_>, mut tag: Tag) -> Lexed {
    let partial = Lexed::Partial { marked: tag.marked };
    loop {
        s.space();
        let len = text.len() - s.rest.len();
        let Some(c) = s.peek() else { return partial };
        match c {
            '>' => return Lexed::Tag(len + 1, tag),
            // The `>` is missing and the next tag is there already.
            '<' if tag.marked => return Lexed::Tag(len, tag),
            '/' => {
                s.bump();
                tag.self_closed = true;
            }
            // So is that of a closer, before text.
            c if tag.closes && c.is_alphanumeric() => return Lexed::Tag(len, tag),
            // `<invoke="f">`
            '=' => {
                s.bump();
                let Some(v) = value(&mut s) else { return partial };
                tag.called.get_or_insert(v);
            }
            c if is_name(c) => {
                let name = s.eat(is_name);
                s.space();
                match s.peek() {
                    None => return partial,
                    Some('=') => {
                        s.bump();
                        let Some(v) = value(&mut s) else { return partial };
                        match name.to_ascii_lowercase().as_str() {
                            "name" => tag.called = Some(v),
                            "string" => tag.string = Some(v.eq_ignore_ascii_case("true")),
                            "value" => tag.value = Some(v),
                            _ => {}
                        }
                    }
                    _ if !tag.marked => return Lexed::No,
                    // `<invoke f>`
                    _ => {
                        tag.called.get_or_insert_with(|| name.to_owned());
                    }
                }
            }
            _ if !tag.marked => return Lexed::No,
            _ => s.bump(),
        }
    }
}

/// The value of an attribute, after its `=`; `None` when it may go on.
fn value(s: &mut Scan<'_>) -> Option<String> {
    s.space();
    let quote = s.peek()?;
    let closer = match quote {
        '"' | '\'' => quote,
        '“' | '”' => '”',
        '\\' => {
            // \"f\"
            s.bump();
            let v = value(s)?;
            return Some(v.trim_end_matches('\\').to_owned());
        }
        _ => {
            let end = s.rest.find(|c: char| c.is_whitespace() || matches!(c, '>' | '/' | '<'))?;
            let v = s.rest[..end].trim_end_matches(['"', '\'']).to_owned();
            s.rest = &s.rest[end..];
            return Some(decode(&v));
        }
    };
    s.bump();
    let end = s.rest.find(closer);
    let stop = s.rest.find(['\n', '<']);
    match (end, stop) {
        (Some(e), b) if b.is_none_or(|b| e < b) => {
            let v = s.rest[..e].to_owned();
            s.rest = &s.rest[e + closer.len_utf8()..];
            Some(decode(&v))
        }
        // The closing quote is missing: the value ends where the tag does.
        (_, Some(b)) => {
            let e = s.rest[..b].find('>').unwrap_or(b);
            let v = s.rest[..e].trim_end().trim_end_matches('/').to_owned();
            s.rest = &s.rest[e..];
            Some(decode(&v))
        }
        _ => None,
    }
}

fn decode(v: &str) -> String {
    // A model that writes entities for quotes has them inside the value.
    super::value::decode_entities(v.trim()).trim_matches(['"', '\'']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(text: &str) -> Tag {
        match lex(text) {
            Lexed::Tag(len, tag) => {
                assert_eq!(len, text.len(), "{text}");
                tag
            }
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn deepseek_v4_tags_in_every_spelling() {
        for text in [
            "<｜DSML｜tool_calls>",
            "<DSML｜tool_calls>",
            "<｜DSML｜toolcalls>",
            "<｜DSML｜function_calls>",
            "<|DSML|tool_calls>",
            "<｜DSML｜ tool_calls >",
            "< ｜DSML｜tool_calls>",
            "<｜｜DSML｜｜tool_calls>",
            "<dsml:tool_calls>",
            "<｜tool_calls>",
            "<tool_calls>",
            "｜DSML｜tool_calls>",
            "<｜DSML｜tool_cals>",
            "<｜DSML｜Tool_Calls>",
        ] {
            let t = tag(text);
            assert_eq!((t.name, t.closes, t.self_closed), (Name::Block, false, false), "{text}");
            assert_eq!(t.marked, text != "<tool_calls>", "{text}");
            let closer = tag(&text.replacen('<', "</", 1));
            assert_eq!(closer.closes, text.starts_with('<'), "{text}");
        }
        assert!(tag("<｜DSML｜/invoke>").closes);
        for text in [
            "<｜DSML｜invoke name=\"f\">",
            "<｜DSML｜invoke name='f'>",
            "<｜DSML｜invoke name=f>",
            "<｜DSML｜invoke name=“f”>",
            "<｜DSML｜invoke name=\\\"f\\\">",
            "<｜DSML｜invoke name=&quot;f&quot;>",
            "<｜DSML｜invoke  name = \"f\" >",
            "<｜DSML｜invoke\nname=\"f\">",
            "<｜DSML｜invoke=\"f\">",
            "<｜DSML｜invoke f>",
            "<｜DSML｜invoke id=\"1\" name=\"f\">",
            "<invoke name=\"f\">",
        ] {
            assert_eq!(tag(text).called.as_deref(), Some("f"), "{text}");
        }
        let p = tag("<｜DSML｜parameter string=\"false\" name=\"a > b\" />");
        assert_eq!((p.called.as_deref(), p.string, p.self_closed), (Some("a > b"), Some(false), true));
        assert!(matches!(lex("<｜DSML｜invoke name=\"f>\n"), Lexed::Tag(_, t) if t.called.as_deref() == Some("f")));
    }

    #[test]
    fn deepseek_v4_what_is_no_tag() {
        for text in [
            "<b>",
            "< 5",
            "<｜User｜>",
            "<invoked name>",
            "< invoke>",
            "｜ a",
            "｜DSML｜ is a token",
            "<tool>",
            "<parametric>",
        ] {
            assert_eq!(lex(text), Lexed::No, "{text}");
        }
        for (text, marked) in [
            ("<", false),
            ("<｜", true),
            ("<｜DS", true),
            ("<DS", false),
            ("<｜DSML", true),
            ("<｜DSML｜inv", true),
            ("<inv", false),
            ("｜DSML｜", true),
            ("<｜DSML｜invoke name=\"f", true),
        ] {
            assert_eq!(lex(text), Lexed::Partial { marked }, "{text}");
        }
    }
}
