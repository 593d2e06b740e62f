//! `ds4 run --dump-...` and `ds4 eval vectors` through the real binaries, held against transformers and Hugging Face's
//! tokenizers (`tests/oracles/eval_vectors.py`, `smollm2_logits.py`).

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use ds4_tests::{Process, Sandbox, http};
use serde_json::{Value, json};

/// Largest difference between a log-probability here and in transformers. On these prompts it is below 0.02; a few hundredths
/// are what 16-bit activations cost in the reference itself (`int16_error` in smollm2/logits.json).
const NEAR: f64 = 0.03;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn path_of(name: &str) -> String {
    fixture(name).to_str().unwrap().into()
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// It must end with `code` and say `wanted` on standard error.
fn refused(output: &Output, code: i32, wanted: &[&str]) {
    assert_eq!(output.status.code(), Some(code), "{}{}", text(&output.stdout), text(&output.stderr));
    for part in wanted {
        assert!(text(&output.stderr).contains(part), "no `{part}` in {}", text(&output.stderr));
    }
}

/// A recorded step: the token's bytes in hex and its candidates.
type Recorded = (String, Vec<(String, f64)>);

/// The steps of a case of a vector file, read without any of the program's code.
fn recorded(file: &str, case: &str) -> Vec<Recorded> {
    let text = std::fs::read_to_string(fixture(file)).unwrap();
    let body = text.split(&format!("case {case} ")).nth(1).unwrap().split("\nend").next().unwrap();
    let mut steps: Vec<Recorded> = Vec::new();
    for line in body.lines().skip(1) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["step", _, token, _] => steps.push((token.into(), Vec::new())),
            ["top", token, logprob] => steps.last_mut().unwrap().1.push((token.into(), logprob.parse().unwrap())),
            _ => panic!("{line}"),
        }
    }
    steps
}

fn hex(token: &Value) -> String {
    token["bytes"].as_array().unwrap().iter().map(|b| format!("{:02x}", b.as_u64().unwrap())).collect()
}

fn prompt_of(case: &str) -> String {
    std::fs::read_to_string(fixture(&format!("eval/prompts/{case}.txt"))).unwrap()
}

/// What is to be taken from a logit to make it a log-probability.
fn normaliser(row: &[f64]) -> f64 {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + row.iter().map(|l| (l - max).exp()).sum::<f64>().ln()
}

fn tiny_v4(sandbox: &Sandbox) -> Process {
    let mut owner =
        sandbox.start("ds4-weight-owner", &["--allow-dev-models", "--model", &path_of("deepseek_v4/tiny-v4.gguf")]);
    owner.wait_ready(Duration::from_secs(30));
    owner
}

#[test]
fn deepseek_v4_vectors_of_transformers_pass_on_the_starter_model() {
    let sandbox = Sandbox::new();
    let _owner = sandbox.owner();
    let _worker = sandbox.worker(&["--ctx", "2048", "--prefill-chunk", "64"]);
    let eval = |args: &[&str]| sandbox.run("ds4", &[&["eval", "vectors"], args].concat());
    let (chat, capture, raw) =
        (path_of("eval/smollm2.vec"), path_of("eval/capture.official.json"), path_of("eval/raw.vec"));

    let near = NEAR.to_string();
    let tight: Value =
        serde_json::from_str(&ok(&eval(&[&chat, "--tolerance", &near, "--top", "8", "--json"]))).unwrap();
    assert_eq!((&tight["passed"], &tight["failed"]), (&json!(4), &json!(0)));
    // The program's own limits.
    let shown = ok(&eval(&[&chat, &capture, "--json"]));
    // In the capture a token that was taken has logprob 0, whatever it was.
    let report: Value = serde_json::from_str(&shown).unwrap_or_else(|e| panic!("{e}: {shown}"));
    assert_eq!(
        (&report["passed"], &report["failed"], &report["model"]),
        (&json!(5), &json!(0), &json!("smollm2-135m-instruct"))
    );
    let json_case = &report["cases"][4];
    assert_eq!(
        (&json_case["id"], &json_case["prompt_tokens"]),
        (&json!("capital_json"), &json_case["recorded_prompt_tokens"])
    );
    assert_eq!(report["cases"][2]["prompt_tokens"], 338);

    let table = ok(&eval(&[&chat]));
    assert!(table.contains("VERDICT") && table.contains("smollm2-135m-instruct: 4 of 4 cases pass"), "{table}");
    assert!(ok(&eval(&[&raw, "--raw", "--tolerance", &near])).contains("2 of 2"));

    // Without --raw the same vectors ask another question.
    let wrong = eval(&[&raw]);
    assert_eq!(wrong.status.code(), Some(1), "{}", text(&wrong.stderr));
    assert!(text(&wrong.stdout).contains("FAIL") && text(&wrong.stdout).contains("step 0"), "{}", text(&wrong.stdout));

    // One wrong token, one wrong number.
    let good = std::fs::read_to_string(fixture("eval/smollm2.vec")).unwrap();
    let steps = recorded("eval/smollm2.vec", "capital");
    let damaged = sandbox.file(
        "token.vec",
        good.replace("tests/fixtures/eval", &path_of("eval"))
            .replace(&format!("step 1 {} ", steps[1].0), "step 1 787878 "),
    );
    let report = eval(&[damaged.to_str().unwrap(), "--json"]);
    assert_eq!(report.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!((&report["passed"], &report["cases"][0]["verdict"]), (&json!(3), &json!("fail")));
    assert_eq!((&report["cases"][0]["steps_passed"], &report["cases"][0]["steps_scored"]), (&json!(7), &json!(8)));
    assert!(report["cases"][0]["steps"][1]["problems"][0].as_str().unwrap().contains("\"xxx\""), "{report}");
    assert!(ok(&eval(&[damaged.to_str().unwrap(), "--skip", "capital"])).contains("skipped"));
    let exact = eval(&[&chat, "--tolerance", "0"]);
    assert_eq!(exact.status.code(), Some(1));
    assert!(text(&exact.stdout).contains("has logprob"));
    let few = eval(&[&chat, "--top", "1"]);
    assert!(text(&few.stdout).contains("is not among the best 1"), "{}", text(&few.stdout));

    refused(&eval(&[&chat, "--skip", "nobody"]), 2, &["nobody", "capital, function, long, accents"]);
    refused(&eval(&[&chat, "--top", "1001"]), 2, &["1001"]);
    refused(&eval(&["/nonexistent.vec"]), 2, &["/nonexistent.vec"]);
    let cut = sandbox.file("cut.vec", "case x 9 1 cut.vec\nstep 0 4 0\n");
    refused(&eval(&[cut.to_str().unwrap()]), 2, &["cut.vec:2: ", "`4`"]);
    // A prompt that does not fit is one case's trouble.
    let long = "word ".repeat(3000);
    sandbox.file("long.txt", &long);
    let mixed = sandbox.file("mixed.vec", "case long 9 1 long.txt\nstep 0 61 0\nend\n");
    let report = eval(&[mixed.to_str().unwrap(), &raw, "--raw"]);
    assert_eq!(report.status.code(), Some(1));
    assert!(
        text(&report.stdout).contains("REFUSED") && text(&report.stdout).contains("2 of 3"),
        "{}",
        text(&report.stdout)
    );
    assert!(text(&report.stdout).contains("--ctx"), "{}", text(&report.stdout));
}

#[test]
fn deepseek_v4_dumps_on_the_starter_model_equal_transformers() {
    let sandbox = Sandbox::new();
    let _owner = sandbox.owner();
    let _worker = sandbox.worker(&["--ctx", "2048"]);
    let run = |args: &[&str]| sandbox.run("ds4", &[&["run"], args].concat());

    // Tokens, as the tokenizers package has them.
    for case in json_of(&fixture("eval/tokens.json")).as_array().unwrap() {
        let prompt = case["text"].as_str().unwrap();
        let mut args = vec!["--dump-tokens", "--json", "-p", prompt];
        if let Some(system) = case["system"].as_str() {
            args.extend(["--system", system]);
        }
        let dump: Value = serde_json::from_str(&ok(&run(&args))).unwrap();
        let ids: Vec<&Value> = dump["tokens"].as_array().unwrap().iter().map(|t| &t["id"]).collect();
        assert_eq!(json!(ids), case["smollm2"], "{prompt}");
        assert_eq!(dump["count"], ids.len());
        args.retain(|a| *a != "--json");
        let lines = ok(&run(&args));
        let from_lines: Vec<u64> = lines.lines().map(|l| l.split('\t').next().unwrap().parse().unwrap()).collect();
        assert_eq!(json!(from_lines), case["smollm2"]);
    }

    // Steps: to the end token, which is a step like any other.
    let file = sandbox.dir().join("steps.json");
    let shown = file.to_str().unwrap();
    let text_out = ok(&run(&["--dump-logprobs", shown, "--logprobs-top-k", "5", "-p", &prompt_of("capital")]));
    assert_eq!(text_out, "The capital of Japan is Tokyo.\n");
    let dump = json_of(&file);
    assert_eq!((&dump["schema"], &dump["finish_reason"]), (&json!("ds4-logprobs-v1"), &json!("stop")));
    let steps = dump["steps"].as_array().unwrap();
    let want = recorded("eval/smollm2.vec", "capital");
    assert_eq!(steps.len(), want.len());
    for (got, (token, top)) in steps.iter().zip(&want) {
        assert_eq!((&hex(&got["token"]), &got["rank"]), (token, &json!(0)));
        let tops = got["top_logprobs"].as_array().unwrap();
        assert_eq!(tops.len(), 5);
        for (candidate, logprob) in top {
            let here = tops.iter().find(|t| hex(&t["token"]) == *candidate);
            // The fifth and sixth may change places.
            let Some(here) = here else { continue };
            assert!((here["logprob"].as_f64().unwrap() - logprob).abs() < NEAR, "{candidate}: {here} for {logprob}");
        }
        assert_eq!(got["logprob"], tops[0]["logprob"]);
    }

    // Teacher forcing: the same numbers, of tokens inside a prompt.
    let want = recorded("eval/raw.vec", "again");
    let continuation: Vec<u8> = want
        .iter()
        .flat_map(|(token, _)| (0..token.len()).step_by(2).map(|i| u8::from_str_radix(&token[i..i + 2], 16).unwrap()))
        .collect();
    let whole = sandbox.file("whole.txt", prompt_of("again") + &text(&continuation));
    let args =
        ["--raw", "--prompt-file", whole.to_str().unwrap(), "-n", "1", "--dump-logprobs", shown, "--logprobs-prompt"];
    ok(&run(&args));
    let dump = json_of(&file);
    let inside = dump["prompt_steps"].as_array().unwrap();
    assert_eq!(inside.len() + 1, dump["prompt_tokens"].as_array().unwrap().len());
    for (got, (token, top)) in inside[inside.len() - want.len()..].iter().zip(&want) {
        assert_eq!((&hex(&got["token"]), &got["rank"]), (token, &json!(0)));
        assert!((got["logprob"].as_f64().unwrap() - top[0].1).abs() < NEAR, "{got} for {top:?}");
    }

    // A dump is a vector.
    ok(&sandbox.run("ds4", &["eval", "vectors", shown, "--tolerance", "0.000001"]));

    // All logits of the eighth prompts' last positions.
    let head = json_of(&fixture("smollm2/logits.json"));
    let vocab = usize::try_from(head["vocab"].as_u64().unwrap()).unwrap();
    let last = std::fs::read(fixture("smollm2/last.f32")).unwrap();
    let (as_npy, as_json) = (sandbox.dir().join("row.npy"), sandbox.dir().join("row.json"));
    for (case, want) in head["prompts"].as_array().unwrap().iter().zip(last.chunks_exact(vocab * 4)) {
        let prompt = case["text"].as_str().unwrap();
        let table = ok(&run(&["--raw", "--dump-logits", as_npy.to_str().unwrap(), "-p", prompt]));
        ok(&run(&["--raw", "--dump-logits", as_json.to_str().unwrap(), "--json", "-p", prompt]));
        let npy = std::fs::read(&as_npy).unwrap();
        assert_eq!((&npy[..8], npy.len()), (&b"\x93NUMPY\x01\x00"[..], 128 + vocab * 4));
        let dump = json_of(&as_json);
        assert_eq!(dump["prompt_tokens"], case["tokens"]);
        let bound = 2.0 * case["int16_error"]["last_max_abs"].as_f64().unwrap();
        let floats = |bytes: &[u8]| -> Vec<f32> {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let (row, want) = (floats(&npy[128..]), floats(want));
        for (id, (got, want)) in row.iter().zip(&want).enumerate() {
            assert!(f64::from((got - want).abs()) <= bound, "{}: token {id}: {got} for {want}", case["name"]);
        }
        // The shortest decimal that names the number: read back, it is the same bits.
        let printed: Vec<f32> =
            dump["logits"].as_array().unwrap().iter().map(|l| l.to_string().parse().unwrap()).collect();
        assert!(printed == row, "{}: the two files differ", case["name"]);
        // The printed log-probability of the best token, over the reference's row.
        let want: Vec<f64> = want.iter().map(|l| f64::from(*l)).collect();
        let normal = normaliser(&want);
        let best = usize::try_from(case["greedy"][0].as_u64().unwrap()).unwrap();
        let printed = dump["top"][0]["logprob"].as_f64().unwrap();
        assert!((printed - (want[best] - normal)).abs() < NEAR, "{printed}");
        assert!(table.lines().nth(1).unwrap().starts_with(&format!("{best} ")), "{table}");
    }
}

#[test]
fn deepseek_v4_dumps_of_a_tiny_model_equal_http_and_the_tokenizer() {
    let sandbox = Sandbox::new();
    let _owner = tiny_v4(&sandbox);
    let worker = sandbox.worker(&["--ctx", "2048"]);
    let run = |args: &[&str]| sandbox.run("ds4", &[&["run"], args].concat());
    for case in json_of(&fixture("eval/tokens.json")).as_array().unwrap() {
        let mut args = vec!["--dump-tokens", "--json", "--thinking", "off", "-p", case["text"].as_str().unwrap()];
        if let Some(system) = case["system"].as_str() {
            args.extend(["--system", system]);
        }
        let dump: Value = serde_json::from_str(&ok(&run(&args))).unwrap();
        let tokens = dump["tokens"].as_array().unwrap();
        let ids: Vec<&Value> = tokens.iter().map(|t| &t["id"]).collect();
        assert_eq!(json!(ids), case["tiny_v4"], "{}", case["text"]);
        let last = tokens.last().unwrap();
        assert_eq!((&last["text"], &last["control"]), (&json!("</think>"), &json!(true)));
    }

    // The distribution after a prompt that spans compressed rows: the same over gRPC and over HTTP, which stops at 20.
    let prompt = "The moon is made of cheese, they say. ".repeat(12);
    let file = sandbox.dir().join("row.json");
    ok(&run(&["--raw", "--dump-logits", file.to_str().unwrap(), "-p", &prompt]));
    let row: Vec<f64> = json_of(&file)["logits"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect();
    let normal = normaliser(&row);
    let mut here: Vec<f64> = row.iter().map(|l| l - normal).collect();
    here.sort_by(|a, b| b.total_cmp(a));
    let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5, "ignore_eos": true});
    let (status, answer) = http::post(&worker.http, "/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let by_http = answer["choices"][0]["logprobs"]["token_logprobs"][0].as_f64().unwrap_or_else(|| panic!("{answer}"));
    assert!((by_http - here[0]).abs() < 1e-4, "{by_http} {}", here[0]);
    // In chats HTTP gives 20, with their bytes.
    let chat = json!({
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 1, "temperature": 0, "logprobs": true, "top_logprobs": 20, "reasoning_effort": "none", "ignore_eos": true,
    });
    let (status, answer) = http::post(&worker.http, "/v1/chat/completions", &chat);
    assert_eq!(status, 200, "{answer}");
    let by_http = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"].clone();
    let dumped = sandbox.dir().join("chat.json");
    let shown = dumped.to_str().unwrap();
    ok(&run(&["--thinking", "off", "--dump-logprobs", shown, "--logprobs-top-k", "25", "-n", "1", "-p", &prompt]));
    let here = json_of(&dumped)["steps"][0]["top_logprobs"].clone();
    assert_eq!((by_http.as_array().map(Vec::len), here.as_array().map(Vec::len)), (Some(20), Some(25)), "{answer}");
    for (a, b) in by_http.as_array().unwrap().iter().zip(here.as_array().unwrap()) {
        assert_eq!(a["bytes"], b["token"]["bytes"]);
        assert!((a["logprob"].as_f64().unwrap() - b["logprob"].as_f64().unwrap()).abs() < 1e-4, "{a} {b}");
    }

    // A dump scores itself, end tokens included, by the family's own layout.
    let steps = sandbox.dir().join("steps.json");
    let args = ["--thinking", "off", "-n", "24", "--dump-logprobs", steps.to_str().unwrap(), "-p", "Name a river."];
    ok(&run(&args));
    let output = ok(&sandbox.run("ds4", &["eval", "vectors", steps.to_str().unwrap(), "--tolerance", "0.000001"]));
    assert!(output.contains("1 of 1"), "{output}");
}

#[test]
fn deepseek_v4_dumps_go_to_pipes_and_leave_them_what_they_are() {
    let sandbox = Sandbox::new();
    let _owner = tiny_v4(&sandbox);
    let _worker = sandbox.worker(&["--ctx", "512"]);
    let run = |args: &[&str]| sandbox.run("ds4", &[&["run", "--raw", "-p", "Name a river."], args].concat());
    let link = sandbox.dir().join("stdout");
    std::os::unix::fs::symlink("/proc/self/fd/1", &link).unwrap();
    let file = sandbox.dir().join("file.json");
    ok(&run(&["--dump-logits", file.to_str().unwrap()]));
    let want = std::fs::read_to_string(&file).unwrap();
    for to in ["-", "/dev/stdout", link.to_str().unwrap()] {
        let output = run(&["--dump-logits", to]);
        assert_eq!(ok(&output), want, "{to}");
        assert!(text(&output.stderr).contains("LOGPROB"), "the table goes to standard error");
        let steps: Value = serde_json::from_str(&ok(&run(&["-n", "3", "--dump-logprobs", to]))).unwrap();
        assert_eq!(steps["steps"].as_array().map(Vec::len), Some(3));
    }
    assert!(link.is_symlink() && Path::new("/dev/stdout").is_symlink());
    let fifo = sandbox.dir().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let from = fifo.clone();
    let reader = std::thread::spawn(move || std::fs::read_to_string(from).unwrap());
    ok(&run(&["--dump-logits", fifo.to_str().unwrap()]));
    assert_eq!(reader.join().unwrap(), want);
    refused(&run(&["--dump-logits", "-", "--json"]), 2, &["--json", "`-`"]);
    refused(&run(&["--dump-logits", "-", "--dump-logprobs", "/dev/stdout"]), 2, &["same place"]);
    refused(&run(&["--dump-logits", "x", "-n", "5"]), 2, &["-n", "--dump-logprobs"]);
    assert!(!Path::new("-").exists() && !Path::new("x").exists());

    // What has no steps is no vector, and says what it is.
    let logits = file.to_str().unwrap();
    refused(&sandbox.run("ds4", &["eval", "vectors", logits]), 2, &["ds4-logits-v1", "--dump-logprobs"]);
    let steps = sandbox.dir().join("steps.json");
    let steps = steps.to_str().unwrap();
    ok(&run(&["-n", "3", "--dump-logprobs", steps]));
    refused(&sandbox.run("ds4", &["eval", "vectors", steps, "--skip", "steps"]), 2, &["every case"]);
}

#[test]
fn deepseek_v4_a_peer_that_dies_is_said_in_words() {
    let sandbox = Sandbox::new();
    let mut owner = sandbox.owner();
    let mut worker = sandbox.worker(&["--ctx", "2048"]);
    refused(&sandbox.run("ds4", &["run", "--thinking", "high", "-p", "x"]), 1, &["--thinking", "no reasoning mode"]);
    let steps = sandbox.dir().join("steps.json");
    let args = ["run", "--raw", "-n", "1900", "--dump-logprobs", steps.to_str().unwrap(), "-p", "One, two, three,"];
    let mut dump = sandbox.command("ds4");
    let mut dump = dump.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    dump.stdout.as_mut().unwrap().read_exact(&mut [0; 8]).unwrap();
    // The answer over HTTP ends in the same way.
    let args = ["run", "--raw", "-n", "1900", "-p", "One, two, three,"];
    let mut answer = sandbox.command("ds4");
    let mut answer = answer.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    answer.stdout.as_mut().unwrap().read_exact(&mut [0; 2]).unwrap();
    worker.process.kill();
    refused(&answer.wait_with_output().unwrap(), 3, &["the worker died"]);
    refused(&dump.wait_with_output().unwrap(), 3, &["the connection broke"]);
    assert!(!steps.exists());

    let mut watch = sandbox.command("ds4");
    let mut watch = watch.args(["ctl", "watch"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    watch.stdout.as_mut().unwrap().read_exact(&mut [0; 8]).unwrap();
    owner.kill();
    refused(&watch.wait_with_output().unwrap(), 3, &["the connection broke"]);
}

#[test]
fn deepseek_v4_dumps_that_cannot_be_had_say_why() {
    let sandbox = Sandbox::new();
    let run = |args: &[&str]| sandbox.run("ds4", &[&["run"], args].concat());
    for args in [&["--dump-tokens", "-p", "x"][..], &["--dump-logits", "/tmp/x.npy", "-p", "x"]] {
        refused(&run(args), 3, &["no worker answers", "ds4 serve"]);
    }
    let vectors = path_of("eval/smollm2.vec");
    refused(&sandbox.run("ds4", &["eval", "vectors", &vectors]), 3, &["no worker answers", "ds4 serve"]);
    refused(&run(&["--dump-tokens", "--url", "http://127.0.0.1:1", "-p", "x"]), 2, &["--runtime-dir", "Unix socket"]);
    refused(&run(&["--dump-logits", "/no/such/dir/x.npy", "-p", "x"]), 2, &["/no/such/dir/x.npy"]);
    refused(&run(&["--dump-logprobs", "x", "--logprobs-top-k", "1001", "-p", "x"]), 2, &["1001", "--logprobs-top-k"]);
    refused(&run(&["--dump-logprobs", "x", "--stop", "a", "-p", "x"]), 2, &["--stop"]);
    refused(&run(&["--dump-tokens", "--dump-logits", "x", "-p", "x"]), 2, &["--dump-logits"]);
    refused(&run(&["--json", "-p", "x"]), 2, &["--dump-tokens"]);
    refused(&run(&["--prompt-file", "/no/such/prompt.txt"]), 2, &["/no/such/prompt.txt"]);
    refused(&run(&["--dump-tokens"]), 2, &["--prompt"]);

    let _owner = tiny_v4(&sandbox);
    let _worker = sandbox.worker(&["--ctx", "256"]);
    let out = sandbox.dir().join("x.json");
    let long = "word ".repeat(400);
    refused(&run(&["--dump-logits", out.to_str().unwrap(), "-p", &long]), 1, &["256", "--ctx"]);
    refused(&run(&["--dump-logprobs", out.to_str().unwrap(), "-n", "500", "-p", "x"]), 1, &["500", "256", "--ctx"]);
    assert!(!out.exists(), "a refused dump leaves no file");
}
