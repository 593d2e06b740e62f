//! One table of everything that can be wrong with a request: its status and its stable code.

use super::*;
use crate::Phase;
use ds4_engine::EngineError;

#[tokio::test]
async fn errors_have_openai_s_shape_and_stable_codes() {
    let server = Server::plain().await;
    let chat = "/v1/chat/completions";
    let deep = format!(r#"{{"messages":{}1{}}}"#, "[".repeat(5000), "]".repeat(5000));
    let long = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x ".repeat(3000));
    let ids = format!(r#"{{"prompt":[{}1]}}"#, "1,".repeat(5000));
    let user = r#""messages":[{"role":"user","content":"hi"}]"#;
    let with = |field: &str| format!("{{{user},{field}}}");
    let cases: Vec<(&str, String, u16, &str, Option<&str>)> = vec![
        (chat, "{".into(), 400, "invalid_json", None),
        (chat, String::new(), 400, "invalid_json", None),
        (chat, "[]".into(), 400, "invalid_type", None),
        (chat, deep, 400, "json_too_deep", None),
        (chat, "{}".into(), 400, "missing_required_parameter", Some("messages")),
        (chat, with(r#""model":"other""#), 404, "model_not_found", Some("model")),
        (chat, with(r#""max_tokens":0"#), 400, "invalid_value", Some("max_tokens")),
        (chat, with(r#""max_tokens":-1"#), 400, "invalid_value", Some("max_tokens")),
        (chat, with(r#""max_tokens":"5""#), 400, "invalid_type", Some("max_tokens")),
        (chat, with(r#""temperature":3"#), 400, "invalid_value", Some("temperature")),
        (chat, with(r#""tools":[{}]"#), 400, "unsupported_parameter", Some("tools")),
        (chat, with(r#""nonsense":1"#), 400, "unknown_parameter", Some("nonsense")),
        (chat, with(r#""n":2,"n":3"#), 400, "duplicate_field", Some("n")),
        (
            chat,
            r#"{"messages":[{"role":"user","content":"refuse me"}]}"#.into(),
            400,
            "invalid_messages",
            Some("messages"),
        ),
        (chat, long, 400, "context_length_exceeded", None),
        ("/v1/completions", ids, 400, "context_length_exceeded", None),
        ("/v1/completions", r#"{"prompt":""}"#.into(), 400, "empty_prompt", Some("prompt")),
        ("/v1/completions", r#"{"prompt":[300]}"#.into(), 400, "invalid_value", Some("prompt")),
        ("/v1/embeddings", "{}".into(), 404, "unknown_url", None),
        ("/v1/models", "{}".into(), 405, "method_not_allowed", None),
    ];
    for (path, body, status, code, param) in cases {
        let answer = server.post(path, &body).await;
        let shown: String = body.chars().take(80).collect();
        assert_eq!((answer.status, &*answer.code()), (status, code), "{path} {shown}");
        assert_eq!(answer.json()["error"]["param"].as_str(), param, "{path} {shown}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
    }
    let answer = server.get(chat).await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")));
    let answer = server.get("/v1/models/a%ff").await;
    assert_eq!((answer.status, &*answer.code()), (400, "invalid_utf8"));
    // No generation was started by any of them.
    assert!(server.script.seen().requests.is_empty());
}

#[tokio::test]
async fn bytes_that_are_not_text_are_400() {
    let server = Server::plain().await;
    let mut request = post("/v1/completions", r#"{"prompt":"aaaa"}"#);
    let at = request.windows(4).position(|w| w == b"aaaa").unwrap();
    request[at] = 0xFF;
    let answer = server.raw(&request).await;
    assert_eq!((answer.status, &*answer.code()), (400, "invalid_utf8"));
}

#[tokio::test]
async fn media_types_other_than_json_are_415() {
    let server = Server::plain().await;
    let send = |header: &str| {
        format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{header}content-length: 14\r\n\r\n{{\"prompt\":\"a\"}}")
    };
    let form = server.raw(send("content-type: application/x-www-form-urlencoded\r\n").as_bytes()).await;
    assert_eq!((form.status, &*form.code()), (415, "unsupported_media_type"));
    let gzip = server.raw(send("content-encoding: gzip\r\n").as_bytes()).await;
    assert_eq!((gzip.status, &*gzip.code()), (415, "unsupported_content_encoding"));
    for fine in ["", "content-type: application/json; charset=utf-8\r\n", "content-type: Application/JSON\r\n"] {
        assert_eq!(server.raw(send(fine).as_bytes()).await.status, 200, "{fine:?}");
    }
}

#[tokio::test]
async fn max_tokens_of_a_billion_is_clamped_by_the_context() {
    let server = Server::plain().await;
    let answer = server.chat(r#","max_tokens":1000000000"#).await;
    assert_eq!((answer.status, &answer.json()["choices"][0]["finish_reason"]), (200, &Value::from("stop")));
    assert_eq!(server.script.seen().requests[0].max_tokens, 1_000_000_000);
}

#[tokio::test]
async fn context_errors_name_both_numbers() {
    let server = Server::plain().await;
    let answer = server.post("/v1/completions", &format!(r#"{{"prompt":"{}"}}"#, "x".repeat(5000))).await;
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("5000") && message.contains("4096"), "{message}");
}

#[tokio::test]
async fn a_full_queue_is_429_and_a_draining_engine_503() {
    for (error, status, code) in
        [(EngineError::QueueFull { limit: 8 }, 429, "queue_full"), (EngineError::Draining, 503, "draining")]
    {
        let server =
            Server::start(Script { refuse_from: Some((0, error)), ..Script::default() }, ApiConfig::default()).await;
        for stream in ["", r#","stream":true"#] {
            let answer = server.chat(stream).await;
            assert_eq!((answer.status, &*answer.code()), (status, code));
            assert!(answer.header("retry-after").is_some());
        }
    }
}

#[tokio::test]
async fn a_draining_server_says_so_finishes_what_runs_and_ends() {
    let script = Script { per_token: Duration::from_millis(30), ..Script::default() };
    let server = Server::start(script, ApiConfig::default()).await;
    let mut running = server.connect().await;
    running.write_all(&post("/v1/completions", r#"{"prompt":"a","stream":true}"#)).await.unwrap();
    until("submitted", || server.script.seen().requests.len() == 1).await;
    server.api.set_phase(Phase::Draining);
    let answer = server.chat("").await;
    assert_eq!((answer.status, &*answer.code()), (503, "draining"));
    assert_eq!(answer.header("connection"), Some("close"));
    let ready = server.get("/health/ready").await;
    assert_eq!((ready.status, ready.json()["status"].as_str()), (503, Some("draining")));
    assert_eq!(server.get("/health/live").await.status, 200);
    let text = read_answer(&mut running).await.text();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    drop(running);
    tokio::time::timeout(Duration::from_secs(5), server.task).await.unwrap().unwrap().unwrap();
}

/// A body that is still on its way when the drain begins: its request was accepted, so that the engine must have it before it drains.
#[tokio::test]
async fn a_request_that_was_accepted_before_a_drain_reaches_the_engine() {
    let server = Server::start(Script::default(), ApiConfig::default()).await;
    let whole = post("/v1/completions", r#"{"prompt":"a"}"#);
    let (first, rest) = whole.split_at(whole.len() - 3);
    let mut client = server.connect().await;
    client.write_all(first).await.unwrap();
    until("accepted", || server.api.metrics.in_flight.get() == 1).await;
    server.api.set_phase(Phase::Draining);
    let mut entered = std::pin::pin!(server.api.entered());
    let early = tokio::time::timeout(Duration::from_millis(100), entered.as_mut()).await;
    assert!(early.is_err(), "the engine would drain without it");
    client.write_all(rest).await.unwrap();
    entered.await;
    assert_eq!(server.script.seen().requests.len(), 1);
    assert_eq!(read_answer(&mut client).await.status, 200);
}

/// Bodies mutated at random: whatever comes, a parser answers with a job or a typed error, and never panics.
#[test]
fn s4_mutated_bodies_never_panic() {
    let backend: Arc<dyn crate::Backend> = Arc::new(Script::default());
    let seeds: [&[u8]; 3] = [
        br#"{"model":"scripted","messages":[{"role":"user","content":[{"type":"text","text":"h\u00e9"}]}],"n":2,"seed":-5,
            "stop":["a","b"],"logit_bias":{"5":-100},"logprobs":true,"top_logprobs":3,"stream":true,"temperature":0.5}"#,
        br#"{"prompt":[[1,2],[3]],"max_tokens":7,"logprobs":2,"stream_options":null,"top_p":1e0,"echo":false}"#,
        br#"{"prompt":["a","b\ud83d\ude00"],"n":3,"best_of":3,"suffix":"","response_format":{"type":"text"}}"#,
    ];
    // A linear congruential generator (Knuth's MMIX constants): the same bodies on every run.
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    };
    let pieces: [&[u8]; 12] =
        [b"[", b"]", b"{", b"}", b"\"", b",", b":", b"null", b"1e999", b"-0", b"\\u0000", b"\xff\xfe"];
    let (mut jobs, mut errors) = (0, 0);
    for round in 0..30_000 {
        let mut body = seeds[round % seeds.len()].to_vec();
        for _ in 0..random(4) {
            let at = random(body.len());
            match random(4) {
                0 => body[at] = u8::try_from(random(256)).unwrap(),
                1 => drop(body.drain(at..(at + 1 + random(8)).min(body.len()))),
                2 => drop(body.splice(at..at, pieces[random(pieces.len())].iter().copied())),
                _ => {
                    let end = (at + random(30)).min(body.len());
                    let copy = body[at..end].to_vec();
                    let to = random(body.len());
                    body.splice(to..to, copy);
                }
            }
            if body.is_empty() {
                body.push(b'{');
            }
        }
        for parse in [crate::chat::parse, crate::completions::parse] {
            match parse(&body, 16, &backend) {
                Ok(job) => {
                    assert!(!job.prompts.is_empty() && (1..=128).contains(&job.choices()));
                    jobs += 1;
                }
                Err(e) => {
                    assert!(e.status.is_client_error() && serde_json::from_slice::<Value>(&e.to_json()).is_ok());
                    errors += 1;
                }
            }
        }
    }
    assert!(jobs > 500 && errors > 500, "the mutations reach both sides: {jobs} jobs, {errors} errors");
}
