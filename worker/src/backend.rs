//! The API's backend over the real engine, tokenizer and template.

use std::sync::Arc;

use ds4_api::{Backend, Events, ModelInfo, Prompt, PromptError};
use ds4_engine::{EngineError, EngineHandle, EngineStats, GenerateRequest};
use ds4_text::{ChatInput, ChatTemplate, Specials, TextError, Tokenizer};
use futures_util::StreamExt;

/// Prompts are counted to this many times the context, so that a refusal can name their real length; the rest of a
/// longer one is not tokenised.
const COUNT_LIMIT: usize = 4;

/// A running engine and the text side of its model.
pub struct Serving {
    pub info: ModelInfo,
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
}

impl Serving {
    fn limit(&self) -> usize {
        self.info.context.saturating_mul(COUNT_LIMIT)
    }
}

impl Backend for Serving {
    fn model(&self) -> &ModelInfo {
        &self.info
    }

    fn submit(&self, request: GenerateRequest) -> Result<Events, EngineError> {
        let receiver = self.engine.submit(request)?;
        Ok(futures_util::stream::unfold(receiver, |mut r| async { r.recv().await.map(|e| (e, r)) }).boxed())
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    fn tokenize(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        let mut tokens = Vec::new();
        if self.tokenizer.add_bos() {
            tokens.extend(self.tokenizer.bos());
        }
        let body = self
            .tokenizer
            .encode_up_to(text, Specials::Parse, self.limit())
            .map_err(|e| PromptError::TooLong { at_least: e.at_least })?;
        // A raw prompt that already begins with the token does not get it twice.
        if tokens.first().is_some_and(|bos| body.first() == Some(bos)) {
            tokens.clear();
        }
        tokens.extend(body);
        Ok(tokens)
    }

    fn render(&self, input: &ChatInput) -> Result<Prompt, PromptError> {
        let template = self.template.as_ref().ok_or(PromptError::NoTemplate)?;
        // First: what cannot be honoured is refused before a long conversation is tokenised.
        let format = template.answer_format(input, &self.tokenizer)?;
        let prompt = template.render(input).map_err(|e| match e {
            TextError::Refused { reason } => PromptError::Template(reason),
            e => PromptError::Template(e.to_string()),
        })?;
        let tokens = prompt
            .encode_up_to(&self.tokenizer, self.limit())
            .map_err(|e| PromptError::TooLong { at_least: e.at_least })?;
        Ok(Prompt { tokens, format })
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        self.tokenizer.token_bytes(token).to_vec()
    }

    fn is_eog(&self, token: u32) -> bool {
        self.tokenizer.is_eog(token)
    }
}
