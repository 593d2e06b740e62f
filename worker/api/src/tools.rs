//! The tools of a chat request: what is on offer, and whether one must be called.

use ds4_text::{ChatAbilities, ToolChoice};
use serde_json::Value;

use crate::error::ApiError;
use crate::json::{self, Fields, under, wrong_type};

/// Why a model without a place for tools refuses them.
pub(crate) const NO_TOOLS: &str = "the served model cannot call tools";

/// Most tools of one request.
const MAX_TOOLS: usize = 1024;
/// Most bytes of a tool's name.
const MAX_NAME: usize = 128;

/// What a request says of tools.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    /// Those on offer, as the client wrote them. `None`: there are none, or the answer must not call.
    pub offered: Option<Value>,
    /// Whether the answer must call one.
    pub choice: ToolChoice,
    /// It may call no more than one.
    pub single: bool,
}

/// Reads `tools`, `tool_choice`, `parallel_tool_calls`, and refuses the fields that preceded them at OpenAI.
///
/// # Errors
/// `unsupported_parameter`, `invalid_type`, `invalid_value`, `missing_required_parameter`, `unknown_parameter`, each naming
/// its field.
pub fn tools(fields: &mut Fields<'_>, abilities: ChatAbilities) -> Result<Tools, ApiError> {
    for name in ["functions", "function_call"] {
        let harmless = if name == "functions" { &["[]"][..] } else { &["\"none\"", "\"auto\""][..] };
        let why = if abilities.tools { "send `tools` and `tool_choice` instead" } else { NO_TOOLS };
        fields.refuse(name, harmless, why)?;
    }
    let parallel = fields.bool("parallel_tool_calls")?;
    if !abilities.tools {
        fields.refuse("tools", &["[]"], NO_TOOLS)?;
        fields.refuse("tool_choice", &["\"none\"", "\"auto\""], NO_TOOLS)?;
        return Ok(Tools::default());
    }
    let (list, names) = offered(fields)?;
    let choice = choice(fields, &names)?;
    Ok(match choice {
        None => Tools::default(),
        Some(choice) => {
            let offered = (!list.is_empty()).then_some(Value::Array(list));
            Tools { offered, choice, single: parallel == Some(false) }
        }
    })
}

fn offered(fields: &mut Fields<'_>) -> Result<(Vec<Value>, Vec<String>), ApiError> {
    let Some(raw) = fields.raw("tools") else { return Ok(Default::default()) };
    let Some(items) = json::elements(raw, MAX_TOOLS).map_err(|_| wrong_type("tools", "an array", raw))? else {
        return Err(ApiError::invalid_value("tools", format!("longer than {MAX_TOOLS} entries"), "send fewer"));
    };
    let mut names = Vec::with_capacity(items.len());
    let mut list = Vec::with_capacity(items.len());
    for (i, raw) in items.iter().enumerate() {
        let at = format!("tools[{i}]");
        let name = tool(raw, &at)?;
        if names.contains(&name) {
            let at = format!("{at}.function.name");
            return Err(ApiError::invalid_value(&at, format!("`{name}`"), "an earlier tool has that name"));
        }
        names.push(name);
        list.push(serde_json::from_str(raw).map_err(|_| wrong_type(&at, "an object", raw))?);
    }
    Ok((list, names))
}

/// Checks one tool and gives its name.
fn tool(raw: &str, at: &str) -> Result<String, ApiError> {
    let mut tool = object(raw, at)?;
    let kind = required(&mut tool, "type", at)?;
    if kind != "function" {
        let kind: String = kind.chars().take(32).collect();
        return Err(ApiError::unsupported(
            format!("{at}.type"),
            format!("`{at}.type` is `{kind}`: only tools of type `function` are available on this server"),
        ));
    }
    let at_function = format!("{at}.function");
    let Some(raw) = tool.raw("function") else { return Err(missing(&at_function)) };
    tool.finish().map_err(|e| under(at, e))?;
    let mut function = object(raw, &at_function)?;
    let name = required(&mut function, "name", &at_function)?;
    if !is_name(&name) {
        let shown: String = name.chars().take(64).collect();
        return Err(ApiError::invalid_value(
            &format!("{at_function}.name"),
            format!("`{shown}`"),
            "must be 1 to 128 letters, digits and the characters _ - . : /",
        ));
    }
    function.string("description").map_err(|e| under(&at_function, e))?;
    if let Some(raw) = function.raw("parameters").filter(|raw| !raw.starts_with('{')) {
        return Err(wrong_type(&format!("{at_function}.parameters"), "a JSON schema object", raw));
    }
    // Whether its schema can be enforced is seen when the grammar of the answer is made.
    function.bool("strict").map_err(|e| under(&at_function, e))?;
    function.finish().map_err(|e| under(&at_function, e))?;
    Ok(name)
}

/// Names go into markup as they are, so they must not look like any.
fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.' | b':' | b'/'))
}

/// `None`: the answer must not call.
fn choice(fields: &mut Fields<'_>, names: &[String]) -> Result<Option<ToolChoice>, ApiError> {
    const EXPECTED: &str = "`none`, `auto`, `required` or an object that names a function";
    let Some(raw) = fields.raw("tool_choice") else { return Ok(Some(ToolChoice::Auto)) };
    let choice = if raw.starts_with('"') {
        let word: String = serde_json::from_str(raw).map_err(|_| wrong_type("tool_choice", EXPECTED, raw))?;
        match word.as_str() {
            "none" => return Ok(None),
            "auto" => return Ok(Some(ToolChoice::Auto)),
            "required" => ToolChoice::Required,
            other => {
                let other: String = other.chars().take(32).collect();
                return Err(ApiError::invalid_value(
                    "tool_choice",
                    format!("`{other}`"),
                    "must be none, auto or required",
                ));
            }
        }
    } else if raw.starts_with('{') {
        ToolChoice::Named(named(raw)?)
    } else {
        return Err(wrong_type("tool_choice", EXPECTED, raw));
    };
    if names.is_empty() {
        return Err(ApiError::invalid_value("tool_choice", raw, "there are no `tools` to call"));
    }
    if let ToolChoice::Named(name) = &choice
        && !names.contains(name)
    {
        let shown: String = name.chars().take(64).collect();
        let at = "tool_choice.function.name";
        return Err(ApiError::invalid_value(at, format!("`{shown}`"), "must be the name of one of the `tools`"));
    }
    Ok(Some(choice))
}

fn named(raw: &str) -> Result<String, ApiError> {
    let mut choice = object(raw, "tool_choice")?;
    let kind = required(&mut choice, "type", "tool_choice")?;
    if kind != "function" {
        let kind: String = kind.chars().take(32).collect();
        return Err(ApiError::unsupported(
            "tool_choice.type",
            format!("`tool_choice.type` is `{kind}`: only `function` is available on this server"),
        ));
    }
    let Some(raw) = choice.raw("function") else { return Err(missing("tool_choice.function")) };
    choice.finish().map_err(|e| under("tool_choice", e))?;
    let mut function = object(raw, "tool_choice.function")?;
    let name = required(&mut function, "name", "tool_choice.function")?;
    function.finish().map_err(|e| under("tool_choice.function", e))?;
    Ok(name)
}

/// The fields of an object at path `at`.
pub(crate) fn object<'a>(raw: &'a str, at: &str) -> Result<Fields<'a>, ApiError> {
    if !raw.starts_with('{') {
        return Err(wrong_type(at, "an object", raw));
    }
    // Depth was checked for the whole body.
    Fields::parse(raw.as_bytes(), usize::MAX).map_err(|e| under(at, e))
}

/// A string that must be there.
pub(crate) fn required(fields: &mut Fields<'_>, name: &str, at: &str) -> Result<String, ApiError> {
    fields.string(name).map_err(|e| under(at, e))?.ok_or_else(|| missing(&format!("{at}.{name}")))
}

/// A field that must be there and is not.
pub(crate) fn missing(at: &str) -> ApiError {
    ApiError::field("missing_required_parameter", at, format!("`{at}` is required"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: ChatAbilities = ChatAbilities { tools: true, reasoning: true };
    const F: &str = r#"{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}"#;

    fn read(body: &str) -> Result<Tools, ApiError> {
        let mut fields = Fields::parse(body.as_bytes(), 16)?;
        let tools = tools(&mut fields, V4)?;
        fields.finish()?;
        Ok(tools)
    }

    #[test]
    fn choices_and_their_tools() {
        let choice = |choice: &str| read(&format!(r#"{{"tools":[{F}],"tool_choice":{choice}}}"#)).unwrap();
        assert_eq!(choice("null").choice, ToolChoice::Auto);
        assert_eq!(choice("\"required\"").choice, ToolChoice::Required);
        let named = choice(r#"{"type":"function","function":{"name":"f"}}"#);
        assert_eq!(named.choice, ToolChoice::Named("f".into()));
        assert_eq!(named.offered.unwrap()[0]["function"]["name"], "f");
        assert_eq!(choice("\"none\""), Tools::default(), "not to be called: not on offer");
        assert!(read(&format!(r#"{{"tools":[{F}],"parallel_tool_calls":false}}"#)).unwrap().single);
        assert_eq!(read(r#"{"tools":[],"tool_choice":"auto"}"#).unwrap().offered, None);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_value() {
        let cases = [
            (r#"{"tools":{}}"#, "tools", "invalid_type"),
            (r#"{"tools":[1]}"#, "tools[0]", "invalid_type"),
            (r#"{"tools":[{}]}"#, "tools[0].type", "missing_required_parameter"),
            (r#"{"tools":[{"type":"custom","custom":{}}]}"#, "tools[0].type", "unsupported_parameter"),
            (r#"{"tools":[{"type":"function"}]}"#, "tools[0].function", "missing_required_parameter"),
            (
                r#"{"tools":[{"type":"function","function":{}}]}"#,
                "tools[0].function.name",
                "missing_required_parameter",
            ),
            (r#"{"tools":[{"type":"function","function":{"name":"a b"}}]}"#, "tools[0].function.name", "invalid_value"),
            (r#"{"tools":[{"type":"function","function":{"name":"<f>"}}]}"#, "tools[0].function.name", "invalid_value"),
            (
                r#"{"tools":[{"type":"function","function":{"name":"f","parameters":1}}]}"#,
                "tools[0].function.parameters",
                "invalid_type",
            ),
            (
                r#"{"tools":[{"type":"function","function":{"name":"f","strict":1}}]}"#,
                "tools[0].function.strict",
                "invalid_type",
            ),
            (
                r#"{"tools":[{"type":"function","function":{"name":"f","frob":1}}]}"#,
                "tools[0].function.frob",
                "unknown_parameter",
            ),
            (r#"{"tool_choice":"required"}"#, "tool_choice", "invalid_value"),
            (r#"{"tool_choice":"any"}"#, "tool_choice", "invalid_value"),
            (r#"{"tool_choice":3}"#, "tool_choice", "invalid_type"),
            (r#"{"tool_choice":{"type":"allowed_tools"}}"#, "tool_choice.type", "unsupported_parameter"),
            (r#"{"functions":[{}]}"#, "functions", "unsupported_parameter"),
            (r#"{"parallel_tool_calls":1}"#, "parallel_tool_calls", "invalid_type"),
        ];
        for (body, param, code) in cases {
            let e = read(body).unwrap_err();
            assert_eq!((e.param.as_deref(), e.code), (Some(param), code), "{body}: {}", e.message);
        }
        let twice = read(&format!(r#"{{"tools":[{F},{F}]}}"#)).unwrap_err();
        assert_eq!(twice.param.as_deref(), Some("tools[1].function.name"));
        let other = r#""tool_choice":{"type":"function","function":{"name":"g"}}"#;
        let e = read(&format!(r#"{{"tools":[{F}],{other}}}"#)).unwrap_err();
        assert!(e.message.contains("`g`"), "{}", e.message);
    }
}
