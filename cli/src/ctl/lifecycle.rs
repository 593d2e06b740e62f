//! `ds4 ctl restart` and `stop`: ending processes in the right order and seeing that it happened.

use std::path::Path;
use std::time::{Duration, Instant};

use ds4_proto::v1;
use ds4_settings::EXIT_PEER;
use nix::sys::signal::Signal;
use serde_json::json;

use super::Output;
use crate::client::control;
use crate::failure::Failure;
use crate::serve::keeper::{Keeper, keeper};
use crate::serve::process::Target;

/// `ds4 ctl restart`.
#[derive(clap::Args)]
pub struct RestartArgs {
    /// Seconds that running and waiting requests may take [default: the worker's]
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<u32>,
    /// Seconds to wait for the successor after the old worker has gone
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    wait: u64,
    /// Drain the worker although nothing supervises it: unless somebody starts another, nothing is served after that
    #[arg(long)]
    force: bool,
}

/// `ds4 ctl stop`.
#[derive(clap::Args)]
pub struct StopArgs {
    /// Seconds until each process must have ended by itself
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
}

const POLL: Duration = Duration::from_millis(20);

/// Drains the worker and waits until another process answers as ready.
pub(super) async fn restart(dir: &Path, out: Output, args: &RestartArgs) -> anyhow::Result<()> {
    let old = control::ready_worker(dir).await?;
    if !args.force && keeper(dir, old.pid) == Keeper::Nobody {
        let text = format!(
            "[no_supervisor] nothing supervises the worker (pid {}), so none would follow it: `ds4 serve` takes over what runs, \
             then this command again. To end the worker all the same: --force, or `ds4 ctl drain`.",
            old.pid
        );
        return Err(Failure::error(EXIT_PEER, text));
    }
    let target = Target::of(old.pid)?;
    // One that dies meanwhile needs no drain.
    if let Err(error) = drain(dir, args.deadline).await
        && target.alive()
    {
        return Err(error);
    }
    // However long its requests take: the deadline is the worker's.
    target.gone().await;
    let begun = Instant::now();
    loop {
        if let Ok(new) = control::worker_status(dir).await
            && new.pid != old.pid
            && new.state == "ready"
        {
            let text = format!(
                "Worker {} replaced worker {} ({:.0} ms after the old one was gone).",
                new.pid,
                old.pid,
                begun.elapsed().as_secs_f64() * 1e3
            );
            return out.object(json!({"old_pid": old.pid, "new_pid": new.pid, "ready_ms": new.ready_ms}), &text);
        }
        if begun.elapsed() > Duration::from_secs(args.wait) {
            return Err(Failure::error(
                EXIT_PEER,
                format!(
                    "worker {} has drained and gone, but no successor was ready after {} s: is there a supervisor \
                     (`ds4 serve`, or systemd with Restart=always)?",
                    old.pid, args.wait
                ),
            ));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Asks the worker to finish its requests and exit.
pub(super) async fn drain(dir: &Path, deadline: Option<u32>) -> anyhow::Result<v1::DrainReply> {
    let request = v1::DrainRequest { deadline_s: deadline.unwrap_or(0) };
    Ok(control::worker(dir).await?.drain(request).await.map_err(control::status)?.into_inner())
}

/// Ends the supervisor, which ends the others; without one, the worker and then the owner.
pub(super) async fn stop(dir: &Path, out: Output, args: &StopArgs) -> anyhow::Result<()> {
    let (owner, worker) = tokio::join!(control::owner_status(dir), control::worker_status(dir));
    let supervisor = crate::serve::supervisor(dir);
    let pids =
        [("supervisor", supervisor), ("worker", worker.ok().map(|s| s.pid)), ("owner", owner.ok().map(|s| s.pid))];
    // All of them first: the supervisor takes the others with it.
    let targets = pids.map(|(name, pid)| (name, pid.and_then(|pid| Target::of(pid).ok())));
    let mut stopped = Vec::new();
    for (name, target) in targets {
        let Some(target) = target else { continue };
        target.signal(Signal::SIGTERM)?;
        let wait = Duration::from_secs(args.wait);
        if tokio::time::timeout(wait, target.gone()).await.is_err() {
            let text = format!("the {name} (pid {}) is still there {} s after SIGTERM", target.pid(), args.wait);
            return Err(Failure::error(1, text));
        }
        stopped.push(name);
    }
    if stopped.is_empty() {
        let nothing = || format!("nothing runs in {}", dir.display());
        return Err(Failure::error(EXIT_PEER, control::denied(dir).unwrap_or_else(nothing)));
    }
    out.object(json!({"stopped": stopped}), &format!("Stopped: {}.", stopped.join(", ")))
}
