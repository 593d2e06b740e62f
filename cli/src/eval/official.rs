//! Continuation vectors as JSON: captures of the official API, and our own `--dump-logprobs`.
//!
//! Schema `ds4-official-logprobs-v1` (and -v2, which has fewer keys beside the steps): `id`, `prompt` (the user's text),
//! `usage.prompt_tokens`, `steps[]` of `step`, `token {text, bytes[]}`, `top_logprobs[] {token, logprob}`. `ds4-logprobs-v1`
//! adds `raw`, `system` and `thinking` and has no `id`: the file's name stands for it.

use std::path::Path;

use serde::Deserialize;

use super::case::{Case, Step, UNKNOWN, malformed, read_text};
use super::{SCHEMA_DUMP, SCHEMA_LOGITS};
use crate::generate::Effort;

const SCHEMAS: [&str; 3] = ["ds4-official-logprobs-v1", "ds4-official-logprobs-v2", SCHEMA_DUMP];

#[derive(Deserialize)]
struct Schema {
    schema: String,
}

#[derive(Deserialize)]
struct File {
    id: Option<String>,
    prompt: String,
    system: Option<String>,
    #[serde(default)]
    raw: bool,
    #[serde(default = "off")]
    thinking: Option<Effort>,
    usage: Option<Usage>,
    steps: Vec<StepData>,
}

#[allow(clippy::unnecessary_wraps, reason = "the default of an optional field")]
fn off() -> Option<Effort> {
    Some(Effort::Off)
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct StepData {
    step: usize,
    token: Token,
    #[serde(default)]
    top_logprobs: Vec<Top>,
}

#[derive(Deserialize)]
struct Top {
    token: Token,
    logprob: Option<f64>,
}

#[derive(Deserialize)]
struct Token {
    text: String,
    bytes: Option<Vec<u8>>,
}

impl Token {
    /// The API shows control tokens with doubled bars, `<｜｜end▁of▁sentence｜｜>`.
    fn bytes(&self) -> Vec<u8> {
        let shown = || {
            let inner = self.text.strip_prefix("<｜｜")?.strip_suffix("｜｜>")?;
            (!inner.is_empty() && !inner.contains('｜')).then(|| format!("<｜{inner}｜>").into_bytes())
        };
        shown().unwrap_or_else(|| self.bytes.clone().unwrap_or_else(|| self.text.clone().into_bytes()))
    }
}

/// The case of a file.
///
/// # Errors
/// Exit code 2, with file and line.
pub fn read(path: &Path) -> anyhow::Result<Case> {
    let text = read_text(path)?;
    let parsed = |e: serde_json::Error| malformed(path, e.line().max(1), e);
    // First, since it says which fields there are.
    let Schema { schema } = serde_json::from_str(&text).map_err(parsed)?;
    if !SCHEMAS.contains(&schema.as_str()) {
        let hint =
            if schema == SCHEMA_LOGITS { ": --dump-logits has no steps to score, --dump-logprobs has" } else { "" };
        let what = format!("schema {schema:?} is none of {}{hint}", SCHEMAS.join(", "));
        return Err(malformed(path, line_of(&text, "\"schema\""), what));
    }
    let file: File = serde_json::from_str(&text).map_err(parsed)?;
    let bad_step = |what: String| malformed(path, line_of(&text, "\"steps\""), what);
    if file.steps.is_empty() {
        return Err(bad_step("a case needs at least one step".into()));
    }
    let mut steps = Vec::with_capacity(file.steps.len());
    for (at, step) in file.steps.iter().enumerate() {
        if step.step != at {
            return Err(bad_step(format!("step {} stands where step {at} belongs", step.step)));
        }
        let token = step.token.bytes();
        if token.is_empty() {
            return Err(bad_step(format!("step {at} has an empty token")));
        }
        // A candidate without a number has none that could be compared: our own dumps write -inf so.
        let known = |t: &Top| Some((t.token.bytes(), t.logprob.filter(|l| *l > UNKNOWN)?));
        steps.push(Step { token, top: step.top_logprobs.iter().filter_map(known).collect() });
    }
    let name = || {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.strip_suffix(".json").unwrap_or(&name);
        name.strip_suffix(".official").unwrap_or(name).to_owned()
    };
    Ok(Case {
        id: file.id.unwrap_or_else(name),
        prompt: file.prompt,
        system: file.system,
        raw: file.raw,
        thinking: file.thinking,
        prompt_tokens: file.usage.and_then(|u| u.prompt_tokens),
        steps,
    })
}

/// The line on which `key` first appears.
fn line_of(text: &str, key: &str) -> usize {
    (1..).zip(text.lines()).find_map(|(line, t)| t.contains(key).then_some(line)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As DeepSeek's API answered, in form.
    const CAPTURE: &str = r#"{
  "schema": "ds4-official-logprobs-v1",
  "source": "official", "model": "deepseek-v4-flash", "endpoint": "https://api.deepseek.com/chat/completions",
  "created_at": "2026-05-06", "id": "short_reasoning_plain", "kind": "short",
  "prompt": "Answer with only the number: 2048 divided by 128 is",
  "request": {"temperature": 0}, "usage": {"prompt_tokens": 18, "completion_tokens": 1}, "finish_reason": "stop",
  "message": {"role": "assistant", "content": "16"}, "logits_available": false,
  "steps": [
    {"step": 0, "token": {"text": "16", "bytes": [49, 54]}, "logprob": 0,
     "top_logprobs": [{"token": {"text": "16", "bytes": [49, 54]}, "logprob": 0},
                      {"token": {"text": "The", "bytes": [84, 104, 101]}, "logprob": -9999}]},
    {"step": 1, "token": {"text": "<｜｜end▁of▁sentence｜｜>", "bytes": null}, "logprob": 0, "top_logprobs": []}
  ]
}"#;

    fn parsed(text: &str) -> Result<Case, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("some.official.json");
        std::fs::write(&path, text).unwrap();
        read(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn deepseek_v4_an_official_capture_is_read() {
        let case = parsed(CAPTURE).unwrap();
        assert_eq!((case.id.as_str(), case.prompt_tokens, case.raw), ("short_reasoning_plain", Some(18), false));
        assert_eq!(case.thinking, Some(Effort::Off));
        assert_eq!(
            case.steps[0],
            Step { token: b"16".to_vec(), top: vec![(b"16".to_vec(), 0.0)] },
            "-9999 means unknown"
        );
        assert_eq!(case.steps[1].token, "<｜end▁of▁sentence｜>".as_bytes(), "an end token as the vocabulary spells it");
        assert_eq!(parsed(&CAPTURE.replace("\"id\"", "\"name\"")).unwrap().id, "some", "named by its file");
    }

    #[test]
    fn deepseek_v4_a_malformed_capture_is_refused_by_line() {
        let cases = [
            (CAPTURE.replace("logprobs-v1", "logprobs-v9"), 2, "ds4-official-logprobs-v9"),
            (CAPTURE.replace("\"prompt\"", "\"prom\""), 14, "missing field `prompt`"),
            (CAPTURE.replace("[49, 54]}, \"logprob\": 0,\n", "[49, 654]}, \"logprob\": 0,\n"), 9, "654"),
            (CAPTURE.replace("\"step\": 1", "\"step\": 3"), 8, "step 3 stands where step 1"),
            (CAPTURE.split("\"request\"").next().unwrap().to_owned(), 6, "EOF"),
        ];
        for (text, line, wanted) in cases {
            let e = parsed(&text).unwrap_err();
            assert!(e.contains(&format!("some.official.json:{line}: ")) && e.contains(wanted), "{wanted}: {e}");
        }
        let logits = parsed(r#"{"schema":"ds4-logits-v1","model":"m","logits":[0.5]}"#).unwrap_err();
        assert!(logits.contains("\"ds4-logits-v1\" is none of") && logits.contains("--dump-logprobs"), "{logits}");
        let empty = r#"{"schema":"ds4-logprobs-v1","prompt":"p","steps":[]}"#;
        assert!(parsed(empty).unwrap_err().contains("at least one step"));
    }
}
