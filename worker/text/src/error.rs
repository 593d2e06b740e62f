//! What can be wrong with a model's tokenizer or template, or with a conversation.

/// Errors of this crate. Those of loading refuse the model (or, for [`TextError::NoChatTemplate`], chat only).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The metadata lacks a key, or has it in another type.
    #[error("the model's metadata has no usable {key}; convert the model again with its tokenizer included")]
    MissingKey {
        /// Metadata key.
        key: &'static str,
    },
    /// A tokenizer model that this server does not implement.
    #[error(
        "tokenizer.ggml.model is {kind:?}, and only \"gpt2\" (byte-level BPE) is implemented; use a model with such a tokenizer"
    )]
    UnknownTokenizer {
        /// Value of `tokenizer.ggml.model`.
        kind: String,
    },
    /// A pre-tokenizer that this server does not implement. Guessing one would silently give other tokens.
    #[error("tokenizer.ggml.pre is {pre:?}, which is not implemented (known: {known}); use a model with one of these")]
    UnknownPreTokenizer {
        /// Value of `tokenizer.ggml.pre`.
        pre: String,
        /// Names that would have been accepted.
        known: String,
    },
    /// The vocabulary or the merges contradict themselves.
    #[error("the tokenizer is damaged: {what}; fetch or convert the model again")]
    Damaged {
        /// What contradicts what.
        what: String,
    },
    /// The model has no chat template. Completions still work.
    #[error(
        "the model has no chat template (tokenizer.chat_template); use /v1/completions, or an instruction-tuned model"
    )]
    NoChatTemplate,
    /// The template does not compile or uses something that does not exist here; the model is refused.
    #[error("the model's chat template cannot be used: line {line}: {what}")]
    BadTemplate {
        /// Line in the template, from 1; 0 when the engine names none.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// The template itself refused the conversation (`raise_exception`).
    #[error("the model's chat template refuses this conversation: {reason}")]
    Refused {
        /// The template's own words.
        reason: String,
    },
    /// The template failed on this conversation although it compiled and rendered the probes at load.
    #[error("the model's chat template fails on this conversation: line {line}: {what}")]
    RenderFailed {
        /// Line in the template, from 1; 0 when the engine names none.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// A content part that is not text.
    #[error("content part of type {kind:?} cannot be given to this model; send parts of type \"text\"")]
    UnsupportedPart {
        /// The part's `type`.
        kind: String,
    },
}
