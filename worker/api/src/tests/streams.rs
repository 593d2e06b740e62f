//! What a generation looks like on the wire.

use super::*;
use ds4_engine::EngineError;

const TRICKY: &str = "naïve 日本語 👩‍👩‍👧‍👦 — “ok”\n\u{1F1E9}\u{1F1EA} fin";

/// Joins the content deltas of each choice.
fn rejoin(answer: &Answer, choices: usize) -> Vec<String> {
    let mut texts = vec![String::new(); choices];
    for event in answer.events() {
        if event == "[DONE]" {
            continue;
        }
        let chunk: Value = serde_json::from_str(&event).unwrap();
        for choice in chunk["choices"].as_array().unwrap() {
            let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
            let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or("");
            texts[index].push_str(text);
        }
    }
    texts
}

#[tokio::test]
async fn a_stream_rejoined_equals_the_whole_answer() {
    let server = Server::start(Script { says: TRICKY.into(), ..Script::default() }, ApiConfig::default()).await;
    let whole = server.chat("").await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], TRICKY);
    let streamed = server.chat(r#","stream":true"#).await;
    assert_eq!(rejoin(&streamed, 1), [TRICKY]);
    let whole = server.post("/v1/completions", r#"{"prompt":"x","max_tokens":500}"#).await.json();
    assert_eq!(whole["choices"][0]["text"], TRICKY);
    let streamed = server.post("/v1/completions", r#"{"prompt":"x","max_tokens":500,"stream":true}"#).await;
    assert_eq!(rejoin(&streamed, 1), [TRICKY]);
}

#[tokio::test]
async fn a_chat_stream_has_openai_s_order() {
    let server = Server::plain().await;
    let answer = server.chat(r#","stream":true,"stream_options":{"include_usage":true}"#).await;
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    let events = answer.events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks: Vec<Value> = events[..events.len() - 1].iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"], serde_json::json!({"role": "assistant", "content": ""}));
    let (usage, rest) = chunks.split_last().unwrap();
    let (finish, deltas) = rest.split_last().unwrap();
    assert_eq!(finish["choices"][0]["finish_reason"], "stop");
    assert_eq!(finish["choices"][0]["delta"], serde_json::json!({}));
    assert!(finish["timings"]["predicted_n"].as_u64() == Some(14), "{finish}");
    assert!(deltas.iter().all(|c| c["choices"][0]["finish_reason"].is_null() && c["usage"].is_null()));
    assert!(deltas.iter().all(|c| c["object"] == "chat.completion.chunk" && c["model"] == "scripted"));
    assert!(deltas.iter().all(|c| c["id"] == chunks[0]["id"]));
    assert_eq!(usage["choices"], serde_json::json!([]));
    // "user: hi\n" is 9 byte tokens; "Hello, world!" 13 and the end token.
    assert_eq!(usage["usage"]["prompt_tokens"], 9);
    assert_eq!(usage["usage"]["completion_tokens"], 14);
    assert_eq!(usage["usage"]["total_tokens"], 23);
    let without = server.chat(r#","stream":true"#).await;
    assert!(!without.text().contains("usage"));
}

#[tokio::test]
async fn a_whole_chat_answer_is_complete() {
    let server = Server::start(
        Script { queued: Duration::from_millis(2), prefill: Duration::from_millis(3), ..Script::default() },
        ApiConfig::default(),
    )
    .await;
    let answer = server.chat(r#","max_completion_tokens":5"#).await.json();
    assert_eq!(answer["object"], "chat.completion");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "Hello");
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["logprobs"], Value::Null);
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let timings = &answer["timings"];
    assert_eq!((timings["prompt_n"].as_u64(), timings["predicted_n"].as_u64()), (Some(9), Some(5)));
    assert_eq!(timings["queued_ms"], 2.0);
    assert_eq!(timings["prompt_ms"], 3.0);
    assert_eq!(timings["prompt_per_second"], 3000.0);
}

#[tokio::test]
async fn n_choices_interleave_with_their_index_and_own_seed() {
    let server =
        Server::start(Script { per_token: Duration::from_millis(1), ..Script::default() }, ApiConfig::default()).await;
    let answer = server.chat(r#","n":3,"seed":40,"stream":true"#).await;
    let texts = rejoin(&answer, 3);
    assert_eq!(texts, ["Hello, world! seed 40", "Hello, world! seed 41", "Hello, world! seed 42"]);
    let order: Vec<u64> = answer
        .events()
        .iter()
        .filter(|e| *e != "[DONE]")
        .map(|e| serde_json::from_str::<Value>(e).unwrap()["choices"][0]["index"].as_u64().unwrap())
        .collect();
    let last_of_first = order.iter().rposition(|i| *i == 0).unwrap();
    let first_of_last = order.iter().position(|i| *i == 2).unwrap();
    assert!(first_of_last < last_of_first, "choices run together: {order:?}");
    let whole = server.post("/v1/completions", r#"{"prompt":["a","bc"],"n":2,"seed":1,"max_tokens":100}"#).await.json();
    let indices: Vec<u64> = whole["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(whole["choices"][3]["text"], "Hello, world! seed 2");
    assert_eq!(whole["usage"]["prompt_tokens"], 3);
}

#[tokio::test]
async fn chat_logprobs_have_openai_s_shape() {
    let server = Server::start(Script { says: "é!".into(), ..Script::default() }, ApiConfig::default()).await;
    let fields = r#","logprobs":true,"top_logprobs":2"#;
    let whole = server.chat(fields).await.json();
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 3, "the end token is no content: {content:?}");
    assert_eq!(content[0]["bytes"], serde_json::json!([0xC3]));
    assert_eq!(content[2]["token"], "!");
    assert_eq!(content[2]["logprob"], -0.5);
    assert_eq!(content[2]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(content[2]["top_logprobs"][1], serde_json::json!({"token": "\"", "logprob": -1.5, "bytes": [34]}));
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|c| c["bytes"].as_array().unwrap().iter().map(|b| u8::try_from(b.as_u64().unwrap()).unwrap()))
        .collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), "é!");
    let streamed = server.chat(&format!(r#"{fields},"stream":true"#)).await;
    let mut got = Vec::new();
    for e in streamed.events().iter().filter(|e| *e != "[DONE]") {
        let chunk: Value = serde_json::from_str(e).unwrap();
        got.extend(chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default());
    }
    assert_eq!(got, content);
}

#[tokio::test]
async fn completion_logprobs_have_the_legacy_shape() {
    let server = Server::start(Script { says: "é!".into(), ..Script::default() }, ApiConfig::default()).await;
    let whole = server.post("/v1/completions", r#"{"prompt":"x","logprobs":2}"#).await.json();
    let l = &whole["choices"][0]["logprobs"];
    assert_eq!(l["tokens"], serde_json::json!(["bytes:\\xc3", "bytes:\\xa9", "!"]));
    assert_eq!(l["token_logprobs"], serde_json::json!([-0.5, -0.5, -0.5]));
    assert_eq!(l["text_offset"], serde_json::json!([0, 1, 1]));
    assert_eq!(l["top_logprobs"][2], serde_json::json!({"!": -0.5, "\"": -1.5}));
    let none = server.post("/v1/completions", r#"{"prompt":"x"}"#).await.json();
    assert_eq!(none["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn echo_puts_the_prompt_first() {
    let server = Server::plain().await;
    for (prompt, extra) in [(r#""Say: ""#, ""), ("[83,97,121,58,32]", ""), (r#""Say: ""#, r#","stream":true"#)] {
        let answer = server.post("/v1/completions", &format!(r#"{{"prompt":{prompt},"echo":true{extra}}}"#)).await;
        let text = if extra.is_empty() {
            answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
        } else {
            rejoin(&answer, 1).remove(0)
        };
        assert_eq!(text, "Say: Hello, world!");
    }
}

#[tokio::test]
async fn a16_silence_is_broken_by_comments() {
    let script =
        Script { queued: Duration::from_millis(250), prefill: Duration::from_millis(200), ..Script::default() };
    let config = ApiConfig { keepalive_interval: Duration::from_millis(100), ..ApiConfig::default() };
    let server = Server::start(script, config).await;
    let text = server.chat(r#","stream":true"#).await.text();
    assert_eq!(text.matches(": keep-alive\n\n").count(), 4, "{text}");
    assert!(text.starts_with(": keep-alive\n\n"));
    assert!(ApiConfig::default().keepalive_interval < Duration::from_secs(5));
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_an_error_event_and_the_end() {
    let broken = EngineError::Internal("a step failed".into());
    let server =
        Server::start(Script { fail_at: Some((3, broken.clone())), ..Script::default() }, ApiConfig::default()).await;
    let answer = server.chat(r#","stream":true"#).await;
    assert_eq!(answer.status, 200);
    let events = answer.events();
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "internal_error");
    assert_eq!(rejoin_until_error(&events), "Hel");
    let whole = server.chat("").await;
    assert_eq!((whole.status, &*whole.code()), (500, "internal_error"));
    let oom = Script { fail_at: Some((0, EngineError::OutOfMemory("no room".into()))), ..Script::default() };
    let whole = Server::start(oom, ApiConfig::default()).await.chat("").await;
    assert_eq!((whole.status, &*whole.code()), (503, "out_of_memory"));
    let schema = Script { fail_at: Some((3, EngineError::Unenforceable("too many".into()))), ..Script::default() };
    let whole = Server::start(schema, ApiConfig::default()).await.chat("").await;
    assert_eq!((whole.status, &*whole.code()), (400, "unsupported_parameter"), "to repeat it would not help");
}

fn rejoin_until_error(events: &[String]) -> String {
    events[..events.len() - 1]
        .iter()
        .map(|e| {
            let chunk: Value = serde_json::from_str(e).unwrap();
            chunk["choices"][0]["delta"]["content"].as_str().unwrap_or("").to_owned()
        })
        .collect()
}

#[tokio::test]
async fn a14_no_timeout_but_the_configured_one() {
    let slow = Script { prefill: Duration::from_secs(60), ..Script::default() };
    let config = ApiConfig { request_timeout: Some(Duration::from_millis(200)), ..ApiConfig::default() };
    let server = Server::start(slow.clone(), config).await;
    let whole = server.chat("").await;
    assert_eq!((whole.status, &*whole.code()), (504, "request_timeout"));
    let streamed = server.chat(r#","stream":true"#).await;
    let last: Value = serde_json::from_str(streamed.events().last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "request_timeout");
    until("both cancelled", || server.script.seen().cancelled.len() == 2).await;
    assert_eq!(ApiConfig::default().request_timeout, None);
}

#[test]
fn a14_a_prefill_of_hours_is_waited_for() {
    // In a runtime without timers: to set one, however long, is a panic.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let answered = |config: ApiConfig| {
        let backend: Arc<dyn crate::Backend> = Arc::new(Script::default());
        let job = crate::chat::parse(br#"{"messages":[{"role":"user","content":"hi"}]}"#, 64, &backend).unwrap();
        let metrics = Arc::new(crate::metrics::Metrics::new(Arc::clone(&backend)));
        let wire = crate::chat_wire::ChatWire {
            id: "chatcmpl-x".into(),
            created: 0,
            backend: Arc::clone(&backend),
            include_usage: false,
            logprobs: false,
            calls: vec![0],
        };
        let limits = crate::run::Limits {
            request_timeout: config.request_timeout,
            keepalive_interval: config.keepalive_interval,
        };
        let tracker = crate::track::Tracker::new(metrics, "x".into(), "chat");
        let answer = async { crate::run::answer(job, wire, backend, tracker, limits, ()).await.unwrap().status() };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.block_on(answer)))
    };
    assert_eq!(answered(ApiConfig::default()).unwrap(), 200);
    let timed = ApiConfig { request_timeout: Some(Duration::from_secs(4 * 3600)), ..ApiConfig::default() };
    assert!(answered(timed).is_err(), "a timer would be seen");
}
