//! `ds4 gguf`: making model files.

mod blocks;
mod shape;
mod synth;

use clap::Subcommand;

/// `ds4 gguf`.
#[derive(clap::Args)]
pub struct GgufArgs {
    #[command(subcommand)]
    command: GgufCommand,
}

#[derive(Subcommand)]
enum GgufCommand {
    /// Write a model of random weights: the right structure, for work on speed and for tests, but nonsense as an answer
    Synth(synth::SynthArgs),
}

/// Runs one.
pub fn gguf(args: &GgufArgs) -> anyhow::Result<()> {
    match &args.command {
        GgufCommand::Synth(args) => synth::synth(args),
    }
}
