//! DSML, the markup of DeepSeek V4's tool calls: found in what the model generates, and written into a prompt.
//!
//! ```text
//! <｜DSML｜tool_calls>
//! <｜DSML｜invoke name="NAME">
//! <｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
//! </｜DSML｜invoke>
//! </｜DSML｜tool_calls>
//! ```
//!
//! Models fray it. [`Parser`] accepts what can only have been meant as a call, and leaves as text what was only quoted:
//! everything in the reasoning, in code spans and code blocks, what repeats a user's words, tags in the middle of a sentence that
//! no call follows, and plain XML that does not name a tool on offer.
//!
//! # Choices
//! * String values are taken as they are, as in training. [`Options::decode_entities`] turns `&lt;` and its like back for
//!   models that escape.
//! * A call is reported when it is complete; [`Options::live`] tells of it while it is read, too, and then of those that are
//!   cut short.
//! * An answer cut by its budget inside a call yields none of that call: half a command must not run. One that ended by
//!   itself there yields the call, whose closers were forgotten.

mod markdown;
mod parser;
mod serialize;
mod tags;
mod value;

pub use parser::Parser;
pub use serialize::serialize;
pub(crate) use serialize::serialize_with;

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool, as the model wrote it.
    pub name: String,
    /// Arguments as the text of a JSON object, in the model's order, without spaces.
    pub arguments: String,
}

/// What a piece of generated text turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Reasoning.
    Reasoning(String),
    /// The answer itself.
    Content(String),
    /// A complete call.
    Call(ToolCall),
    /// With [`Options::live`]: a call of this tool is being read, and is no quotation.
    Begin(String),
    /// With [`Options::live`]: the next part of its arguments. All parts of a call that becomes complete, joined, are an object
    /// equal to [`ToolCall::arguments`]; the last part comes just before [`Event::Call`].
    Arguments(String),
    /// A tool's tag although no tools were sent: the answer ends here, as if the model had stopped.
    Stop,
}

/// What a stretch of generated text turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Part of the answer.
    Content,
    /// White space that is part of the answer if text follows.
    Space,
    /// Part of the reasoning.
    Reasoning,
    /// Tags and what is inside of calls, also of those that turn out to be quotations and are shown.
    Markup,
    /// A tag or marker that means nothing: not shown, and what is around it is as if it were not there.
    Slip,
}

/// What the parser knows of the request.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The prompt ended with `<think>`.
    pub thinking: bool,
    /// Names of the tools on offer. Empty: none were sent, and a tool's tag ends the answer.
    pub tools: Vec<String>,
    /// What others said in the conversation: users' messages and tools' results. A call that repeats part of one of these
    /// letter by letter is a quotation and stays text.
    pub quoted: Vec<String>,
    /// Turn `&amp;`, `&lt;`, `&gt;`, `&quot;` and `&apos;` in string values into what they stand for.
    pub decode_entities: bool,
    /// Tell of calls while they are read, too.
    pub live: bool,
    /// A grammar holds the answer: a tag has the marker's own token, and what has none may be the text of a tag. A call in plain
    /// letters would follow no schema.
    pub held: bool,
}

/// Why the text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model ended it, or a stop string did.
    Stop,
    /// The budget was used up.
    Length,
}

/// Where the next token falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// Reasoning or content: sampled as the request says.
    Free,
    /// Tags, names, and JSON outside its strings: greedy.
    Structure,
    /// A string value, or a string inside a JSON value: sampled as the request says.
    Payload,
}

#[cfg(test)]
mod grammar;
#[cfg(test)]
mod tests;
