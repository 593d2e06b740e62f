//! The text side of DeepSeek V4: its control tokens, its prompt layout, and its tool-call markup (DSML).
//!
//! The layout is the one the model was trained with, DeepSeek's published encoder, and not the variant of the `ds4`
//! program. [`crate::ChatTemplate`] uses it for every model whose `general.architecture` is `deepseek4` and whose
//! `tokenizer.ggml.pre` is `joyai-llm`, whatever Jinja template the file carries.
//!
//! # What is known to be missing
//! * The quick-task tokens (`<｜action｜>` and its like) are control tokens here but no message asks for them.
//! * The refreshed models (0731, V4.1) write other tags and effort texts.

pub mod dsml;
mod forced;
mod held;
mod json;
mod ledger;
mod prompt;
mod reader;

pub use json::dumps;
pub use prompt::Thinking;
pub(crate) use prompt::{Encoder, is_model};

use ds4_manifests::Metadata;

use crate::byte_level;

/// Begin of sequence.
pub(crate) const BOS: &str = "<｜begin▁of▁sentence｜>";
/// End of sequence: the only token that ends an answer.
pub(crate) const EOS: &str = "<｜end▁of▁sentence｜>";
/// Begins a user turn.
pub(crate) const USER: &str = "<｜User｜>";
/// Begins an assistant turn.
pub(crate) const ASSISTANT: &str = "<｜Assistant｜>";
/// Begins the reasoning.
pub(crate) const THINK: &str = "<think>";
/// Ends the reasoning, or says that there is none.
pub(crate) const END_THINK: &str = "</think>";
/// The token inside every DSML tag, bars included.
pub(crate) const DSML: &str = "｜DSML｜";
/// Begins a reminder.
pub(crate) const LATEST_REMINDER: &str = "<｜latest_reminder｜>";

/// Strings that the prompt layout writes as single tokens. A vocabulary without one of them is refused.
const NEEDED: &[&str] = &[BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML];

/// True for a vocabulary of this family (`tokenizer.ggml.pre` = `joyai-llm`).
pub(crate) fn is_tokenizer(m: &Metadata) -> bool {
    m.str("tokenizer.ggml.pre") == Some("joyai-llm")
}

/// True for the string of a token that is structure in this family's vocabulary, whatever type the file gives it:
/// converters call `<think>`, `</think>` and `｜DSML｜` user-defined, or nothing at all.
///
/// A merge product has characters of the byte alphabet only, so a token with any other is an added one; the added tokens
/// in plain ASCII are listed.
pub(crate) fn is_control(token: &str) -> bool {
    matches!(token, THINK | END_THINK | "<dsml:" | "</dsml:" | "<|EOT|>")
        || token.starts_with("<|place_holder_")
        || token.chars().any(|c| byte_level::byte_of(c).is_none())
}

#[cfg(test)]
mod tests;
