//! Values of parameters: entities, and JSON as models write it.

use serde::de::IgnoredAny;

/// Turns the five entities of XML, and the numbers of quotes, into what they stand for.
pub(super) fn decode_entities(s: &str) -> String {
    const ENTITIES: &[(&str, char)] = &[
        ("&amp;", '&'),
        ("&lt;", '<'),
        ("&gt;", '>'),
        ("&quot;", '"'),
        ("&apos;", '\''),
        ("&#34;", '"'),
        ("&#39;", '\''),
    ];
    let mut out = String::with_capacity(s.len());
    let mut rest = s;
    while let Some(at) = rest.find('&') {
        out += &rest[..at];
        rest = &rest[at..];
        match ENTITIES.iter().find(|(e, _)| rest.starts_with(e)) {
            Some((entity, c)) => {
                out.push(*c);
                rest = &rest[entity.len()..];
            }
            None => {
                out.push('&');
                rest = &rest[1..];
            }
        }
    }
    out + rest
}

/// `s` as a JSON string.
pub(super) fn string_text(s: &str) -> String {
    serde_json::Value::from(s).to_string()
}

/// A value that is said to be JSON, without spaces, numbers as they were written; `None` when it is not JSON, nor JSON with
/// entities, nor one of Python's constants.
pub(super) fn json_text(s: &str) -> Option<String> {
    let s = s.trim();
    let valid = |s: &str| serde_json::from_str::<IgnoredAny>(s).is_ok();
    match s {
        "" | "None" => Some("null".to_owned()),
        "True" => Some("true".to_owned()),
        "False" => Some("false".to_owned()),
        _ if valid(s) => Some(minify(s)),
        _ => Some(decode_entities(s)).filter(|d| valid(d)).map(|d| minify(&d)),
    }
}

/// True for the text of a JSON object.
pub(super) fn is_object(s: &str) -> bool {
    s.trim_start().starts_with('{') && serde_json::from_str::<IgnoredAny>(s).is_ok()
}

/// Valid JSON without the white space between its tokens.
pub(super) fn minify(json: &str) -> String {
    let (mut in_string, mut escaped) = (false, false);
    json.chars()
        .filter(|c| {
            let keep = in_string || !c.is_ascii_whitespace();
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = in_string,
                '"' => in_string = !in_string,
                _ => {}
            }
            keep
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deepseek_v4_values() {
        assert_eq!(decode_entities("a &amp;&amp; b &lt;x&gt; &amp;lt; & &nbsp;"), "a && b <x> &lt; & &nbsp;");
        for (text, want) in [
            (" 5 ", Some("5")),
            ("[1, {\"a b\": \" \\\" \"}]", Some("[1,{\"a b\":\" \\\" \"}]")),
            ("123456789012345678901234567890", Some("123456789012345678901234567890")),
            ("", Some("null")),
            ("True", Some("true")),
            ("{&quot;a&quot;: 1}", Some("{\"a\":1}")),
            ("{\"a\": ", None),
            ("plain", None),
        ] {
            assert_eq!(json_text(text).as_deref(), want, "{text}");
        }
    }
}
