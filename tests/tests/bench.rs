//! `ds4 bench`: what it starts ends with it, and it says how far it is.

use std::time::Duration;

use ds4_tests::process::alive;
use ds4_tests::{Process, Sandbox, starter_model, wait_for};

const SOON: Duration = Duration::from_secs(60);

/// A benchmark with its temporary files in the sandbox.
fn bench(sandbox: &Sandbox, args: &[&str]) -> Process {
    let mut command = sandbox.command("ds4");
    command.arg("bench").args(args).env("TMPDIR", sandbox.dir());
    Process::start(command, "bench", sandbox.dir())
}

/// Processes that `pid` started.
fn children(pid: u32) -> Vec<u32> {
    let parent = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let all = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
    all.filter(|p| parent(p) == Some(pid)).collect()
}

fn ends_with(mut bench: Process, started: usize) {
    let pid = bench.pid();
    let children = wait_for("its processes", SOON, || Some(children(pid)).filter(|c| c.len() == started));
    // Their own first lines of `main` come before anything that shows.
    std::thread::sleep(Duration::from_millis(300));
    bench.kill();
    wait_for("their end", SOON, || children.iter().all(|pid| !alive(*pid)).then_some(()));
}

#[test]
fn a_killed_kernel_benchmark_leaves_no_worker_running() {
    let sandbox = Sandbox::new();
    // Long enough that it cannot end by itself meanwhile.
    let bench = bench(&sandbox, &["kernel", "all", "--device", "cpu", "--rows", "4096"]);
    wait_for("progress", SOON, || bench.log().contains("checking and timing ").then_some(()));
    assert!(bench.log().contains("(1 of "), "{}", bench.log());
    ends_with(bench, 1);
}

#[test]
fn a_killed_benchmark_leaves_no_owner_and_worker_running() {
    let sandbox = Sandbox::new();
    let model = starter_model();
    let model = model.to_str().unwrap();
    ends_with(bench(&sandbox, &["throughput", "--model", model, "--at", "1024", "--streams", "1"]), 2);
}
