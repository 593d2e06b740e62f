//! `ds4 eval`: the loaded model against recorded answers.

mod case;
mod official;
mod report;
mod score;
mod vec_file;
mod vectors;

use std::process::ExitCode;

use clap::Subcommand;

#[cfg(test)]
pub use official::read as read_json;

/// Schema of `ds4 run --dump-logprobs`.
pub const SCHEMA_DUMP: &str = "ds4-logprobs-v1";
/// Schema of `ds4 run --dump-logits`, which is no vector.
pub const SCHEMA_LOGITS: &str = "ds4-logits-v1";

/// `ds4 eval`.
#[derive(clap::Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    command: EvalCommand,
}

#[derive(Subcommand)]
enum EvalCommand {
    /// Score continuation vectors: at each step the model's best token and the recorded candidates
    Vectors(vectors::VectorsArgs),
}

/// Runs one; the exit code is 1 when something scored badly.
pub async fn eval(args: EvalArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        EvalCommand::Vectors(args) => vectors::vectors(args).await,
    }
}
