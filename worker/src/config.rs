//! The worker's configuration: flags, `[worker]` of the file, defaults, and what they resolve to.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::kernel_bench::KernelBench;
use ds4_api::ApiConfig;
use ds4_engine::EngineConfig;
use ds4_models::deepseek_v4::{MtpAlignment, MtpSettings};
use ds4_settings::{ConfigArgs, ConfigErrors, Layered, Origins, Problems, default_runtime_dir};

/// Serves one model of a weight owner over HTTP.
#[derive(clap::Parser)]
#[command(name = "ds4-worker", version, about, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(flatten)]
    pub config: ConfigArgs,
    #[command(flatten)]
    pub flags: Flags,
    /// Attach, map the weights, read some of them back (all with --verify-weights), compare them with the owner's hashes,
    /// print the figures as JSON and exit; nothing is served
    #[arg(long)]
    pub self_test: bool,
    /// With --self-test: attach and detach this many times
    #[arg(long, value_name = "N", default_value_t = 1, requires = "self_test", value_parser = clap::value_parser!(u32).range(1..))]
    pub self_test_cycles: u32,
    #[command(flatten)]
    pub bench: KernelBench,
}

const EXIT_CODES: &str = "Exit codes: 0 drained; 1 fatal error; 2 bad usage, configuration or address in use; 3 no weight \
    owner, or it refused; 4 the model was refused; 5 not enough memory; 6 the self-test failed; \
    71 the CUDA device failed (start again: the weights are still there).\n\nSIGTERM or Ctrl-C \
    drains: running and waiting requests are finished (--drain-deadline); a second one ends at once.";

/// Every key; a missing one has the default that `--print-config` shows.
#[derive(clap::Args, serde::Serialize, serde::Deserialize, Clone, Debug, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Flags {
    /// Address that the HTTP API listens on (a socket passed by systemd or a supervisor goes first)
    #[arg(long, env = "DS4_HTTP", value_name = "ADDR", value_parser = ds4_settings::listen_address)]
    #[serde(default, deserialize_with = "listen_address")]
    pub http: Option<SocketAddr>,
    /// Allow an address that other machines can reach, although the API asks for no keys
    #[arg(long, env = "DS4_ALLOW_REMOTE", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub allow_remote: Option<bool>,
    /// Name besides localhost that requests may call a server of this machine alone by, such as a reverse proxy's (may be
    /// given several times)
    #[arg(long, env = "DS4_ALLOW_HOST", value_name = "NAME")]
    pub allow_host: Option<Vec<String>>,
    /// Directory of the owner's and the worker's sockets [default: $XDG_RUNTIME_DIR/ds4; without that /run/ds4 for
    /// root, /tmp/ds4-UID for others]
    #[arg(long, env = "DS4_RUNTIME_DIR", value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// Name of the owner's model to serve [default: the only one it has]
    #[arg(long, env = "DS4_WORKER_MODEL", value_name = "NAME")]
    pub model: Option<String>,
    /// Refuse a model whose content has another BLAKE3
    #[arg(long, env = "DS4_WORKER_EXPECT_BLAKE3", value_name = "HEX")]
    pub expect_blake3: Option<String>,
    /// Hash every byte of the weights again at start (reads all of them)
    #[arg(long, env = "DS4_VERIFY_WEIGHTS", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub verify_weights: Option<bool>,
    /// Keep trying this long while the owner is absent or still loading
    #[arg(long, env = "DS4_OWNER_WAIT", value_name = "SECONDS")]
    pub owner_wait: Option<u32>,
    /// Context length in tokens; at most the model's
    #[arg(long, env = "DS4_CTX", value_name = "TOKENS")]
    pub ctx: Option<u32>,
    /// Most sequences that are computed together
    #[arg(long, env = "DS4_MAX_BATCH", value_name = "N")]
    pub max_batch: Option<u32>,
    /// Most sequences that wait; more are answered with 429
    #[arg(long, env = "DS4_MAX_QUEUE", value_name = "N")]
    pub max_queue: Option<u32>,
    /// Most prompt tokens in one step; a quarter of it while others decode [default: 256, on a CUDA device 2048]
    #[arg(long, env = "DS4_PREFILL_CHUNK", value_name = "TOKENS")]
    pub prefill_chunk: Option<u32>,
    /// Most checkpoints of a sequence, where its state cannot be cut back at any token (DeepSeek V4); 0: none
    #[arg(long, env = "DS4_CHECKPOINTS", value_name = "N")]
    pub checkpoints: Option<u32>,
    /// Tokens after which a growing sequence gets a checkpoint
    #[arg(long, env = "DS4_CHECKPOINT_INTERVAL", value_name = "TOKENS")]
    pub checkpoint_interval: Option<u32>,
    /// Most memory of all checkpoints
    #[arg(long, env = "DS4_CHECKPOINT_MIB", value_name = "MIB")]
    pub checkpoint_mib: Option<u32>,
    /// Name of the owner's prediction block (MTP) that belongs to the model: it guesses tokens ahead at temperature 0 and in
    /// the syntax of tool calls, and never changes an answer
    #[arg(long, env = "DS4_MTP", value_name = "NAME")]
    pub mtp: Option<String>,
    /// Most tokens guessed ahead in a step, 1 to 16
    #[arg(long, env = "DS4_MTP_DRAFT", value_name = "N")]
    pub mtp_draft: Option<u32>,
    /// Guess no further when the best guess's logit leads the second's by less; 0: guess on
    #[arg(long, env = "DS4_MTP_MARGIN", value_name = "LOGITS")]
    pub mtp_margin: Option<f32>,
    /// Token that the block gets beside the model's state of a position: the next one's or the same one's
    #[arg(long, env = "DS4_MTP_ALIGNMENT", value_enum, value_name = "TOKEN")]
    pub mtp_alignment: Option<Alignment>,
    /// Compute threads [default: as many as this process may use]
    #[arg(long, env = "DS4_THREADS", value_name = "N")]
    pub threads: Option<u32>,
    /// Replay the launches of decode steps as graphs (CUDA devices only); false: start every kernel by itself, for profilers
    #[arg(long, env = "DS4_CUDA_GRAPHS", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub cuda_graphs: Option<bool>,
    /// Time that running and waiting requests have to finish on SIGTERM or drain
    #[arg(long, env = "DS4_WORKER_DRAIN_DEADLINE", value_name = "SECONDS")]
    pub drain_deadline: Option<u32>,
    /// A client that takes nothing of its answer for this long is dropped
    #[arg(long, env = "DS4_STALL_TIMEOUT", value_name = "SECONDS")]
    pub stall_timeout: Option<u32>,
    /// Longest life of a request, queueing included; 0: no limit
    #[arg(long, env = "DS4_REQUEST_TIMEOUT", value_name = "SECONDS")]
    pub request_timeout: Option<u32>,
    /// Time that a connection has for its next request head
    #[arg(long, env = "DS4_HEADER_TIMEOUT", value_name = "SECONDS")]
    pub header_timeout: Option<u32>,
    /// Time that a request body has to arrive
    #[arg(long, env = "DS4_BODY_TIMEOUT", value_name = "SECONDS")]
    pub body_timeout: Option<u32>,
    /// Longest pause within a request body
    #[arg(long, env = "DS4_BODY_IDLE_TIMEOUT", value_name = "SECONDS")]
    pub body_idle_timeout: Option<u32>,
    /// Silence after which an event stream carries a comment line (at most 5)
    #[arg(long, env = "DS4_SSE_KEEPALIVE", value_name = "SECONDS")]
    pub sse_keepalive: Option<u32>,
    /// Largest request body
    #[arg(long, env = "DS4_MAX_BODY_MIB", value_name = "MIB")]
    pub max_body_mib: Option<u32>,
    /// Most connections served at the same time; more wait in the listen queue
    #[arg(long, env = "DS4_MAX_CONNECTIONS", value_name = "N")]
    pub max_connections: Option<u32>,
    /// Log filter, e.g. info, debug, ds4_api=debug
    #[arg(long, env = "DS4_LOG", value_name = "FILTER")]
    pub log: Option<String>,
}

/// The configuration file's listening address, in the spellings of `--http`.
fn listen_address<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let text: Option<String> = serde::Deserialize::deserialize(from)?;
    text.map(|text| ds4_settings::listen_address(&text)).transpose().map_err(serde::de::Error::custom)
}

/// Values of `--mtp-alignment`.
#[derive(clap::ValueEnum, serde::Serialize, serde::Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Alignment {
    /// The token that follows, as in DeepSeek V3's report
    Next,
    /// The token of the position itself, as in the ds4 program
    Same,
}

/// A prediction block and how it is used.
#[derive(Clone, Debug, PartialEq)]
pub struct Mtp {
    /// Its name in the owner.
    pub name: String,
    pub settings: MtpSettings,
}

/// What the flags mean.
#[derive(Clone, Debug)]
pub struct Options {
    pub http: SocketAddr,
    pub allow_remote: bool,
    pub allow_hosts: Vec<String>,
    pub runtime_dir: PathBuf,
    pub model: Option<String>,
    pub expected: Option<[u8; 32]>,
    pub mtp: Option<Mtp>,
    pub verify: bool,
    pub owner_wait: Duration,
    pub threads: usize,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "of use on CUDA devices only"))]
    pub cuda_graphs: bool,
    pub drain_deadline: Duration,
    pub engine: EngineConfig,
    /// What was asked for; `engine` has the CPU's default where nothing was.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "of use on CUDA devices only"))]
    pub prefill_chunk: Option<usize>,
    pub api: ApiConfig,
    pub log: String,
}

fn defaults() -> Flags {
    let (engine, api) = (EngineConfig::default(), ApiConfig::default());
    let n = |v: usize| u32::try_from(v).ok();
    let s = |d: Duration| u32::try_from(d.as_secs()).ok();
    Flags {
        http: Some(SocketAddr::from(([127, 0, 0, 1], 8080))),
        allow_remote: Some(false),
        runtime_dir: Some(default_runtime_dir()),
        verify_weights: Some(false),
        owner_wait: Some(0),
        ctx: n(engine.context),
        max_batch: n(engine.max_batch),
        max_queue: n(engine.max_queue),
        checkpoints: n(engine.checkpoints),
        checkpoint_interval: n(engine.checkpoint_interval),
        checkpoint_mib: n(engine.checkpoint_bytes >> 20),
        mtp_draft: n(engine.drafts),
        mtp_margin: Some(0.0),
        mtp_alignment: Some(Alignment::Next),
        threads: std::thread::available_parallelism().ok().and_then(|t| n(t.get())),
        cuda_graphs: Some(true),
        drain_deadline: Some(30),
        stall_timeout: s(engine.stall_timeout),
        request_timeout: Some(0),
        header_timeout: s(api.header_timeout),
        body_timeout: s(api.body_timeout),
        body_idle_timeout: s(api.body_idle_timeout),
        sse_keepalive: s(api.keepalive_interval),
        max_body_mib: n(api.max_body >> 20),
        max_connections: n(api.max_connections),
        log: Some("info".into()),
        ..Flags::default()
    }
}

/// Merges and checks the configuration.
///
/// # Errors
/// Everything that is wrong, at once.
pub fn resolve(cli: &Cli, origins: &Origins) -> Result<(Options, Layered<Flags>), ConfigErrors> {
    let layered = ds4_settings::layer("worker", &cli.config, cli.flags.clone(), defaults(), origins, check)?;
    let v = &layered.values;
    let n = |v: Option<u32>| usize::try_from(v.unwrap_or(1)).unwrap_or(usize::MAX);
    let s = |v: Option<u32>| Duration::from_secs(v.unwrap_or(0).into());
    let prefill_chunk = v.prefill_chunk.map(|c| n(Some(c)));
    let engine = EngineConfig {
        context: n(v.ctx),
        max_batch: n(v.max_batch),
        max_queue: n(v.max_queue),
        drafts: n(v.mtp_draft),
        checkpoints: n(v.checkpoints),
        checkpoint_interval: n(v.checkpoint_interval),
        checkpoint_bytes: n(v.checkpoint_mib) << 20,
        stall_timeout: s(v.stall_timeout),
        ..EngineConfig::default().with_prefill_chunk(prefill_chunk.unwrap_or(EngineConfig::default().prefill_chunk))
    };
    let max_body = n(v.max_body_mib) << 20;
    let api = ApiConfig {
        max_body,
        max_body_total: ApiConfig::default().max_body_total.max(max_body),
        max_connections: n(v.max_connections),
        header_timeout: s(v.header_timeout),
        body_timeout: s(v.body_timeout),
        body_idle_timeout: s(v.body_idle_timeout),
        stall_timeout: s(v.stall_timeout),
        request_timeout: Some(s(v.request_timeout)).filter(|t| !t.is_zero()),
        keepalive_interval: s(v.sse_keepalive),
        ..ApiConfig::default()
    };
    let options = Options {
        http: v.http.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 8080))),
        allow_remote: v.allow_remote.unwrap_or(false),
        allow_hosts: v.allow_host.clone().unwrap_or_default(),
        runtime_dir: v.runtime_dir.clone().unwrap_or_else(default_runtime_dir),
        model: v.model.clone(),
        expected: v.expect_blake3.as_deref().and_then(parse_blake3),
        mtp: v.mtp.clone().map(|name| Mtp {
            name,
            settings: MtpSettings {
                alignment: match v.mtp_alignment {
                    Some(Alignment::Same) => MtpAlignment::SameToken,
                    Some(Alignment::Next) | None => MtpAlignment::NextToken,
                },
                margin: v.mtp_margin.unwrap_or(0.0),
            },
        }),
        verify: v.verify_weights.unwrap_or(false),
        owner_wait: s(v.owner_wait),
        threads: n(v.threads),
        cuda_graphs: v.cuda_graphs.unwrap_or(true),
        drain_deadline: s(v.drain_deadline),
        engine,
        prefill_chunk,
        api,
        log: v.log.clone().unwrap_or_default(),
    };
    Ok((options, layered))
}

fn check(v: &Flags, problems: &mut Problems) {
    if let Some(http) = v.http
        && !http.ip().is_loopback()
        && v.allow_remote != Some(true)
    {
        problems.key(
            "http",
            format_args!(
                "is {http}, which other machines can reach, and the API asks for no keys: listen on 127.0.0.1, or say \
                 --allow-remote"
            ),
        );
    }
    if let Some(hex) = &v.expect_blake3
        && parse_blake3(hex).is_none()
    {
        problems.key("expect-blake3", format_args!("is {hex:?}, which is not a BLAKE3 of 64 hexadecimal digits"));
    }
    if let Some(margin) = v.mtp_margin.filter(|m| !(0.0..=1000.0).contains(m)) {
        problems.key("mtp-margin", format_args!("is {margin}: give 0 to 1000"));
    }
    let ranges: [(&str, Option<u32>, u32, u32); 16] = [
        ("ctx", v.ctx, 2, 1 << 24),
        ("max-batch", v.max_batch, 1, 1024),
        ("max-queue", v.max_queue, 1, 1 << 20),
        ("prefill-chunk", v.prefill_chunk, 1, 1 << 16),
        ("checkpoints", v.checkpoints, 0, 64),
        ("checkpoint-interval", v.checkpoint_interval, 1, 1 << 24),
        ("checkpoint-mib", v.checkpoint_mib, 0, 1 << 20),
        ("mtp-draft", v.mtp_draft, 1, 16),
        ("threads", v.threads, 1, 4096),
        ("stall-timeout", v.stall_timeout, 1, u32::MAX),
        ("header-timeout", v.header_timeout, 1, u32::MAX),
        ("body-timeout", v.body_timeout, 1, u32::MAX),
        ("body-idle-timeout", v.body_idle_timeout, 1, u32::MAX),
        ("sse-keepalive", v.sse_keepalive, 1, 5),
        ("max-body-mib", v.max_body_mib, 1, 4096),
        ("max-connections", v.max_connections, 1, 1 << 20),
    ];
    for (key, value, low, high) in ranges {
        if let Some(value) = value.filter(|v| !(low..=high).contains(v)) {
            let rule = if high == u32::MAX { format!("give at least {low}") } else { format!("give {low} to {high}") };
            problems.key(key, format_args!("is {value}: {rule}"));
        }
    }
    if v.log.as_ref().is_some_and(|l| l.parse::<tracing_subscriber::filter::Targets>().is_err()) {
        problems.key("log", "is no log filter; try info or debug");
    }
}

fn parse_blake3(hex: &str) -> Option<[u8; 32]> {
    if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut out = [0; 32];
    for (byte, digits) in out.iter_mut().zip(hex.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(args: &[&str]) -> Result<Options, String> {
        let none: &[&str] = if args.contains(&"--config") { &[] } else { &["--config", "/dev/null"] };
        let args = ["ds4-worker"].iter().chain(none).chain(args).copied();
        let (cli, origins) = ds4_settings::try_parse_from::<Cli, _, _>(args).map_err(|e| e.to_string())?;
        resolve(&cli, &origins).map(|(options, _)| options).map_err(|e| e.to_string())
    }

    #[test]
    fn defaults_resolve() {
        let o = run(&[]).unwrap();
        assert_eq!((o.http.to_string(), o.engine.context, o.engine.max_batch), ("127.0.0.1:8080".into(), 8192, 16));
        assert_eq!((o.api.max_body, o.engine.max_queue), (64 << 20, 256));
        assert_eq!(o.drain_deadline, Duration::from_secs(30));
        assert_eq!(
            (o.engine.checkpoints, o.engine.checkpoint_interval, o.engine.checkpoint_bytes),
            (8, 1024, 512 << 20)
        );
        let o = run(&["--checkpoints", "0", "--checkpoint-interval=7", "--checkpoint-mib=0"]).unwrap();
        assert_eq!((o.engine.checkpoints, o.engine.checkpoint_interval, o.engine.checkpoint_bytes), (0, 7, 0));
    }

    #[test]
    fn deepseek_v4_mtp_settings_resolve_and_have_ranges() {
        assert_eq!((run(&[]).unwrap().mtp, run(&[]).unwrap().engine.drafts), (None, 1));
        let o = run(&["--mtp", "x-mtp", "--mtp-draft=4", "--mtp-margin=1.5", "--mtp-alignment=same"]).unwrap();
        let settings = MtpSettings { alignment: MtpAlignment::SameToken, margin: 1.5 };
        assert_eq!((o.mtp, o.engine.drafts), (Some(Mtp { name: "x-mtp".into(), settings }), 4));
        let e = run(&["--mtp-draft", "17", "--mtp-margin=-1"]).unwrap_err();
        for part in ["--mtp-draft is 17: give 1 to 16", "--mtp-margin is -1: give 0 to 1000"] {
            assert!(e.contains(part), "{part} in {e}");
        }
        assert!(run(&["--mtp-alignment", "previous"]).is_err());
    }

    #[test]
    fn a14_there_is_no_request_timeout_unless_asked_for() {
        assert_eq!(run(&[]).unwrap().api.request_timeout, None);
        assert_eq!(run(&["--request-timeout", "90"]).unwrap().api.request_timeout, Some(Duration::from_secs(90)));
    }

    #[test]
    fn the_file_takes_the_addresses_that_the_flag_takes() {
        let read = |value: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), format!("[worker]\nhttp = \"{value}\"\n")).unwrap();
            run(&["--config", file.path().to_str().unwrap()])
        };
        assert_eq!(read("localhost:80").unwrap().http, SocketAddr::from(([127, 0, 0, 1], 80)));
        assert!(read("localhost").unwrap_err().contains("such as 127.0.0.1:8080"));
    }

    #[test]
    fn remote_addresses_want_a_word() {
        for addr in ["0.0.0.0:80", "[::]:80", "192.168.1.2:80"] {
            let e = run(&["--http", addr]).unwrap_err();
            assert!(e.contains(addr) && e.contains("--allow-remote"), "{e}");
            assert!(run(&["--http", addr, "--allow-remote"]).is_ok());
        }
        assert!(run(&["--http", "[::1]:80"]).is_ok());
    }

    #[test]
    fn l8_everything_that_is_wrong_is_said_at_once() {
        let e = run(&["--ctx", "1", "--max-batch", "0", "--sse-keepalive", "6", "--expect-blake3", "xyz"]).unwrap_err();
        for part in ["--ctx is 1", "--max-batch is 0", "--sse-keepalive is 6", "--expect-blake3 is \"xyz\""] {
            assert!(e.contains(part), "{part} in {e}");
        }
    }

    #[test]
    fn hashes_are_parsed_whole() {
        assert_eq!(run(&["--expect-blake3", &"aB".repeat(32)]).unwrap().expected, Some([0xAB; 32]));
        assert_eq!(parse_blake3(&"+1".repeat(32)).map(|h| h[0]), None);
    }
}
