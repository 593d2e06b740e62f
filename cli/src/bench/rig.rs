//! A private owner and worker for a benchmark: own runtime directory, own port, nothing from the user's configuration.

use std::ffi::OsString;
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ds4_settings::{EXIT_MODEL, EXIT_USAGE};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::client::http::Server;
use crate::failure::Failure;
use crate::output::Scratch;
use crate::serve::plan::sibling;
use crate::serve::process::{Launch, Notify, Process};

const OWNER_READY: Duration = Duration::from_secs(600);
const WORKER_READY: Duration = Duration::from_secs(30);

/// Flags of every benchmark that runs our own processes.
#[derive(clap::Args, Clone, Debug)]
pub struct RigArgs {
    /// GGUF file to measure with, or its first shard [default: the starter model of `ds4 pull`]
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Take a development model, such as `ds4 gguf synth --shape small` writes
    #[arg(long)]
    allow_dev_models: bool,
    /// Whose memory holds the weights: memfd, cuda-vmm or auto [default: the owner's]
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Compute threads [default: the CPUs that this process may use]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Context length in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    ctx: u32,
}

impl RigArgs {
    /// The model's path.
    ///
    /// # Errors
    /// Exit code 2 when there is none, 4 when the file is not there.
    pub fn model(&self) -> anyhow::Result<PathBuf> {
        let path = self.model.clone().or_else(crate::pull::starter_path);
        let path = path.ok_or_else(|| Failure::error(EXIT_USAGE, "no model to measure with: give --model FILE"))?;
        std::fs::canonicalize(&path).map_err(|e| {
            Failure::error(EXIT_MODEL, format!("{}: {e}; `ds4 pull` fetches the starter model", path.display()))
        })
    }

    /// Compute threads in force.
    pub fn threads(&self) -> u32 {
        let available = || std::thread::available_parallelism().ok().and_then(|n| u32::try_from(n.get()).ok());
        self.threads.or_else(available).unwrap_or(1)
    }

    /// Context length in tokens.
    pub fn ctx(&self) -> u32 {
        self.ctx
    }

    /// What a reader needs to judge the figures.
    pub fn conditions(&self) -> anyhow::Result<Value> {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpuinfo.lines().find_map(|l| l.strip_prefix("model name")).and_then(|l| l.split_once(": "));
        let busy = busy();
        if busy > 0.1 {
            ds4_os::say!(
                "warning: other work keeps {:.0} % of the CPUs busy; the figures will be too low",
                busy * 100.0
            );
        }
        let model = self.model()?;
        Ok(json!({
            "ds4_version": env!("CARGO_PKG_VERSION"),
            "model": model.file_name().map(|n| n.to_string_lossy()),
            "threads": self.threads(),
            "backend": self.backend,
            "context": self.ctx,
            "cpu": cpu.map(|(_, name)| name),
            "cpus": std::thread::available_parallelism()?.get(),
            "cpu_busy_before": (busy * 1000.0).round() / 1000.0,
        }))
    }
}

/// Share of CPU time that was not idle over half a second, from the first line of /proc/stat. See proc_stat(5).
fn busy() -> f64 {
    let sample = || {
        let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let ticks: Vec<f64> =
            text.lines().next().unwrap_or_default().split_whitespace().skip(1).filter_map(|t| t.parse().ok()).collect();
        // Fields 4 and 5 are idle and waiting for I/O.
        let idle: f64 = ticks.iter().skip(3).take(2).sum();
        (idle, ticks.iter().sum::<f64>())
    };
    let (idle_before, all_before) = sample();
    std::thread::sleep(Duration::from_millis(500));
    let (idle, all) = sample();
    if all > all_before { 1.0 - (idle - idle_before) / (all - all_before) } else { 0.0 }
}

/// The private pair.
pub struct Rig {
    dir: Scratch,
    owner: Process,
    worker: Option<Process>,
    worker_args: Vec<OsString>,
    programs: [PathBuf; 2],
    listener: TcpListener,
    _notify: Notify,
}

impl Rig {
    /// Starts an owner; with `load` it loads the model at once and is READY on return.
    pub async fn start(args: &RigArgs, load: bool) -> anyhow::Result<Self> {
        let dir = Scratch::new()?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let programs = [sibling("ds4-weight-owner")?, sibling("ds4-worker")?];
        let common: Vec<OsString> = ["--config", "/dev/null", "--runtime-dir"]
            .map(OsString::from)
            .into_iter()
            .chain([dir.path().into()])
            .collect();
        let model = args.model()?;
        let mut owner_args = common.clone();
        if load {
            owner_args.extend(["--model".into(), model.into()]);
        }
        if let Some(backend) = &args.backend {
            owner_args.extend(["--backend".into(), backend.into()]);
        }
        if args.allow_dev_models {
            owner_args.push("--allow-dev-models".into());
        }
        let mut worker_args = common;
        let given = [
            ("--http", listener.local_addr()?.to_string()),
            ("--ctx", args.ctx.to_string()),
            ("--threads", args.threads().to_string()),
        ];
        worker_args.extend(given.into_iter().flat_map(|(flag, value)| [OsString::from(flag), value.into()]));
        let notify = Notify::bind(dir.path(), "owner")?;
        let log = Some(log_file(dir.path(), "owner")?);
        let owner =
            Launch { program: &programs[0], args: &owner_args, listener: None, notify: &notify, log, isolated: true }
                .start()?;
        let mut rig = Self { dir, owner, worker: None, worker_args, programs, listener, _notify: notify };
        let ready = wait_ready(&mut rig.owner, &rig._notify, OWNER_READY, rig.dir.path(), "owner");
        ready.await.context("the benchmark's weight owner")?;
        Ok(rig)
    }

    /// More arguments for workers that are started from now on.
    pub fn worker_flag(&mut self, flag: &str, value: impl ToString) {
        self.worker_args.extend([flag.into(), value.to_string().into()]);
    }

    /// The runtime directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The worker's HTTP server.
    pub fn server(&self) -> anyhow::Result<Server> {
        Ok(Server::at(self.listener.local_addr()?))
    }

    /// The owner's pid.
    pub fn owner_pid(&self) -> u32 {
        self.owner.target().pid()
    }

    /// Starts a worker and returns the time from spawn to its READY message.
    pub async fn start_worker(&mut self) -> anyhow::Result<Duration> {
        let notify = Notify::bind(self.dir.path(), "worker")?;
        let log = Some(log_file(self.dir.path(), "worker")?);
        let begun = Instant::now();
        let launch = Launch {
            program: &self.programs[1],
            args: &self.worker_args,
            listener: Some(&self.listener),
            notify: &notify,
            log,
            isolated: true,
        };
        let worker = self.worker.insert(launch.start()?);
        wait_ready(worker, &notify, WORKER_READY, self.dir.path(), "worker").await.context("the benchmark's worker")?;
        Ok(begun.elapsed())
    }

    /// Runs `ds4-worker --self-test`: attaches `cycles` times, compares all bytes with the owner's hashes once. Returns its
    /// figures.
    pub fn self_test(&self, cycles: u32) -> anyhow::Result<Value> {
        let output = std::process::Command::new(&self.programs[1])
            .args(["--config", "/dev/null", "--self-test", "--verify-weights", "--self-test-cycles"])
            .arg(cycles.to_string())
            .arg("--runtime-dir")
            .arg(self.dir())
            .env(ds4_settings::PARENT_VARIABLE, std::process::id().to_string())
            .output()?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            bail!("the worker's self-test failed: {}", log.lines().last().unwrap_or_default());
        }
        serde_json::from_slice(&output.stdout).context("the figures of the worker's self-test")
    }

    /// SIGKILL, and waits until it is gone.
    pub async fn kill_worker(&mut self) -> anyhow::Result<()> {
        if let Some(mut worker) = self.worker.take() {
            worker.target().signal(Signal::SIGKILL)?;
            worker.wait().await;
        }
        Ok(())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for process in self.worker.iter().chain([&self.owner]) {
            let _ = process.target().signal(Signal::SIGKILL);
        }
    }
}

fn log_file(dir: &Path, name: &str) -> anyhow::Result<File> {
    Ok(File::create(dir.join(format!("{name}.log")))?)
}

async fn wait_ready(
    process: &mut Process,
    notify: &Notify,
    limit: Duration,
    dir: &Path,
    name: &str,
) -> anyhow::Result<()> {
    let ready = async {
        loop {
            if notify.next().await?.ready {
                return anyhow::Ok(());
            }
        }
    };
    let end = tokio::select! {
        result = tokio::time::timeout(limit, ready) => match result {
            Ok(result) => return result,
            Err(_) => format!("was not ready within {limit:?}"),
        },
        end = process.wait() => end.to_string(),
    };
    let log = std::fs::read_to_string(dir.join(format!("{name}.log"))).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    let tail = lines[lines.len().saturating_sub(10)..].join("\n");
    bail!("{end}; the end of its log:\n{tail}")
}

/// Ids in the vocabulary of the model that is served.
pub async fn vocabulary(server: &Server) -> anyhow::Result<u64> {
    let models = server.get("/v1/models").await?.json()?;
    models.pointer("/data/0/meta/n_vocab").and_then(Value::as_u64).context("the model has no n_vocab")
}

/// Token ids that look like text to a CPU (hardly two prompts share a prefix): the same of all vocabularies from 31,000 on, which are all
/// of the catalog but that of the tiny synthetic model.
pub fn prompt(tokens: usize, seed: u64, vocab: u64) -> Vec<u64> {
    let (first, span) = if vocab < 31_000 { (vocab / 2, (vocab - vocab / 2).max(1)) } else { (1000, 30_000) };
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(|| {
        // Numerical Recipes' 64-bit linear congruential generator; the high bits are the good ones.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        first + (state >> 33) % span
    })
    .take(tokens)
    .collect()
}

/// A `/v1/completions` body that generates exactly `max_tokens`.
pub fn body(prompt: &[u64], max_tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "temperature": 0})
}

/// `timings` of an answer as (prefill tokens per second, decode tokens per second). Decode counts the intervals between
/// tokens: the first token belongs to prefill, on both sides of a comparison.
pub fn speeds(answer: &Value) -> anyhow::Result<(f64, f64)> {
    let timings = answer.get("timings").context("the answer has no timings")?;
    let number = |key: &str| timings.get(key).and_then(Value::as_f64).with_context(|| format!("timings has no {key}"));
    let per_second = |n: f64, ms: f64| if ms > 0.0 { n * 1e3 / ms } else { 0.0 };
    let prefill = per_second(number("prompt_n")?, number("prompt_ms")?);
    Ok((prefill, per_second((number("predicted_n")? - 1.0).max(0.0), number("predicted_ms")?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_differ_from_their_first_token_on() {
        let (a, b) = (prompt(512, 1, 49_152), prompt(512, 2, 129_280));
        assert_eq!(a.len(), 512);
        assert_ne!(a[0], b[0]);
        assert!(a.iter().chain(&b).all(|t| (1000..31_000).contains(t)));
        assert_eq!(a, prompt(512, 1, 31_000));
    }

    #[test]
    fn prompts_keep_to_small_vocabularies() {
        let few = prompt(512, 1, 288);
        assert!(few.iter().all(|t| (144..288).contains(t)) && few[0] != few[1], "{few:?}");
        assert_eq!(prompt(3, 1, 1), [0, 0, 0]);
    }

    #[test]
    fn speeds_count_intervals_between_tokens() {
        let answer =
            json!({"timings": {"prompt_n": 512, "prompt_ms": 1024.0, "predicted_n": 129, "predicted_ms": 1280.0}});
        assert_eq!(speeds(&answer).unwrap(), (500.0, 100.0));
        assert!(speeds(&json!({})).is_err());
    }
}
