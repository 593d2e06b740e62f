//! Flags, environment and the `[owner]` section of the configuration file.

use std::path::PathBuf;
use std::time::Duration;

use ds4_settings::{ConfigArgs, ConfigErrors, Layered, Origins, Problems, default_runtime_dir, layer};
use serde::{Deserialize, Serialize};

use crate::loader::backend::Choice;

/// Every setting of the owner; unset ones come from the environment, the file or [`Flags::defaults`].
#[derive(clap::Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Flags {
    /// GGUF to load at start: the file, or any shard of a split model (may be given several times)
    #[arg(long, env = "DS4_MODEL", value_name = "PATH")]
    pub model: Option<Vec<PathBuf>>,
    /// Name to serve the model under instead of the catalog's (with exactly one --model)
    #[arg(long, env = "DS4_MODEL_NAME", value_name = "NAME")]
    pub name: Option<String>,
    /// Refuse the model unless its content hash is this one (with exactly one --model)
    #[arg(long, env = "DS4_EXPECT_BLAKE3", value_name = "HEX")]
    pub expect_blake3: Option<String>,
    /// Directory of the sockets broker.sock and owner.sock [default: $XDG_RUNTIME_DIR/ds4; without that /run/ds4 for
    /// root, /tmp/ds4-UID for others]
    #[arg(long, env = "DS4_RUNTIME_DIR", value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// User id that may attach besides root and the owner's own (may be given several times)
    #[arg(long, env = "DS4_ALLOW_UID", value_name = "UID")]
    pub allow_uid: Option<Vec<u32>>,
    /// Seconds that a load may take
    #[arg(long, env = "DS4_LOAD_DEADLINE", value_name = "SECONDS")]
    pub load_deadline: Option<u32>,
    /// Seconds that readers may take to go on stop or unload, until they get SIGTERM
    #[arg(long, env = "DS4_DRAIN_DEADLINE", value_name = "SECONDS")]
    pub drain_deadline: Option<u32>,
    /// Memory that a load must leave free for the rest of the machine
    #[arg(long, env = "DS4_RESERVE_MIB", value_name = "MIB")]
    pub reserve_mib: Option<u64>,
    /// Whose memory holds the weights: auto (a CUDA device where there is one), memfd (the machine's), or cuda-vmm
    #[arg(long, env = "DS4_BACKEND", value_name = "BACKEND")]
    pub backend: Option<Choice>,
    /// Accept models of the catalog's development entries, which nobody has validated
    #[arg(long, visible_alias = "allow-dev", env = "DS4_ALLOW_DEV_MODELS", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", value_name = "BOOL")]
    pub allow_dev_models: Option<bool>,
    /// Stay up without a model whose load at start failed
    #[arg(long, env = "DS4_KEEP_GOING", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_name = "BOOL")]
    pub keep_going: Option<bool>,
    /// Log filter, e.g. info, debug, ds4_weight_owner=trace
    #[arg(long, env = "DS4_LOG", value_name = "FILTER")]
    pub log: Option<String>,
}

impl Flags {
    /// Built-in values.
    pub fn defaults() -> Self {
        Self {
            runtime_dir: Some(default_runtime_dir()),
            load_deadline: Some(600),
            drain_deadline: Some(30),
            reserve_mib: Some(512),
            // Not `auto` as long as workers compute on the CPU only: they could not map what a GPU holds.
            backend: Some(Choice::Memfd),
            allow_dev_models: Some(false),
            keep_going: Some(false),
            log: Some("info".into()),
            ..Self::default()
        }
    }
}

/// The command line.
#[derive(clap::Parser)]
#[command(
    name = "ds4-weight-owner",
    version,
    about = "Holds the weights of models in memory and lends them to workers.",
    after_help = "Exit codes: 0 stopped, 2 bad usage or configuration, 4 model bad or refused, 5 not enough memory, 1 other."
)]
pub struct Cli {
    /// Where the configuration comes from.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Its values.
    #[command(flatten)]
    pub flags: Flags,
    /// Print what loading each --model would take and whether it fits, allocate nothing, and exit
    #[arg(long)]
    pub dry_run: bool,
}

/// The settings, checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// Models to load at start.
    pub models: Vec<PathBuf>,
    /// Name of the only model; empty: the catalog's.
    pub name: String,
    /// Content hash of the only model, in lower-case hexadecimal.
    pub expect_blake3: Option<String>,
    /// Directory of the sockets.
    pub runtime_dir: PathBuf,
    /// Users that may attach besides root and our own.
    pub allow_uids: Vec<u32>,
    /// How long a load may take.
    pub load_deadline: Duration,
    /// How long readers may take to go.
    pub drain_deadline: Duration,
    /// Bytes that a load must leave free.
    pub reserve_bytes: u64,
    /// Whose memory.
    pub backend: Choice,
    /// Accept development entries of the catalog.
    pub allow_dev_models: bool,
    /// Stay up when a load at start fails.
    pub keep_going: bool,
    /// Log filter.
    pub log: String,
}

/// Merges the layers and checks the values.
///
/// # Errors
/// Every problem at once.
pub fn resolve(cli: &Cli, origins: &Origins) -> Result<(Options, Layered<Flags>), ConfigErrors> {
    let layered = layer("owner", &cli.config, cli.flags.clone(), Flags::defaults(), origins, |flags, problems| {
        check(flags, cli.dry_run, problems);
    })?;
    let v = &layered.values;
    let options = Options {
        models: v.model.clone().unwrap_or_default(),
        name: v.name.clone().unwrap_or_default(),
        expect_blake3: v.expect_blake3.as_deref().and_then(|h| parse_blake3(h).ok()),
        runtime_dir: v.runtime_dir.clone().unwrap_or_else(default_runtime_dir),
        allow_uids: v.allow_uid.clone().unwrap_or_default(),
        load_deadline: Duration::from_secs(v.load_deadline.unwrap_or(600).into()),
        drain_deadline: Duration::from_secs(v.drain_deadline.unwrap_or(30).into()),
        reserve_bytes: v.reserve_mib.unwrap_or(0).saturating_mul(1 << 20),
        backend: v.backend.unwrap_or_default(),
        allow_dev_models: v.allow_dev_models.unwrap_or(false),
        keep_going: v.keep_going.unwrap_or(false),
        log: v.log.clone().unwrap_or_default(),
    };
    Ok((options, layered))
}

fn check(flags: &Flags, dry_run: bool, problems: &mut Problems) {
    let models = flags.model.as_ref().map_or(0, Vec::len);
    for (key, given) in [("name", flags.name.is_some()), ("expect-blake3", flags.expect_blake3.is_some())] {
        if given && models != 1 {
            problems.key(key, format_args!("needs exactly one --model, {models} are given"));
        }
    }
    if flags.name.as_ref().is_some_and(|n| n.is_empty() || n.len() > 200 || n.chars().any(char::is_control)) {
        problems.key("name", "must be 1 to 200 printable bytes");
    }
    if let Some(Err(e)) = flags.expect_blake3.as_deref().map(parse_blake3) {
        problems.key("expect-blake3", e);
    }
    if flags.load_deadline == Some(0) {
        problems.key("load-deadline", "is 0: give at least 1 second");
    }
    if flags.log.as_ref().is_some_and(|l| l.parse::<tracing_subscriber::filter::Targets>().is_err()) {
        problems.key("log", "is no log filter; try info or debug");
    }
    if dry_run && models == 0 {
        problems.other("--dry-run needs a --model to plan for");
    }
}

/// A BLAKE3 in hexadecimal, made lower-case.
///
/// # Errors
/// What is wrong with it.
pub fn parse_blake3(hex: &str) -> Result<String, String> {
    if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(format!("is {hex:?}, which is not a BLAKE3 of 64 hexadecimal digits"));
    }
    Ok(hex.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(args: &[&str]) -> Result<Options, String> {
        let args = ["ds4-weight-owner", "--config", "/dev/null"].iter().chain(args).copied();
        let (cli, origins) = ds4_settings::try_parse_from::<Cli, _, _>(args).map_err(|e| e.to_string())?;
        resolve(&cli, &origins).map(|(options, _)| options).map_err(|e| e.to_string())
    }

    #[test]
    fn flags_reach_the_options() {
        let hash = "AB".repeat(32);
        let options = run(&[
            "--model",
            "/m.gguf",
            "--name",
            "m",
            "--expect-blake3",
            &hash,
            "--allow-uid",
            "7",
            "--allow-uid",
            "8",
            "--reserve-mib",
            "3",
            "--allow-dev",
            "--drain-deadline",
            "0",
            "--backend",
            "auto",
        ])
        .unwrap();
        assert_eq!(options.models, [PathBuf::from("/m.gguf")]);
        assert_eq!(options.expect_blake3.unwrap(), "ab".repeat(32));
        assert_eq!((options.allow_uids, options.reserve_bytes), (vec![7, 8], 3 << 20));
        assert!(options.allow_dev_models && !options.keep_going);
        assert_eq!(options.backend, Choice::Auto);
        assert!(run(&["--backend", "vulkan"]).unwrap_err().contains("cuda-vmm"));
        assert_eq!((options.load_deadline.as_secs(), options.drain_deadline.as_secs()), (600, 0));
    }

    #[test]
    fn l8_bad_values_are_all_named() {
        let text =
            run(&["--name", "x", "--expect-blake3", "12", "--load-deadline", "0", "--log", "a=b=c", "--dry-run"])
                .unwrap_err();
        for part in [
            "--name needs exactly one --model",
            "64 hexadecimal",
            "--load-deadline is 0",
            "--log is no log",
            "--dry-run needs",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(run(&["--colour"]).is_err());
    }
}
