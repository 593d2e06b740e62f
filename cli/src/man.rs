//! Shell completions and manual pages, both made from the command's own flag table.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context as _;
use clap_complete::Shell;

/// `ds4 completions`.
#[derive(clap::Args)]
pub struct CompletionsArgs {
    /// Shell to complete for
    shell: Shell,
}

/// `ds4 man`.
#[derive(clap::Args)]
pub struct ManArgs {
    /// Write ds4.1 and a page a subcommand into this directory instead of printing ds4.1
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Prints the completion script.
pub fn completions(args: &CompletionsArgs, command: &mut clap::Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "ds4", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}

/// Prints or writes manual pages.
pub fn man(args: &ManArgs, command: clap::Command) -> anyhow::Result<()> {
    match &args.out {
        Some(dir) => {
            std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
            clap_mangen::generate_to(command, dir).with_context(|| format!("cannot write to {}", dir.display()))
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page)?;
            std::io::stdout().write_all(&page)?;
            Ok(())
        }
    }
}
