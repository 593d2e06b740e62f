//! A worker's life after its configuration: boot, serve, drain.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ds4_api::{Api, Hosts, ModelInfo, Phase};
use ds4_attach::{Lease, Notice};
use ds4_engine::{EngineHandle, EngineState};
use sd_notify::NotifyState;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::backend::Serving;
use crate::boot::{Booted, boot};
use crate::config::Options;
use crate::control;
use crate::failure::Failure;
use crate::listen::{Control, Http};

/// What is left to flush after the engine's last word.
const FLUSH: Duration = Duration::from_secs(2);

/// Boots, serves, and returns when drained. `started` is the process's start.
///
/// # Errors
/// Whatever ends a worker otherwise, with its exit code.
pub fn run(options: Options, started: Instant, runtime: &Runtime) -> Result<(), Failure> {
    let result = live(options, started, runtime);
    if let Err(failure) = &result {
        // Its last words, for the supervisor to repeat.
        notify(&[NotifyState::Status(&failure.to_string().replace('\n', " "))]);
    }
    result
}

fn live(options: Options, started: Instant, runtime: &Runtime) -> Result<(), Failure> {
    // Before the long part, so that a signal during it is not lost and a taken port is found at once.
    let mut signals = runtime.block_on(async { Signals::new() })?;
    let http = Http::open(&options)?;
    let (mut place, control_listener) = Control::open(&options.runtime_dir)?;
    let Booted { attached, drafter, engine, tokenizer, template, context_train, device, phases, .. } = {
        let booted = boot_unless_told_to_stop(&options, runtime, &mut signals)?;
        let Some(booted) = booted else { return Ok(()) };
        booted
    };
    let addr = http.listener.local_addr().map_err(Failure::other)?.to_string();
    let manifest = attached.weights.manifest();
    let ready_ms = (started.elapsed().as_secs_f64() * 1e4).round() / 10.0;
    let info = ModelInfo {
        name: manifest.model.name.clone(),
        family: manifest.model.family.clone(),
        artifact: manifest.model.artifact.clone(),
        synthetic: manifest.metadata.is_synthetic(),
        drafter: drafter.as_ref().map(|d| d.weights.manifest().model.name.clone()),
        abilities: template.as_ref().map_or_else(Default::default, ds4_text::ChatTemplate::abilities),
        blake3: hex(&manifest.model.content),
        epoch: manifest.epoch,
        weight_bytes: manifest.chunks.iter().map(|c| c.len).sum(),
        context: engine.context(),
        context_train,
        vocab: tokenizer.vocab_size(),
        device,
        max_batch: engine.max_batch(),
        max_queue: engine.max_queue(),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        ready_ms,
    };
    let serving = Arc::new(Serving { info, engine: engine.clone(), tokenizer, template });
    let api = Api::new(Arc::clone(&serving) as _, options.api.clone());
    runtime.block_on(async move {
        let (drain, drains) = mpsc::channel(1);
        let control = control::Control {
            serving: Arc::clone(&serving),
            api: Arc::clone(&api),
            http: addr.clone(),
            started,
            drain_deadline: options.drain_deadline,
            drain,
        };
        let (callers, incoming) = mpsc::channel(16);
        control::take_calls(control_listener, callers.clone())?;
        tokio::spawn(control::serve(incoming, control).await?);
        let (listener, inherited) = http.into_tokio()?;
        let local = listener.local_addr().is_ok_and(|a| a.ip().is_loopback()) && !options.allow_remote;
        let hosts = if local { Hosts::local(options.allow_hosts.clone()) } else { Hosts::any() };
        let server = tokio::spawn(ds4_api::serve(Arc::clone(&api), listener, inherited, hosts));
        let info = &serving.info;
        tracing::info!(
            model = %info.name, blake3 = %info.blake3, epoch = info.epoch, device = %info.device,
            context = info.context, max_batch = info.max_batch, http = %addr, inherited,
            "ready in {ready_ms} ms ({phases})"
        );
        notify(&[NotifyState::Ready, NotifyState::Status(&format!("serving {} on {addr}", info.name))]);
        let life = Life { api, engine, server, signals, drain_deadline: options.drain_deadline };
        tokio::select! {
            ended = life.serve(&attached.lease, drafter.as_ref().map(|d| &d.lease), drains) => ended?,
            never = control::stay_found(&mut place, callers) => match never {},
        }
        drop((place, attached, drafter));
        Ok(())
    })
}

/// Boots on a thread of its own, so that SIGTERM is obeyed meanwhile. `None`: told to stop.
fn boot_unless_told_to_stop(
    options: &Options,
    runtime: &Runtime,
    signals: &mut Signals,
) -> Result<Option<Booted>, Failure> {
    let options = options.clone();
    let booting = runtime.spawn_blocking(move || boot(&options));
    runtime.block_on(async {
        tokio::select! {
            booted = booting => booted.map_err(|e| Failure::other(format!("the start failed: {e}")))?.map(Some),
            () = signals.next() => Ok(None),
        }
    })
}

/// SIGTERM and SIGINT.
struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    fn new() -> Result<Self, Failure> {
        let failed = |e| Failure::other(format!("cannot handle signals: {e}"));
        Ok(Self {
            term: signal(SignalKind::terminate()).map_err(failed)?,
            int: signal(SignalKind::interrupt()).map_err(failed)?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

/// What runs.
struct Life {
    api: Arc<Api>,
    engine: EngineHandle,
    server: JoinHandle<std::io::Result<()>>,
    signals: Signals,
    drain_deadline: Duration,
}

impl Life {
    /// Until something asks for an end, then drains.
    async fn serve(
        mut self,
        lease: &Lease,
        drafter: Option<&Lease>,
        mut drains: mpsc::Receiver<Duration>,
    ) -> Result<(), Failure> {
        let (tx, mut notices) = mpsc::unbounded_channel();
        // The receiver lives as long as this function; after it nobody needs to know.
        let also = tx.clone();
        let watching = lease.watch(move |notice| drop(tx.send(notice))).and_then(|()| match drafter {
            // That the owner is gone, the other lease says.
            Some(lease) => lease.watch(move |n| drop((n != Notice::OwnerGone).then(|| also.send(n)))),
            None => Ok(()),
        });
        watching.map_err(|e| Failure::other(format!("cannot watch the lease: {e}")))?;
        let deadline = loop {
            tokio::select! {
                () = self.signals.next() => {
                    tracing::info!("told to stop");
                    break self.drain_deadline;
                }
                Some(deadline) = drains.recv() => {
                    tracing::info!("told to drain");
                    break deadline;
                }
                Some(notice) = notices.recv() => match notice {
                    Notice::Drain { deadline, reason } => {
                        tracing::info!(deadline_s = deadline.as_secs(), "the owner asks for its lease: {reason}");
                        // The owner's SIGTERM must not find answers half written.
                        let margin = deadline.saturating_sub(FLUSH).max(deadline / 2);
                        break if deadline.is_zero() { self.drain_deadline } else { margin.min(self.drain_deadline) };
                    }
                    Notice::OwnerGone => tracing::warn!("the owner is gone; serving goes on with the mapped weights"),
                },
                state = self.engine.stopped() => return self.died(state).await,
            }
        };
        self.drain(deadline).await
    }

    async fn drain(mut self, deadline: Duration) -> Result<(), Failure> {
        let stats = self.engine.stats();
        tracing::info!(running = stats.running, queued = stats.queued, deadline_s = deadline.as_secs_f64(), "draining");
        self.api.set_phase(Phase::Draining);
        notify(&[NotifyState::Stopping]);
        let asked = Instant::now();
        let finished = async {
            // Some that were accepted are still being parsed: a prompt takes its time, and so does a schema.
            self.api.entered().await;
            self.engine.drain(deadline.saturating_sub(asked.elapsed()));
            let state = self.engine.stopped().await;
            // The last answers are on their way to their clients.
            if tokio::time::timeout(FLUSH, &mut self.server).await.is_err() {
                tracing::info!("clients still hold connections; closing them");
            }
            state
        };
        tokio::select! {
            state = finished => match state {
                EngineState::Failed(why) => Err(Failure::other(format!("the engine failed while draining: {why}"))),
                _ => {
                    tracing::info!("drained");
                    Ok(())
                }
            },
            () = self.signals.next() => {
                tracing::warn!("told to stop again: ending at once");
                Ok(())
            }
        }
    }

    /// The engine ended by itself.
    async fn died(mut self, state: EngineState) -> Result<(), Failure> {
        let why = match state {
            EngineState::Failed(why) => why,
            state => format!("it stopped unasked ({state:?})"),
        };
        tracing::error!("the engine failed: {why}");
        self.api.set_phase(Phase::Draining);
        // Clients shall read why; their requests have failed already.
        let _ = tokio::time::timeout(FLUSH, &mut self.server).await;
        Err(Failure::other(format!("the engine failed: {why}")))
    }
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(state) {
        tracing::warn!("the service manager could not be told: {e}");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
