//! Whole-server tests over real sockets, with the scripted backend behind.

mod cancel;
mod deepseek_v4;
mod errors;
mod framing;
mod observe;
mod streams;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::backend::ApiConfig;
use crate::testing::Script;
use crate::{Api, serve};

/// A running server.
struct Server {
    addr: SocketAddr,
    api: Arc<Api>,
    script: Script,
    task: tokio::task::JoinHandle<std::io::Result<()>>,
}

/// One answer, taken apart.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e} in {}", self.text()))
    }

    fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|l| {
            let (key, value) = l.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    fn code(&self) -> String {
        let json = self.json();
        let error = &json["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{json}");
        error["code"].as_str().unwrap_or_default().to_owned()
    }

    /// Payloads of the SSE data events.
    fn events(&self) -> Vec<String> {
        self.text().split("\n\n").filter_map(|e| e.strip_prefix("data: ").map(str::to_owned)).collect()
    }
}

impl Server {
    async fn start(script: Script, config: ApiConfig) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let api = Api::new(Arc::new(script.clone()), config);
        let hosts = crate::Hosts::local(["models.example.org".to_owned()]);
        let task = tokio::spawn(serve(Arc::clone(&api), listener, false, hosts));
        Self { addr, api, script, task }
    }

    async fn plain() -> Self {
        Self::start(Script::default(), ApiConfig::default()).await
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addr).await.unwrap()
    }

    /// Sends raw bytes on a fresh connection and reads one answer.
    async fn raw(&self, bytes: &[u8]) -> Answer {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        read_answer(&mut stream).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.raw(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await
    }

    async fn post(&self, path: &str, body: &str) -> Answer {
        self.raw(&post(path, body)).await
    }

    async fn chat(&self, fields: &str) -> Answer {
        self.post("/v1/chat/completions", &format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{fields}}}"#))
            .await
    }
}

/// The bytes of a JSON POST.
fn post(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Reads one answer: by length, by chunks, or to the end of the connection.
async fn read_answer(stream: &mut TcpStream) -> Answer {
    tokio::time::timeout(Duration::from_secs(5), read_answer_patiently(stream)).await.expect("an answer within 5 s")
}

async fn read_answer_patiently(stream: &mut TcpStream) -> Answer {
    let mut raw = Vec::new();
    let head_end = loop {
        if let Some(at) = raw.windows(4).position(|w| w == b"\r\n\r\n") {
            break at + 4;
        }
        assert_ne!(stream.read_buf(&mut raw).await.unwrap(), 0, "closed inside the head: {raw:?}");
    };
    let head = String::from_utf8(raw[..head_end].to_vec()).unwrap();
    let mut rest = raw.split_off(head_end);
    let status = head[9..12].parse().unwrap();
    let mut answer = Answer { status, head, body: Vec::new() };
    if answer.header("transfer-encoding") == Some("chunked") {
        answer.body = dechunk(stream, rest).await;
    } else if let Some(length) = answer.header("content-length") {
        let length: usize = length.parse().unwrap();
        while rest.len() < length {
            assert_ne!(stream.read_buf(&mut rest).await.unwrap(), 0, "closed inside the body");
        }
        rest.truncate(length);
        answer.body = rest;
    } else {
        stream.read_to_end(&mut rest).await.unwrap();
        answer.body = rest;
    }
    answer
}

async fn dechunk(stream: &mut TcpStream, mut raw: Vec<u8>) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let line_end = loop {
            if let Some(at) = raw.windows(2).position(|w| w == b"\r\n") {
                break at;
            }
            assert_ne!(stream.read_buf(&mut raw).await.unwrap(), 0, "closed inside a chunk size");
        };
        let size = usize::from_str_radix(std::str::from_utf8(&raw[..line_end]).unwrap(), 16).unwrap();
        let end = line_end + 2 + size + 2;
        while raw.len() < end {
            assert_ne!(stream.read_buf(&mut raw).await.unwrap(), 0, "closed inside a chunk");
        }
        if size == 0 {
            return body;
        }
        body.extend_from_slice(&raw[line_end + 2..end - 2]);
        raw.drain(..end);
    }
}

/// Waits until `f` holds.
async fn until(what: &str, f: impl Fn() -> bool) {
    for _ in 0..500 {
        if f() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within 5 s: {what}");
}
