//! The loader as a process: its start, its end, and what it hands over.

use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use ds4_os::memfd::check_sealed;
use ds4_os::seqpacket::Connection;
use ds4_os::wait::AsyncConnection;
use tokio::process::{Child, Command};

use crate::Failure;
use crate::report::Job;

/// Hidden first argument of a loader child.
pub const LOADER_COMMAND: &str = "loader";

/// Starts a loader and gives it its job.
pub(super) async fn spawn(job: &Job) -> Result<(Child, AsyncConnection), Failure> {
    let failed = |what: &str, e: &dyn std::fmt::Display| Failure::other("loader_start", format!("{what}: {e}"));
    let (ours, theirs) = Connection::pair().map_err(|e| failed("cannot make a socket for a loader", &e))?;
    let child = Command::new("/proc/self/exe")
        .arg0("ds4-weight-owner")
        .arg(LOADER_COMMAND)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        // Readiness is the daemon's to tell.
        .env_remove("NOTIFY_SOCKET")
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| failed("cannot start a loader", &e))?;
    let connection = AsyncConnection::new(ours).map_err(|e| failed("cannot watch a loader", &e))?;
    let message = serde_json::to_vec(job).map_err(|e| failed("cannot describe the load", &e))?;
    // A loader that died at once is found out by its exit status.
    let _ = connection.send(&message, &[]).await;
    Ok((child, connection))
}

/// The exit status of a child that has closed its connection, or is killed now.
pub(super) async fn reap(child: &mut Child) -> ExitStatus {
    if let Ok(Ok(status)) = tokio::time::timeout(Duration::from_secs(5), child.wait()).await {
        return status;
    }
    let _ = child.start_kill();
    child.wait().await.unwrap_or_else(|_| ExitStatus::from_raw(9))
}

/// What became of a loader that ended without a last report.
pub(super) fn lost_loader(status: ExitStatus) -> Failure {
    match status.signal() {
        Some(signal) => Failure::other(
            "loader_killed",
            format!(
                "the loader was killed by signal {signal}{}; its memory is free again, load again",
                if signal == 9 { ", perhaps by the kernel for lack of memory (see the kernel log)" } else { "" }
            ),
        ),
        None => {
            Failure::other("loader_died", format!("the loader ended without a result ({status}); see its log above"))
        }
    }
}

/// Checks what the loader handed over, and returns the manifest. Of device memory the daemon can check nothing but the number of descriptors: it
/// never calls the driver. A worker's driver does, when it maps them.
pub(super) fn check_handed_over(
    manifest: Option<OwnedFd>,
    manifest_len: u64,
    chunks: &[OwnedFd],
    lengths: &[u64],
    sealed: bool,
) -> Result<OwnedFd, Failure> {
    let incomplete = || Failure::other("loader_report", "the loader's descriptors do not fit its report");
    let manifest = manifest.filter(|_| chunks.len() == lengths.len()).ok_or_else(incomplete)?;
    check_sealed(&manifest, manifest_len)?;
    for (fd, len) in chunks.iter().zip(lengths).filter(|_| sealed) {
        check_sealed(fd, *len)?;
    }
    Ok(manifest)
}
