//! `tokenizer.json` as `tokenizer.ggml.*` keys.
//!
//! A GGUF file says how text is cut by a name only, so the file's pre-tokenizer must be the one that the name means:
//! DeepSeek's three splits, then bytes. Anything else is refused rather than converted into another tokenizer.

use anyhow::Context as _;
use ds4_manifests::{Metadata, StringTable, Value};
use serde_json::Value as Json;

use super::bad;
use super::checkpoint::Checkpoint;

/// DeepSeek's splits, as its tokenizer.json has them; GGUF files call them `joyai-llm`.
const SPLITS: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
];
const NAME: &str = "joyai-llm";

/// Types of `tokenizer.ggml.token_type`.
const NORMAL: i64 = 1;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// Adds the tokenizer of a checkpoint to the metadata of its model.
pub fn add(m: &mut Metadata, checkpoint: &Checkpoint, config: &Json) -> anyhow::Result<()> {
    let file = checkpoint.json("tokenizer.json")?;
    let file =
        file.ok_or_else(|| bad("tokenizer.json is missing: a model without a tokenizer cannot be served".into()))?;
    let vocab = usize::try_from(m.u64("deepseek4.vocab_size").context("vocab_size was read")?)?;
    from_json(m, &file, vocab)?;
    let generation = checkpoint.json("generation_config.json")?.unwrap_or_default();
    for (key, from, text) in [
        ("bos", "bos_token_id", Some("<｜begin▁of▁sentence｜>")),
        ("eos", "eos_token_id", Some("<｜end▁of▁sentence｜>")),
        ("padding", "pad_token_id", None),
    ] {
        if let Some(id) = special(from, text, config, &generation, m, vocab)? {
            m.set(&format!("tokenizer.ggml.{key}_token_id"), Value::U64(id));
        }
    }
    if let Some(template) = chat_template(checkpoint)? {
        m.set("tokenizer.chat_template", Value::String(template));
    }
    for (key, from) in [("temp", "temperature"), ("top_p", "top_p")] {
        if let Some(v) = generation.get(from).and_then(Json::as_f64) {
            #[allow(clippy::cast_possible_truncation, reason = "files keep f32")]
            m.set(&format!("general.sampling.{key}"), Value::F64(f64::from(v as f32)));
        }
    }
    Ok(())
}

/// A special token's id: what the files say (the first of several), else the token of that text.
fn special(
    key: &str,
    text: Option<&str>,
    config: &Json,
    generation: &Json,
    m: &Metadata,
    vocab: usize,
) -> anyhow::Result<Option<u64>> {
    for (file, json) in [("config.json", config), ("generation_config.json", generation)] {
        let Some(value) = json.get(key).filter(|v| !v.is_null()) else { continue };
        let first = value.as_array().and_then(|l| l.first()).unwrap_or(value);
        return match first.as_u64().filter(|id| usize::try_from(*id).is_ok_and(|id| id < vocab)) {
            Some(id) => Ok(Some(id)),
            None => Err(bad(format!("{file}: {key} is {value}, expected a token of the vocabulary of {vocab}"))),
        };
    }
    let tokens = m.strings("tokenizer.ggml.tokens");
    let found = text.zip(tokens).and_then(|(text, tokens)| tokens.iter().position(|t| t == text.as_bytes()));
    Ok(found.map(u64::try_from).transpose()?)
}

/// `chat_template.jinja`, else what tokenizer_config.json has. Serving does not need it: the layout is built in.
fn chat_template(checkpoint: &Checkpoint) -> anyhow::Result<Option<String>> {
    if let Some(text) = checkpoint.text("chat_template.jinja")? {
        return Ok(Some(text));
    }
    let config = checkpoint.json("tokenizer_config.json")?.unwrap_or_default();
    Ok(config.get("chat_template").and_then(Json::as_str).map(str::to_owned))
}

fn refuse(what: impl std::fmt::Display) -> anyhow::Error {
    bad(format!("tokenizer.json: {what}"))
}

/// The content of tokenizer.json for a vocabulary of `vocab` ids; ids that it does not use become unused tokens.
pub fn from_json(m: &mut Metadata, file: &Json, vocab: usize) -> anyhow::Result<()> {
    let model = &file["model"];
    if model["type"].as_str() != Some("BPE") {
        return Err(refuse(format!("model.type is {}, expected \"BPE\"", model["type"])));
    }
    for key in ["byte_fallback", "ignore_merges", "dropout", "continuing_subword_prefix", "end_of_word_suffix"] {
        if !matches!(&model[key], Json::Null | Json::Bool(false)) && model[key].as_str() != Some("") {
            return Err(refuse(format!("model.{key} is {}, which is not implemented", model[key])));
        }
    }
    let normalizer = &file["normalizer"];
    if !normalizer.is_null() && normalizer["normalizers"].as_array().is_none_or(|l| !l.is_empty()) {
        return Err(refuse("a normalizer is not implemented"));
    }
    check_splits(&file["pre_tokenizer"])?;

    let mut tokens: Vec<Option<String>> = vec![None; vocab];
    let mut types = vec![UNUSED; vocab];
    let mut place = |text: &str, id: &Json, kind: i64, replace: bool| -> anyhow::Result<()> {
        let at = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|id| *id < vocab).ok_or_else(|| {
            refuse(format!("token {text:?} has id {id}, but config.json has a vocab_size of {vocab}"))
        })?;
        match &tokens[at] {
            Some(other) if other != text || !replace => {
                return Err(refuse(format!("tokens {other:?} and {text:?} both have id {at}")));
            }
            _ => tokens[at] = Some(text.to_owned()),
        }
        types[at] = kind;
        Ok(())
    };
    let words = model["vocab"].as_object().ok_or_else(|| refuse("model.vocab is not an object"))?;
    words.iter().try_for_each(|(text, id)| place(text, id, NORMAL, false))?;
    for added in file["added_tokens"].as_array().into_iter().flatten() {
        let text = added["content"].as_str().ok_or_else(|| refuse("an added token has no content"))?;
        let kind = if added["special"] == true { CONTROL } else { USER_DEFINED };
        place(text, &added["id"], kind, true)?;
    }
    let mut table = StringTable::default();
    for (id, token) in tokens.iter().enumerate() {
        let text = token.clone().unwrap_or_else(|| format!("[unused {id}]"));
        table.push(text.as_bytes()).context("the vocabulary's text is over 4 GiB")?;
    }
    let mut merges = StringTable::default();
    for merge in model["merges"].as_array().ok_or_else(|| refuse("model.merges is not a list"))? {
        let text = match merge {
            Json::String(text) if text.split(' ').count() == 2 => text.clone(),
            Json::Array(pair) => match pair.as_slice() {
                [Json::String(a), Json::String(b)] if !a.contains(' ') && !b.contains(' ') => format!("{a} {b}"),
                _ => return Err(refuse(format!("merge {merge} is not a pair"))),
            },
            _ => return Err(refuse(format!("merge {merge} is not a pair"))),
        };
        merges.push(text.as_bytes()).context("the merges' text is over 4 GiB")?;
    }
    m.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    m.set("tokenizer.ggml.pre", Value::String(NAME.into()));
    m.set("tokenizer.ggml.tokens", Value::Strings(table));
    m.set("tokenizer.ggml.token_type", Value::Ints(types));
    m.set("tokenizer.ggml.merges", Value::Strings(merges));
    m.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
    m.set("tokenizer.ggml.add_eos_token", Value::Bool(false));
    Ok(())
}

fn check_splits(pre: &Json) -> anyhow::Result<()> {
    let unknown = || {
        refuse(
            "pre_tokenizer is not DeepSeek V4's (three isolating splits, then bytes), the only one that is converted",
        )
    };
    let [splits @ .., bytes] = pre["pretokenizers"].as_array().map_or(&[][..], Vec::as_slice) else {
        return Err(unknown());
    };
    let is_split = |(split, pattern): (&Json, &str)| {
        split["type"] == "Split"
            && split["behavior"] == "Isolated"
            && split["invert"] != true
            && split["pattern"]["Regex"] == pattern
    };
    let fits = splits.len() == SPLITS.len()
        && splits.iter().zip(SPLITS).all(is_split)
        && bytes["type"] == "ByteLevel"
        && bytes["add_prefix_space"] == false
        && bytes["use_regex"] == false;
    if fits { Ok(()) } else { Err(unknown()) }
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    pub fn file() -> Json {
        json!({
            "normalizer": {"type": "Sequence", "normalizers": []},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLITS[0]}, "behavior": "Isolated", "invert": false},
                {"type": "Split", "pattern": {"Regex": SPLITS[1]}, "behavior": "Isolated", "invert": false},
                {"type": "Split", "pattern": {"Regex": SPLITS[2]}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
            "model": {"type": "BPE", "dropout": null, "byte_fallback": false,
                "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": ["a b"]},
            "added_tokens": [{"id": 0, "content": "<s>", "special": true}, {"id": 5, "content": "<think>", "special": false}],
        })
    }

    #[test]
    fn deepseek_v4_tokenizers_become_keys() {
        let mut m = Metadata::default();
        from_json(&mut m, &file(), 7).unwrap();
        let tokens: Vec<&[u8]> = m.strings("tokenizer.ggml.tokens").unwrap().iter().collect();
        let want: [&[u8]; 7] = [b"<s>", b"a", b"b", b"ab", b"[unused 4]", b"<think>", b"[unused 6]"];
        assert_eq!(tokens, want);
        assert_eq!(m.ints("tokenizer.ggml.token_type").unwrap(), [3, 1, 1, 1, 5, 4, 5]);
        assert_eq!(m.strings("tokenizer.ggml.merges").unwrap().get(0), Some(&b"a b"[..]));
        let mut pairs = file();
        pairs["model"]["merges"] = json!([["a", "b"]]);
        let mut same = Metadata::default();
        from_json(&mut same, &pairs, 7).unwrap();
        assert_eq!(same, m);
    }

    #[test]
    fn deepseek_v4_foreign_tokenizers_are_refused() {
        for (path, value, says) in [
            ("/model/type", json!("Unigram"), "BPE"),
            ("/model/byte_fallback", json!(true), "byte_fallback"),
            ("/normalizer", json!({"type": "NFC"}), "normalizer"),
            ("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("\\d"), "pre_tokenizer"),
            ("/pre_tokenizer/pretokenizers/1/behavior", json!("Removed"), "pre_tokenizer"),
            ("/pre_tokenizer/pretokenizers/3/use_regex", json!(true), "pre_tokenizer"),
            ("/pre_tokenizer/pretokenizers", json!([]), "pre_tokenizer"),
            ("/pre_tokenizer", json!(null), "pre_tokenizer"),
            ("/model/vocab/ab", json!(7), "vocab_size of 7"),
            ("/model/vocab/ab", json!(2), "both have id 2"),
            ("/added_tokens/1/id", json!(3), "both have id 3"),
            ("/model/merges", json!(["a b c"]), "not a pair"),
        ] {
            let mut f = file();
            *f.pointer_mut(path).unwrap() = value;
            let error = from_json(&mut Metadata::default(), &f, 7).unwrap_err().to_string();
            assert!(error.contains(says), "{path}: {error}");
        }
    }
}
