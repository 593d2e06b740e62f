//! `ds4 gguf`: making model files.

mod blocks;
mod convert;
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
    /// Write a GGUF file from a Hugging Face checkpoint of DeepSeek V4
    Convert(convert::ConvertArgs),
}

/// Runs one.
pub fn gguf(args: &GgufArgs) -> anyhow::Result<()> {
    match &args.command {
        GgufCommand::Synth(args) => synth::synth(args),
        GgufCommand::Convert(args) => convert::convert(args),
    }
}
