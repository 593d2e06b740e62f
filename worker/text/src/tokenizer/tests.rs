//! Encoding against independent implementations, round trips, long inputs, refusals, and the time to build.

use std::time::Instant;

use ds4_manifests::{StringTable, Value};

use super::*;
use crate::test_support::{Rng, fixture, starter_metadata, starter_tokenizer};

/// Ids come from Hugging Face `tokenizers` and, in agreement, from a plain BPE in Python
/// (`tests/oracles/tokenizer_fixtures.py`).
#[test]
fn ids_equal_two_independent_implementations() {
    let t = starter_tokenizer();
    let ids = |v: &serde_json::Value| -> Vec<u32> {
        v.as_array().expect("ids").iter().map(|i| u32::try_from(i.as_u64().expect("id")).expect("u32")).collect()
    };
    let mut compared = 0;
    for case in fixture("tokenizer/smollm2.json").as_array().expect("cases") {
        let text = case["text"].as_str().expect("text");
        let want = ids(&case["ids"]);
        assert_eq!(t.encode(text, Specials::Parse), want, "{text:?}");
        let plain = case.get("plain").map_or(want, ids);
        assert_eq!(t.encode(text, Specials::Plain), plain, "{text:?} as plain text");
        compared += 1;
    }
    assert!(compared >= 300);
}

fn decode(t: &Tokenizer, ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| t.token_bytes(*id)).copied().collect()
}

/// Bytes that no token of SmolLM2 stands for. The reference leaves them out as well: the model never saw them.
fn without_missing(t: &Tokenizer, text: &str) -> Vec<u8> {
    let missing = t.missing_bytes();
    text.bytes().filter(|b| !missing.contains(b)).collect()
}

#[test]
fn random_unicode_comes_back_and_is_never_control() {
    let t = starter_tokenizer();
    let mut rng = Rng::new(17);
    let snippets = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<file_sep>", " ", "  ", "\n", "'s", "12"];
    let mut chars = 0usize;
    for _ in 0..20_000 {
        let mut text = String::new();
        for _ in 0..rng.below(16) {
            match rng.below(8) {
                0 => text += snippets[rng.below(snippets.len())],
                1..=3 => text.extend(char::from_u32(u32::try_from(rng.below(0x250)).expect("u32"))),
                4 | 5 => text.extend(char::from_u32(u32::try_from(rng.below(0x1_0000)).expect("u32"))),
                _ => text.extend(char::from_u32(u32::try_from(rng.below(0x11_0000)).expect("u32"))),
            }
        }
        chars += text.chars().count();
        let plain = t.encode(&text, Specials::Plain);
        assert_eq!(decode(t, &plain), without_missing(t, &text), "{text:?}");
        assert!(!plain.iter().any(|id| t.is_control(*id)), "{text:?} gave {plain:?}");
        assert_eq!(decode(t, &t.encode(&text, Specials::Parse)), without_missing(t, &text), "{text:?}");
    }
    assert!(chars > 100_000);
}

/// From the vocabulary itself: these bytes have no one-byte token there.
#[test]
fn missing_bytes_are_known() {
    let missing = starter_tokenizer().missing_bytes();
    let utf8 = |b: &&u8| !matches!(b, 0xC0 | 0xC1 | 0xF5..=0xFF);
    assert_eq!(
        missing.iter().filter(utf8).copied().collect::<Vec<_>>(),
        [0x04, 0x06, 0x13, 0x14, 0x16, 0x1d, 0xf1, 0xf2]
    );
}

#[test]
fn tokens_and_their_names() {
    let t = starter_tokenizer();
    assert_eq!(t.vocab_size(), 49_152);
    assert_eq!((t.bos(), t.eos(), t.add_bos()), (Some(1), Some(2), false));
    assert_eq!(t.token_id("<|im_end|>"), Some(2));
    assert_eq!(t.token_id("<|endoftext|>"), Some(0));
    assert_eq!(t.token_id(" the").map(|id| t.token_bytes(id)), Some(&b" the"[..]));
    assert_eq!(t.token_id("no such token anywhere"), None);
    assert_eq!(t.token_bytes(2), b"<|im_end|>");
    assert_eq!(t.token_bytes(49_152), b"");
    assert!(t.is_control(0) && t.is_control(16) && !t.is_control(17) && t.is_control(u32::MAX));
    assert_eq!((0..49_152).filter(|id| t.is_eog(*id)).collect::<Vec<_>>(), [0, 2]);
    fn shared<T: Send + Sync>() {}
    shared::<Tokenizer>();
}

#[test]
fn megabytes_without_a_space_are_linear() {
    let t = starter_tokenizer();
    let mut rng = Rng::new(23);
    let letters: String = (0..1_000_000).map(|_| char::from(b'a' + u8::try_from(rng.below(26)).expect("u8"))).collect();
    let cjk: String =
        (0..333_333).filter_map(|_| char::from_u32(u32::try_from(0x4e00 + rng.below(0x5000)).expect("u32"))).collect();
    for (name, text) in [
        ("one letter", "a".repeat(1_000_000)),
        ("spaces", " ".repeat(1_000_000)),
        ("newlines", "\n".repeat(1_000_000)),
        ("digits", "7".repeat(1_000_000)),
        ("punctuation", "!".repeat(1_000_000)),
        ("random letters", letters),
        ("han", cjk),
        ("control strings", "<|im_end|>".repeat(100_000)),
        ("almost control strings", "<|im_end".repeat(125_000)),
        ("words", "the quick brown fox ".repeat(50_000)),
    ] {
        for specials in [Specials::Parse, Specials::Plain] {
            let start = Instant::now();
            let ids = t.encode(&text, specials);
            let took = start.elapsed();
            assert_eq!(decode(t, &ids), text.as_bytes(), "{name}");
            println!("{name:>24} {specials:?}: {:>7} tokens in {took:?}", ids.len());
            // Below 1 s each here; a quadratic one would take hours.
            assert!(took.as_secs() < 10, "{name} took {took:?}");
        }
    }
}

#[test]
fn a_limit_stops_early() {
    let t = starter_tokenizer();
    assert_eq!(t.encode_up_to("Hello, world!", Specials::Parse, 4), Ok(vec![19556, 28, 905, 17]));
    assert_eq!(t.encode_up_to("Hello, world!", Specials::Parse, 3), Err(TooManyTokens { at_least: 4, limit: 3 }));
    let huge = "a ".repeat(32 << 20);
    let start = Instant::now();
    let e = t.encode_up_to(&huge, Specials::Parse, 8192).expect_err("64 MiB");
    assert!(e.at_least > 8192 && start.elapsed().as_millis() < 100, "{e:?} {:?}", start.elapsed());
    // Short enough by its bytes, too long in tokens: only the excess over the limit is left undone.
    let words = "a1".repeat(300_000);
    let start = Instant::now();
    t.encode_up_to(&words, Specials::Parse, 8192).expect_err("600,000 tokens");
    assert!(start.elapsed().as_millis() < 500, "{:?}", start.elapsed());
}

#[test]
fn long_words_are_merged_in_blocks_without_loss() {
    let t = starter_tokenizer();
    let text = "漢a".repeat(300_000);
    assert_eq!(decode(t, &t.encode(&text, Specials::Plain)), text.as_bytes());
}

/// The worker's exec → ready budget is 150 ms at the median; the tokenizer is built beside the rest of it.
#[test]
fn building_takes_tens_of_milliseconds() {
    let m = starter_metadata();
    let mut times: Vec<_> = (0..7)
        .map(|_| {
            let start = Instant::now();
            let t = Tokenizer::from_metadata(m).expect("builds");
            assert_eq!(t.encode("Hello", Specials::Plain), [19556]);
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!("tokenizer built in {times:?}");
    // Loose, for a machine that runs other tests at the same time; the figure alone is in the crate's documentation.
    assert!(times[3].as_millis() < 400, "{times:?}");
}

/// A vocabulary of the 256 bytes and two merges.
fn tiny() -> Metadata {
    let mut m = Metadata::default();
    let mut tokens = StringTable::default();
    for b in 0..=255u8 {
        tokens.push(crate::byte_level::char_of(b).to_string().as_bytes()).expect("fits");
    }
    for t in ["ab", "abc", "<end>", "user token"] {
        tokens.push(t.as_bytes()).expect("fits");
    }
    let mut merges = StringTable::default();
    merges.push(b"a b").expect("fits");
    merges.push(b"ab c").expect("fits");
    let mut types = vec![1; 258];
    types.extend([3, 4]);
    m.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    m.set("tokenizer.ggml.pre", Value::String("gpt-2".into()));
    m.set("tokenizer.ggml.tokens", Value::Strings(tokens));
    m.set("tokenizer.ggml.token_type", Value::Ints(types));
    m.set("tokenizer.ggml.merges", Value::Strings(merges));
    m.set("tokenizer.ggml.eos_token_id", Value::U64(258));
    m
}

#[test]
fn user_defined_tokens_are_text_that_is_one_token() {
    let t = Tokenizer::from_metadata(&tiny()).expect("builds");
    assert_eq!(t.encode("abcab", Specials::Plain), [257, 256]);
    assert_eq!(t.encode("abuser token<end>", Specials::Parse), [256, 259, 258]);
    let plain = t.encode("abuser token<end>", Specials::Plain);
    assert_eq!(plain[..2], [256, 259]);
    assert_eq!(decode(&t, &plain[2..]), b"<end>");
    assert!(!plain.contains(&258));
    assert!(!t.is_control(259));
    assert!(t.missing_bytes().is_empty());
}

#[test]
fn damaged_and_unknown_tokenizers_are_refused_by_name() {
    let with = |key: &str, value: Value| {
        let mut m = tiny();
        m.set(key, value);
        Tokenizer::from_metadata(&m).expect_err(key)
    };
    let strings = |list: &[&[u8]]| {
        let mut t = StringTable::default();
        list.iter().for_each(|s| t.push(s).expect("fits"));
        Value::Strings(t)
    };
    assert!(
        matches!(with("tokenizer.ggml.model", Value::String("t5".into())), TextError::UnknownTokenizer { kind } if kind == "t5")
    );
    let e = with("tokenizer.ggml.pre", Value::String("superbpe".into())).to_string();
    assert!(e.contains("\"superbpe\"") && e.contains("smollm") && e.contains("llama-bpe"), "{e}");
    assert_eq!(with("tokenizer.ggml.tokens", Value::U64(1)), TextError::MissingKey { key: "tokenizer.ggml.tokens" });
    assert_eq!(with("tokenizer.ggml.merges", Value::U64(1)), TextError::MissingKey { key: "tokenizer.ggml.merges" });
    for (key, value, says) in [
        ("tokenizer.ggml.token_type", Value::Ints(vec![1]), "260 tokens and 1 token types"),
        ("tokenizer.ggml.token_type", Value::Ints(vec![9; 260]), "type 9"),
        ("tokenizer.ggml.merges", strings(&[b"ab"]), "merge 0"),
        ("tokenizer.ggml.merges", strings(&[b"a zz"]), "zz"),
        ("tokenizer.ggml.merges", strings(&[b"a \xff"]), "merge 0"),
        ("tokenizer.ggml.tokens", strings(&[&b"\xff"[..]; 260]), "token 0"),
        ("tokenizer.ggml.eos_token_id", Value::U64(260), "outside the vocabulary"),
    ] {
        let e = with(key, value).to_string();
        assert!(e.contains(says), "{e} should say {says}");
    }
    assert_eq!(
        Tokenizer::from_metadata(&Metadata::default()).expect_err("empty"),
        TextError::MissingKey { key: "tokenizer.ggml.model" }
    );
}
