//! The gRPC control service of proto/ds4/v1/owner.proto.
//!
//! Clients on gRPC's C core (Python, 1.57 and later) send the percent-encoded socket path as `:authority`, which the h2
//! crate refuses as malformed with PROTOCOL_ERROR before any service sees it (hyperium/h2 pull request 487): they set
//! the channel option `grpc.default_authority` to `localhost`; older grpcurl takes `-authority localhost`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ds4_proto::v1;
use ds4_proto::v1::owner_server::Owner;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::drain::wait_for_readers;
use crate::ledger::Ledger;
use crate::loads::{LoadRequest, Loads};
use crate::options::parse_blake3;

/// Longest deadline that a client may set.
const MAX_DEADLINE_S: u32 = 24 * 3600;

/// The service.
pub struct Control {
    ledger: Arc<Ledger>,
    loads: Arc<Loads>,
    load_deadline: Duration,
    drain_deadline: Duration,
    started: Instant,
}

impl Control {
    /// A service with the owner's default deadlines.
    pub fn new(ledger: Arc<Ledger>, loads: Arc<Loads>, load_deadline: Duration, drain_deadline: Duration) -> Self {
        Self { ledger, loads, load_deadline, drain_deadline, started: Instant::now() }
    }
}

/// A deadline in seconds, 0 being the default.
fn deadline(seconds: u32, default: Duration) -> Result<Duration, Status> {
    match seconds {
        0 => Ok(default),
        s if s > MAX_DEADLINE_S => {
            Err(Status::invalid_argument(format!("deadline_s is {s}: give at most {MAX_DEADLINE_S}")))
        }
        s => Ok(Duration::from_secs(s.into())),
    }
}

type Stream<T> = ReceiverStream<Result<T, Status>>;

#[tonic::async_trait]
impl Owner for Control {
    type LoadStream = Stream<v1::LoadProgress>;
    type WatchStream = Stream<v1::WatchEvent>;

    async fn load(&self, request: Request<v1::LoadRequest>) -> Result<Response<Self::LoadStream>, Status> {
        let r = request.into_inner();
        let path = PathBuf::from(&r.path);
        if !path.is_absolute() {
            let text = format!("path {:?} is not absolute; the owner has another working directory than you", r.path);
            return Err(Status::invalid_argument(text));
        }
        let expect_blake3 = match r.expect_blake3.as_str() {
            "" => None,
            hex => Some(parse_blake3(hex).map_err(|e| Status::invalid_argument(format!("expect_blake3 {e}")))?),
        };
        let load = LoadRequest {
            path,
            name: r.name,
            dry_run: r.dry_run,
            expect_blake3,
            reload: r.reload,
            deadline: deadline(r.deadline_s, self.load_deadline)?,
        };
        let mut follower = self.loads.begin(load).map_err(|f| Status::failed_precondition(f.to_string()))?;
        let (sender, stream) = mpsc::channel(16);
        tokio::spawn(async move {
            while let Some(progress) = follower.next().await {
                if sender.send(Ok(progress)).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn unload(&self, request: Request<v1::UnloadRequest>) -> Result<Response<v1::UnloadReply>, Status> {
        let r = request.into_inner();
        let limit = deadline(r.deadline_s, self.drain_deadline)?;
        let seconds = u32::try_from(limit.as_secs()).unwrap_or(MAX_DEADLINE_S);
        let (epochs, leases) =
            self.ledger.drain(&r.model, r.epoch, seconds, "the model is being unloaded").map_err(Status::not_found)?;
        tracing::info!(model = r.model, ?epochs, leases, "unload");
        let ledger = Arc::clone(&self.ledger);
        let reply = v1::UnloadReply {
            epochs: u32::try_from(epochs.len()).unwrap_or(u32::MAX),
            leases_waited_for: u32::try_from(leases).unwrap_or(u32::MAX),
        };
        // A task of its own, so that the drain goes on when the client hangs up.
        let waited = tokio::spawn(async move { wait_for_readers(&ledger, &epochs, limit).await });
        match waited.await {
            Ok(Ok(())) => Ok(Response::new(reply)),
            Ok(Err(pids)) => Err(Status::deadline_exceeded(format!(
                "processes {pids:?} still hold leases after SIGTERM; the model stays DRAINING until they end"
            ))),
            Err(e) => Err(Status::internal(format!("the drain was interrupted: {e}"))),
        }
    }

    async fn list(&self, _: Request<v1::ListRequest>) -> Result<Response<v1::ListReply>, Status> {
        Ok(Response::new(v1::ListReply { models: self.ledger.models() }))
    }

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusReply>, Status> {
        let memory = ds4_os::stats::memory(None).unwrap_or_default();
        Ok(Response::new(v1::StatusReply {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            rss_bytes: memory.resident,
            fds: ds4_os::stats::fd_count(None).ok().and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
            weight_bytes: self.ledger.weight_bytes(),
            backend: self.ledger.backends().unwrap_or_else(|| self.loads.backend().into()),
            draining: self.ledger.stopping(),
        }))
    }

    async fn leases(&self, _: Request<v1::LeasesRequest>) -> Result<Response<v1::LeasesReply>, Status> {
        Ok(Response::new(v1::LeasesReply { leases: self.ledger.leases() }))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (sender, stream) = mpsc::channel(16);
        let ledger = Arc::clone(&self.ledger);
        tokio::spawn(async move {
            let (mut now, mut events) = ledger.watch();
            loop {
                for event in now.drain(..) {
                    if sender.send(Ok(event)).await.is_err() {
                        return;
                    }
                }
                let next = tokio::select! {
                    next = events.recv() => next,
                    // Else a watcher of a quiet owner would never be let go.
                    () = sender.closed() => return,
                };
                match next {
                    Ok(event) => now.push(event),
                    // A slow watcher gets the present state again instead of what it missed.
                    Err(RecvError::Lagged(_)) => (now, events) = ledger.watch(),
                    Err(RecvError::Closed) => return,
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}
