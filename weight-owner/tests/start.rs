//! Starts that must fail, and how: the exit code, the cause on stderr, within five seconds, nothing left behind.

mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ds4_manifests::Value;
use support::{Dir, LIMIT, Owner, command, run_to_exit, tiny, wait};

/// Starts with `--model path` plus `args`; gives exit code and stderr.
fn start(dir: &Dir, path: &Path, args: &[&str]) -> (i32, String) {
    let (code, stderr, _) = run_to_exit(command(dir, args).arg("--model").arg(path));
    assert!(!dir.join("run/broker.sock").exists() && !dir.join("run/owner.sock").exists(), "sockets are left behind");
    (code, stderr)
}

fn assert_refused(dir: &Dir, path: &Path, code: &str, parts: &[&str]) {
    let (exit, stderr) = start(dir, path, &[]);
    assert_eq!(exit, 4, "{stderr}");
    let last = stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("ds4-weight-owner: ") && last.ends_with(&format!("[{code}]")), "{code}: {stderr}");
    for part in parts {
        assert!(last.contains(part), "{part:?} is not in {last:?}");
    }
}

#[test]
fn l8_model_without_a_file() {
    let dir = Dir::new();
    assert_refused(&dir, &dir.join("absent.gguf"), "file_not_found", &["absent.gguf", "ds4 pull"]);
    // Found out before anything is bound or forked.
    assert!(!dir.join("run").exists());
}

#[test]
fn l4_unreadable_paths() {
    let dir = Dir::new();
    assert_refused(&dir, dir.path(), "not_a_file", &["directory"]);
    let file = dir.tiny(1);
    assert_refused(&dir, &file.join("below.gguf"), "file_not_found", &["below.gguf"]);
    let pipe = dir.join("pipe.gguf");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_refused(&dir, &pipe, "not_a_file", &["pipe"]);
}

#[test]
fn l4_truncated_file() {
    let dir = Dir::new();
    let path = dir.tiny(1);
    let len = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
    assert_refused(&dir, &path, "truncated_file", &["tiny-1.gguf", "output_norm.weight"]);
    fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    // 24 bytes of fixed header, so 76 are left.
    assert_refused(&dir, &path, "count_too_large", &["76 bytes are left"]);
}

#[test]
fn l4_wrong_magic_and_empty_file() {
    let dir = Dir::new();
    let path = dir.join("page.gguf");
    fs::write(&path, "<!DOCTYPE html><html><body>404</body></html>").unwrap();
    assert_refused(&dir, &path, "not_a_gguf", &["HTML"]);
    fs::write(&path, "").unwrap();
    assert_refused(&dir, &path, "not_a_gguf", &["empty"]);
}

#[test]
fn l4_missing_and_foreign_shards() {
    let dir = Dir::new();
    let shards = tiny(300, 1).write_split(dir.path(), "m", 3).unwrap();
    let hidden = dir.join("hidden");
    fs::rename(&shards[1], &hidden).unwrap();
    assert_refused(&dir, &shards[0], "missing_shard", &["shard 2 of 3"]);
    // The second shard of another model, with the same name and counts but tensors of the first.
    let others = tiny(300, 1).metadata("general.author", Value::String("x".into()));
    fs::create_dir(dir.join("other")).unwrap();
    let others = others.write_split(&dir.join("other"), "m", 3).unwrap();
    fs::copy(&others[0], &shards[1]).unwrap();
    assert_refused(&dir, &shards[0], "foreign_shard", &["shard 2 of 3"]);
    // With the right one it is a model.
    fs::rename(&hidden, &shards[1]).unwrap();
    let owner = Owner::start(dir, &["--model", shards[2].to_str().unwrap()]);
    assert_eq!(owner.attach("").unwrap().model, "tiny-1");
}

#[test]
fn l4_unsupported_family() {
    let dir = Dir::new();
    let path = dir.join("m.gguf");
    let model = ds4_manifests::GgufWriter::new().metadata("general.architecture", Value::String("mamba".into()));
    model.write_to(&path).unwrap();
    assert_refused(&dir, &path, "unsupported_family", &["mamba", "llama"]);
}

#[test]
fn development_models_need_the_flag() {
    let dir = Dir::new();
    let path = dir.tiny(1);
    let (exit, stderr) = start(&dir, &path, &["--allow-dev-models=false"]);
    assert_eq!(exit, 4, "{stderr}");
    assert!(stderr.contains("no_catalog_entry") && stderr.contains("nearest"), "{stderr}");
}

#[test]
fn m8_not_enough_memory_has_its_own_exit_code() {
    let dir = Dir::new();
    let path = dir.tiny(1);
    let (exit, stderr) = start(&dir, &path, &["--reserve-mib", "1000000000"]);
    assert_eq!(exit, 5, "{stderr}");
    let last = stderr.lines().last().unwrap();
    assert!(last.contains("are missing to load tiny-1") && last.contains("--reserve-mib"), "{last}");
    assert!(last.ends_with("[not_enough_memory]"), "{last}");
}

#[test]
fn m2_the_plan_is_printed_and_judged_before_anything_is_allocated() {
    let dir = Dir::new();
    let path = dir.join("big.gguf");
    support::write_big(&path, 1);
    // Address space of 100 MB, for the child of the daemon, too: less than the weights, plenty for everything else.
    let confined = |args: &[&str]| {
        let inner = command(&dir, args);
        let mut outer = std::process::Command::new("sh");
        outer.args(["-c", "ulimit -v 100000; exec \"$@\"", "sh"]).arg(inner.get_program()).args(inner.get_args());
        for (key, value) in inner.get_envs() {
            match value {
                Some(value) => outer.env(key, value),
                None => outer.env_remove(key),
            };
        }
        run_to_exit(outer.arg("--model").arg(&path))
    };
    let (exit, stderr, stdout) = confined(&["--dry-run"]);
    assert_eq!(exit, 0, "{stderr}");
    // 1 Mi rows of 32 floats are 128 MiB; the rest is 32 KiB.
    assert!(stdout.contains("plan for tiny-1 (llama, dev-llama)") && stdout.contains("128.0 MiB"), "{stdout}");
    assert!(stdout.contains("verdict    fits"), "{stdout}");
    assert!(!dir.join("run").exists());
    let (exit, stderr, stdout) = confined(&["--dry-run", "--reserve-mib", "1000000000"]);
    assert_eq!(exit, 5, "{stderr}");
    assert!(stdout.contains("verdict    does not fit"), "{stdout}");
    // The daemon, too, says its plan and refuses before it takes the memory.
    let (exit, stderr, _) = confined(&["--reserve-mib", "1000000000"]);
    assert_eq!(exit, 5, "{stderr}");
    let plan = stderr.find(" plan ").expect("the plan in the log");
    assert!(plan < stderr.find("are missing to load").unwrap(), "{stderr}");
    // That the limit bites: with a plan that fits, the allocation itself fails, with the same exit code.
    let (exit, stderr, _) = confined(&[]);
    assert_eq!(exit, 5, "{stderr}");
    assert!(stderr.contains("cannot get") && stderr.contains("[not_enough_memory]"), "{stderr}");
}

#[test]
fn l2_expected_content_is_held_against_all_bytes() {
    let dir = Dir::new();
    let path = dir.tiny(1);
    let wrong = "ab".repeat(32);
    let (exit, stderr) = start(&dir, &path, &["--expect-blake3", &wrong]);
    assert_eq!(exit, 4, "{stderr}");
    let last = stderr.lines().last().unwrap();
    assert!(last.contains("tiny-1.gguf") && last.contains(&wrong) && last.ends_with("[content_mismatch]"), "{last}");
    // The message names the real hash; with it the start succeeds, until one byte in the middle changes.
    let real = last.split("BLAKE3 ").nth(1).unwrap()[..64].to_owned();
    drop(Owner::start(dir, &["--model", path.to_str().unwrap(), "--expect-blake3", &real]));
    let dir = Dir::new();
    let path = dir.tiny(1);
    let before = fs::metadata(&path).unwrap();
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&[2], before.len() / 2).unwrap();
    file.set_times(fs::FileTimes::new().set_modified(before.modified().unwrap())).unwrap();
    drop(file);
    let after = fs::metadata(&path).unwrap();
    assert_eq!((after.len(), after.modified().unwrap()), (before.len(), before.modified().unwrap()));
    let (exit, stderr) = start(&dir, &path, &["--expect-blake3", &real]);
    assert_eq!(exit, 4, "{stderr}");
    assert!(stderr.contains("[content_mismatch]") && stderr.contains(&real), "{stderr}");
}

#[test]
fn l8_bad_configuration_is_refused_before_anything_starts() {
    let dir = Dir::new();
    let path = dir.tiny(1);
    let file = dir.join("ds4.toml");
    fs::write(&file, "[owner]\nreserve-mb = 5\n").unwrap();
    let run = |args: &[&str]| {
        let (exit, stderr) = start(&dir, &path, args);
        assert_eq!(exit, 2, "{stderr}");
        assert!(!dir.join("run").exists());
        stderr
    };
    let bad_file =
        run_to_exit(std::process::Command::new(env!("CARGO_BIN_EXE_ds4-weight-owner")).arg("--config").arg(&file));
    assert_eq!(bad_file.0, 2);
    assert!(bad_file.1.contains("did you mean `reserve-mib`"), "{}", bad_file.1);
    assert!(run(&["--load-deadline", "0"]).contains("--load-deadline"));
    assert!(run(&["--no-such-flag"]).contains("--no-such-flag"));
    assert!(run(&["--expect-blake3", "xyz"]).contains("64 hexadecimal"));
}

#[test]
fn l8_unusable_runtime_directories() {
    let dir = Dir::new();
    let path = dir.tiny(1);
    let bad = |runtime: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ds4-weight-owner"));
        command.args(["--config", "/dev/null", "--allow-dev-models", "--runtime-dir", runtime, "--model"]).arg(&path);
        let (exit, stderr, _) = run_to_exit(&mut command);
        assert_eq!(exit, 2, "{stderr}");
        stderr
    };
    let file = dir.join("file");
    fs::write(&file, "x").unwrap();
    assert!(bad(file.to_str().unwrap()).contains("not a directory"));
    assert!(bad("/proc/ds4").contains("/proc/ds4"));
    let long = dir.join(&"x".repeat(120));
    let stderr = bad(long.to_str().unwrap());
    assert!(stderr.contains("107 are allowed") && stderr.contains("shorter runtime directory"), "{stderr}");
}

#[test]
fn a_second_owner_is_refused_and_a_dead_one_replaced() {
    let dir = Dir::new();
    let path = dir.tiny(1);
    let model = path.to_str().unwrap().to_owned();
    let mut owner = Owner::start(dir, &["--model", &model]);
    let (exit, stderr, _) = run_to_exit(command(&owner.dir, &[]).arg("--model").arg(&path));
    assert_eq!(exit, 2, "{stderr}");
    assert!(stderr.contains(&format!("another owner (pid {}) is listening on", owner.pid())), "{stderr}");
    // The first is not disturbed.
    assert!(owner.attach("").is_ok());
    owner.child.kill().unwrap();
    wait(&mut owner.child, LIMIT).unwrap();
    assert!(owner.broker().exists(), "a killed owner leaves its socket");
    let mut second = command(&owner.dir, &["--model", &model]).spawn().unwrap();
    let attached = support::eventually("the second owner", || {
        ds4_os::seqpacket::Connection::connect(&owner.broker()).ok()?;
        owner.attach("").ok()
    });
    assert_eq!(attached.model, "tiny-1");
    second.kill().unwrap();
    second.wait().unwrap();
}

#[test]
fn keep_going_stays_up_without_the_model_and_says_why() {
    let dir = Dir::new();
    let bad = dir.join("bad.gguf");
    fs::write(&bad, "GGUF").unwrap();
    let good = dir.tiny(1);
    let args = ["--keep-going", "--model", bad.to_str().unwrap(), "--model", good.to_str().unwrap()];
    let owner = Owner::start(dir, &args);
    assert_eq!(owner.attach("").unwrap().model, "tiny-1");
    let (code, sentence) = owner.attach("bad").err().unwrap();
    assert_eq!(code, "model_failed");
    assert!(sentence.contains("truncated_file"), "{sentence}");
}

#[test]
fn the_loader_command_is_not_for_people() {
    let dir = Dir::new();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ds4-weight-owner"));
    let (exit, stderr, _) =
        run_to_exit(command.arg("loader").stdin(std::process::Stdio::null()).current_dir(dir.path()));
    assert_eq!(exit, 2);
    assert!(stderr.contains("ds4 ctl load"), "{stderr}");
}

#[test]
fn print_config_is_a_configuration_file() {
    let dir = Dir::new();
    let (exit, stderr, stdout) = run_to_exit(command(&dir, &["--print-config"]).env("DS4_DRAIN_DEADLINE", "7"));
    assert_eq!(exit, 0, "{stderr}");
    assert!(
        stdout.contains("[owner]\n") && stdout.contains("reserve-mib = 64 # environment DS4_RESERVE_MIB\n"),
        "{stdout}"
    );
    assert!(stdout.contains("drain-deadline = 7 # environment DS4_DRAIN_DEADLINE\n"), "{stdout}");
}
