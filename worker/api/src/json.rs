//! Request bodies, read field by field.
//!
//! A body is cut into its top-level fields first (as raw text, nothing is built), then every field is read as the type
//! that its name demands. So an error names its field, an unknown field is noticed, and a 64 MiB body never becomes a tree
//! of values several times its size.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::ApiError;

/// The top-level fields of a JSON object that nobody has taken yet.
#[derive(Debug)]
pub struct Fields<'a> {
    items: Vec<(Cow<'a, str>, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// Cuts `body` into fields.
    ///
    /// # Errors
    /// `invalid_utf8`, `json_too_deep` (deeper than `max_depth`), `invalid_json` with line and column, `invalid_type`
    /// when the body is no object, `duplicate_field`.
    pub fn parse(body: &'a [u8], max_depth: usize) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|e| {
            ApiError::bad_request(
                "invalid_utf8",
                format!("the body is not UTF-8: invalid byte at offset {}", e.valid_up_to()),
            )
        })?;
        if text.trim_ascii().is_empty() {
            return Err(ApiError::bad_request("invalid_json", "the body is empty; send a JSON object"));
        }
        check_depth(body, max_depth)?;
        if !text.trim_ascii_start().starts_with('{') {
            // Malformed and wrong-typed bodies are told apart by reading the whole.
            serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(malformed)?;
            return Err(ApiError::bad_request("invalid_type", "the body must be a JSON object"));
        }
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let items = deserializer.deserialize_map(FieldsVisitor).map_err(malformed)?;
        deserializer.end().map_err(malformed)?;
        let mut names: Vec<&str> = items.iter().map(|(k, _)| k.as_ref()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|w| w[0] == w[1]) {
            return Err(ApiError::field("duplicate_field", twice[0], format!("`{}` is given twice", twice[0])));
        }
        Ok(Self { items })
    }

    /// Takes the raw text of a field; `null` counts as absent.
    pub fn raw(&mut self, name: &str) -> Option<&'a str> {
        let at = self.items.iter().position(|(k, _)| k == name)?;
        let raw = self.items.swap_remove(at).1.get();
        (raw != "null").then_some(raw)
    }

    /// Bytes of a field's raw text; 0 when absent.
    pub fn len(&self, name: &str) -> usize {
        self.items.iter().find(|(k, _)| k == name).map_or(0, |(_, raw)| raw.get().len())
    }

    /// Takes a field as `T`.
    ///
    /// # Errors
    /// `invalid_type` naming the field, what was expected and what came.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Result<Option<T>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        serde_json::from_str(raw).map(Some).map_err(|_| wrong_type(name, expected, raw))
    }

    /// Takes a boolean.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.take(name, "a boolean")
    }

    /// Takes a string.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.take(name, "a string")
    }

    /// Takes a number inside `range`.
    ///
    /// # Errors
    /// `invalid_type`, `invalid_value`.
    pub fn number(&mut self, name: &str, range: std::ops::RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take::<f64>(name, "a number")? else { return Ok(None) };
        if !range.contains(&value) {
            let rule = format!("must be between {} and {}", range.start(), range.end());
            return Err(ApiError::invalid_value(name, value, &rule));
        }
        Ok(Some(value))
    }

    /// Takes an integer inside `range`. A number such as `16.0` is one.
    ///
    /// # Errors
    /// `invalid_type`, `invalid_value`.
    pub fn integer(&mut self, name: &str, range: std::ops::RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        let number: serde_json::Number = serde_json::from_str(raw).map_err(|_| wrong_type(name, "an integer", raw))?;
        let value = match (number.as_i64(), number.as_f64()) {
            (Some(v), _) => v,
            // Past i64: refused with the same words, or as good as the end of a range that has none.
            (None, Some(v)) if v.fract() == 0.0 => {
                if v > 9e18 {
                    i64::MAX
                } else if v < -9e18 {
                    i64::MIN
                } else {
                    format!("{v:.0}").parse().unwrap_or(i64::MAX)
                }
            }
            _ => return Err(wrong_type(name, "an integer", raw)),
        };
        if !range.contains(&value) {
            let rule = if *range.end() == i64::MAX {
                format!("must be at least {}", range.start())
            } else {
                format!("must be between {} and {}", range.start(), range.end())
            };
            return Err(ApiError::invalid_value(name, raw, &rule));
        }
        Ok(Some(value))
    }

    /// Takes a seed: an integer of 64 bits, with a sign or without. −1, with which several clients spell "draw one", is none; other
    /// negative seeds are seeds like any other.
    ///
    /// # Errors
    /// `invalid_type`, and `invalid_value` for one of more bits, which could only be another one's seed too.
    pub fn seed(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        let number: serde_json::Number = serde_json::from_str(raw).map_err(|_| wrong_type(name, "an integer", raw))?;
        let signed = number.as_i64().or_else(|| {
            // Written with a point or an exponent; near the ends of 64 bits it may be the rounding of another number.
            let v = number.as_f64().filter(|v| v.fract() == 0.0 && v.abs() < 9e18)?;
            format!("{v:.0}").parse().ok()
        });
        match (signed, number.as_u64(), number.as_f64()) {
            (Some(v), ..) => Ok(Some(v).filter(|v| *v != -1).map(i64::cast_unsigned)),
            (_, Some(v), _) => Ok(Some(v)),
            (.., Some(v)) if v.fract() == 0.0 => Err(ApiError::invalid_value(name, raw, "must fit 64 bits")),
            _ => Err(wrong_type(name, "an integer", raw)),
        }
    }

    /// Takes and drops fields that change nothing here, whatever they hold.
    pub fn ignore(&mut self, names: &[&str]) {
        self.items.retain(|(k, _)| !names.contains(&k.as_ref()));
    }

    /// Refuses fields that would change the answer if they were honoured. `null` and what `harmless` accepts pass.
    ///
    /// # Errors
    /// `unsupported_parameter` naming the field.
    pub fn refuse(&mut self, name: &str, harmless: &[&str], why: &str) -> Result<(), ApiError> {
        match self.raw(name) {
            Some(raw) if !harmless.contains(&raw) => Err(ApiError::unsupported(name, format!("`{name}`: {why}"))),
            _ => Ok(()),
        }
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// `unknown_parameter` when a field was not taken, also with `null`: its name is no less a mistake.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.items.first() {
            None => Ok(()),
            Some((name, _)) => {
                let shown: String = name.chars().take(64).collect();
                Err(ApiError::field(
                    "unknown_parameter",
                    shown.clone(),
                    format!("unrecognized request argument supplied: {shown}"),
                ))
            }
        }
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while let Some(key) = map.next_key::<Key<'de>>()? {
            items.push((key.0, map.next_value::<&'de RawValue>()?));
            // Known fields are some forty; a flood of others need not be held to be refused.
            if items.len() > 256 {
                return Err(serde::de::Error::custom("more than 256 fields in the top-level object"));
            }
        }
        Ok(items)
    }
}

/// A key that borrows where it has no escapes.
struct Key<'a>(Cow<'a, str>);

impl<'de> serde::Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a field name")
            }
            fn visit_borrowed_str<E>(self, v: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(v)))
            }
            fn visit_str<E>(self, v: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(v.to_owned())))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

/// The elements of a JSON array as raw text; `None` when there are more than `max`.
pub(crate) fn elements(raw: &str, max: usize) -> Result<Option<Vec<&str>>, serde_json::Error> {
    struct Elements(usize);
    impl<'de> Visitor<'de> for Elements {
        type Value = Option<Vec<&'de str>>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an array")
        }
        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut items = Some(Vec::new());
            while let Some(raw) = seq.next_element::<&'de RawValue>()? {
                items = items.filter(|i: &Vec<&str>| i.len() < self.0);
                if let Some(items) = &mut items {
                    items.push(raw.get());
                }
            }
            Ok(items)
        }
    }
    serde_json::Deserializer::from_str(raw).deserialize_seq(Elements(max))
}

/// `invalid_type` for a field, with the beginning of what came.
pub(crate) fn wrong_type(name: &str, expected: &str, raw: &str) -> ApiError {
    // What JSON's grammar allows and Unicode does not: half of a surrogate pair.
    if raw.starts_with('"') && serde_json::from_str::<String>(raw).is_err() {
        return ApiError::field(
            "invalid_unicode",
            name,
            format!("`{name}` is a string with an unpaired surrogate escape (\\ud800 to \\udfff)"),
        );
    }
    let kind = match raw.as_bytes().first() {
        Some(b'"') => "a string",
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    };
    let shown: String = raw.chars().take(40).collect();
    let dots = if shown.len() < raw.len() { "…" } else { "" };
    ApiError::field("invalid_type", name, format!("`{name}`: expected {expected}, got {kind} ({shown}{dots})"))
}

/// Puts an error's field below `at`.
pub(crate) fn under(at: &str, mut e: ApiError) -> ApiError {
    if let Some(param) = &mut e.param {
        e.message = e.message.replacen(&format!("`{param}`"), &format!("`{at}.{param}`"), 1);
        *param = format!("{at}.{param}");
    }
    e
}

fn malformed(e: serde_json::Error) -> ApiError {
    // Of a field's name, which is no part of the raw texts. JSON's grammar allows it.
    let text = e.to_string();
    if ["unexpected end of hex escape", "lone leading surrogate"].iter().any(|half| text.starts_with(half)) {
        return ApiError::bad_request(
            "invalid_unicode",
            format!(
                "a field's name has an unpaired surrogate escape (\\ud800 to \\udfff) at line {} column {}",
                e.line(),
                e.column()
            ),
        );
    }
    ApiError::bad_request("invalid_json", format!("the body is not valid JSON: {e}"))
}

/// One pass over the bytes, before any parser recurses.
fn check_depth(body: &[u8], max: usize) -> Result<(), ApiError> {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for (at, byte) in body.iter().enumerate() {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => {
                depth += 1;
                if depth > max {
                    return Err(ApiError::bad_request(
                        "json_too_deep",
                        format!("the body nests deeper than {max} levels (at byte {at})"),
                    ));
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(body: &[u8]) -> &'static str {
        match Fields::parse(body, 8) {
            Ok(_) => "ok",
            Err(e) => e.code,
        }
    }

    #[test]
    fn s4_malformed_bodies_have_their_own_codes() {
        assert_eq!(code(b"{}"), "ok");
        assert_eq!(code(b" {\"a\": [1, {\"b\": \"]]]][[[[[[[[[[[[\\\"\"}]} "), "ok");
        assert_eq!(code(b""), "invalid_json");
        assert_eq!(code(b"  \n"), "invalid_json");
        assert_eq!(code(b"{"), "invalid_json");
        assert_eq!(code(b"{\"a\":1,}"), "invalid_json");
        assert_eq!(code(b"{\"a\":1} x"), "invalid_json");
        assert_eq!(code(b"{\"a\":nul}"), "invalid_json");
        assert_eq!(code(b"[1]"), "invalid_type");
        assert_eq!(code(b"\"x\""), "invalid_type");
        assert_eq!(code(b"[1"), "invalid_json");
        assert_eq!(code(b"{\"a\":\"\xff\"}"), "invalid_utf8");
        assert_eq!(code(b"{\"a\":1,\"a\":2}"), "duplicate_field");
        assert_eq!(code(br#"{"a":1,"\u0061":2}"#), "duplicate_field");
        for half in [r#"{"\ud800":1}"#, r#"{"\udc00":1}"#, r#"{"\ud800\ud800":1}"#, r#"{"a":1,"\ud83dx":1}"#] {
            assert_eq!(code(half.as_bytes()), "invalid_unicode", "{half}");
        }
        assert_eq!(code(br#"{"\ud83d\ude00":1}"#), "ok");
        assert_eq!(code(br#"{"\ud8"#), "invalid_json");
        assert_eq!(code(br#"{"\ud8zz":1}"#), "invalid_json");
    }

    #[test]
    fn s4_depth_is_limited_before_any_recursion() {
        let deep = |n: usize| [b"{\"a\":".as_slice(), &vec![b'['; n], &vec![b']'; n], b"}"].concat();
        assert_eq!(code(&deep(7)), "ok");
        assert_eq!(code(&deep(8)), "json_too_deep");
        assert_eq!(code(&deep(1_000_000)), "json_too_deep");
        assert_eq!(code(&vec![b'['; 1_000_000]), "json_too_deep");
    }

    #[test]
    fn malformed_json_says_where() {
        let e = Fields::parse(b"{\n  \"a\": 1,\n  oops\n}", 8).unwrap_err();
        assert!(e.message.contains("line 3 column 3"), "{}", e.message);
    }

    #[test]
    fn fields_are_typed_and_named() {
        let body = br#"{"n":"3","t":0.5,"i":16.0,"big":1e30,"half":1.5,"nul":null,"b":"yes","left":1}"#;
        let mut f = Fields::parse(body, 8).unwrap();
        let e = f.integer("n", 1..=8).unwrap_err();
        assert_eq!((e.code, e.param.as_deref()), ("invalid_type", Some("n")));
        assert!(e.message.contains("got a string (\"3\")"), "{}", e.message);
        let e = wrong_type("prompt", "a string", r#""\ud800""#);
        assert_eq!(e.code, "invalid_unicode");
        assert!(e.message.contains("surrogate"), "{}", e.message);
        assert_eq!(f.number("t", 0.0..=2.0).unwrap(), Some(0.5));
        assert_eq!(f.integer("i", 1..=100).unwrap(), Some(16));
        assert_eq!(f.integer("big", 1..=100).unwrap_err().code, "invalid_value");
        assert_eq!(f.integer("half", 1..=100).unwrap_err().code, "invalid_type");
        assert_eq!(f.bool("nul").unwrap(), None);
        assert_eq!(f.bool("b").unwrap_err().param.as_deref(), Some("b"));
        let e = f.finish().unwrap_err();
        assert_eq!((e.code, e.param.as_deref()), ("unknown_parameter", Some("left")));
        assert!(e.message.contains("unrecognized request argument supplied: left"));
        assert_eq!(Fields::parse(br#"{"left":null}"#, 8).unwrap().finish().unwrap_err().code, "unknown_parameter");
    }
}
