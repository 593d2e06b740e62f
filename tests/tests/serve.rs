//! `ds4 serve`: one supervisor over owner and worker.

use std::time::{Duration, Instant};

use ds4_tests::process::{alive, signal_pid};
use ds4_tests::{Process, Sandbox, http, starter_model, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;

const START: Duration = Duration::from_secs(60);

fn serve(sandbox: &Sandbox, more: &[&str]) -> Process {
    let model = starter_model();
    let args = [&["serve", "--model", model.to_str().unwrap(), "--http", "127.0.0.1:0"], more].concat();
    sandbox.start("ds4", &args)
}

fn ready(sandbox: &Sandbox) -> Value {
    wait_for("a ready worker", START, || {
        let status = sandbox.try_ctl(&["status"]).ok()?;
        (status["worker"]["state"] == "ready").then_some(status)
    })
}

fn pid(status: &Value, who: &str) -> u32 {
    u32::try_from(status[who]["pid"].as_u64().unwrap_or_else(|| panic!("no {who} in {status}"))).unwrap()
}

fn address(status: &Value) -> &str {
    status["worker"]["http"].as_str().unwrap()
}

#[test]
fn serve_answers_and_ends_in_order() {
    let sandbox = Sandbox::new();
    let mut server = serve(&sandbox, &[]);
    let status = ready(&sandbox);
    assert_eq!(status["supervisor_pid"], server.pid());
    wait_for("the welcome", START, || server.log().contains("curl http://").then_some(()));
    let answer = sandbox.run("ds4", &["run", "--temp", "0", "-n", "24", "-p", "What is the capital of France?"]);
    let text = String::from_utf8(answer.stdout).unwrap();
    assert!(answer.status.success() && text.contains("Paris"), "{text}{}", String::from_utf8_lossy(&answer.stderr));

    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait_end(START).code(), Some(0), "{}", server.log());
    assert!(!alive(pid(&status, "worker")) && !alive(pid(&status, "owner")), "no process is left behind");
}

#[test]
fn l11_killing_the_front_process_loses_neither_weights_nor_worker() {
    let sandbox = Sandbox::new();
    let mut first = serve(&sandbox, &[]);
    let before = ready(&sandbox);
    first.kill();
    let answer = http::greedy(address(&before), "The capital of France is", 8);
    assert!(answer.contains("Paris"), "{answer}");

    let mut second = serve(&sandbox, &[]);
    wait_for("the second supervisor", START, || second.log().contains("ds4 serves").then_some(()));
    let after = ready(&sandbox);
    assert_eq!(pid(&after, "owner"), pid(&before, "owner"), "the weights were not loaded again");
    assert_eq!(pid(&after, "worker"), pid(&before, "worker"));
    assert_eq!(after["models"].as_array().unwrap().len(), 1, "{after}");
    assert_eq!(after["supervisor_pid"], second.pid());

    // It also takes care of them: a worker that dies is replaced, at the same address.
    signal_pid(pid(&before, "worker"), Signal::SIGKILL);
    let replaced = wait_for("another worker", START, || {
        let status = sandbox.try_ctl(&["status"]).ok()?;
        (status["worker"]["state"] == "ready" && pid(&status, "worker") != pid(&before, "worker")).then_some(status)
    });
    assert_eq!(http::greedy(address(&replaced), "The capital of France is", 8), answer);

    sandbox.ctl(&["stop"]);
    assert_eq!(second.wait_end(START).code(), Some(0));
    assert!(!alive(pid(&replaced, "worker")) && !alive(pid(&before, "owner")));
}

#[test]
fn a_killed_worker_is_replaced_and_no_connection_is_refused() {
    let sandbox = Sandbox::new();
    let server = serve(&sandbox, &[]);
    let status = ready(&sandbox);
    let before = http::greedy(address(&status), "The capital of France is", 8);
    for _ in 0..3 {
        let worker = pid(&ready(&sandbox), "worker");
        signal_pid(worker, Signal::SIGKILL);
        // At once: the listening socket is the supervisor's too, so this waits for the successor.
        assert_eq!(http::greedy(address(&status), "The capital of France is", 8), before);
    }
    assert!(server.log().contains("was ended by SIGKILL; starting another"), "{}", server.log());
}

#[test]
fn ctl_restart_and_drain_replace_the_worker() {
    let sandbox = Sandbox::new();
    let _server = serve(&sandbox, &[]);
    let before = ready(&sandbox);
    let reply = sandbox.ctl(&["restart"]);
    assert_eq!(reply["old_pid"], before["worker"]["pid"]);
    assert_ne!(reply["new_pid"], before["worker"]["pid"]);
    assert_eq!(pid(&ready(&sandbox), "owner"), pid(&before, "owner"));
}

#[test]
fn a_killed_owner_is_started_again_while_the_worker_serves_on() {
    let sandbox = Sandbox::new();
    let _server = serve(&sandbox, &[]);
    let before = ready(&sandbox);
    let answer = http::greedy(address(&before), "The capital of France is", 8);
    signal_pid(pid(&before, "owner"), Signal::SIGKILL);
    assert_eq!(http::greedy(address(&before), "The capital of France is", 8), answer);
    let after = wait_for("another owner with the model", START, || {
        let status = sandbox.try_ctl(&["status"]).ok()?;
        (status["owner"]["pid"].is_u64()
            && pid(&status, "owner") != pid(&before, "owner")
            && status["models"][0]["state"] == "READY")
            .then_some(status)
    });
    assert_eq!(http::greedy(address(&ready(&sandbox)), "The capital of France is", 8), answer);
    drop(after);
}

#[test]
fn a_second_supervisor_is_refused() {
    let sandbox = Sandbox::new();
    let first = serve(&sandbox, &[]);
    ready(&sandbox);
    let mut second = serve(&sandbox, &[]);
    assert_eq!(second.wait_end(Duration::from_secs(5)).code(), Some(2));
    assert!(second.log().contains(&format!("(pid {}) already supervises", first.pid())), "{}", second.log());
}

#[test]
fn l8_a_bad_configuration_fails_before_anything_is_started() {
    let cases: [(&str, &[&str], i32, &str); 6] = [
        ("[worker]\nctxx = 1\n", &[], 2, "did you mean `ctx`"),
        ("[owner]\nreserve-mib = 'much'\n", &[], 2, "reserve-mib"),
        ("[serve]\nstart-attempts = 0\n", &[], 2, "start-attempts"),
        ("[sreve]\n", &[], 2, "did you mean `serve`"),
        ("", &["--ctx", "0"], 2, "ctx"),
        ("", &["--model", "/nonexistent/model.gguf"], 4, "/nonexistent/model.gguf"),
    ];
    for (file, args, code, wanted) in cases {
        let sandbox = Sandbox::new();
        let config = sandbox.file("ds4.toml", file);
        let begun = Instant::now();
        let mut all = vec!["serve", "--http", "127.0.0.1:0", "--config", config.to_str().unwrap()];
        let model = starter_model();
        if !args.contains(&"--model") {
            all.extend(["--model", model.to_str().unwrap()]);
        }
        all.extend(args);
        let mut server = sandbox.start("ds4", &all);
        assert_eq!(server.wait_end(Duration::from_secs(5)).code(), Some(code), "{file}{args:?}: {}", server.log());
        assert!(server.log().contains(wanted), "{file}{args:?}: {}", server.log());
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert!(!sandbox.dir().join("owner.sock").exists(), "{file}{args:?}: an owner was started");
    }
}

#[test]
fn an_address_in_use_is_said_before_anything_is_started() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let sandbox = Sandbox::new();
    let model = starter_model();
    let mut server = sandbox.start("ds4", &["serve", "--model", model.to_str().unwrap(), "--http", &address]);
    assert_ne!(server.wait_end(Duration::from_secs(5)).code(), Some(0));
    assert!(server.log().contains(&address) && server.log().contains("--http"), "{}", server.log());
    assert!(!sandbox.dir().join("owner.sock").exists());
}

#[test]
fn l4_a_worker_that_cannot_start_is_given_up_with_its_cause() {
    let sandbox = Sandbox::new();
    let mut server = serve(&sandbox, &["--start-attempts", "3", "--", "--model", "no-such-model"]);
    let status = server.wait_end(START);
    assert_eq!(status.code(), Some(3), "{}", server.log());
    assert!(server.log().contains("no-such-model"), "the cause is shown: {}", server.log());
    assert!(sandbox.try_ctl(&["status"]).is_err(), "the owner that serve had started is gone too");
}

#[test]
fn owner_and_worker_killed_together_both_come_back() {
    let sandbox = Sandbox::new();
    let _server = serve(&sandbox, &["--start-attempts", "2"]);
    let before = ready(&sandbox);
    let answer = http::greedy(address(&before), "The capital of France is", 8);
    signal_pid(pid(&before, "owner"), Signal::SIGKILL);
    signal_pid(pid(&before, "worker"), Signal::SIGKILL);
    // This waits in the listening socket until both are back, in the right order.
    assert_eq!(http::greedy(address(&before), "The capital of France is", 8), answer);
    let after = ready(&sandbox);
    assert_ne!(pid(&after, "owner"), pid(&before, "owner"));
    assert_ne!(pid(&after, "worker"), pid(&before, "worker"));
}
