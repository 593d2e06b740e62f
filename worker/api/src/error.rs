//! What clients hear when a request cannot be served: OpenAI-shaped errors with stable codes.
//!
//! The body is `{"error":{"message","type","param","code"}}`. Codes are part of the contract; messages are for people.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use ds4_engine::EngineError;
use hyper::StatusCode;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use serde::Serialize;

/// OpenAI's broad error classes, the `type` of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorType {
    /// The request is at fault.
    InvalidRequest,
    /// Too much at once.
    RateLimit,
    /// The server cannot now.
    Unavailable,
    /// The server is at fault.
    Server,
}

impl ErrorType {
    fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::RateLimit => "rate_limit_error",
            Self::Unavailable => "service_unavailable",
            Self::Server => "server_error",
        }
    }
}

/// An error on its way to a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Broad class.
    pub kind: ErrorType,
    /// Stable machine-readable code.
    pub code: &'static str,
    /// A sentence that names the offending value and the lever.
    pub message: String,
    /// The request field at fault.
    pub param: Option<String>,
    /// Seconds after which a retry makes sense.
    pub retry_after: Option<u32>,
    /// Allowed methods of a 405.
    pub allow: Option<&'static str>,
}

#[derive(Serialize)]
struct Wire<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

impl ApiError {
    /// A 400 without a field.
    pub fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorType::InvalidRequest, code, message)
    }

    /// Any error without a field.
    pub fn new(status: StatusCode, kind: ErrorType, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code, message: message.into(), param: None, retry_after: None, allow: None }
    }

    /// A 400 about field `param`.
    pub fn field(code: &'static str, param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::bad_request(code, message) }
    }

    /// A value of the right type that is not allowed.
    pub fn invalid_value(param: &str, value: impl std::fmt::Display, rule: &str) -> Self {
        Self::field("invalid_value", param, format!("`{param}` is {value}: {rule}"))
    }

    /// A field that OpenAI knows and this server cannot honour.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::field("unsupported_parameter", param, message)
    }

    /// A required field that is absent.
    pub fn missing(param: &'static str) -> Self {
        Self::field("missing_required_parameter", param, format!("`{param}` is required"))
    }

    /// Says when to come back.
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The worker refuses new work.
    pub fn draining() -> Self {
        EngineError::Draining.into()
    }

    /// Something broke inside.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, ErrorType::Server, "internal_error", message)
    }

    /// The prompt does not fit: `prompt` tokens ("at least" when `estimate`) into `context`.
    pub fn context_exceeded(prompt: usize, context: usize, estimate: bool) -> Self {
        let about = if estimate { "at least " } else { "" };
        Self::bad_request(
            "context_length_exceeded",
            format!(
                "the context is {context} tokens and the prompt has {about}{prompt}, which leaves no room for output; \
                 shorten the prompt or start the worker with a larger --ctx"
            ),
        )
    }

    /// The JSON body.
    pub fn to_json(&self) -> Vec<u8> {
        let wire = Wire {
            error: Inner {
                message: &self.message,
                r#type: self.kind.as_str(),
                param: self.param.as_deref(),
                code: self.code,
            },
        };
        serde_json::to_vec(&wire).unwrap_or_default()
    }
}

impl From<EngineError> for ApiError {
    fn from(e: EngineError) -> Self {
        let message = e.to_string();
        let unavailable = |code| Self::new(StatusCode::SERVICE_UNAVAILABLE, ErrorType::Unavailable, code, &*message);
        match e {
            EngineError::QueueFull { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorType::RateLimit, "queue_full", message).retry_after(1)
            }
            EngineError::ContextExceeded { prompt, context } => Self::context_exceeded(prompt, context, false),
            EngineError::EmptyPrompt => Self::bad_request("empty_prompt", message),
            EngineError::BadParameter { name, value, rule } => Self::invalid_value(name, value, rule),
            EngineError::Draining => unavailable("draining").retry_after(1),
            EngineError::Stalled { .. } => {
                Self::new(StatusCode::REQUEST_TIMEOUT, ErrorType::InvalidRequest, "client_stalled", message)
            }
            EngineError::OutOfMemory(_) => unavailable("out_of_memory").retry_after(1),
            // The request's own fault: sent again, it would fail again.
            EngineError::Unenforceable(_) => Self::bad_request("unsupported_parameter", message),
            EngineError::Internal(_) => Self::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.to_json()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(allow) = self.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_engine_error_has_its_status_and_code() {
        let cases = [
            (EngineError::QueueFull { limit: 3 }, 429, "queue_full", Some(1)),
            (EngineError::ContextExceeded { prompt: 10, context: 8 }, 400, "context_length_exceeded", None),
            (EngineError::EmptyPrompt, 400, "empty_prompt", None),
            (
                EngineError::BadParameter { name: "top_p", value: "2".into(), rule: "at most 1" },
                400,
                "invalid_value",
                None,
            ),
            (EngineError::Draining, 503, "draining", Some(1)),
            (EngineError::Stalled { seconds: 30 }, 408, "client_stalled", None),
            (EngineError::OutOfMemory("no".into()), 503, "out_of_memory", Some(1)),
            (EngineError::Internal("x".into()), 500, "internal_error", None),
        ];
        for (error, status, code, retry) in cases {
            let api = ApiError::from(error);
            assert_eq!((api.status.as_u16(), api.code, api.retry_after), (status, code, retry));
            let body: serde_json::Value = serde_json::from_slice(&api.to_json()).unwrap();
            assert_eq!(body["error"]["code"], code);
            assert!(!body["error"]["message"].as_str().unwrap().is_empty());
        }
    }

    #[test]
    fn context_error_names_both_numbers() {
        let e = ApiError::from(EngineError::ContextExceeded { prompt: 9001, context: 2048 });
        assert!(e.message.contains("9001") && e.message.contains("2048"), "{}", e.message);
    }
}
