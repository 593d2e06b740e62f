//! Processes that have no purpose without the one that started them: a benchmark's own.
#![allow(unsafe_code, reason = "runs between fork and exec")]

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getppid};

/// Has the kernel kill this process when its parent, whose pid is given, ends, however it does; without one, nothing. To be called
/// first in `main`: until then a parent that is killed leaves us running.
///
/// # Errors
/// The parent has ended already, or that is no pid.
pub fn end_with(parent: Option<OsString>) -> Result<(), String> {
    let Some(parent) = parent else { return Ok(()) };
    let pid = parent.to_str().and_then(|v| v.parse().ok()).map(Pid::from_raw);
    let pid = pid.ok_or_else(|| format!("{parent:?} is no parent's pid"))?;
    set_pdeathsig(Signal::SIGKILL).map_err(|e| format!("cannot ask to end with process {pid}: {e}"))?;
    // One that ended before the call above sends no signal.
    if getppid() == pid { Ok(()) } else { Err(format!("process {pid}, which started this one, has ended")) }
}

/// Has the kernel kill the process of `command`, a program that knows nothing of us, when the thread that starts it ends.
pub fn bind(command: &mut Command) {
    let parent = Pid::this();
    let ask = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        // As above; whoever started it is not there to read the error.
        if getppid() == parent { Ok(()) } else { Err(nix::errno::Errno::ESRCH.into()) }
    };
    // SAFETY: between fork and exec it makes two system calls (prctl, getppid), and allocates and locks nothing.
    unsafe { command.pre_exec(ask) };
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_bound_process_ends_with_the_thread_that_started_it() {
        let started = std::thread::spawn(|| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo ready; exec sleep 60"]).stdout(Stdio::piped());
            bind(&mut command);
            let mut child = command.spawn().expect("sh");
            let mut line = String::new();
            BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
            assert_eq!((line.as_str(), child.try_wait().expect("a child")), ("ready\n", None));
            child
        });
        let begun = Instant::now();
        let status = started.join().expect("the thread").wait().expect("a child");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{status}");
        assert!(begun.elapsed() < Duration::from_secs(30), "it would sleep for 60 s");
    }
}
