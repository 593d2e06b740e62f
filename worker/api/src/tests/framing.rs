//! Bytes on the socket: framing, limits, deadlines, ids.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use ds4_engine::{EngineError, EngineStats, GenerateRequest};
use ds4_text::ChatInput;

use super::*;
use crate::backend::{Backend, Events, ModelInfo, Prompt, PromptError};

const SMALL: &str = r#"{"messages":[{"role":"user","content":"hi"}]}"#;

fn head(extra: &str) -> String {
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{extra}\r\n")
}

fn chunked(body: &str, size: usize) -> Vec<u8> {
    let mut out = head("transfer-encoding: chunked\r\n").into_bytes();
    for chunk in body.as_bytes().chunks(size) {
        out.extend(format!("{:x}\r\n", chunk.len()).bytes());
        out.extend_from_slice(chunk);
        out.extend(b"\r\n");
    }
    out.extend(b"0\r\n\r\n");
    out
}

#[tokio::test]
async fn a10_chunked_bodies_are_read_whole() {
    let server = Server::plain().await;
    for size in [1, 7, 1000] {
        let answer = server.raw(&chunked(SMALL, size)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    // Extensions and trailers are legal and mean nothing here.
    let framed = format!(
        "{}{:x};a=b\r\n{SMALL}\r\n0\r\nX-Trailer: y\r\n\r\n",
        head("transfer-encoding: chunked\r\n"),
        SMALL.len()
    );
    assert_eq!(server.raw(framed.as_bytes()).await.status, 200);
    // Bytes arrive one by one.
    let mut stream = server.connect().await;
    for byte in chunked(SMALL, 5) {
        stream.write_all(&[byte]).await.unwrap();
    }
    assert_eq!(read_answer(&mut stream).await.status, 200);
}

#[tokio::test]
async fn a_page_whose_name_was_made_to_lead_here_is_refused() {
    let server = Server::plain().await;
    let with = |host: &str| {
        let length = SMALL.len();
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n");
        format!("{head}content-length: {length}\r\n\r\n{SMALL}").into_bytes()
    };
    for host in ["localhost:8080", "127.0.0.1:8080", "[::1]", "models.example.org"] {
        assert_eq!(server.raw(&with(host)).await.status, 200, "{host}");
    }
    let started = server.script.seen().requests.len();
    let answer = server.raw(&with("evil.example:8080")).await;
    assert_eq!((answer.status, &*answer.code()), (403, "host_not_allowed"));
    assert!(answer.text().contains("--allow-host"), "{}", answer.text());
    assert_eq!(server.script.seen().requests.len(), started);
}

#[tokio::test]
async fn a10_bad_framing_is_400_with_a_code_and_an_id() {
    let server = Server::plain().await;
    let cases: Vec<(String, &str)> = vec![
        (format!("{}zz\r\n{SMALL}", head("transfer-encoding: chunked\r\n")), "bad_framing"),
        (format!("{}3\r\nabcd\r\n0\r\n\r\n", head("transfer-encoding: chunked\r\n")), "bad_framing"),
        (format!("{}{SMALL}", head("content-length: 45\r\ntransfer-encoding: chunked\r\n")), "bad_framing"),
        (format!("{}{SMALL}", head("Transfer-Encoding: chunked\r\nContent-Length: 45\r\n")), "bad_framing"),
        (format!("{}{SMALL}", head("content-length: 45\r\ncontent-length: 46\r\n")), "malformed_request"),
        (head("content-length: -1\r\n"), "malformed_request"),
        (head("content-length: 1e3\r\n"), "malformed_request"),
        (head("transfer-encoding: gzip\r\n"), "malformed_request"),
        ("GET / HTTP/1.1\r\nbad header\r\n\r\n".into(), "malformed_request"),
        ("\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n".into(), "malformed_request"),
        ("GET /v1/models HTTP/9.9\r\n\r\n".into(), "malformed_request"),
    ];
    for (request, code) in cases {
        let answer = server.raw(request.as_bytes()).await;
        assert_eq!((answer.status, &*answer.code()), (400, code), "{request:?}");
        assert!(answer.header("x-request-id").is_some(), "{request:?}: {}", answer.head);
    }
    for (request, status, code) in [
        ("GET /health/live HTTP/1.1\r\n\r\n".to_owned(), 400, "bad_host"),
        ("GET /health/live HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n".to_owned(), 400, "bad_host"),
        (
            format!("{}{:x}\r\n{SMALL}\r\n0\r\n\r\n", head("transfer-encoding: gzip, chunked\r\n"), SMALL.len()),
            501,
            "unsupported_transfer_encoding",
        ),
    ] {
        let answer = server.raw(request.as_bytes()).await;
        assert_eq!((answer.status, &*answer.code()), (status, code), "{request:?}");
    }
    let answer =
        server.raw(format!("GET / HTTP/1.1\r\nhost: x\r\na: {}\r\n\r\n", "x".repeat(1 << 20)).as_bytes()).await;
    assert_eq!((answer.status, &*answer.code()), (431, "headers_too_large"));
    let answer = server.raw(format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "x".repeat(100_000)).as_bytes()).await;
    assert_eq!((answer.status, &*answer.code()), (414, "uri_too_long"));
    assert_eq!(server.chat("").await.status, 200);
}

#[tokio::test]
async fn a10_keep_alive_and_pipelining_work() {
    let server = Server::plain().await;
    let mut stream = server.connect().await;
    for _ in 0..3 {
        stream.write_all(&post("/v1/chat/completions", SMALL)).await.unwrap();
        assert_eq!(read_answer(&mut stream).await.status, 200);
    }
    stream
        .write_all(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\nGET /health/ready HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut both = Vec::new();
    while both.windows(8).filter(|w| w == b"HTTP/1.1").count() < 2 || !both.ends_with(b"}") {
        assert_ne!(stream.read_buf(&mut both).await.unwrap(), 0);
    }
    let http10 = server.raw(b"GET /health HTTP/1.0\r\n\r\n").await;
    assert_eq!(http10.status, 200);
}

#[tokio::test]
async fn s4_oversized_bodies_are_413_whether_announced_or_not() {
    let config = ApiConfig { max_body: 1000, ..ApiConfig::default() };
    let server = Server::start(Script::default(), config).await;
    let answer = server.raw(head("content-length: 1001\r\n").as_bytes()).await;
    assert_eq!((answer.status, &*answer.code()), (413, "body_too_large"));
    let big = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(5000));
    let answer = server.raw(&chunked(&big, 512)).await;
    assert_eq!((answer.status, &*answer.code()), (413, "body_too_large"));
    // A client that writes everything before it reads still gets the answer.
    let answer = server.post("/v1/chat/completions", &"x".repeat(8 << 20)).await;
    assert_eq!((answer.status, &*answer.code()), (413, "body_too_large"));
    assert_eq!(ApiConfig::default().max_body, 64 << 20);
}

#[tokio::test]
async fn s4_large_bodies_share_a_budget() {
    let config = ApiConfig { max_body: 1 << 20, max_body_total: 1 << 20, ..ApiConfig::default() };
    let server = Server::start(Script::default(), config).await;
    let mut slow = server.connect().await;
    slow.write_all(head("content-length: 1000000\r\n").as_bytes()).await.unwrap();
    slow.write_all(&vec![b' '; 900_000]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let answer = server.post("/v1/chat/completions", &" ".repeat(500_000)).await;
    assert_eq!((answer.status, &*answer.code()), (503, "overloaded"));
    assert_eq!(server.chat("").await.status, 200);
    drop(slow);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let answer = server.post("/v1/chat/completions", &" ".repeat(500_000)).await;
    assert_eq!((answer.status, &*answer.code()), (400, "invalid_json"));
}

/// A script of which every conversation that asks for a grammar is rendered when the test says so.
struct Gated {
    script: Script,
    gate: Mutex<Gate>,
    changed: Condvar,
}

#[derive(Default)]
struct Gate {
    open: bool,
    /// Waiting at it, and the most that ever were.
    waiting: usize,
    most_waiting: usize,
}

impl Gated {
    fn lock(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens the gate at its end, also at that of a test that fails: the runtime waits for the threads that wait there.
struct Opens(Arc<Gated>);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.lock().open = true;
        self.0.changed.notify_all();
    }
}

impl Backend for Gated {
    fn model(&self) -> &ModelInfo {
        self.script.model()
    }
    fn submit(&self, request: GenerateRequest) -> Result<Events, EngineError> {
        self.script.submit(request)
    }
    fn stats(&self) -> EngineStats {
        self.script.stats()
    }
    fn tokenize(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        self.script.tokenize(text)
    }
    fn render(&self, input: &ChatInput) -> Result<Prompt, PromptError> {
        if input.response_format.is_some() {
            let mut gate = self.lock();
            gate.waiting += 1;
            gate.most_waiting = gate.most_waiting.max(gate.waiting);
            let mut gate = self.changed.wait_while(gate, |gate| !gate.open).unwrap();
            gate.waiting -= 1;
        }
        self.script.render(input)
    }
    fn token_bytes(&self, token: u32) -> Vec<u8> {
        self.script.token_bytes(token)
    }
    fn is_eog(&self, token: u32) -> bool {
        self.script.is_eog(token)
    }
}

#[tokio::test]
async fn s4_grammars_are_made_a_few_at_a_time_and_nobody_else_waits_for_them() {
    let script = Script::deepseek_v4("{}");
    let gated = Arc::new(Gated { script: script.clone(), gate: Mutex::default(), changed: Condvar::new() });
    let opens = Opens(Arc::clone(&gated));
    let config = ApiConfig { max_grammars: 2, max_parsing: 1, ..ApiConfig::default() };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let backend: Arc<dyn Backend> = Arc::<Gated>::clone(&gated);
    let api = Api::new(backend, config);
    let task = tokio::spawn(serve(Arc::clone(&api), listener, false, crate::Hosts::any()));
    let server = Server { addr, api, script, task };

    let plain = r#"{"messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_object"}}"#;
    // A field is the same with an escape in its name.
    let escaped = plain.replace("response_format", "r\\u0065sponse_format");
    let mut waiting = Vec::new();
    for i in 0..9 {
        let mut stream = server.connect().await;
        let body = if i % 2 == 0 { plain } else { &escaped };
        stream.write_all(&post("/v1/chat/completions", body)).await.unwrap();
        waiting.push(stream);
    }
    let in_flight = || server.api.metrics.in_flight.get();
    until("two render", || in_flight() == 9 && gated.lock().waiting == 2).await;
    // One that waits and leaves takes no turn.
    waiting.drain(6..);
    until("three left", || in_flight() == 6).await;
    // Answered while the others are held: there is one place for long bodies, and no grammar is in it.
    let long = r#"{"messages":[{"role":"user","content":"PAD"}]}"#.replace("PAD", &"x".repeat(3000 + (2 << 10)));
    let answer = server.post("/v1/chat/completions", &long).await;
    assert_eq!((answer.status, &*answer.code()), (400, "context_length_exceeded"));
    assert_eq!((gated.lock().waiting, server.script.seen().requests.len()), (2, 0));
    drop(opens);
    for stream in &mut waiting {
        assert_eq!(read_answer(stream).await.status, 200);
    }
    assert_eq!((gated.lock().most_waiting, server.script.seen().requests.len()), (2, 6));
}

#[tokio::test]
async fn s1_a_web_page_of_another_site_starts_and_reads_nothing() {
    let server = Server::plain().await;
    let body = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
    let from_page = |kind: &str| {
        let length = body.len();
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\norigin: https://example.com\r\n{kind}content-length: {length}\r\n\r\n{body}"
        )
    };
    // What a browser sends without asking first.
    for kind in ["", "content-type: text/plain\r\n", "content-type: application/x-www-form-urlencoded\r\n"] {
        let answer = server.raw(from_page(kind).as_bytes()).await;
        assert_eq!((answer.status, &*answer.code()), (415, "unsupported_media_type"), "{kind}");
    }
    assert_eq!(server.script.seen().requests.len(), 0);
    let ask = "OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: x\r\norigin: https://example.com\r\naccess-control-request-method: POST\r\n\r\n";
    let asked = server.raw(ask.as_bytes()).await;
    let answered = server.raw(from_page("content-type: application/json\r\n").as_bytes()).await;
    assert_eq!((asked.status, answered.status), (405, 200), "who sends JSON without asking is no browser");
    for answer in [asked, answered] {
        assert!(!answer.head.to_ascii_lowercase().contains("access-control"), "{}", answer.head);
    }
}

#[tokio::test]
async fn a16_a_slow_head_has_a_deadline() {
    let config = ApiConfig { header_timeout: Duration::from_millis(200), ..ApiConfig::default() };
    let server = Server::start(Script::default(), config).await;
    let mut stream = server.connect().await;
    stream.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost").await.unwrap();
    let answer = read_answer(&mut stream).await;
    assert_eq!((answer.status, &*answer.code()), (408, "header_timeout"));
    assert!(answer.header("x-request-id").is_some());
    // A connection that never says anything ends too.
    let mut silent = server.connect().await;
    let answer = read_answer(&mut silent).await;
    assert_eq!(answer.status, 408);
}

#[tokio::test]
async fn a16_a_slow_body_has_a_deadline() {
    let config = ApiConfig { body_idle_timeout: Duration::from_millis(200), ..ApiConfig::default() };
    let server = Server::start(Script::default(), config).await;
    let mut stream = server.connect().await;
    stream.write_all(head("content-length: 100\r\n").as_bytes()).await.unwrap();
    stream.write_all(b"{").await.unwrap();
    let answer = read_answer(&mut stream).await;
    assert_eq!((answer.status, &*answer.code()), (408, "body_timeout"));

    let config = ApiConfig { body_timeout: Duration::from_millis(300), ..ApiConfig::default() };
    let server = Server::start(Script::default(), config).await;
    let (mut from, mut to) = server.connect().await.into_split();
    let drip = tokio::spawn(async move {
        to.write_all(head("content-length: 1000\r\n").as_bytes()).await.unwrap();
        while to.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut got = vec![0; 12];
    tokio::time::timeout(Duration::from_secs(5), from.read_exact(&mut got)).await.unwrap().unwrap();
    assert_eq!(got, b"HTTP/1.1 408");
    drip.abort();
}

#[tokio::test]
async fn a16_a_client_that_reads_nothing_is_dropped() {
    let script = Script { says: "x".repeat(200_000), ..Script::default() };
    let config = ApiConfig { stall_timeout: Duration::from_millis(300), ..ApiConfig::default() };
    let server = Server::start(script, config).await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(server.addr).await.unwrap();
    let body = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"logprobs":true,"top_logprobs":20}"#;
    stream.write_all(&post("/v1/chat/completions", body)).await.unwrap();
    // Never read: kernel buffers fill, then the server gives up and the sequence is cancelled.
    until("cancelled", || server.script.seen().cancelled == ["decode"]).await;
}

#[tokio::test]
async fn a16_every_response_has_a_request_id() {
    let server = Server::plain().await;
    for path in ["/health", "/nope", "/v1/models", "/metrics", "/v1/chat/completions"] {
        let answer = server.get(path).await;
        assert!(answer.header("x-request-id").is_some_and(|id| id.starts_with("req_")), "{path}: {}", answer.head);
    }
    let echoed = server.raw(b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: my-id.1\r\n\r\n").await;
    assert_eq!(echoed.header("x-request-id"), Some("my-id.1"));
    let insane = server.raw(b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: a b\"c\r\n\r\n").await;
    assert!(insane.header("x-request-id").is_some_and(|id| id.starts_with("req_")));
}
