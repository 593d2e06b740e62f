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

/// Fields of a request in which the model must call a tool and then ends: token 1 ends an answer in this vocabulary.
fn forced_call(thinking: bool) -> serde_json::Value {
    json!({
        "model": NAME,
        "messages": [{"role": "user", "content": "What is the time?"}],
        "tools": [
            {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
            {"type": "function", "function": {"name": "get_date"}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "get_time"}},
        "thinking": thinking,
        "logit_bias": {"1": 100},
        "temperature": 0,
        "max_tokens": 200,
    })
}

/// Random weights call nothing by themselves. What is forced here is what `tool_choice` forces for any model; the bias ends the
/// answer after it, and a call whose closers were forgotten is a call.
#[test]
fn deepseek_v4_calls_a_tool_over_http_and_goes_on_with_its_result() {
    let sandbox = Sandbox::new();
    let _owner = owner(&sandbox);
    let worker = sandbox.worker(&["--ctx", "4096"]);
    for thinking in [false, true] {
        let mut body = forced_call(thinking);
        let (status, answer) = http::post(&worker.http, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        assert_eq!(choice["message"]["content"], json!(null));
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!(
            (&call["type"], &call["function"]),
            (&json!("function"), &json!({"name": "get_time", "arguments": "{}"}))
        );
        assert!(!answer.to_string().contains("DSML"), "{answer}");

        let mut stream = http::Stream::start(&worker.http, "/v1/chat/completions", &body);
        let events: Vec<serde_json::Value> = std::iter::from_fn(|| stream.next_event()).collect();
        let deltas: Vec<&serde_json::Value> =
            events.iter().map(|e| &e["choices"][0]["delta"]["tool_calls"][0]).collect();
        let begins: Vec<_> = deltas.iter().filter(|d| d["id"].is_string()).collect();
        assert_eq!(begins.len(), 1, "{events:?}");
        assert_eq!(begins[0]["function"], json!({"name": "get_time", "arguments": ""}));
        let arguments: String = deltas.iter().filter_map(|d| d["function"]["arguments"].as_str()).collect();
        assert_eq!(arguments, "{}");
        assert!(events.iter().any(|e| e["choices"][0]["finish_reason"] == "tool_calls"), "{events:?}");

        // The conversation goes on, and what was computed of it is not computed again.
        let before = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        let id = call["id"].as_str().unwrap();
        body = forced_call(thinking);
        for field in ["tool_choice", "logit_bias"] {
            body.as_object_mut().unwrap().remove(field);
        }
        body["max_tokens"] = json!(4);
        let messages = body["messages"].as_array_mut().unwrap();
        messages.push(choice["message"].clone());
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": "12:40"}));
        let (status, answer) = http::post(&worker.http, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let usage = &answer["usage"];
        assert!(usage["prompt_tokens"].as_u64().unwrap() > before + 20, "{usage}");
        assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{usage}");
    }
}

#[test]
fn deepseek_v4_t8_answers_follow_their_schemas_after_the_reasoning() {
    let sandbox = Sandbox::new();
    let _owner = owner(&sandbox);
    let worker = sandbox.worker(&["--ctx", "2048"]);
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["ok", "colour"],
        "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "green", "blue"]}}});
    for (thinking, temperature, seed) in [(false, 0.0, 1), (false, 1.0, 2), (false, 1.0, 3), (true, 1.0, 4)] {
        // At once the model wants to end: what it thinks then ends, and the answer only when it is whole.
        let body = json!({"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 800, "thinking": thinking,
            "temperature": temperature, "seed": seed, "logit_bias": {"1": 100},
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}}});
        let (status, answer) = http::post(&worker.http, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        let text = choice["message"]["content"].as_str().unwrap();
        let said: serde_json::Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(
            said["ok"].is_boolean() && ["red", "green", "blue"].contains(&said["colour"].as_str().unwrap()),
            "{said}"
        );
        assert_eq!(said.as_object().unwrap().len(), 2, "{said}");
    }
}

#[test]
fn deepseek_v4_strict_calls_have_the_arguments_that_their_schema_asks_for() {
    let sandbox = Sandbox::new();
    let _owner = owner(&sandbox);
    let worker = sandbox.worker(&["--ctx", "2048"]);
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "strict": true, "parameters": {"type": "object",
            "additionalProperties": false, "required": ["mode", "force", "level"], "properties": {
                "mode": {"type": "string", "enum": ["fast", "safe"]}, "force": {"type": "boolean"},
                "level": {"anyOf": [{"const": 3}, {"type": "null"}]}}}}})
    };
    for (choice, temperature, seed) in [("required", 0.0, 1), ("required", 1.0, 2), ("required", 1.5, 3)] {
        let body = json!({"messages": [{"role": "user", "content": "Go."}], "max_tokens": 800, "thinking": false, "seed": seed,
            "temperature": temperature, "tools": [tool("run"), tool("walk")], "tool_choice": choice, "parallel_tool_calls": false});
        let (status, answer) = http::post(&worker.http, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        let call = &choice["message"]["tool_calls"][0]["function"];
        assert!(["run", "walk"].contains(&call["name"].as_str().unwrap()), "{call}");
        let arguments: serde_json::Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(["fast", "safe"].contains(&arguments["mode"].as_str().unwrap()), "{arguments}");
        assert!(arguments["force"].is_boolean(), "{arguments}");
        assert!(
            arguments["level"] == 3 || arguments.get("level").is_some_and(serde_json::Value::is_null),
            "{arguments}"
        );
        assert_eq!(arguments.as_object().unwrap().len(), 3, "{arguments}");
    }
}

#[test]
fn deepseek_v4_reasoning_is_told_from_the_answer() {
    let sandbox = Sandbox::new();
    let _owner = owner(&sandbox);
    let worker = sandbox.worker(&["--ctx", "2048"]);
    let ask = |thinking: serde_json::Value| {
        let body = json!({"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 12, "thinking": thinking,
            "logit_bias": {"1": -100}, "seed": 1});
        let (status, answer) = http::post(&worker.http, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let thought = ask(json!({"type": "enabled"}));
    assert!(thought["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0, "{thought}");
    assert!(thought["choices"][0]["message"]["reasoning_content"].is_string(), "{thought}");
    let said = ask(json!(false));
    assert_eq!(said["usage"]["completion_tokens_details"]["reasoning_tokens"], 0, "{said}");
    assert!(said["choices"][0]["message"].get("reasoning_content").is_none(), "{said}");
    for (field, value, shown) in [
        ("reasoning_effort", json!("huge"), "huge"),
        ("tool_choice", json!("required"), "tools"),
        ("response_format", json!({"type": "yaml"}), "yaml"),
    ] {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi."}]});
        body[field] = value;
        let (status, answer) = http::post(&worker.http, "/v1/chat/completions", &body);
        assert_eq!(status, 400, "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(field) && message.contains(shown), "{message}");
    }
}

#[test]
fn deepseek_v4_synthetic_weights_are_announced_everywhere() {
    let sandbox = Sandbox::new();
    let owner = owner(&sandbox);
    let worker = sandbox.worker(&["--ctx", "2048"]);
    for log in [owner.log(), worker.process.log()] {
        assert!(log.contains("the weights are synthetic"), "{log}");
    }
    let (_, models) = http::get(&worker.http, "/v1/models");
    let models: serde_json::Value = serde_json::from_str(&models).unwrap();
    assert_eq!(models["data"][0]["meta"]["synthetic"], true);
    assert_eq!(sandbox.ctl(&["models"])["models"][0]["synthetic"], true);
    let status = sandbox.ctl(&["status"]);
    assert_eq!(status["worker"]["synthetic"], true, "{status}");
    for command in ["models", "status"] {
        let shown = sandbox.run("ds4", &["ctl", command]);
        assert!(String::from_utf8_lossy(&shown.stdout).contains("synthetic weights"), "{command}");
    }
}
