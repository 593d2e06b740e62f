//! The files that dumps write.
//!
//! `--dump-logits FILE`: NumPy's format when FILE ends in `.npy`, else one JSON object of schema `ds4-logits-v1`.
//! `--dump-logprobs FILE`: one JSON object of schema `ds4-logprobs-v1`, whose `steps` are those of the official captures
//! (`ds4-official-logprobs-v1`), so that `ds4 eval vectors` reads it back. Logits and log-probabilities that are not finite
//! are `null` in JSON.

use anyhow::Context as _;
use ds4_proto::v1;
use serde::Serialize;

use super::Source;
use super::npy;
use crate::generate::Effort;
use crate::output::Target;

/// A token as files have it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenEntry {
    id: u32,
    text: String,
    bytes: Vec<u8>,
}

impl TokenEntry {
    fn of(token: Option<&v1::Token>) -> anyhow::Result<Self> {
        let t = token.context("the worker sent a step without its token")?;
        Ok(Self { id: t.id, text: String::from_utf8_lossy(&t.bytes).into_owned(), bytes: t.bytes.clone() })
    }
}

/// A candidate of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TopEntry {
    token: TokenEntry,
    logprob: f64,
    logit: f32,
}

/// A step: a token and the distribution that it was drawn from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepEntry {
    step: usize,
    position: u32,
    token: TokenEntry,
    logprob: f64,
    rank: u32,
    top_logprobs: Vec<TopEntry>,
}

impl StepEntry {
    /// With at most `k` candidates.
    pub fn of(s: &v1::ScoreStep, step: usize, k: usize) -> anyhow::Result<Self> {
        let top = |c: &v1::Candidate| {
            Ok(TopEntry { token: TokenEntry::of(c.token.as_ref())?, logprob: c.logprob, logit: c.logit })
        };
        Ok(Self {
            step,
            position: s.position,
            token: TokenEntry::of(s.token.as_ref())?,
            logprob: s.logprob,
            rank: s.rank,
            top_logprobs: s.top.iter().take(k).map(top).collect::<anyhow::Result<_>>()?,
        })
    }
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
}

/// `--dump-logprobs`.
#[derive(Serialize)]
pub struct LogprobsFile<'a> {
    schema: &'static str,
    source: &'static str,
    model: &'a str,
    blake3: &'a str,
    prompt: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<&'a str>,
    raw: bool,
    /// The flag; `null` when none was given.
    thinking: Option<Effort>,
    prompt_tokens: &'a [u32],
    usage: Usage,
    finish_reason: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    prompt_steps: Vec<StepEntry>,
    /// Generated tokens.
    pub steps: Vec<StepEntry>,
}

impl<'a> LogprobsFile<'a> {
    /// Of a finished Score call.
    pub fn of(
        begin: &'a v1::ScoreBegin,
        source: &'a Source<'a>,
        prompt_steps: Vec<StepEntry>,
        steps: Vec<StepEntry>,
        finish_reason: &'a str,
    ) -> Self {
        Self {
            schema: crate::eval::SCHEMA_DUMP,
            source: concat!("ds4 ", env!("CARGO_PKG_VERSION")),
            model: &begin.model,
            blake3: &begin.blake3,
            prompt: source.prompt,
            system: source.system,
            raw: source.raw,
            thinking: source.thinking,
            prompt_tokens: &begin.prompt,
            usage: Usage { prompt_tokens: begin.prompt.len(), completion_tokens: steps.len() },
            finish_reason,
            prompt_steps,
            steps,
        }
    }

    /// Writes it.
    pub fn write(&self, to: &Target) -> anyhow::Result<()> {
        to.write(&json(self)?)
    }
}

/// `--dump-logits`.
pub struct LogitsFile<'a> {
    bytes: &'a [u8],
    head: LogitsJson<'a>,
}

#[derive(Serialize)]
struct LogitsJson<'a> {
    schema: &'static str,
    source: &'static str,
    model: &'a str,
    blake3: &'a str,
    prompt_tokens: &'a [u32],
    position: u32,
    vocab: u32,
    not_finite: u32,
    top: Vec<TopEntry>,
    logits: Vec<f32>,
}

impl<'a> LogitsFile<'a> {
    /// Of the first step of a Score call that asked for logits.
    pub fn of(begin: &'a v1::ScoreBegin, step: &'a v1::ScoreStep) -> anyhow::Result<Self> {
        let logits: Vec<f32> = step.logits.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Ok(Self {
            bytes: &step.logits,
            head: LogitsJson {
                schema: crate::eval::SCHEMA_LOGITS,
                source: concat!("ds4 ", env!("CARGO_PKG_VERSION")),
                model: &begin.model,
                blake3: &begin.blake3,
                prompt_tokens: &begin.prompt,
                position: step.position,
                vocab: begin.vocab,
                not_finite: step.not_finite,
                top: StepEntry::of(step, 0, usize::MAX)?.top_logprobs,
                logits,
            },
        })
    }

    /// Number of logits.
    pub fn len(&self) -> usize {
        self.head.logits.len()
    }

    /// Writes it in the format of its name.
    pub fn write(&self, to: &Target) -> anyhow::Result<()> {
        to.write(&if to.ends_with("npy") { npy::row(self.bytes) } else { json(&self.head)? })
    }
}

fn json(value: &impl Serialize) -> anyhow::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(value)?;
    bytes.push(b'\n');
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn step(logits: &[f32]) -> v1::ScoreStep {
        let token = || Some(v1::Token { id: 1, bytes: b"hi".to_vec(), control: false, end: false });
        v1::ScoreStep {
            position: 4,
            token: token(),
            logprob: -0.5,
            rank: 0,
            top: vec![v1::Candidate { token: token(), logprob: -0.5, logit: 0.1 }],
            logits: logits.iter().flat_map(|l| l.to_le_bytes()).collect(),
            not_finite: 1,
        }
    }

    fn begin() -> v1::ScoreBegin {
        v1::ScoreBegin { prompt: vec![3, 4, 5, 6], model: "m".into(), blake3: "ab".into(), vocab: 2, context: 9 }
    }

    #[test]
    fn logits_are_written_to_the_last_bit() {
        let logits = [0.1f32, -3.402_823_5e38, f32::NAN];
        let (begin, step) = (begin(), step(&logits));
        let file = LogitsFile::of(&begin, &step).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (as_json, as_npy) = (dir.path().join("x.json"), dir.path().join("x.NPY"));
        file.write(&Target::of(&as_json).unwrap()).unwrap();
        file.write(&Target::of(&as_npy).unwrap()).unwrap();
        let text = std::fs::read_to_string(&as_json).unwrap();
        assert!(
            text.contains(r#""logits":[0.1,-3.4028235e+38,null]"#) || text.contains(r#"[0.1,-3.4028235e38,null]"#),
            "{text}"
        );
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&json["schema"], &json["position"], &json["vocab"]),
            (&"ds4-logits-v1".into(), &4.into(), &2.into())
        );
        let npy = std::fs::read(&as_npy).unwrap();
        assert_eq!(&npy[128..132], &0.1f32.to_le_bytes());
        assert_eq!((npy.len(), file.len()), (128 + 12, 3));
    }

    #[test]
    fn a_dump_of_steps_is_read_back_as_a_vector() {
        let begin = begin();
        let source = Source { prompt: "say hi", system: Some("s"), raw: false, thinking: Some(Effort::High) };
        let steps = vec![StepEntry::of(&step(&[]), 0, 1).unwrap(), StepEntry::of(&step(&[]), 1, 0).unwrap()];
        let file = LogprobsFile::of(&begin, &source, Vec::new(), steps, "length");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("steps.json");
        file.write(&Target::of(&path).unwrap()).unwrap();
        let cases = crate::eval::read_json(&path).unwrap();
        assert_eq!((cases.prompt.as_str(), cases.system.as_deref(), cases.raw), ("say hi", Some("s"), false));
        assert_eq!(cases.thinking, Some(Effort::High));
        assert_eq!((cases.steps.len(), cases.prompt_tokens), (2, Some(4)));
        assert_eq!((cases.steps[0].token.as_slice(), cases.steps[0].top.len()), (&b"hi"[..], 1));
        assert!((cases.steps[0].top[0].1 + 0.5).abs() < 1e-12);
    }
}
