//! `ds4 serve`: one supervisor over owner and worker.

use std::path::Path;
use std::time::{Duration, Instant};

use ds4_tests::process::{alive, signal_pid};
use ds4_tests::{Process, Sandbox, http, starter_model, wait_for};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

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
fn a_log_that_cannot_be_written_ends_nothing() {
    let sandbox = Sandbox::new();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let model = starter_model();
    let mut command = sandbox.command("ds4");
    command.args(["serve", "--http", "127.0.0.1:0", "--model", model.to_str().unwrap()]);
    // Named, so that the sandbox finds it should this test fail.
    command.arg("--runtime-dir").arg(sandbox.dir()).stdout(full()).stderr(full());
    let mut server = command.spawn().unwrap();
    let before = ready(&sandbox);
    signal_pid(pid(&before, "worker"), Signal::SIGKILL);
    assert!(http::greedy(address(&before), "The capital of France is", 8).contains("Paris"));
    let after = ready(&sandbox);
    assert_ne!(pid(&after, "worker"), pid(&before, "worker"));
    signal_pid(server.id(), Signal::SIGTERM);
    assert_eq!(server.wait().unwrap().code(), Some(0));
    assert!(!alive(pid(&after, "worker")) && !alive(pid(&after, "owner")));
}

#[test]
fn commands_wait_for_a_worker_that_is_being_replaced() {
    let sandbox = Sandbox::new();
    let _server = serve(&sandbox, &[]);
    let commands: [&[&str]; 4] = [
        &["run", "--temp", "0", "-n", "4", "-p", "Still there?"],
        &["run", "--dump-tokens", "-p", "Still there?"],
        &["ctl", "restart"],
        &["ctl", "drain"],
    ];
    // A race by nature: each command meets the gap at another moment.
    for command in commands.iter().cycle().take(12) {
        let worker = pid(&ready(&sandbox), "worker");
        signal_pid(worker, Signal::SIGKILL);
        let output = sandbox.run("ds4", command);
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
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
fn a_worker_that_nobody_supervises_is_not_restarted_away() {
    let sandbox = Sandbox::new();
    let mut server = serve(&sandbox, &[]);
    let before = ready(&sandbox);
    assert_eq!(before["supervised"], true);
    server.kill();
    assert_eq!(ready(&sandbox)["supervised"], false);
    let status = sandbox.run("ds4", &["ctl", "status"]);
    assert!(String::from_utf8_lossy(&status.stdout).contains("not supervised"), "{status:?}");
    let refused = sandbox.run("ds4", &["ctl", "restart"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(3), "{error}");
    assert!(error.contains("[no_supervisor]") && error.contains("`ds4 serve`") && error.contains("--force"), "{error}");
    assert_eq!(ready(&sandbox)["worker"]["pid"], before["worker"]["pid"], "it serves on");
    assert!(sandbox.try_ctl(&["restart", "--force", "--wait", "0"]).unwrap_err().contains("no successor"));
    wait_for("its end", START, || (!alive(pid(&before, "worker"))).then_some(()));

    // One that a service manager started is that manager's to restart.
    let worker = sandbox.worker(&[]);
    assert_eq!(sandbox.ctl(&["status"])["supervised"], true);
    drop(worker);
}

#[test]
fn a_runtime_directory_that_was_removed_is_made_again() {
    let sandbox = Sandbox::new();
    let mut server = serve(&sandbox, &[]);
    let before = ready(&sandbox);
    let answer = http::greedy(address(&before), "The capital of France is", 8);
    // With the logs of this test; what holds them open goes on.
    std::fs::remove_dir_all(sandbox.dir()).unwrap();
    let again = wait_for("all three in a directory", START, || {
        let status = sandbox.try_ctl(&["status"]).ok()?;
        let there = status["supervisor_pid"].is_u64() && status["owner"]["pid"].is_u64();
        (there && status["worker"]["state"] == "ready").then_some(status)
    });
    for who in ["owner", "worker"] {
        assert_eq!(pid(&again, who), pid(&before, who), "nothing was loaded or started again");
    }
    // Once more, and what the directory is needed for follows at once.
    std::fs::remove_dir_all(sandbox.dir()).unwrap();
    signal_pid(pid(&before, "worker"), Signal::SIGKILL);
    assert_eq!(http::greedy(address(&before), "The capital of France is", 8), answer);
    let after = ready(&sandbox);
    assert_eq!(pid(&after, "owner"), pid(&before, "owner"));
    assert_ne!(pid(&after, "worker"), pid(&before, "worker"));
    sandbox.ctl(&["stop"]);
    assert_eq!(server.wait_end(START).code(), Some(0));
    let left: Vec<_> = std::fs::read_dir(sandbox.dir()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name.to_str().unwrap().ends_with(".lock")), "{left:?}");
}

#[test]
fn a_restart_under_load_finishes_what_waits_too() {
    let sandbox = Sandbox::new();
    let _server = serve(&sandbox, &["--max-batch", "1"]);
    let before = ready(&sandbox);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 120, "temperature": 0, "ignore_eos": true});
    let ends_with = || {
        let mut stream = http::Stream::start(address(&before), "/v1/completions", &body);
        std::iter::from_fn(|| stream.next_event()).last().unwrap_or_default()
    };
    let finished = std::thread::scope(|scope| {
        let requests: Vec<_> = (0..4).map(|_| scope.spawn(ends_with)).collect();
        wait_for("a queue", START, || {
            let status = sandbox.try_ctl(&["status"]).ok()?;
            (status["worker"]["running"] == 1 && status["worker"]["queued"] == 3).then_some(())
        });
        assert_eq!(sandbox.ctl(&["restart"])["old_pid"], before["worker"]["pid"]);
        requests.into_iter().map(|r| r.join().unwrap()).collect::<Vec<_>>()
    });
    for last in finished {
        assert_eq!(last["choices"][0]["finish_reason"], "length", "{last}");
    }
}

#[test]
fn a_killed_owner_is_started_again_and_the_worker_moves_to_its_copy() {
    let sandbox = Sandbox::new();
    let server = serve(&sandbox, &[]);
    let before = ready(&sandbox);
    assert_eq!(before["worker"]["weights"], "leased");
    let answer = http::greedy(address(&before), "The capital of France is", 8);
    signal_pid(pid(&before, "owner"), Signal::SIGKILL);
    assert_eq!(http::greedy(address(&before), "The capital of France is", 8), answer);
    // The old worker keeps the old copy in memory, so it must go; requests are answered all the while, but for one whose
    // connection was accepted in the instant of the drain.
    let body = json!({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0});
    let mut turned_away = 0;
    let after = wait_for("a worker with a lease of another owner", START, || {
        match http::post(address(&before), "/v1/completions", &body) {
            (200, reply) => assert_eq!(reply["choices"][0]["text"], answer.as_str()),
            (503, _) => turned_away += 1,
            other => panic!("{other:?}"),
        }
        let status = sandbox.try_ctl(&["status"]).ok()?;
        let moved = status["worker"]["weights"] == "leased" && status["worker"]["state"] == "ready";
        (moved && status["owner"]["pid"].is_u64() && pid(&status, "owner") != pid(&before, "owner")).then_some(status)
    });
    assert!(turned_away <= 1);
    assert_ne!(pid(&after, "worker"), pid(&before, "worker"));
    wait_for("the old worker's end", START, || (!alive(pid(&before, "worker"))).then_some(()));
    let leases = sandbox.ctl(&["leases"]);
    assert_eq!(leases["leases"][0]["pid"], after["worker"]["pid"], "{leases}");
    assert!(server.log().contains("not in memory twice"), "{}", server.log());
}

#[test]
fn a_worker_that_was_taken_over_without_its_owner_moves_to_the_new_one() {
    let sandbox = Sandbox::new();
    let mut first = serve(&sandbox, &[]);
    let before = ready(&sandbox);
    first.kill();
    signal_pid(pid(&before, "owner"), Signal::SIGKILL);
    let second = serve(&sandbox, &[]);
    let after = wait_for("a worker with a lease", START, || {
        let status = sandbox.try_ctl(&["status"]).ok()?;
        (status["worker"]["weights"] == "leased" && status["worker"]["state"] == "ready").then_some(status)
    });
    assert_ne!(pid(&after, "worker"), pid(&before, "worker"), "{}", second.log());
    wait_for("the old worker's end", START, || (!alive(pid(&before, "worker"))).then_some(()));
}

#[test]
fn a_worker_without_its_owner_is_called_an_orphan() {
    let sandbox = Sandbox::new();
    let mut owner = sandbox.owner();
    let worker = sandbox.worker(&[]);
    owner.kill();
    let weights = || sandbox.ctl(&["status"])["worker"]["weights"].clone();
    assert_eq!(weights(), "orphaned");
    let _second = sandbox.owner();
    assert_eq!(weights(), "orphaned", "a new owner's copy is not the one that it uses");
    let said = sandbox.run("ds4", &["ctl", "leases"]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains(&format!("(pid {})", worker.process.pid())) && said.contains("owner that is gone"), "{said}");
}

#[test]
fn an_unloaded_model_makes_the_worker_wait_for_the_next() {
    let sandbox = Sandbox::new();
    let model = starter_model();
    let mut server = serve(&sandbox, &["--start-attempts", "2"]);
    let before = ready(&sandbox);
    let name = before["worker"]["model"].as_str().unwrap().to_string();
    let answer = http::greedy(address(&before), "The capital of France is", 8);
    // A failed load in the owner's list ended such a worker with another exit code.
    let broken = sandbox.file("broken.gguf", "GGUF");
    assert!(sandbox.try_ctl(&["load", broken.to_str().unwrap()]).is_err());
    let reply = sandbox.ctl(&["unload", &name]);
    assert_eq!((&reply["epochs"], &reply["model_left"]), (&1.into(), &false.into()), "{reply}");
    wait_for("the worker to wait", START, || server.log().contains("waits for a model").then_some(()));
    std::thread::sleep(Duration::from_secs(2));
    assert!(server.running(), "{}", server.log());
    let refused = sandbox.run("ds4", &["run", "-p", "Hello"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(3), "{error}");
    assert!(error.contains("holds no model") && error.contains("ds4 ctl load"), "{error}");
    assert!(!error.contains("Start one with"), "one is supervised already: {error}");

    // What waits in the listening socket is answered by the worker that the load brings back.
    let waiting = std::thread::spawn({
        let address = address(&before).to_string();
        move || http::greedy(&address, "The capital of France is", 8)
    });
    sandbox.ctl(&["load", model.to_str().unwrap()]);
    assert_eq!(waiting.join().unwrap(), answer);
    assert_ne!(pid(&ready(&sandbox), "worker"), pid(&before, "worker"));
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait_end(START).code(), Some(0), "{}", server.log());
}

#[test]
fn a_worker_under_another_supervisor_waits_for_a_model_too() {
    let sandbox = Sandbox::new();
    let model = starter_model();
    let _owner = sandbox.owner();
    let name = sandbox.ctl(&["models"])["models"][0]["name"].as_str().unwrap().to_string();
    let broken = sandbox.file("broken.gguf", "no model");
    assert!(sandbox.try_ctl(&["load", broken.to_str().unwrap()]).is_err());
    sandbox.ctl(&["unload", &name]);
    // As the unit starts it.
    let mut worker = sandbox.start("ds4-worker", &["--http", "127.0.0.1:0", "--owner-wait", "50"]);
    std::thread::sleep(Duration::from_millis(500));
    assert!(worker.running(), "{}", worker.log());
    sandbox.ctl(&["load", model.to_str().unwrap()]);
    worker.wait_ready(Duration::from_secs(30));
}

#[test]
fn a_second_model_beside_the_served_one_does_not_confuse_successors() {
    let sandbox = Sandbox::new();
    let model = starter_model();
    let server = serve(&sandbox, &["--start-attempts", "2"]);
    let before = ready(&sandbox);
    sandbox.ctl(&["load", model.to_str().unwrap(), "--name", "other"]);
    signal_pid(pid(&before, "worker"), Signal::SIGKILL);
    let after = wait_for("a successor", START, || {
        let status = sandbox.try_ctl(&["status"]).ok()?;
        (status["worker"]["state"] == "ready" && pid(&status, "worker") != pid(&before, "worker")).then_some(status)
    });
    assert_eq!(after["worker"]["model"], before["worker"]["model"], "{}", server.log());
}

#[test]
fn a_supervisor_is_stopped_in_order_while_its_worker_waits() {
    let sandbox = Sandbox::new();
    let mut server = serve(&sandbox, &[]);
    let before = ready(&sandbox);
    sandbox.ctl(&["unload", before["worker"]["model"].as_str().unwrap()]);
    wait_for("the worker to wait", START, || server.log().contains("waits for a model").then_some(()));
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait_end(START).code(), Some(0), "{}", server.log());
    assert!(!alive(pid(&before, "owner")));
}

#[test]
fn a_failed_takeover_leaves_running_what_runs() {
    let sandbox = Sandbox::new();
    let mut first = serve(&sandbox, &[]);
    let before = ready(&sandbox);
    let answer = http::greedy(address(&before), "The capital of France is", 8);
    first.kill();
    let dev = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/tiny-v4.gguf");
    let broken = sandbox.file("broken.gguf", "no model");
    let refused = |args: &[&str], code: i32| {
        let mut second = sandbox.start("ds4", &[&["serve", "--http", "127.0.0.1:0"], args].concat());
        assert_eq!(second.wait_end(START).code(), Some(code), "{args:?}: {}", second.log());
        let log = second.log();
        assert!(log.contains("Nothing was taken over") && log.contains("ctl stop"), "{log}");
        log
    };
    refused(&["--model", broken.to_str().unwrap()], 4);
    // Another model than the running worker's, which would go on serving its own: before anything is loaded.
    let log = refused(&["--model", dev.to_str().unwrap(), "--allow-dev-models"], 2);
    let starter = starter_model().canonicalize().unwrap();
    for part in [before["worker"]["model"].as_str().unwrap(), starter.to_str().unwrap(), "tiny-v4.gguf"] {
        assert!(log.contains(part), "{part}: {log}");
    }
    assert_eq!(sandbox.ctl(&["models"])["models"].as_array().unwrap().len(), 2, "the starter and the broken one");
    // Long enough for a SIGTERM to have its effect.
    std::thread::sleep(Duration::from_millis(500));
    assert!(alive(pid(&before, "worker")) && alive(pid(&before, "owner")));
    assert_eq!(http::greedy(address(&before), "The capital of France is", 8), answer);

    // One whose worker cannot be started leaves the owner alone, which it had found running.
    signal_pid(pid(&before, "worker"), Signal::SIGKILL);
    wait_for("its end", START, || (!alive(pid(&before, "worker"))).then_some(()));
    // The owner keeps its settings, so this flag comes too late, and the error must not stop at advising it.
    for args in [&["--model", dev.to_str().unwrap()][..], &["--model", dev.to_str().unwrap(), "--allow-dev-models"]] {
        refused(args, 4);
    }
    let mut third = serve(&sandbox, &["--start-attempts", "1", "--", "--model", "no-such-model"]);
    assert_eq!(third.wait_end(START).code(), Some(3), "{}", third.log());
    std::thread::sleep(Duration::from_millis(500));
    assert!(alive(pid(&before, "owner")), "{}", third.log());

    let _fourth = serve(&sandbox, &[]);
    let after = ready(&sandbox);
    assert_eq!(pid(&after, "owner"), pid(&before, "owner"), "and the next takeover works");
    assert_eq!(http::greedy(address(&after), "The capital of France is", 8), answer);
}

#[test]
fn a_worker_beside_other_models_serves_the_one_that_was_asked_for() {
    let dev = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/tiny-v4.gguf");
    let sandbox = Sandbox::new();
    let mut first = serve(&sandbox, &["--allow-dev-models"]);
    let before = ready(&sandbox);
    first.kill();
    signal_pid(pid(&before, "worker"), Signal::SIGKILL);
    wait_for("its end", START, || (!alive(pid(&before, "worker"))).then_some(()));
    let args = ["serve", "--http", "127.0.0.1:0", "--model", dev.to_str().unwrap(), "--allow-dev-models"];
    let second = sandbox.start("ds4", &args);
    let after = wait_for("the second supervisor's worker", START, || {
        let status = sandbox.try_ctl(&["status"]).ok()?;
        (status["worker"]["state"] == "ready").then_some(status)
    });
    assert_eq!(pid(&after, "owner"), pid(&before, "owner"));
    assert_ne!(after["worker"]["model"], before["worker"]["model"], "{}", second.log());
}

#[test]
fn a_refused_model_is_the_last_thing_that_serve_says() {
    let dev = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/tiny-v4.gguf");
    let sandbox = Sandbox::new();
    let mut server = sandbox.start("ds4", &["serve", "--http", "127.0.0.1:0", "--model", dev.to_str().unwrap()]);
    assert_eq!(server.wait_end(START).code(), Some(4), "{}", server.log());
    let log = server.log();
    let last = log.lines().last().unwrap_or_default();
    assert!(last.starts_with("ds4: the weight owner exited with code 4"), "{log}");
    assert!(last.contains("--allow-dev-models") && !last.contains("0 %"), "the cause itself: {last}");
}

#[test]
fn a_prediction_block_alone_is_refused_as_such() {
    let sandbox = Sandbox::new();
    let block = sandbox.dir().join("block.gguf");
    let args = ["gguf", "synth", "--part", "mtp", "--shape", "tiny", "-o", block.to_str().unwrap()];
    assert!(sandbox.run("ds4", &args).status.success());
    let args = ["serve", "--http", "127.0.0.1:0", "--allow-dev-models", "--model", block.to_str().unwrap()];
    let mut server = sandbox.start("ds4", &args);
    assert_eq!(server.wait_end(START).code(), Some(4), "{}", server.log());
    let log = server.log();
    assert!(log.lines().last().unwrap_or_default().contains("is a prediction block and not a model"), "{log}");
    assert!(!log.contains("holds no model") && !log.contains("next try"), "{log}");
}

#[test]
fn failed_loads_are_cleared_by_name_and_watch_prints_states_once() {
    let sandbox = Sandbox::new();
    let owner = sandbox.owner();
    let watch = sandbox.start("ds4", &["ctl", "watch"]);
    wait_for("the first line", START, || watch.log().contains("READY").then_some(()));
    // Leases that come and go are no change of state.
    let worker = sandbox.worker(&[]);
    drop(worker);
    let broken = sandbox.file("broken.gguf", "no model");
    assert!(sandbox.try_ctl(&["load", broken.to_str().unwrap()]).is_err());
    assert_eq!(sandbox.ctl(&["models"])["models"].as_array().unwrap().len(), 2, "{}", owner.log());
    assert_eq!(sandbox.ctl(&["unload", "broken"])["epochs"], 1);
    assert_eq!(sandbox.ctl(&["models"])["models"].as_array().unwrap().len(), 1);
    wait_for("the last line", START, || watch.log().contains("RELEASED").then_some(()));
    let log = watch.log();
    assert_eq!(log.lines().filter(|l| l.ends_with(": READY")).count(), 1, "{log}");
    assert!(log.contains("broken epoch 2: FAILED (") && log.contains("broken epoch 2: RELEASED"), "{log}");
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
