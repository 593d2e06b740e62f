//! Tool calls as the model is trained to write them.

use serde_json::{Map, Value};

use super::ToolCall;
use crate::deepseek_v4::{DSML, dumps};

/// The block of these calls, without what goes before it (two newlines after content) or after it. Nothing is escaped, as
/// in training.
pub fn serialize(calls: &[ToolCall]) -> String {
    serialize_with(calls, &mut str::to_owned)
}

/// As [`serialize`], with every name and value passed through `text`.
pub(crate) fn serialize_with(calls: &[ToolCall], text: &mut dyn FnMut(&str) -> String) -> String {
    let mut out = format!("<{DSML}tool_calls>\n");
    for call in calls {
        let parameters: Vec<String> = arguments_of(&call.arguments)
            .iter()
            .map(|(key, value)| {
                let (is_string, value) = match value {
                    Value::String(s) => (true, text(s)),
                    other => (false, text(&dumps(other))),
                };
                format!("<{DSML}parameter name=\"{}\" string=\"{is_string}\">{value}</{DSML}parameter>", text(key))
            })
            .collect();
        out += &format!("<{DSML}invoke name=\"{}\">\n{}\n</{DSML}invoke>\n", text(&call.name), parameters.join("\n"));
    }
    out + &format!("</{DSML}tool_calls>")
}

/// Arguments as an object; anything else becomes one string parameter named `arguments`.
fn arguments_of(json: &str) -> Map<String, Value> {
    match serde_json::from_str(json) {
        Ok(Value::Object(map)) => map,
        _ => [("arguments".to_owned(), Value::from(json))].into_iter().collect(),
    }
}
