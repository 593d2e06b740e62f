//! `ds4 bench`: the figures that this project promises, measured on the machine at hand.

mod kernel;
mod load;
mod peer;
mod restart;
mod rig;
mod stats;
mod throughput;
mod weights;

use std::process::ExitCode;

use clap::Subcommand;

/// `ds4 bench`.
#[derive(clap::Args)]
#[command(
    after_help = "Each benchmark but `kernel`, which needs neither, starts its own owner and worker in a temporary runtime directory. \
    All look at flags only, not at the configuration file or DS4_ variables. Use an otherwise idle machine."
)]
pub struct BenchArgs {
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Kill the worker under load and measure how soon its successor is ready
    Restart(restart::RestartBenchArgs),
    /// Prefill and decode speed, alone and with several streams
    Throughput(throughput::ThroughputArgs),
    /// How fast the owner loads a model, in GiB/s per stage
    Load(load::LoadBenchArgs),
    /// One family of the worker's kernels: checked against its reference, and timed
    Kernel(kernel::KernelArgs),
    /// Compare with another server on the same file, threads and prompts
    Peer(peer::PeerArgs),
}

/// Runs one; exits with 1 when a cycle of `restart` or a check of `kernel` failed, or the weights changed.
pub async fn bench(args: BenchArgs) -> anyhow::Result<ExitCode> {
    let (value, text) = match &args.command {
        BenchCommand::Restart(args) => restart::restart(args).await?,
        BenchCommand::Throughput(args) => throughput::throughput(args).await?,
        BenchCommand::Load(args) => load::load(args).await?,
        BenchCommand::Kernel(args) => kernel::kernel(args)?,
        BenchCommand::Peer(args) => peer::peer(args).await?,
    };
    if args.json {
        ds4_os::show!("{value}\n")?;
    } else {
        ds4_os::show!("{text}")?;
    }
    let failed =
        value.get("failed").is_some_and(|n| n != 0) || value.get("weights_hash_unchanged") == Some(&false.into());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
