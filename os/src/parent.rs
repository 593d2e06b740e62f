//! Processes that have no purpose without the one that started them: a benchmark's own.

use std::ffi::OsString;

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
