//! Command-line parsing that remembers where each value came from.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::parser::ValueSource;

use crate::Source;

/// Flags that every configured process has.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ConfigArgs {
    /// Configuration file (TOML, sections [owner], [worker], [serve]) [default: ds4/ds4.toml in $XDG_CONFIG_HOME or
    /// ~/.config, else /etc/ds4/ds4.toml, when it exists]
    #[arg(long, env = "DS4_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the effective configuration as TOML, each value with its source, and exit
    #[arg(long)]
    pub print_config: bool,
}

impl ConfigArgs {
    /// The file to read and whether it must exist.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        if let Some(path) = &self.config {
            return Some(path.clone());
        }
        let base = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        let user = base("XDG_CONFIG_HOME").or_else(|| base("HOME").map(|h| h.join(".config")));
        let user = user.map(|c| c.join("ds4/ds4.toml"));
        user.into_iter().chain([PathBuf::from("/etc/ds4/ds4.toml")]).find(|p| p.exists())
    }
}

/// Which values were given as a flag or by the environment, by kebab-case key.
#[derive(Clone, Debug, Default)]
pub struct Origins(BTreeMap<String, Source>);

impl Origins {
    /// Reads them from the matches of `command`, which for a subcommand are the subcommand's own.
    pub fn new(command: &clap::Command, matches: &clap::ArgMatches) -> Self {
        let mut origins = BTreeMap::new();
        for arg in command.get_arguments() {
            let id = arg.get_id().as_str();
            let source = match matches.try_contains_id(id).ok().and_then(|_| matches.value_source(id)) {
                Some(ValueSource::CommandLine) => Source::Flag,
                Some(ValueSource::EnvVariable) => {
                    Source::Environment(arg.get_env().map(|e| e.to_string_lossy().into_owned()).unwrap_or_default())
                }
                _ => continue,
            };
            origins.insert(id.replace('_', "-"), source);
        }
        Self(origins)
    }

    /// Source of `key`, or a flag when clap does not know it.
    pub(crate) fn of(&self, key: &str) -> Source {
        self.0.get(key).cloned().unwrap_or(Source::Flag)
    }
}

/// Parses the process's arguments; prints help or the error and exits (0 or 2) as clap does.
pub fn parse<C: clap::Parser>() -> (C, Origins) {
    try_parse_from(std::env::args_os()).unwrap_or_else(|e| e.exit())
}

/// [`parse`] over given arguments, the program's name first.
///
/// # Errors
/// Bad usage, or a request for help or version.
pub fn try_parse_from<C, I, A>(args: I) -> Result<(C, Origins), clap::Error>
where
    C: clap::Parser,
    I: IntoIterator<Item = A>,
    A: Into<OsString> + Clone,
{
    let mut command = C::command();
    let matches = command.try_get_matches_from_mut(args)?;
    let origins = Origins::new(&command, &matches);
    let cli = C::from_arg_matches(&matches).map_err(|e| e.format(&mut command))?;
    Ok((cli, origins))
}

/// Reads a listening address: `ADDRESS:PORT`, with `localhost` for 127.0.0.1.
///
/// # Errors
/// What is expected instead.
pub fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let numeric = text.strip_prefix("localhost:").map_or_else(|| text.to_owned(), |port| format!("127.0.0.1:{port}"));
    numeric.parse().map_err(|_| "give an address and a port, such as 127.0.0.1:8080".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_addresses_have_a_port_and_localhost_is_known() {
        assert_eq!(listen_address("localhost:80"), Ok(SocketAddr::from(([127, 0, 0, 1], 80))));
        assert_eq!(listen_address("[::1]:8080").unwrap().port(), 8080);
        for bad in ["8080", "localhost", "example.org:80", "127.0.0.1:99999"] {
            assert!(listen_address(bad).unwrap_err().contains("such as"), "{bad}");
        }
    }
}
