//! The owner's `cuda-vmm` backend and a worker's attach, through a libcuda without a GPU: real processes, real descriptors.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use ds4_tests::card::Card;
use ds4_tests::process::{alive, signal_pid};
use ds4_tests::{Process, Sandbox, starter_model, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;

const SOON: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn owner_command(sandbox: &Sandbox, card: &Card, args: &[&str]) -> Command {
    let mut command = sandbox.command("ds4-weight-owner");
    card.give(&mut command).args(["--allow-dev-models", "--reserve-mib", "16"]).args(args);
    command
}

fn start_owner(sandbox: &Sandbox, card: &Card, args: &[&str]) -> Process {
    Process::start(owner_command(sandbox, card, args), "owner", sandbox.dir())
}

fn ready_owner(sandbox: &Sandbox, card: &Card, model: &Path) -> Process {
    let mut owner = start_owner(sandbox, card, &["--backend", "cuda-vmm", "--model", text(model)]);
    owner.wait_ready(SOON);
    // READY comes before the loader's exit, which until then holds descriptors of its own.
    wait_for("the loader's end", SOON, || children(owner.pid()).is_empty().then_some(()));
    owner
}

fn self_test_command(sandbox: &Sandbox, environment: &[(&'static str, String)], args: &[&str]) -> Command {
    let mut command = sandbox.command("ds4-worker");
    command.envs(environment.iter().cloned()).arg("--self-test").args(args);
    command
}

fn self_test(sandbox: &Sandbox, environment: &[(&'static str, String)], args: &[&str]) -> Output {
    self_test_command(sandbox, environment, args).output().unwrap()
}

fn figures(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refusal(output: &Output) -> (i32, String) {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().unwrap_or(-1), said.lines().last().unwrap_or_default().to_owned())
}

fn blake3(sandbox: &Sandbox) -> String {
    let status = sandbox.ctl(&["models"]);
    status["models"][0]["blake3"].as_str().unwrap_or_else(|| panic!("no hash in {status}")).to_owned()
}

fn children(pid: u32) -> Vec<u32> {
    let said = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    said.split_whitespace().filter_map(|p| p.parse().ok()).collect()
}

fn maps_the_driver(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default().contains("libfake_cuda")
}

/// The loader child, once it has taken device memory.
fn loader_in_the_middle(owner: &Process, card: &Card) -> u32 {
    wait_for("a loader that holds memory", SOON, || {
        let loader = children(owner.pid()).into_iter().find(|p| maps_the_driver(*p))?;
        (card.held().0 > 0).then_some(loader)
    })
}

fn wait_until_free(card: &Card) {
    wait_for("all device memory to be free", SOON, || (card.held().0 == 0).then_some(()));
}

#[test]
fn cuda_vmm_weights_have_the_hash_of_the_file_and_outlive_the_loader() {
    let (sandbox, card) = (Sandbox::new(), Card::new());
    let host = {
        let sandbox = Sandbox::new();
        let _owner = sandbox.owner();
        blake3(&sandbox)
    };
    let owner = ready_owner(&sandbox, &card, &starter_model());
    assert_eq!(blake3(&sandbox), host, "one content, one hash, whatever memory it is in");
    assert!(!maps_the_driver(owner.pid()), "the daemon never initialises CUDA");
    // 92.1 MiB of tensors in allocations of 2 MiB.
    assert_eq!(card.held(), (94 * MIB, 1), "what is left is the daemon's descriptor");
    assert!(owner.log().contains("backend=\"cuda-vmm\" why=\"Fake H200"), "{}", owner.log());
    assert_eq!(sandbox.ctl(&["status"])["owner"]["backend"], "cuda-vmm");

    let seen = figures(&self_test(&sandbox, &card.environment(), &["--verify-weights"]));
    assert_eq!((seen["backend"].as_str(), &seen["verified_bytes"]), (Some("cuda-vmm"), &seen["bytes"]));
    assert_eq!(card.held(), (94 * MIB, 1), "a worker that is gone holds nothing");
}

#[test]
fn cuda_vmm_chunks_lie_side_by_side_and_hash_as_a_whole() {
    let (sandbox, card) = (Sandbox::new(), Card::new().with("FAKE_CUDA_TOTAL_MIB", 1200));
    // An embedding of 1 GiB fills the first chunk exactly; the rest of the model is the second.
    let model = card.model("two-chunks", 1 << 23);
    let _owner = ready_owner(&sandbox, &card, &model);
    let list = sandbox.ctl(&["models"]);
    assert_eq!(list["models"][0]["chunks"], 2, "{list}");
    let seen = figures(&self_test(&sandbox, &card.environment(), &["--verify-weights", "--self-test-cycles", "3"]));
    assert_eq!((&seen["chunks"], &seen["verified_bytes"]), (&2.into(), &seen["bytes"]));
    assert_eq!(card.held().1, 2);
}

#[test]
fn cuda_vmm_attaching_two_hundred_times_loses_nothing() {
    let (sandbox, card) = (Sandbox::new(), Card::new());
    let owner = ready_owner(&sandbox, &card, &card.model("m", 10_000));
    let before = (card.held(), std::fs::read_dir(format!("/proc/{}/fd", owner.pid())).unwrap().count());
    let seen = figures(&self_test(&sandbox, &card.environment(), &["--self-test-cycles", "200"]));
    let free = seen["device_free_bytes"].as_array().unwrap();
    assert!(seen["cycles"] == 200 && free[0] == free[1] && free[1] == free[2], "{seen}");
    let after = wait_for("the last lease's end", SOON, || {
        let now = (card.held(), std::fs::read_dir(format!("/proc/{}/fd", owner.pid())).unwrap().count());
        // The daemon may still have been letting go of its loader before.
        (now.0 == before.0 && now.1 <= before.1).then_some(now)
    });
    assert_eq!(after.0, before.0);
}

#[test]
fn cuda_vmm_a_killed_loader_leaves_nothing_and_the_daemon_goes_on() {
    let (sandbox, card) = (Sandbox::new(), Card::new().with("FAKE_CUDA_COPY_US", 20_000));
    let mut owner = start_owner(&sandbox, &card, &["--backend", "cuda-vmm"]);
    owner.wait_ready(SOON);
    // 128 MiB: 128 copies, 2.5 s at least.
    let model = card.model("m", 1 << 20);
    let mut ctl = sandbox.command("ds4");
    ctl.args(["ctl", "load", text(&model)]);
    let mut load = Process::start(ctl, "load", sandbox.dir());
    let loader = loader_in_the_middle(&owner, &card);
    assert!(!maps_the_driver(owner.pid()), "only the loader has opened the driver");
    signal_pid(loader, Signal::SIGKILL);
    assert!(!load.wait_end(SOON).success());
    assert!(load.log().contains("killed by signal 9"), "{}", load.log());
    wait_until_free(&card);
    assert!(owner.running());
    assert_eq!(sandbox.ctl(&["models"])["models"][0]["state"], "FAILED");
    // And the same daemon loads it when asked again.
    let quick = card.model("m", 10_000);
    sandbox.ctl(&["load", text(&quick)]);
    figures(&self_test(&sandbox, &card.environment(), &["--verify-weights"]));
}

#[test]
fn cuda_vmm_a_daemon_killed_mid_load_takes_its_loader_along() {
    let (sandbox, card) = (Sandbox::new(), Card::new().with("FAKE_CUDA_COPY_US", 20_000));
    let model = card.model("m", 1 << 20);
    let mut owner = start_owner(&sandbox, &card, &["--backend", "cuda-vmm", "--model", text(&model)]);
    let loader = loader_in_the_middle(&owner, &card);
    owner.kill();
    wait_for("the loader's end", SOON, || (!alive(loader)).then_some(()));
    wait_until_free(&card);
}

#[test]
fn cuda_vmm_weights_stay_under_a_worker_whose_owner_was_killed() {
    let (sandbox, card) = (Sandbox::new(), Card::new());
    let mut owner = ready_owner(&sandbox, &card, &starter_model());
    let bytes = card.held().0;
    // 92 MiB are read back in pieces of 4 MiB: 23 copies, 2.3 s at least.
    let slow = card.seen_with("FAKE_CUDA_COPY_US", 100_000);
    let command = self_test_command(&sandbox, &slow, &["--verify-weights"]);
    let mut worker = Process::start(command, "worker", sandbox.dir());
    wait_for("a worker that has mapped the weights", SOON, || (card.held().1 >= 2).then_some(()));
    owner.kill();
    assert_eq!(card.held().0, bytes, "the worker's mapping keeps the memory");
    assert_eq!(worker.wait_end(SOON).code(), Some(0), "{}", worker.log());
    assert!(worker.log().contains("\"verified_bytes\": 96576768"), "{}", worker.log());
    wait_until_free(&card);
}

#[test]
fn cuda_vmm_a_killed_worker_costs_the_owner_nothing() {
    let (sandbox, card) = (Sandbox::new(), Card::new());
    let mut owner = ready_owner(&sandbox, &card, &starter_model());
    let held = card.held();
    let slow = card.seen_with("FAKE_CUDA_COPY_US", 100_000);
    let command = self_test_command(&sandbox, &slow, &["--verify-weights"]);
    let mut worker = Process::start(command, "worker", sandbox.dir());
    wait_for("a worker that has mapped the weights", SOON, || (card.held().1 > held.1).then_some(()));
    worker.kill();
    wait_for("the lease's end", SOON, || (sandbox.ctl(&["models"])["models"][0]["leases"] == 0).then_some(()));
    assert_eq!(card.held(), held);
    assert!(owner.running());
    figures(&self_test(&sandbox, &card.environment(), &["--verify-weights"]));
}

/// Every function by which a load can run out of memory, and two ways in which a device fails for good.
#[test]
fn cuda_vmm_each_failing_call_of_a_load_is_a_named_refusal() {
    let cases = [
        ("cuDevicePrimaryCtxRetain:1:2", "cuda_error", "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemAddressReserve:1:2", "not_enough_memory", "address space for"),
        ("cuMemCreate:1:2", "not_enough_memory", "chunk 0 of 1"),
        ("cuMemExportToShareableHandle:1:2", "cuda_error", "chunk 0 of 1"),
        ("cuMemMap:1:1", "cuda_error", "chunk 0 of 1"),
        ("cuMemSetAccess:1:1", "cuda_error", "access to the weights"),
        ("cuMemHostAlloc:1:2", "not_enough_memory", "a page-locked buffer"),
        ("cuMemHostAlloc:3:2", "not_enough_memory", "page-locked buffers"),
        ("cuStreamCreate:1:2", "cuda_error", "cuStreamCreate"),
        ("cuMemcpyHtoDAsync_v2:5:700", "cuda_device_lost", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuEventSynchronize:20:719", "cuda_device_lost", "CUDA_ERROR_LAUNCH_FAILED"),
        // The last copies, which nobody waits for but the end.
        ("cuStreamSynchronize:1:719", "cuda_device_lost", "CUDA_ERROR_LAUNCH_FAILED"),
    ];
    for (plan, code, part) in cases {
        let (sandbox, card) = (Sandbox::new(), Card::new().with("FAKE_CUDA_FAIL", plan));
        let mut owner = start_owner(&sandbox, &card, &["--backend", "cuda-vmm"]);
        owner.wait_ready(SOON);
        let model = card.model("m", 400_000);
        let said = sandbox.try_ctl(&["load", text(&model)]).unwrap_err();
        assert!(said.contains(code) && said.contains(part), "{plan}: {said}");
        wait_until_free(&card);
        assert!(owner.running(), "{plan}: {}", owner.log());
        assert_eq!(sandbox.ctl(&["models"])["models"][0]["error_code"], code, "{plan}");
    }
}

/// Whatever allocation it is: `DS4_CUDA_REFUSE` counts them, so that one that is added later is among them.
#[test]
fn cuda_vmm_any_refused_allocation_of_a_load_or_an_attach_is_a_typed_refusal() {
    let mut refused = 0;
    for n in 1.. {
        let (sandbox, card) = (Sandbox::new(), Card::new().with("DS4_CUDA_REFUSE", n));
        let mut owner = start_owner(&sandbox, &card, &["--backend", "cuda-vmm"]);
        owner.wait_ready(SOON);
        let model = card.model("m", 400_000);
        let Err(said) = sandbox.try_ctl(&["load", text(&model)]) else { break };
        assert!(said.contains("not_enough_memory"), "{n}: {said}");
        assert!(owner.log().contains(&format!("DS4_CUDA_REFUSE={n}: cuMem")), "{n}: {}", owner.log());
        wait_until_free(&card);
        assert!(owner.running(), "{n}: {}", owner.log());
        refused = n;
    }
    // Address space, a chunk, and the buffers of some threads.
    assert!(refused >= 5, "{refused}");

    let (sandbox, card) = (Sandbox::new(), Card::new());
    let _owner = ready_owner(&sandbox, &card, &card.model("m", 10_000));
    let held = card.held();
    let (code, said) = refusal(&self_test(&sandbox, &card.seen_with("DS4_CUDA_REFUSE", 1), &[]));
    assert!(code == 5 && said.contains("cuMemAddressReserve: not enough memory"), "{code} {said}");
    assert_eq!(card.held(), held);
}

#[test]
fn cuda_vmm_a_model_larger_than_the_card_is_refused_before_the_first_allocation() {
    let (sandbox, card) =
        (Sandbox::new(), Card::new().with("FAKE_CUDA_TOTAL_MIB", 100).with("FAKE_CUDA_FAIL", "cuMemCreate:1:999"));
    let model = starter_model();
    let mut owner = start_owner(&sandbox, &card, &["--backend", "cuda-vmm", "--model", text(&model)]);
    assert_eq!(owner.wait_end(SOON).code(), Some(5), "{}", owner.log());
    let log = owner.log();
    // 94 MiB of weights, 1.3 MiB of manifest and 16 MiB to spare do not fit into 100 MiB.
    assert!(log.contains("are missing to load smollm2-135m-instruct") && log.contains("(11.3 MiB)"), "{log}");
    assert!(log.contains("according to the driver of Fake H200") && !log.contains("999"), "{log}");
}

#[test]
fn cuda_vmm_is_what_auto_takes_where_there_is_a_device() {
    let model = starter_model();
    let plan = |card: &Card, backend: &str| {
        let args = ["--backend", backend, "--dry-run", "--model", text(&model)];
        let output = owner_command(&Sandbox::new(), card, &args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.code().unwrap(), said)
    };
    let line = |(code, said): (i32, String), part: &str| assert!(code == 0 && said.contains(part), "{part}: {said}");
    line(
        plan(&Card::new(), "auto"),
        "backend    cuda-vmm (Fake H200 (GPU-11111111-1111-1111-1111-111111111111) is there",
    );
    line(plan(&Card::new(), "memfd"), "backend    memfd (as configured)");
    let lacks = [
        (Card::new().with("LD_LIBRARY_PATH", "/nonexistent"), "libcuda.so.1 was not found"),
        (Card::new().with("FAKE_CUDA_DEVICES", 0), "has no device"),
        (Card::new().with("FAKE_CUDA_VERSION", 12_000), "supports CUDA 12.0, but 12.8 is needed"),
        (Card::new().with("FAKE_CUDA_VMM", 0), "no virtual memory management"),
    ];
    for (card, why) in &lacks {
        line(
            plan(card, "auto"),
            &format!("backend    memfd ({}", if why.starts_with("libcuda") { "no CUDA driver" } else { "" }),
        );
        line(plan(card, "auto"), why);
        let (code, said) = plan(card, "cuda-vmm");
        assert!(code == 2 && said.contains(why) && said.contains("--backend memfd"), "{said}");
    }
    // A device that is there and broken is an error for auto too.
    let (code, said) = plan(&Card::new().with("FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain:1:999"), "auto");
    assert!(code == 1 && said.contains("CUDA_ERROR_UNKNOWN"), "{said}");
    // A device that shares the machine's memory has what both think is free.
    let shared = Card::new().with("FAKE_CUDA_INTEGRATED", 1);
    line(plan(&shared, "cuda-vmm"), "(the driver of Fake H200");
    let shared = shared.with("FAKE_CUDA_TOTAL_MIB", 1 << 24);
    let (_, said) = plan(&shared, "cuda-vmm");
    assert!(said.contains("(MemAvailable)") || said.contains("(cgroup limit"), "{said}");
}

#[test]
fn cuda_vmm_workers_that_cannot_map_the_weights_say_why() {
    let (sandbox, card) = (Sandbox::new(), Card::new());
    let _owner = ready_owner(&sandbox, &card, &starter_model());
    let refused = |environment: &[(&'static str, String)]| refusal(&self_test(&sandbox, environment, &[]));
    let (code, said) = refused(&card.seen_with("FAKE_CUDA_UUID", 34));
    assert!(code == 3 && said.contains("[device_mismatch]"), "{code} {said}");
    assert!(said.contains("GPU-11111111") && said.contains("GPU-22222222"), "{said}");
    let (code, said) = refused(&card.seen_with("LD_LIBRARY_PATH", "/nonexistent"));
    assert!(code == 2 && said.contains("libcuda.so.1 was not found"), "{code} {said}");
    let (code, said) = refused(&card.seen_with("FAKE_CUDA_FAIL", "cuMemImportFromShareableHandle:1:1"));
    assert!(code == 3 && said.contains("chunk 0 of model `smollm2-135m-instruct`"), "{code} {said}");
    let (code, said) = refused(&card.seen_with("FAKE_CUDA_FAIL", "cuMemcpyDtoHAsync_v2:2:700"));
    assert!(code == 3 && said.contains("[cuda_device_lost]"), "{code} {said}");
    // A worker without kernels, when it is to compute: configuration, which another attempt does not cure.
    let mut command = sandbox.command("ds4-worker");
    let output = card.give(&mut command).args(["--http", "127.0.0.1:0"]).output().unwrap();
    let (code, said) = refusal(&output);
    assert!(code == 2 && said.contains("[no_cuda_kernels]") && said.contains("Fake H200 (GPU-1111"), "{code} {said}");
    assert!(said.contains("--features cuda") && said.contains("--backend memfd"), "{said}");
    // None of them left anything behind.
    assert_eq!(card.held(), (94 * MIB, 1));
}

#[test]
fn cuda_vmm_unloading_gives_the_memory_back() {
    let (sandbox, card) = (Sandbox::new(), Card::new());
    let _owner = ready_owner(&sandbox, &card, &starter_model());
    sandbox.ctl(&["unload", "smollm2-135m-instruct"]);
    wait_until_free(&card);
}

#[test]
fn cuda_vmm_bench_load_measures_loads_and_attaches() {
    let (sandbox, card) = (Sandbox::new(), Card::new());
    let model = starter_model();
    let mut command = sandbox.command("ds4");
    card.give(&mut command).args(["bench", "--json", "load", "--backend", "cuda-vmm", "--repeats", "2"]);
    let output = command.args(["--attach-cycles", "5", "--model", text(&model)]).output().unwrap();
    let report = figures(&output);
    assert!(report["gib_per_s"]["copy"].as_f64().unwrap() > 0.0, "{report}");
    assert_eq!((&report["attach"]["cycles"], &report["attach"]["backend"]), (&5.into(), &"cuda-vmm".into()));
    assert_eq!(report["attach"]["verified_bytes"], 96_576_768, "{report}");
    wait_until_free(&card);
}
