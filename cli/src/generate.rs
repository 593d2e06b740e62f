//! One generation as `run` and `chat` see it: sampling flags in, streamed text and a summary out.

use anyhow::Context as _;
use ds4_proto::v1;
use serde_json::{Map, Value, json};

use crate::client::http::{Events, Server};
use crate::failure::Failure;

/// Temperature unless one is given.
const TEMPERATURE: f64 = 0.6;
/// Nucleus unless one is given.
const TOP_P: f64 = 0.9;

/// Sampling flags. Temperature and nucleus have defaults that suit small models: at the API's own (1 and 1) a tail of tens of
/// thousands of unlikely tokens is sampled too, and a 135M model drifts off within a sentence. The rest is left to the worker.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Sampling {
    /// Most tokens to generate
    #[arg(short = 'n', long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Temperature, 0 to 2; 0 always takes the most likely token [default: 0.6, 0 for dumps]
    #[arg(long = "temp", value_name = "T", value_parser = temperature)]
    temperature: Option<f64>,
    /// Nucleus sampling: keep the most likely tokens up to this probability mass [default: 0.9]
    #[arg(long, value_name = "P", value_parser = probability)]
    top_p: Option<f64>,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Keep tokens at least this fraction as likely as the best one
    #[arg(long, value_name = "P", value_parser = probability)]
    min_p: Option<f64>,
    /// Same seed, prompt and flags: same text
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Stop before this text (up to four times)
    #[arg(long, value_name = "TEXT", value_parser = stop_text)]
    stop: Vec<String>,
    /// How much a model that can think should [default: high for such a model]
    #[arg(long, value_enum, value_name = "MODE")]
    thinking: Option<Effort>,
}

/// How much to think.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// Not at all
    Off,
    /// As the model sees fit
    High,
    /// As much as it can; needs a context of 393,216 tokens
    Max,
}

impl Effort {
    /// The `reasoning_effort` of the API.
    fn word(self) -> &'static str {
        match self {
            Self::Off => "none",
            Self::High => "high",
            Self::Max => "max",
        }
    }
}

fn number(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|v| v.is_finite()).ok_or_else(|| format!("`{text}` is not a number"))
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text).and_then(|v| if (0.0..=2.0).contains(&v) { Ok(v) } else { Err(format!("{v} is outside 0 to 2")) })
}

/// What a worker takes as one of its up to four.
fn stop_text(text: &str) -> Result<String, String> {
    match text.len() {
        1..=1024 => Ok(text.into()),
        n => Err(format!("it has {n} bytes: give 1 to 1024")),
    }
}

fn probability(text: &str) -> Result<f64, String> {
    number(text).and_then(|v| if (0.0..=1.0).contains(&v) { Ok(v) } else { Err(format!("{v} is outside 0 to 1")) })
}

impl Sampling {
    /// The fields of an OpenAI request.
    fn fields(&self) -> Map<String, Value> {
        let given = [
            ("max_tokens", self.max_tokens.map(Value::from)),
            ("temperature", Some(self.temperature.unwrap_or(TEMPERATURE).into())),
            ("top_p", Some(self.top_p.unwrap_or(TOP_P).into())),
            ("top_k", self.top_k.map(Value::from)),
            ("min_p", self.min_p.map(Value::from)),
            ("seed", self.seed.map(Value::from)),
            ("stop", (!self.stop.is_empty()).then(|| self.stop.clone().into())),
        ];
        given.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?))).collect()
    }

    /// How much thinking was asked for.
    pub fn thinking(&self) -> Option<Effort> {
        self.thinking
    }

    /// How many tokens are wanted at most, if it was said.
    pub fn max_tokens(&self) -> Option<u32> {
        self.max_tokens
    }

    /// The flags that were given, as they are spelled.
    pub fn given(&self) -> Vec<&'static str> {
        let all = [
            ("-n", self.max_tokens.is_some()),
            ("--temp", self.temperature.is_some()),
            ("--stop", !self.stop.is_empty()),
        ];
        all.into_iter().chain(self.of_chance()).filter(|(_, given)| *given).map(|(flag, _)| flag).collect()
    }

    /// Flags that choose among tokens: nothing is left to choose at temperature 0.
    fn of_chance(&self) -> [(&'static str, bool); 4] {
        [
            ("--top-p", self.top_p.is_some()),
            ("--top-k", self.top_k.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--seed", self.seed.is_some()),
        ]
    }

    /// Refuses flags that would be without effect in a dump, which is greedy unless a temperature is given.
    ///
    /// # Errors
    /// Exit code 2, by the flag's name.
    pub fn refuse_unused(&self) -> anyhow::Result<()> {
        let greedy = self.temperature.is_none_or(|t| t <= 0.0);
        match self.of_chance().into_iter().find(|(_, given)| *given && greedy) {
            Some((flag, _)) => Err(Failure::error(
                ds4_settings::EXIT_USAGE,
                format!("{flag} has no effect on a greedy dump: give a --temp above 0, or leave it out"),
            )),
            None => Ok(()),
        }
    }

    /// For the debugging service, which has no stop strings; greedy unless a temperature was given.
    ///
    /// # Errors
    /// Exit code 2 when stop strings were given.
    #[allow(clippy::cast_possible_truncation, reason = "the sampler computes in f32")]
    pub fn for_dump(&self) -> anyhow::Result<Option<v1::Sampling>> {
        if !self.stop.is_empty() {
            return Err(Failure::error(ds4_settings::EXIT_USAGE, "a dump does not know --stop: give -n instead"));
        }
        Ok(self.temperature.filter(|t| *t > 0.0).map(|temperature| v1::Sampling {
            temperature: Some(temperature as f32),
            top_p: Some(self.top_p.unwrap_or(TOP_P) as f32),
            top_k: self.top_k,
            min_p: self.min_p.map(|p| p as f32),
            seed: self.seed,
        }))
    }

    /// Body of a streaming chat request.
    pub fn chat_body(&self, messages: &[Value]) -> Value {
        let mut body = self.fields();
        body.insert("messages".into(), messages.into());
        if let Some(effort) = self.thinking {
            body.insert("reasoning_effort".into(), effort.word().into());
        }
        stream_body(body)
    }

    /// Body of a streaming raw completion.
    pub fn raw_body(&self, prompt: &str) -> Value {
        let mut body = self.fields();
        body.insert("prompt".into(), prompt.into());
        stream_body(body)
    }
}

/// The server's refusal in the words of the command line: it names fields that nobody typed.
fn as_flags(body: &Value, error: anyhow::Error) -> anyhow::Error {
    let text = format!("{error:#}");
    if body.get("reasoning_effort").is_none() || !text.contains("`reasoning_effort`") {
        return error;
    }
    Failure::error(Failure::code_of(&error), text.replace("`reasoning_effort`", "--thinking"))
}

fn stream_body(mut body: Map<String, Value>) -> Value {
    body.insert("stream".into(), true.into());
    body.insert("stream_options".into(), json!({"include_usage": true}));
    body.into()
}

/// What is known once a stream has ended.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// OpenAI finish reason.
    pub finish_reason: Option<String>,
    /// `usage` of the last event that had one.
    pub usage: Option<Value>,
    /// `timings` of the last event that had one.
    pub timings: Option<Value>,
}

impl Summary {
    /// One line of counts and speeds, from what the worker reported.
    pub fn line(&self) -> Option<String> {
        let number = |source: &Option<Value>, key: &str| source.as_ref()?.get(key)?.as_f64();
        let tokens = number(&self.usage, "completion_tokens")?;
        let prompt = number(&self.usage, "prompt_tokens")?;
        let mut line = format!("{prompt} prompt tokens, {tokens} generated");
        if let (Some(p), Some(d)) =
            (number(&self.timings, "prompt_per_second"), number(&self.timings, "predicted_per_second"))
        {
            line.push_str(&format!("; prefill {p:.0} tok/s, decode {d:.1} tok/s"));
        }
        if self.finish_reason.as_deref() == Some("length") {
            line.push_str("; cut at the token limit");
        }
        Some(line)
    }
}

/// A piece of an answer, never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The answer itself.
    Text(String),
    /// What the model thought before it.
    Reasoning(String),
    /// A call of a tool, or more of its arguments, as people read it.
    Call(String),
}

impl Heard {
    /// What an event says, if anything.
    fn of(choice: &Value) -> Option<Self> {
        let text =
            |path: &str| choice.pointer(path).and_then(Value::as_str).filter(|t| !t.is_empty()).map(str::to_owned);
        let call = || Some(format!("\n{} ", text("/delta/tool_calls/0/function/name")?));
        text("/delta/reasoning_content")
            .map(Self::Reasoning)
            .or_else(|| call().or_else(|| text("/delta/tool_calls/0/function/arguments")).map(Self::Call))
            .or_else(|| text("/delta/content").or_else(|| text("/text")).map(Self::Text))
    }
}

/// A running generation.
pub struct Generation {
    events: Events,
    summary: Summary,
}

impl Generation {
    /// Starts one: `/v1/chat/completions` or `/v1/completions` by the body's kind.
    pub async fn start(server: &Server, body: &Value) -> anyhow::Result<Self> {
        let path = if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" };
        let events = server.stream(path, body).await.map_err(|e| as_flags(body, e))?;
        Ok(Self { events, summary: Summary::default() })
    }

    /// The next piece, or `None` at the end.
    pub async fn next(&mut self) -> anyhow::Result<Option<Heard>> {
        while let Some(event) = self.events.next().await? {
            for (key, slot) in [("usage", &mut self.summary.usage), ("timings", &mut self.summary.timings)] {
                if let Some(value) = event.get(key).filter(|v| !v.is_null()) {
                    *slot = Some(value.clone());
                }
            }
            let Some(choice) = event.pointer("/choices/0") else { continue };
            if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
                self.summary.finish_reason = Some(reason.into());
            }
            if let Some(heard) = Heard::of(choice) {
                return Ok(Some(heard));
            }
        }
        Ok(None)
    }

    /// What the end brought.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }
}

/// The text of `path`, or of standard input for `-`.
///
/// # Errors
/// Unreadable or not UTF-8.
pub fn read_text(argument: &str) -> anyhow::Result<String> {
    if argument != "-" {
        return Ok(argument.to_string());
    }
    let text = std::io::read_to_string(std::io::stdin()).context("cannot read the prompt from standard input")?;
    if text.trim().is_empty() {
        return Err(Failure::error(ds4_settings::EXIT_USAGE, "standard input holds no prompt"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_given_flags_reach_the_wire() {
        let sampling =
            Sampling { temperature: Some(0.0), top_p: Some(0.5), stop: vec!["x".into()], ..Sampling::default() };
        let body = sampling.raw_body("hi");
        assert_eq!(body["temperature"], 0.0);
        assert_eq!(body["top_p"], 0.5);
        assert_eq!(body["stop"], json!(["x"]));
        assert_eq!(body["prompt"], "hi");
        assert_eq!(body["stream"], true);
        assert!(body.get("top_k").is_none() && body.get("max_tokens").is_none());
        let off = Sampling { thinking: Some(Effort::Off), ..Sampling::default() };
        assert_eq!(off.chat_body(&[])["reasoning_effort"], "none");
        assert!(Sampling::default().chat_body(&[]).get("reasoning_effort").is_none());
    }

    #[test]
    fn deepseek_v4_refusals_name_the_flag_that_was_typed() {
        let refusal = || anyhow::anyhow!("400: `reasoning_effort`: the served model has no reasoning mode");
        let thinking = Sampling { thinking: Some(Effort::High), ..Sampling::default() }.chat_body(&[]);
        let shown = as_flags(&thinking, refusal()).to_string();
        assert_eq!(shown, "400: --thinking: the served model has no reasoning mode");
        let other = as_flags(&thinking, anyhow::anyhow!("400: the prompt is too long")).to_string();
        assert_eq!(other, "400: the prompt is too long");
    }

    #[test]
    fn dumps_are_greedy_unless_told_otherwise() {
        assert_eq!(Sampling::default().for_dump().unwrap(), None);
        assert_eq!(Sampling { temperature: Some(0.0), ..Sampling::default() }.for_dump().unwrap(), None);
        assert_eq!(Sampling::default().raw_body("x")["temperature"], 0.6);
        let warm = Sampling { temperature: Some(0.5), top_p: Some(0.25), seed: Some(7), ..Sampling::default() };
        let warm = warm.for_dump().unwrap().unwrap();
        assert_eq!((warm.temperature, warm.top_p, warm.seed), (Some(0.5), Some(0.25), Some(7)));
        let stop = Sampling { stop: vec!["x".into()], ..Sampling::default() };
        assert_eq!(Failure::code_of(&stop.for_dump().unwrap_err()), 2);
    }

    #[test]
    fn deltas_of_every_kind_are_told_apart() {
        for (choice, heard) in [
            (json!({"delta": {"content": "a"}}), Some(Heard::Text("a".into()))),
            (json!({"text": "b"}), Some(Heard::Text("b".into()))),
            (json!({"delta": {"reasoning_content": "c"}}), Some(Heard::Reasoning("c".into()))),
            (
                json!({"delta": {"tool_calls": [{"index": 0, "id": "i", "function": {"name": "f", "arguments": ""}}]}}),
                Some(Heard::Call("\nf ".into())),
            ),
            (
                json!({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}),
                Some(Heard::Call("{}".into())),
            ),
            (json!({"delta": {"role": "assistant", "content": ""}}), None),
            (json!({"delta": {}, "finish_reason": "stop"}), None),
        ] {
            assert_eq!(Heard::of(&choice), heard, "{choice}");
        }
    }

    #[test]
    fn out_of_range_numbers_are_refused() {
        assert!(probability("1.5").is_err() && probability("nan").is_err() && temperature("-1").is_err());
        assert!(temperature("9").is_err() && stop_text("").is_err() && stop_text(&"x".repeat(1025)).is_err());
        assert_eq!(probability("0.9"), Ok(0.9));
    }

    #[test]
    fn the_summary_shows_what_the_worker_reported() {
        let summary = Summary {
            finish_reason: Some("length".into()),
            usage: Some(json!({"prompt_tokens": 5, "completion_tokens": 7})),
            timings: Some(json!({"prompt_per_second": 100.4, "predicted_per_second": 20.04})),
        };
        let line = summary.line().unwrap();
        assert_eq!(line, "5 prompt tokens, 7 generated; prefill 100 tok/s, decode 20.0 tok/s; cut at the token limit");
        assert_eq!(Summary::default().line(), None);
    }
}
