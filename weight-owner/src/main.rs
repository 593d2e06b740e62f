//! The weight owner's binary: the daemon, its loader child, and the preflight.

// They panic where nobody can read them: `ds4_os::say!` and `ds4_os::show!` do not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

use std::os::fd::AsFd;
use std::process::ExitCode;

use ds4_os::say::unless_closed;
use ds4_os::seqpacket::Connection;
use ds4_settings::EXIT_USAGE;
use ds4_weight_owner::Failure;
use ds4_weight_owner::loads::LOADER_COMMAND;
use ds4_weight_owner::options::{Cli, Options, resolve};
use ds4_weight_owner::report::Job;
use ds4_weight_owner::{daemon, loader};
use tracing_subscriber::prelude::*;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|a| a == LOADER_COMMAND) {
        return run_loader();
    }
    if let Err(e) = ds4_os::parent::end_with(std::env::var_os(ds4_settings::PARENT_VARIABLE)) {
        ds4_os::say!("ds4-weight-owner: {e}");
        return ExitCode::FAILURE;
    }
    let (cli, origins) = ds4_settings::parse::<Cli>();
    let (options, layered) = match resolve(&cli, &origins) {
        Ok(resolved) => resolved,
        Err(e) => {
            ds4_os::say!("ds4-weight-owner: {e}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if cli.config.print_config {
        return exit_code(show(&layered.to_toml()));
    }
    let result = if cli.dry_run { dry_run(&options) } else { serve(options, &layered.to_toml()) };
    exit_code(result)
}

/// What a script sees, and the line that a person does.
fn exit_code(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            ds4_os::say!("ds4-weight-owner: {failure}");
            ExitCode::from(failure.exit)
        }
    }
}

/// Writes what was asked for to standard output.
fn show(text: &str) -> Result<(), Failure> {
    let written = unless_closed(ds4_os::show!("{text}"));
    written.map_err(|e| Failure::other("standard_output", format!("cannot write to standard output: {e}")))
}

/// The child: its job comes over the socket that is its stdin.
fn run_loader() -> ExitCode {
    let connection = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(|e| e.to_string())
        .and_then(|fd| Connection::from_fd(fd).map_err(|e| e.to_string()));
    match connection {
        Ok(connection) => ExitCode::from(loader::run(&connection)),
        Err(_) => {
            ds4_os::say!("ds4-weight-owner: `{LOADER_COMMAND}` is for the daemon only; use --model, or `ds4 ctl load`");
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// Plans every model; the worst verdict decides the exit code.
fn dry_run(options: &Options) -> Result<(), Failure> {
    let mut worst = Ok(());
    for path in &options.models {
        let job = Job {
            path: path.clone(),
            name: options.name.clone(),
            expect_blake3: None,
            plan_only: true,
            unless_blake3: None,
            epoch: 0,
            reserve_bytes: options.reserve_bytes,
            allow_dev_models: options.allow_dev_models,
            backend: options.backend,
        };
        let plan = loader::prepare(&job)?.plan;
        show(&plan.to_text())?;
        if !plan.fits() {
            worst = Err(plan.refusal());
        }
    }
    worst
}

fn serve(options: Options, config: &str) -> Result<(), Failure> {
    let filter = options.log.parse::<tracing_subscriber::filter::Targets>().unwrap_or_default();
    let format =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).log_internal_errors(false);
    tracing_subscriber::registry().with(format.with_filter(filter)).init();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), pid = std::process::id(), "ds4-weight-owner\n{config}");
    raise_file_limit();
    // One thread: the daemon only passes descriptors on, and each further thread would cost it resident memory.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::other("runtime", format!("cannot start: {e}")))?;
    let result = runtime.block_on(daemon::run(options));
    // Streams of clients that are still connected shall not hold up the exit.
    runtime.shutdown_background();
    result
}

/// Descriptors are what the owner deals in: take as many as the hard limit allows.
fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}
