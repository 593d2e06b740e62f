//! `ds4 run`: one prompt, one answer.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ds4_settings::EXIT_USAGE;
use serde_json::json;

use crate::client::WorkerArgs;
use crate::dump::{self, DumpArgs, Source};
use crate::failure::Failure;
use crate::generate::{Generation, Heard, Sampling, read_text};

/// `ds4 run`.
#[derive(clap::Args)]
#[command(after_help = "The answer goes to standard output as it is generated, everything else to standard error.\n\
    Exit codes: 0 answered, 1 the worker reported an error, 2 bad usage, 3 no worker or one that went away, 130 interrupted.\n\n\
    Examples:\n  ds4 run -p 'Name three rivers.'\n  git diff | ds4 run --system 'Summarise this change.' -p -\n  \
    ds4 run --dump-tokens -p 'Name three rivers.'\n  \
    ds4 run --dump-logprobs steps.json --logprobs-top-k 5 -n 16 --prompt-file question.txt\n  \
    ds4 run --dump-logits row.npy --raw -p 'Once upon a time'")]
pub struct RunArgs {
    /// The prompt; `-` reads standard input
    #[arg(short, long, value_name = "TEXT", required_unless_present = "prompt_file")]
    prompt: Option<String>,
    /// Read the prompt from a file, as it is; `-` reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// System message
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the text as it is, without the chat template
    #[arg(long)]
    raw: bool,
    /// Print token counts and speeds to standard error at the end
    #[arg(long)]
    stats: bool,
    #[command(flatten)]
    dump: DumpArgs,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    worker: WorkerArgs,
}

/// Runs it; 130 when interrupted, as shells have it.
pub async fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let prompt = match (&args.prompt, &args.prompt_file) {
        (_, Some(path)) if path == Path::new("-") => read_text("-")?,
        (_, Some(path)) => std::fs::read_to_string(path)
            .map_err(|e| Failure::error(EXIT_USAGE, format!("--prompt-file {}: {e}", path.display())))?,
        (text, None) => read_text(text.as_deref().unwrap_or("-"))?,
    };
    if prompt.is_empty() {
        return Err(Failure::error(EXIT_USAGE, "the prompt is empty; give -p TEXT, or -p - to read standard input"));
    }
    if args.raw && args.sampling.thinking().is_some() {
        return Err(Failure::error(EXIT_USAGE, "--thinking is part of the chat layout, which --raw leaves out"));
    }
    if args.dump.wanted() {
        let thinking = args.sampling.thinking();
        let source = Source { prompt: &prompt, system: args.system.as_deref(), raw: args.raw, thinking };
        return dump::dump(&args.dump, &source, &args.sampling, &args.worker).await;
    }
    let body = if args.raw {
        args.sampling.raw_body(&prompt)
    } else {
        let system = args.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<_> = system.chain([json!({"role": "user", "content": prompt})]).collect();
        args.sampling.chat_body(&messages)
    };
    let server = args.worker.find().await?;
    let work = async {
        let mut generation = Generation::start(&server, &body).await?;
        let mut out = std::io::stdout();
        let mut ends_with_newline = false;
        let mut thinking = false;
        while let Some(heard) = generation.next().await? {
            match heard {
                Heard::Text(text) => {
                    if std::mem::take(&mut thinking) {
                        ds4_os::say!("");
                    }
                    out.write_all(text.as_bytes())?;
                    out.flush()?;
                    ends_with_newline = text.ends_with('\n');
                }
                // Not the answer: whoever reads standard output is not to take it for that.
                Heard::Reasoning(text) | Heard::Call(text) => {
                    let _ = std::io::stderr().write_all(text.as_bytes());
                    thinking = true;
                }
            }
        }
        if thinking {
            ds4_os::say!("");
        }
        if !ends_with_newline {
            writeln!(out)?;
        }
        if let Some(line) = generation.summary().line().filter(|_| args.stats) {
            ds4_os::say!("{line}");
        }
        anyhow::Ok(ExitCode::SUCCESS)
    };
    tokio::select! {
        result = work => result,
        _ = tokio::signal::ctrl_c() => {
            let _ = ds4_os::show!("\n");
            Ok(ExitCode::from(130))
        }
    }
}
