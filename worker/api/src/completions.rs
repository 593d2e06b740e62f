//! `/v1/completions`: parsing. The wire side is in [`crate::completions_wire`].

use std::sync::Arc;

use crate::backend::Backend;
use crate::chat::response_format;
use crate::error::ApiError;
use crate::job::{Job, MAX_SEQUENCES, check_tokens, prompt_error};
use crate::json::Fields;
use crate::params::{Common, Prompt, check_model, prompts};

/// OpenAI's default for this surface.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Parses a body and tokenises its prompts. May take long for long bodies.
///
/// # Errors
/// Every client error of the surface, naming its field.
pub fn parse(body: &[u8], max_depth: usize, backend: &Arc<dyn Backend>) -> Result<Job, ApiError> {
    let mut fields = Fields::parse(body, max_depth)?;
    check_model(&mut fields, backend.model())?;
    if response_format(&mut fields)?.schema.is_some() {
        let why = "`response_format`: only `text` is available on this surface; use /v1/chat/completions";
        return Err(ApiError::unsupported("response_format", why));
    }
    // A hint of chat that clients send along.
    fields.ignore(&["parallel_tool_calls"]);
    fields.refuse("suffix", &["\"\""], "the served model cannot fill in the middle")?;
    let mut common = Common::parse(&mut fields, backend.model())?;
    common.max_tokens = common.max_tokens.or(Some(DEFAULT_MAX_TOKENS));
    let best_of = fields.integer("best_of", 1..=20)?;
    if best_of.is_some_and(|b| usize::try_from(b).is_ok_and(|b| b != common.n)) {
        return Err(ApiError::unsupported("best_of", "`best_of` other than `n` is not available on this server"));
    }
    let logprobs = fields.integer("logprobs", 0..=5)?.and_then(|k| u32::try_from(k).ok());
    let echo = fields.bool("echo")?.unwrap_or(false);
    if echo && logprobs.is_some() {
        return Err(ApiError::unsupported(
            "echo",
            "`echo` with `logprobs`: log-probabilities of the prompt are not available on this server",
        ));
    }
    let prompts = prompts(&mut fields)?;
    fields.finish()?;
    if prompts.len() * common.n > MAX_SEQUENCES {
        let value = format!("{} times {} prompts", common.n, prompts.len());
        return Err(ApiError::invalid_value("n", value, "one request may start 128 sequences"));
    }
    let mut tokens = Vec::with_capacity(prompts.len());
    let mut texts = echo.then(Vec::new);
    for prompt in prompts {
        let these = match &prompt {
            Prompt::Text(text) => {
                // Before the tokenizer adds its own: an empty text is an empty prompt.
                if text.is_empty() {
                    return Err(ApiError::field("empty_prompt", "prompt", "the prompt is empty"));
                }
                backend.tokenize(text).map_err(|e| prompt_error(e, backend))?
            }
            Prompt::Tokens(tokens) => tokens.clone(),
        };
        check_tokens(&these, backend)?;
        if let Some(texts) = &mut texts {
            texts.push(match prompt {
                Prompt::Text(text) => text,
                Prompt::Tokens(_) => {
                    let bytes: Vec<u8> = these.iter().flat_map(|t| backend.token_bytes(*t)).collect();
                    String::from_utf8_lossy(&bytes).into_owned()
                }
            });
        }
        tokens.push(these);
    }
    Ok(Job { common, prompts: tokens, format: None, logprobs, echo: texts })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Script;

    fn try_parse(body: &str) -> Result<Job, ApiError> {
        let backend: Arc<dyn Backend> = Arc::new(Script::default());
        parse(body.as_bytes(), 64, &backend)
    }

    #[test]
    fn refusals_name_their_field() {
        let cases = [
            (r#"{"prompt":""}"#, "prompt", "empty_prompt"),
            (r#"{"prompt":[]}"#, "prompt", "empty_prompt"),
            (r#"{"prompt":["a",""]}"#, "prompt", "empty_prompt"),
            (r#"{"prompt":[99999999]}"#, "prompt", "invalid_value"),
            (r#"{}"#, "prompt", "missing_required_parameter"),
            (r#"{"prompt":"a","suffix":"b"}"#, "suffix", "unsupported_parameter"),
            (r#"{"prompt":"a","best_of":3}"#, "best_of", "unsupported_parameter"),
            (r#"{"prompt":"a","logprobs":6}"#, "logprobs", "invalid_value"),
            (r#"{"prompt":"a","logprobs":true}"#, "logprobs", "invalid_type"),
            (r#"{"prompt":"a","logprobs":1,"echo":true}"#, "echo", "unsupported_parameter"),
            (r#"{"prompt":"a","response_format":{"type":"json_object"}}"#, "response_format", "unsupported_parameter"),
            (r#"{"prompt":"a","messages":[]}"#, "messages", "unknown_parameter"),
        ];
        for (body, param, code) in cases {
            let e = try_parse(body).unwrap_err();
            assert_eq!((e.param.as_deref(), e.code), (Some(param), code), "{body}: {}", e.message);
        }
        let many = format!(r#"{{"n":8,"prompt":[{}]}}"#, vec!["\"a\""; 17].join(","));
        assert_eq!(try_parse(&many).unwrap_err().param.as_deref(), Some("n"));
        let more = format!(r#"{{"prompt":[{}]}}"#, vec!["\"a\""; 200].join(","));
        assert_eq!(try_parse(&more).unwrap_err().param.as_deref(), Some("prompt"));
    }

    #[test]
    fn a_batch_becomes_sequences_with_their_own_seeds() {
        let job = try_parse(r#"{"prompt":["a","b"],"n":2,"seed":7}"#).unwrap();
        let requests = job.requests("id");
        assert_eq!(requests.len(), 4);
        assert_eq!(requests.iter().map(|r| r.sampling.seed).collect::<Vec<_>>(), [Some(7), Some(8), Some(7), Some(8)]);
        assert_eq!(requests[2].prompt, job.prompts[1]);
        assert_eq!(requests[3].id, "id/3");
        assert_eq!(requests[0].max_tokens, 16);
    }
}
