//! The fields that both generation surfaces share, and what every one of them means.

use std::collections::HashSet;
use std::fmt;

use ds4_engine::SamplingParams;
use serde::Deserialize;
use serde::de::{MapAccess, SeqAccess, Visitor};

use crate::backend::ModelInfo;
use crate::error::ApiError;
use crate::job::MAX_SEQUENCES;
use crate::json::{Fields, wrong_type};

/// Most choices per prompt.
pub const MAX_N: i64 = 8;
/// Most stop strings.
pub const MAX_STOPS: usize = 4;
/// Most bytes of one stop string: text is held back while it could still become one.
pub const MAX_STOP_BYTES: usize = 1024;

/// Most bytes of `logit_bias`: every token of a large vocabulary fits.
const MAX_BIAS_TEXT: usize = 8 << 20;

/// Fields that describe the caller's bookkeeping or a hint; they change no answer.
const HARMLESS: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
];

/// The shared fields, validated.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    /// Answer as an event stream.
    pub stream: bool,
    /// End the stream with a usage chunk.
    pub include_usage: bool,
    /// Most tokens to generate; `None`: what the context leaves.
    pub max_tokens: Option<usize>,
    /// Choices per prompt.
    pub n: usize,
    /// Stop strings as bytes.
    pub stop: Vec<Vec<u8>>,
    /// Sampler settings.
    pub sampling: SamplingParams,
    /// Generate past end-of-sequence tokens.
    pub ignore_eos: bool,
}

/// Checks `model`: absent or empty means the one that is served.
///
/// # Errors
/// 404 `model_not_found` naming the served model.
pub fn check_model(fields: &mut Fields<'_>, model: &ModelInfo) -> Result<(), ApiError> {
    match fields.string("model")? {
        Some(asked) if !asked.is_empty() && asked != model.name => Err(model_not_found(&asked, model)),
        _ => Ok(()),
    }
}

/// The 404 for a model that is not served.
pub fn model_not_found(asked: &str, model: &ModelInfo) -> ApiError {
    let asked: String = asked.chars().take(128).collect();
    ApiError {
        status: hyper::StatusCode::NOT_FOUND,
        ..ApiError::field(
            "model_not_found",
            "model",
            format!("the model `{asked}` does not exist here; this worker serves `{}`", model.name),
        )
    }
}

impl Common {
    /// Reads the shared fields and refuses those that both surfaces must refuse.
    ///
    /// # Errors
    /// `invalid_type`, `invalid_value`, `unsupported_parameter`, each naming its field.
    pub fn parse(fields: &mut Fields<'_>, model: &ModelInfo) -> Result<Self, ApiError> {
        fields.ignore(&HARMLESS);
        let stream = fields.bool("stream")?.unwrap_or(false);
        let include_usage = stream_options(fields, stream)?;
        let max_tokens = {
            let mut most = |name| fields.integer(name, 1..=i64::MAX).map(|n| (name, n));
            agreed(most("max_completion_tokens")?, most("max_tokens")?)?
        };
        Ok(Self {
            stream,
            include_usage,
            // What exceeds the context is clamped by the engine; usize::MAX stands for anything that large.
            max_tokens: max_tokens.map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
            n: fields.integer("n", 1..=MAX_N)?.map_or(1, |n| usize::try_from(n).unwrap_or(1)),
            stop: stop(fields)?,
            sampling: sampling(fields, model)?,
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        })
    }
}

/// The value of a field that has two names. Given by both, it must be the same.
fn agreed<T: PartialEq + fmt::Display>(
    (first, value): (&str, Option<T>),
    (second, other): (&str, Option<T>),
) -> Result<Option<T>, ApiError> {
    match (value, other) {
        (Some(v), Some(o)) if v != o => {
            let rule = format!("contradicts `{first}`, which is {v}; send one of the two");
            Err(ApiError::invalid_value(second, o, &rule))
        }
        (v, o) => Ok(v.or(o)),
    }
}

fn stream_options(fields: &mut Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct StreamOptions {
        include_usage: Option<bool>,
        // Padding against traffic analysis; nothing to answer.
        #[serde(rename = "include_obfuscation")]
        _include_obfuscation: Option<bool>,
    }
    let options = fields
        .take::<StreamOptions>("stream_options", "an object with the booleans include_usage and include_obfuscation")?;
    match options {
        Some(_) if !stream => {
            Err(ApiError::invalid_value("stream_options", "given", "only allowed with `stream`: true"))
        }
        Some(options) => Ok(options.include_usage.unwrap_or(false)),
        None => Ok(false),
    }
}

fn stop(fields: &mut Fields<'_>) -> Result<Vec<Vec<u8>>, ApiError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Stop {
        One(String),
        Many(Vec<String>),
    }
    // Four longest strings, every byte escaped, and some room.
    if fields.len("stop") > 4 * 6 * MAX_STOP_BYTES + 1024 {
        return Err(ApiError::invalid_value("stop", "too long", "at most 4 strings of at most 1024 bytes"));
    }
    let stops = match fields.take::<Stop>("stop", "a string or an array of at most 4 strings")? {
        None => Vec::new(),
        Some(Stop::One(s)) => vec![s],
        Some(Stop::Many(s)) => s,
    };
    if stops.len() > MAX_STOPS {
        return Err(ApiError::invalid_value("stop", format!("{} strings", stops.len()), "at most 4 are allowed"));
    }
    for s in &stops {
        if s.is_empty() {
            return Err(ApiError::invalid_value("stop", "\"\"", "stop strings must not be empty"));
        }
        if s.len() > MAX_STOP_BYTES {
            return Err(ApiError::invalid_value("stop", format!("{} bytes long", s.len()), "at most 1024 bytes each"));
        }
    }
    Ok(stops.into_iter().map(String::into_bytes).collect())
}

fn sampling(fields: &mut Fields<'_>, model: &ModelInfo) -> Result<SamplingParams, ApiError> {
    let mut s = SamplingParams::default();
    let mut number = |name, range| fields.number(name, range).map(|v| v.map(to_f32));
    if let Some(v) = number("temperature", 0.0..=2.0)? {
        s.temperature = v;
    }
    if let Some(v) = number("top_p", 0.0..=1.0)? {
        // OpenAI allows 0, which keeps the single best token; the sampler wants a mass above 0.
        s.top_p = v.max(f32::MIN_POSITIVE);
    }
    if let Some(v) = number("min_p", 0.0..=1.0)? {
        s.min_p = v;
    }
    if let Some(v) = number("frequency_penalty", -2.0..=2.0)? {
        s.frequency_penalty = v;
    }
    if let Some(v) = number("presence_penalty", -2.0..=2.0)? {
        s.presence_penalty = v;
    }
    let mut repetition = |name| number(name, 0.01..=10.0).map(|v| (name, v));
    if let Some(v) = agreed(repetition("repetition_penalty")?, repetition("repeat_penalty")?)? {
        s.repetition_penalty = v;
    }
    // −1 is how several servers spell "off".
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?;
    s.top_k = top_k.and_then(|k| u32::try_from(k).ok()).unwrap_or(0);
    s.seed = fields.seed("seed")?;
    s.logit_bias = logit_bias(fields, model)?;
    Ok(s)
}

fn logit_bias(fields: &mut Fields<'_>, model: &ModelInfo) -> Result<Vec<(u32, f32)>, ApiError> {
    if fields.len("logit_bias") > MAX_BIAS_TEXT {
        return Err(ApiError::invalid_value("logit_bias", "too long", "its text may have 8 MiB"));
    }
    let Some(Biases(biases)) = fields.take("logit_bias", "an object of numbers keyed by token id")? else {
        return Ok(Vec::new());
    };
    let mut out = Vec::with_capacity(biases.len());
    let mut seen = HashSet::with_capacity(biases.len());
    let shown = |key: &str| format!("keyed by `{}`", key.chars().take(32).collect::<String>());
    for (key, bias) in biases {
        let token = key.parse::<u32>().ok().filter(|t| usize::try_from(*t).is_ok_and(|t| t < model.vocab));
        let Some(token) = token else {
            let rule = format!("keys must be token ids below {}", model.vocab);
            return Err(ApiError::invalid_value("logit_bias", shown(&key), &rule));
        };
        if !seen.insert(token) {
            return Err(ApiError::invalid_value("logit_bias", shown(&key), "a token that has a bias already"));
        }
        if !(-100.0..=100.0).contains(&bias) {
            return Err(ApiError::invalid_value("logit_bias", bias, "biases must be between -100 and 100"));
        }
        out.push((token, to_f32(bias)));
    }
    Ok(out)
}

/// An object as it was written: a map would keep one of two values of a key, and nobody would know which.
struct Biases(Vec<(String, f64)>);

impl<'de> Deserialize<'de> for Biases {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Biases;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Biases, A::Error> {
                let mut out = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    out.push(entry);
                }
                Ok(Biases(out))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Narrowing of a value that was range-checked; precision beyond f32 does not matter to a sampler.
#[allow(clippy::cast_possible_truncation, reason = "range-checked parameters")]
fn to_f32(v: f64) -> f32 {
    v as f32
}

/// A prompt of `/v1/completions`, or a batch of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// Reads `prompt`: a string, an array of strings, an array of token ids, or an array of such arrays.
///
/// # Errors
/// `missing_required_parameter`, `invalid_type`, `empty_prompt`, `invalid_value`.
pub fn prompts(fields: &mut Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    const EXPECTED: &str = "a string, an array of strings, an array of token ids, or an array of arrays of token ids";
    let Some(raw) = fields.raw("prompt") else { return Err(ApiError::missing("prompt")) };
    let Prompts(prompts) = serde_json::from_str(raw).map_err(|_| wrong_type("prompt", EXPECTED, raw))?;
    if prompts.len() > MAX_SEQUENCES {
        return Err(ApiError::invalid_value("prompt", "a batch of more than 128 prompts", "send fewer"));
    }
    Ok(prompts)
}

struct Prompts(Vec<Prompt>);

/// An element of the outer array.
enum Element {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementVisitor;
        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = Element;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or an array of token ids")
            }
            fn visit_str<E>(self, v: &str) -> Result<Element, E> {
                Ok(Element::Text(v.to_owned()))
            }
            fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<Element, E> {
                u32::try_from(v).map(Element::Token).map_err(|_| E::custom("no token id is that large"))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = seq.next_element::<u32>()? {
                    tokens.push(token);
                }
                Ok(Element::Tokens(tokens))
            }
        }
        deserializer.deserialize_any(ElementVisitor)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = Prompts;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array")
            }
            fn visit_str<E>(self, v: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![Prompt::Text(v.to_owned())]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompts, A::Error> {
                use serde::de::Error;
                let mixed = || A::Error::custom("strings, token ids and arrays cannot be mixed");
                let (mut batch, mut flat) = (Vec::new(), Vec::new());
                while let Some(element) = seq.next_element::<Element>()? {
                    match element {
                        Element::Token(token) => flat.push(token),
                        Element::Text(text) => batch.push(Prompt::Text(text)),
                        Element::Tokens(tokens) => batch.push(Prompt::Tokens(tokens)),
                    }
                    // More are refused by the caller; they need not be held.
                    batch.truncate(MAX_SEQUENCES + 1);
                    if !flat.is_empty() && !batch.is_empty() {
                        return Err(mixed());
                    }
                }
                if batch.windows(2).any(|w| std::mem::discriminant(&w[0]) != std::mem::discriminant(&w[1])) {
                    return Err(mixed());
                }
                if batch.is_empty() {
                    batch.push(Prompt::Tokens(flat));
                }
                Ok(Prompts(batch))
            }
        }
        deserializer.deserialize_any(PromptsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::model;

    fn common(body: &str) -> Result<Common, ApiError> {
        let mut f = Fields::parse(body.as_bytes(), 16)?;
        let common = Common::parse(&mut f, &model())?;
        f.finish()?;
        Ok(common)
    }

    fn refusal(body: &str) -> (String, &'static str) {
        let e = common(body).unwrap_err();
        (e.param.unwrap_or_default(), e.code)
    }

    #[test]
    fn defaults_are_openai_s() {
        let c = common("{}").unwrap();
        assert_eq!((c.stream, c.n, c.max_tokens, c.stop.len()), (false, 1, None, 0));
        assert_eq!(c.sampling, SamplingParams::default());
    }

    #[test]
    fn max_tokens_zero_and_minus_one_are_refused_and_a_billion_is_not() {
        for name in ["max_tokens", "max_completion_tokens"] {
            for bad in ["0", "-1"] {
                assert_eq!(refusal(&format!("{{\"{name}\":{bad}}}")), (name.into(), "invalid_value"));
            }
            assert_eq!(common(&format!("{{\"{name}\":1000000000}}")).unwrap().max_tokens, Some(1_000_000_000));
        }
    }

    #[test]
    fn two_names_of_one_field_must_agree() {
        for (first, second, value, other) in
            [("max_completion_tokens", "max_tokens", "3", "8"), ("repetition_penalty", "repeat_penalty", "1.5", "1.25")]
        {
            let body = |a: &str, b: &str| format!("{{\"{first}\":{a},\"{second}\":{b}}}");
            let e = common(&body(value, other)).unwrap_err();
            assert_eq!((e.param.as_deref(), e.code), (Some(second), "invalid_value"));
            for shown in [first, value, second, other] {
                assert!(e.message.contains(shown), "{shown} in {}", e.message);
            }
            let want = common(&format!("{{\"{first}\":{value}}}")).unwrap();
            assert_ne!(want, common("{}").unwrap());
            for (a, b) in [(value, value), (value, "null"), ("null", value)] {
                assert_eq!(common(&body(a, b)), Ok(want.clone()), "{a} {b}");
            }
        }
    }

    #[test]
    fn every_shared_field_is_checked_by_name() {
        let cases = [
            (r#"{"temperature":2.1}"#, "temperature", "invalid_value"),
            (r#"{"temperature":"0.5"}"#, "temperature", "invalid_type"),
            (r#"{"top_p":-0.1}"#, "top_p", "invalid_value"),
            (r#"{"min_p":1.1}"#, "min_p", "invalid_value"),
            (r#"{"frequency_penalty":-2.5}"#, "frequency_penalty", "invalid_value"),
            (r#"{"presence_penalty":3}"#, "presence_penalty", "invalid_value"),
            (r#"{"repetition_penalty":0}"#, "repetition_penalty", "invalid_value"),
            (r#"{"top_k":-2}"#, "top_k", "invalid_value"),
            (r#"{"seed":0.5}"#, "seed", "invalid_type"),
            (r#"{"seed":"1"}"#, "seed", "invalid_type"),
            (r#"{"seed":18446744073709551616}"#, "seed", "invalid_value"),
            (r#"{"seed":-9223372036854775809}"#, "seed", "invalid_value"),
            (r#"{"seed":1e30}"#, "seed", "invalid_value"),
            (r#"{"n":0}"#, "n", "invalid_value"),
            (r#"{"n":9}"#, "n", "invalid_value"),
            (r#"{"stop":""}"#, "stop", "invalid_value"),
            (r#"{"stop":["a",""]}"#, "stop", "invalid_value"),
            (r#"{"stop":["a","b","c","d","e"]}"#, "stop", "invalid_value"),
            (r#"{"stop":[1]}"#, "stop", "invalid_type"),
            (r#"{"logit_bias":{"x":1}}"#, "logit_bias", "invalid_value"),
            (r#"{"logit_bias":{"1000000":1}}"#, "logit_bias", "invalid_value"),
            (r#"{"logit_bias":{"1":101}}"#, "logit_bias", "invalid_value"),
            (r#"{"logit_bias":{"1":1,"2":0,"1":2}}"#, "logit_bias", "invalid_value"),
            (r#"{"logit_bias":{"1":1,"01":2}}"#, "logit_bias", "invalid_value"),
            (r#"{"logit_bias":{"1":null}}"#, "logit_bias", "invalid_type"),
            (r#"{"logit_bias":[1]}"#, "logit_bias", "invalid_type"),
            (r#"{"stream":"true"}"#, "stream", "invalid_type"),
            (r#"{"stream_options":{"include_usage":true}}"#, "stream_options", "invalid_value"),
            (r#"{"stream":true,"stream_options":{"x":1}}"#, "stream_options", "invalid_type"),
            (r#"{"ignore_eos":1}"#, "ignore_eos", "invalid_type"),
            (r#"{"frobnicate":1}"#, "frobnicate", "unknown_parameter"),
        ];
        for (body, param, code) in cases {
            assert_eq!(refusal(body), (param.into(), code), "{body}");
        }
    }

    #[test]
    fn values_arrive() {
        let c = common(
            r#"{"temperature":0,"top_p":0,"top_k":-1,"seed":-1,"stop":"x","logit_bias":{"5":-100},"n":3,
                "user":"u","metadata":{"a":"b"},"store":false,"stream":true,"stream_options":{"include_usage":true}}"#,
        )
        .unwrap();
        assert_eq!((c.sampling.temperature, c.sampling.top_k, c.sampling.seed), (0.0, 0, None));
        assert!(c.sampling.top_p > 0.0);
        assert_eq!(c.sampling.logit_bias, vec![(5, -100.0)]);
        assert_eq!((c.stop.len(), c.n, c.stream, c.include_usage), (1, 3, true, true));
    }

    #[test]
    fn seeds_of_64_bits_are_not_each_other() {
        let seed = |v: &str| common(&format!(r#"{{"seed":{v}}}"#)).unwrap().sampling.seed;
        assert_eq!([seed("0"), seed("7.0"), seed("1e18")], [Some(0), Some(7), Some(1_000_000_000_000_000_000)]);
        let (half, most) = (9_223_372_036_854_775_808, u64::MAX);
        assert_eq!([seed("9223372036854775808"), seed("18446744073709551615")], [Some(half), Some(most)]);
        assert_eq!([seed("9223372036854775807"), seed("-9223372036854775808")], [Some(half - 1), Some(half)]);
        assert_eq!([seed("-1"), seed("-1.0"), seed("null"), seed("-2")], [None, None, None, Some(most - 1)]);
    }

    #[test]
    fn prompts_of_four_shapes() {
        let read = |body: &str| prompts(&mut Fields::parse(body.as_bytes(), 16).unwrap()).map_err(|e| e.code);
        assert_eq!(read(r#"{"prompt":"a"}"#).unwrap(), vec![Prompt::Text("a".into())]);
        assert_eq!(read(r#"{"prompt":["a","b"]}"#).unwrap().len(), 2);
        assert_eq!(read(r#"{"prompt":[1,2]}"#).unwrap(), vec![Prompt::Tokens(vec![1, 2])]);
        assert_eq!(
            read(r#"{"prompt":[[1],[2,3]]}"#).unwrap(),
            vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]
        );
        for bad in ["1", "[1,\"a\"]", "[[1],\"a\"]", "[[1],2]", "[-1]", "[1.5]", "[4294967296]", "[[[1]]]", "{}"] {
            assert_eq!(read(&format!("{{\"prompt\":{bad}}}")), Err("invalid_type"), "{bad}");
        }
        assert_eq!(read("{}"), Err("missing_required_parameter"));
    }
}
