//! Reading request bodies: what may come in, how much, and how slowly.

use std::sync::Arc;

use axum::body::Body;
use http_body_util::BodyExt;
use hyper::body::Body as _;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue, ORIGIN};
use hyper::{HeaderMap, Request, StatusCode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::backend::ApiConfig;
use crate::error::{ApiError, ErrorType};

/// The budget is counted in these.
const UNIT: usize = 1024;

/// Bytes of bodies that may be held at the same time, over all connections.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Semaphore>);

impl Budget {
    /// A budget of `bytes`.
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new((bytes / UNIT).min(Semaphore::MAX_PERMITS))))
    }
}

/// A complete body; its share of the budget is given back when it is dropped.
#[derive(Debug)]
pub struct Received {
    /// The bytes.
    pub bytes: Vec<u8>,
    permit: Option<OwnedSemaphorePermit>,
}

/// Reads a JSON body.
///
/// # Errors
/// `unsupported_media_type` and `unsupported_content_encoding` (415), `body_too_large` (413), `overloaded` (503),
/// `body_timeout` (408), `bad_framing` (400).
pub async fn receive(request: Request<Body>, config: &ApiConfig, budget: &Budget) -> Result<Received, ApiError> {
    check_headers(request.headers())?;
    let mut body = request.into_body();
    let announced = body.size_hint().lower();
    if announced > config.max_body as u64 {
        return Err(too_large(config, Some(announced)));
    }
    let started = Instant::now();
    let mut received = Received { bytes: Vec::new(), permit: None };
    loop {
        let (idle, total) = (Instant::now() + config.body_idle_timeout, started + config.body_timeout);
        let frame = match timeout_at(idle.min(total), body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(e))) => {
                let why = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
                return Err(ApiError::bad_request("bad_framing", format!("the body could not be read: {why}")));
            }
            Ok(None) => return Ok(received),
            Err(_) => return Err(too_slow(config, idle < total, received.bytes.len())),
        };
        // Trailers carry nothing for us.
        let Ok(data) = frame.into_data() else { continue };
        if received.bytes.len() + data.len() > config.max_body {
            return Err(too_large(config, None));
        }
        received.grow(data.len(), budget)?;
        received.bytes.extend_from_slice(&data);
    }
}

impl Received {
    fn grow(&mut self, by: usize, budget: &Budget) -> Result<(), ApiError> {
        let held = self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let wanted = (self.bytes.len() + by).div_ceil(UNIT).saturating_sub(held);
        if wanted == 0 {
            return Ok(());
        }
        let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
        // Waiting here could block for ever: many half-read bodies, each waiting for the others.
        let permit = Arc::clone(&budget.0).try_acquire_many_owned(wanted).map_err(|_| {
            ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                ErrorType::Unavailable,
                "overloaded",
                "too many large request bodies at the same time; retry later",
            )
            .retry_after(1)
        })?;
        match &mut self.permit {
            Some(held) => held.merge(permit),
            None => self.permit = Some(permit),
        }
        Ok(())
    }
}

fn check_headers(headers: &HeaderMap) -> Result<(), ApiError> {
    if let Some(value) = headers.get(CONTENT_ENCODING).filter(|v| !v.as_bytes().eq_ignore_ascii_case(b"identity")) {
        let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ErrorType::InvalidRequest,
            "unsupported_content_encoding",
            format!("content-encoding `{value}` is not supported; send the body as it is"),
        ));
    }
    // Absent is taken for JSON; some small clients never say. Not from a browser, which asks before it sends JSON for another site,
    // but not before it sends what has no type.
    let none = HeaderValue::from_static("");
    let value = match headers.get(CONTENT_TYPE) {
        Some(value) => value,
        None if headers.contains_key(ORIGIN) => &none,
        None => return Ok(()),
    };
    let essence = value.to_str().unwrap_or("").split(';').next().unwrap_or("").trim();
    let is_json = essence.eq_ignore_ascii_case("application/json")
        || (essence.len() > 5 && essence.to_ascii_lowercase().ends_with("+json"));
    if is_json {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ErrorType::InvalidRequest,
        "unsupported_media_type",
        format!(
            "content-type `{}` is not supported; send `content-type: application/json`",
            String::from_utf8_lossy(value.as_bytes())
        ),
    ))
}

fn too_large(config: &ApiConfig, announced: Option<u64>) -> ApiError {
    let limit = config.max_body;
    let message = match announced {
        Some(n) => format!("the body has {n} bytes; at most {limit} are accepted"),
        None => format!("the body is longer than {limit} bytes, the most that is accepted"),
    };
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, ErrorType::InvalidRequest, "body_too_large", message)
}

fn too_slow(config: &ApiConfig, idle: bool, got: usize) -> ApiError {
    let message = if idle {
        format!("no byte of the body came for {} s (after {got} bytes)", config.body_idle_timeout.as_secs_f64())
    } else {
        format!("the body was not complete after {} s ({got} bytes came)", config.body_timeout.as_secs_f64())
    };
    ApiError::new(StatusCode::REQUEST_TIMEOUT, ErrorType::InvalidRequest, "body_timeout", message)
}
