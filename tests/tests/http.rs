//! What the HTTP side of a real worker promises beyond single answers: streams, choices, deadlines, drains, refusals.

use std::time::{Duration, Instant};

use ds4_tests::http::{Stream, get, post};
use ds4_tests::{Process, Sandbox, Worker, wait_for};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(5);

fn served(args: &[&str]) -> (Sandbox, Process, Worker) {
    let sandbox = Sandbox::new();
    let owner = sandbox.owner();
    let worker = sandbox.worker(args);
    (sandbox, owner, worker)
}

/// A generation that takes a minute if nobody ends it.
fn endless() -> Value {
    json!({"prompt": "Once upon a time", "max_tokens": 6000, "temperature": 0, "ignore_eos": true})
}

#[test]
fn streamed_text_equals_unstreamed_text_for_characters_of_many_tokens() {
    let (_sandbox, _owner, worker) = served(&[]);
    let http = &worker.http;
    let mut many_bytes = 0;
    for prompt in [
        "👩‍👩‍👧‍👦 日本語 👩‍👩‍👧‍👦 日本語 👩‍👩‍👧‍👦 日本語 👩‍👩‍👧‍👦",
        "🎉🎊🎉🎊🎉🎊🎉🎊🎉",
        "中文字符，中文字符，中文字符，中",
        "naïve café, naïve café, naïve",
    ] {
        let body = json!({"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": true});
        let (status, whole) = post(http, "/v1/completions", &body);
        assert_eq!(status, 200, "{whole}");
        let whole = whole["choices"][0]["text"].as_str().unwrap().to_owned();
        assert_eq!(Stream::start(http, "/v1/completions", &body).text(), whole);
        many_bytes += whole.chars().filter(|c| c.len_utf8() > 2).count();
    }
    assert!(many_bytes > 10, "the model repeats what it sees, so the test saw what it is about: {many_bytes}");
}

#[test]
fn choices_differ_by_seed_and_repeat_with_it() {
    let (_sandbox, _owner, worker) = served(&[]);
    let body = json!({
        "messages": [{"role": "user", "content": "Invent a name for a river."}],
        "n": 3, "seed": 11, "temperature": 1.5, "max_tokens": 24, "logprobs": true, "top_logprobs": 5
    });
    let (status, first) = post(&worker.http, "/v1/chat/completions", &body);
    assert_eq!(status, 200, "{first}");
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().unwrap();
        choices.iter().map(|c| c["message"]["content"].as_str().unwrap().to_owned()).collect()
    };
    let said = texts(&first);
    assert!(said[0] != said[1] || said[1] != said[2], "{said:?}");
    assert_eq!(said, texts(&post(&worker.http, "/v1/chat/completions", &body).1), "a seed repeats its text");
    let sums = first["choices"].as_array().unwrap().iter().flat_map(|c| c["logprobs"]["content"].as_array().unwrap());
    for token in sums {
        let top: Vec<f64> =
            token["top_logprobs"].as_array().unwrap().iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert_eq!(top.len(), 5);
        assert!(top.is_sorted_by(|a, b| a >= b), "{top:?}");
        let mass: f64 = top.iter().map(|l| l.exp()).sum();
        assert!(mass > 0.0 && mass < 1.0001, "{mass}");
        assert!(token["logprob"].as_f64().unwrap() <= top[0] + 1e-6);
    }
}

#[test]
fn a14_the_configured_deadline_ends_a_request_and_frees_its_place() {
    let (sandbox, _owner, worker) = served(&["--request-timeout", "1"]);
    let (status, answer) = post(&worker.http, "/v1/completions", &endless());
    assert_eq!((status, answer["error"]["code"].as_str()), (504, Some("request_timeout")), "{answer}");
    wait_for("an idle engine", SOON, || (sandbox.ctl(&["status"])["worker"]["running"] == 0).then_some(()));
    assert_eq!(get(&worker.http, "/health/ready").0, 200);
}

#[test]
fn a_drain_s_deadline_ends_what_still_runs_with_a_typed_error() {
    let (_sandbox, _owner, mut worker) = served(&["--drain-deadline", "1"]);
    let mut stream = Stream::start(&worker.http, "/v1/completions", &endless());
    assert!(stream.next_event().is_some());
    worker.process.signal(Signal::SIGTERM);
    let begun = Instant::now();
    let mut last = Value::Null;
    while let Some(event) = stream.next_event() {
        last = event;
    }
    assert_eq!(last["error"]["code"], "draining", "{last}");
    assert_eq!(worker.process.wait_end(SOON).code(), Some(0), "{}", worker.process.log());
    // The deadline, not the deadline and then some: a client that keeps its connection open is not waited for.
    assert!(begun.elapsed() < Duration::from_millis(2500), "{:?}", begun.elapsed());
}

#[test]
fn a_second_signal_ends_at_once() {
    let (_sandbox, _owner, mut worker) = served(&["--drain-deadline", "60"]);
    let mut stream = Stream::start(&worker.http, "/v1/completions", &endless());
    assert!(stream.next_event().is_some());
    worker.process.signal(Signal::SIGTERM);
    wait_for("the drain", SOON, || worker.process.log().contains("draining").then_some(()));
    assert!(worker.process.running());
    let begun = Instant::now();
    worker.process.signal(Signal::SIGTERM);
    worker.process.wait_end(SOON);
    assert!(begun.elapsed() < Duration::from_secs(2), "{}", worker.process.log());
}

#[test]
fn refusals_of_a_start_have_their_exit_code_within_five_seconds() {
    let sandbox = Sandbox::new();
    let _owner = sandbox.owner();
    let other = "0".repeat(64);
    let cases: [(&[&str], i32, &str); 3] = [
        (&["--http", "0.0.0.0:0"], 2, "--allow-remote"),
        (&["--ctx", "1"], 2, "--ctx is 1"),
        (&["--http", "127.0.0.1:0", "--expect-blake3", &other], 4, "smollm2-135m-instruct"),
    ];
    for (args, code, part) in cases {
        let mut worker = sandbox.start("ds4-worker", args);
        assert_eq!(worker.wait_end(SOON).code(), Some(code), "{args:?}: {}", worker.log());
        assert!(worker.log().contains(part), "{args:?}: {}", worker.log());
    }
}

#[test]
fn one_worker_a_runtime_directory() {
    let (sandbox, _owner, worker) = served(&[]);
    let mut second = sandbox.start("ds4-worker", &["--http", "127.0.0.1:0"]);
    assert_eq!(second.wait_end(SOON).code(), Some(2));
    assert!(second.log().contains("another worker"), "{}", second.log());
    assert_eq!(get(&worker.http, "/health").0, 200, "the first is undisturbed");
}
