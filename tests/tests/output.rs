//! What `ds4 gguf` leaves when it is interrupted or refused, and what it never writes over.

use std::os::unix::fs::{FileTypeExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use ds4_tests::{Sandbox, bin, wait_for};
use nix::sys::signal::Signal;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/convert/saved")
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn convert(sandbox: &Sandbox, from: &Path, to: &Path, more: &[&str]) -> Output {
    let args = ["gguf", "convert", "--recipe", "f16", "--from", from.to_str().unwrap(), "-o", to.to_str().unwrap()];
    sandbox.run("ds4", &[&args, more].concat())
}

fn refused(output: &Output, wanted: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains(wanted), "no `{wanted}` in {errors}");
}

/// A folder of its own in the sandbox, whose logs lie beside it.
fn folder(sandbox: &Sandbox, name: &str) -> PathBuf {
    let dir = sandbox.dir().join(name);
    std::fs::create_dir(&dir).unwrap();
    dir
}

#[test]
fn deepseek_v4_an_interrupted_synth_leaves_nothing() {
    let sandbox = Sandbox::new();
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let out = folder(&sandbox, signal.as_str());
        let file = out.join("x.gguf");
        // 81 GiB, so that the signal comes long before the end; a sparse file until then.
        let args = ["gguf", "synth", "--shape", "full", "--threads", "1", "-o", file.to_str().unwrap()];
        let mut synth = sandbox.start("ds4", &args);
        let found = wait_for("a file", Duration::from_secs(10), || names(&out).pop());
        assert!(found.starts_with(".ds4-unfinished-"), "{found}: half a file under its final name");
        synth.signal(signal);
        assert_eq!(synth.wait_end(Duration::from_secs(10)).code(), Some(code), "{signal}: {}", synth.log());
        assert_eq!(names(&out), [""; 0], "{signal}");
    }
}

/// Files that are read block on a pipe that nobody writes, so that the signal comes while a file is unfinished.
#[test]
fn deepseek_v4_an_interrupted_conversion_and_pull_leave_nothing() {
    let sandbox = Sandbox::new();
    let from = folder(&sandbox, "checkpoint");
    for name in names(&fixture()) {
        std::fs::copy(fixture().join(&name), from.join(&name)).unwrap();
    }
    let pipe = from.join("chat_template.jinja");
    let _ = std::fs::remove_file(&pipe);
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let out = folder(&sandbox, signal.as_str());
        let file = out.join("x.gguf");
        std::fs::write(&file, "mine").unwrap();
        let (from, file, out_dir) = (from.to_str().unwrap(), file.to_str().unwrap(), out.to_str().unwrap());
        for args in [
            &["gguf", "convert", "--recipe", "f16", "--from", from, "--force", "-o", file][..],
            &["pull", "--from", pipe.to_str().unwrap(), "--dir", out_dir],
        ] {
            let mut process = sandbox.start("ds4", args);
            let begun = || names(&out).iter().any(|n| n.starts_with(".ds4-unfinished-")).then_some(());
            wait_for("an unfinished file", Duration::from_secs(10), begun);
            process.signal(signal);
            assert_eq!(process.wait_end(Duration::from_secs(10)).code(), Some(code), "{args:?}: {}", process.log());
            assert_eq!(names(&out), ["x.gguf"], "{args:?} {signal}");
        }
        assert_eq!(std::fs::read(file).unwrap(), b"mine");
    }
}

#[test]
fn deepseek_v4_a_file_size_limit_is_an_error_that_leaves_nothing() {
    let sandbox = Sandbox::new();
    let out = folder(&sandbox, "out");
    let (file, from) = (out.join("x.gguf"), fixture());
    let (file, from) = (file.to_str().unwrap(), from.to_str().unwrap());
    for command in
        [&["convert", "--recipe", "f16", "--from", from, "-o", file][..], &["synth", "--shape", "tiny", "-o", file]]
    {
        // In blocks of 512 or 1024 bytes, by shell: less than either file in any case.
        let limited = std::process::Command::new("sh")
            .args(["-c", "ulimit -f 8; exec \"$@\"", "sh", bin("ds4").to_str().unwrap(), "gguf"])
            .args(command)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&limited.stderr);
        assert_eq!(limited.status.code(), Some(1), "{command:?}: {errors}");
        assert!(errors.contains("File too large") && errors.contains("x.gguf"), "{command:?}: {errors}");
        assert_eq!(names(&out), [""; 0], "{command:?}");
    }
}

#[test]
fn deepseek_v4_models_go_to_regular_files_only() {
    let sandbox = Sandbox::new();
    let out = folder(&sandbox, "out");
    let (fifo, link) = (out.join("fifo"), out.join("link"));
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    symlink("/proc/self/fd/1", &link).unwrap();
    for to in [&fifo, &link, Path::new("-")] {
        refused(&convert(&sandbox, &fixture(), to, &["--force"]), "not a regular file");
        let synth = ["gguf", "synth", "--shape", "tiny", "--force", "-o", to.to_str().unwrap()];
        refused(&sandbox.run("ds4", &synth), "not a regular file");
    }
    assert!(fifo.metadata().unwrap().file_type().is_fifo() && link.is_symlink());
    assert_eq!(names(&out), ["fifo", "link"]);
    assert!(!Path::new("-").exists());

    // A link to a file stays one.
    let (real, name) = (out.join("real.gguf"), out.join("name.gguf"));
    symlink("real.gguf", &name).unwrap();
    let output = convert(&sandbox, &fixture(), &name, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(name.is_symlink() && real.metadata().unwrap().is_file());
}

#[test]
fn deepseek_v4_a_conversion_never_replaces_what_it_reads() {
    let sandbox = Sandbox::new();
    let from = folder(&sandbox, "checkpoint");
    for name in names(&fixture()) {
        std::fs::copy(fixture().join(&name), from.join(&name)).unwrap();
    }
    let before = names(&from);
    let elsewhere = sandbox.dir().join("elsewhere");
    symlink(from.join("config.json"), &elsewhere).unwrap();
    let hard = sandbox.dir().join("hard");
    std::fs::hard_link(from.join("model.safetensors"), &hard).unwrap();
    let matrix = sandbox.file("matrix.gguf", "m");
    let imatrix = ["--force", "--imatrix", matrix.to_str().unwrap()];
    for (to, more) in [
        (from.join("model.safetensors"), &["--force"][..]),
        (from.join("tokenizer.json"), &["--force"]),
        (from.join("../checkpoint/config.json"), &["--force"]),
        (elsewhere, &["--force"]),
        (hard, &["--force"]),
        (matrix.clone(), &imatrix),
        (from.join("model.safetensors"), &[]),
    ] {
        refused(&convert(&sandbox, &from, &to, more), "is an input of the conversion");
    }
    assert_eq!(names(&from), before);
    for name in before {
        let (now, then) = (std::fs::read(from.join(&name)).unwrap(), std::fs::read(fixture().join(&name)).unwrap());
        assert!(now == then, "{name} was changed");
    }
    // An earlier result beside the checkpoint is no input.
    let file = from.join("model.gguf");
    std::fs::write(&file, "earlier").unwrap();
    let output = convert(&sandbox, &from, &file, &["--force"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(&std::fs::read(&file).unwrap()[..4], b"GGUF");
}

#[test]
fn deepseek_v4_types_that_apply_to_nothing_are_refused() {
    let sandbox = Sandbox::new();
    let out = folder(&sandbox, "out");
    for (given, says) in [
        ("experts@5-99=f16", "there is no layer 99; the model has 3"),
        ("experts@2-3=f16", "there is no layer 3"),
        ("small@9=f16", "there is no layer 9"),
    ] {
        refused(&convert(&sandbox, &fixture(), &out.join("x.gguf"), &["--type", given]), says);
    }
    assert_eq!(names(&out), [""; 0]);
}
