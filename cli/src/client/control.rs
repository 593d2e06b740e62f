//! gRPC over the control sockets.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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

/// How long commands wait for a worker that is being replaced. Starts of small models take 0.1 s, of the largest some seconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// An owner that has just started lists no model yet: what is missing counts only after this.
const GLIMPSE: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(20);

async fn channel(socket: PathBuf) -> anyhow::Result<Channel> {
    let shown = socket.display().to_string();
    let connect = move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    };
    // The URI is only the HTTP/2 authority; the connector decides where the bytes go.
    Endpoint::from_static("http://localhost").connect_with_connector(tower::service_fn(connect)).await.map_err(|e| {
        let why = Path::new(&shown).parent().and_then(denied);
        Failure::error(EXIT_PEER, why.unwrap_or_else(|| format!("{shown}: {}", root_cause(&e))))
    })
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// What is the matter when processes are there that this user may not talk to.
pub fn denied(dir: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt as _;
    let refused = |socket: &str| {
        let answer = std::os::unix::net::UnixStream::connect(dir.join(socket));
        answer.is_err_and(|e| e.kind() == std::io::ErrorKind::PermissionDenied)
    };
    [OWNER_SOCKET, WORKER_SOCKET].into_iter().find(|socket| refused(socket))?;
    let of = std::fs::metadata(dir).map(|m| format!("user {}", m.uid())).unwrap_or_else(|_| "another user".into());
    Some(format!(
        "{} belongs to {of}, and this is user {}: only its own user and root may look at and control what runs there (with sudo \
         -u, for example); to use what it serves, give `ds4 run` and `ds4 chat` its --url",
        dir.display(),
        nix::unistd::geteuid()
    ))
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

/// The owner's leases.
pub async fn leases(dir: &Path) -> anyhow::Result<Vec<v1::Lease>> {
    within("owner", async {
        Ok(owner(dir).await?.leases(v1::LeasesRequest {}).await.map_err(status)?.into_inner().leases)
    })
    .await
}

/// The status of a worker that takes requests. While a supervisor is alive, a worker that is being replaced is waited for.
///
/// # Errors
/// Exit code 3 when none answers, at once without a supervisor or when there is nothing to serve.
pub async fn ready_worker(dir: &Path) -> anyhow::Result<v1::WorkerStatusReply> {
    let begun = Instant::now();
    loop {
        let answer = worker_status(dir).await;
        if answer.as_ref().is_ok_and(|s| s.state == "ready") || crate::serve::supervisor(dir).is_none() {
            return answer;
        }
        let waited = begun.elapsed();
        if let Err(error) = &answer
            && waited >= GLIMPSE
        {
            let (missing, hopeless) = missing(dir).await;
            if hopeless || waited >= PATIENCE {
                let why = missing.unwrap_or_else(|| format!("{error:#}, for {} s", waited.as_secs()));
                return Err(Failure::error(EXIT_PEER, why));
            }
        }
        if waited >= PATIENCE {
            // It drains: its own refusal says so.
            return answer;
        }
        tokio::time::sleep(POLL).await;
    }
}

/// What keeps the supervisor from starting a worker, and whether waiting alone does not help.
async fn missing(dir: &Path) -> (Option<String>, bool) {
    let Ok(models) = models(dir).await else { return (None, false) };
    let mut servable = models.iter().filter(|m| crate::serve::needs::servable(m));
    if !servable.clone().any(crate::serve::needs::alive) {
        let text = "the owner holds no model to serve; load one with `ds4 ctl load FILE.gguf`";
        return (Some(text.into()), true);
    }
    let loading = servable.find(|m| m.state() == v1::ModelState::Loading);
    let percent = |m: &v1::Model| u128::from(m.done_bytes) * 100 / u128::from(m.bytes.max(1));
    (
        loading
            .map(|m| format!("{} is being loaded ({} %); `ds4 ctl watch` shows when it is READY", m.name, percent(m))),
        false,
    )
}

/// The worker's status.
pub async fn worker_status(dir: &Path) -> anyhow::Result<v1::WorkerStatusReply> {
    within("worker", async {
        Ok(worker(dir).await?.status(v1::WorkerStatusRequest {}).await.map_err(status)?.into_inner())
    })
    .await
}

/// An RPC's failure as the sentence that the peer gave, or that its connection broke.
pub fn status(status: tonic::Status) -> anyhow::Error {
    use tonic::Code;
    // What the peer sends has no cause on this side; what the transport reports has.
    if let Some(cause) = std::error::Error::source(&status) {
        let text =
            format!("the connection broke: the process at its other end died or closed it ({})", root_cause(cause));
        return Failure::error(EXIT_PEER, text);
    }
    let code = match status.code() {
        Code::Unavailable | Code::PermissionDenied | Code::Unauthenticated => EXIT_PEER,
        Code::ResourceExhausted => ds4_settings::EXIT_MEMORY,
        _ => 1,
    };
    Failure::error(code, if status.message().is_empty() { status.to_string() } else { status.message().to_string() })
}
