//! Harness of the end-to-end tests: real binaries, real sockets, a private runtime directory per test.
//!
//! The binaries are those of the same target directory (`cargo build --release --workspace --bins` makes them, and
//! `scripts/test` does). Everything that a test starts is killed when its handle is dropped.

pub mod calls;
pub mod card;
pub mod http;
pub mod memory;
pub mod process;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

pub use process::Process;

/// An executable of this workspace.
///
/// # Panics
/// When it has not been built.
pub fn bin(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("own path");
    // target/release/deps/TEST-HASH
    let path = test.parent().and_then(Path::parent).expect("target directory").join(name);
    assert!(path.exists(), "{} is missing: run `cargo build --release --workspace --bins` first", path.display());
    path
}

/// The starter model's file.
///
/// # Panics
/// When it is not there, naming what fetches it.
pub fn starter_model() -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let cached = || {
        let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|h| h.join(".cache")))?;
        Some(cache.join("ds4/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    };
    let path = std::env::var_os("DS4_STARTER_MODEL").map(PathBuf::from).or_else(cached).expect("a home directory");
    assert!(path.exists(), "{} is missing: scripts/test fetches it (`ds4 pull`)", path.display());
    path
}

/// Waits until `ready` gives a value.
///
/// # Panics
/// When it does not within `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, mut ready: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(begun.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A private runtime directory and what runs in it.
pub struct Sandbox {
    dir: TempDir,
}

impl Drop for Sandbox {
    /// Ends what `ds4 serve` started in process groups of its own and left running when it was killed.
    fn drop(&mut self) {
        let dir = self.dir.path().to_string_lossy().into_owned();
        let ours = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            *pid != std::process::id() && line.split(|b| *b == 0).any(|arg| arg == dir.as_bytes())
        };
        let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        for pid in pids.filter_map(|e| e.file_name().to_str()?.parse().ok()).filter(ours) {
            process::signal_pid(pid, nix::sys::signal::Signal::SIGKILL);
        }
    }
}

impl Default for Sandbox {
    fn default() -> Self {
        Self::new()
    }
}

impl Sandbox {
    /// A fresh one.
    pub fn new() -> Self {
        // Short: socket paths are limited to 107 bytes.
        Self { dir: tempfile::Builder::new().prefix("ds4t-").tempdir().expect("temporary directory") }
    }

    /// The runtime directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Writes a file into it and returns its path.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, content).expect("write");
        path
    }

    /// An executable with our runtime directory and no configuration of the machine's.
    pub fn command(&self, name: &str) -> std::process::Command {
        let mut command = std::process::Command::new(bin(name));
        for (key, _) in std::env::vars_os().filter(|(k, _)| k.to_string_lossy().starts_with("DS4_")) {
            command.env_remove(key);
        }
        command.env("DS4_CONFIG", "/dev/null").env("DS4_RUNTIME_DIR", self.dir()).env_remove("NOTIFY_SOCKET");
        command.stdin(std::process::Stdio::null());
        command
    }

    /// Starts one of our executables.
    pub fn start(&self, name: &str, args: &[&str]) -> Process {
        let mut command = self.command(name);
        command.args(args);
        Process::start(command, name, self.dir())
    }

    /// Starts an owner with the starter model and waits until it is READY.
    pub fn owner(&self) -> Process {
        let model = starter_model();
        let mut owner = self.start("ds4-weight-owner", &["--model", model.to_str().expect("UTF-8 path")]);
        owner.wait_ready(Duration::from_secs(60));
        owner
    }

    /// Starts a worker on a free port and waits until it is READY.
    pub fn worker(&self, args: &[&str]) -> Worker {
        let mut process = self.start("ds4-worker", &[&["--http", "127.0.0.1:0"], args].concat());
        process.wait_ready(Duration::from_secs(30));
        let http = self.ctl(&["status"])["worker"]["http"].as_str().expect("the worker's address").to_string();
        Worker { process, http }
    }

    /// Runs an executable to its end.
    pub fn run(&self, name: &str, args: &[&str]) -> std::process::Output {
        self.command(name).args(args).output().expect("run")
    }

    /// `ds4 ctl --json ARGS`.
    ///
    /// # Panics
    /// When it fails.
    pub fn ctl(&self, args: &[&str]) -> Value {
        self.try_ctl(args).unwrap_or_else(|error| panic!("ds4 ctl {args:?}: {error}"))
    }

    /// `ds4 ctl --json ARGS`; its standard error on failure.
    ///
    /// # Errors
    /// It did not exit with 0.
    pub fn try_ctl(&self, args: &[&str]) -> Result<Value, String> {
        let output = self.run("ds4", &[&["ctl", "--json"], args].concat());
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let text = String::from_utf8(output.stdout).map_err(|e| e.to_string())?;
        // load and watch print an object a line; the last one counts.
        serde_json::from_str(text.lines().last().unwrap_or("null")).map_err(|e| format!("{e}: {text}"))
    }
}

/// A worker and where it listens.
pub struct Worker {
    /// The process.
    pub process: Process,
    /// `host:port`.
    pub http: String,
}
