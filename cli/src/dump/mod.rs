//! `ds4 run --dump-...`: what the model is given and what it thinks of each token, from a worker's debugging service.

mod files;
mod npy;
pub mod shown;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use ds4_proto::v1;
use ds4_settings::EXIT_USAGE;
use serde_json::{Value, json};

use crate::client::debug::{Scores, chat_prompt, raw_prompt};
use crate::client::{WorkerArgs, control};
use crate::ctl::render::{cell, table};
use crate::failure::Failure;
use crate::generate::{Effort, Sampling};
use crate::output::Target;
use files::{LogitsFile, LogprobsFile, StepEntry};
use shown::{hex, readable};

/// Most likely tokens that `--dump-logits` prints.
const PRINTED: u32 = 10;
/// Alternatives a step in `--dump-logprobs` unless a number is given.
const RIVALS: u32 = 20;
/// Most alternatives a step that the debugging service reports.
const MAX_TOP_K: u32 = 1000;

/// Their place in the help.
const HEADING: &str = "Dumps, for debugging (over the worker's Unix socket; greedy unless --temp is given)";

/// Dump flags of `ds4 run`.
#[derive(clap::Args, Debug, Default)]
pub struct DumpArgs {
    /// Print the prompt's token ids with their bytes, one a line, and compute nothing
    #[arg(help_heading = HEADING, long, conflicts_with_all = ["dump_logits", "dump_logprobs", "stats"])]
    dump_tokens: bool,
    /// Write all logits after the prompt: .npy for NumPy (little-endian f32), else JSON, `-` to standard output; prints the
    /// most likely tokens
    #[arg(help_heading = HEADING, long, value_name = "FILE", conflicts_with = "stats")]
    dump_logits: Option<PathBuf>,
    /// Write each generated token with its log-probability and its most likely rivals, as JSON; `-` is standard output
    #[arg(help_heading = HEADING, long, value_name = "FILE", conflicts_with = "stats")]
    dump_logprobs: Option<PathBuf>,
    /// Rivals a step in --dump-logprobs, at most 1000 [default: 20]
    #[arg(help_heading = HEADING, long, value_name = "K", requires = "dump_logprobs", value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_TOP_K)))]
    logprobs_top_k: Option<u32>,
    /// In --dump-logprobs, also the tokens of the prompt from the second on
    #[arg(help_heading = HEADING, long, requires = "dump_logprobs")]
    logprobs_prompt: bool,
    /// With a dump: print JSON instead of tables and text
    #[arg(help_heading = HEADING, long)]
    json: bool,
}

/// The prompt as `ds4 run` has it.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The user's text, or the text to continue.
    pub prompt: &'a str,
    /// System message.
    pub system: Option<&'a str>,
    /// No chat layout.
    pub raw: bool,
    /// How much the model should think.
    pub thinking: Option<Effort>,
}

/// The service's word for a flag.
pub fn mode(thinking: Option<Effort>) -> v1::Thinking {
    match thinking {
        None => v1::Thinking::Unspecified,
        Some(Effort::Off) => v1::Thinking::Off,
        Some(Effort::High) => v1::Thinking::High,
        Some(Effort::Max) => v1::Thinking::Max,
    }
}

impl Source<'_> {
    fn prompt(&self) -> v1::Prompt {
        if self.raw { raw_prompt(self.prompt) } else { chat_prompt(self.system, self.prompt, mode(self.thinking)) }
    }
}

impl DumpArgs {
    /// Whether a dump is wanted instead of an answer.
    pub fn wanted(&self) -> bool {
        self.dump_tokens || self.dump_logits.is_some() || self.dump_logprobs.is_some() || self.json
    }

    fn rivals(&self) -> u32 {
        self.logprobs_top_k.unwrap_or(RIVALS)
    }

    /// Where the files go; refuses what would only fail after the work is done, and flags that would be without effect.
    fn targets(&self, sampling: &Sampling) -> anyhow::Result<Targets> {
        let refused = |why: String| Err(Failure::error(EXIT_USAGE, why));
        if self.json && !self.dump_tokens && self.dump_logits.is_none() && self.dump_logprobs.is_none() {
            return refused("--json goes with --dump-tokens, --dump-logits or --dump-logprobs".into());
        }
        // clap drops a requirement that conflicts with what was given.
        if self.dump_tokens && (self.logprobs_prompt || self.logprobs_top_k.is_some()) {
            return refused("--logprobs-prompt and --logprobs-top-k go with --dump-logprobs".into());
        }
        match (&self.dump_logprobs, sampling.given().first()) {
            (None, Some(flag)) => {
                return refused(format!("{flag} has no effect without --dump-logprobs: nothing is generated"));
            }
            (Some(_), _) => sampling.refuse_unused()?,
            (None, None) => {}
        }
        let target = |path: &Option<PathBuf>| path.as_deref().map(Target::of).transpose();
        let targets = Targets { logits: target(&self.dump_logits)?, logprobs: target(&self.dump_logprobs)? };
        if targets.logits.is_some() && targets.logits == targets.logprobs {
            return refused("--dump-logits and --dump-logprobs would go to the same place: give two files".into());
        }
        if self.json && targets.stdout() {
            return refused(
                "--json prints to standard output, and so does a dump to `-`: give a file or leave --json out".into(),
            );
        }
        Ok(targets)
    }
}

/// Where the files of a dump go.
#[derive(Debug)]
struct Targets {
    logits: Option<Target>,
    logprobs: Option<Target>,
}

impl Targets {
    /// Whether a dump goes to standard output, which then carries nothing else.
    fn stdout(&self) -> bool {
        [&self.logits, &self.logprobs].into_iter().flatten().any(|t| *t == Target::Stdout)
    }

    /// What is said beside the files.
    fn say(&self, bytes: &[u8]) -> anyhow::Result<()> {
        if self.stdout() { Ok(std::io::stderr().write_all(bytes)?) } else { print_bytes(bytes) }
    }
}

/// Writes and prints what was asked for.
///
/// # Errors
/// Exit code 2 for a file that cannot be written, 3 when no worker answers, 1 for the worker's refusal.
pub async fn dump(
    args: &DumpArgs,
    source: &Source<'_>,
    sampling: &Sampling,
    worker: &WorkerArgs,
) -> anyhow::Result<ExitCode> {
    let targets = args.targets(sampling)?;
    let sampled = sampling.for_dump()?;
    let mut client = worker.debug().await?;
    if args.dump_tokens {
        let request = v1::TokenizeRequest { prompt: Some(source.prompt()) };
        let reply = client.tokenize(request).await.map_err(control::status)?.into_inner();
        print(&if args.json { format!("{}\n", tokens_json(&reply)) } else { tokens_text(&reply) })?;
        return Ok(ExitCode::SUCCESS);
    }
    let positions = if args.logprobs_prompt {
        let request = v1::TokenizeRequest { prompt: Some(source.prompt()) };
        let length = client.tokenize(request).await.map_err(control::status)?.into_inner().tokens.len();
        (1..u32::try_from(length).context("a prompt of over 2^32 tokens")?).collect()
    } else {
        Vec::new()
    };
    let request = v1::ScoreRequest {
        prompt: Some(source.prompt()),
        steps: if args.dump_logprobs.is_none() { 1 } else { sampling.max_tokens().unwrap_or(0) },
        top_k: args.rivals().max(if args.dump_logits.is_some() { PRINTED } else { 0 }),
        logits: args.dump_logits.is_some(),
        past_end: false,
        sampling: sampled,
        positions,
    };
    let work = write(args, &targets, source, Scores::start(&mut client, request).await?);
    tokio::select! {
        result = work => result.map(|()| ExitCode::SUCCESS),
        _ = tokio::signal::ctrl_c() => Ok(ExitCode::from(130)),
    }
}

/// Follows the steps and writes the files.
async fn write(args: &DumpArgs, targets: &Targets, source: &Source<'_>, mut scores: Scores) -> anyhow::Result<()> {
    let k = usize::try_from(args.rivals()).unwrap_or(usize::MAX);
    let (mut prompt_steps, mut steps) = (Vec::new(), Vec::new());
    let mut first = None;
    while let Some(step) = scores.next().await? {
        let inside = usize::try_from(step.position).is_ok_and(|p| p < scores.begin.prompt.len());
        let entry = StepEntry::of(&step, if inside { prompt_steps.len() } else { steps.len() }, k)?;
        if inside {
            prompt_steps.push(entry);
            continue;
        }
        if args.dump_logprobs.is_some() && !args.json {
            let token = step.token.as_ref().filter(|t| !t.control);
            targets.say(token.map_or(&[][..], |t| &t.bytes))?;
        }
        steps.push(entry);
        first.get_or_insert(step);
    }
    let step = first.context("the worker gave no step")?;
    if args.dump_logprobs.is_some() && !args.json {
        targets.say(b"\n")?;
    }
    let mut report = serde_json::Map::new();
    report.insert("model".into(), scores.begin.model.as_str().into());
    report.insert("prompt_tokens".into(), scores.begin.prompt.len().into());
    if let Some(to) = &targets.logits {
        let file = LogitsFile::of(&scores.begin, &step)?;
        file.write(to)?;
        let top = usize::try_from(PRINTED).unwrap_or(usize::MAX);
        let best = &step.top[..step.top.len().min(top)];
        if args.json {
            report.insert(
                "logits".into(),
                json!({"file": args.dump_logits, "count": file.len(), "not_finite": step.not_finite}),
            );
            report.insert("top".into(), best.iter().map(candidate_json).collect());
        } else {
            targets.say(candidates_text(best).as_bytes())?;
            ds4_os::say!("{} logits in {to}", file.len());
            if step.not_finite > 0 {
                ds4_os::say!("{} of them are not finite", step.not_finite);
            }
        }
    }
    if let Some(to) = &targets.logprobs {
        let reason = scores.reason().to_owned();
        let file = LogprobsFile::of(&scores.begin, source, prompt_steps, steps, &reason);
        file.write(to)?;
        if args.json {
            report.insert(
                "logprobs".into(),
                json!({"file": args.dump_logprobs, "steps": file.steps.len(), "finish_reason": reason}),
            );
        } else {
            ds4_os::say!("{} steps in {to} (ended by {reason})", file.steps.len());
        }
    }
    if args.json { print(&format!("{}\n", Value::from(report))) } else { Ok(()) }
}

fn print(text: &str) -> anyhow::Result<()> {
    print_bytes(text.as_bytes())
}

fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    out.write_all(bytes)?;
    Ok(out.flush()?)
}

/// `id <tab> bytes in hex <tab> readable`, a token a line.
fn tokens_text(reply: &v1::TokenizeReply) -> String {
    let line = |t: &v1::Token| format!("{}\t{}\t{}\n", t.id, hex(&t.bytes), readable(&t.bytes));
    reply.tokens.iter().map(line).collect()
}

fn token_json(t: &v1::Token) -> Value {
    let text = String::from_utf8_lossy(&t.bytes);
    json!({"id": t.id, "text": text, "bytes": t.bytes, "control": t.control, "end": t.end})
}

fn tokens_json(reply: &v1::TokenizeReply) -> Value {
    json!({
        "model": reply.model,
        "context": reply.context,
        "count": reply.tokens.len(),
        "tokens": reply.tokens.iter().map(token_json).collect::<Vec<_>>(),
    })
}

fn candidate_json(c: &v1::Candidate) -> Value {
    json!({"token": c.token.as_ref().map(token_json), "logprob": c.logprob, "logit": c.logit})
}

fn candidates_text(top: &[v1::Candidate]) -> String {
    let rows: Vec<_> = top
        .iter()
        .filter_map(|c| {
            let token = c.token.as_ref()?;
            Some(vec![
                cell("id", token.id),
                cell("logit", c.logit).shown(format!("{:.4}", c.logit)),
                cell("logprob", c.logprob).shown(format!("{:.6}", c.logprob)),
                cell("token", readable(&token.bytes)),
            ])
        })
        .collect();
    table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, bytes: &[u8]) -> v1::Token {
        v1::Token { id, bytes: bytes.to_vec(), control: id == 0, end: false }
    }

    #[test]
    fn tokens_are_a_line_each() {
        let tokens = vec![token(0, "<｜x｜>".as_bytes()), token(7, b" a\n"), token(8, &[0xe4, 0xbd])];
        let reply = v1::TokenizeReply { tokens, model: "m".into(), context: 9 };
        assert_eq!(
            tokens_text(&reply),
            "0\t3cefbd9c78efbd9c3e\t\"<｜x｜>\"\n7\t20610a\t\" a\\n\"\n8\te4bd\tb\"\\xe4\\xbd\"\n"
        );
        let json = tokens_json(&reply);
        assert_eq!((&json["count"], &json["tokens"][2]["bytes"]), (&json!(3), &json!([0xe4, 0xbd])));
        assert_eq!(json["tokens"][0]["control"], true);
    }

    #[test]
    fn what_cannot_end_well_is_refused_before_it_begins() {
        let to = |path: &str| DumpArgs { dump_logits: Some(path.into()), ..DumpArgs::default() };
        let none = Sampling::default();
        assert!(to("x.npy").targets(&none).is_ok());
        assert!(to("-").targets(&none).unwrap().stdout());
        let twice = |path: &str| DumpArgs { dump_logprobs: Some(path.into()), ..to(path) };
        for (args, says) in [
            (to("/nonexistent-dir/x.json"), "/nonexistent-dir/x.json"),
            (to("/"), "/ is a directory"),
            (DumpArgs { json: true, ..DumpArgs::default() }, "--dump-tokens"),
            (DumpArgs { json: true, ..to("-") }, "--json"),
            (twice("-"), "same place"),
            (twice("./x"), "same place"),
        ] {
            let e = args.targets(&none).unwrap_err();
            assert_eq!(Failure::code_of(&e), EXIT_USAGE);
            assert!(e.to_string().contains(says), "{e}");
        }
    }

    #[test]
    fn deepseek_v4_flags_without_effect_on_a_dump_are_refused() {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            dump: DumpArgs,
            #[command(flatten)]
            sampling: Sampling,
        }
        let given = |flags: &str| {
            let cli = <Cli as clap::Parser>::try_parse_from(["x"].into_iter().chain(flags.split(' ')));
            cli.map_err(|e| e.to_string())
                .and_then(|c| c.dump.targets(&c.sampling).map_err(|e| e.to_string()).map(drop))
        };
        for flag in ["-n 5", "--temp 0", "--top-p 0.5", "--top-k 3", "--min-p 0.1", "--seed 1", "--stop x"] {
            for dump in ["--dump-tokens", "--dump-logits x"] {
                let e = given(&format!("{dump} {flag}")).unwrap_err();
                assert!(e.contains("nothing is generated"), "{dump} {flag}: {e}");
            }
        }
        for ok in ["-n 5", "--temp 0", "--temp 0.5 --top-p 0.5 --seed 3 --min-p 0.1 --top-k 9", "--logprobs-top-k 3"] {
            assert_eq!(given(&format!("--dump-logprobs x {ok}")), Ok(()), "{ok}");
            assert_eq!(given(&format!("--dump-logprobs x --dump-logits y {ok}")), Ok(()), "{ok}");
        }
        for flag in ["--top-p 0.5", "--top-k 3", "--min-p 0.1", "--seed 1"] {
            for greedy in ["", "--temp 0 "] {
                let e = given(&format!("--dump-logprobs x {greedy}{flag}")).unwrap_err();
                assert!(e.contains("--temp"), "{flag}: {e}");
            }
        }
        for flag in ["--logprobs-top-k 5", "--logprobs-prompt"] {
            for dump in ["--dump-tokens", "--dump-logits x"] {
                assert!(given(&format!("{dump} {flag}")).unwrap_err().contains("--dump-logprobs"), "{dump} {flag}");
            }
        }
    }

    #[test]
    fn the_most_likely_tokens_are_a_table() {
        let top = [v1::Candidate { token: Some(token(5, b"hi")), logprob: -0.25, logit: 1.5 }];
        assert_eq!(candidates_text(&top), "ID  LOGIT   LOGPROB    TOKEN\n5   1.5000  -0.250000  \"hi\"\n");
    }
}
