//! `/v1/chat/completions`: parsing. The wire side is in [`crate::chat_wire`].

use std::sync::Arc;

use serde::Deserialize;

use crate::backend::{Backend, ChatMessage};
use crate::error::ApiError;
use crate::job::{Job, check_tokens, prompt_error};
use crate::json::{self, Fields, wrong_type};
use crate::params::{Common, check_model};

const NO_TOOLS: &str = "tool calling is not available on this server yet";

/// Parses a body and tokenises its conversation. May take long for long bodies.
///
/// # Errors
/// Every client error of the surface, naming its field.
pub fn parse(body: &[u8], max_depth: usize, backend: &Arc<dyn Backend>) -> Result<Job, ApiError> {
    let mut fields = Fields::parse(body, max_depth)?;
    check_model(&mut fields, backend.model())?;
    for (name, harmless, why) in [
        ("response_format", &[][..], "only the type `text` is available on this server"),
        ("tools", &["[]"][..], NO_TOOLS),
        ("tool_choice", &["\"none\"", "\"auto\""][..], NO_TOOLS),
        ("functions", &["[]"][..], NO_TOOLS),
        ("function_call", &["\"none\"", "\"auto\""][..], NO_TOOLS),
        ("audio", &[][..], "audio output is not available on this server"),
        ("web_search_options", &[][..], "web search is not available on this server"),
        ("reasoning_effort", &["\"none\""][..], "the served model has no reasoning mode"),
        ("verbosity", &["\"medium\""][..], "the served model has no verbosity control"),
    ] {
        if name == "response_format" {
            response_format(&mut fields)?;
        } else {
            fields.refuse(name, harmless, why)?;
        }
    }
    if fields.take::<Vec<String>>("modalities", "an array of strings")?.is_some_and(|m| m.iter().any(|m| m != "text")) {
        return Err(ApiError::unsupported("modalities", "`modalities`: only `text` is available on this server"));
    }
    let common = Common::parse(&mut fields, backend.model())?;
    let logprobs = logprobs(&mut fields)?;
    let messages = messages(&mut fields)?;
    fields.finish()?;
    let tokens = backend.render(&messages).map_err(|e| prompt_error(e, backend))?;
    check_tokens(&tokens, backend)?;
    Ok(Job { common, prompts: vec![tokens], logprobs, echo: None })
}

/// A response format other than text is refused: an answer that ignores it would look like one that honours it.
pub(crate) fn response_format(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    #[derive(Deserialize)]
    struct ResponseFormat {
        r#type: String,
    }
    match fields.take::<ResponseFormat>("response_format", "an object with a `type`")? {
        Some(f) if f.r#type != "text" => Err(ApiError::unsupported(
            "response_format",
            format!("`response_format` of type `{}`: only `text` is available on this server", f.r#type),
        )),
        _ => Ok(()),
    }
}

fn logprobs(fields: &mut Fields<'_>) -> Result<Option<u32>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=20)?.and_then(|k| u32::try_from(k).ok());
    match (wanted, top) {
        (false, Some(k)) if k > 0 => {
            Err(ApiError::invalid_value("top_logprobs", k, "only allowed with `logprobs`: true"))
        }
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0))),
    }
}

/// Most messages of one conversation.
const MAX_MESSAGES: usize = 1 << 16;

fn messages(fields: &mut Fields<'_>) -> Result<Vec<ChatMessage>, ApiError> {
    let Some(raw) = fields.raw("messages") else { return Err(ApiError::missing("messages")) };
    let Some(items) = json::elements(raw, MAX_MESSAGES).map_err(|_| wrong_type("messages", "an array", raw))? else {
        return Err(ApiError::invalid_value("messages", "longer than 65536 entries", "send fewer"));
    };
    if items.is_empty() {
        return Err(ApiError::field("empty_prompt", "messages", "`messages` is empty: send at least one message"));
    }
    items.iter().enumerate().map(|(i, raw)| message(raw, &format!("messages[{i}]"))).collect()
}

fn message(raw: &str, at: &str) -> Result<ChatMessage, ApiError> {
    if !raw.starts_with('{') {
        return Err(wrong_type(at, "an object", raw));
    }
    // Depth was checked for the whole body.
    let mut m = Fields::parse(raw.as_bytes(), usize::MAX).map_err(|e| under(at, e))?;
    let Some(role) = m.string("role").map_err(|e| under(at, e))? else {
        return Err(ApiError::field(
            "missing_required_parameter",
            format!("{at}.role"),
            format!("`{at}.role` is required"),
        ));
    };
    let role = match &*role {
        // The two words for the same turn; templates know the older one.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" | "function" => {
            return Err(ApiError::unsupported(format!("{at}.role"), format!("`{at}.role` is `{role}`: {NO_TOOLS}")));
        }
        other => {
            let other: String = other.chars().take(32).collect();
            return Err(ApiError::invalid_value(
                &format!("{at}.role"),
                format!("`{other}`"),
                "must be system, developer, user or assistant",
            ));
        }
    };
    for name in ["tool_calls", "function_call", "audio"] {
        m.refuse(name, &["[]"], NO_TOOLS).map_err(|e| under(at, e))?;
    }
    // What our own answers carry and clients echo.
    m.ignore(&["refusal", "annotations"]);
    let name = m.string("name").map_err(|e| under(at, e))?;
    let content = match m.raw("content") {
        Some(raw) => content(raw, &format!("{at}.content"))?,
        None if role == "assistant" => String::new(),
        None => {
            let at = format!("{at}.content");
            return Err(ApiError::field("missing_required_parameter", at.clone(), format!("`{at}` is required")));
        }
    };
    m.finish().map_err(|e| under(at, e))?;
    Ok(ChatMessage { role: role.into(), content, name })
}

/// A string, or an array of text parts.
fn content(raw: &str, at: &str) -> Result<String, ApiError> {
    const EXPECTED: &str = "a string or an array of content parts";
    if raw.starts_with('"') {
        return serde_json::from_str(raw).map_err(|_| wrong_type(at, EXPECTED, raw));
    }
    let Some(parts) = json::elements(raw, MAX_MESSAGES).map_err(|_| wrong_type(at, EXPECTED, raw))? else {
        return Err(ApiError::invalid_value(at, "longer than 65536 parts", "send fewer"));
    };
    let mut text = String::new();
    for (i, raw) in parts.iter().enumerate() {
        let at = format!("{at}[{i}]");
        if !raw.starts_with('{') {
            return Err(wrong_type(&at, "an object", raw));
        }
        let mut part = Fields::parse(raw.as_bytes(), usize::MAX).map_err(|e| under(&at, e))?;
        let kind = part.string("type").map_err(|e| under(&at, e))?;
        match kind.as_deref() {
            Some("text") => {}
            Some(other) => {
                let other: String = other.chars().take(32).collect();
                return Err(ApiError::unsupported(
                    format!("{at}.type"),
                    format!("`{at}.type` is `{other}`: the served model takes only `text` parts"),
                ));
            }
            None => {
                let at = format!("{at}.type");
                return Err(ApiError::field("missing_required_parameter", at.clone(), format!("`{at}` is required")));
            }
        }
        match part.string("text").map_err(|e| under(&at, e))? {
            Some(part) => text.push_str(&part),
            None => {
                let at = format!("{at}.text");
                return Err(ApiError::field("missing_required_parameter", at.clone(), format!("`{at}` is required")));
            }
        }
        // A prompt-caching hint of other vendors; it changes no answer.
        part.ignore(&["cache_control"]);
        part.finish().map_err(|e| under(&at, e))?;
    }
    Ok(text)
}

/// Puts an error's field below `at`.
fn under(at: &str, mut e: ApiError) -> ApiError {
    if let Some(param) = &mut e.param {
        e.message = e.message.replacen(&format!("`{param}`"), &format!("`{at}.{param}`"), 1);
        *param = format!("{at}.{param}");
    }
    e
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Script;

    fn try_parse(body: &str) -> Result<Job, ApiError> {
        let backend: Arc<dyn Backend> = Arc::new(Script::default());
        parse(body.as_bytes(), 64, &backend)
    }

    #[test]
    fn a11_what_cannot_be_honoured_is_refused_by_name() {
        let cases = [
            (r#""response_format":{"type":"json_object"}"#, "response_format"),
            (r#""response_format":{"type":"json_schema","json_schema":{}}"#, "response_format"),
            (r#""tools":[{"type":"function"}]"#, "tools"),
            (r#""tool_choice":"required""#, "tool_choice"),
            (r#""functions":[{}]"#, "functions"),
            (r#""audio":{}"#, "audio"),
            (r#""modalities":["text","audio"]"#, "modalities"),
            (r#""reasoning_effort":"high""#, "reasoning_effort"),
            (r#""web_search_options":{}"#, "web_search_options"),
        ];
        for (field, param) in cases {
            let e = try_parse(&format!(r#"{{"messages":[{{"role":"user","content":"x"}}],{field}}}"#)).unwrap_err();
            assert_eq!((e.status.as_u16(), e.code, e.param.as_deref()), (400, "unsupported_parameter", Some(param)));
        }
        let fine = r#"{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"text"},"tools":[],
            "tool_choice":"auto","modalities":["text"],"tools_":null}"#;
        assert_eq!(try_parse(&fine.replace(",\"tools_\":null", "")).err(), None);
        assert_eq!(try_parse(fine).unwrap_err().code, "unknown_parameter");
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
        ];
        for (messages, param, code) in cases {
            let e = try_parse(&format!(r#"{{"messages":{messages}}}"#)).unwrap_err();
            assert_eq!((e.param.as_deref(), e.code), (Some(param), code), "{messages}: {}", e.message);
        }
    }

    #[test]
    fn parts_are_joined_and_developer_is_system() {
        let mut fields = Fields::parse(
            br#"{"messages":[{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#,
            64,
        )
        .unwrap();
        let got = messages(&mut fields).unwrap();
        assert_eq!(got, vec![ChatMessage { role: "system".into(), content: "ab".into(), name: None }]);
    }

    #[test]
    fn logprobs_want_the_flag() {
        let e = try_parse(r#"{"messages":[{"role":"user","content":"x"}],"top_logprobs":3}"#).unwrap_err();
        assert_eq!(e.param.as_deref(), Some("top_logprobs"));
        let j = try_parse(r#"{"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":3}"#).unwrap();
        assert_eq!(j.logprobs, Some(3));
        let e =
            try_parse(r#"{"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":21}"#).unwrap_err();
        assert_eq!(e.code, "invalid_value");
    }

    #[test]
    fn a_wrong_model_is_404_and_names_the_right_one() {
        let e = try_parse(r#"{"model":"gpt-5","messages":[{"role":"user","content":"x"}]}"#).unwrap_err();
        assert_eq!((e.status.as_u16(), e.code), (404, "model_not_found"));
        assert!(e.message.contains("gpt-5") && e.message.contains("scripted"), "{}", e.message);
    }

    #[test]
    fn too_long_text_is_refused_without_tokenising_all_of_it() {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(4_000_000));
        let e = try_parse(&body).unwrap_err();
        assert_eq!(e.code, "context_length_exceeded");
        assert!(e.message.contains("at least"), "{}", e.message);
    }
}
