//! gRPC over the control sockets.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use ds4_proto::v1;
use ds4_proto::v1::owner_client::OwnerClient;
use ds4_proto::v1::worker_client::WorkerClient;
use ds4_settings::{EXIT_PEER, OWNER_SOCKET, WORKER_SOCKET};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::failure::Failure;

/// How long a status question may take: both processes answer it without touching the engine or the loader.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);

async fn channel(socket: PathBuf) -> anyhow::Result<Channel> {
    let shown = socket.display().to_string();
    let connect = move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    };
    // The URI is only the HTTP/2 authority; the connector decides where the bytes go.
    Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(connect))
        .await
        .map_err(|e| Failure::error(EXIT_PEER, format!("{shown}: {}", root_cause(&e))))
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// A client of the owner in `dir`.
///
/// # Errors
/// Exit code 3 when nothing listens there.
pub async fn owner(dir: &Path) -> anyhow::Result<OwnerClient<Channel>> {
    channel(dir.join(OWNER_SOCKET)).await.map(OwnerClient::new).context("no weight owner answers")
}

/// A client of the worker in `dir`.
///
/// # Errors
/// Exit code 3 when nothing listens there.
pub async fn worker(dir: &Path) -> anyhow::Result<WorkerClient<Channel>> {
    worker_channel(dir).await.map(WorkerClient::new)
}

/// A connection to the worker in `dir`, for any of its services.
///
/// # Errors
/// Exit code 3 when nothing listens there.
pub async fn worker_channel(dir: &Path) -> anyhow::Result<Channel> {
    channel(dir.join(WORKER_SOCKET)).await.context("no worker answers")
}

async fn within<T>(what: &str, answer: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::time::timeout(STATUS_TIMEOUT, answer).await.unwrap_or_else(|_| {
        Err(Failure::error(EXIT_PEER, format!("the {what} did not answer within {STATUS_TIMEOUT:?}")))
    })
}

/// The owner's status.
pub async fn owner_status(dir: &Path) -> anyhow::Result<v1::StatusReply> {
    within("owner", async { Ok(owner(dir).await?.status(v1::StatusRequest {}).await.map_err(status)?.into_inner()) })
        .await
}

/// The owner's models.
pub async fn models(dir: &Path) -> anyhow::Result<Vec<v1::Model>> {
    within("owner", async { Ok(owner(dir).await?.list(v1::ListRequest {}).await.map_err(status)?.into_inner().models) })
        .await
}

/// The worker's status.
pub async fn worker_status(dir: &Path) -> anyhow::Result<v1::WorkerStatusReply> {
    within("worker", async {
        Ok(worker(dir).await?.status(v1::WorkerStatusRequest {}).await.map_err(status)?.into_inner())
    })
    .await
}

/// An RPC's failure as the sentence that the peer gave.
pub fn status(status: tonic::Status) -> anyhow::Error {
    use tonic::Code;
    let code = match status.code() {
        Code::Unavailable | Code::PermissionDenied | Code::Unauthenticated => EXIT_PEER,
        Code::ResourceExhausted => ds4_settings::EXIT_MEMORY,
        _ => 1,
    };
    Failure::error(code, if status.message().is_empty() { status.to_string() } else { status.message().to_string() })
}
