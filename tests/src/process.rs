//! A started process: readiness, log, end.

use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A process in a group of its own; the group is killed on drop.
pub struct Process {
    child: Child,
    log: PathBuf,
    notify: UnixDatagram,
    begun: Instant,
}

impl Process {
    /// Starts `command` with its output in a log file and a NOTIFY_SOCKET in `dir`.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(mut command: Command, name: &str, dir: &Path) -> Self {
        let n = COUNTER.fetch_add(1, Ordering::Relaxed);
        let log = dir.join(format!("{name}.{n}.log"));
        let out = File::create(&log).expect("log file");
        let socket = dir.join(format!("n{n}"));
        let notify = UnixDatagram::bind(&socket).expect("notify socket");
        notify.set_read_timeout(Some(Duration::from_millis(20))).expect("timeout");
        command.env("NOTIFY_SOCKET", socket).process_group(0);
        command.stdout(Stdio::from(out.try_clone().expect("log file"))).stderr(out);
        let begun = Instant::now();
        let child = command.spawn().unwrap_or_else(|e| panic!("cannot start {name}: {e}"));
        Self { child, log, notify, begun }
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for `READY=1`; returns the time since its start.
    ///
    /// # Panics
    /// When it ends before, or is not ready within `limit`.
    pub fn wait_ready(&mut self, limit: Duration) -> Duration {
        let mut buffer = [0; 4096];
        loop {
            if let Ok(n) = self.notify.recv(&mut buffer)
                && buffer[..n].split(|b| *b == b'\n').any(|line| line == b"READY=1")
            {
                return self.begun.elapsed();
            }
            if let Some(status) = self.child.try_wait().expect("wait") {
                panic!("ended before it was ready ({status}):\n{}", self.log());
            }
            assert!(self.begun.elapsed() < limit, "not ready within {limit:?}:\n{}", self.log());
        }
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it still runs after `limit`.
    pub fn wait_end(&mut self, limit: Duration) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                return status;
            }
            assert!(begun.elapsed() < limit, "still runs after {limit:?}:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// True while it runs.
    pub fn running(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_none()
    }

    /// Sends a signal to it alone.
    pub fn signal(&self, signal: Signal) {
        signal_pid(self.pid(), signal);
    }

    /// SIGKILL to it alone, and waits.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// What it has written so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.pid()) {
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
        self.kill();
    }
}

/// Sends a signal to any process; one that has ended is no error.
pub fn signal_pid(pid: u32, signal: Signal) {
    let _ = kill(Pid::from_raw(i32::try_from(pid).expect("pid")), signal);
}

/// True while `pid` exists and is no zombie.
pub fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
    state.is_some_and(|s| s != "Z" && s != "X")
}
