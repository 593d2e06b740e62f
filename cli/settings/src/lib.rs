//! Layered configuration of the three binaries: flag > environment > file > default.
//!
//! The file is TOML with one section a process, `[owner]`, `[worker]`, `[serve]`; keys are the long flags without
//! dashes in front. `runtime-dir` may also stand at the top, for all of them. Unknown keys are refused, and everything
//! that is wrong is said at once.
//!
//! A process declares its flags once, all of them `Option`, and gets file, environment and `--print-config` for it:
//!
//! ```
//! use ds4_settings::{ConfigArgs, Problems};
//!
//! #[derive(clap::Args, serde::Serialize, serde::Deserialize, Default)]
//! #[serde(deny_unknown_fields, rename_all = "kebab-case")]
//! struct Flags {
//!     /// Address that the HTTP API listens on.
//!     #[arg(long, env = "DS4_HTTP", value_name = "ADDR")]
//!     http: Option<std::net::SocketAddr>,
//!     /// Context length in tokens.
//!     #[arg(long, env = "DS4_CTX", value_name = "TOKENS")]
//!     ctx: Option<u32>,
//!     /// Warm up before ready (a switch: `--warm-up` or `--warm-up=false`).
//!     #[arg(long, env = "DS4_WARM_UP", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
//!     warm_up: Option<bool>,
//! }
//!
//! #[derive(clap::Parser)]
//! struct Cli {
//!     #[command(flatten)]
//!     config: ConfigArgs,
//!     #[command(flatten)]
//!     flags: Flags,
//! }
//!
//! # fn main() -> Result<(), ds4_settings::ConfigErrors> {
//! # let args = ["ds4-worker", "--ctx", "4096"];
//! // In main: `let (cli, origins) = ds4_settings::parse::<Cli>();`, which ends with exit code 2 on bad usage.
//! let (cli, origins) = ds4_settings::try_parse_from::<Cli, _, _>(args).unwrap();
//! let defaults = Flags { http: "127.0.0.1:8080".parse().ok(), ctx: Some(2048), warm_up: Some(true) };
//! let config = ds4_settings::layer("worker", &cli.config, cli.flags, defaults, &origins, |v, problems: &mut Problems| {
//!     if v.ctx == Some(0) {
//!         problems.key("ctx", "is 0: give at least 1");
//!     }
//! })?; // In main: print the error and exit with ds4_settings::EXIT_USAGE.
//! if cli.config.print_config {
//!     print!("{}", config.to_toml());
//! }
//! assert_eq!(config.values.ctx, Some(4096)); // every key that has a default is Some from here on
//! # Ok(())
//! # }
//! ```

// They panic where nobody can read them: `ds4_os::say!` and `ds4_os::show!` do not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod args;
mod layers;
mod paths;

pub use args::{ConfigArgs, Origins, listen_address, parse, try_parse_from};
pub use layers::{ConfigErrors, Layered, Problems, SECTIONS, SHARED_KEYS, Source, layer};
pub use paths::{BROKER_SOCKET, OWNER_SOCKET, WORKER_SOCKET, cache_dir, default_runtime_dir, models_dir};

/// Environment variable with the pid of the process whose end is that of the one it starts: set by benchmarks for their own, by nobody
/// else.
pub const PARENT_VARIABLE: &str = "DS4_PARENT";

/// How a worker's lines on standard error begin that only say how far `--bench-kernel` is; `ds4 bench kernel` shows them.
pub const KERNEL_PROGRESS: &str = "ds4-worker: checking and timing ";

/// Exit code: bad usage or configuration.
pub const EXIT_USAGE: u8 = 2;
/// Exit code: the peer (weight owner, worker) is missing or refused us.
pub const EXIT_PEER: u8 = 3;
/// Exit code: the model's file is bad or was refused.
pub const EXIT_MODEL: u8 = 4;
/// Exit code: not enough memory.
pub const EXIT_MEMORY: u8 = 5;
/// Exit code: the start-up self-test failed.
pub const EXIT_SELF_TEST: u8 = 6;
