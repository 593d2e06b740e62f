//! One load: a loader child is told what to do, heard to its last report, and what it made is published.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use ds4_os::wait::AsyncConnection;
use ds4_proto::v1;
use tokio::sync::watch;

use super::child::{check_handed_over, lost_loader, reap, spawn};
use super::follower::{Flight, loading};
use super::{LoadRequest, Loaded, Loads};
use crate::Failure;
use crate::ledger::{Held, Ready};
use crate::report::{Job, MAX_REPORT, Plan, Report, bytes};

/// Below this a large load is warned about: a slow disk or a mapping where reads were meant.
const SLOW_GIB_PER_S: f64 = 0.5;
/// Loads smaller than this say nothing about a disk.
const SLOW_MIN_BYTES: u64 = 256 << 20;

/// A load that has its turn.
pub(super) struct Attempt<'a> {
    loads: &'a Loads,
    request: &'a LoadRequest,
    flight: &'a watch::Sender<Flight>,
    epoch: u64,
    /// The ledger knows about it.
    entered: bool,
    started: Instant,
}

impl<'a> Attempt<'a> {
    /// Nothing has happened yet.
    pub fn new(loads: &'a Loads, request: &'a LoadRequest, flight: &'a watch::Sender<Flight>, epoch: u64) -> Self {
        Self { loads, request, flight, epoch, entered: false, started: Instant::now() }
    }

    /// The ledger knows about it, and has to hear of its failure.
    pub fn entered(&self) -> bool {
        self.entered
    }

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

    /// To its end.
    ///
    /// # Errors
    /// Whatever kept the model from being READY.
    pub async fn run(&mut self) -> Result<Loaded, Failure> {
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
