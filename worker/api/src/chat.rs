//! `/v1/chat/completions`: parsing. The wire side is in [`crate::chat_wire`].

use std::sync::Arc;

use ds4_text::ChatInput;
use serde_json::{Value, json};

use crate::backend::Backend;
use crate::error::ApiError;
use crate::job::{Job, check_tokens, prompt_error};
use crate::json::{Fields, under, wrong_type};
use crate::messages::messages;
use crate::params::{Common, check_model};
use crate::thinking::thinking;
use crate::tools::{object, required, tools};

/// Most bytes of a schema's text: read, it takes many times as much.
const MAX_SCHEMA: usize = 1 << 20;

/// Parses a body and tokenises its conversation. May take long for long bodies.
///
/// # Errors
/// Every client error of the surface, naming its field.
pub fn parse(body: &[u8], max_depth: usize, backend: &Arc<dyn Backend>) -> Result<Job, ApiError> {
    let mut fields = Fields::parse(body, max_depth)?;
    let model = backend.model();
    check_model(&mut fields, model)?;
    for (name, harmless, why) in [
        ("audio", &[][..], "audio output is not available on this server"),
        ("web_search_options", &[][..], "web search is not available on this server"),
        ("verbosity", &["\"medium\""][..], "the served model has no verbosity control"),
    ] {
        fields.refuse(name, harmless, why)?;
    }
    if fields.take::<Vec<String>>("modalities", "an array of strings")?.is_some_and(|m| m.iter().any(|m| m != "text")) {
        return Err(ApiError::unsupported("modalities", "`modalities`: only `text` is available on this server"));
    }
    let format = response_format(&mut fields)?;
    let tools = tools(&mut fields, model.abilities)?;
    let thinking = thinking(&mut fields, model)?;
    let common = Common::parse(&mut fields, model)?;
    let logprobs = logprobs(&mut fields)?;
    let messages = messages(&mut fields, model.abilities)?;
    fields.finish()?;
    let input = ChatInput {
        tools: tools.offered,
        tool_choice: tools.choice,
        single_call: tools.single,
        thinking,
        response_format: format.schema,
        response_strict: format.strict,
        ..ChatInput::of(messages)
    };
    let prompt = backend.render(&input).map_err(|e| prompt_error(e, backend))?;
    check_tokens(&prompt.tokens, backend)?;
    Ok(Job { common, prompts: vec![prompt.tokens], format: prompt.format, logprobs, echo: None })
}

/// What the answer is to follow.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Format {
    /// A JSON schema; `None`: the answer is free.
    pub schema: Option<Value>,
    /// It must be enforced, and not only asked for.
    pub strict: bool,
}

/// Reads `response_format`.
pub(crate) fn response_format(fields: &mut Fields<'_>) -> Result<Format, ApiError> {
    const AT: &str = "response_format";
    let Some(raw) = fields.raw(AT) else { return Ok(Format::default()) };
    if !raw.starts_with('{') {
        return Err(wrong_type(AT, "an object with a `type`", raw));
    }
    let mut format = object(raw, AT)?;
    let kind = required(&mut format, "type", AT)?;
    let found = match kind.as_str() {
        "text" => Format::default(),
        "json_object" => Format { schema: Some(json!({"type": "object"})), strict: true },
        "json_schema" => schema(&mut format)?,
        other => {
            let other: String = other.chars().take(32).collect();
            let rule = "must be text, json_object or json_schema";
            return Err(ApiError::invalid_value("response_format.type", format!("`{other}`"), rule));
        }
    };
    format.finish().map_err(|e| under(AT, e))?;
    Ok(found)
}

/// The schema of a `json_schema` format.
fn schema(format: &mut Fields<'_>) -> Result<Format, ApiError> {
    const AT: &str = "response_format.json_schema";
    let Some(raw) = format.raw("json_schema") else { return Err(crate::tools::missing(AT)) };
    let mut named = object(raw, AT)?;
    required(&mut named, "name", AT)?;
    named.string("description").map_err(|e| under(AT, e))?;
    let strict = named.bool("strict").map_err(|e| under(AT, e))? == Some(true);
    let at = format!("{AT}.schema");
    if named.len("schema") > MAX_SCHEMA {
        return Err(ApiError::invalid_value(&at, "too long", "its text may have 1 MiB"));
    }
    let schema = match named.raw("schema") {
        Some(raw) if raw.starts_with('{') => {
            serde_json::from_str(raw).map_err(|_| wrong_type(&at, "an object", raw))?
        }
        Some(raw) => return Err(wrong_type(&at, "a JSON schema object", raw)),
        None => return Err(crate::tools::missing(&at)),
    };
    named.finish().map_err(|e| under(AT, e))?;
    Ok(Format { schema: Some(schema), strict })
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
    fn answer_schemas() {
        let read = |value: &str| {
            let body = format!("{{\"response_format\":{value}}}");
            response_format(&mut Fields::parse(body.as_bytes(), 16)?)
        };
        assert_eq!(read(r#"{"type":"text"}"#), Ok(Format::default()));
        let object = Format { schema: Some(json!({"type": "object"})), strict: true };
        assert_eq!(read(r#"{"type":"json_object"}"#), Ok(object));
        for strict in [false, true] {
            let schema = r#"{"type":"json_schema","json_schema":{"name":"n","strict":STRICT,"schema":{"b":1,"a":2}}}"#;
            let read = read(&schema.replace("STRICT", &strict.to_string())).unwrap();
            assert_eq!(read.schema.unwrap().to_string(), r#"{"b":1,"a":2}"#, "in the client's order");
            assert_eq!(read.strict, strict);
        }
        let huge = format!(
            r#"{{"type":"json_schema","json_schema":{{"name":"n","schema":{{"enum":["{}"]}}}}}}"#,
            "x".repeat(MAX_SCHEMA)
        );
        for (value, param, code) in [
            ("3", "response_format", "invalid_type"),
            ("{}", "response_format.type", "missing_required_parameter"),
            (r#"{"type":"xml"}"#, "response_format.type", "invalid_value"),
            (r#"{"type":"json_schema"}"#, "response_format.json_schema", "missing_required_parameter"),
            (
                r#"{"type":"json_schema","json_schema":{"name":"n"}}"#,
                "response_format.json_schema.schema",
                "missing_required_parameter",
            ),
            (
                r#"{"type":"json_schema","json_schema":{"name":"n","schema":{},"strict":1}}"#,
                "response_format.json_schema.strict",
                "invalid_type",
            ),
            (r#"{"type":"json_object","x":1}"#, "response_format.x", "unknown_parameter"),
            (&huge, "response_format.json_schema.schema", "invalid_value"),
        ] {
            let e = read(value).unwrap_err();
            assert_eq!((e.param.as_deref(), e.code), (Some(param), code), "{value}: {}", e.message);
        }
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
