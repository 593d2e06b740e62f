//! A model's chat template: compiled and tried at load, rendered for each request.

use std::fmt;

use ds4_manifests::Metadata;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Value as Json, json};

use super::guard::{ControlStrings, Guard, RenderedPrompt, Role};
use super::{ChatContent, ChatInput, ChatMessage, python, static_check};
use crate::error::TextError;
use crate::vocabulary::control_strings;

const MAIN: &str = "chat_template";
const TOOL_USE: &str = "tool_use";

/// Roles that templates compare with literals; anything else in `role` is a user's text.
const KNOWN_ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function", "ipython", "model"];

/// What `raise_exception` throws, to be told from a template's own mistakes.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// A Jinja template, known to work on plain conversations.
#[derive(Debug)]
pub(super) struct JinjaTemplate {
    env: Environment<'static>,
    controls: ControlStrings,
    /// `bos_token` and the like, as far as the model has them.
    token_names: Vec<(&'static str, String)>,
    has_tool_use: bool,
    takes_parts: bool,
}

/// Jinja as transformers sets it up for chat templates: blocks trimmed, no escaping, Python's values and methods.
fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(|out, _, value| match value.as_str() {
        Some(s) => out.write_str(s).map_err(Error::from),
        None => out.write_str(&python::str_of(value)).map_err(Error::from),
    });
    env.set_unknown_method_callback(python::method);
    env.add_filter("tojson", python::to_json);
    env.add_filter("trim", python::trim);
    env.add_filter("string", |value: &Value| python::str_of(value));
    env.add_function("strftime_now", |format: String| python::strftime_now(&format));
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = python::str_of(message);
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    Ok(env)
}

/// The words of `raise_exception`, if that is what `e` comes from.
fn raised(e: &Error) -> Option<String> {
    let mut cause = std::error::Error::source(e);
    while let Some(c) = cause {
        if let Some(Raised(message)) = c.downcast_ref() {
            return Some(message.clone());
        }
        cause = c.source();
    }
    None
}

fn line_and_cause(e: &Error) -> (usize, String) {
    let what = match e.detail() {
        Some(detail) => format!("{}: {detail}", e.kind()),
        None => e.kind().to_string(),
    };
    (e.line().unwrap_or(0), what)
}

fn bad(e: &Error) -> TextError {
    let (line, what) = line_and_cause(e);
    TextError::BadTemplate { line, what }
}

/// A JSON value for a template, with each string (and key) passed through `string`.
fn to_value(json: &Json, string: &mut impl FnMut(&str, &str) -> String, key: &str) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (_, Some(u)) => Value::from(u),
            _ => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => Value::from(string(key, s)),
        Json::Array(items) => items.iter().map(|i| to_value(i, string, key)).collect(),
        Json::Object(map) => Value::from_pairs(
            map.iter().map(|(k, v)| (Value::from(string("", k)), to_value(v, string, k))).collect::<Vec<_>>(),
        ),
    }
}

impl JinjaTemplate {
    /// Compiles `tokenizer.chat_template` and renders trial conversations with it.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`] when the model has none; [`TextError::BadTemplate`], with the line, when it does not
    /// compile, uses something that does not exist, or fails on one user message.
    pub(super) fn compile(m: &Metadata) -> Result<Self, TextError> {
        let source = m.str("tokenizer.chat_template").ok_or(TextError::NoChatTemplate)?;
        let mut env = environment().map_err(|e| bad(&e))?;
        env.add_template_owned(MAIN, source.to_owned()).map_err(|e| bad(&e))?;
        let tool_use = m.str("tokenizer.chat_template.tool_use");
        if let Some(source) = tool_use {
            env.add_template_owned(TOOL_USE, source.to_owned()).map_err(|e| bad(&e))?;
        }
        let tokens = m.strings("tokenizer.ggml.tokens");
        let token_names = [
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        ]
        .into_iter()
        .filter_map(|(name, key)| {
            let id = usize::try_from(m.u64(key)?).ok()?;
            Some((name, String::from_utf8(tokens?.get(id)?.to_vec()).ok()?))
        })
        .collect();
        let controls = ControlStrings::new(control_strings(m))?;
        let mut template = Self { env, controls, token_names, has_tool_use: tool_use.is_some(), takes_parts: false };
        for (name, _) in template.env.templates() {
            if let Ok(compiled) = template.env.get_template(name)
                && let Some((line, what)) = static_check::first_unknown(&template.env, &compiled)
            {
                return Err(TextError::BadTemplate { line, what });
            }
        }
        template.try_out()?;
        template.takes_parts = template.probe_parts();
        Ok(template)
    }

    /// Renders conversations that every chat model must take, and some that a template may refuse but not choke on.
    fn try_out(&self) -> Result<(), TextError> {
        // Digits, which no case filter of a template changes.
        const PROBE: &str = "735190446812";
        let first = ChatInput::of(vec![ChatMessage::new("user", PROBE)]);
        let text = match self.render(&first) {
            Ok(prompt) => prompt.text(),
            Err(TextError::RenderFailed { line, what }) => return Err(TextError::BadTemplate { line, what }),
            Err(TextError::Refused { reason }) => {
                return Err(TextError::BadTemplate {
                    line: 0,
                    what: format!("it refuses a single user message: {reason}"),
                });
            }
            Err(e) => return Err(e),
        };
        if !text.contains(PROBE) {
            let what = "what the user says does not appear in the rendered prompt".to_owned();
            return Err(TextError::BadTemplate { line: 0, what });
        }
        let call = json!([{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]);
        let tools = json!([{"type": "function", "function": {"name": "f", "description": "d", "parameters":
            {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}]);
        let conversation = |messages| ChatInput { add_generation_prompt: false, ..ChatInput::of(messages) };
        let user = || ChatMessage::new("user", "a");
        let assistant = || ChatMessage::new("assistant", "b");
        let optional = [
            ChatInput::of(vec![ChatMessage::new("system", "s"), user(), assistant(), user()]),
            conversation(vec![user(), assistant()]),
            ChatInput {
                tools: Some(tools),
                ..ChatInput::of(vec![
                    user(),
                    ChatMessage { tool_calls: Some(call), content: ChatContent::None, ..assistant() },
                    ChatMessage {
                        tool_call_id: Some("call_1".into()),
                        name: Some("f".into()),
                        ..ChatMessage::new("tool", "1")
                    },
                ])
            },
        ];
        for input in optional {
            if let Err((e, true)) = self.render_raw(&input) {
                return Err(e);
            }
        }
        Ok(())
    }

    /// True when the template walks lists of content parts itself.
    fn probe_parts(&self) -> bool {
        const PROBE: &str = "912780335164";
        let parts = ChatContent::Parts(vec![json!({"type": "text", "text": PROBE})]);
        let mut message = ChatMessage::new("user", "");
        message.content = parts;
        let values = self.values(&ChatInput::of(vec![message]), true);
        let Ok((values, guard)) = values else { return false };
        let Ok(text) = self.env.get_template(MAIN).and_then(|t| t.render(values)) else { return false };
        let text = guard.rendered(text).text();
        // A template that prints the list as it is would show its keys.
        text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\"")
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`TextError::Refused`] when the template refuses it, [`TextError::UnsupportedPart`] for a part that is not text,
    /// [`TextError::RenderFailed`] when the template fails.
    pub(super) fn render(&self, input: &ChatInput) -> Result<RenderedPrompt, TextError> {
        self.render_raw(input).map_err(|(e, _)| match e {
            TextError::BadTemplate { line, what } => TextError::RenderFailed { line, what },
            e => e,
        })
    }

    /// The flag of an error says that the template uses something that does not exist here.
    fn render_raw(&self, input: &ChatInput) -> Result<RenderedPrompt, (TextError, bool)> {
        let (values, guard) = self.values(input, self.takes_parts).map_err(|e| (e, false))?;
        let wants_tools = input.tools.as_ref().is_some_and(|t| t.as_array().is_none_or(|a| !a.is_empty()));
        let name = if self.has_tool_use && wants_tools { TOOL_USE } else { MAIN };
        match self.env.get_template(name).and_then(|t| t.render(values)) {
            Ok(text) => Ok(guard.rendered(text)),
            Err(e) => Err(match raised(&e) {
                Some(reason) => (TextError::Refused { reason }, false),
                None => {
                    use ErrorKind::{UnknownFilter, UnknownFunction, UnknownMethod, UnknownTest};
                    (bad(&e), matches!(e.kind(), UnknownFilter | UnknownFunction | UnknownMethod | UnknownTest))
                }
            }),
        }
    }

    /// The template's variables, with a user's strings guarded.
    fn values(&self, input: &ChatInput, parts: bool) -> Result<(Value, Guard<'_>), TextError> {
        let mut guard = Guard::new(&self.controls);
        let mut messages = Vec::with_capacity(input.messages.len());
        for message in &input.messages {
            messages.push(message_value(message, parts, &mut guard)?);
        }
        let mut structure = |_: &str, s: &str| guard.hide(s, Role::Structure);
        let tools = input.tools.as_ref().map_or_else(|| Value::from(()), |t| to_value(t, &mut structure, ""));
        let mut values: Vec<(Value, Value)> =
            self.token_names.iter().map(|(name, token)| (Value::from(*name), Value::from(token.as_str()))).collect();
        values.extend(input.variables.iter().map(|(k, v)| (Value::from(k.as_str()), to_value(v, &mut structure, k))));
        // Last, so that no variable of a request replaces them.
        values.push((Value::from("messages"), Value::from(messages)));
        values.push((Value::from("tools"), tools));
        values.push((Value::from("documents"), Value::from(())));
        values.push((Value::from("add_generation_prompt"), Value::from(input.add_generation_prompt)));
        Ok((Value::from_pairs(values), guard))
    }
}

fn message_value(message: &ChatMessage, parts: bool, guard: &mut Guard<'_>) -> Result<Value, TextError> {
    let mut fields: Vec<(&str, Value)> = Vec::new();
    let role = match message.role.as_str() {
        known if KNOWN_ROLES.contains(&known) => known.to_owned(),
        other => guard.hide(other, Role::Content),
    };
    fields.push(("role", Value::from(role)));
    let content = match &message.content {
        // A template of plain chat adds content to strings; only a message of calls is expected to have none.
        ChatContent::None if message.tool_calls.is_none() => Value::from(""),
        ChatContent::None => Value::from(()),
        ChatContent::Text(text) => Value::from(guard.hide(text, Role::Content)),
        ChatContent::Parts(list) => {
            let texts = list.iter().map(part_text).collect::<Result<Vec<&str>, _>>()?;
            if parts {
                let text = |t: &&str| {
                    Value::from_pairs([
                        ("type", Value::from("text")),
                        ("text", Value::from(guard.hide(t, Role::Content))),
                    ])
                };
                texts.iter().map(text).collect()
            } else {
                Value::from(guard.hide(&texts.join("\n"), Role::Content))
            }
        }
    };
    fields.push(("content", content));
    if let Some(name) = &message.name {
        fields.push(("name", Value::from(guard.hide(name, Role::Structure))));
    }
    if let Some(calls) = &message.tool_calls {
        let calls = with_parsed_arguments(calls);
        fields.push(("tool_calls", to_value(&calls, &mut |_, s| guard.hide(s, Role::Structure), "")));
    }
    if let Some(id) = &message.tool_call_id {
        fields.push(("tool_call_id", Value::from(guard.hide(id, Role::Structure))));
    }
    if let Some(thinking) = &message.reasoning_content {
        fields.push(("reasoning_content", Value::from(guard.hide(thinking, Role::Content))));
    }
    Ok(Value::from_pairs(fields))
}

pub(crate) fn part_text(part: &Json) -> Result<&str, TextError> {
    if let Json::String(s) = part {
        return Ok(s);
    }
    let kind = part["type"].as_str().unwrap_or("(none)");
    match part["text"].as_str() {
        Some(text) if matches!(kind, "text" | "input_text" | "output_text") => Ok(text),
        _ => Err(TextError::UnsupportedPart { kind: kind.to_owned() }),
    }
}

/// OpenAI sends arguments as a string of JSON; templates print `arguments | tojson` and would quote it twice.
fn with_parsed_arguments(calls: &Json) -> Json {
    let mut calls = calls.clone();
    for call in calls.as_array_mut().into_iter().flatten() {
        let call = if call.get("function").is_some() { &mut call["function"] } else { call };
        if let Some(Json::String(text)) = call.get("arguments")
            && let Ok(object @ Json::Object(_)) = serde_json::from_str(text)
        {
            call["arguments"] = object;
        }
    }
    calls
}

#[cfg(test)]
mod tests;
