//! `ds4 bench throughput`: prefill and decode of one stream, and what several streams get together.

use std::time::Instant;

use anyhow::ensure;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::rig::{Rig, RigArgs, body, prompt, speeds};
use super::stats::median;

/// `ds4 bench throughput`.
#[derive(clap::Args)]
pub struct ThroughputArgs {
    #[command(flatten)]
    rig: RigArgs,
    /// Runs of each measurement; medians are reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Prompt tokens of the prefill measurement
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    prefill: usize,
    /// Generated tokens of the decode measurements
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    decode: u32,
    /// Decode speed of one stream behind prompts of so many tokens (each measured once)
    #[arg(long, value_name = "TOKENS,...", value_delimiter = ',')]
    at: Vec<usize>,
    /// Numbers of simultaneous streams
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 4, 16])]
    streams: Vec<u32>,
}

const SHORT_PROMPT: usize = 16;

/// Runs it on a private owner and worker.
pub async fn throughput(args: &ThroughputArgs) -> anyhow::Result<(Value, String)> {
    let conditions = args.rig.conditions()?;
    let mut rig = Rig::start(&args.rig, true).await?;
    if let Some(most) = args.streams.iter().max() {
        rig.worker_flag("--max-batch", (*most).max(1));
    }
    rig.start_worker().await?;
    let server = rig.server()?;
    let mut seed = 0;
    let mut fresh = |tokens: usize| {
        seed += 1;
        prompt(tokens, seed)
    };

    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    // One run that is not counted: first touches of banks and scratch memory.
    for run in 0..=args.repeats {
        let one = server.post("/v1/completions", &body(&fresh(args.prefill), 1)).await?.json()?;
        let two = server.post("/v1/completions", &body(&fresh(SHORT_PROMPT), args.decode)).await?.json()?;
        if run > 0 {
            prefill.push(speeds(&one)?.0);
            decode.push(speeds(&two)?.1);
        }
    }

    let mut depths = serde_json::Map::new();
    for &at in &args.at {
        let answer = server.post("/v1/completions", &body(&fresh(at), args.decode)).await?.json()?;
        let (prefill, decode) = speeds(&answer)?;
        depths.insert(at.to_string(), json!({"prefill_tok_s": prefill, "decode_tok_s": decode}));
    }

    let mut aggregate = serde_json::Map::new();
    for &streams in &args.streams {
        let mut samples = Vec::new();
        for _ in 0..args.repeats {
            let begun = Instant::now();
            let mut set = JoinSet::new();
            for _ in 0..streams {
                let (server, request) = (server.clone(), body(&fresh(SHORT_PROMPT), args.decode));
                set.spawn(async move { server.post("/v1/completions", &request).await?.json() });
            }
            for answer in set.join_all().await {
                let tokens = answer?.pointer("/usage/completion_tokens").and_then(Value::as_u64);
                ensure!(
                    tokens == Some(u64::from(args.decode)),
                    "a stream generated {tokens:?} of {} tokens",
                    args.decode
                );
            }
            samples.push(f64::from(streams * args.decode) / begun.elapsed().as_secs_f64());
        }
        aggregate.insert(streams.to_string(), median(&samples).into());
    }

    let (prefill, decode) = (median(&prefill), median(&decode));
    let lines =
        aggregate.iter().map(|(n, v)| format!("{n:>3} streams together  {:8.1} tok/s\n", v.as_f64().unwrap_or(0.0)));
    let number = |v: &Value, key: &str| v[key].as_f64().unwrap_or(0.0);
    let deep = depths.iter().map(|(at, v)| {
        format!(
            "at {at}: prefill {:8.1} tok/s, decode {:8.1} tok/s\n",
            number(v, "prefill_tok_s"),
            number(v, "decode_tok_s")
        )
    });
    let text = format!("prefill({})  {prefill:8.1} tok/s\ndecode({})  {decode:8.1} tok/s\n", args.prefill, args.decode)
        + &deep.collect::<String>()
        + &lines.collect::<String>();
    let value = json!({
        "prefill_tok_s": prefill,
        "decode_tok_s": decode,
        "aggregate_tok_s": aggregate,
        "at": depths,
        "prefill_tokens": args.prefill,
        "decode_tokens": args.decode,
        "repeats": args.repeats,
        "conditions": conditions,
    });
    Ok((value, text))
}
