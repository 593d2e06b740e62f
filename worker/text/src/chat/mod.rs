//! Conversations and their rendering with a model's own template, or with the encoder of its family.
//!
//! A user's text can never become a control token: before rendering, every control-token string in a user's strings (and
//! every part of one that could complete to one beside its neighbours) is replaced by a stand-in with a random number that
//! nobody can guess; the prompt is cut at its real control tokens, and only then is the text put back, to be encoded as
//! plain text.

mod guard;
mod python;
mod static_check;
mod template;

pub use guard::RenderedPrompt;
pub(crate) use guard::{ControlStrings, Guard, Role};
pub(crate) use python::{float_repr, json_string};
pub(crate) use template::part_text;

use std::sync::Arc;

use ds4_manifests::Metadata;
use serde_json::{Map, Value};

use crate::answer::AnswerFormat;
use crate::constraint::{Unenforceable, deep};
use crate::deepseek_v4::{self, Thinking};
use crate::error::TextError;
use crate::tokenizer::Tokenizer;
use template::JinjaTemplate;

/// What a message says.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ChatContent {
    /// Nothing (`null`): an assistant message that only calls tools.
    #[default]
    None,
    /// One string.
    Text(String),
    /// Typed parts, as in the OpenAI API; only those of type `text` can be given to a text model.
    Parts(Vec<Value>),
}

impl From<&str> for ChatContent {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for ChatContent {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool` or what else the template knows.
    pub role: String,
    /// Its content.
    pub content: ChatContent,
    /// Name of the speaker or tool.
    pub name: Option<String>,
    /// Calls that an assistant made, in the OpenAI shape. Arguments given as a JSON string become an object, as templates expect.
    pub tool_calls: Option<Value>,
    /// The call that a `tool` message answers.
    pub tool_call_id: Option<String>,
    /// Thinking of an assistant message, for templates that want it back.
    pub reasoning_content: Option<String>,
}

impl ChatMessage {
    /// A message of one string.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.into(), ..Self::default() }
    }
}

/// Whether the answer must call a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// It must call one of the tools.
    Required,
    /// It must call this one.
    Named(String),
}

/// What a model's layout has a place for, beside plain messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChatAbilities {
    /// Tools in the prompt, and calls that are told from the answer's text.
    pub tools: bool,
    /// Reasoning that can be asked for, and that is told from the answer's text.
    pub reasoning: bool,
}

/// A conversation to render.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatInput {
    /// Messages, oldest first.
    pub messages: Vec<ChatMessage>,
    /// Tools on offer, in the OpenAI shape.
    pub tools: Option<Value>,
    /// Whether the answer must call one of them.
    pub tool_choice: ToolChoice,
    /// The answer may call no more than one.
    pub single_call: bool,
    /// End the prompt where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// How much the model should think, for a family with a choice (DeepSeek V4). `None`: what `variables` say, else
    /// [`Thinking::None`], whose answer needs nobody to tell reasoning from content.
    pub thinking: Option<Thinking>,
    /// JSON schema that the answer is held to. DeepSeek V4's prompt asks for it, too.
    pub response_format: Option<Value>,
    /// The answer must be held to it: where it cannot be, asking alone is not enough.
    pub response_strict: bool,
    /// Further variables for the template (`chat_template_kwargs`), such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

impl ChatInput {
    /// A conversation whose answer is wanted.
    pub fn of(messages: Vec<ChatMessage>) -> Self {
        Self { messages, add_generation_prompt: true, ..Self::default() }
    }
}

/// How a model's prompts are made: its own Jinja template, or the encoder of its family. Shared between threads.
#[derive(Debug)]
pub struct ChatTemplate(Layout);

#[derive(Debug)]
enum Layout {
    Jinja(Box<JinjaTemplate>),
    DeepSeekV4(deepseek_v4::Encoder),
}

impl ChatTemplate {
    /// For DeepSeek V4 (`general.architecture` = `deepseek4`, with its own vocabulary) the layout that its makers published; else compiles
    /// `tokenizer.chat_template` and renders trial conversations with it.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`] when the model has none; [`TextError::BadTemplate`], with the line, when it does not
    /// compile, uses something that does not exist, or fails on one user message; [`TextError::Damaged`] for a DeepSeek V4
    /// vocabulary that lacks a control token.
    pub fn compile(m: &Metadata) -> Result<Self, TextError> {
        Ok(Self(if deepseek_v4::is_model(m) {
            Layout::DeepSeekV4(deepseek_v4::Encoder::new(m)?)
        } else {
            Layout::Jinja(Box::new(JinjaTemplate::compile(m)?))
        }))
    }

    /// What the layout has a place for.
    pub fn abilities(&self) -> ChatAbilities {
        match &self.0 {
            // A template may print tools, but what its model answers then is in a language of its own.
            Layout::Jinja(_) => ChatAbilities::default(),
            Layout::DeepSeekV4(_) => ChatAbilities { tools: true, reasoning: true },
        }
    }

    /// How the answers to `input` are read; `None`: they are plain text.
    ///
    /// # Errors
    /// An answer or a call cannot be held to its schema.
    pub fn answer_format(
        &self,
        input: &ChatInput,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Arc<dyn AnswerFormat>>, Unenforceable> {
        match (&self.0, &input.response_format) {
            (Layout::DeepSeekV4(encoder), _) => Ok(Some(Arc::new(encoder.format(input, tokenizer)?))),
            (Layout::Jinja(_), None) => Ok(None),
            (Layout::Jinja(_), Some(schema)) => {
                let make = || -> Result<_, Unenforceable> { Ok(tokenizer.grammars()?.schema(schema)?) };
                Ok(Some(Arc::new(deep(make)?)))
            }
        }
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`TextError::Refused`] when the template refuses it, [`TextError::UnsupportedPart`] for a part that is not text,
    /// [`TextError::RenderFailed`] when the template fails.
    pub fn render(&self, input: &ChatInput) -> Result<RenderedPrompt, TextError> {
        match &self.0 {
            Layout::Jinja(template) => template.render(input),
            Layout::DeepSeekV4(encoder) => encoder.render(input),
        }
    }
}
