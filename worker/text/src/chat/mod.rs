//! Conversations and their rendering with a model's own template.
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
pub use template::ChatTemplate;

use serde_json::{Map, Value};

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

/// A conversation to render.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatInput {
    /// Messages, oldest first.
    pub messages: Vec<ChatMessage>,
    /// Tools on offer, in the OpenAI shape.
    pub tools: Option<Value>,
    /// End the prompt where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Further variables for the template (`chat_template_kwargs`), such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

impl ChatInput {
    /// A conversation whose answer is wanted.
    pub fn of(messages: Vec<ChatMessage>) -> Self {
        Self { messages, add_generation_prompt: true, ..Self::default() }
    }
}
