//! Starting and watching processes that must outlive this one.
//!
//! Children get a process group of their own (a Ctrl-C at the terminal reaches the supervisor alone, which then ends
//! them in order) and no parent-death signal: kill -9 of the supervisor must leave the weights and the worker running.

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use ds4_os::wait::is_socket;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::net::UnixDatagram;

/// Poll interval for processes that are not our children.
const POLL: Duration = Duration::from_millis(20);

/// How the names of notification sockets begin.
pub const NOTIFY_PREFIX: &str = "notify.";

/// A process that may be anybody's child, told apart from a later one with the same pid by its start time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pid: u32,
    started: String,
}

impl Target {
    /// The process that has `pid` now.
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        let started = start_time(pid).with_context(|| format!("process {pid} does not exist"))?;
        Ok(Self { pid, started })
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True while it runs; a zombie has ended.
    pub fn alive(&self) -> bool {
        start_time(self.pid).is_some_and(|s| s == self.started)
    }

    /// Sends a signal, unless the process has ended.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        if !self.alive() {
            return Ok(());
        }
        let pid = Pid::from_raw(i32::try_from(self.pid)?);
        match kill(pid, signal) {
            Ok(()) | Err(nix::errno::Errno::ESRCH) => Ok(()),
            Err(e) => Err(e).with_context(|| format!("cannot send {signal} to process {pid}")),
        }
    }

    /// Returns once it has ended.
    pub async fn gone(&self) {
        while self.alive() {
            tokio::time::sleep(POLL).await;
        }
    }
}

/// Field 22 of /proc/PID/stat (start time in clock ticks), `None` for a zombie or no process. See proc(5).
fn start_time(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name is in parentheses and may itself hold spaces and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18).map(String::from))?
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// It was not our child, so nobody told us.
    Unknown,
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(n) => match Signal::try_from(*n) {
                Ok(signal) => write!(f, "was ended by {signal}"),
                Err(_) => write!(f, "was ended by signal {n}"),
            },
            Self::Unknown => f.write_str("ended"),
        }
    }
}

/// A process that we watch: started by us, or found running.
#[derive(Debug)]
pub enum Process {
    /// Our child.
    Child(tokio::process::Child, Target),
    /// Found running.
    Adopted(Target),
}

impl Process {
    /// The process behind it.
    pub fn target(&self) -> &Target {
        match self {
            Self::Child(_, target) | Self::Adopted(target) => target,
        }
    }

    /// Returns how it ended, once it has.
    pub async fn wait(&mut self) -> End {
        match self {
            Self::Child(child, _) => match child.wait().await {
                Ok(status) => {
                    use std::os::unix::process::ExitStatusExt as _;
                    status.code().map(End::Code).or(status.signal().map(End::Signal)).unwrap_or(End::Unknown)
                }
                Err(_) => End::Unknown,
            },
            Self::Adopted(target) => {
                target.gone().await;
                End::Unknown
            }
        }
    }
}

/// What to start.
pub struct Launch<'a> {
    /// Executable.
    pub program: &'a Path,
    /// Its arguments.
    pub args: &'a [OsString],
    /// A listening socket to hand over as systemd would (LISTEN_FDS, name `http`).
    pub listener: Option<&'a TcpListener>,
    /// Where it reports readiness (NOTIFY_SOCKET).
    pub notify: &'a Notify,
    /// Where its log goes; `None`: our standard error.
    pub log: Option<std::fs::File>,
    /// Of a benchmark: our DS4_ variables are hidden from it (only the flags count), and it ends when we do, however that is.
    pub isolated: bool,
}

/// The socket arrives as standard input; the shell moves it to descriptor 3 and learns LISTEN_PID, which is only known
/// after the fork. This costs about a millisecond and needs no unsafe code between fork and exec.
const HAND_OVER: &str = "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=http; export LISTEN_PID LISTEN_FDS LISTEN_FDNAMES; \
     exec \"$0\" \"$@\" 3<&0 0</dev/null";

impl Launch<'_> {
    /// Starts it.
    pub fn start(self) -> anyhow::Result<Process> {
        let mut command = match self.listener {
            Some(listener) => {
                let mut shell = tokio::process::Command::new("/bin/sh");
                shell.arg("-c").arg(HAND_OVER).arg(self.program);
                shell.stdin(Stdio::from(OwnedFd::from(listener.try_clone()?)));
                shell
            }
            None => {
                let mut direct = tokio::process::Command::new(self.program);
                direct.stdin(Stdio::null());
                for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
                    direct.env_remove(name);
                }
                direct
            }
        };
        command.args(self.args).env("NOTIFY_SOCKET", self.notify.path()).process_group(0);
        if self.isolated {
            for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("DS4_")) {
                command.env_remove(name);
            }
            command.env(ds4_settings::PARENT_VARIABLE, std::process::id().to_string());
        }
        command.stdout(match &self.log {
            Some(file) => Stdio::from(file.try_clone()?),
            None => Stdio::inherit(),
        });
        if let Some(file) = self.log {
            command.stderr(file);
        }
        let child = command.spawn().with_context(|| format!("cannot start {}", self.program.display()))?;
        let pid = child.id().context("the child ended while it was started")?;
        // A child that has already died is a zombie until waited for: any start time will do for it.
        let target = Target::of(pid).unwrap_or(Target { pid, started: String::new() });
        Ok(Process::Child(child, target))
    }
}

/// One message of the sd_notify protocol.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// `READY=1`.
    pub ready: bool,
    /// `STATUS=`.
    pub status: Option<String>,
}

impl Message {
    fn parse(text: &str) -> Self {
        let mut message = Self::default();
        for line in text.lines() {
            match line.split_once('=') {
                Some(("READY", "1")) => message.ready = true,
                Some(("STATUS", status)) => message.status = Some(status.into()),
                _ => {}
            }
        }
        message
    }
}

/// A private NOTIFY_SOCKET for one child.
#[derive(Debug)]
pub struct Notify {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Notify {
    /// Binds `notify.NAME.PID` in `dir`.
    pub fn bind(dir: &Path, name: &str) -> anyhow::Result<Self> {
        let path = dir.join(format!("{NOTIFY_PREFIX}{name}.{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let socket = UnixDatagram::bind(&path).with_context(|| format!("cannot bind {}", path.display()))?;
        Ok(Self { socket, path })
    }

    /// Binds it again where somebody removed it, or its directory.
    pub fn renew(&mut self) -> anyhow::Result<()> {
        if is_socket(&self.path) {
            return Ok(());
        }
        if let Some(dir) = self.path.parent() {
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.with_context(|| format!("cannot make {} again, which somebody removed", dir.display()))?;
        }
        self.socket = UnixDatagram::bind(&self.path).with_context(|| format!("cannot bind {}", self.path.display()))?;
        Ok(())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next message.
    pub async fn next(&self) -> anyhow::Result<Message> {
        let mut buffer = [0; 4096];
        let n = self.socket.recv(&mut buffer).await?;
        Ok(Message::parse(&String::from_utf8_lossy(&buffer[..n])))
    }
}

impl Drop for Notify {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch<'a>(args: &'a [OsString], notify: &'a Notify, listener: Option<&'a TcpListener>) -> Launch<'a> {
        Launch { program: Path::new("/bin/sh"), args, listener, notify, log: None, isolated: false }
    }

    fn script(text: &str) -> Vec<OsString> {
        vec!["-c".into(), text.into()]
    }

    #[tokio::test]
    async fn ends_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let notify = Notify::bind(dir.path(), "x").unwrap();
        for (text, want) in [("exit 4", End::Code(4)), ("kill -9 $$", End::Signal(9))] {
            let args = script(text);
            assert_eq!(launch(&args, &notify, None).start().unwrap().wait().await, want);
        }
        assert_eq!(End::Signal(9).to_string(), "was ended by SIGKILL");
    }

    #[tokio::test]
    async fn the_listener_arrives_as_descriptor_3_with_the_right_pid() {
        let dir = tempfile::tempdir().unwrap();
        let notify = Notify::bind(dir.path(), "x").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let check = "test $LISTEN_PID = $$ && test $LISTEN_FDS = 1 && test $LISTEN_FDNAMES = http \
                     && case $(readlink /proc/$$/fd/3) in socket:*) exit 0;; esac; exit 9";
        let args = script(check);
        assert_eq!(launch(&args, &notify, Some(&listener)).start().unwrap().wait().await, End::Code(0));
    }

    #[tokio::test]
    async fn a_stranger_is_watched_until_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let notify = Notify::bind(dir.path(), "x").unwrap();
        let args = script("exec sleep 60");
        let mut child = launch(&args, &notify, None).start().unwrap();
        let mut adopted = Process::Adopted(Target::of(child.target().pid()).unwrap());
        assert!(adopted.target().alive());
        adopted.target().signal(Signal::SIGKILL).unwrap();
        assert_eq!(child.wait().await, End::Signal(9));
        assert_eq!(adopted.wait().await, End::Unknown);
        let reused = Target { pid: std::process::id(), started: "not its start time".into() };
        assert!(!reused.alive(), "a process with another start time is another process");
    }

    #[tokio::test]
    async fn a_socket_whose_directory_was_removed_is_bound_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut notify = Notify::bind(dir.path(), "x").unwrap();
        std::fs::remove_dir_all(dir.path()).unwrap();
        notify.renew().unwrap();
        let sender = std::os::unix::net::UnixDatagram::unbound().unwrap();
        sender.send_to(b"READY=1", notify.path()).unwrap();
        assert!(notify.next().await.unwrap().ready);
    }

    #[tokio::test]
    async fn messages() {
        let dir = tempfile::tempdir().unwrap();
        let notify = Notify::bind(dir.path(), "x").unwrap();
        let sender = std::os::unix::net::UnixDatagram::unbound().unwrap();
        sender.send_to(b"STATUS=reading\nREADY=1\nMAINPID=3", notify.path()).unwrap();
        assert_eq!(notify.next().await.unwrap(), Message { ready: true, status: Some("reading".into()) });
    }
}
