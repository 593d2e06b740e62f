//! Loads as the daemon sees them: one at a time, joined by whoever asks for the same file meanwhile, each with a deadline.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ds4_os::memfd::check_sealed;
use ds4_os::seqpacket::Connection;
use ds4_proto::v1;
use tokio::process::{Child, Command};
use tokio::sync::watch;

use crate::Failure;
use crate::ledger::{Held, Ledger, Ready};
use crate::loader::backend::Choice;
use crate::report::{Job, MAX_REPORT, Plan, Report, bytes};
use ds4_os::wait::AsyncConnection;

/// Hidden first argument of a loader child.
pub const LOADER_COMMAND: &str = "loader";
/// Below this a large load is warned about: a slow disk or a mapping where reads were meant.
const SLOW_GIB_PER_S: f64 = 0.5;
/// Loads smaller than this say nothing about a disk.
const SLOW_MIN_BYTES: u64 = 256 << 20;

/// What somebody asks for.
#[derive(Clone, Debug, Default)]
pub struct LoadRequest {
    /// The GGUF or any of its shards.
    pub path: PathBuf,
    /// Name; empty: the catalog's.
    pub name: String,
    /// Only the plan.
    pub dry_run: bool,
    /// Content hash that it must have, in hexadecimal.
    pub expect_blake3: Option<String>,
    /// A new epoch even when the content is READY already.
    pub reload: bool,
    /// How long it may take.
    pub deadline: Duration,
}

/// What all loads have in common.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Bytes to leave free.
    pub reserve_bytes: u64,
    /// Accept catalog entries for development.
    pub allow_dev_models: bool,
    /// Whose memory.
    pub backend: Choice,
}

/// How a load stands: everything worth keeping, the newest progress, and the end.
#[derive(Clone, Debug, Default)]
struct Flight {
    milestones: Vec<v1::LoadProgress>,
    latest: Option<v1::LoadProgress>,
    end: Option<Result<Loaded, Failure>>,
}

/// The end of a load that went well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// What is READY now; `None` after a dry run.
    pub ready: Option<Ready>,
}

/// Follows one load.
#[derive(Clone)]
pub struct Follower {
    flight: watch::Receiver<Flight>,
    seen: usize,
    ended: bool,
    expect_blake3: Option<String>,
}

impl Follower {
    /// The next thing to tell; `None` after the end (READY, FAILED, or the plan of a dry run) was told.
    pub async fn next(&mut self) -> Option<v1::LoadProgress> {
        loop {
            if self.ended {
                return None;
            }
            let now = self.flight.borrow_and_update().clone();
            if let Some(milestone) = now.milestones.get(self.seen) {
                self.seen += 1;
                return Some(milestone.clone());
            }
            if let Some(end) = now.end {
                self.ended = true;
                return Some(self.last(end));
            }
            if self.flight.changed().await.is_err() {
                self.ended = true;
                return Some(failed(&Failure::other("owner_stopping", "the weight owner stopped during the load")));
            }
            // Only progress changed: tell the newest.
            let now = self.flight.borrow();
            if now.milestones.len() == self.seen
                && now.end.is_none()
                && let Some(latest) = &now.latest
            {
                return Some(latest.clone());
            }
        }
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The load's failure.
    pub async fn outcome(mut self) -> Result<Loaded, Failure> {
        let end = self.flight.wait_for(|f| f.end.is_some()).await.ok().and_then(|f| f.end.clone());
        let end =
            end.unwrap_or_else(|| Err(Failure::other("owner_stopping", "the weight owner stopped during the load")));
        self.judge(end)
    }

    /// A joined load may not have what this client expects.
    fn judge(&self, end: Result<Loaded, Failure>) -> Result<Loaded, Failure> {
        let loaded = end?;
        if let (Some(expected), Some(ready)) = (&self.expect_blake3, &loaded.ready)
            && !expected.eq_ignore_ascii_case(&ready.blake3)
        {
            let text = format!(
                "{:?} has content {}, but {expected} was expected; load the right file",
                ready.model, ready.blake3
            );
            return Err(Failure::model("content_mismatch", text));
        }
        Ok(loaded)
    }

    fn last(&self, end: Result<Loaded, Failure>) -> v1::LoadProgress {
        match self.judge(end) {
            Err(failure) => failed(&failure),
            Ok(Loaded { ready: None }) => v1::LoadProgress {
                state: v1::ModelState::Unspecified.into(),
                stage: "plan".into(),
                ..Default::default()
            },
            Ok(Loaded { ready: Some(ready) }) => v1::LoadProgress {
                state: v1::ModelState::Ready.into(),
                stage: "publish".into(),
                epoch: ready.epoch,
                model: ready.model,
                blake3: ready.blake3,
                ..Default::default()
            },
        }
    }
}

fn failed(failure: &Failure) -> v1::LoadProgress {
    v1::LoadProgress {
        state: v1::ModelState::Failed.into(),
        error_code: failure.code.clone(),
        error: failure.message.clone(),
        ..Default::default()
    }
}

fn loading(stage: &str) -> v1::LoadProgress {
    v1::LoadProgress { state: v1::ModelState::Loading.into(), stage: stage.into(), ..Default::default() }
}

struct InFlight {
    name: String,
    flight: watch::Receiver<Flight>,
}

/// Runs loads.
pub struct Loads {
    ledger: Arc<Ledger>,
    options: LoadOptions,
    in_flight: Mutex<HashMap<PathBuf, InFlight>>,
    /// One loader at a time: the plan of a second one would be judged by memory that the first is about to take.
    gate: tokio::sync::Mutex<()>,
    stop: watch::Sender<bool>,
}

impl Loads {
    /// No loads yet.
    pub fn new(ledger: Arc<Ledger>, options: LoadOptions) -> Self {
        Self {
            ledger,
            options,
            in_flight: Mutex::default(),
            gate: tokio::sync::Mutex::default(),
            stop: watch::channel(false).0,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, InFlight>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What backend loads ask for.
    pub fn backend(&self) -> &'static str {
        self.options.backend.name()
    }

    /// Ends running loads and refuses new ones.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Starts a load, or joins the one of the same file. The load goes on when nobody follows it any more.
    ///
    /// # Errors
    /// The request contradicts the load that it would join, or the owner is stopping.
    pub fn begin(self: &Arc<Self>, mut request: LoadRequest) -> Result<Follower, Failure> {
        if *self.stop.borrow() {
            return Err(Failure::other("owner_stopping", "the weight owner is stopping; load when it is back"));
        }
        // One name a file, however it is spelled. A path that does not exist is the loader's to refuse.
        request.path = std::fs::canonicalize(&request.path).unwrap_or(request.path);
        let expect_blake3 = request.expect_blake3.clone();
        let follow = |flight| Ok(Follower { flight, seen: 0, ended: false, expect_blake3 });
        let (sender, flight) = watch::channel(Flight::default());
        if !request.dry_run {
            let mut in_flight = self.lock();
            if let Some(running) = in_flight.get(&request.path) {
                if !request.name.is_empty() && request.name != running.name {
                    let text = format!(
                        "{} is being loaded under the name {:?}; wait for that, then load it as {:?}",
                        request.path.display(),
                        running.name,
                        request.name
                    );
                    return Err(Failure::usage("load_in_flight", text));
                }
                return follow(running.flight.clone());
            }
            let entry = InFlight { name: request.name.clone(), flight: flight.clone() };
            in_flight.insert(request.path.clone(), entry);
        }
        let loads = Arc::clone(self);
        tokio::spawn(async move {
            let end = loads.run(&request, &sender).await;
            if let Err(failure) = &end {
                tracing::error!(path = %request.path.display(), code = failure.code, "load failed: {}", failure.message);
            }
            if !request.dry_run {
                loads.lock().remove(&request.path);
            }
            sender.send_modify(|f| f.end = Some(end));
        });
        follow(flight)
    }

    async fn run(&self, request: &LoadRequest, flight: &watch::Sender<Flight>) -> Result<Loaded, Failure> {
        let mut stop = self.stop.subscribe();
        let stopped = async {
            // The sender lives as long as self.
            let _ = stop.wait_for(|s| *s).await;
            Failure::other("owner_stopping", "the weight owner is stopping; the load was cancelled")
        };
        let attempt = async {
            let _turn = match self.gate.try_lock() {
                Ok(turn) => turn,
                Err(_) => {
                    flight.send_modify(|f| f.milestones.push(loading("queued")));
                    self.gate.lock().await
                }
            };
            let epoch = self.ledger.next_epoch();
            let mut attempt = Attempt { loads: self, request, flight, epoch, entered: false, started: Instant::now() };
            let end = match tokio::time::timeout(request.deadline, attempt.run()).await {
                Ok(end) => end,
                Err(_) => Err(Failure::other(
                    "load_deadline",
                    format!(
                        "the load of {} did not finish within {} s; raise --load-deadline if the disk is that slow",
                        request.path.display(),
                        request.deadline.as_secs()
                    ),
                )),
            };
            if let (Err(failure), true) = (&end, attempt.entered) {
                self.ledger.fail(epoch, failure);
            }
            end
        };
        tokio::select! {
            end = attempt => end,
            failure = stopped => Err(failure),
        }
    }
}

struct Attempt<'a> {
    loads: &'a Loads,
    request: &'a LoadRequest,
    flight: &'a watch::Sender<Flight>,
    epoch: u64,
    /// The ledger knows about it.
    entered: bool,
    started: Instant,
}

impl Attempt<'_> {
    fn enter(&mut self, name: &str) {
        if !self.entered && !self.request.dry_run {
            self.loads.ledger.begin(self.epoch, name, &self.request.path);
            self.entered = true;
        }
    }

    fn milestone(&self, progress: v1::LoadProgress) {
        self.flight.send_modify(|f| {
            f.milestones.push(progress);
            f.latest = None;
        });
    }

    async fn run(&mut self) -> Result<Loaded, Failure> {
        let request = self.request;
        let earlier = self.loads.ledger.ready().into_iter().rev().find(|r| r.path == request.path);
        // The same content under another name, or a reload, is a load of its own.
        let earlier = earlier
            .filter(|r| !request.reload && !request.dry_run && (request.name.is_empty() || request.name == r.model));
        if earlier.is_none() {
            self.enter(&provisional_name(&request.name, &request.path));
        }
        let job = Job {
            path: request.path.clone(),
            name: request.name.clone(),
            expect_blake3: request.expect_blake3.clone(),
            plan_only: request.dry_run,
            unless_blake3: earlier.as_ref().map(|r| r.blake3.clone()),
            epoch: self.epoch,
            reserve_bytes: self.loads.options.reserve_bytes,
            allow_dev_models: self.loads.options.allow_dev_models,
            backend: self.loads.options.backend,
        };
        let (mut child, connection) = spawn(&job).await?;
        let result = self.follow(&connection, earlier).await;
        drop(connection);
        if let Ok(Some(loaded)) = result {
            // What was loaded is ours; taking down a process that maps 81 GiB of a device takes a while.
            tokio::spawn(async move { reap(&mut child).await });
            return Ok(loaded);
        }
        let status = reap(&mut child).await;
        match result? {
            Some(loaded) => Ok(loaded),
            None if request.dry_run && status.success() => Ok(Loaded { ready: None }),
            None => Err(lost_loader(status)),
        }
    }

    /// Takes reports until the last one. `None`: the loader closed without one.
    async fn follow(
        &mut self,
        connection: &AsyncConnection,
        earlier: Option<Ready>,
    ) -> Result<Option<Loaded>, Failure> {
        let mut chunks: Vec<OwnedFd> = Vec::new();
        loop {
            let message = match connection.recv(MAX_REPORT).await {
                Ok(Some(message)) => message,
                // A killed child may reset the connection; its exit status says more.
                Ok(None) => return Ok(None),
                Err(e) if e.kind() == Some(std::io::ErrorKind::ConnectionReset) => return Ok(None),
                Err(e) => return Err(Failure::other("loader_connection", format!("the loader cannot be heard: {e}"))),
            };
            let report = serde_json::from_slice(&message.bytes)
                .map_err(|e| Failure::other("loader_report", format!("unreadable report of the loader: {e}")))?;
            match report {
                Report::Planned(plan) => self.planned(&plan),
                Report::Progress { stage, done, total } => {
                    self.loads.ledger.progress(self.epoch, done);
                    let progress = v1::LoadProgress { done_bytes: done, total_bytes: total, ..loading(&stage) };
                    self.flight.send_modify(|f| f.latest = Some(progress));
                }
                Report::Stage { stage, bytes, gib_per_s, seconds } => self.stage(&stage, bytes, gib_per_s, seconds),
                Report::Note { text } => tracing::warn!(path = %self.request.path.display(), "{text}"),
                Report::Unchanged => {
                    tracing::info!(path = %self.request.path.display(), "content is unchanged, the READY epoch stays");
                    return Ok(Some(Loaded { ready: earlier }));
                }
                Report::Chunks { .. } => chunks.extend(message.fds),
                Report::Published { manifest_len, chunks: lengths, blake3, known, sealed } => {
                    let manifest = message.fds.into_iter().next();
                    let manifest = check_handed_over(manifest, manifest_len, &chunks, &lengths, sealed)?;
                    let bytes = lengths.iter().sum();
                    let held = Held { manifest, manifest_len, chunks, bytes, blake3, known };
                    return self.publish(held).map(Some);
                }
                Report::Failed(failure) => return Err(failure),
            }
        }
    }

    fn planned(&mut self, plan: &Plan) {
        self.enter(&plan.model);
        self.loads.ledger.planned(self.epoch, plan);
        tracing::info!(
            model = plan.model,
            backend = plan.backend,
            why = plan.why,
            weights = bytes(plan.weight_bytes),
            metadata = bytes(plan.metadata_bytes),
            reserve = bytes(plan.reserve_bytes),
            available = bytes(plan.available_bytes),
            source = plan.available_source,
            fits = plan.fits(),
            "plan"
        );
        if plan.synthetic {
            tracing::warn!(model = plan.model, "the weights are synthetic: speeds are real, answers are nonsense");
        }
        let shown = v1::Plan {
            weight_bytes: plan.weight_bytes,
            metadata_bytes: plan.metadata_bytes,
            reserve_bytes: plan.reserve_bytes,
            available_bytes: plan.available_bytes,
            available_source: plan.available_source.clone(),
            fits: plan.fits(),
        };
        self.milestone(v1::LoadProgress {
            total_bytes: plan.weight_bytes,
            model: plan.model.clone(),
            plan: Some(shown),
            ..loading("plan")
        });
    }

    fn stage(&self, stage: &str, bytes: u64, gib_per_s: f64, seconds: f64) {
        let model = self.request.path.display();
        tracing::info!(%model, stage, bytes, gib_per_s = format!("{gib_per_s:.2}"), seconds = format!("{seconds:.3}"), "stage");
        if gib_per_s < SLOW_GIB_PER_S && bytes >= SLOW_MIN_BYTES {
            tracing::warn!(
                %model,
                stage,
                gib_per_s = format!("{gib_per_s:.2}"),
                floor_gib_per_s = SLOW_GIB_PER_S,
                "slow stage: check the disk that holds the model"
            );
        }
        self.milestone(v1::LoadProgress { done_bytes: bytes, total_bytes: bytes, gib_per_s, ..loading(stage) });
    }

    /// READY, unless this content or name is there already.
    fn publish(&self, held: Held) -> Result<Loaded, Failure> {
        let ledger = &self.loads.ledger;
        let own = ledger.models().into_iter().find(|m| m.epoch == self.epoch);
        let model = own.map(|m| m.name).unwrap_or_default();
        let namesake = ledger.ready().into_iter().rev().find(|r| r.model == model);
        if let Some(namesake) = namesake.filter(|_| !self.request.reload) {
            if namesake.blake3 == held.blake3 {
                tracing::info!(model, epoch = namesake.epoch, "the same content is READY already");
                ledger.forget(self.epoch);
                return Ok(Loaded { ready: Some(namesake) });
            }
            if namesake.path != self.request.path {
                let text = format!(
                    "another model named {model:?} is READY (epoch {}, from {}); unload it, choose another name, or ask for a \
                     reload",
                    namesake.epoch,
                    namesake.path.display()
                );
                return Err(Failure::model("name_taken", text));
            }
        }
        let ready = Ready {
            epoch: self.epoch,
            model: model.clone(),
            path: self.request.path.clone(),
            blake3: held.blake3.clone(),
        };
        let took = self.started.elapsed();
        tracing::info!(
            model,
            epoch = self.epoch,
            bytes = bytes(held.bytes),
            chunks = held.chunks.len(),
            blake3 = held.blake3,
            known = held.known,
            seconds = format!("{:.3}", took.as_secs_f64()),
            "READY"
        );
        ledger.publish(self.epoch, held, took);
        Ok(Loaded { ready: Some(ready) })
    }
}

/// A name until the catalog gives one.
fn provisional_name(name: &str, path: &Path) -> String {
    if !name.is_empty() {
        return name.to_owned();
    }
    path.file_stem().map_or_else(|| path.display().to_string(), |s| s.to_string_lossy().into_owned())
}

/// Checks what the loader handed over, and returns the manifest. Of device memory the daemon can check nothing but the number of descriptors: it
/// never calls the driver. A worker's driver does, when it maps them.
fn check_handed_over(
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

/// Starts a loader and gives it its job.
async fn spawn(job: &Job) -> Result<(Child, AsyncConnection), Failure> {
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
async fn reap(child: &mut Child) -> ExitStatus {
    if let Ok(Ok(status)) = tokio::time::timeout(Duration::from_secs(5), child.wait()).await {
        return status;
    }
    let _ = child.start_kill();
    child.wait().await.unwrap_or_else(|_| ExitStatus::from_raw(9))
}

fn lost_loader(status: ExitStatus) -> Failure {
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
