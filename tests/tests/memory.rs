//! Weights are held once, whoever uses them.

use std::time::Duration;

use ds4_tests::memory::{self, descriptors, smaps};
use ds4_tests::{Sandbox, http, starter_model, wait_for};
use serde_json::json;

const MIB: u64 = 1 << 20;

/// Touches every weight and fills most of a 2k context.
fn exercise(address: &str) {
    let body = json!({"prompt": vec![1000; 1900], "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let (code, answer) = http::post(address, "/v1/completions", &body);
    assert_eq!(code, 200, "{answer}");
}

#[test]
fn a_second_worker_adds_no_weight_memory_and_both_stay_small() {
    let sandbox = Sandbox::new();
    let owner = sandbox.owner();
    let weights = std::fs::metadata(starter_model()).unwrap().len();
    let held = sandbox.ctl(&["status"])["owner"]["weight_bytes"].as_u64().unwrap();
    assert!(held >= weights * 95 / 100 && held <= weights * 105 / 100, "{held} of {weights}");

    // Nothing of the weights is the owner's own memory.
    let own = memory::status(owner.pid(), "RssAnon") + memory::status(owner.pid(), "RssFile");
    assert!(own <= 20 * MIB, "the owner uses {} MiB beyond the weights", own / MIB);

    let first = sandbox.worker(&["--ctx", "2048"]);
    exercise(&first.http);
    // A worker's own socket has one name, so the second one gets a directory in which the owner's appear as links.
    let other = sandbox.dir().join("w2");
    std::fs::create_dir(&other).unwrap();
    for socket in ["broker.sock", "owner.sock"] {
        std::os::unix::fs::symlink(sandbox.dir().join(socket), other.join(socket)).unwrap();
    }
    let other = other.to_str().unwrap();
    let args = ["--http", "127.0.0.1:0", "--ctx", "2048", "--runtime-dir", other];
    let mut second = sandbox.start("ds4-worker", &args);
    second.wait_ready(Duration::from_secs(30));
    let output = sandbox.run("ds4", &["ctl", "--json", "status", "--runtime-dir", other]);
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    exercise(status["worker"]["http"].as_str().unwrap());

    // Proportional shares of the weights add up to one copy, held by three processes.
    let shares = smaps(first.process.pid(), "Pss_Shmem") + smaps(second.pid(), "Pss_Shmem");
    assert!(shares <= held * 102 / 100, "{} MiB shared for {} MiB of weights", shares / MIB, held / MIB);
    assert!(smaps(second.pid(), "Rss") > held / 2, "the second worker really has them mapped");
    for pid in [first.process.pid(), second.pid()] {
        let private = smaps(pid, "Private_Dirty") + smaps(pid, "Private_Clean");
        assert!(private <= 150 * MIB, "worker {pid} has {} MiB of its own", private / MIB);
    }
    assert_eq!(sandbox.ctl(&["status"])["owner"]["weight_bytes"], held);
    assert_eq!(sandbox.ctl(&["leases"])["leases"].as_array().unwrap().len(), 2);
}

#[test]
fn killed_workers_leave_no_lease_and_no_descriptor_behind() {
    let sandbox = Sandbox::new();
    let owner = sandbox.owner();
    let leases = |n: usize| {
        wait_for("leases", Duration::from_secs(5), || {
            (sandbox.ctl(&["leases"])["leases"].as_array()?.len() == n).then_some(())
        });
    };
    let before = descriptors(owner.pid());
    for _ in 0..3 {
        let mut worker = sandbox.worker(&[]);
        leases(1);
        worker.process.kill();
        leases(0);
    }
    wait_for("descriptors", Duration::from_secs(5), || (descriptors(owner.pid()) <= before).then_some(()));
}
