//! The grammar that holds an answer to its schemas: the answer's own, and those of tools whose calls are `strict`.
//!
//! The markup is the one of training ([`super::dsml::serialize`]). A plain string is a parameter as it is, up to the marker of the
//! closing tag, which no text can become; every other value is JSON after its part of the tool's schema. Parameters come in the
//! schema's order. Calls of tools that are not strict have any parameters, in the same markup.

use std::collections::HashSet;
use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::DSML;
use crate::chat::{ChatInput, ToolChoice};
use crate::constraint::{Constraint, ConstraintError, Unenforceable, deep, fits, length, with_options};
use crate::refs;
use crate::schema::{few_parts, parts};
use crate::tokenizer::Tokenizer;

/// Keywords that say nothing of a value.
const ANNOTATIONS: [&str; 7] = ["title", "description", "default", "examples", "deprecated", "$comment", "nullable"];

/// Most bytes of all grammars that are made to find out whose fault it is. 64 KiB may take 0.3 s; 24 tools of an editing agent have 50, of
/// which a search takes no more than five times as much.
const SEARCHED: usize = 256 << 10;

/// What the answers to `input` are held to after their reasoning; `None`: to nothing.
///
/// # Errors
/// A strict schema that cannot be enforced. One that is not strict is only asked for then.
pub(super) fn constraint(input: &ChatInput, tokenizer: &Tokenizer) -> Result<Option<Constraint>, Unenforceable> {
    let tools = tools_of(input);
    if input.response_format.is_none() && !tools.iter().any(|t| t.strict) {
        return Ok(None);
    }
    deep(|| make(input, input.response_format.as_ref(), &tools, tokenizer))
}

fn make(
    input: &ChatInput,
    schema: Option<&Value>,
    tools: &[Tool<'_>],
    tokenizer: &Tokenizer,
) -> Result<Option<Constraint>, Unenforceable> {
    let answer = |held: Result<Constraint, Unenforceable>| match held {
        Ok(held) => Ok(Some(held)),
        Err(e) if input.response_strict => Err(e),
        Err(_) => Ok(None),
    };
    if tools.is_empty() {
        let Some(schema) = schema else { return Ok(None) };
        return answer(tokenizer.grammars().and_then(|g| g.schema(schema)).map_err(Unenforceable::from));
    }
    let strict = tools.iter().any(|t| t.strict);
    if !strict && (schema.is_none() || input.tool_choice != ToolChoice::Auto) {
        return Ok(None);
    }
    let held = markup(input, schema, tools, tokenizer).and_then(|text| Ok(tokenizer.grammars()?.lark(text)?));
    match held {
        Err(_) if strict && schema.is_some() && !input.response_strict => make(input, None, tools, tokenizer),
        Ok(held) => Ok(Some(held)),
        Err(e) if strict && e.tool.is_none() => Err(culprit(e, input, schema, tools, tokenizer)),
        Err(e) if strict => Err(e),
        Err(e) => answer(Err(e)),
    }
}

/// The text of the grammar of an answer to `input` after this schema, or of calls of these tools. It knows the tool that it cannot write.
fn markup(
    input: &ChatInput,
    schema: Option<&Value>,
    tools: &[Tool<'_>],
    tokenizer: &Tokenizer,
) -> Result<String, Unenforceable> {
    let dsml = tokenizer.token_id(DSML).ok_or_else(|| ConstraintError(format!("no token is {DSML}")))?;
    Grammar { dsml, rules: String::new(), schemas: 0, parts: 0, bytes: 0 }.whole(input, schema, tools)
}

/// Names the first strict tool with which there is no grammar of it and those before it, or if that is too much to search a later one of
/// which that is true; if there is one for all of them, the answer's own schema, or a tool where there is none.
fn culprit(
    e: Unenforceable,
    input: &ChatInput,
    schema: Option<&Value>,
    tools: &[Tool<'_>],
    tokenizer: &Tokenizer,
) -> Unenforceable {
    let strict: Vec<Tool<'_>> = tools.iter().filter(|t| t.strict && t.callable(input)).copied().collect();
    // Not one by one: each of them alone may take as long as all together.
    let text = |n: usize| markup(input, None, &strict[..n], tokenizer);
    let fault = |text: String| tokenizer.grammars().and_then(|g| g.check(text)).err().map(Unenforceable::from);
    let known = schema.is_none() && tools.iter().all(|t| t.strict || !t.callable(input));
    let Some(mut found) = (if known { Some(e.clone()) } else { text(strict.len()).map_or_else(Some, fault) }) else {
        let tool = tools.iter().find(|t| t.strict).filter(|_| schema.is_none()).map(|t| t.index);
        return Unenforceable { tool, why: e.why };
    };
    let (mut without, mut with, mut left) = (0, strict.len(), SEARCHED);
    while without + 1 < with {
        let middle = without.midpoint(with);
        // What can be written of all of them can be of fewer.
        let Ok(text) = text(middle) else { break };
        let Some(rest) = left.checked_sub(text.len()) else { break };
        left = rest;
        match fault(text) {
            Some(e) => (with, found) = (middle, e),
            None => without = middle,
        }
    }
    let Some(tool) = strict.get(with.saturating_sub(1)) else { return found };
    // Of a schema alone the library does not say where in the grammar it is.
    let alone = |parameters| tokenizer.grammars().and_then(|g| g.schema(parameters)).err();
    let why = tool.parameters.and_then(alone).map_or(found.why, |e| e.0);
    Unenforceable { tool: Some(tool.index), why }
}

#[derive(Clone, Copy)]
struct Tool<'a> {
    index: usize,
    name: &'a str,
    strict: bool,
    parameters: Option<&'a Value>,
}

impl Tool<'_> {
    fn callable(&self, input: &ChatInput) -> bool {
        !matches!(&input.tool_choice, ToolChoice::Named(name) if name != self.name)
    }
}

fn tools_of(input: &ChatInput) -> Vec<Tool<'_>> {
    let list = input.tools.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let tools = list.iter().enumerate().filter_map(|(index, tool)| {
        let function = tool.get("function").unwrap_or(tool);
        let strict = function.get("strict") == Some(&Value::Bool(true));
        Some(Tool { index, name: function.get("name")?.as_str()?, strict, parameters: function.get("parameters") })
    });
    tools.collect()
}

/// A grammar that is being written, in llguidance's variant of Lark.
struct Grammar {
    /// The token of the marker.
    dsml: u32,
    rules: String,
    schemas: usize,
    /// Of all schemas, parameters of their own included.
    parts: usize,
    /// Of the tools' schemas as they came.
    bytes: usize,
}

/// A literal.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

impl Grammar {
    /// A tag of this text after its marker, with what precedes the marker.
    fn tag(&self, before: &str, after: &str) -> String {
        format!("{} <[{}]> {}", quoted(before), self.dsml, quoted(after))
    }

    fn whole(mut self, input: &ChatInput, schema: Option<&Value>, tools: &[Tool<'_>]) -> Result<String, Unenforceable> {
        let mut calls = Vec::new();
        for tool in tools.iter().filter(|t| t.callable(input)) {
            let call = self.invoke(tool).map_err(|e| Unenforceable { tool: Some(tool.index), why: e.0 })?;
            calls.push(call);
        }
        let repeat = if input.single_call { "" } else { "+" };
        let (open, close) = (format!("<[{}]> {}", self.dsml, quoted("tool_calls>\n")), self.tag("</", "tool_calls>"));
        let mut start = match (&input.tool_choice, schema) {
            (ToolChoice::Auto, Some(schema)) => {
                let answer = self.json(schema)?;
                format!("start: {answer} | (\"\\n\\n\")? \"<\" block\n")
            }
            (ToolChoice::Auto, None) => {
                "start: ANSWER | BEFORE block\nANSWER: /(?s:.*)/\nBEFORE: /((?s:.*)\\n\\n)?</\n".into()
            }
            _ => "start: \"\\n\\n<\" block\n".into(),
        };
        let _ = writeln!(start, "block: {open} invoke{repeat} {close}\ninvoke: {}", calls.join(" | "));
        // Of everything that a closing tag could end, the marker ends it: nothing else is a token of its own.
        start += "VALUE: /(?s:.*)<\\//\nKEY: /[^\"<>\\n]+/\n";
        Ok(start + &self.rules)
    }

    /// One call of this tool.
    fn invoke(&mut self, tool: &Tool<'_>) -> Result<String, ConstraintError> {
        let open = self.tag("<", &format!("invoke name=\"{}\">\n", tool.name));
        let close = self.tag("</", "invoke>\n");
        let body = if tool.strict { self.parameters(tool.parameters)? } else { self.any_parameters() };
        // A call without parameters has an empty line in their place.
        Ok(format!("({open} {body} \"\\n\"? {close})"))
    }

    fn any_parameters(&self) -> String {
        let (open, close) = (self.tag("<", "parameter name=\""), self.closed());
        format!("({open} KEY \"\\\" string=\\\"\" (\"true\" | \"false\") \"\\\">\" VALUE {close})*")
    }

    /// The rest of a parameter behind `</`.
    fn closed(&self) -> String {
        format!("<[{}]> {}", self.dsml, quoted("parameter>\n"))
    }

    fn parameters(&mut self, schema: Option<&Value>) -> Result<String, ConstraintError> {
        let Some(schema) = schema else { return Ok(String::new()) };
        let refused = |why: &str| Err(ConstraintError(format!("{why}; leave `strict` out")));
        // Before anything is made of it: a body may have 64 times as much.
        self.bytes += length(schema);
        fits(self.bytes)?;
        // Before its parts are looked at one by one.
        let mut schema = schema.clone();
        refs::resolve(&mut schema)?;
        refs::inline_root(&mut schema, |key, value| {
            ["$schema", "$id", "strict"].contains(&key)
                || ANNOTATIONS.contains(&key)
                || (key == "type" && value == "object")
        });
        let object = schema.as_object().filter(|s| s.get("type").is_none_or(|t| t == "object"));
        let Some(object) = object else { return refused("the schema's `type` is not `object`") };
        // What ties parameters to each other, or names them by a pattern, has no place in this markup.
        let known = [
            "type",
            "properties",
            "required",
            "additionalProperties",
            "$defs",
            "definitions",
            "$schema",
            "$id",
            "strict",
        ];
        if let Some(other) = object.keys().find(|k| !known.contains(&k.as_str()) && !ANNOTATIONS.contains(&k.as_str()))
        {
            return refused(&format!("`{other}` of all parameters together is not enforced on this server"));
        }
        // Listed, each of 2,000 properties would be looked for among a megabyte of names.
        let required: HashSet<&str> =
            object.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let none = Map::new();
        let properties = object.get("properties").and_then(Value::as_object).unwrap_or(&none);
        if let Some(missing) = required.iter().find(|r| !properties.contains_key(**r)) {
            return refused(&format!("`{missing}` is required and not among the `properties`"));
        }
        self.parts += properties.len();
        few_parts(self.parts)?;
        let mut body = Vec::new();
        for (key, value) in properties {
            if key.is_empty() || key.contains(['"', '<', '>', '\n']) {
                return refused(&format!("the parameter's name {key:?} cannot be written in this model's markup"));
            }
            let alternatives: Vec<String> =
                self.values(value, object)?.into_iter().map(|v| format!("({v} {})", self.closed())).collect();
            let is_required = required.contains(key.as_str());
            match alternatives.as_slice() {
                [] if is_required => return refused(&format!("`{key}` is required and can have no value")),
                [] => continue,
                _ => {}
            }
            let open = self.tag("<", &format!("parameter name=\"{key}\" string=\""));
            let optional = if is_required { "" } else { "?" };
            body.push(format!("({open} ({})){optional}", alternatives.join(" | ")));
        }
        Ok(body.join(" "))
    }

    /// The ways to write a value of this schema, from the value of `string=` up to `</`.
    fn values(&mut self, schema: &Value, root: &Map<String, Value>) -> Result<Vec<String>, ConstraintError> {
        let says = |key: &str| schema.get(key);
        let keys = || schema.as_object().into_iter().flatten().map(|(k, _)| k.as_str());
        let only = |names: &[&str]| keys().all(|k| names.contains(&k) || ANNOTATIONS.contains(&k));
        if let Some(Value::Array(list)) = says("anyOf")
            && only(&["anyOf"])
        {
            let mut ways = Vec::new();
            for one in list {
                ways.extend(self.values(one, root)?);
            }
            return Ok(ways);
        }
        let constant = says("const").map(std::slice::from_ref);
        if let Some(list) = constant.or_else(|| says("enum").and_then(Value::as_array).map(Vec::as_slice))
            && only(&["type", "enum", "const"])
        {
            let (strings, others): (Vec<&Value>, Vec<&Value>) = list.iter().partition(|v| v.is_string());
            let string =
                |v: &&Value| format!("\"true\\\">\" {}", quoted(&format!("{}</", v.as_str().unwrap_or_default())));
            let mut ways: Vec<String> = strings.iter().map(string).collect();
            if !others.is_empty() {
                ways.push(self.json_value(&json!({ "enum": others }), root)?);
            }
            return Ok(ways);
        }
        let string = "\"true\\\">\" VALUE".to_owned();
        Ok(match says("type") {
            None if only(&[]) => vec![string, self.json_value(schema, root)?],
            Some(Value::String(t)) if t == "string" && only(&["type"]) => vec![string],
            Some(Value::Array(types))
                if types.iter().any(|t| t == "string") && keys().all(|k| !OF_STRINGS.contains(&k)) =>
            {
                let others: Vec<&Value> = types.iter().filter(|t| *t != "string").collect();
                let mut ways = vec![string];
                if !others.is_empty() {
                    let mut schema = schema.clone();
                    schema["type"] = json!(others);
                    ways.push(self.json_value(&schema, root)?);
                }
                ways
            }
            _ => vec![self.json_value(schema, root)?],
        })
    }

    fn json_value(&mut self, schema: &Value, root: &Map<String, Value>) -> Result<String, ConstraintError> {
        let mut schema = schema.clone();
        if let Some(object) = schema.as_object_mut() {
            for defs in ["$defs", "definitions"] {
                if let Some(found) = root.get(defs) {
                    object.insert(defs.to_owned(), found.clone());
                }
            }
        }
        let json = self.json(&schema)?;
        Ok(format!("\"false\\\">\" {json} \"</\""))
    }

    /// A rule of JSON after this schema.
    fn json(&mut self, schema: &Value) -> Result<String, ConstraintError> {
        let name = format!("json{}", self.schemas);
        self.schemas += 1;
        let schema = with_options(schema)?;
        self.parts += parts(&schema);
        few_parts(self.parts)?;
        let _ = writeln!(self.rules, "{name}: %json {schema}");
        // Every parameter's rule repeats the tool's definitions.
        fits(self.rules.len())?;
        Ok(name)
    }
}

/// Keywords that restrict strings: such a string is written as JSON.
const OF_STRINGS: [&str; 6] = ["pattern", "minLength", "maxLength", "format", "enum", "const"];

#[cfg(test)]
mod tests;
