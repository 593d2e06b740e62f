//! What dashboards, clients and operators can see.

use super::*;
use std::io::Write;
use std::sync::{Mutex, MutexGuard};
use tracing::instrument::WithSubscriber;

#[tokio::test]
async fn o1_health_metrics_and_stats_need_no_model_call() {
    let server = Server::plain().await;
    for path in ["/health", "/health/ready", "/health/live"] {
        let answer = server.get(path).await;
        assert_eq!((answer.status, answer.json()["status"].as_str()), (200, Some("ok")), "{path}");
    }
    let metrics = server.get("/metrics").await;
    assert_eq!(metrics.status, 200);
    assert!(metrics.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    assert!(metrics.text().ends_with("# EOF\n"));
    let stats = server.get("/v1/stats").await.json();
    assert_eq!(stats["engine"]["bank_bytes"], 4096);
    assert_eq!(stats["phase"], "ready");
    assert!(server.script.seen().requests.is_empty());
    let head = server.raw(b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    assert_eq!(tokio::time::timeout(Duration::from_secs(5), head_status(&server)).await.unwrap(), 200);
    drop(head);
}

async fn head_status(server: &Server) -> u16 {
    let mut stream = server.connect().await;
    stream.write_all(b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut raw = String::new();
    stream.read_to_string(&mut raw).await.unwrap();
    raw[9..12].parse().unwrap()
}

#[tokio::test]
async fn o1_metrics_count_what_happened() {
    let server = Server::plain().await;
    assert_eq!(server.chat("").await.status, 200);
    assert_eq!(server.chat(r#","stream":true"#).await.status, 200);
    assert_eq!(server.chat(r#","temperature":9"#).await.status, 400);
    assert_eq!(server.post("/v1/completions", r#"{"prompt":"a","max_tokens":2}"#).await.status, 200);
    let text = server.get("/metrics").await.text();
    for line in [
        "ds4_requests_total{surface=\"chat\",status=\"200\",outcome=\"stop\"} 2",
        "ds4_requests_total{surface=\"chat\",status=\"400\",outcome=\"invalid_value\"} 1",
        "ds4_requests_total{surface=\"completions\",status=\"200\",outcome=\"length\"} 1",
        "ds4_ttft_seconds_count{surface=\"chat\"} 2",
        "ds4_inter_token_seconds_count{surface=\"completions\"} 1",
        "ds4_request_seconds_count{surface=\"chat\"} 3",
        "ds4_engine_sequences_total 3",
        "ds4_engine_decode_tokens_total 77",
        "ds4_engine_bank_bytes 4096",
        "ds4_http_in_flight 0",
    ] {
        let found = text.lines().any(|l| l == line || l == format!("{line}.0"));
        assert!(found, "{line} in\n{text}");
    }
    assert!(text.contains("ds4_model_served{model=\"scripted\""), "{text}");
    assert!(text.contains("epoch=\"1\""));
}

#[tokio::test]
async fn a9_models_carry_the_context_length() {
    let server = Server::plain().await;
    let list = server.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let model = &list["data"][0];
    assert_eq!((model["id"].as_str(), model["object"].as_str()), (Some("scripted"), Some("model")));
    assert_eq!((model["context_length"].as_u64(), model["max_model_len"].as_u64()), (Some(4096), Some(4096)));
    assert_eq!(model["meta"]["n_ctx_train"], 8192);
    assert_eq!(&server.get("/v1/models/scripted").await.json(), model);
    let wrong = server.get("/v1/models/org/else").await;
    assert_eq!((wrong.status, &*wrong.code()), (404, "model_not_found"));
    assert!(wrong.json()["error"]["message"].as_str().unwrap().contains("scripted"));
}

/// Log lines, gathered.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

struct Writer<'a>(MutexGuard<'a, Vec<u8>>);

impl Write for Writer<'_> {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.0.extend_from_slice(buf);
        Ok(buf.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> tracing_subscriber::fmt::MakeWriter<'a> for Lines {
    type Writer = Writer<'a>;
    fn make_writer(&'a self) -> Writer<'a> {
        Writer(self.0.lock().unwrap())
    }
}

#[test]
fn o2_one_completion_line_per_request_on_every_lane() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(lines.clone())
        .with_ansi(false)
        .with_max_level(tracing::Level::INFO)
        .finish();
    // The default of this thread, and the server runs on it alone.
    let _guard = tracing::subscriber::set_default(subscriber);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(
        async {
            let script = Script { per_token: Duration::from_millis(5), ..Script::default() };
            let server = Server::start(script, ApiConfig::default()).await;
            let with_id = |id: &str, path: &str, body: &str| {
                let request = String::from_utf8(post(path, body)).unwrap();
                request.replacen("host: x", &format!("host: x\r\nx-request-id: {id}"), 1).into_bytes()
            };
            let user = r#"{"messages":[{"role":"user","content":"hi"}]"#;
            let chat = "/v1/chat/completions";
            server.raw(&with_id("whole", chat, &format!("{user}}}"))).await;
            server.raw(&with_id("streamed", chat, &format!("{user},\"stream\":true}}"))).await;
            server.raw(&with_id("text", "/v1/completions", r#"{"prompt":"a","max_tokens":3}"#)).await;
            server.raw(&with_id("refused", chat, "{}")).await;
            server.raw(b"\x00\x01\x02\r\n\r\n").await;
            let mut client = server.connect().await;
            client.write_all(&with_id("left", chat, &format!("{user},\"stream\":true}}"))).await.unwrap();
            until("submitted", || server.script.seen().requests.len() == 4).await;
            drop(client);
            until("cancelled", || server.script.seen().cancelled.len() == 1).await;
        }
        .with_current_subscriber(),
    );
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let line = |id: &str| {
        let mut found = text.lines().filter(|l| l.contains(&format!("id={id} ")));
        let first = found.next().unwrap_or_else(|| panic!("no line for {id} in\n{text}"));
        assert!(found.next().is_none(), "two lines for {id} in\n{text}");
        first.to_owned()
    };
    for id in ["whole", "streamed"] {
        let l = line(id);
        for part in ["status=200", "outcome=\"stop\"", "prompt=9", "completion=14", "ttft_ms=", "tok_s=", "total_ms="] {
            assert!(l.contains(part), "{part} in {l}");
        }
    }
    assert!(line("text").contains("surface=\"completions\"") && line("text").contains("outcome=\"length\""));
    assert!(line("refused").contains("status=400") && line("refused").contains("missing_required_parameter"));
    assert!(line("left").contains("status=499") && line("left").contains("outcome=\"cancelled\""));
    assert!(text.contains("outcome=\"malformed_request\""), "{text}");
}
