//! The daemon: sockets, loads at start, stopping.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ds4_os::seqpacket::Listener;
use ds4_os::wait::{LOOK, feed};
use ds4_proto::v1;
use ds4_proto::v1::owner_server::OwnerServer;
use sd_notify::NotifyState;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use crate::Failure;
use crate::broker::{self, Allowed};
use crate::control::Control;
use crate::drain::wait_for_readers;
use crate::ledger::Ledger;
use crate::loads::{Follower, LoadOptions, LoadRequest, Loads};
use crate::options::Options;
use crate::runtime_dir::RuntimeDir;

/// Name of the control service, as health and reflection know it.
const SERVICE: &str = "ds4.v1.Owner";

/// Runs the owner until SIGTERM or SIGINT.
///
/// # Errors
/// It cannot start, or a model given at start cannot be loaded (unless told to keep going).
pub async fn run(options: Options) -> Result<(), Failure> {
    let result = live(options).await;
    if let Err(failure) = &result {
        // The last words of a start that failed: without them a supervisor knows only which stage it was in.
        notify(&[NotifyState::Status(&failure.to_string().replace('\n', " "))]);
    }
    result
}

async fn live(options: Options) -> Result<(), Failure> {
    let signals = |e| Failure::other("signals", format!("cannot handle signals: {e}"));
    let mut terminate = Terminate {
        term: signal(SignalKind::terminate()).map_err(signals)?,
        int: signal(SignalKind::interrupt()).map_err(signals)?,
    };
    for model in &options.models {
        check_model_path(model)?;
    }
    let mut dir = RuntimeDir::claim(&options.runtime_dir)?;
    let ledger = Arc::new(Ledger::default());
    let load_options = LoadOptions {
        reserve_bytes: options.reserve_bytes,
        allow_dev_models: options.allow_dev_models,
        backend: options.backend,
    };
    let loads = Arc::new(Loads::new(Arc::clone(&ledger), load_options));
    let open = !options.allow_uids.is_empty();
    let broker = {
        let (ledger, allowed) = (Arc::clone(&ledger), Allowed::new(options.allow_uids.clone()));
        move |listener| {
            let served = broker::serve(listener, Arc::clone(&ledger), allowed.clone());
            tokio::spawn(async move {
                if let Err(e) = served.await {
                    tracing::error!("the broker ended: {e}");
                }
            });
        }
    };
    broker(dir.broker(open)?);
    let control = Control::new(Arc::clone(&ledger), Arc::clone(&loads), options.load_deadline, options.drain_deadline);
    let (callers, incoming) = mpsc::channel(16);
    let (health, server) = serve_control(incoming, control).await?;
    tokio::spawn(server);
    let control = move |listener| {
        let listener = UnixListener::from_std(listener)
            .map_err(|e| Failure::other("control", format!("cannot serve control: {e}")))?;
        tokio::spawn(feed(listener, callers.clone()));
        Ok(())
    };
    control(dir.control()?)?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), runtime_dir = %options.runtime_dir.display(), "listening");

    let life = async {
        tokio::select! {
            loaded = load_all(&options, &loads) => {
                if let Err(failure) = loaded {
                    loads.stop();
                    return Err(failure);
                }
                health.set_service_status("", ServingStatus::Serving).await;
                notify(&[NotifyState::Ready, NotifyState::Status(&summary(&ledger))]);
                tracing::info!(models = ledger.ready().len(), "ready");
                terminate.recv().await;
            }
            () = terminate.recv() => {}
        }
        stop(&options, &ledger, &loads, &health, &mut terminate).await;
        Ok(())
    };
    tokio::select! {
        ended = life => ended,
        never = stay_found(&mut dir, open, broker, control) => match never {},
    }
}

/// Listens again in a runtime directory that somebody removed: who is not found there cannot lend what it holds.
async fn stay_found(
    dir: &mut RuntimeDir,
    open: bool,
    broker: impl Fn(Listener),
    control: impl Fn(std::os::unix::net::UnixListener) -> Result<(), Failure>,
) -> Infallible {
    let mut said = None;
    loop {
        tokio::time::sleep(LOOK).await;
        if dir.intact() {
            continue;
        }
        let renewed = dir.renew(open).and_then(|(lending, listener)| {
            broker(lending);
            control(listener)
        });
        let shown = dir.path().display();
        match renewed {
            Ok(()) => {
                said = None;
                tracing::warn!("the sockets in {shown} were removed by somebody; made again");
            }
            Err(failure) => {
                let text = failure.to_string();
                if said.as_ref() != Some(&text) {
                    tracing::error!(
                        "the sockets in {shown} were removed by somebody, and cannot be made again: {text}"
                    );
                    said = Some(text);
                }
            }
        }
    }
}

/// SIGTERM and SIGINT.
struct Terminate {
    term: Signal,
    int: Signal,
}

impl Terminate {
    async fn recv(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

/// The cheapest of the loader's checks, before anything is bound or forked.
fn check_model_path(path: &Path) -> Result<(), Failure> {
    match std::fs::metadata(path) {
        Ok(_) => Ok(()),
        Err(e) => {
            let code = if e.kind() == std::io::ErrorKind::PermissionDenied { "unreadable" } else { "file_not_found" };
            let text = format!("{}: {e}; check the path, or fetch the model with `ds4 pull`", path.display());
            Err(Failure::model(code, text))
        }
    }
}

/// Health, reflection and control for those who call; returns the future that serves them.
async fn serve_control(
    callers: mpsc::Receiver<std::io::Result<UnixStream>>,
    control: Control,
) -> Result<(HealthReporter, impl Future<Output = ()>), Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::other("control", format!("cannot serve control: {e}"));
    let (health, health_service) = health_reporter();
    health.set_service_status("", ServingStatus::NotServing).await;
    health.set_service_status(SERVICE, ServingStatus::Serving).await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(SERVICE)
            .with_service_name("grpc.health.v1.Health")
    };
    let reflection_v1 = reflection().with_service_name("grpc.reflection.v1.ServerReflection");
    let reflection_v1alpha = reflection().with_service_name("grpc.reflection.v1alpha.ServerReflection");
    let server = Server::builder()
        .add_service(health_service)
        .add_service(reflection_v1.build_v1().map_err(|e| failed(&e))?)
        .add_service(reflection_v1alpha.build_v1alpha().map_err(|e| failed(&e))?)
        .add_service(OwnerServer::new(control))
        .serve_with_incoming(ReceiverStream::new(callers));
    let serve = async move {
        if let Err(e) = server.await {
            tracing::error!("control ended: {e}");
        }
    };
    Ok((health, serve))
}

/// Loads the models that were given at start, one after the other.
async fn load_all(options: &Options, loads: &Arc<Loads>) -> Result<(), Failure> {
    for path in &options.models {
        let request = LoadRequest {
            path: path.clone(),
            name: options.name.clone(),
            dry_run: false,
            expect_blake3: options.expect_blake3.clone(),
            reload: false,
            deadline: options.load_deadline,
        };
        let outcome = match loads.begin(request) {
            Ok(follower) => follow(path, follower).await,
            Err(failure) => Err(failure),
        };
        if let Err(failure) = outcome {
            if !options.keep_going {
                return Err(failure);
            }
            tracing::warn!(path = %path.display(), "goes on without this model, as told: {failure}");
        }
    }
    Ok(())
}

/// Tells the service manager how a load goes, so that a long one is not taken for a hang.
async fn follow(path: &Path, follower: Follower) -> Result<(), Failure> {
    let outcome = follower.clone().outcome();
    let progress = async {
        let mut follower = follower;
        while let Some(p) = follower.next().await {
            let percent = (u128::from(p.done_bytes) * 100).checked_div(u128::from(p.total_bytes)).unwrap_or(0);
            let status = format!("loading {}: {} {percent} %", path.display(), p.stage);
            notify(&[NotifyState::Status(&status), NotifyState::ExtendTimeoutUsec(10_000_000)]);
        }
    };
    tokio::join!(outcome, progress).0.map(drop)
}

/// Waits for readers, then lets go. A second signal ends at once.
async fn stop(
    options: &Options,
    ledger: &Arc<Ledger>,
    loads: &Loads,
    health: &HealthReporter,
    terminate: &mut Terminate,
) {
    let seconds = u32::try_from(options.drain_deadline.as_secs()).unwrap_or(u32::MAX);
    let epochs = ledger.holding();
    let readers = ledger.leases().len();
    tracing::info!(readers, deadline_s = seconds, "stopping: waiting for readers");
    let status = format!("stopping: {readers} reader(s) have {seconds} s");
    let grace = options.drain_deadline.saturating_add(crate::drain::GRACE).saturating_add(Duration::from_secs(5));
    let extend = u32::try_from(grace.as_micros()).unwrap_or(u32::MAX);
    notify(&[NotifyState::Stopping, NotifyState::Status(&status), NotifyState::ExtendTimeoutUsec(extend)]);
    health.set_service_status("", ServingStatus::NotServing).await;
    loads.stop();
    ledger.stop(seconds);
    tokio::select! {
        left = wait_for_readers(ledger, &epochs, options.drain_deadline) => match left {
            Ok(()) => tracing::info!("all readers are gone; stopped"),
            Err(pids) => tracing::warn!(?pids, "stopped while processes still map the weights; their memory goes with them"),
        },
        () = terminate.recv() => tracing::warn!("second signal: stopped at once"),
    }
    ledger.clear();
}

fn summary(ledger: &Ledger) -> String {
    let ready: Vec<String> = ledger.ready().into_iter().map(|r| format!("{} (epoch {})", r.model, r.epoch)).collect();
    if ready.is_empty() { "ready, no model".into() } else { format!("ready: {}", ready.join(", ")) }
}

/// Tells systemd, when it listens.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(states) {
        tracing::debug!("service manager not told: {e}");
    }
}
