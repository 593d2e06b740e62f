//! The prediction block end to end: synthesised, loaded beside its model, given to the worker, and without influence on answers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ds4_tests::{Process, Sandbox, http};
use serde_json::{Value, json};

const NAME: &str = "deepseek-v4-flash-tiny-synthetic";
const BLOCK: &str = "deepseek-v4-flash-tiny-mtp-synthetic";

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/tiny-v4.gguf")
}

/// Writes a prediction block of these dimensions.
fn block(sandbox: &Sandbox, shape: &str) -> PathBuf {
    let path = sandbox.dir().join(format!("{shape}-mtp.gguf"));
    let output = path.to_str().unwrap();
    let run = sandbox.run("ds4", &["gguf", "synth", "--part", "mtp", "--shape", shape, "-o", output]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    path
}

fn owner(sandbox: &Sandbox, models: &[&Path]) -> Process {
    let mut args = vec!["--allow-dev-models"];
    for model in models {
        args.extend(["--model", model.to_str().unwrap()]);
    }
    let mut owner = sandbox.start("ds4-weight-owner", &args);
    owner.wait_ready(Duration::from_secs(30));
    owner
}

fn answer(address: &str, content: &str, temperature: f64, format: &Value) -> Value {
    let body = json!({"model": NAME, "messages": [{"role": "user", "content": content}], "temperature": temperature,
        "seed": 1, "max_tokens": 40, "thinking": false, "logit_bias": {"1": -100}, "logprobs": true, "top_logprobs": 3,
        "response_format": format});
    let (status, answer) = http::post(address, "/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0].clone()
}

#[test]
fn deepseek_v4_mtp_is_served_beside_its_model_and_changes_no_answer() {
    let sandbox = Sandbox::new();
    let block = block(&sandbox, "tiny");
    let _owner = owner(&sandbox, &[&model(), &block]);
    // Without a name, the model is the one that is not a prediction block.
    let questions = ["Hello.", "What is the time? ".repeat(20).as_str(), "Name a river."].map(str::to_owned);
    let schema = json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 30}, "b": {"enum": ["x", "y"]}},
        "required": ["b", "a"]});
    let held = json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}});
    let kinds = [(0.0, json!({"type": "text"})), (0.7, json!({"type": "text"})), (0.0, held.clone()), (0.7, held)];
    let mut answers: Vec<Vec<Value>> = Vec::new();
    for more in [
        &[][..],
        &["--mtp", BLOCK],
        &["--mtp", BLOCK, "--mtp-draft", "16", "--mtp-alignment", "same"],
        &["--mtp", BLOCK, "--mtp-draft", "4", "--mtp-margin", "0.05"],
    ] {
        let mut worker = sandbox.worker(&[&["--ctx", "2048"][..], more].concat());
        let each = questions.iter().flat_map(|q| kinds.iter().map(move |(t, format)| (q, t, format)));
        answers.push(each.map(|(q, t, format)| answer(&worker.http, q, *t, format)).collect());
        let status = sandbox.ctl(&["status"])["worker"].clone();
        let stats: Value = serde_json::from_str(&http::get(&worker.http, "/v1/stats").1).unwrap();
        let (_, metrics) = http::get(&worker.http, "/metrics");
        if more.is_empty() {
            assert_eq!((&status["drafter"], &status["drafted_tokens"]), (&json!(""), &json!(0)), "{status}");
        } else {
            assert_eq!(status["drafter"], BLOCK);
            assert_eq!(status["drafted_tokens"], stats["engine"]["drafted_tokens"]);
            // Of the other alignment, guesses need the block and the model to agree first, which random weights do by chance only.
            let some = !more.contains(&"same");
            assert!(!some || status["drafted_tokens"].as_u64() > Some(20), "{status}");
            let line = format!("ds4_engine_drafted_tokens_total {}", status["drafted_tokens"]);
            assert!(metrics.contains(&line), "{line} in {metrics}");
            let shown = sandbox.run("ds4", &["ctl", "status"]);
            assert!(String::from_utf8_lossy(&shown.stdout).contains(BLOCK));
        }
        worker.process.kill();
    }
    for other in &answers[1..] {
        assert_eq!(other, &answers[0]);
    }
}

#[test]
fn deepseek_v4_mtp_that_does_not_fit_is_refused_with_the_tensor() {
    let sandbox = Sandbox::new();
    let other = block(&sandbox, "small");
    let _owner = owner(&sandbox, &[&model(), &other]);
    let refused = |mtp: &str, said: &[&str]| {
        let mut worker = sandbox.start("ds4-worker", &["--http", "127.0.0.1:0", "--mtp", mtp]);
        let status = worker.wait_end(Duration::from_secs(10));
        for said in said {
            assert!(worker.log().contains(said), "{said} in {}", worker.log());
        }
        status.code()
    };
    let small = "deepseek-v4-flash-small-mtp-synthetic";
    assert_eq!(refused(small, &[small, NAME, "tensor mtp.0.norm.weight has shape [512], expected [256]"]), Some(4));
    assert_eq!(refused(NAME, &["is no prediction block", "family deepseek4"]), Some(4));
    refused("nobody", &["nobody"]);
}

#[test]
fn deepseek_v4_mtp_comes_with_ds4_serve() {
    let sandbox = Sandbox::new();
    let block = block(&sandbox, "tiny");
    let (model, block) = (model(), block.to_str().unwrap().to_owned());
    let model = model.to_str().unwrap();
    let args = ["serve", "--allow-dev-models", "--http", "127.0.0.1:0", "--ctx", "2048", "--model", model];
    let mut serve = sandbox.start("ds4", &[&args[..], &["--mtp", &block, "--mtp-draft", "3"]].concat());
    let status = ds4_tests::wait_for("the worker", Duration::from_secs(30), || {
        let run = sandbox.run("ds4", &["ctl", "status", "--json"]);
        let status: Value = serde_json::from_slice(&run.stdout).ok()?;
        (status["worker"]["state"] == "ready").then(|| status["worker"].clone())
    });
    assert_eq!((&status["model"], &status["drafter"]), (&json!(NAME), &json!(BLOCK)), "{status}");
    answer(status["http"].as_str().unwrap(), "Hello.", 0.0, &Value::Null);
    assert!(sandbox.ctl(&["status"])["worker"]["drafted_tokens"].as_u64() > Some(0));
    serve.kill();

    let wrong = sandbox.run("ds4", &["serve", "--model", model, "--mtp", model, "--print-config"]);
    assert_eq!(wrong.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("not the file of a prediction block"));
}
