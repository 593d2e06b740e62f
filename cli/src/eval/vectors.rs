//! `ds4 eval vectors`: recorded continuations against the loaded model.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use ds4_proto::v1;
use ds4_proto::v1::debug_client::DebugClient;
use ds4_settings::{EXIT_PEER, EXIT_USAGE};
use tonic::transport::Channel;

use super::case::{self, Case};
use super::report::{self, Line, Outcome, ScoredStep};
use super::score::{Limits, Local, Problem, judge};
use crate::client::RuntimeArgs;
use crate::client::debug::{Scores, chat_prompt, raw_prompt};
use crate::dump::mode;
use crate::failure::Failure;

/// `ds4 eval vectors`.
#[derive(clap::Args)]
#[command(
    after_help = "A step passes when the model's most likely token has the recorded bytes and every recorded candidate is \
    among the model's most likely tokens with nearly its recorded log-probability; the model's own token is fed on. Formats: \
    .vec files, .official.json captures of the official API, and what `ds4 run --dump-logprobs` writes, so that two builds \
    or two files of a model can be held against each other. docs/debugging.md describes them.\n\n\
    Exit codes: 0 all pass, 1 some do not, 2 bad usage or a malformed file, 3 no worker.\n\n\
    Examples, the first with vectors of the starter model from this program's source tree:\n  \
    ds4 eval vectors tests/fixtures/eval/smollm2.vec --only capital\n  \
    ds4 eval vectors tests/fixtures/eval/capture.official.json --json\n  \
    ds4 run --dump-logprobs before.json -n 32 -p 'Name a river.' && ds4 eval vectors before.json --tolerance 0.01"
)]
pub struct VectorsArgs {
    /// Vector files, or directories of them
    #[arg(required = true, value_name = "FILE or DIR")]
    paths: Vec<PathBuf>,
    /// Continue the prompts as they are, without the chat layout
    #[arg(long)]
    raw: bool,
    /// A recorded candidate must be among this many most likely tokens, at most 1000
    #[arg(long, value_name = "K", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    top: u32,
    /// Largest difference of a candidate's log-probabilities
    #[arg(long, value_name = "NATS", default_value_t = 4.0, value_parser = tolerance)]
    tolerance: f64,
    /// Leave a case out, by name (repeatable)
    #[arg(long, value_name = "CASE")]
    skip: Vec<String>,
    /// Score this case only (repeatable)
    #[arg(long, value_name = "CASE", conflicts_with = "skip")]
    only: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

fn tolerance(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().map_err(|_| format!("`{text}` is not a number"))?;
    if value >= 0.0 && value.is_finite() { Ok(value) } else { Err(format!("{text} is not at least 0")) }
}

/// Scores the cases one after the other.
pub async fn vectors(args: VectorsArgs) -> anyhow::Result<ExitCode> {
    let cases = case::collect(&args.paths)?;
    for name in args.skip.iter().chain(&args.only) {
        if !cases.iter().any(|c| c.id == *name) {
            let known: Vec<&str> = cases.iter().map(|c| c.id.as_str()).collect();
            return Err(Failure::error(
                EXIT_USAGE,
                format!("no case is called {name}; there are {}", known.join(", ")),
            ));
        }
    }
    let left_out = |id: &String| args.skip.contains(id) || !args.only.is_empty() && !args.only.contains(id);
    if cases.iter().all(|c| left_out(&c.id)) {
        return Err(Failure::error(EXIT_USAGE, "--skip leaves out every case: nothing would be scored"));
    }
    let limits = Limits { top: usize::try_from(args.top).unwrap_or(usize::MAX), tolerance: args.tolerance };
    let mut client = args.runtime.debug().await?;
    let work = async {
        let mut model = String::new();
        let mut lines = Vec::with_capacity(cases.len());
        for case in &cases {
            let outcome = if left_out(&case.id) {
                Outcome::Skipped
            } else {
                score(&mut client, case, args.raw, args.top, limits, &mut model).await?
            };
            lines.push(Line { id: case.id.clone(), recorded_prompt_tokens: case.prompt_tokens, outcome });
        }
        anyhow::Ok((model, lines))
    };
    let (model, lines) = tokio::select! {
        result = work => result?,
        _ = tokio::signal::ctrl_c() => return Ok(ExitCode::from(130)),
    };
    let shown = if args.json { format!("{}\n", report::json(&model, &lines)) } else { report::text(&model, &lines) };
    let mut out = std::io::stdout();
    out.write_all(shown.as_bytes())?;
    out.flush()?;
    Ok(if lines.iter().any(Line::failed) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn score(
    client: &mut DebugClient<Channel>,
    case: &Case,
    raw: bool,
    top_k: u32,
    limits: Limits,
    model: &mut String,
) -> anyhow::Result<Outcome> {
    let prompt = if raw || case.raw {
        raw_prompt(&case.prompt)
    } else {
        chat_prompt(case.system.as_deref(), &case.prompt, mode(case.thinking))
    };
    let request = v1::ScoreRequest {
        prompt: Some(prompt),
        steps: u32::try_from(case.steps.len()).context("a case of over 2^32 steps")?,
        top_k,
        logits: false,
        // The recorded continuation may go on where the model would end.
        past_end: true,
        sampling: None,
        positions: Vec::new(),
    };
    let mut scores = match Scores::start(client, request).await {
        Ok(scores) => scores,
        // A worker that is not there refuses every case: that is the end, not a verdict.
        Err(e) if Failure::code_of(&e) == EXIT_PEER => return Err(e),
        Err(e) => return Ok(Outcome::Refused(format!("{e:#}"))),
    };
    model.clone_from(&scores.begin.model);
    let prompt_tokens = scores.begin.prompt.len();
    let mut steps = Vec::with_capacity(case.steps.len());
    for recorded in &case.steps {
        let step = scores.next().await?;
        let local = step.map(|s| local_of(&s)).unwrap_or_default();
        let problems = judge(recorded, &local, limits);
        let (token, logprob) = local.into_iter().next().unwrap_or((Vec::new(), f64::NAN));
        let over = problems.contains(&Problem::Missing);
        steps.push(ScoredStep { token, logprob, problems });
        if over {
            break;
        }
    }
    Ok(Outcome::Scored { prompt_tokens, steps })
}

fn local_of(step: &v1::ScoreStep) -> Local {
    step.top.iter().filter_map(|c| Some((c.token.as_ref()?.bytes.clone(), c.logprob))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deepseek_v4_the_examples_of_the_help_exist() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let command = <VectorsArgs as clap::Args>::augment_args(clap::Command::new("vectors"));
        let help = command.get_after_help().unwrap().to_string();
        let named: Vec<&str> = help.split_whitespace().filter(|w| w.starts_with("tests/")).collect();
        assert_eq!(named.len(), 2, "{help}");
        for path in named {
            let cases = case::collect(&[root.join(path)]).unwrap();
            assert!(cases.iter().any(|c| c.id.starts_with("capital")), "{path}");
        }
    }

    #[test]
    fn a_tolerance_is_a_distance() {
        assert_eq!(tolerance("0.5"), Ok(0.5));
        assert_eq!(tolerance("0"), Ok(0.0));
        for bad in ["-1", "nan", "inf", "x"] {
            assert!(tolerance(bad).is_err(), "{bad}");
        }
    }
}
