//! The HTTP surface of a real worker with a real model, as clients and attackers meet it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use ds4_tests::http::{Stream, get, greedy, post, raw, request};
use ds4_tests::{Sandbox, Worker, wait_for};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(5);

fn served(args: &[&str]) -> (Sandbox, ds4_tests::Process, Worker) {
    let sandbox = Sandbox::new();
    let owner = sandbox.owner();
    let worker = sandbox.worker(args);
    (sandbox, owner, worker)
}

fn running(sandbox: &Sandbox) -> (u64, u64) {
    let status = sandbox.ctl(&["status"]);
    (status["worker"]["running"].as_u64().unwrap(), status["worker"]["queued"].as_u64().unwrap())
}

#[test]
fn bad_requests_get_typed_errors_and_disturb_nobody() {
    let (_sandbox, _owner, worker) = served(&["--ctx", "512"]);
    let http = &worker.http;
    let good = greedy(http, "The capital of France is", 8);
    let long = vec![1000; 600];
    let cases: [(Value, u64); 9] = [
        (json!({"prompt": "x", "max_tokens": 0}), 400),
        (json!({"prompt": "x", "max_tokens": -1}), 400),
        (json!({"prompt": ""}), 400),
        (json!({"prompt": []}), 400),
        (json!({"prompt": long, "max_tokens": 1}), 400),
        (json!({"prompt": [4_000_000_000_u32]}), 400),
        (json!({"prompt": "x", "temperature": "hot"}), 400),
        (json!({"prompt": "x", "no_such_parameter": 1}), 400),
        (json!({"prompt": "x", "model": "another"}), 404),
    ];
    for (body, want) in cases {
        let begun = Instant::now();
        let (status, answer) = post(http, "/v1/completions", &body);
        assert_eq!(u64::from(status), want, "{body}: {answer}");
        let error = &answer["error"];
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{body}: {answer}");
        assert!(error["code"].is_string() && error["type"].is_string(), "{body}: {answer}");
        assert!(begun.elapsed() < SOON);
    }
    // A billion tokens is a wish: the context bounds it.
    let body = json!({"prompt": "x", "max_tokens": 1_000_000_000_u64, "temperature": 0});
    assert_eq!(post(http, "/v1/completions", &body).0, 200);
    assert_eq!(greedy(http, "The capital of France is", 8), good);
}

#[test]
fn s4_malformed_nested_oversized_and_invalid_bodies_are_refused_within_seconds() {
    let (_sandbox, _owner, worker) = served(&[]);
    let http = &worker.http;
    let nested = format!(r#"{{"prompt":{}1{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    let utf8 = [
        &b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"[..],
        b"{\"prompt\":\"\xff\xfe\"}",
    ]
    .concat();
    let huge = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n{"
        .to_vec();
    let cases: [(&str, Vec<u8>, &[&str]); 5] = [
        ("not JSON", request("/v1/completions", "{\"prompt\": "), &["400"]),
        ("nested", request("/v1/completions", &nested), &["400"]),
        ("not UTF-8", utf8, &["400"]),
        ("oversized", huge, &["413"]),
        ("no body", request("/v1/chat/completions", ""), &["400"]),
    ];
    for (name, bytes, statuses) in cases {
        let begun = Instant::now();
        let answer = raw(http, &bytes, SOON);
        let status = answer.split(' ').nth(1).unwrap_or_default();
        assert!(statuses.contains(&status), "{name}: {answer}");
        assert!(begun.elapsed() < SOON, "{name}");
    }
    assert_eq!(get(http, "/health/ready").0, 200);
}

#[test]
fn a10_bad_framing_is_refused_and_chunked_bodies_are_read() {
    let (_sandbox, _owner, worker) = served(&[]);
    let http = &worker.http;
    let body = r#"{"prompt":"Hi","max_tokens":1}"#;
    let chunked =
        body.as_bytes().chunks(7).map(|c| format!("{:x}\r\n{}\r\n", c.len(), std::str::from_utf8(c).unwrap()));
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n";
    let chunked = format!("{head}transfer-encoding: chunked\r\n\r\n{}0\r\n\r\n", chunked.collect::<String>());
    let answer = raw(http, chunked.as_bytes(), Duration::from_secs(30));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let both = format!("{head}transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n");
    for (name, bytes) in [
        ("bad chunk size", format!("{head}transfer-encoding: chunked\r\n\r\nzz\r\n{body}\r\n0\r\n\r\n")),
        ("two lengths", format!("{head}content-length: 3\r\ncontent-length: 4\r\n\r\n{{}}  ")),
        ("no HTTP at all", "hello there\r\n\r\n".to_string()),
        ("chunked and length", both),
    ] {
        let answer = raw(http, bytes.as_bytes(), SOON);
        assert!(answer.starts_with("HTTP/1.1 400") || answer.is_empty(), "{name}: {answer}");
    }
    assert_eq!(get(http, "/health/ready").0, 200);
}

#[test]
fn a1_a_client_that_goes_away_frees_its_place_during_decode_prefill_and_queue() {
    let (sandbox, _owner, worker) = served(&["--max-batch", "1", "--ctx", "2048"]);
    let http = &worker.http;
    let idle = |what: &str| wait_for(what, SOON, || (running(&sandbox) == (0, 0)).then_some(()));

    // Decoding.
    let endless = json!({"prompt": "Once", "max_tokens": 2000, "temperature": 0, "ignore_eos": true});
    let mut decoding = Stream::start(http, "/v1/completions", &endless);
    assert!(decoding.next_event().is_some());
    // Queued behind it.
    let queued = Stream::start(http, "/v1/completions", &endless);
    wait_for("a queued request", SOON, || (running(&sandbox) == (1, 1)).then_some(()));
    drop(queued);
    wait_for("a2: the dead queued client is reaped", SOON, || (running(&sandbox) == (1, 0)).then_some(()));
    assert!(decoding.next_event().is_some(), "the one that decodes is not disturbed");
    drop(decoding);
    idle("the decoding client's place");

    // In prefill.
    let long = json!({"prompt": vec![1000; 1900], "max_tokens": 1});
    let prefilling = Stream::start(http, "/v1/completions", &long);
    wait_for("a prefilling request", SOON, || (running(&sandbox).0 == 1).then_some(()));
    drop(prefilling);
    idle("the prefilling client's place");
}

#[test]
fn a16_a_client_that_says_nothing_or_half_a_request_is_dropped() {
    let (_sandbox, _owner, worker) = served(&["--header-timeout", "1", "--body-timeout", "1"]);
    for start in [
        "",
        "POST /v1/completions HTTP/1.1\r\nho",
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{",
    ] {
        let begun = Instant::now();
        let mut stream = TcpStream::connect(&worker.http).unwrap();
        stream.write_all(start.as_bytes()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("the server closes the connection");
        assert!(begun.elapsed() < SOON, "{start:?}");
    }
    assert_eq!(get(&worker.http, "/health/ready").0, 200);
}

#[test]
fn o1_health_metrics_and_models_need_no_model_call() {
    let (_sandbox, _owner, worker) = served(&["--ctx", "1024"]);
    let http = &worker.http;
    assert_eq!(get(http, "/health/live").0, 200);
    assert_eq!(get(http, "/health/ready").0, 200);
    let (status, metrics) = get(http, "/metrics");
    assert_eq!(status, 200);
    assert!(metrics.contains("# TYPE ds4_") && metrics.trim_end().ends_with("# EOF"), "{metrics}");
    let (_, models) = get(http, "/v1/models");
    let models: Value = serde_json::from_str(&models).unwrap();
    assert!(models.to_string().contains("1024"), "a9: the context length is told: {models}");
    let (status, stats) = get(http, "/v1/stats");
    assert_eq!(status, 200);
    serde_json::from_str::<Value>(&stats).unwrap();
}

#[test]
fn o2_every_request_leaves_one_completion_line_with_its_id() {
    let (_sandbox, _owner, worker) = served(&[]);
    let answer = raw(&worker.http, &request("/v1/completions", r#"{"prompt":"Hi","max_tokens":1}"#), SOON);
    let id = answer.lines().find_map(|l| l.strip_prefix("x-request-id: ")).expect("an id in the answer").to_string();
    let lines = |log: &str| log.lines().filter(|l| l.contains(&id)).count();
    wait_for("the completion line", SOON, || (lines(&worker.process.log()) == 1).then_some(()));
}

static PROMPTS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let words = ["river", "stone", "lamp", "garden", "winter", "engine", "letter", "bridge"];
    (0..16).map(|i| format!("A short story about a {} and a {}:", words[i % 8], words[(i * 3 + 1) % 8])).collect()
});

#[test]
fn simultaneous_answers_equal_answers_alone_streamed_or_not() {
    let (_sandbox, _owner, worker) = served(&["--max-batch", "8"]);
    let http = &worker.http;
    let alone: Vec<String> = PROMPTS.iter().map(|p| greedy(http, p, 24)).collect();
    let together: Vec<String> = thread::scope(|scope| {
        let tasks: Vec<_> = PROMPTS
            .iter()
            .enumerate()
            .map(|(i, prompt)| {
                scope.spawn(move || {
                    thread::sleep(Duration::from_millis(u64::try_from(i).unwrap() * 7));
                    if i % 2 == 0 {
                        return greedy(http, prompt, 24);
                    }
                    let body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0});
                    Stream::start(http, "/v1/completions", &body).text()
                })
            })
            .collect();
        tasks.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
}

#[test]
fn a11_an_answer_is_held_to_its_schema() {
    let (_sandbox, _owner, worker) = served(&[]);
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "population", "rivers"],
        "properties": {"name": {"type": "string", "maxLength": 20}, "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
            "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3}}});
    let ask = |more: serde_json::Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Tell me of Paris."}], "max_tokens": 400});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = post(&worker.http, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap().to_string();
        serde_json::from_str::<serde_json::Value>(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    };
    let strict = json!({"type": "json_schema", "json_schema": {"name": "city", "strict": true, "schema": schema}});
    let mut said = Vec::new();
    for more in [
        json!({"temperature": 0}),
        json!({"temperature": 0}),
        json!({"seed": 1}),
        json!({"seed": 2, "top_p": 0.8, "frequency_penalty": 0.5}),
        json!({"seed": 3, "top_k": 20, "logprobs": true}),
    ] {
        let mut more = more;
        more["response_format"] = strict.clone();
        let city = ask(more);
        assert!(city["name"].is_string() && city["population"].is_i64(), "{city}");
        assert!(city["rivers"].as_array().unwrap().iter().all(serde_json::Value::is_string), "{city}");
        assert_eq!(city.as_object().unwrap().len(), 3, "{city}");
        said.push(city);
    }
    assert_eq!(said[0], said[1], "the same request, the same answer");
    // A small model may not find the end of an object that it is free to choose; up to there it is one.
    let body = json!({"messages": [{"role": "user", "content": "Tell me of Paris."}], "max_tokens": 200, "temperature": 0,
        "response_format": {"type": "json_object"}});
    let (_, answer) = post(&worker.http, "/v1/chat/completions", &body);
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let cut = serde_json::from_str::<serde_json::Value>(text).err();
    assert!(text.starts_with('{') && cut.is_none_or(|e| e.is_eof()), "{text}");
}

#[test]
fn a_drained_worker_finishes_what_runs_and_refuses_what_comes() {
    let (sandbox, _owner, mut worker) = served(&[]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": true});
    let mut stream = Stream::start(&worker.http, "/v1/completions", &body);
    assert!(stream.next_event().is_some());
    sandbox.ctl(&["drain"]);
    let mut tokens = 1;
    let mut finish = None;
    while let Some(event) = stream.next_event() {
        tokens += 1;
        finish = event["choices"][0]["finish_reason"].as_str().map(String::from).or(finish);
    }
    assert_eq!(finish.as_deref(), Some("length"), "the running request came to its own end after {tokens} events");
    assert_eq!(worker.process.wait_end(Duration::from_secs(10)).code(), Some(0));
}
