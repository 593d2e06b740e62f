//! The DeepSeek V4 family through the real binaries, on a tiny model of random weights.
//!
//! `tests/fixtures/deepseek_v4/tiny-v4.gguf` is the output of
//! `ds4 gguf synth --shape tiny --recipe q2 --seed 1 -o tiny-v4.gguf`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ds4_tests::{Process, Sandbox, http};
use serde_json::json;

const NAME: &str = "deepseek-v4-flash-tiny-synthetic";

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/tiny-v4.gguf")
}

fn owner(sandbox: &Sandbox) -> Process {
    let path = fixture();
    let mut owner = sandbox.start("ds4-weight-owner", &["--allow-dev-models", "--model", path.to_str().unwrap()]);
    owner.wait_ready(Duration::from_secs(30));
    owner
}

/// Greedy text of a prompt that spans windows, compressed rows of both ratios and the indexer's cut.
fn long_answer(address: &str) -> String {
    http::greedy(address, &"The moon is made of cheese, they say. ".repeat(12), 24)
}

#[test]
fn deepseek_v4_answers_chats_and_completions_over_http() {
    let sandbox = Sandbox::new();
    let _owner = owner(&sandbox);
    let worker = sandbox.worker(&["--ctx", "2048"]);
    assert!(worker.process.log().contains("synthetic"), "{}", worker.process.log());
    let chat = json!({
        "model": NAME,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}],
        "max_tokens": 12,
        "temperature": 0,
    });
    let (status, answer) = http::post(&worker.http, "/v1/chat/completions", &chat);
    assert_eq!(status, 200, "{answer}");
    assert_eq!((&answer["model"], &answer["choices"][0]["message"]["role"]), (&json!(NAME), &json!("assistant")));
    // BOS, the system's 9 bytes, User, at most 13 bytes, Assistant, end of thinking.
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!((12..=26).contains(&prompt), "{answer}");
    let made = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((1..=12).contains(&made), "{answer}");

    let first = long_answer(&worker.http);
    assert!(!first.is_empty());
    assert_eq!(first, long_answer(&worker.http), "the same question has the same greedy answer");
    assert_ne!(first, http::greedy(&worker.http, "Something else.", 24), "the prompt counts");
}

#[test]
fn deepseek_v4_answers_do_not_depend_on_prefill_chunks_and_survive_a_kill() {
    let sandbox = Sandbox::new();
    let _owner = owner(&sandbox);
    let mut answers = Vec::new();
    for chunk in ["512", "64", "7"] {
        let mut worker = sandbox.worker(&["--ctx", "2048", "--prefill-chunk", chunk]);
        answers.push(long_answer(&worker.http));
        worker.process.kill();
    }
    assert!(answers.iter().all(|a| a == &answers[0]), "{answers:?}");
}

#[test]
fn deepseek_v4_development_models_need_the_flag() {
    let sandbox = Sandbox::new();
    let path = fixture();
    let mut owner = sandbox.start("ds4-weight-owner", &["--model", path.to_str().unwrap()]);
    assert_eq!(owner.wait_end(Duration::from_secs(10)).code(), Some(4), "{}", owner.log());
    assert!(owner.log().contains("--allow-dev-models"), "{}", owner.log());
}

#[test]
fn deepseek_v4_the_fixture_is_what_the_synthesiser_writes() {
    let sandbox = Sandbox::new();
    let made = sandbox.dir().join("made.gguf");
    let output = made.to_str().unwrap();
    let run = sandbox.run("ds4", &["gguf", "synth", "--shape", "tiny", "--recipe", "q2", "--seed", "1", "-o", output]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert!(String::from_utf8_lossy(&run.stderr).contains("the weights are random"));
    let (made, kept) = (std::fs::read(&made).unwrap(), std::fs::read(fixture()).unwrap());
    assert!(kept.len() <= 2_000_000);
    assert!(made == kept, "other bytes: write the fixture again if that is meant");
}
