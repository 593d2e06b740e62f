//! `ds4 config`: the effective configuration of all three processes.

use ds4_settings::Origins;

use crate::serve::ServeArgs;
use crate::serve::plan::Plan;

/// `ds4 config`: takes the flags of `ds4 serve`, and starts nothing.
#[derive(clap::Args)]
pub struct ConfigCommand {
    #[command(flatten)]
    serve: ServeArgs,
}

/// Prints it as a configuration file, each value with its source.
pub fn print(args: &ConfigCommand, origins: &Origins) -> anyhow::Result<()> {
    Ok(ds4_os::show!("{}", Plan::new(&args.serve, origins)?.printed())?)
}
