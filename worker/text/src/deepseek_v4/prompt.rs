//! DeepSeek V4's prompt layout: a conversation as the text that the model was trained on.
//!
//! Begin of sequence, effort text, system text with tools and answer schema, turns, and where the answer begins. There is no
//! separator between any of these. A tool's results are part of a user turn. Every string that is not part of the layout is
//! guarded, see [`crate::chat`]: text that came from a user never becomes a control token.

use ds4_manifests::Metadata;
use serde_json::Value;

use super::dsml::{ToolCall, serialize_with};
use super::reader::Format;
use super::{ASSISTANT, BOS, DSML, END_THINK, EOS, LATEST_REMINDER, NEEDED, THINK, USER, dumps};
use crate::chat::{ChatContent, ChatInput, ChatMessage, ControlStrings, Guard, RenderedPrompt, Role, part_text};
use crate::constraint::Unenforceable;
use crate::error::TextError;
use crate::tokenizer::Tokenizer;
use crate::vocabulary::control_strings;

/// How much the model thinks before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// Not at all: the prompt ends with `</think>`.
    None,
    /// As it sees fit: the prompt ends with `<think>`, and the answer begins with reasoning up to `</think>`.
    High,
    /// As [`Thinking::High`], with a text before the conversation that asks for the most. The makers give it a context of at
    /// least 393,216 tokens; whether the server's is that large is the caller's to judge.
    Max,
}

impl Thinking {
    /// The mode that a request's spelling of `reasoning_effort` means: `none` and `max` are themselves, the other known
    /// levels are [`Thinking::High`]; `None` for an unknown word.
    pub fn from_effort(effort: &str) -> Option<Self> {
        match effort {
            "none" => Some(Self::None),
            "minimal" | "low" | "medium" | "high" | "xhigh" => Some(Self::High),
            "max" => Some(Self::Max),
            _ => None,
        }
    }
}

/// What precedes everything at [`Thinking::Max`].
const MAX_EFFORT: &str = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n\
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n\
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and \
rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";

/// The section that offers tools, one schema a line.
fn tools_section(schemas: &str) -> String {
    format!(
        r#"## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"#
    )
}

/// What follows the system text when the answer has a schema, before the schema itself.
const RESPONSE_FORMAT: &str = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

/// True for a model of this family with its vocabulary. A small one made for tests may have another's, and that one's template.
pub(crate) fn is_model(m: &Metadata) -> bool {
    m.str("general.architecture") == Some("deepseek4") && super::is_tokenizer(m)
}

/// One turn, after a tool's results were put into user turns.
enum Turn<'a> {
    System(&'a ChatMessage),
    Developer(&'a ChatMessage),
    User(Vec<Block<'a>>),
    Reminder(&'a ChatMessage),
    Assistant(&'a ChatMessage),
}

impl Turn<'_> {
    fn is_users(&self) -> bool {
        matches!(self, Turn::User(_) | Turn::Developer(_))
    }
}

/// A part of a user turn.
enum Block<'a> {
    Text(&'a ChatMessage),
    Result(&'a ChatMessage),
}

/// Renders conversations in this layout.
#[derive(Debug)]
pub(crate) struct Encoder {
    controls: ControlStrings,
}

impl Encoder {
    /// # Errors
    /// [`TextError::Damaged`] when the vocabulary lacks a token of the layout.
    pub(crate) fn new(m: &Metadata) -> Result<Self, TextError> {
        let strings = control_strings(m);
        if let Some(missing) = NEEDED.iter().find(|n| !strings.iter().any(|s| s == *n)) {
            return Err(TextError::Damaged { what: format!("the vocabulary has no control token {missing}") });
        }
        Ok(Self { controls: ControlStrings::new(strings)? })
    }

    /// How the answers to `input` are read.
    ///
    /// # Errors
    /// An answer or a call cannot be held to its schema.
    pub(crate) fn format(&self, input: &ChatInput, tokenizer: &Tokenizer) -> Result<Format, Unenforceable> {
        Format::new(input, thinking_of(input), tokenizer)
    }

    /// # Errors
    /// [`TextError::Refused`] for a role that the layout has no place for, [`TextError::UnsupportedPart`] for a part of a
    /// message that is not text.
    pub(crate) fn render(&self, input: &ChatInput) -> Result<RenderedPrompt, TextError> {
        let mut writer = Writer { guard: Guard::new(&self.controls), out: String::from(BOS) };
        writer.conversation(input)?;
        let Writer { guard, out } = writer;
        Ok(guard.rendered(out))
    }
}

/// The thinking mode of a request: its own field, else what template variables of other servers' clients say.
fn thinking_of(input: &ChatInput) -> Thinking {
    let flag = |name: &str| input.variables.get(name).and_then(Value::as_bool);
    input.thinking.unwrap_or_else(|| match flag("thinking").or_else(|| flag("enable_thinking")) {
        Some(true) => Thinking::High,
        _ => Thinking::None,
    })
}

/// The functions on offer, one schema a line; `None` when there are none.
fn schemas_of(tools: Option<&Value>) -> Result<Option<Vec<String>>, TextError> {
    let list = match tools {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(TextError::Refused { reason: "tools is not a list".into() }),
    };
    let lines: Vec<String> = list.iter().map(|tool| dumps(tool.get("function").unwrap_or(tool))).collect();
    Ok((!lines.is_empty()).then_some(lines))
}

/// Puts the results of tools into user turns and neighbouring user messages into one.
fn turns(messages: &[ChatMessage]) -> Result<Vec<Turn<'_>>, TextError> {
    let mut turns = Vec::with_capacity(messages.len());
    for message in messages {
        let block = match message.role.as_str() {
            "user" => Block::Text(message),
            "tool" | "function" => Block::Result(message),
            role => {
                turns.push(match role {
                    "system" => Turn::System(message),
                    "developer" => Turn::Developer(message),
                    "latest_reminder" => Turn::Reminder(message),
                    "assistant" => Turn::Assistant(message),
                    _ => {
                        return Err(TextError::Refused { reason: format!("there is no role {role:?} in this layout") });
                    }
                });
                continue;
            }
        };
        match turns.last_mut() {
            Some(Turn::User(blocks)) => blocks.push(block),
            _ => turns.push(Turn::User(vec![block])),
        }
    }
    order_results(&mut turns);
    Ok(turns)
}

/// Brings results into the order of the calls that they answer, each into a place where a result was.
fn order_results(turns: &mut [Turn<'_>]) {
    let mut calls: Vec<&str> = Vec::new();
    for turn in turns {
        match turn {
            Turn::Assistant(message) => {
                if let Some(list) = message.tool_calls.as_ref().and_then(Value::as_array).filter(|l| !l.is_empty()) {
                    calls = list.iter().map(|c| c["id"].as_str().unwrap_or_default()).collect();
                }
            }
            Turn::User(blocks) => {
                let (places, mut results): (Vec<usize>, Vec<&ChatMessage>) = blocks
                    .iter()
                    .enumerate()
                    .filter_map(|(i, b)| match b {
                        Block::Result(m) => Some((i, *m)),
                        Block::Text(_) => None,
                    })
                    .unzip();
                // A result whose call is unknown comes first, as in the published encoder.
                results.sort_by_key(|m| {
                    let id = m.tool_call_id.as_deref().unwrap_or_default();
                    calls.iter().position(|c| *c == id).unwrap_or(0)
                });
                for (place, result) in places.into_iter().zip(results) {
                    blocks[place] = Block::Result(result);
                }
            }
            _ => {}
        }
    }
}

struct Writer<'c> {
    guard: Guard<'c>,
    out: String,
}

impl Writer<'_> {
    fn conversation(&mut self, input: &ChatInput) -> Result<(), TextError> {
        let thinking = thinking_of(input);
        let schemas = schemas_of(input.tools.as_ref())?;
        let mut turns = turns(&input.messages)?;
        // Tools and schema belong to the system text; a conversation without one has an empty one.
        let bare = !matches!(turns.first(), Some(Turn::System(_)));
        // Reasoning before this turn is dropped, and so are developers' turns, unless there are tools.
        let last_user = turns.iter().rposition(Turn::is_users).unwrap_or(0);
        let keeps = |at: usize| schemas.is_some() || at >= last_user;
        let mut kept = (0..turns.len()).map(keeps).collect::<Vec<_>>();
        if thinking != Thinking::None {
            let mut at = 0;
            turns.retain(|turn| {
                at += 1;
                kept[at - 1] || !matches!(turn, Turn::Developer(_))
            });
            kept.drain(..kept.len() - turns.len());
        }
        if thinking == Thinking::Max {
            self.out += MAX_EFFORT;
        }
        if bare {
            self.extras(input, schemas.as_deref());
        }
        // An answer has been begun and not ended.
        let mut open = false;
        for (at, turn) in turns.iter().enumerate() {
            let thinks = thinking != Thinking::None && kept[at];
            self.turn(turn, thinks)?;
            match (turn, turns.get(at + 1)) {
                (Turn::System(_), _) if at == 0 && !bare => self.extras(input, schemas.as_deref()),
                (Turn::Assistant(_), _) => open = false,
                // The answer begins where the user's turn ends, before a reminder.
                (Turn::User(_) | Turn::Developer(_), Some(Turn::Assistant(_) | Turn::Reminder(_))) => {
                    self.begin_answer(thinks);
                    open = true;
                }
                _ => {}
            }
        }
        // The published encoder begins no answer to a system text alone; nothing could be asked of such a model.
        if input.add_generation_prompt && !open && !matches!(turns.last(), Some(Turn::Assistant(_))) {
            self.begin_answer(thinking != Thinking::None);
        }
        Ok(())
    }

    fn begin_answer(&mut self, thinks: bool) {
        self.out += ASSISTANT;
        self.out += if thinks { THINK } else { END_THINK };
    }

    fn turn(&mut self, turn: &Turn<'_>, thinks: bool) -> Result<(), TextError> {
        match turn {
            Turn::System(message) => self.text_of(message),
            Turn::Developer(message) => {
                self.out += USER;
                self.text_of(message)
            }
            Turn::Reminder(message) => {
                self.out += LATEST_REMINDER;
                self.text_of(message)
            }
            Turn::Assistant(message) => self.assistant(message, thinks),
            Turn::User(blocks) => {
                self.out += USER;
                for (i, block) in blocks.iter().enumerate() {
                    if i > 0 {
                        self.out += "\n\n";
                    }
                    match block {
                        Block::Text(message) => self.text_of(message)?,
                        Block::Result(message) => self.result(message),
                    }
                }
                Ok(())
            }
        }
    }

    /// Appends a string that is not part of the layout.
    fn push(&mut self, text: &str) {
        let text = self.guard.hide(text, Role::Content);
        self.out += &text;
    }

    fn extras(&mut self, input: &ChatInput, schemas: Option<&[String]>) {
        if let Some(schemas) = schemas {
            let lines: Vec<String> = schemas.iter().map(|s| self.guard.hide(s, Role::Content)).collect();
            self.out += "\n\n";
            self.out += &tools_section(&lines.join("\n"));
        }
        if let Some(schema) = &input.response_format {
            self.out += RESPONSE_FORMAT;
            self.push(&dumps(schema));
        }
    }

    fn text_of(&mut self, message: &ChatMessage) -> Result<(), TextError> {
        match &message.content {
            ChatContent::None => {}
            ChatContent::Text(text) => self.push(text),
            ChatContent::Parts(parts) => {
                let texts = parts.iter().map(part_text).collect::<Result<Vec<&str>, _>>()?;
                self.push(&texts.join("\n\n"));
            }
        }
        Ok(())
    }

    /// A tool may return what the model cannot read; it is told so.
    fn result(&mut self, message: &ChatMessage) {
        let text = match &message.content {
            ChatContent::None => String::new(),
            ChatContent::Text(text) => text.clone(),
            ChatContent::Parts(parts) => {
                let texts: Vec<String> = parts
                    .iter()
                    .map(|part| match part_text(part) {
                        Ok(text) => text.to_owned(),
                        Err(_) => format!("[Unsupported {}]", part["type"].as_str().unwrap_or("None")),
                    })
                    .collect();
                texts.join("\n\n")
            }
        };
        self.out += "<tool_result>";
        self.push(&text);
        self.out += "</tool_result>";
    }

    /// What an assistant said, after [`Writer::begin_answer`].
    fn assistant(&mut self, message: &ChatMessage, thinks: bool) -> Result<(), TextError> {
        if thinks {
            self.push(message.reasoning_content.as_deref().unwrap_or_default());
            self.out += END_THINK;
        }
        self.text_of(message)?;
        let calls = calls_of(message.tool_calls.as_ref())?;
        if !calls.is_empty() {
            let guard = &mut self.guard;
            let block = serialize_with(&calls, &mut |s| guard.hide(s, Role::Content));
            self.out += "\n\n";
            self.out += &block;
        }
        self.out += EOS;
        Ok(())
    }
}

/// Calls in the OpenAI shape, arguments as a JSON text or a value.
fn calls_of(calls: Option<&Value>) -> Result<Vec<ToolCall>, TextError> {
    let list = match calls {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(TextError::Refused { reason: "tool_calls is not a list".into() }),
    };
    list.iter()
        .map(|call| {
            let call = call.get("function").unwrap_or(call);
            let Some(name) = call["name"].as_str() else {
                return Err(TextError::Refused { reason: "a tool call has no name".into() });
            };
            let arguments = match call.get("arguments") {
                None | Some(Value::Null) => "{}".to_owned(),
                Some(Value::String(text)) => text.clone(),
                Some(value) => dumps(value),
            };
            Ok(ToolCall { name: name.to_owned(), arguments })
        })
        .collect()
}
