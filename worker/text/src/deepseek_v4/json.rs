//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it: how tool schemas and arguments look in training.

use serde_json::Value;

use crate::chat::{float_repr, json_string};

/// `json.dumps(value, ensure_ascii=False)`: separators `", "` and `": "`, keys in their order, non-ASCII kept.
///
/// An integer beyond 64 bits was already a float when `value` was parsed, and prints as one.
pub fn dumps(value: &Value) -> String {
    let mut out = String::new();
    write(value, &mut out);
    out
}

fn write(value: &Value, out: &mut String) {
    match value {
        Value::Null => *out += "null",
        Value::Bool(b) => *out += if *b { "true" } else { "false" },
        Value::Number(n) => match n.as_f64() {
            Some(f) if n.is_f64() => *out += &float_repr(f),
            _ => *out += &n.to_string(),
        },
        Value::String(s) => json_string(s, false, out),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    *out += ", ";
                }
                write(item, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                if i > 0 {
                    *out += ", ";
                }
                json_string(key, false, out);
                *out += ": ";
                write(item, out);
            }
            out.push('}');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts were printed by CPython 3.11's `json.dumps(json.loads(text), ensure_ascii=False)`.
    #[test]
    fn deepseek_v4_json_is_pythons() {
        for (text, want) in [
            (
                r#"{"b":1,"a":[1,2.0,1e5,1e22,1e-7,0.1,-0.0]}"#,
                r#"{"b": 1, "a": [1, 2.0, 100000.0, 1e+22, 1e-07, 0.1, -0.0]}"#,
            ),
            (r#"{"ü":"\u00e9\ud83d\ude00\u007f\u0001\b\f\/"}"#, "{\"ü\": \"é😀\u{7f}\\u0001\\b\\f/\"}"),
            ("[]", "[]"),
            ("{}", "{}"),
            (r#"[null,true,false,{"x":{}}]"#, r#"[null, true, false, {"x": {}}]"#),
            ("18446744073709551615", "18446744073709551615"),
            ("-9223372036854775808", "-9223372036854775808"),
        ] {
            assert_eq!(dumps(&serde_json::from_str(text).expect("json")), want);
        }
    }
}
