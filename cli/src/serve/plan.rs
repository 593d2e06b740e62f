//! What `ds4 serve` is going to run, judged before anything is started.

use std::ffi::OsString;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ds4_settings::{EXIT_MODEL, EXIT_USAGE, Layered, Origins};
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::ServeArgs;
use super::keep::Policy;
use super::process::NOTIFY_PREFIX;
use crate::failure::Failure;

/// The supervisor's own settings, section `[serve]`.
#[derive(clap::Args, Serialize, Deserialize, Default, Clone, Debug)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServeFlags {
    /// Directory of the sockets [default: $XDG_RUNTIME_DIR/ds4; without that /run/ds4 for root, /tmp/ds4-UID for
    /// others]
    #[arg(long, env = "DS4_RUNTIME_DIR", value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// Failed starts in a row after which serve gives up [default: 5]
    #[arg(long, env = "DS4_SERVE_START_ATTEMPTS", value_name = "N")]
    pub start_attempts: Option<u32>,
    /// Seconds that a worker may take to become ready; 0 is no limit [default: 60]
    #[arg(long, env = "DS4_SERVE_START_TIMEOUT", value_name = "SECONDS")]
    pub start_timeout: Option<u64>,
    /// Seconds that a process may take to end before it is killed; 0 is no limit [default: 60]
    #[arg(long, env = "DS4_SERVE_STOP_TIMEOUT", value_name = "SECONDS")]
    pub stop_timeout: Option<u64>,
}

/// An executable with its arguments and the configuration that it says it would run with.
#[derive(Debug)]
pub struct Program {
    /// Executable.
    pub path: PathBuf,
    /// Arguments, `--http` left out: it is said last, once the socket is bound.
    pub args: Vec<OsString>,
    /// Its section of the effective configuration.
    pub config: Table,
    /// That configuration as it printed it.
    pub printed: String,
}

/// Everything that `serve` needs to know.
pub struct Plan {
    /// Runtime directory, absolute.
    pub dir: PathBuf,
    /// The weight owner.
    pub owner: Program,
    /// The worker.
    pub worker: Program,
    /// The supervisor's effective configuration.
    pub serve: Layered<ServeFlags>,
}

const CHECK_LIMIT: Duration = Duration::from_secs(5);

impl Plan {
    /// Resolves and checks the configuration of all three processes; starts neither owner nor worker.
    ///
    /// # Errors
    /// Exit code 2 with everything that is wrong, of all three.
    pub fn new(args: &ServeArgs, origins: &Origins) -> anyhow::Result<Self> {
        let defaults = ServeFlags {
            runtime_dir: Some(ds4_settings::default_runtime_dir()),
            start_attempts: Some(5),
            start_timeout: Some(60),
            stop_timeout: Some(60),
        };
        let serve = ds4_settings::layer("serve", &args.config, args.flags.clone(), defaults, origins, |v, problems| {
            if v.start_attempts == Some(0) {
                problems.key("start-attempts", "is 0: give at least 1");
            }
        });
        // Owner and worker say what is wrong with their sections even if this one is bad.
        let known = serve.as_ref().ok().and_then(|s| s.values.runtime_dir.clone());
        let dir = known.unwrap_or_else(ds4_settings::default_runtime_dir);
        let dir = std::path::absolute(dir).context("cannot make the runtime directory absolute")?;
        let mut common: Vec<OsString> = vec!["--runtime-dir".into(), dir.clone().into()];
        if let Some(config) = &args.config.config {
            common.extend(["--config".into(), std::path::absolute(config)?.into()]);
        }
        let owner = Program::checked("ds4-weight-owner", "owner", [common.clone(), args.owner_args()?].concat(), &[])?;
        let worker =
            Program::checked("ds4-worker", "worker", [common, args.worker_args()?].concat(), &args.http_args())?;
        match (serve, owner, worker) {
            (Ok(serve), Ok(owner), Ok(worker)) => Ok(Self { dir, owner, worker, serve }),
            (serve, owner, worker) => {
                let own = serve.err().map(|e| Refusal { code: EXIT_USAGE, text: e.to_string() });
                Err(Refusal::all(own.into_iter().chain(owner.err()).chain(worker.err())))
            }
        }
    }

    /// All three sections, each value with its source.
    pub fn printed(&self) -> String {
        let mut owner = self.owner.printed.clone();
        if !self.owner.config.contains_key("model")
            && let Some(starter) = crate::pull::starter_path().filter(|p| p.exists())
        {
            let loaded = format!("# model is unset\n# so `ds4 serve` loads the starter model, {}", starter.display());
            owner = owner.replace("# model is unset", &loaded);
        }
        // Given to both as a flag, wherever it came from.
        let source = |printed: &str| match self.serve.source("runtime-dir") {
            Some(source) => with_source(printed, "runtime-dir", &source.to_string()),
            None => printed.to_owned(),
        };
        [self.serve.to_toml(), source(&owner), source(&self.worker.printed)].join("\n")
    }

    /// Limits for the worker.
    pub fn worker_policy(&self) -> Policy {
        let seconds = |n: Option<u64>| n.filter(|n| *n > 0).map(Duration::from_secs);
        Policy {
            attempts: self.serve.values.start_attempts.unwrap_or(5),
            start_timeout: seconds(self.serve.values.start_timeout),
            stop_timeout: seconds(self.serve.values.stop_timeout),
        }
    }

    /// Limits for the owner: how long a load may take is its own setting.
    pub fn owner_policy(&self) -> Policy {
        Policy { start_timeout: None, ..self.worker_policy() }
    }

    /// Creates the runtime directory, for this user only, and removes the sockets of supervisors that were killed.
    ///
    /// # Errors
    /// Exit code 2 when it cannot be used.
    pub fn create_dir(&self) -> anyhow::Result<()> {
        let unusable = |why: String| {
            let dir = self.dir.display();
            Failure::error(
                EXIT_USAGE,
                format!(
                    "[runtime_dir] {dir} cannot be the runtime directory: {why}; choose another with --runtime-dir"
                ),
            )
        };
        // A Unix socket's path has at most 107 bytes; the longest name here is that of a notification socket.
        let longest = self.dir.join("notify.worker.4194304").as_os_str().len();
        if longest > 107 {
            return Err(unusable(format!("its path is {} bytes too long for sockets inside it", longest - 107)));
        }
        let usable = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir).and_then(|()| {
            let probe = self.dir.join(format!("probe.{}", std::process::id()));
            let written = std::fs::write(&probe, b"x");
            // On a full disk it is there, empty.
            let removed = std::fs::remove_file(&probe);
            written.and(removed)
        });
        usable.map_err(|e| unusable(e.to_string()))
    }

    /// The models that the owner is going to load, absolute. Without any, the starter model if `ds4 pull` has fetched it.
    ///
    /// # Errors
    /// Exit code 4 when a file is not there, 2 when there is nothing to serve.
    pub fn models(&mut self) -> anyhow::Result<Vec<PathBuf>> {
        let mut paths: Vec<PathBuf> = match self.owner.config.get("model") {
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(PathBuf::from).collect(),
            Some(Value::String(path)) => vec![path.into()],
            _ => Vec::new(),
        };
        if paths.is_empty() {
            let starter = crate::pull::starter_path().filter(|p| p.exists()).ok_or_else(|| {
                Failure::error(
                    EXIT_USAGE,
                    "no model to serve: fetch the starter model with `ds4 pull`, or give --model FILE.gguf",
                )
            })?;
            self.owner.args.extend(["--model".into(), starter.clone().into()]);
            paths.push(starter);
        }
        for path in &mut paths {
            std::fs::File::open(&*path)
                .map_err(|e| Failure::error(EXIT_MODEL, format!("cannot open the model {}: {e}", path.display())))?;
            *path = std::fs::canonicalize(&*path)?;
        }
        Ok(paths)
    }
}

impl Program {
    /// Finds the executable beside this one and has it check its configuration (`--print-config`).
    /// The inner error is its refusal.
    fn checked(
        name: &str,
        section: &str,
        args: Vec<OsString>,
        more: &[OsString],
    ) -> anyhow::Result<Result<Self, Refusal>> {
        let path = sibling(name)?;
        let output = print_config(&path, &[args.as_slice(), more].concat())?;
        let errors = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let code = output.status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1);
            let text = errors.trim_end();
            let text = text.strip_prefix(&format!("{name}: ")).unwrap_or(text).to_owned();
            return Ok(Err(Refusal { code, text }));
        }
        let printed = String::from_utf8(output.stdout).context("the configuration is not UTF-8")?;
        let mut table: Table = printed.parse().with_context(|| format!("{name} --print-config printed no TOML"))?;
        let config = match table.remove(section) {
            Some(Value::Table(config)) => config,
            _ => anyhow::bail!("{name} --print-config printed no [{section}]"),
        };
        Ok(Ok(Self { path, args, config, printed }))
    }
}

/// What one process has against its configuration.
#[derive(Debug)]
struct Refusal {
    code: u8,
    text: String,
}

impl Refusal {
    /// As one error. What is wrong with the file as a whole is said by every process, and here once.
    fn all(refusals: impl Iterator<Item = Self>) -> anyhow::Error {
        let mut lines: Vec<String> = Vec::new();
        let mut code = None;
        for refusal in refusals {
            code.get_or_insert(refusal.code);
            let new: Vec<String> =
                refusal.text.lines().filter(|l| !lines.iter().any(|seen| seen == l)).map(String::from).collect();
            lines.extend(new);
        }
        Failure::error(code.unwrap_or(EXIT_USAGE), lines.join("\n"))
    }
}

/// A printed configuration with another source for `key`.
fn with_source(printed: &str, key: &str, source: &str) -> String {
    let line = |line: &str| match line.rsplit_once(" # ") {
        Some((value, _)) if value.starts_with(&format!("{key} = ")) => format!("{value} # {source}\n"),
        _ => format!("{line}\n"),
    };
    printed.lines().map(line).collect()
}

/// The executable `name` beside this one.
pub fn sibling(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this executable")?;
    let path = own.with_file_name(name);
    if !path.exists() {
        let dir = own.parent().unwrap_or(Path::new("/")).display();
        anyhow::bail!("{name} is not beside ds4 in {dir}; build or install it there");
    }
    Ok(path)
}

fn print_config(path: &Path, args: &[OsString]) -> anyhow::Result<Output> {
    let mut child = Command::new(path)
        .args(args)
        .arg("--print-config")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", path.display()))?;
    let begun = Instant::now();
    // A configuration is far smaller than a pipe's buffer, so the child never waits for us to read.
    while child.try_wait()?.is_none() {
        if begun.elapsed() > CHECK_LIMIT {
            child.kill()?;
            child.wait()?;
            anyhow::bail!("{} --print-config did not end within {CHECK_LIMIT:?}", path.display());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(child.wait_with_output()?)
}

/// Removes what killed supervisors left in `dir`, whoever has their pids by this time. The caller holds the lock and has made
/// nothing of that kind yet.
pub fn remove_left(dir: &Path) {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in names.filter(|e| e.file_name().to_str().is_some_and(is_of_a_supervisor)) {
        let _ = std::fs::remove_file(entry.path());
    }
}

/// `notify.NAME.PID` and `probe.PID`: what a supervisor makes for itself alone.
fn is_of_a_supervisor(name: &str) -> bool {
    let pid = |rest: &str| rest.rsplit('.').next().is_some_and(|pid| pid.parse::<u32>().is_ok());
    let owned = |rest: &str| ["owner.", "worker."].iter().any(|n| rest.starts_with(n));
    let notify = name.strip_prefix(NOTIFY_PREFIX).is_some_and(owned);
    (notify || name.starts_with("probe.")) && pid(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_processes_say_is_said_once() {
        let refusal = |code, text: &str| Refusal { code, text: text.into() };
        let all = [refusal(2, "f: unknown `x`\nserve bad"), refusal(2, "f: unknown `x`\nowner bad\n |\n |")];
        let error = Refusal::all(all.into_iter());
        assert_eq!(error.to_string(), "f: unknown `x`\nserve bad\nowner bad\n |\n |");
        assert_eq!(Failure::code_of(&error), 2);
    }

    #[test]
    fn a_value_gets_the_source_that_it_had_first() {
        let printed = "[owner]\nruntime-dir = \"/a # b\" # flag\nlog = \"info\" # flag\n";
        let want = "[owner]\nruntime-dir = \"/a # b\" # environment X\nlog = \"info\" # flag\n";
        assert_eq!(with_source(printed, "runtime-dir", "environment X"), want);
    }

    #[test]
    fn what_killed_supervisors_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let left = ["notify.owner.12", "notify.worker.1", "probe.7"];
        let others = ["owner.sock", "serve.lock", "notify.owner", "notify.mine.7", "probe.txt"];
        for name in left.iter().chain(&others) {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        remove_left(dir.path());
        for name in left {
            assert!(!dir.path().join(name).exists(), "{name}");
        }
        for name in others {
            assert!(dir.path().join(name).exists(), "{name}");
        }
    }
}
