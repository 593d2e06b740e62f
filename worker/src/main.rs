//! The worker's binary: serves one model of a weight owner over HTTP.

use std::process::ExitCode;
use std::time::Instant;

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

fn main() -> ExitCode {
    let started = Instant::now();
    if let Err(e) = ds4_os::parent::end_with(std::env::var_os(ds4_settings::PARENT_VARIABLE)) {
        eprintln!("ds4-worker: {e}");
        return ExitCode::FAILURE;
    }
    let (cli, origins) = ds4_settings::parse::<config::Cli>();
    let (options, layered) = match config::resolve(&cli, &origins) {
        Ok(resolved) => resolved,
        Err(e) => {
            eprintln!("ds4-worker: {e}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if cli.config.print_config {
        print!("{}", layered.to_toml());
        return ExitCode::SUCCESS;
    }
    let filter = options.log.parse::<tracing_subscriber::filter::Targets>().unwrap_or_default();
    let format = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    tracing_subscriber::registry().with(format.with_filter(filter)).init();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), pid = std::process::id(), "ds4-worker\n{}", layered.to_toml());
    let result = if let Some(family) = &cli.bench.bench_kernel {
        kernel_bench::run(&cli.bench, family, options.threads).map(|figures| println!("{figures}"))
    } else if cli.self_test {
        self_test::run(&options, cli.self_test_cycles).map(|figures| println!("{figures}"))
    } else {
        runtime().and_then(|runtime| {
            let result = run::run(options, started, &runtime);
            // Whoever is still connected shall not hold up the exit.
            runtime.shutdown_background();
            result
        })
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("ds4-worker: {failure}");
            ExitCode::from(failure.exit)
        }
    }
}

/// Two threads carry the HTTP side; compute threads are the device's own.
fn runtime() -> Result<tokio::runtime::Runtime, failure::Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .thread_name("ds4-http")
        .enable_all()
        .build();
    runtime.map_err(|e| failure::Failure::other(format!("cannot start the runtime: {e}")))
}
