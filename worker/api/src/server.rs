//! The listener: accepts, gives every connection its deadlines and every response its request id, drains.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HOST, HeaderValue, TRANSFER_ENCODING};
use hyper::{Request, StatusCode, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tower::ServiceExt;

use crate::conn::{Conn, ConnIo};
use crate::error::{ApiError, ErrorType};
use crate::hosts::Hosts;
use crate::{Api, Phase};

/// Header of the request id, in both directions.
pub const REQUEST_ID: &str = "x-request-id";

/// How long a closing connection may go on sending before it is reset.
const LINGER: Duration = Duration::from_secs(2);

/// Time for the head of a request that comes while draining, and for one that came before to reach the engine.
pub(crate) const DRAIN_PATIENCE: Duration = Duration::from_secs(2);

/// How long an exchange may go on after the client closed its sending side. A FIN is how clients leave, so nothing long
/// survives it.
const HALF_CLOSE_GRACE: Duration = Duration::from_millis(100);

/// The id of a request: the client's own when it is sane, else a fresh one.
#[derive(Clone, Debug)]
pub struct RequestId(pub String);

impl RequestId {
    fn of(request: &Request<Incoming>) -> Self {
        let sane = |v: &&str| {
            (1..=128).contains(&v.len()) && v.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b))
        };
        match request.headers().get(REQUEST_ID).and_then(|v| v.to_str().ok()).filter(sane) {
            Some(id) => Self(id.to_owned()),
            None => Self::fresh(),
        }
    }

    fn fresh() -> Self {
        Self(format!("req_{}", uuid::Uuid::new_v4().simple()))
    }
}

/// Serves `api` on `listener` until it drains and its last connection has ended.
///
/// While draining, a listener of our own goes on answering (503), so that probes see why; an `inherited` one (systemd,
/// a supervisor) is left alone: its queue is the successor's. Requests that call it by other names than `hosts` are refused.
///
/// # Errors
/// None that a retry could mend; a failing accept is logged and tried again.
pub async fn serve(api: Arc<Api>, listener: TcpListener, inherited: bool, hosts: Hosts) -> io::Result<()> {
    let hosts = Arc::new(hosts);
    let router = crate::routes::router(Arc::clone(&api));
    let slots = Arc::new(Semaphore::new(api.config.max_connections.min(Semaphore::MAX_PERMITS)));
    let open = Arc::new(watch::Sender::new(0usize));
    let mut phase = api.phase();
    loop {
        let draining = *phase.borrow_and_update() == Phase::Draining;
        let accept = async {
            if draining && inherited {
                return std::future::pending().await;
            }
            // A slot first: what cannot be served waits in the listen queue.
            let slot = Arc::clone(&slots).acquire_owned().await;
            (listener.accept().await, slot)
        };
        let drained = async {
            if !draining {
                return std::future::pending::<()>().await;
            }
            let _ = open.subscribe().wait_for(|n| *n == 0).await.map(drop);
        };
        tokio::select! {
            (accepted, slot) = accept => match accepted {
                Ok((stream, _)) => {
                    let task = connection(Arc::clone(&api), Arc::clone(&hosts), router.clone(), stream);
                    open.send_modify(|n| *n += 1);
                    let open = Arc::clone(&open);
                    tokio::spawn(async move {
                        // Caught, so that a panic cannot leave the count too high and the drain without an end.
                        let ended = std::panic::AssertUnwindSafe(task).catch_unwind().await;
                        open.send_modify(|n| *n -= 1);
                        // All is said; a drain need not wait for the peer to hang up.
                        if let Ok(Some(conn)) = ended {
                            conn.linger(LINGER).await;
                        }
                        drop(slot);
                    });
                }
                Err(e) => {
                    // Out of descriptors, or the peer was gone already. Spinning would help neither.
                    tracing::warn!("accept failed: {e}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            _ = phase.changed() => {}
            () = drained => return Ok(()),
        }
    }
}

/// Serves one connection to its last byte; what is returned wants to be closed gently.
async fn connection(api: Arc<Api>, hosts: Arc<Hosts>, router: Router, stream: TcpStream) -> Option<Arc<Conn>> {
    // Events are small and must not wait for an acknowledgement.
    if let Err(e) = stream.set_nodelay(true) {
        tracing::debug!("set_nodelay: {e}");
    }
    let gauge = Gauge::new(&api.metrics.connections);
    let conn = Conn::new(stream);
    let service = {
        let (conn, api) = (Arc::clone(&conn), Arc::clone(&api));
        hyper::service::service_fn(move |request| {
            let (conn, api, hosts, router) = (Arc::clone(&conn), Arc::clone(&api), Arc::clone(&hosts), router.clone());
            async move { Ok::<_, Infallible>(exchange(&conn, &api, &hosts, router, request).await) }
        })
    };
    let mut phase = api.phase();
    // One that comes while draining is told so, once; it must not hold the drain up for long either.
    let mut draining = *phase.borrow() == Phase::Draining;
    let header_timeout =
        if draining { api.config.header_timeout.min(DRAIN_PATIENCE) } else { api.config.header_timeout };
    let io = TokioIo::new(ConnIo::new(Arc::clone(&conn), api.config.stall_timeout));
    let http = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        // Left to itself hyper drops an exchange at a FIN, before even a short answer; `Conn::peer_left` decides instead.
        .half_close(true)
        .serve_connection(io, service);
    tokio::pin!(http);
    let result = loop {
        tokio::select! {
            result = http.as_mut() => break result,
            () = conn.peer_left() => {
                // A moment, for the answer to a short request of a client that only closed its sending side.
                match tokio::time::timeout(HALF_CLOSE_GRACE, http.as_mut()).await {
                    Ok(result) => break result,
                    Err(_) => return None,
                }
            }
            // The guard that `wait_for` returns must not live across the other arms' awaits.
            _ = async { phase.wait_for(|p| *p == Phase::Draining).await.map(drop) }, if !draining => {
                draining = true;
                http.as_mut().graceful_shutdown();
            }
        }
    };
    drop(gauge);
    let last_words = match (&result, conn.own_status()) {
        (_, Some(status)) => Some(malformed(status)),
        (Err(e), None) if e.is_timeout() => Some(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            ErrorType::InvalidRequest,
            "header_timeout",
            format!("no complete request head came within {} s", header_timeout.as_secs_f64()),
        )),
        (Err(e), None) => {
            tracing::debug!("connection ended: {e}");
            None
        }
        (Ok(()), None) => None,
    };
    if let Some(error) = last_words {
        let id = RequestId::fresh();
        tracing::info!(target: "ds4::request", id = %id.0, surface = "http", status = error.status.as_u16(), outcome = error.code, "request");
        conn.last_words(&by_hand(&error, &id));
    }
    Some(conn)
}

/// Answers one request.
async fn exchange(conn: &Conn, api: &Api, hosts: &Hosts, router: Router, request: Request<Incoming>) -> Response {
    let smuggled = conn.head_parsed(request.headers().contains_key(TRANSFER_ENCODING));
    let id = RequestId::of(&request);
    let refused = if smuggled {
        Some(ApiError::bad_request(
            "bad_framing",
            "the request has both content-length and transfer-encoding; send one of them",
        ))
    } else {
        unfit_head(&request).or_else(|| hosts.refusal(request.headers()))
    };
    let mut response = if let Some(error) = refused {
        let mut response = error.into_response();
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        response
    } else {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(id.clone());
        match std::panic::AssertUnwindSafe(router.oneshot(request)).catch_unwind().await {
            Ok(Ok(response)) => response,
            Ok(Err(never)) => match never {},
            Err(_) => {
                tracing::error!(id = %id.0, "a handler panicked");
                ApiError::internal("the request handler failed; see the worker's log").into_response()
            }
        }
    };
    if let Ok(value) = HeaderValue::from_str(&id.0) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    if *api.phase().borrow() == Phase::Draining {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    conn.answered();
    response
}

/// What RFC 9112 asks a server to refuse and hyper lets through: a transfer coding other than chunked (section 6.1), and
/// an HTTP/1.1 request without exactly one Host (section 3.2).
fn unfit_head<B>(request: &Request<B>) -> Option<ApiError> {
    let headers = request.headers();
    let chunked = |v: &HeaderValue| v.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    if let Some(other) = headers.get_all(TRANSFER_ENCODING).iter().find(|v| !chunked(v)) {
        return Some(ApiError::new(
            StatusCode::NOT_IMPLEMENTED,
            ErrorType::InvalidRequest,
            "unsupported_transfer_encoding",
            format!("transfer-encoding {other:?} is not supported; send the body plain or chunked"),
        ));
    }
    let hosts = headers.get_all(HOST).iter().count();
    (request.version() == Version::HTTP_11 && hosts != 1).then(|| {
        ApiError::bad_request("bad_host", format!("an HTTP/1.1 request has exactly one host header, this one {hosts}"))
    })
}

/// What hyper refused on its own.
fn malformed(status: u16) -> ApiError {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST);
    let (code, message) = match status {
        StatusCode::URI_TOO_LONG => ("uri_too_long", "the request target is too long"),
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => ("headers_too_large", "the request head is too large"),
        _ => ("malformed_request", "the request is not well-formed HTTP/1.1"),
    };
    ApiError::new(status, ErrorType::InvalidRequest, code, message)
}

/// A response written without hyper, for connections that hyper has given up.
fn by_hand(error: &ApiError, id: &RequestId) -> Vec<u8> {
    let body = error.to_json();
    let head = format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n{REQUEST_ID}: {}\r\n\r\n",
        error.status.as_u16(),
        error.status.canonical_reason().unwrap_or("Error"),
        body.len(),
        id.0
    );
    [head.as_bytes(), &body].concat()
}

/// Counts one while it lives.
struct Gauge<'a>(&'a prometheus_client::metrics::gauge::Gauge);

impl<'a> Gauge<'a> {
    fn new(gauge: &'a prometheus_client::metrics::gauge::Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Gauge<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}
