//! The gRPC control service of proto/ds4/v1/worker.proto, and the socket that it shares with the debugging service.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ds4_api::{Api, Backend, Phase};
use ds4_os::wait::LOOK;
use ds4_proto::v1;
use ds4_proto::v1::debug_server::DebugServer;
use ds4_proto::v1::worker_server::{Worker, WorkerServer};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::health_reporter;

use crate::backend::Serving;
use crate::debug::{self, Inspector};
use crate::failure::Failure;
use crate::listen::Control as Place;

/// Name of the service, as health and reflection know it.
const SERVICE: &str = "ds4.v1.Worker";
/// Longest deadline that a client may set.
const MAX_DEADLINE_S: u32 = 24 * 3600;

/// The service.
pub struct Control {
    pub serving: Arc<Serving>,
    pub api: Arc<Api>,
    pub http: String,
    pub started: Instant,
    pub drain_deadline: Duration,
    /// Where a wish to drain goes, with its deadline.
    pub drain: mpsc::Sender<Duration>,
}

fn narrow(n: impl TryInto<u32>) -> u32 {
    n.try_into().unwrap_or(u32::MAX)
}

#[tonic::async_trait]
impl Worker for Control {
    async fn status(&self, _: Request<v1::WorkerStatusRequest>) -> Result<Response<v1::WorkerStatusReply>, Status> {
        let (m, s) = (self.serving.model(), self.serving.stats());
        let state = match *self.api.phase().borrow() {
            Phase::Starting => "starting",
            Phase::Ready => "ready",
            Phase::Draining => "draining",
        };
        Ok(Response::new(v1::WorkerStatusReply {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            model: m.name.clone(),
            blake3: m.blake3.clone(),
            epoch: m.epoch,
            http: self.http.clone(),
            state: state.into(),
            running: narrow(s.running),
            queued: narrow(s.queued),
            context: narrow(m.context),
            max_batch: narrow(m.max_batch),
            uptime_s: self.started.elapsed().as_secs(),
            requests_total: s.requests,
            ready_ms: m.ready_ms,
            device: m.device.clone(),
            synthetic: m.synthetic,
            drafter: m.drafter.clone().unwrap_or_default(),
            drafted_tokens: s.drafted_tokens,
            accepted_tokens: s.accepted_tokens,
        }))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainReply>, Status> {
        let deadline = match request.into_inner().deadline_s {
            0 => self.drain_deadline,
            s if s > MAX_DEADLINE_S => {
                return Err(Status::invalid_argument(format!("deadline_s is {s}: give at most {MAX_DEADLINE_S}")));
            }
            s => Duration::from_secs(s.into()),
        };
        let s = self.serving.stats();
        // From here on new requests are refused, before the reply can reach anyone.
        self.api.set_phase(Phase::Draining);
        // A drain that is under way already is what was asked for.
        let _ = self.drain.try_send(deadline);
        Ok(Response::new(v1::DrainReply { running: narrow(s.running), queued: narrow(s.queued) }))
    }
}

/// Health, reflection (v1 and v1alpha) and control for those who call; the future serves them for ever.
///
/// # Errors
/// The service cannot be described.
pub async fn serve(
    callers: mpsc::Receiver<std::io::Result<UnixStream>>,
    control: Control,
) -> Result<impl Future<Output = ()> + Send + 'static, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::other(format!("cannot serve control: {e}"));
    let (health, health_service) = health_reporter();
    for service in [SERVICE, debug::SERVICE] {
        health.set_service_status(service, ServingStatus::Serving).await;
    }
    health.set_service_status("", ServingStatus::Serving).await;
    let mut phase = control.api.phase();
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(SERVICE)
            .with_service_name(debug::SERVICE)
            .with_service_name("grpc.health.v1.Health")
    };
    let reflection_v1 = reflection().with_service_name("grpc.reflection.v1.ServerReflection").build_v1();
    let reflection_v1alpha = reflection().with_service_name("grpc.reflection.v1alpha.ServerReflection").build_v1alpha();
    let inspector = Inspector { serving: Arc::clone(&control.serving) };
    let server = Server::builder()
        .add_service(health_service)
        .add_service(reflection_v1.map_err(|e| failed(&e))?)
        .add_service(reflection_v1alpha.map_err(|e| failed(&e))?)
        .add_service(WorkerServer::new(control))
        .add_service(DebugServer::new(inspector))
        .serve_with_incoming(ReceiverStream::new(callers));
    Ok(async move {
        let drained = async {
            let _ = phase.wait_for(|p| *p == Phase::Draining).await.map(drop);
            health.set_service_status("", ServingStatus::NotServing).await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            result = server => {
                if let Err(e) = result {
                    tracing::error!("control ended: {e}");
                }
            }
            () = drained => {}
        }
    })
}

/// Passes on those who call at `listener` to [`serve`].
///
/// # Errors
/// The runtime cannot watch the socket.
pub fn take_calls(
    listener: std::os::unix::net::UnixListener,
    to: mpsc::Sender<std::io::Result<UnixStream>>,
) -> Result<(), Failure> {
    let listener = tokio::net::UnixListener::from_std(listener)
        .map_err(|e| Failure::other(format!("cannot serve control: {e}")))?;
    tokio::spawn(ds4_os::wait::feed(listener, to));
    Ok(())
}

/// Listens again in a runtime directory that somebody removed: who is not found there cannot be asked for anything.
pub async fn stay_found(place: &mut Place, callers: mpsc::Sender<std::io::Result<UnixStream>>) -> Infallible {
    let mut said = None;
    loop {
        tokio::time::sleep(LOOK).await;
        if place.intact() {
            continue;
        }
        let renewed = place.renew().and_then(|listener| take_calls(listener, callers.clone()));
        let shown = place.dir().display();
        match renewed {
            Ok(()) => {
                said = None;
                tracing::warn!("the socket in {shown} was removed by somebody; made again");
            }
            Err(failure) => {
                let text = failure.to_string();
                if said.as_ref() != Some(&text) {
                    tracing::error!("the socket in {shown} was removed by somebody, and cannot be made again: {text}");
                    said = Some(text);
                }
            }
        }
    }
}
