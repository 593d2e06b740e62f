//! Waiting for readers to go.

use std::collections::BTreeSet;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::ledger::Ledger;

/// How long holders may take after SIGTERM.
pub const GRACE: Duration = Duration::from_secs(10);

/// Waits until `epochs`, which are draining, have been released; sends their holders SIGTERM at the deadline and waits
/// for [`GRACE`] more.
///
/// # Errors
/// The processes that still hold leases after all that.
pub async fn wait_for_readers(ledger: &Ledger, epochs: &[u64], deadline: Duration) -> Result<(), Vec<i32>> {
    if tokio::time::timeout(deadline, ledger.released(epochs)).await.is_ok() {
        return Ok(());
    }
    for pid in holders(ledger, epochs) {
        tracing::warn!(pid, "still attached at the drain deadline: sending SIGTERM");
        if let Err(e) = kill(Pid::from_raw(pid), Signal::SIGTERM) {
            tracing::warn!(pid, "cannot be signalled: {e}");
        }
    }
    if tokio::time::timeout(GRACE, ledger.released(epochs)).await.is_ok() {
        return Ok(());
    }
    Err(holders(ledger, epochs).into_iter().collect())
}

/// Holders that may be signalled: never a process group (0 and below), init or this process.
fn holders(ledger: &Ledger, epochs: &[u64]) -> BTreeSet<i32> {
    let own = Pid::this().as_raw();
    ledger.holders(epochs).into_iter().map(|p| p.pid).filter(|pid| *pid > 1 && *pid != own).collect()
}
