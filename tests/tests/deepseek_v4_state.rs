//! DeepSeek V4's sequences over HTTP: turns that are repeated, edited and continued are taken from checkpoints, with the answers
//! that a worker without any gives.

use std::path::Path;
use std::time::Duration;

use ds4_tests::{Sandbox, http};
use serde_json::{Value, json};

const NAME: &str = "deepseek-v4-flash-tiny-synthetic";

/// Answer text, prompt tokens, and how many of them were not computed.
fn ask(address: &str, messages: &Value) -> (String, u64, u64) {
    let body = json!({ "model": NAME, "messages": messages, "temperature": 0, "max_tokens": 16, "thinking": false });
    let (status, answer) = http::post(address, "/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let usage = &answer["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned();
    (text, usage["prompt_tokens"].as_u64().unwrap(), cached)
}

#[test]
fn deepseek_v4_edited_and_repeated_turns_are_cached_over_http() {
    let sandbox = Sandbox::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/tiny-v4.gguf");
    let mut owner = sandbox.start("ds4-weight-owner", &["--allow-dev-models", "--model", path.to_str().unwrap()]);
    owner.wait_ready(Duration::from_secs(30));

    let user = |text: &str| json!({ "role": "user", "content": text });
    let long = "The moon is made of cheese, they say. ".repeat(10);
    let first = json!([user(&long)]);
    let turn = |last: &str| json!([user(&long), { "role": "assistant", "content": "So they do." }, user(last)]);
    let questions = [
        first.clone(),
        first,
        turn("Who says so?"),
        turn("Who denies it, and why? Tell me all."),
        turn("Who says so?"),
    ];

    let mut answers = Vec::new();
    for checkpoints in ["8", "0"] {
        let mut worker = sandbox.worker(&["--ctx", "2048", "--max-batch", "1", "--checkpoints", checkpoints]);
        let got: Vec<_> = questions.iter().map(|q| ask(&worker.http, q)).collect();
        let cached: Vec<u64> = got.iter().map(|(.., cached)| *cached).collect();
        let stats: Value = serde_json::from_str(&http::get(&worker.http, "/v1/stats").1).unwrap();
        if checkpoints == "0" {
            assert_eq!(cached, [0; 5]);
        } else {
            let (first, second) = (got[0].1, got[2].1);
            assert_eq!(cached[..2], [0, first - 1], "the same prompt again: all but its last token");
            // The history's turn begins like the first prompt and then has an answer of the client's own: the nearest checkpoint is
            // before the first prompt's last token. From there on the two last turns share nothing that has one.
            assert!(cached[2..].iter().all(|c| (first - 1..second).contains(c)), "{cached:?} of {first} and {second}");
            assert_eq!(stats["engine"]["rewinds"], 4, "{stats}");
            assert!(stats["engine"]["checkpoint_bytes"].as_u64() > Some(0), "{stats}");
        }
        answers.push(got.into_iter().map(|(text, prompt, _)| (text, prompt)).collect::<Vec<_>>());
        worker.process.kill();
    }
    assert_eq!(answers[0], answers[1]);
    assert!(answers[0].iter().any(|(text, _)| !text.is_empty()));
}
