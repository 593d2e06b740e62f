//! Keeps one process running: start, wait for ready, restart when it ends, give up when it cannot start.

use std::convert::Infallible;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::sync::watch;

use super::needs::Needs;
use super::process::{End, Notify, Process};
use crate::failure::Failure;

/// Exit codes that another attempt cannot cure: configuration, model file, memory. The units' RestartPreventExitStatus
/// lists the same.
const PERMANENT: [i32; 3] =
    [ds4_settings::EXIT_USAGE as i32, ds4_settings::EXIT_MODEL as i32, ds4_settings::EXIT_MEMORY as i32];
/// A process that dies sooner than this after ready is restarted with a delay, a later one at once.
const HEALTHY: Duration = Duration::from_secs(1);
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// When to give up.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Failed starts in a row until it gives up.
    pub attempts: u32,
    /// Longest time from start to ready; `None` leaves it to the process's own deadlines.
    pub start_timeout: Option<Duration>,
    /// Longest time from SIGTERM to its end, then SIGKILL; `None` waits.
    pub stop_timeout: Option<Duration>,
}

/// How a kept process is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// How often it became ready.
    pub starts: u32,
    /// It is ready now.
    pub up: bool,
}

/// A process to keep.
pub struct Kept<L> {
    /// Name in messages.
    pub name: &'static str,
    /// Found running, so the first start is skipped.
    pub adopted: Option<Process>,
    /// Starts one that reports to the given socket, with more arguments of [`Needs::met`].
    pub launch: L,
    /// Makes the socket that it reports to.
    pub notify: Notify,
    /// Limits.
    pub policy: Policy,
    /// What must be there before it is started: a worker without an owner or a model could only fail.
    pub needs: Option<Needs>,
}

/// What the supervisor wants of a kept process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wish {
    /// Keep it running.
    Run,
    /// End it gracefully.
    Drain,
    /// Kill it.
    Kill,
}

enum Start {
    Ready,
    Failed { end: End, cause: Option<String> },
    Stopped,
}

fn delay(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        n => FIRST_DELAY.saturating_mul(1 << n.saturating_sub(1).min(16)).min(LONGEST_DELAY),
    }
}

/// Keeps it until it is wished gone or it cannot be started. `health` tells how it is doing. When `wish` is dropped, or
/// this future is, the process is left running.
///
/// # Errors
/// It gave up: the exit code is the process's own, the message holds its last reported status.
pub async fn keep<L>(
    mut kept: Kept<L>,
    mut wish: watch::Receiver<Wish>,
    health: watch::Sender<Health>,
) -> anyhow::Result<()>
where
    L: FnMut(&Notify, &[OsString]) -> anyhow::Result<Process>,
{
    let name = kept.name;
    let mut failures = 0;
    let mut unhealthy = 0;
    loop {
        let mut process = match kept.adopted.take() {
            Some(process) => process,
            None => {
                let mut more = Vec::new();
                if let Some(needs) = &mut kept.needs {
                    tokio::select! {
                        args = needs.met() => more = args,
                        () = stopped(&mut wish) => return Ok(()),
                    }
                }
                kept.notify.renew()?;
                let mut process = (kept.launch)(&kept.notify, &more)?;
                match bring_up(&kept.notify, kept.policy.start_timeout, &mut process, &mut wish).await {
                    Start::Ready => failures = 0,
                    Start::Stopped => {
                        end(name, &mut process, kept.policy.stop_timeout, &mut wish).await?;
                        return Ok(());
                    }
                    Start::Failed { end, cause } => {
                        failures += 1;
                        let code = match end {
                            End::Code(code) => code,
                            _ => 1,
                        };
                        let cause = cause.map_or_else(|| "its messages are above".into(), |c| format!("it said: {c}"));
                        if PERMANENT.contains(&code) || failures >= kept.policy.attempts {
                            let tries =
                                if failures == 1 { String::new() } else { format!(", {failures} times in a row") };
                            let code = u8::try_from(code).ok().filter(|c| *c != 0).unwrap_or(1);
                            return Err(Failure::error(code, format!("the {name} {end} at its start{tries}; {cause}")));
                        }
                        ds4_os::say!(
                            "ds4 serve: the {name} {end} at its start; {cause}; next try in {:?}",
                            delay(failures)
                        );
                        if pause(delay(failures), &mut wish).await {
                            return Ok(());
                        }
                        continue;
                    }
                }
                process
            }
        };
        health.send_modify(|h| *h = Health { starts: h.starts + 1, up: true });
        let since = Instant::now();
        tokio::select! {
            never = served(&mut kept.needs) => match never {},
            how = process.wait() => {
                health.send_modify(|h| h.up = false);
                // A worker that was drained is replaced at once, however young.
                unhealthy = if since.elapsed() < HEALTHY && how != End::Code(0) { unhealthy + 1 } else { 0 };
                ds4_os::say!("ds4 serve: the {name} (pid {}) {how}; starting another", process.target().pid());
                if pause(delay(unhealthy), &mut wish).await {
                    return Ok(());
                }
            }
            _ = stopped(&mut wish) => {
                end(name, &mut process, kept.policy.stop_timeout, &mut wish).await?;
                return Ok(());
            }
        }
    }
}

/// Notes what the ready process serves; it never ends, as it runs beside waiting for other things.
async fn served(needs: &mut Option<Needs>) -> Infallible {
    if let Some(needs) = needs {
        needs.proven();
        needs.learn().await;
    }
    std::future::pending().await
}

async fn stopped(wish: &mut watch::Receiver<Wish>) {
    if wish.wait_for(|w| *w >= Wish::Drain).await.is_err() {
        // Nobody wishes anything any more: the supervisor failed elsewhere, and what runs is not to pay for that.
        std::future::pending().await
    }
}

/// Sleeps; true when told to stop meanwhile.
async fn pause(time: Duration, wish: &mut watch::Receiver<Wish>) -> bool {
    tokio::select! {
        () = tokio::time::sleep(time) => false,
        () = stopped(wish) => true,
    }
}

/// Sleeps for ever when there is no limit.
async fn sleep_or_never(limit: Option<Duration>) {
    match limit {
        Some(limit) => tokio::time::sleep(limit).await,
        None => std::future::pending().await,
    }
}

async fn bring_up(
    notify: &Notify,
    limit: Option<Duration>,
    process: &mut Process,
    wish: &mut watch::Receiver<Wish>,
) -> Start {
    let mut cause = None;
    let timeout = sleep_or_never(limit);
    tokio::pin!(timeout);
    loop {
        tokio::select! {
            message = notify.next() => match message {
                Ok(message) => {
                    cause = message.status.or(cause);
                    if message.ready {
                        return Start::Ready;
                    }
                }
                Err(e) => return Start::Failed { end: End::Unknown, cause: Some(format!("cannot hear from it: {e}")) },
            },
            how = process.wait() => {
                // Its last words may still be in the socket.
                while let Ok(Ok(message)) = tokio::time::timeout(Duration::from_millis(10), notify.next()).await {
                    cause = message.status.or(cause);
                }
                return Start::Failed { end: how, cause };
            }
            () = &mut timeout => {
                let _ = process.target().signal(Signal::SIGKILL);
                process.wait().await;
                let limit = limit.unwrap_or_default();
                let said = cause.map(|c| format!(" (last: {c})")).unwrap_or_default();
                return Start::Failed { end: End::Unknown, cause: Some(format!("not ready within {limit:?}{said}")) };
            }
            () = stopped(wish) => return Start::Stopped,
        }
    }
}

/// SIGTERM, then SIGKILL at the limit or on request.
async fn end(
    name: &str,
    process: &mut Process,
    limit: Option<Duration>,
    wish: &mut watch::Receiver<Wish>,
) -> anyhow::Result<()> {
    let target = process.target().clone();
    target.signal(Signal::SIGTERM)?;
    tokio::select! {
        _ = process.wait() => return Ok(()),
        Ok(_) = wish.wait_for(|w| *w == Wish::Kill) => ds4_os::say!("ds4 serve: killing the {name}"),
        () = sleep_or_never(limit) => {
            ds4_os::say!("ds4 serve: the {name} did not end within {:?}; killing it", limit.unwrap_or_default());
        }
    }
    target.signal(Signal::SIGKILL)?;
    process.wait().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::process::Launch;
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    const POLICY: Policy = Policy {
        attempts: 3,
        start_timeout: Some(Duration::from_secs(10)),
        stop_timeout: Some(Duration::from_secs(10)),
    };

    struct Rig {
        dir: tempfile::TempDir,
        starts: Arc<Mutex<u32>>,
        wish: watch::Sender<Wish>,
        health: watch::Receiver<Health>,
        task: tokio::task::JoinHandle<anyhow::Result<()>>,
    }

    /// Keeps a shell script; READY=1 is sent for it when it creates the file `ready.N`, since sh has no datagrams.
    fn rig(script: &str, policy: Policy) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let notify = Notify::bind(dir.path(), "x").unwrap();
        let socket = notify.path().to_path_buf();
        let marker = dir.path().join("ready");
        let watched = marker.clone();
        std::thread::spawn(move || {
            let sender = std::os::unix::net::UnixDatagram::unbound().unwrap();
            let until = Instant::now() + Duration::from_secs(30);
            while Instant::now() < until {
                if std::fs::remove_file(&watched).is_ok() {
                    let _ = sender.send_to(b"READY=1", &socket);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let starts = Arc::new(Mutex::new(0));
        let counter = Arc::clone(&starts);
        let args: Vec<std::ffi::OsString> =
            vec!["-c".into(), script.replace("READY", &format!("touch {}", marker.display())).into()];
        let launch = move |notify: &Notify, _: &[std::ffi::OsString]| {
            *counter.lock().unwrap() += 1;
            Launch { program: Path::new("/bin/sh"), args: &args, listener: None, notify, log: None, isolated: false }
                .start()
        };
        let (wish, wish_rx) = watch::channel(Wish::Run);
        let (report, health) = watch::channel(Health::default());
        let task = tokio::spawn(keep(
            Kept { name: "worker", adopted: None, launch, notify, policy, needs: None },
            wish_rx,
            report,
        ));
        Rig { dir, starts, wish, health, task }
    }

    #[tokio::test]
    async fn a_start_that_always_fails_is_given_up_with_its_exit_code() {
        let rig = rig("exit 7", POLICY);
        let error = rig.task.await.unwrap().unwrap_err();
        assert_eq!(Failure::code_of(&error), 7);
        assert!(error.to_string().contains("exited with code 7 at its start, 3 times in a row"), "{error}");
        assert_eq!(*rig.starts.lock().unwrap(), 3);
    }

    #[tokio::test]
    async fn m10_memory_model_and_configuration_refusals_are_not_retried() {
        for code in [2, 4, 5] {
            let rig = rig(&format!("exit {code}"), POLICY);
            assert_eq!(i32::from(Failure::code_of(&rig.task.await.unwrap().unwrap_err())), code);
            assert_eq!(*rig.starts.lock().unwrap(), 1);
        }
    }

    #[tokio::test]
    async fn a_process_that_dies_is_restarted_and_stop_ends_the_last() {
        let mut rig = rig("READY; exec sleep 60", POLICY);
        rig.health.wait_for(|h| h.starts == 1).await.unwrap();
        let killed = kill_children_of_this_test(rig.dir.path());
        assert!(killed > 0);
        rig.health.wait_for(|h| h.starts == 2).await.unwrap();
        rig.wish.send(Wish::Drain).unwrap();
        rig.task.await.unwrap().unwrap();
        assert_eq!(*rig.starts.lock().unwrap(), 2);
    }

    /// Kills processes whose NOTIFY_SOCKET lies in `dir`: the ones that this test started.
    fn kill_children_of_this_test(dir: &Path) -> usize {
        let needle = dir.to_str().unwrap().as_bytes();
        let mut killed = 0;
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
            let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            if environment.windows(needle.len()).any(|w| w == needle) {
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).unwrap();
                killed += 1;
            }
        }
        killed
    }

    #[tokio::test]
    async fn a_supervisor_that_fails_leaves_the_process_running() {
        let Rig { dir, wish, mut health, task, .. } = rig("READY; exec sleep 60", POLICY);
        health.wait_for(|h| h.starts == 1).await.unwrap();
        drop(wish);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!task.is_finished());
        task.abort();
        assert!(task.await.is_err_and(|e| e.is_cancelled()));
        assert_eq!(kill_children_of_this_test(dir.path()), 1, "it is still there to be killed");
    }

    #[tokio::test]
    async fn a_start_that_hangs_is_killed_at_its_limit() {
        let policy = Policy { attempts: 1, start_timeout: Some(Duration::from_millis(200)), ..POLICY };
        let rig = rig("exec sleep 60", policy);
        let error = rig.task.await.unwrap().unwrap_err().to_string();
        assert!(error.contains("not ready within 200ms"), "{error}");
    }

    #[tokio::test]
    async fn a_process_that_ignores_sigterm_is_killed_at_its_limit() {
        let policy = Policy { stop_timeout: Some(Duration::from_millis(200)), ..POLICY };
        let mut rig = rig("trap '' TERM; READY; while :; do sleep 0.05; done", policy);
        rig.health.wait_for(|h| h.starts == 1).await.unwrap();
        rig.wish.send(Wish::Drain).unwrap();
        rig.task.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_drain_that_takes_too_long_for_the_user_becomes_a_kill() {
        let policy = Policy { stop_timeout: None, ..POLICY };
        let mut rig = rig("trap '' TERM; READY; while :; do sleep 0.05; done", policy);
        rig.health.wait_for(|h| h.starts == 1).await.unwrap();
        rig.wish.send(Wish::Drain).unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!rig.task.is_finished());
        rig.wish.send(Wish::Kill).unwrap();
        rig.task.await.unwrap().unwrap();
    }

    #[test]
    fn delays_double_up_to_five_seconds() {
        let ms = |n| delay(n).as_millis();
        assert_eq!([ms(0), ms(1), ms(2), ms(3), ms(9), ms(u32::MAX)], [0, 100, 200, 400, 5000, 5000]);
    }
}
