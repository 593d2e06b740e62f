//! The messages of a chat request.

use ds4_text::{ChatAbilities, ChatContent, ChatMessage};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::json::{self, Fields, under, wrong_type};
use crate::thinking::NO_REASONING;
use crate::tools::{NO_TOOLS, missing, object, required};

/// Most messages of one conversation, parts of one message, calls of one message.
const MAX_MESSAGES: usize = 1 << 16;

/// Reads `messages`, as far as the model's layout has a place for what they hold.
///
/// # Errors
/// Every client error, naming its field by path.
pub fn messages(fields: &mut Fields<'_>, abilities: ChatAbilities) -> Result<Vec<ChatMessage>, ApiError> {
    let Some(raw) = fields.raw("messages") else { return Err(ApiError::missing("messages")) };
    let items = list(raw, "messages")?;
    if items.is_empty() {
        return Err(ApiError::field("empty_prompt", "messages", "`messages` is empty: send at least one message"));
    }
    let mut reading = Reading { abilities, calls: Vec::new() };
    let messages: Vec<ChatMessage> = items
        .iter()
        .enumerate()
        .map(|(i, raw)| reading.message(raw, &format!("messages[{i}]")))
        .collect::<Result<_, _>>()?;
    // Templates of other families may know how to go on with a message; this layout ends it.
    if abilities.reasoning && messages.last().is_some_and(|m| m.role == "assistant") {
        let at = format!("messages[{}].role", messages.len() - 1);
        let rule = "the last message must not be the assistant's: continuing one is not available for this model";
        return Err(ApiError::invalid_value(&at, "`assistant`", rule));
    }
    Ok(messages)
}

/// The elements of an array at path `at`.
fn list<'a>(raw: &'a str, at: &str) -> Result<Vec<&'a str>, ApiError> {
    json::elements(raw, MAX_MESSAGES)
        .map_err(|_| wrong_type(at, "an array", raw))?
        .ok_or_else(|| ApiError::invalid_value(at, "longer than 65536 entries", "send fewer"))
}

struct Reading {
    abilities: ChatAbilities,
    /// Ids of the calls so far.
    calls: Vec<String>,
}

impl Reading {
    fn message(&mut self, raw: &str, at: &str) -> Result<ChatMessage, ApiError> {
        let mut m = object(raw, at)?;
        let role = required(&mut m, "role", at)?;
        let role = self.role(&role, at)?;
        for name in ["function_call", "audio"] {
            m.refuse(name, &[], "not available on this server").map_err(|e| under(at, e))?;
        }
        // What our own answers carry and clients echo.
        m.ignore(&["refusal", "annotations"]);
        let mut message = ChatMessage { role: role.into(), ..ChatMessage::default() };
        message.name = m.string("name").map_err(|e| under(at, e))?;
        if role == "assistant" && self.abilities.tools {
            message.tool_calls = self.tool_calls(&mut m, at)?;
        } else if role == "assistant" {
            m.refuse("tool_calls", &["[]"], NO_TOOLS).map_err(|e| under(at, e))?;
        }
        if role == "assistant" && self.abilities.reasoning {
            message.reasoning_content = m.string("reasoning_content").map_err(|e| under(at, e))?;
        } else if role == "assistant" {
            m.refuse("reasoning_content", &["\"\""], NO_REASONING).map_err(|e| under(at, e))?;
        }
        if role == "tool" {
            message.tool_call_id = Some(self.answered(&mut m, at)?);
        }
        message.content = match m.raw("content") {
            Some(raw) => self.content(raw, &format!("{at}.content"), role)?,
            None if role == "assistant" => ChatContent::Text(String::new()),
            None => return Err(missing(&format!("{at}.content"))),
        };
        m.finish().map_err(|e| under(at, e))?;
        Ok(message)
    }

    fn role(&self, role: &str, at: &str) -> Result<&'static str, ApiError> {
        let at = format!("{at}.role");
        Ok(match role {
            // The two words for the same turn; templates know the older one.
            "system" | "developer" => "system",
            "user" => "user",
            "assistant" => "assistant",
            "tool" if self.abilities.tools => "tool",
            "tool" | "function" => {
                let why = if self.abilities.tools { "send results with the role `tool`" } else { NO_TOOLS };
                return Err(ApiError::unsupported(at.clone(), format!("`{at}` is `{role}`: {why}")));
            }
            "latest_reminder" if self.abilities.reasoning => "latest_reminder",
            other => {
                let other: String = other.chars().take(32).collect();
                let rule = if self.abilities.tools {
                    "must be system, developer, user, assistant, tool or latest_reminder"
                } else {
                    "must be system, developer, user or assistant"
                };
                return Err(ApiError::invalid_value(&at, format!("`{other}`"), rule));
            }
        })
    }

    /// The id of the call that a result answers.
    fn answered(&self, m: &mut Fields<'_>, at: &str) -> Result<String, ApiError> {
        let id = required(m, "tool_call_id", at)?;
        if !self.calls.contains(&id) {
            let shown: String = id.chars().take(64).collect();
            let at = format!("{at}.tool_call_id");
            let rule = "no earlier assistant message has a call with that id in its `tool_calls`";
            return Err(ApiError::invalid_value(&at, format!("`{shown}`"), rule));
        }
        Ok(id)
    }

    /// Calls as the layout takes them: id, name, arguments.
    fn tool_calls(&mut self, m: &mut Fields<'_>, at: &str) -> Result<Option<Value>, ApiError> {
        let Some(raw) = m.raw("tool_calls") else { return Ok(None) };
        let at = format!("{at}.tool_calls");
        let mut calls = Vec::new();
        for (i, raw) in list(raw, &at)?.iter().enumerate() {
            let at = format!("{at}[{i}]");
            let mut call = object(raw, &at)?;
            let id = required(&mut call, "id", &at)?;
            if let Some(kind) = call.string("type").map_err(|e| under(&at, e))?
                && kind != "function"
            {
                let kind: String = kind.chars().take(32).collect();
                let at = format!("{at}.type");
                return Err(ApiError::unsupported(
                    at.clone(),
                    format!("`{at}` is `{kind}`: only `function` is known here"),
                ));
            }
            // What streams carry.
            call.ignore(&["index"]);
            let at_function = format!("{at}.function");
            let Some(raw) = call.raw("function") else { return Err(missing(&at_function)) };
            call.finish().map_err(|e| under(&at, e))?;
            let mut function = object(raw, &at_function)?;
            let name = required(&mut function, "name", &at_function)?;
            let arguments = match function.raw("arguments") {
                None => Value::from("{}"),
                Some(raw) if raw.starts_with(['"', '{']) => serde_json::from_str(raw)
                    .map_err(|_| wrong_type(&format!("{at_function}.arguments"), "a string", raw))?,
                Some(raw) => return Err(wrong_type(&format!("{at_function}.arguments"), "a string", raw)),
            };
            function.finish().map_err(|e| under(&at_function, e))?;
            calls.push(json!({"id": id, "function": {"name": name, "arguments": arguments}}));
            self.calls.push(id);
        }
        Ok((!calls.is_empty()).then_some(Value::Array(calls)))
    }

    /// A string, or an array of parts.
    fn content(&self, raw: &str, at: &str, role: &str) -> Result<ChatContent, ApiError> {
        const EXPECTED: &str = "a string or an array of content parts";
        if raw.starts_with('"') {
            return serde_json::from_str(raw).map(ChatContent::Text).map_err(|_| wrong_type(at, EXPECTED, raw));
        }
        let Some(raws) = json::elements(raw, MAX_MESSAGES).map_err(|_| wrong_type(at, EXPECTED, raw))? else {
            return Err(ApiError::invalid_value(at, "longer than 65536 parts", "send fewer"));
        };
        let mut parts = Vec::with_capacity(raws.len());
        for (i, raw) in raws.iter().enumerate() {
            parts.push(part(raw, &format!("{at}[{i}]"), role == "tool")?);
        }
        if self.abilities.tools {
            // How parts are joined is the layout's affair.
            return Ok(ChatContent::Parts(parts));
        }
        Ok(ChatContent::Text(parts.iter().filter_map(|p| p["text"].as_str()).collect()))
    }
}

/// A text part. `result`: a tool may return what the model cannot read, and it is told so.
fn part(raw: &str, at: &str, result: bool) -> Result<Value, ApiError> {
    let mut part = object(raw, at)?;
    let kind = required(&mut part, "type", at)?;
    if kind != "text" {
        let kind: String = kind.chars().take(32).collect();
        if result {
            return Ok(json!({"type": kind}));
        }
        return Err(ApiError::unsupported(
            format!("{at}.type"),
            format!("`{at}.type` is `{kind}`: the served model takes only `text` parts"),
        ));
    }
    let text = required(&mut part, "text", at)?;
    // A prompt-caching hint of other vendors; it changes no answer.
    part.ignore(&["cache_control"]);
    part.finish().map_err(|e| under(at, e))?;
    Ok(json!({"type": "text", "text": text}))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: ChatAbilities = ChatAbilities { tools: false, reasoning: false };
    const V4: ChatAbilities = ChatAbilities { tools: true, reasoning: true };

    fn read(list: &str, abilities: ChatAbilities) -> Result<Vec<ChatMessage>, ApiError> {
        let body = format!(r#"{{"messages":{list}}}"#);
        messages(&mut Fields::parse(body.as_bytes(), 64)?, abilities)
    }

    #[test]
    fn bad_messages_are_named_by_path() {
        let cases = [
            ("null", "messages", "missing_required_parameter"),
            ("[]", "messages", "empty_prompt"),
            ("{}", "messages", "invalid_type"),
            ("[1]", "messages[0]", "invalid_type"),
            (r#"[{"content":"x"}]"#, "messages[0].role", "missing_required_parameter"),
            (r#"[{"role":"user"}]"#, "messages[0].content", "missing_required_parameter"),
            (r#"[{"role":"user","content":"x"},{"role":"robot","content":"x"}]"#, "messages[1].role", "invalid_value"),
            (r#"[{"role":"tool","content":"x"}]"#, "messages[0].role", "unsupported_parameter"),
            (r#"[{"role":"user","content":3}]"#, "messages[0].content", "invalid_type"),
            (r#"[{"role":"user","content":"x","frob":1}]"#, "messages[0].frob", "unknown_parameter"),
            (
                r#"[{"role":"user","content":[{"type":"image_url"}]}]"#,
                "messages[0].content[0].type",
                "unsupported_parameter",
            ),
            (
                r#"[{"role":"user","content":[{"type":"text"}]}]"#,
                "messages[0].content[0].text",
                "missing_required_parameter",
            ),
            (r#"[{"role":"user","content":["x"]}]"#, "messages[0].content[0]", "invalid_type"),
            (r#"[{"role":"assistant","tool_calls":[{"id":"x"}]}]"#, "messages[0].tool_calls", "unsupported_parameter"),
            (
                r#"[{"role":"assistant","content":"x","reasoning_content":"y"}]"#,
                "messages[0].reasoning_content",
                "unsupported_parameter",
            ),
            (
                r#"[{"role":"user","content":"x","reasoning_content":"y"}]"#,
                "messages[0].reasoning_content",
                "unknown_parameter",
            ),
        ];
        for (messages, param, code) in cases {
            let e = read(messages, PLAIN).unwrap_err();
            assert_eq!((e.param.as_deref(), e.code), (Some(param), code), "{messages}: {}", e.message);
        }
    }

    #[test]
    fn reasoning_in_a_history_is_refused_by_reason_where_there_is_none() {
        let list = |reasoning: &str| {
            format!(
                r#"[{{"role":"assistant","content":"x","reasoning_content":{reasoning}}},{{"role":"user","content":"y"}}]"#
            )
        };
        let e = read(&list("\"hm\""), PLAIN).unwrap_err();
        assert!(e.message.contains("no reasoning mode"), "{}", e.message);
        // Said, but empty: nothing is lost.
        for empty in ["null", "\"\""] {
            assert_eq!(read(&list(empty), PLAIN).unwrap()[0], ChatMessage::new("assistant", "x"));
        }
    }

    #[test]
    fn parts_are_joined_and_developer_is_system() {
        let list = r#"[{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},{"role":"user","content":"c"}]"#;
        assert_eq!(read(list, PLAIN).unwrap(), [ChatMessage::new("system", "ab"), ChatMessage::new("user", "c")]);
        let parts = &read(list, V4).unwrap()[0].content;
        assert!(matches!(parts, ChatContent::Parts(p) if p.len() == 2), "{parts:?}");
    }

    #[test]
    fn deepseek_v4_calls_results_and_reasoning_of_a_history() {
        let call = r#"{"role":"assistant","content":null,"reasoning_content":"hm","tool_calls":[
            {"id":"a","type":"function","index":0,"function":{"name":"f","arguments":"{\"x\": 1}"}},
            {"id":"b","function":{"name":"g","arguments":{"y":2}}}]}"#;
        let list = format!(
            r#"[{{"role":"user","content":"q"}},{call},{{"role":"tool","tool_call_id":"b","content":"2"}},
                {{"role":"tool","tool_call_id":"a","content":[{{"type":"text","text":"1"}},{{"type":"image_url","image_url":{{}}}}]}},
                {{"role":"latest_reminder","content":"r"}}]"#
        );
        let got = read(&list, V4).unwrap();
        assert_eq!(got[1].reasoning_content.as_deref(), Some("hm"));
        let calls = got[1].tool_calls.as_ref().unwrap();
        assert_eq!(calls[0], json!({"id": "a", "function": {"name": "f", "arguments": "{\"x\": 1}"}}));
        assert_eq!(calls[1]["function"]["arguments"], json!({"y": 2}));
        assert_eq!((got[2].role.as_str(), got[2].tool_call_id.as_deref()), ("tool", Some("b")));
        assert!(matches!(&got[3].content, ChatContent::Parts(p) if p[1] == json!({"type": "image_url"})));
        assert_eq!(got[4].role, "latest_reminder");
    }

    #[test]
    fn deepseek_v4_bad_histories_are_named_by_path() {
        let user = r#"{"role":"user","content":"q"}"#;
        let assistant = |calls: &str| format!(r#"[{user},{{"role":"assistant","tool_calls":{calls}}},{user}]"#);
        let cases = [
            (assistant("{}"), "messages[1].tool_calls", "invalid_type"),
            (assistant(r#"[{"function":{"name":"f"}}]"#), "messages[1].tool_calls[0].id", "missing_required_parameter"),
            (assistant(r#"[{"id":"a"}]"#), "messages[1].tool_calls[0].function", "missing_required_parameter"),
            (
                assistant(r#"[{"id":"a","type":"custom","function":{"name":"f"}}]"#),
                "messages[1].tool_calls[0].type",
                "unsupported_parameter",
            ),
            (
                assistant(r#"[{"id":"a","function":{"name":"f","arguments":3}}]"#),
                "messages[1].tool_calls[0].function.arguments",
                "invalid_type",
            ),
            (
                format!(r#"[{user},{{"role":"tool","content":"x"}}]"#),
                "messages[1].tool_call_id",
                "missing_required_parameter",
            ),
            (
                format!(r#"[{user},{{"role":"tool","tool_call_id":"zz","content":"x"}}]"#),
                "messages[1].tool_call_id",
                "invalid_value",
            ),
            (format!(r#"[{user},{{"role":"assistant","content":"x"}}]"#), "messages[1].role", "invalid_value"),
            (format!(r#"[{user},{{"role":"function","content":"x"}}]"#), "messages[1].role", "unsupported_parameter"),
        ];
        for (list, param, code) in cases {
            let e = read(&list, V4).unwrap_err();
            assert_eq!((e.param.as_deref(), e.code), (Some(param), code), "{list}: {}", e.message);
        }
    }
}
