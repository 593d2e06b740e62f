//! The one internal request: whatever surface it came by, it is a set of sequences to generate and how to report them.

use std::sync::Arc;

use ds4_engine::{GenerateRequest, LogitsWanted};
use ds4_text::AnswerFormat;

use crate::backend::{Backend, PromptError};
use crate::error::ApiError;
use crate::params::Common;

/// Most sequences that one HTTP request may start.
pub const MAX_SEQUENCES: usize = 128;

/// A parsed request, its prompts tokenised.
#[derive(Clone, Debug)]
pub struct Job {
    /// The shared fields.
    pub common: Common,
    /// Tokens of each prompt; choice `p * n + j` is the j-th of prompt `p`.
    pub prompts: Vec<Vec<u32>>,
    /// How the answers are read; `None`: they are plain text.
    pub format: Option<Arc<dyn AnswerFormat>>,
    /// `Some(k)`: logprobs with k alternatives.
    pub logprobs: Option<u32>,
    /// Prompt texts to put before the completions.
    pub echo: Option<Vec<String>>,
}

impl Job {
    /// Number of choices.
    pub fn choices(&self) -> usize {
        self.prompts.len() * self.common.n
    }

    /// All prompt tokens, each prompt counted once.
    pub fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(Vec::len).sum()
    }

    /// The engine requests, in choice order. Choices of one prompt have seeds of their own: `seed`, `seed + 1`, ...
    pub fn requests(&self, id: &str) -> Vec<GenerateRequest> {
        let many = self.choices() > 1;
        let mut requests = Vec::with_capacity(self.choices());
        for prompt in &self.prompts {
            for j in 0..self.common.n {
                let mut sampling = self.common.sampling.clone();
                sampling.seed = sampling.seed.map(|s| s.wrapping_add(j as u64));
                requests.push(GenerateRequest {
                    id: if many { format!("{id}/{}", requests.len()) } else { id.to_owned() },
                    prompt: prompt.clone(),
                    max_tokens: self.common.max_tokens.unwrap_or(usize::MAX),
                    sampling,
                    stop: self.common.stop.clone(),
                    format: self.format.clone(),
                    logprobs: self.logprobs,
                    ignore_eos: self.common.ignore_eos,
                    logits: LogitsWanted::default(),
                });
            }
        }
        requests
    }
}

/// Refuses prompts that are empty, too long or hold ids outside the vocabulary.
///
/// # Errors
/// `empty_prompt`, `context_length_exceeded`, `invalid_value`.
pub fn check_tokens(tokens: &[u32], backend: &Arc<dyn Backend>) -> Result<(), ApiError> {
    let model = backend.model();
    if tokens.is_empty() {
        return Err(ApiError::field("empty_prompt", "prompt", "the prompt has no tokens"));
    }
    if tokens.len() >= model.context {
        return Err(ApiError::context_exceeded(tokens.len(), model.context, false));
    }
    if let Some(bad) = tokens.iter().find(|t| usize::try_from(**t).is_ok_and(|t| t >= model.vocab)) {
        let rule = format!("token ids must be below {}", model.vocab);
        return Err(ApiError::invalid_value("prompt", format!("token {bad}"), &rule));
    }
    Ok(())
}

/// The client error of a prompt that could not become tokens.
pub fn prompt_error(e: PromptError, backend: &Arc<dyn Backend>) -> ApiError {
    let message = e.to_string();
    match e {
        PromptError::Template(_) => ApiError::field("invalid_messages", "messages", message),
        PromptError::NoTemplate => ApiError::field("no_chat_template", "messages", message),
        PromptError::Schema(e) => {
            let at = match e.tool {
                Some(i) => format!("tools[{i}].function.parameters"),
                None => "response_format.json_schema.schema".into(),
            };
            ApiError::unsupported(at.clone(), format!("`{at}`: {message}"))
        }
        PromptError::TooLong { at_least } => ApiError::context_exceeded(at_least, backend.model().context, true),
    }
}
