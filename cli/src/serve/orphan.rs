//! A worker whose owner died goes on with the memory that it has mapped. When the owner is back, it has loaded a second
//! copy of the same weights: such a worker is replaced by one that uses it, which gives the first copy back.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ds4_proto::v1;
use tokio::sync::watch;

use super::keep::Health;
use crate::client::control;

const POLL: Duration = Duration::from_millis(200);

/// True when a process that says it serves a model has no lease with this owner.
pub fn is_orphan(worker: &v1::WorkerStatusReply, leases: &[v1::Lease]) -> bool {
    // By what it calls itself too: in a container of its own it has another pid there than the owner sees.
    !leases.iter().any(|l| l.pid == worker.pid || l.client == format!("ds4-worker {}", worker.pid))
}

/// Looks at the worker each time that an owner came up, for ever.
pub async fn replace(dir: PathBuf, mut owner: watch::Receiver<Health>) -> Infallible {
    loop {
        let health = *owner.borrow_and_update();
        if health.up {
            tokio::select! {
                () = look(&dir) => {}
                Ok(_) = owner.wait_for(|h| h.starts != health.starts || !h.up) => continue,
            }
        }
        if owner.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// Drains the worker if it has no lease and the owner holds what it serves. Returns once that is clear.
async fn look(dir: &Path) {
    loop {
        if let (Ok(worker), Ok(leases), Ok(models)) =
            tokio::join!(control::worker_status(dir), control::leases(dir), control::models(dir))
            && worker.state == "ready"
        {
            if !is_orphan(&worker, &leases) {
                return;
            }
            // Without the same model its successor would serve another one: then a person must decide.
            if models.iter().any(|m| m.state() == v1::ModelState::Ready && m.name == worker.model) {
                ds4_os::say!(
                    "ds4 serve: the worker (pid {}) uses the weights of an owner that is gone; it finishes its requests and is \
                     replaced, so that they are not in memory twice",
                    worker.pid
                );
                if let Ok(mut client) = control::worker(dir).await
                    && client.drain(v1::DrainRequest { deadline_s: 0 }).await.is_ok()
                {
                    return;
                }
            }
        }
        tokio::time::sleep(POLL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_known_by_pid_or_name() {
        let worker = v1::WorkerStatusReply { pid: 7, ..v1::WorkerStatusReply::default() };
        let lease = |pid, client: &str| v1::Lease { pid, client: client.into(), ..v1::Lease::default() };
        assert!(is_orphan(&worker, &[]));
        assert!(is_orphan(&worker, &[lease(8, "ds4-worker 8")]));
        assert!(!is_orphan(&worker, &[lease(8, "ds4-worker 8"), lease(7, "x")]));
        assert!(!is_orphan(&worker, &[lease(4007, "ds4-worker 7")]));
    }
}
