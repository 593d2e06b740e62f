//! The `ds4` command: serve, talk to, control and measure local models.

// They panic where nobody can read them: `ds4_os::say!` and `ds4_os::show!` do not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod bench;
mod chat;
mod client;
mod config;
mod ctl;
mod dump;
mod eval;
mod failure;
mod generate;
mod gguf;
mod man;
mod output;
mod pull;
mod run;
mod serve;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use ds4_settings::Origins;

use failure::Failure;

/// Serve large GGUF models from one process that owns the weights and another that can be restarted in a blink.
#[derive(Parser)]
#[command(name = "ds4", version, max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 ok, 1 failed, 2 bad usage or configuration, 3 the owner or worker is missing or \
refused, 4 the model file is bad or was refused, 5 not enough memory, 6 the start-up self-test failed.";

#[derive(Subcommand)]
enum Command {
    /// Run a weight owner and a worker under one supervisor
    Serve(serve::ServeArgs),
    /// Answer one prompt and exit
    Run(run::RunArgs),
    /// Talk to the model, with line editing and history
    Chat(chat::ChatArgs),
    /// Look at and control a running owner and worker
    Ctl(ctl::CtlArgs),
    /// Fetch a starter model, or adopt a file of it
    Pull(pull::PullArgs),
    /// Print the effective configuration of owner, worker and supervisor
    Config(config::ConfigCommand),
    /// Measure restarts, throughput, loading, or a peer on the same machine
    Bench(bench::BenchArgs),
    /// Score the loaded model against recorded answers
    Eval(eval::EvalArgs),
    /// Make model files
    Gguf(gguf::GgufArgs),
    /// Print a completion script for a shell
    Completions(man::CompletionsArgs),
    /// Print the manual page, or write one page a subcommand into a directory
    Man(man::ManArgs),
}

fn main() -> ExitCode {
    let mut command = Cli::command();
    let matches = match command.try_get_matches_from_mut(std::env::args_os()) {
        Ok(matches) => matches,
        Err(error) => plain_usage(error, &mut command).exit(),
    };
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.format(&mut command).exit());
    // Which flags of the chosen subcommand were given, for the layered configuration.
    let origins = matches.subcommand().map_or_else(Origins::default, |(name, matches)| {
        command.find_subcommand(name).map_or_else(Origins::default, |c| Origins::new(c, matches))
    });
    match dispatch(cli.command, &origins) {
        Ok(code) => code,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            ds4_os::say!("ds4: {error:#}");
            ExitCode::from(Failure::code_of(&error))
        }
    }
}

/// An error with the usage that the help has: clap's own shows options as required that the environment has given.
fn plain_usage(mut error: clap::Error, command: &mut clap::Command) -> clap::Error {
    if error.kind() == ErrorKind::MissingRequiredArgument {
        let mut command = command;
        for word in std::env::args().skip(1) {
            if command.find_subcommand(&word).is_some() {
                let Some(found) = command.find_subcommand_mut(&word) else { return error };
                command = found;
            }
        }
        error.insert(ContextKind::Usage, ContextValue::StyledStr(command.render_usage()));
    }
    error
}

fn dispatch(command: Command, origins: &Origins) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match command {
        Command::Serve(args) => return runtime.block_on(serve::serve(args, origins)),
        Command::Run(args) => return runtime.block_on(run::run(args)),
        Command::Chat(args) => chat::chat(args, &runtime)?,
        Command::Ctl(args) => runtime.block_on(ctl::ctl(args))?,
        Command::Pull(args) => pull::pull(&args)?,
        Command::Config(args) => config::print(&args, origins)?,
        Command::Bench(args) => return runtime.block_on(bench::bench(args)),
        Command::Eval(args) => return runtime.block_on(eval::eval(args)),
        Command::Gguf(args) => gguf::gguf(&args)?,
        Command::Completions(args) => man::completions(&args, &mut Cli::command())?,
        Command::Man(args) => man::man(&args, Cli::command())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// `ds4 ... | head` closes our output: that is an end, not a failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|e| e.downcast_ref::<std::io::Error>()).any(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_and_subcommand_is_documented() {
        fn walk(command: &clap::Command, path: &str) {
            assert!(command.get_about().is_some(), "{path} has no description");
            for arg in command.get_arguments().filter(|a| !a.is_hide_set()) {
                assert!(arg.get_help().is_some(), "{path}: {} has no help", arg.get_id());
            }
            for sub in command.get_subcommands() {
                walk(sub, &format!("{path} {}", sub.get_name()));
            }
        }
        walk(&Cli::command(), "ds4");
    }
}
