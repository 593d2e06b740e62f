//! Clients that leave: in every stage, streamed or not.

use super::*;

const BODY: &str = r#"{"messages":[{"role":"user","content":"hi"}],"stream":STREAM}"#;

async fn leave(script: Script, stage: &'static str, stream: bool, extra: &[u8]) {
    let server = Server::start(script, ApiConfig::default()).await;
    let mut client = server.connect().await;
    let body = BODY.replace("STREAM", if stream { "true" } else { "false" });
    client.write_all(&post("/v1/chat/completions", &body)).await.unwrap();
    client.write_all(extra).await.unwrap();
    until("submitted", || server.script.seen().requests.len() == 1).await;
    tokio::time::sleep(Duration::from_millis(150)).await;
    drop(client);
    let left = std::time::Instant::now();
    until("cancelled", || !server.script.seen().cancelled.is_empty()).await;
    assert_eq!(server.script.seen().cancelled, [stage], "stream {stream}");
    assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
    let metrics = server.get("/metrics").await.text();
    assert!(metrics.contains(&format!("ds4_http_cancelled_total{{stage=\"{stage}\"}} 1")), "{metrics}");
    assert!(metrics.contains("status=\"499\",outcome=\"cancelled\"} 1"), "{metrics}");
}

const LONG: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a2_a_client_that_leaves_while_queued_is_reaped() {
    for stream in [true, false] {
        leave(Script { queued: LONG, ..Script::default() }, "queued", stream, b"").await;
    }
}

#[tokio::test]
async fn a1_a_client_that_leaves_in_prefill_cancels_it() {
    for stream in [true, false] {
        leave(Script { prefill: LONG, ..Script::default() }, "prefill", stream, b"").await;
    }
}

#[tokio::test]
async fn a1_a_client_that_leaves_in_decode_cancels_it() {
    for stream in [true, false] {
        leave(Script { per_token: Duration::from_millis(50), ..Script::default() }, "decode", stream, b"").await;
    }
}

#[tokio::test]
async fn a1_unread_bytes_do_not_hide_the_fin() {
    for stream in [true, false] {
        leave(Script { prefill: LONG, ..Script::default() }, "prefill", stream, b"\r\n").await;
        leave(Script { queued: LONG, ..Script::default() }, "queued", stream, b"GET /health HTTP/1.1\r\n\r\n").await;
    }
}

#[tokio::test]
async fn a1_every_choice_of_a_request_is_cancelled() {
    let server = Server::start(Script { prefill: LONG, ..Script::default() }, ApiConfig::default()).await;
    let mut client = server.connect().await;
    let body = r#"{"prompt":["a","b"],"n":3}"#;
    client.write_all(&post("/v1/completions", body)).await.unwrap();
    until("submitted", || server.script.seen().requests.len() == 6).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(client);
    until("cancelled", || server.script.seen().cancelled.len() == 6).await;
}

#[tokio::test]
async fn a1_a_body_cut_short_starts_nothing() {
    let server = Server::plain().await;
    let mut client = server.connect().await;
    client
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"prompt\"")
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(client);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(server.script.seen().requests.is_empty());
    until("no connection left", || server.api.metrics.connections.get() == 0).await;
    assert_eq!(server.api.metrics.in_flight.get(), 0);
}

#[tokio::test]
async fn a_short_request_of_a_half_closed_client_is_answered() {
    let server = Server::plain().await;
    let mut client = server.connect().await;
    client.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(read_answer(&mut client).await.status, 200);
}

#[tokio::test]
async fn a_refused_choice_cancels_those_before_it() {
    let full = ds4_engine::EngineError::QueueFull { limit: 8 };
    let script = Script { prefill: LONG, refuse_from: Some((2, full)), ..Script::default() };
    let server = Server::start(script, ApiConfig::default()).await;
    let answer = server.post("/v1/completions", r#"{"prompt":"a","n":4}"#).await;
    assert_eq!((answer.status, &*answer.code(), answer.header("retry-after")), (429, "queue_full", Some("1")));
    until("both cancelled", || server.script.seen().cancelled.len() == 2).await;
}
