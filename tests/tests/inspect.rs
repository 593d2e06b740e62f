//! A worker's debugging service as a gRPC client sees it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ds4_proto::v1;
use ds4_proto::v1::debug_client::DebugClient;
use ds4_proto::v1::prompt::Form;
use ds4_proto::v1::score_reply::Event;
use ds4_tests::{Process, Sandbox, Worker, wait_for};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

const SOON: Duration = Duration::from_secs(10);

async fn channel(dir: &Path) -> Channel {
    let socket: PathBuf = dir.join("worker.sock");
    let connect = move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    };
    Endpoint::from_static("http://localhost").connect_with_connector(tower::service_fn(connect)).await.unwrap()
}

fn tiny(sandbox: &Sandbox) -> (Process, Worker) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/tiny-v4.gguf");
    let mut owner = sandbox.start("ds4-weight-owner", &["--allow-dev-models", "--model", path.to_str().unwrap()]);
    owner.wait_ready(Duration::from_secs(30));
    (owner, sandbox.worker(&["--ctx", "1024", "--prefill-chunk", "32"]))
}

fn tokens(ids: &[u32]) -> Option<v1::Prompt> {
    Some(v1::Prompt { form: Some(Form::Tokens(v1::TokenIds { ids: ids.to_vec() })) })
}

fn text(text: &str) -> Option<v1::Prompt> {
    Some(v1::Prompt { form: Some(Form::Text(text.into())) })
}

/// The steps of a call and the reason of its end.
async fn score(client: &mut DebugClient<Channel>, request: v1::ScoreRequest) -> (Vec<v1::ScoreStep>, String) {
    let mut replies = client.score(request).await.unwrap().into_inner();
    let mut steps = Vec::new();
    let mut begun = false;
    while let Some(reply) = replies.message().await.unwrap() {
        match reply.event.unwrap() {
            Event::Begin(_) => begun = true,
            Event::Step(step) => steps.push(step),
            Event::End(end) => {
                assert!(begun && replies.message().await.unwrap().is_none(), "nothing follows the end");
                return (steps, end.reason);
            }
        }
    }
    panic!("no end");
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
}

#[tokio::test]
async fn deepseek_v4_debug_service_is_found_by_health_and_reflection() {
    use tonic_health::pb::health_client::HealthClient;
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
    use tonic_reflection::pb::v1 as r1;

    let sandbox = Sandbox::new();
    let _both = tiny(&sandbox);
    let channel = channel(sandbox.dir()).await;
    let request = HealthCheckRequest { service: "ds4.v1.Debug".into() };
    let reply = HealthClient::new(channel.clone()).check(request).await.unwrap().into_inner();
    assert_eq!(reply.status(), ServingStatus::Serving);

    let mut client = r1::server_reflection_client::ServerReflectionClient::new(channel);
    let mut ask = async |message: r1::server_reflection_request::MessageRequest| {
        let request = r1::ServerReflectionRequest { host: String::new(), message_request: Some(message) };
        let mut replies = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
        replies.message().await.unwrap().unwrap().message_response.unwrap()
    };
    use r1::server_reflection_request::MessageRequest;
    use r1::server_reflection_response::MessageResponse;
    let MessageResponse::ListServicesResponse(list) = ask(MessageRequest::ListServices(String::new())).await else {
        panic!("no list")
    };
    let names: Vec<String> = list.service.into_iter().map(|s| s.name).collect();
    assert!(names.contains(&"ds4.v1.Worker".into()) && names.contains(&"ds4.v1.Debug".into()), "{names:?}");
    let symbol = MessageRequest::FileContainingSymbol("ds4.v1.Debug".into());
    let MessageResponse::FileDescriptorResponse(files) = ask(symbol).await else { panic!("no file") };
    let file = String::from_utf8_lossy(&files.file_descriptor_proto[0]).into_owned();
    assert!(["Tokenize", "Score", "positions", "logits"].iter().all(|name| file.contains(name)));
}

#[tokio::test]
async fn deepseek_v4_scores_at_positions_equal_scores_of_the_prompts_that_end_there() {
    let sandbox = Sandbox::new();
    let _both = tiny(&sandbox);
    let mut client = DebugClient::new(channel(sandbox.dir()).await);
    // Window edges, compressed rows of both ratios, chunk edges.
    let prompt: Vec<u32> = (0..300).map(|i| 3 + i * 7 % 200).collect();
    let positions = [1, 5, 31, 32, 33, 128, 129, 257, 299];
    let request = v1::ScoreRequest {
        prompt: tokens(&prompt),
        steps: 2,
        top_k: 3,
        logits: true,
        past_end: true,
        positions: positions.to_vec(),
        ..Default::default()
    };
    let (whole, reason) = score(&mut client, request.clone()).await;
    assert_eq!(reason, "length");
    assert_eq!(whole.iter().map(|s| s.position).collect::<Vec<_>>(), [&positions[..], &[300, 301]].concat());
    // Once more, over rows that the worker still holds.
    assert_eq!(score(&mut client, request).await.0, whole);

    for step in &whole {
        // What the reply says of its row, said again from the row.
        let row = floats(&step.logits);
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let normal = max + row.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
        let token = step.token.as_ref().unwrap();
        let logit = row[usize::try_from(token.id).unwrap()];
        assert!((step.logprob - (logit - normal)).abs() < 1e-9);
        assert_eq!(usize::try_from(step.rank).unwrap(), row.iter().filter(|l| **l > logit).count());
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        let top: Vec<usize> = step.top.iter().map(|c| usize::try_from(c.token.as_ref().unwrap().id).unwrap()).collect();
        assert_eq!(top, order[..3]);
        assert_eq!(step.not_finite, 0);
    }
    for step in whole.iter().filter(|s| s.position < 300) {
        let at = usize::try_from(step.position).unwrap();
        assert_eq!(step.token.as_ref().unwrap().id, prompt[at], "the prompt's own token");
        let alone = v1::ScoreRequest {
            prompt: tokens(&prompt[..at]),
            steps: 1,
            logits: true,
            past_end: true,
            ..Default::default()
        };
        let (alone, _) = score(&mut client, alone).await;
        assert!(alone[0].logits == step.logits, "position {at}: the same bits");
    }
}

/// With a drafter the rows of several steps come out of one pass of the model.
#[tokio::test]
async fn deepseek_v4_scores_are_the_same_bits_with_guesses_ahead() {
    let sandbox = Sandbox::new();
    let block = sandbox.dir().join("block.gguf");
    let shown = block.to_str().unwrap();
    let made = sandbox.run("ds4", &["gguf", "synth", "--part", "mtp", "--shape", "tiny", "-o", shown]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/tiny-v4.gguf");
    let args = ["--allow-dev-models", "--model", model.to_str().unwrap(), "--model", shown];
    let mut owner = sandbox.start("ds4-weight-owner", &args);
    owner.wait_ready(Duration::from_secs(30));
    let request = v1::ScoreRequest {
        prompt: tokens(&(0..150).map(|i| 3 + i * 7 % 200).collect::<Vec<u32>>()),
        steps: 60,
        logits: true,
        past_end: true,
        positions: vec![3, 100, 149],
        ..Default::default()
    };
    let mut scored = Vec::new();
    for more in [&[][..], &["--mtp", "deepseek-v4-flash-tiny-mtp-synthetic"]] {
        let mut worker = sandbox.worker(&[&["--ctx", "1024"][..], more].concat());
        scored.push(score(&mut DebugClient::new(channel(sandbox.dir()).await), request.clone()).await);
        let drafted = sandbox.ctl(&["status"])["worker"]["drafted_tokens"].as_u64();
        assert_eq!(drafted > Some(0), !more.is_empty(), "{drafted:?}");
        worker.process.kill();
    }
    assert_eq!(scored[0].0.iter().map(|s| s.position).collect::<Vec<_>>()[3..], (150..210).collect::<Vec<u32>>());
    assert!(scored[0] == scored[1], "guesses changed a distribution");
}

#[tokio::test(flavor = "multi_thread")]
async fn deepseek_v4_scoring_is_bounded_cancellable_and_refuses_by_name() {
    let sandbox = Sandbox::new();
    let (_owner, worker) = tiny(&sandbox);
    let mut client = DebugClient::new(channel(sandbox.dir()).await);
    let base = v1::ScoreRequest { prompt: text("hello there"), steps: 1, ..Default::default() };
    let cases: [(v1::ScoreRequest, &[&str]); 8] = [
        (v1::ScoreRequest { prompt: None, ..base.clone() }, &["no prompt"]),
        (v1::ScoreRequest { prompt: text(""), ..base.clone() }, &["empty"]),
        (v1::ScoreRequest { top_k: 1001, ..base.clone() }, &["1001", "1000"]),
        (v1::ScoreRequest { steps: 5000, ..base.clone() }, &["5000", "1024", "--ctx"]),
        (v1::ScoreRequest { positions: vec![0], ..base.clone() }, &["positions has 0"]),
        (v1::ScoreRequest { positions: vec![3, 2], ..base.clone() }, &["positions has 2"]),
        (v1::ScoreRequest { prompt: tokens(&[1, 99_999_999]), ..base.clone() }, &["99999999", "vocabulary"]),
        (
            v1::ScoreRequest {
                sampling: Some(v1::Sampling { temperature: Some(-1.0), ..Default::default() }),
                ..base.clone()
            },
            &["temperature", "-1"],
        ),
    ];
    for (request, wanted) in cases {
        let status = client.score(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(wanted.iter().all(|w| status.message().contains(w)), "{wanted:?} in {status}");
    }

    // An end token is a step, and the last one unless told otherwise: sampled from nearly flat rows it comes soon.
    let mut reasons = Vec::new();
    for seed in 0..40 {
        let warm = v1::Sampling { temperature: Some(2.0), seed: Some(seed), ..Default::default() };
        let (steps, reason) =
            score(&mut client, v1::ScoreRequest { steps: 100, sampling: Some(warm), ..base.clone() }).await;
        let ends = |s: &v1::ScoreStep| s.token.as_ref().unwrap().end;
        assert_eq!(ends(steps.last().unwrap()), reason == "stop");
        assert!(!steps[..steps.len() - 1].iter().any(ends));
        assert!(reason == "stop" || (reason == "length" && steps.len() == 100), "{reason}");
        reasons.push(reason);
        if ["stop", "length"].iter().all(|r| reasons.contains(&(*r).to_owned())) {
            break;
        }
    }
    assert!(reasons.contains(&"stop".to_owned()), "{reasons:?}");

    // A client that leaves takes its request with it.
    let endless = v1::ScoreRequest { steps: 900, logits: true, past_end: true, ..base };
    let mut replies = client.score(endless).await.unwrap().into_inner();
    assert!(replies.message().await.unwrap().is_some() && replies.message().await.unwrap().is_some());
    assert_eq!(sandbox.ctl(&["status"])["worker"]["running"], 1, "{}", worker.process.log());
    drop(replies);
    wait_for("the request's end", SOON, || (sandbox.ctl(&["status"])["worker"]["running"] == 0).then_some(()));
}
