//! Models that must be refused, and owners that are not there: exit codes and sentences of the real binaries.

use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use ds4_tests::{Sandbox, http, starter_model};
use nix::sys::signal::Signal;
use serde_json::json;

const SOON: Duration = Duration::from_secs(5);

/// Starts an owner with `model`; it must end with `code` within 5 s and say `wanted`.
fn refused(sandbox: &Sandbox, model: &Path, code: i32, wanted: &[&str]) {
    let mut owner = sandbox.start("ds4-weight-owner", &["--model", model.to_str().unwrap()]);
    assert_eq!(owner.wait_end(SOON).code(), Some(code), "{}: {}", model.display(), owner.log());
    for text in wanted {
        assert!(owner.log().contains(text), "{}: no `{text}` in {}", model.display(), owner.log());
    }
}

#[test]
fn a_missing_model_file_is_named() {
    let sandbox = Sandbox::new();
    refused(&sandbox, Path::new("/nonexistent/m.gguf"), 4, &["/nonexistent/m.gguf"]);
}

#[test]
fn g6_files_that_are_no_gguf_are_called_by_their_name() {
    let sandbox = Sandbox::new();
    let safetensors = [&64_u64.to_le_bytes()[..], br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32"}} "#].concat();
    let cases: [(&str, &[u8], &str); 4] = [
        ("page.gguf", b"<!DOCTYPE html>\n<html><body>Not found</body></html>", "HTML"),
        ("lfs.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n", "LFS"),
        ("empty.gguf", b"", "empty"),
        ("st.gguf", &safetensors, "safetensors"),
    ];
    for (name, content, wanted) in cases {
        let path = sandbox.file(name, content);
        let mut owner = sandbox.start("ds4-weight-owner", &["--model", path.to_str().unwrap()]);
        assert_eq!(owner.wait_end(SOON).code(), Some(4), "{name}: {}", owner.log());
        assert!(owner.log().to_lowercase().contains(&wanted.to_lowercase()), "{name}: {}", owner.log());
    }
}

#[test]
fn g5_a_truncated_model_is_refused_before_anything_is_mapped() {
    let sandbox = Sandbox::new();
    let path = sandbox.dir().join("cut.gguf");
    std::fs::copy(starter_model(), &path).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let full = file.metadata().unwrap().len();
    for len in [full - 1, full / 2, 1000, 20] {
        file.set_len(len).unwrap();
        refused(&sandbox, &path, 4, &["cut.gguf"]);
    }
}

#[test]
fn g3_a_tiny_file_that_asks_for_gigabytes_gets_nothing() {
    // Magic, version 3, 1 tensor, 2^40 metadata entries, then a key of 2^62 bytes.
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend((1_u64 << 40).to_le_bytes());
    bytes.extend((1_u64 << 62).to_le_bytes());
    bytes.resize(160, 0);
    let sandbox = Sandbox::new();
    let path = sandbox.file("greedy.gguf", bytes);
    refused(&sandbox, &path, 4, &["greedy.gguf"]);
}

#[test]
fn m8_too_little_memory_has_its_own_exit_code_and_names_the_lever() {
    let sandbox = Sandbox::new();
    let model = starter_model();
    let args = ["--model", model.to_str().unwrap(), "--reserve-mib", "100000000"];
    let mut owner = sandbox.start("ds4-weight-owner", &args);
    assert_eq!(owner.wait_end(SOON).code(), Some(5), "{}", owner.log());
    assert!(owner.log().contains("reserve"), "{}", owner.log());
    let output = sandbox.run("ds4-weight-owner", &[&args[..], &["--dry-run"]].concat());
    assert_eq!(output.status.code(), Some(5), "the preflight says the same");
}

#[test]
fn a_dry_run_prints_the_plan_and_starts_nothing() {
    let sandbox = Sandbox::new();
    let model = starter_model();
    let output = sandbox.run("ds4-weight-owner", &["--dry-run", "--model", model.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!output.stdout.is_empty());
    assert!(!sandbox.dir().join("owner.sock").exists());
}

#[test]
fn l2_one_changed_byte_with_the_same_size_and_time_is_another_model() {
    let sandbox = Sandbox::new();
    let path = sandbox.dir().join("model.gguf");
    std::fs::copy(starter_model(), &path).unwrap();
    let owner = sandbox.start("ds4-weight-owner", &[]);
    let mut owner = owner;
    owner.wait_ready(SOON);
    let shown = path.to_str().unwrap();
    sandbox.ctl(&["load", shown]);
    let first = sandbox.ctl(&["models"])["models"][0].clone();
    let hash = first["blake3"].as_str().unwrap().to_string();

    let mut file = std::fs::File::options().write(true).open(&path).unwrap();
    let (len, time) = (file.metadata().unwrap().len(), file.metadata().unwrap().modified().unwrap());
    let middle = len / 2;
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_exact_at(&std::fs::File::open(&path).unwrap(), &mut byte, middle).unwrap();
    file.seek(SeekFrom::Start(middle)).unwrap();
    file.write_all(&[byte[0] ^ 1]).unwrap();
    file.set_modified(time).unwrap();
    assert_eq!(file.metadata().unwrap().len(), len);

    let error = sandbox.try_ctl(&["load", shown, "--reload", "--expect-blake3", &hash]).unwrap_err();
    assert!(error.contains(&hash[..16]) || error.contains("blake3") || error.contains("BLAKE3"), "{error}");
    let models = sandbox.ctl(&["models"]);
    let ready: Vec<_> =
        models["models"].as_array().unwrap().iter().filter(|m| m["state"] == "READY").cloned().collect();
    assert_eq!(ready.len(), 1, "{models}");
    assert_eq!(ready[0]["blake3"], hash.as_str(), "the good epoch is still there");
}

#[test]
fn a_second_load_of_the_same_model_joins_the_first() {
    let sandbox = Sandbox::new();
    let _owner = sandbox.owner();
    let before = sandbox.ctl(&["status"]);
    sandbox.ctl(&["load", starter_model().to_str().unwrap()]);
    let after = sandbox.ctl(&["status"]);
    assert_eq!(after["models"].as_array().unwrap().len(), 1, "{after}");
    assert_eq!(after["models"][0]["epoch"], before["models"][0]["epoch"]);
    assert_eq!(after["owner"]["weight_bytes"], before["owner"]["weight_bytes"]);
}

#[test]
fn l4_a_worker_without_an_owner_ends_within_five_seconds_with_the_cause() {
    let sandbox = Sandbox::new();
    let begun = Instant::now();
    let mut worker = sandbox.start("ds4-worker", &["--http", "127.0.0.1:0"]);
    assert_eq!(worker.wait_end(SOON).code(), Some(3), "{}", worker.log());
    assert!(begun.elapsed() < SOON);
    assert!(worker.log().contains("broker.sock"), "{}", worker.log());
}

#[test]
fn l4_a_worker_whose_port_is_taken_ends_within_five_seconds_with_the_cause() {
    let sandbox = Sandbox::new();
    let _owner = sandbox.owner();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut worker = sandbox.start("ds4-worker", &["--http", &address]);
    let status = worker.wait_end(SOON);
    assert!(!status.success());
    assert!(worker.log().contains(&address), "{}", worker.log());
}

#[test]
fn l7_a_refused_worker_hears_a_code_and_a_sentence() {
    let sandbox = Sandbox::new();
    let _owner = sandbox.owner();
    let mut worker = sandbox.start("ds4-worker", &["--http", "127.0.0.1:0", "--model", "no-such-model"]);
    assert_eq!(worker.wait_end(SOON).code(), Some(3), "{}", worker.log());
    assert!(worker.log().contains("no-such-model"), "{}", worker.log());
    assert!(
        worker.log().contains("unknown_model") || worker.log().contains("no_such_model"),
        "a code: {}",
        worker.log()
    );
}

#[test]
fn l6_an_owner_that_is_told_to_stop_waits_for_its_readers() {
    let sandbox = Sandbox::new();
    let mut owner = sandbox.owner();
    let mut worker = sandbox.worker(&[]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": true});
    let mut stream = http::Stream::start(&worker.http, "/v1/completions", &body);
    assert!(stream.next_event().is_some());
    owner.signal(Signal::SIGTERM);
    std::thread::sleep(Duration::from_millis(300));
    assert!(owner.running(), "a reader is still there: {}", owner.log());
    assert!(stream.next_event().is_some(), "and it goes on generating");
    drop(stream);
    worker.process.signal(Signal::SIGTERM);
    assert_eq!(worker.process.wait_end(Duration::from_secs(30)).code(), Some(0), "{}", worker.process.log());
    assert_eq!(owner.wait_end(Duration::from_secs(10)).code(), Some(0), "{}", owner.log());
}

#[test]
fn an_unusable_runtime_directory_is_named() {
    let sandbox = Sandbox::new();
    let file = sandbox.file("in-the-way", "");
    let dir = file.join("sub");
    for name in ["ds4-weight-owner", "ds4-worker"] {
        let mut process = sandbox.start(name, &["--runtime-dir", dir.to_str().unwrap()]);
        assert!(!process.wait_end(SOON).success());
        assert!(process.log().contains("in-the-way"), "{name}: {}", process.log());
    }
}
