//! The routes and their handlers.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, StatusCode, Uri};
use serde_json::{Value, json};

use crate::backend::{Backend, ModelInfo};
use crate::body::receive;
use crate::chat_wire::ChatWire;
use crate::completions_wire::CompletionsWire;
use crate::error::{ApiError, ErrorType};
use crate::job::Job;
use crate::params::model_not_found;
use crate::run::{Limits, answer};
use crate::server::RequestId;
use crate::track::Tracker;
use crate::{Api, Entering, Phase, chat, completions};

/// Bodies up to this size are parsed and tokenised where they arrive: a few milliseconds at most.
const INLINE: usize = 4 << 10;

/// All routes over `api`.
pub fn router(api: Arc<Api>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(text_completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/stats", get(stats))
        .route("/health", get(ready))
        .route("/health/ready", get(ready))
        .route("/health/live", get(live))
        .route("/metrics", get(metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(api)
}

type Parse = fn(&[u8], usize, &Arc<dyn Backend>) -> Result<Job, ApiError>;

async fn chat_completions(State(api): State<Arc<Api>>, request: Request<Body>) -> Response {
    generate(api, request, "chat", chat::parse, |api, id, job| ChatWire {
        id: format!("chatcmpl-{id}"),
        created: now(),
        backend: Arc::clone(&api.backend),
        include_usage: job.common.include_usage,
        logprobs: job.logprobs.is_some(),
        calls: vec![0; job.choices()],
    })
    .await
}

async fn text_completions(State(api): State<Arc<Api>>, request: Request<Body>) -> Response {
    generate(api, request, "completions", completions::parse, |api, id, job| CompletionsWire {
        id: format!("cmpl-{id}"),
        created: now(),
        backend: Arc::clone(&api.backend),
        include_usage: job.common.include_usage,
        logprobs: job.logprobs.is_some(),
        echo: job.echo.clone(),
        n: job.common.n,
        offsets: vec![0; job.choices()],
    })
    .await
}

/// What both surfaces do: receive, parse, submit, answer; every way out writes the completion line.
async fn generate<W: crate::wire::Wire>(
    api: Arc<Api>,
    request: Request<Body>,
    surface: &'static str,
    parse: Parse,
    wire: impl FnOnce(&Api, uuid::fmt::Simple, &Job) -> W,
) -> Response {
    let id = request.extensions().get::<RequestId>().map(|r| r.0.clone()).unwrap_or_default();
    let mut tracker = Tracker::new(Arc::clone(&api.metrics), id, surface);
    match prepare(&api, request, parse).await {
        Ok((job, entering)) => {
            let wire = wire(&api, uuid::Uuid::new_v4().simple(), &job);
            let limits = Limits {
                request_timeout: api.config.request_timeout,
                keepalive_interval: api.config.keepalive_interval,
            };
            answer(job, wire, Arc::clone(&api.backend), tracker, limits, entering)
                .await
                .unwrap_or_else(IntoResponse::into_response)
        }
        Err(e) => {
            tracker.fail(&e);
            e.into_response()
        }
    }
}

/// Receives and parses off the runtime's threads when that may take long.
async fn prepare(api: &Arc<Api>, request: Request<Body>, parse: Parse) -> Result<(Job, Entering), ApiError> {
    let entering =
        api.enter().map_err(|phase| if phase == Phase::Starting { starting() } else { ApiError::draining() })?;
    let received = receive(request, &api.config, &api.budget).await?;
    let (depth, backend) = (api.config.max_json_depth, Arc::clone(&api.backend));
    let lane = match effort(&received.bytes) {
        Effort::Little => return Ok((parse(&received.bytes, depth, &backend)?, entering)),
        Effort::Much => &api.parsing,
        Effort::Grammar => &api.grammars,
    };
    let turn = Arc::clone(lane).acquire_owned().await;
    let parsed = tokio::task::spawn_blocking(move || {
        let job = parse(&received.bytes, depth, &backend);
        // Held to the end, whether or not the client is still there: a thread cannot be called back.
        drop(turn);
        job
    })
    .await;
    let job = parsed.unwrap_or_else(|e| {
        tracing::error!("parsing a request failed: {e}");
        Err(ApiError::internal("the request could not be processed; see the worker's log"))
    })?;
    Ok((job, entering))
}

/// What it takes to parse a body.
#[derive(Debug, PartialEq)]
enum Effort {
    /// A few milliseconds at most.
    Little,
    /// There is much to tokenise.
    Much,
    /// A grammar may have to be made: up to half a second, and for the first one of all 0.4 s more (DeepSeek V4's vocabulary).
    Grammar,
}

/// Judged by the text alone, where it arrives: 64 MiB take 6 ms, and 0.1 s where all of it is escapes.
fn effort(body: &[u8]) -> Effort {
    // What is no text is refused at once.
    let Ok(text) = std::str::from_utf8(body) else { return Effort::Little };
    // Of Codex's tools each has `"strict": false`.
    let strict = "\"strict\"";
    let is_true = |(at, _): (usize, &str)| {
        let rest = text[at + strict.len()..].trim_start();
        rest.strip_prefix(':').is_some_and(|value| value.trim_start().starts_with("true"))
    };
    // A search for all places is many times as slow as one for any.
    let plain =
        text.contains("\"response_format\"") || text.contains(strict) && text.match_indices(strict).any(is_true);
    if plain || letters_escaped(text) {
        Effort::Grammar
    } else if body.len() > INLINE {
        Effort::Much
    } else {
        Effort::Little
    }
}

/// Whether letters of these words may be written as escapes. No client's library does so: of ASCII it escapes signs at most.
fn letters_escaped(text: &str) -> bool {
    let escape = "\\u00";
    let is_letter = |(at, _): (usize, &str)| {
        // A backslash may be escaped itself.
        let before = text.as_bytes()[..at].iter().rev().take_while(|b| **b == b'\\').count();
        let code = text.get(at + escape.len()..at + escape.len() + 2).and_then(|d| u8::from_str_radix(d, 16).ok());
        before % 2 == 0 && code.is_some_and(|c| c.is_ascii_alphabetic() || c == b'_')
    };
    text.contains(escape) && text.match_indices(escape).any(is_letter)
}

fn starting() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, ErrorType::Unavailable, "starting", "the worker is starting; retry")
        .retry_after(1)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn model_json(m: &ModelInfo) -> Value {
    json!({
        "id": m.name,
        "object": "model",
        "created": m.created,
        "owned_by": "ds4",
        "context_length": m.context,
        "max_model_len": m.context,
        "meta": {
            "family": m.family,
            "artifact": m.artifact,
            "synthetic": m.synthetic,
            "blake3": m.blake3,
            "epoch": m.epoch,
            "size": m.weight_bytes,
            "n_ctx": m.context,
            "n_ctx_train": m.context_train,
            "n_vocab": m.vocab,
        },
    })
}

async fn models(State(api): State<Arc<Api>>) -> Response {
    ok(&json!({ "object": "list", "data": [model_json(api.backend.model())] }))
}

async fn model(State(api): State<Arc<Api>>, id: Result<Path<String>, PathRejection>) -> Response {
    let m = api.backend.model();
    let Ok(Path(id)) = id else {
        return ApiError::bad_request("invalid_utf8", "the model's name in the URL is not UTF-8").into_response();
    };
    if id == m.name { ok(&model_json(m)) } else { model_not_found(&id, m).into_response() }
}

async fn live() -> Response {
    ok(&json!({ "status": "ok" }))
}

async fn ready(State(api): State<Arc<Api>>) -> Response {
    let (status, word) = match *api.phase().borrow() {
        Phase::Ready => (StatusCode::OK, "ok"),
        Phase::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting"),
        Phase::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
    };
    let mut response = ok(&json!({ "status": word, "model": api.backend.model().name }));
    *response.status_mut() = status;
    response
}

async fn metrics(State(api): State<Arc<Api>>) -> Response {
    let mut response = Response::new(Body::from(api.metrics.encode()));
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8"));
    response
}

async fn stats(State(api): State<Arc<Api>>) -> Response {
    let (m, s) = (api.backend.model(), api.backend.stats());
    ok(&json!({
        "model": m.name,
        "blake3": m.blake3,
        "epoch": m.epoch,
        "device": m.device,
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "phase": match *api.phase().borrow() {
            Phase::Ready => "ready",
            Phase::Starting => "starting",
            Phase::Draining => "draining",
        },
        "uptime_s": now().saturating_sub(m.created),
        "ready_ms": m.ready_ms,
        "limits": { "context": m.context, "max_batch": m.max_batch, "max_queue": m.max_queue },
        "http": { "connections": api.metrics.connections.get(), "in_flight": api.metrics.in_flight.get() },
        "engine": {
            "running": s.running,
            "queued": s.queued,
            "paused": s.paused,
            "sequences": s.requests,
            "finished": s.finished,
            "failed": s.failed,
            "refused": s.refused,
            "stalled": s.stalled,
            "cancelled": { "queued": s.reaped, "prefill": s.cancelled_prefill, "decode": s.cancelled_decode },
            "prefill_tokens": s.prefill_tokens,
            "decode_tokens": s.decode_tokens,
            "drafted_tokens": s.drafted_tokens,
            "accepted_tokens": s.accepted_tokens,
            "cached_tokens": s.cached_tokens,
            "prefix_hits": s.prefix_hits,
            "rewinds": s.rewinds,
            "bank_bytes": s.bank_bytes,
            "checkpoint_bytes": s.checkpoint_bytes,
            "idle_banks": s.idle_banks,
            "steps": s.steps,
            "step_seconds": s.step_seconds,
            "decode_tokens_per_second": s.decode_tokens_per_second,
        },
    }))
}

async fn not_found(method: Method, uri: Uri) -> Response {
    let path: String = uri.path().chars().take(128).collect();
    ApiError::new(
        StatusCode::NOT_FOUND,
        ErrorType::InvalidRequest,
        "unknown_url",
        format!(
            "unknown request URL: {method} {path}; there are POST /v1/chat/completions and /v1/completions, GET /v1/models, \
             /v1/stats, /health and /metrics"
        ),
    )
    .into_response()
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let allow = if uri.path().ends_with("/completions") { "POST" } else { "GET, HEAD" };
    let mut e = ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        ErrorType::InvalidRequest,
        "method_not_allowed",
        format!("{method} is not allowed for {}; use {allow}", uri.path()),
    );
    e.allow = Some(allow);
    e.into_response()
}

fn ok(value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effort_of_a_body_is_seen_in_its_bytes() {
        for (body, expected) in [
            (r#"{"messages":[]}"#, Effort::Little),
            (r#"{"tools":[{"function":{"strict" : false}}]}"#, Effort::Little),
            ("{\"tools\":[{\"function\":{\"strict\" :\n true}}]}", Effort::Grammar),
            (r#"{"tools":[{"strict":false},{"strict":true}]}"#, Effort::Grammar),
            (r#"{"response_format":{}}"#, Effort::Grammar),
            (r#"{"messages":[{"content":"\"strict\": true, \"response_format\""}]}"#, Effort::Little),
            (r#"{"r\u0065sponse_format":{}}"#, Effort::Grammar),
            (r#"{"response\u005Fformat":{}}"#, Effort::Grammar),
            (r#"{"tools":[{"str\u0069ct":true}]}"#, Effort::Grammar),
            (r#"{"tools":[{"\"\\\u0073trict":true}]}"#, Effort::Grammar),
            // What libraries escape, and text about escapes.
            (r#"{"messages":[{"content":"\u00fc\ud83d\ude00\u0001\u003c\u2028\\u0073"}]}"#, Effort::Little),
            (r#"{"messages":[{"content":"\u0\u"}]}"#, Effort::Little),
            ("{\"messages\":[{\"content\":\"\\u00ü\\", Effort::Little),
        ] {
            assert_eq!(effort(body.as_bytes()), expected, "{body}");
            let long = body.replace("messages\":[", &format!("messages\":[{}", " ".repeat(INLINE)));
            let expected = if long.len() > INLINE && expected == Effort::Little { Effort::Much } else { expected };
            assert_eq!(effort(long.as_bytes()), expected, "{body}, long");
        }
        assert_eq!(effort(&[b' '; INLINE + 1]), Effort::Much);
    }
}
