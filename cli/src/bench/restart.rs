//! `ds4 bench restart`: SIGKILL the worker under load, start another, again and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::rig::{Rig, RigArgs, body, prompt, vocabulary};
use super::stats::percentile;
use super::weights;
use crate::client::control;
use crate::client::http::Server;

/// `ds4 bench restart`.
#[derive(clap::Args)]
pub struct RestartBenchArgs {
    #[command(flatten)]
    rig: RigArgs,
    /// Kills
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    cycles: u32,
    /// Streaming requests that are always in flight
    #[arg(long, value_name = "N", default_value_t = 3)]
    streams: u32,
    /// Milliseconds between a worker's checked answer and its death
    #[arg(long, value_name = "MS", default_value_t = 50)]
    dwell_ms: u64,
}

const ANSWER_LIMIT: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Load {
    stop: AtomicBool,
    finished: AtomicU64,
    broken: AtomicU64,
}

/// Runs it on a private owner.
pub async fn restart(args: &RestartBenchArgs) -> anyhow::Result<(Value, String)> {
    let conditions = args.rig.conditions()?;
    let mut rig = Rig::start(&args.rig, true).await?;
    let mut ready_ms = vec![rig.start_worker().await?.as_secs_f64() * 1e3];
    let server = rig.server()?;
    let expected = greedy(&server).await.context("the first worker's answer")?;
    let vocab = vocabulary(&server).await?;
    // What is refused would be no load at all.
    server.post("/v1/completions", &loading(u64::MAX, vocab)).await?.json().context("a request of the load")?;
    let first_hash = weights::hash(rig.owner_pid())?;
    let first = control::owner_status(rig.dir()).await?;

    let load = Arc::new(Load::default());
    let mut set = JoinSet::new();
    for stream in 0..args.streams {
        set.spawn(keep_streaming(server.clone(), Arc::clone(&load), u64::from(stream) * 1_000_000, vocab));
    }

    let begun = Instant::now();
    let mut failures = Vec::new();
    // The start before the load is not one of the measured ones.
    ready_ms.clear();
    for cycle in 1..=args.cycles {
        tokio::time::sleep(Duration::from_millis(args.dwell_ms)).await;
        rig.kill_worker().await?;
        let outcome = async {
            let ready = rig.start_worker().await?;
            let health = server.get("/health/ready").await?.status;
            ensure!(health == 200, "/health/ready answered {health} after READY");
            let answer = tokio::time::timeout(ANSWER_LIMIT, greedy(&server)).await.context("no answer in time")??;
            ensure!(answer == expected, "the answer changed from {expected:?} to {answer:?}");
            anyhow::Ok(ready)
        };
        match outcome.await {
            Ok(ready) => ready_ms.push(ready.as_secs_f64() * 1e3),
            Err(error) => {
                ds4_os::say!("cycle {cycle}: {error:#}");
                failures.push(format!("cycle {cycle}: {error:#}"));
            }
        }
        if cycle % 100 == 0 {
            ds4_os::say!(
                "{cycle}/{} cycles, p50 {:.0} ms, {} failed",
                args.cycles,
                percentile(&ready_ms, 50),
                failures.len()
            );
        }
    }
    let elapsed = begun.elapsed();
    load.stop.store(true, Ordering::Relaxed);
    set.abort_all();
    // As at the first look: one worker is attached. Dead ones' leases end within milliseconds.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let last = control::owner_status(rig.dir()).await?;
    let last_hash = weights::hash(rig.owner_pid())?;

    let ready = json!({
        "p50": percentile(&ready_ms, 50),
        "p95": percentile(&ready_ms, 95),
        "max": percentile(&ready_ms, 100),
    });
    let mib = |bytes: u64| (bytes as f64) / f64::from(1 << 20);
    let text = format!(
        "{} cycles in {:.0} s: {} failed\nready  p50 {:.0} ms  p95 {:.0} ms  max {:.0} ms\n\
         owner  {:.1} MiB, {} descriptors (first {:.1} MiB, {})\nweights hash {}\n\
         load   {} requests finished, {} broken by a kill\n",
        args.cycles,
        elapsed.as_secs_f64(),
        failures.len(),
        percentile(&ready_ms, 50),
        percentile(&ready_ms, 95),
        percentile(&ready_ms, 100),
        mib(last.rss_bytes),
        last.fds,
        mib(first.rss_bytes),
        first.fds,
        if first_hash == last_hash { "unchanged" } else { "CHANGED" },
        load.finished.load(Ordering::Relaxed),
        load.broken.load(Ordering::Relaxed),
    );
    let value = json!({
        "cycles": args.cycles,
        "failed": failures.len(),
        "failures": failures.iter().take(20).collect::<Vec<_>>(),
        "ready_ms": ready,
        "owner_rss_mib": mib(last.rss_bytes),
        "owner_rss_mib_first": mib(first.rss_bytes),
        "owner_fds": last.fds,
        "owner_fds_first": first.fds,
        "weights_hash": last_hash,
        "weights_hash_unchanged": first_hash == last_hash,
        "load_requests_finished": load.finished.load(Ordering::Relaxed),
        "load_requests_broken": load.broken.load(Ordering::Relaxed),
        "elapsed_s": elapsed.as_secs_f64(),
        "conditions": conditions,
    });
    Ok((value, text))
}

async fn greedy(server: &Server) -> anyhow::Result<String> {
    let request = json!({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0});
    let answer = server.post("/v1/completions", &request).await?.json()?;
    let text = answer.pointer("/choices/0/text").and_then(Value::as_str).context("the answer has no text")?;
    ensure!(!text.is_empty(), "the answer is empty");
    Ok(text.to_string())
}

/// A request of the load.
fn loading(seed: u64, vocab: u64) -> Value {
    body(&prompt(24, seed, vocab), 32)
}

/// One client that always has a streaming request open; kills break its requests, and it comes back at once.
async fn keep_streaming(server: Server, load: Arc<Load>, first_seed: u64, vocab: u64) {
    for seed in first_seed.. {
        if load.stop.load(Ordering::Relaxed) {
            return;
        }
        let mut request = loading(seed, vocab);
        request["stream"] = true.into();
        let work = async {
            let mut events = server.stream("/v1/completions", &request).await?;
            while events.next().await?.is_some() {}
            anyhow::Ok(())
        };
        match work.await {
            Ok(()) => load.finished.fetch_add(1, Ordering::Relaxed),
            Err(_) => {
                // Not a spin: the listening socket outlives workers, so a retry waits in its queue.
                tokio::time::sleep(Duration::from_millis(5)).await;
                load.broken.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}
