//! `ds4 bench throughput`: prefill and decode of one stream, and what several streams get together.

use std::time::Instant;

use anyhow::ensure;
use ds4_settings::EXIT_USAGE;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::rig::{Rig, RigArgs, body, prompt, speeds, vocabulary};
use super::stats::median;
use crate::failure::Failure;

/// `ds4 bench throughput`.
#[derive(clap::Args)]
pub struct ThroughputArgs {
    #[command(flatten)]
    rig: RigArgs,
    /// Runs of each measurement; medians are reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Prompt tokens of the prefill measurement
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    prefill: u32,
    /// Generated tokens of the decode measurements, at least 2: speed is that of the tokens after the first
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    decode: u32,
    /// Decode speed of one stream behind prompts of so many tokens (each measured once)
    #[arg(long, value_name = "TOKENS,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    at: Vec<u32>,
    /// Numbers of simultaneous streams
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,4,16",
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    streams: Vec<u32>,
}

impl ThroughputArgs {
    /// A prompt that fills the context would leave a shorter answer, and so another measurement than the one that was asked for.
    fn fits_the_context(&self) -> anyhow::Result<()> {
        let (ctx, decode) = (u64::from(self.rig.ctx()), u64::from(self.decode));
        let prompts = self.at.iter().map(|at| ("--at", *at, decode));
        let wanted = [("--prefill", self.prefill, 1), ("a short prompt of", SHORT_PROMPT, decode)];
        for (what, prompt, generated) in wanted.into_iter().chain(prompts) {
            let needed = u64::from(prompt) + generated;
            if needed > ctx {
                return Err(Failure::error(
                    EXIT_USAGE,
                    format!("{what} {prompt} and {generated} generated need --ctx {needed} or more, and it is {ctx}"),
                ));
            }
        }
        Ok(())
    }
}

const SHORT_PROMPT: u32 = 16;

/// Checks that an answer is as long as it was to be: a model's own context may be smaller than --ctx.
fn generated(answer: &Value, wanted: u32) -> anyhow::Result<()> {
    let tokens = answer.pointer("/usage/completion_tokens").and_then(Value::as_u64);
    ensure!(tokens == Some(u64::from(wanted)), "a stream generated {tokens:?} of {wanted} tokens");
    Ok(())
}

/// Runs it on a private owner and worker.
pub async fn throughput(args: &ThroughputArgs) -> anyhow::Result<(Value, String)> {
    args.fits_the_context()?;
    let conditions = args.rig.conditions()?;
    let mut rig = Rig::start(&args.rig, true).await?;
    if let Some(most) = args.streams.iter().max() {
        rig.worker_flag("--max-batch", (*most).max(1));
    }
    rig.start_worker().await?;
    let server = rig.server()?;
    let vocab = vocabulary(&server).await?;
    let mut seed = 0;
    let mut fresh = |tokens: u32| {
        seed += 1;
        prompt(tokens as usize, seed, vocab)
    };

    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    // One run that is not counted: first touches of banks and scratch memory.
    for run in 0..=args.repeats {
        let one = server.post("/v1/completions", &body(&fresh(args.prefill), 1)).await?.json()?;
        let two = server.post("/v1/completions", &body(&fresh(SHORT_PROMPT), args.decode)).await?.json()?;
        generated(&two, args.decode)?;
        if run > 0 {
            prefill.push(speeds(&one)?.0);
            decode.push(speeds(&two)?.1);
        }
    }

    let mut depths = serde_json::Map::new();
    for &at in &args.at {
        let answer = server.post("/v1/completions", &body(&fresh(at), args.decode)).await?.json()?;
        generated(&answer, args.decode)?;
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
                generated(&answer?, args.decode)?;
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

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn parsed(args: &[&str]) -> Result<ThroughputArgs, clap::Error> {
        let command = ThroughputArgs::augment_args(clap::Command::new("throughput").no_binary_name(true));
        ThroughputArgs::from_arg_matches(&command.try_get_matches_from(args)?)
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for args in
            [["--at", "64,0"], ["--prefill", "0"], ["--decode", "1"], ["--streams", "0"], ["--streams", "4,1025"]]
        {
            assert!(parsed(&args).is_err(), "{args:?}");
        }
    }

    #[test]
    fn prompts_and_answers_must_fit_the_context_before_anything_is_started() {
        let fits = |args: &[&str]| parsed(args).unwrap().fits_the_context();
        assert_eq!(parsed(&[]).unwrap().streams, [1, 4, 16]);
        assert!(fits(&[]).is_ok() && fits(&["--at", "64,1920"]).is_ok());
        for (args, want) in [
            (&["--at", "64,128,100000"][..], "--at 100000 and 128 generated need --ctx 100128 or more, and it is 2048"),
            // It would be cut to 127 generated tokens.
            (&["--at", "1921"], "--ctx 2049"),
            (&["--ctx", "512"], "--prefill 512 and 1 generated need --ctx 513"),
            (&["--ctx", "100", "--prefill", "64"], "a short prompt of 16 and 128 generated need --ctx 144"),
            (&["--at", "4294967295", "--decode", "4294967295"], "--ctx 4294967311"),
        ] {
            let e = fits(args).unwrap_err();
            assert!(e.to_string().contains(want) && Failure::code_of(&e) == 2, "{args:?}: {e}");
        }
    }
}
