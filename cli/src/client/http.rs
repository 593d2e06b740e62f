//! A small HTTP/1.1 client. Dropping a request closes its connection, which is how a generation is cancelled.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use ds4_settings::EXIT_PEER;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::failure::Failure;

/// Most bytes of one event line; a longer one is a broken server, not a token.
const MAX_LINE: usize = 16 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A server, by `host:port`.
#[derive(Clone, Debug)]
pub struct Server {
    authority: String,
}

/// A whole answer.
#[derive(Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: StatusCode,
    /// Its body.
    pub body: Bytes,
}

impl Reply {
    /// The body as JSON when the status is 2xx; else an error with the server's own message.
    pub fn json(&self) -> anyhow::Result<Value> {
        if !self.status.is_success() {
            bail!("the server answered {}: {}", self.status, error_text(&self.body));
        }
        serde_json::from_slice(&self.body).context("the server's answer is not JSON")
    }
}

/// The message of an OpenAI-shaped error, or the start of whatever it is.
fn error_text(body: &[u8]) -> String {
    let json: Option<Value> = serde_json::from_slice(body).ok();
    let message = json.as_ref().and_then(|v| v.pointer("/error/message")).and_then(Value::as_str);
    match message {
        Some(text) => text.to_string(),
        None => String::from_utf8_lossy(body).chars().take(300).collect(),
    }
}

/// A worker that went away while it answered.
fn gone(why: String) -> anyhow::Error {
    Failure::error(EXIT_PEER, why)
}

/// The connection's driver; ends with its owner.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Server {
    /// A server at a socket address.
    pub fn at(address: SocketAddr) -> Self {
        Self { authority: address.to_string() }
    }

    /// From `http://host:port`, `host:port` or either with a trailing slash or `/v1`.
    ///
    /// # Errors
    /// Exit code 2 for https or a URL with another path.
    pub fn parse(url: &str) -> anyhow::Result<Self> {
        let bad = |why: &str| Failure::error(ds4_settings::EXIT_USAGE, format!("--url {url}: {why}"));
        if url.starts_with("https://") {
            return Err(bad("a worker speaks plain HTTP; use http://"));
        }
        let rest = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
        let rest = rest.strip_suffix("/v1").unwrap_or(rest);
        if rest.is_empty() || rest.contains(['/', '?', '#', '@']) {
            return Err(bad("expected http://HOST:PORT"));
        }
        let has_port = rest.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        Ok(Self { authority: if has_port { rest.into() } else { format!("{rest}:80") } })
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.authority)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(Response<Incoming>, Connection)> {
        let unreachable = |why: String| {
            Failure::error(
                EXIT_PEER,
                format!("cannot reach {}: {why}; is a worker running? `ds4 ctl status` tells", self.url()),
            )
        };
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(&self.authority))
            .await
            .map_err(|_| unreachable(format!("no connection within {CONNECT_TIMEOUT:?}")))?
            .map_err(|e| unreachable(e.to_string()))?;
        stream.set_nodelay(true)?;
        let (mut sender, driver) = http1::handshake(TokioIo::new(stream)).await?;
        let connection = Connection(tokio::spawn(async move {
            let _ = driver.await;
        }));
        let mut request = Request::builder().method(method).uri(path).header("host", &self.authority);
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        let bytes = body.map(|v| Bytes::from(v.to_string())).unwrap_or_default();
        let response = sender.send_request(request.body(Full::new(bytes))?).await.context("the connection broke")?;
        Ok((response, connection))
    }

    async fn whole(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<Reply> {
        let (response, _connection) = self.send(method, path, body).await?;
        let status = response.status();
        let body = response.into_body().collect().await.context("the connection broke inside the answer")?.to_bytes();
        Ok(Reply { status, body })
    }

    /// GET.
    pub async fn get(&self, path: &str) -> anyhow::Result<Reply> {
        self.whole(Method::GET, path, None).await
    }

    /// POST of JSON, whole answer.
    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Reply> {
        self.whole(Method::POST, path, Some(body)).await
    }

    /// POST of JSON, answered by server-sent events.
    pub async fn stream(&self, path: &str, body: &Value) -> anyhow::Result<Events> {
        let (response, connection) = self.send(Method::POST, path, Some(body)).await?;
        let status = response.status();
        if status != StatusCode::OK {
            let body = response.into_body().collect().await?.to_bytes();
            bail!("the server answered {status}: {}", error_text(&body));
        }
        Ok(Events { body: response.into_body(), lines: Lines::default(), _connection: connection })
    }
}

/// The JSON events of a stream, `[DONE]` taken as its end.
pub struct Events {
    body: Incoming,
    lines: Lines,
    _connection: Connection,
}

impl Events {
    /// The next event; `None` after `[DONE]`.
    ///
    /// # Errors
    /// A broken connection, an end without `[DONE]`, an event that is an error or not JSON.
    pub async fn next(&mut self) -> anyhow::Result<Option<Value>> {
        loop {
            if let Some(data) = self.lines.pop()? {
                if data == "[DONE]" {
                    return Ok(None);
                }
                let event: Value = serde_json::from_str(&data).context("an event is not JSON")?;
                if let Some(error) = event.get("error") {
                    let text = error.get("message").and_then(Value::as_str).map_or(error.to_string(), String::from);
                    bail!("the server reported: {text}");
                }
                return Ok(Some(event));
            }
            match self.body.frame().await {
                Some(frame) => {
                    let broke =
                        |e| gone(format!("the connection broke inside the stream: the worker died or closed it ({e})"));
                    if let Ok(data) = frame.map_err(broke)?.into_data() {
                        self.lines.push(&data);
                    }
                }
                None => {
                    let why = "the stream ended before its end was announced: the worker died or dropped the request";
                    return Err(gone(why.into()));
                }
            }
        }
    }
}

/// Splits a byte stream into the payloads of its `data:` lines.
#[derive(Default)]
struct Lines {
    pending: Vec<u8>,
}

impl Lines {
    fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    fn pop(&mut self) -> anyhow::Result<Option<String>> {
        while let Some(end) = self.pending.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            let line = String::from_utf8(line).context("an event is not UTF-8")?;
            // Comments (": keep-alive"), event names and blank separators carry no payload for us.
            if let Some(data) = line.trim_end_matches(['\r', '\n']).strip_prefix("data:") {
                return Ok(Some(data.strip_prefix(' ').unwrap_or(data).to_string()));
            }
        }
        if self.pending.len() > MAX_LINE {
            bail!("an event is longer than {} MiB", MAX_LINE >> 20);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        for (url, want) in [
            ("http://127.0.0.1:8080", "127.0.0.1:8080"),
            ("http://127.0.0.1:8080/v1/", "127.0.0.1:8080"),
            ("localhost:9", "localhost:9"),
            ("http://[::1]:9", "[::1]:9"),
            ("http://example", "example:80"),
        ] {
            assert_eq!(Server::parse(url).unwrap().authority, want);
        }
        for url in ["https://x:1", "http://x/y", "http://", "http://user@x"] {
            assert_eq!(Failure::code_of(&Server::parse(url).unwrap_err()), 2, "{url}");
        }
    }

    #[test]
    fn data_lines_survive_any_split() {
        let text = ": ping\r\n\r\nevent: x\r\ndata: {\"a\":\"é\"}\r\n\r\ndata:[DONE]\n\n".as_bytes();
        for cut in 0..text.len() {
            let mut lines = Lines::default();
            let mut got = Vec::new();
            for part in [&text[..cut], &text[cut..]] {
                lines.push(part);
                while let Some(data) = lines.pop().unwrap() {
                    got.push(data);
                }
            }
            assert_eq!(got, ["{\"a\":\"é\"}", "[DONE]"]);
        }
    }

    #[test]
    fn an_error_shows_the_servers_message() {
        assert_eq!(error_text(br#"{"error":{"message":"no"}}"#), "no");
        assert_eq!(error_text(b"plain"), "plain");
    }
}
