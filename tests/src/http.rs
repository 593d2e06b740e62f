//! HTTP as a client and as an attacker would do it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(LIMIT)).build().into()
}

/// GET; status and body.
///
/// # Panics
/// When there is no answer.
pub fn get(http: &str, path: &str) -> (u16, String) {
    let mut response = agent().get(format!("http://{http}{path}")).call().expect("an answer");
    (response.status().as_u16(), response.body_mut().read_to_string().expect("a body"))
}

/// POST of JSON; status and JSON.
///
/// # Panics
/// When there is no answer or it is not JSON.
pub fn post(http: &str, path: &str, body: &Value) -> (u16, Value) {
    let mut response = agent().post(format!("http://{http}{path}")).send_json(body).expect("an answer");
    (response.status().as_u16(), response.body_mut().read_json().expect("JSON"))
}

/// The text of a greedy completion of `prompt`.
///
/// # Panics
/// When the status is not 200.
pub fn greedy(http: &str, prompt: &str, tokens: u32) -> String {
    let (status, answer) =
        post(http, "/v1/completions", &json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0}));
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["text"].as_str().expect("text").to_string()
}

/// Sends bytes as they are and reads until the other side closes or the limit is over.
///
/// # Panics
/// When there is no connection.
pub fn raw(http: &str, request: &[u8], limit: Duration) -> String {
    let mut stream = TcpStream::connect(http).expect("a connection");
    stream.set_read_timeout(Some(limit)).expect("timeout");
    // The server may answer and close before it has taken everything: that is an answer, not a failure.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(n) = stream.read(&mut buffer) {
        if n == 0 {
            break;
        }
        answer.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&answer).into_owned()
}

/// A request whose body is a JSON text, ready for [`raw`].
pub fn request(path: &str, body: &str) -> Vec<u8> {
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n");
    format!("{head}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// A streaming request; dropping it closes the connection.
pub struct Stream {
    lines: BufReader<TcpStream>,
}

impl Stream {
    /// Starts one.
    ///
    /// # Panics
    /// When there is no connection.
    pub fn start(http: &str, path: &str, body: &Value) -> Self {
        let mut body = body.clone();
        body["stream"] = true.into();
        let mut stream = TcpStream::connect(http).expect("a connection");
        stream.set_read_timeout(Some(LIMIT)).expect("timeout");
        stream.write_all(&request(path, &body.to_string())).expect("a request");
        Self { lines: BufReader::new(stream) }
    }

    /// The next event's JSON; `None` at `[DONE]` or the connection's end.
    pub fn next_event(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if let Some(data) = line.trim_end().strip_prefix("data: ") {
                return serde_json::from_str(data).ok();
            }
        }
    }

    /// All text of a completion stream until its end.
    pub fn text(mut self) -> String {
        let mut text = String::new();
        while let Some(event) = self.next_event() {
            text.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
        }
        text
    }
}
