//! The worker's binary: serves one model of a weight owner over HTTP.

// They panic where nobody can read them: `ds4_os::say!` and `ds4_os::show!` do not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

use std::process::ExitCode;
use std::time::Instant;

use ds4_os::say::unless_closed;
use ds4_settings::EXIT_USAGE;
use tracing_subscriber::prelude::*;

mod backend;
mod boot;
mod config;
mod control;
mod debug;
mod device;
mod failure;
mod kernel_bench;
mod late;
mod listen;
mod run;
mod self_test;

use failure::Failure;

fn main() -> ExitCode {
    let started = Instant::now();
    if let Err(e) = ds4_os::parent::end_with(std::env::var_os(ds4_settings::PARENT_VARIABLE)) {
        ds4_os::say!("ds4-worker: {e}");
        return ExitCode::FAILURE;
    }
    let (cli, origins) = ds4_settings::parse::<config::Cli>();
    let (options, layered) = match config::resolve(&cli, &origins) {
        Ok(resolved) => resolved,
        Err(e) => {
            ds4_os::say!("ds4-worker: {e}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if cli.config.print_config {
        return exit_code(show(&layered.to_toml()));
    }
    let filter = options.log.parse::<tracing_subscriber::filter::Targets>().unwrap_or_default();
    let format =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).log_internal_errors(false);
    tracing_subscriber::registry().with(format.with_filter(filter)).init();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), pid = std::process::id(), "ds4-worker\n{}", layered.to_toml());
    let result = if let Some(family) = &cli.bench.bench_kernel {
        kernel_bench::run(&cli.bench, family, options.threads).and_then(|figures| show(&format!("{figures}\n")))
    } else if cli.self_test {
        self_test::run(&options, cli.self_test_cycles).and_then(|figures| show(&format!("{figures}\n")))
    } else {
        runtime().and_then(|runtime| {
            let result = run::run(options, started, &runtime);
            // Whoever is still connected shall not hold up the exit.
            runtime.shutdown_background();
            result
        })
    };
    exit_code(result)
}

/// What a script sees, and the line that a person does.
fn exit_code(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            ds4_os::say!("ds4-worker: {failure}");
            ExitCode::from(failure.exit)
        }
    }
}

/// Writes what was asked for to standard output.
fn show(text: &str) -> Result<(), Failure> {
    let written = unless_closed(ds4_os::show!("{text}"));
    written.map_err(|e| Failure::other(format!("cannot write to standard output: {e}")))
}

/// Two threads carry the HTTP side; compute threads are the device's own.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .thread_name("ds4-http")
        .enable_all()
        .build();
    runtime.map_err(|e| Failure::other(format!("cannot start the runtime: {e}")))
}
