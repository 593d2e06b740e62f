//! The merge itself: flags and environment over the file's section over defaults.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{DeserializeOwned, Deserializer, Visitor};
use serde::ser::Serialize;
use toml::{Table, Value};

use crate::{ConfigArgs, Origins};

/// Sections of the file, one a process.
pub const SECTIONS: [&str; 3] = ["owner", "worker", "serve"];
/// Keys that may stand above the sections, for every process that has them.
pub const SHARED_KEYS: [&str; 1] = ["runtime-dir"];

/// Where an effective value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The command line.
    Flag,
    /// The named environment variable.
    Environment(String),
    /// The configuration file.
    File(PathBuf),
    /// Built in.
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("flag"),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// Everything that is wrong with a configuration, one line each.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct ConfigErrors(pub Vec<String>);

/// Collects what validation finds, so that all of it is reported at once.
#[derive(Debug, Default)]
pub struct Problems {
    sources: BTreeMap<String, Source>,
    lines: Vec<String>,
}

impl Problems {
    /// Reports `message` about `key` (kebab-case), with the place where its value came from.
    pub fn key(&mut self, key: &str, message: impl fmt::Display) {
        match self.sources.get(key) {
            Some(Source::Flag) | None => self.lines.push(format!("--{key} {message}")),
            Some(source) => self.lines.push(format!("{key} (from {source}) {message}")),
        }
    }

    /// Reports a problem that is no single key's.
    pub fn other(&mut self, message: impl fmt::Display) {
        self.lines.push(message.to_string());
    }
}

/// Effective values of a section and the source of each.
#[derive(Debug)]
pub struct Layered<T> {
    /// The merged values; a key without flag, file entry and default is `None`.
    pub values: T,
    section: String,
    file: Option<PathBuf>,
    keys: &'static [&'static str],
    table: Table,
    sources: BTreeMap<String, Source>,
}

impl<T> Layered<T> {
    /// Source of `key` (kebab-case); `None` when it is unset.
    pub fn source(&self, key: &str) -> Option<&Source> {
        self.sources.get(key)
    }

    /// The configuration file that was read.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The section as a configuration file with the source of each value as a comment.
    pub fn to_toml(&self) -> String {
        let file = self.file.as_ref().map_or("no configuration file".into(), |f| format!("file {}", f.display()));
        let mut out = format!("# effective configuration: flag > environment > file > default; {file}\n");
        out.push_str(&format!("[{}]\n", self.section));
        for key in self.keys {
            match (self.table.get(*key), self.sources.get(*key)) {
                (Some(value), Some(source)) => out.push_str(&format!("{key} = {value} # {source}\n")),
                _ => out.push_str(&format!("# {key} is unset\n")),
            }
        }
        out
    }
}

/// Merges `flags` (as parsed, with their `origins`) over `section` of the file over `defaults`, then runs `validate`.
///
/// # Errors
/// All problems at once: an unreadable or malformed file, unknown sections and keys (with the nearest known one), values
/// of a wrong type, and whatever `validate` reports.
pub fn layer<T: Serialize + DeserializeOwned>(
    section: &str,
    config: &ConfigArgs,
    flags: T,
    defaults: T,
    origins: &Origins,
    validate: impl FnOnce(&T, &mut Problems),
) -> Result<Layered<T>, ConfigErrors> {
    let mut problems = Problems::default();
    let keys = field_names::<T>();
    let file = config.file();
    let from_file = file.as_deref().map(|path| read_section::<T>(path, section, keys, &mut problems));

    let mut table = Table::new();
    let mut sources = BTreeMap::new();
    let file_source = || Source::File(file.clone().unwrap_or_default());
    for (key, value) in to_table(&flags, &mut problems) {
        sources.insert(key.clone(), origins.of(&key));
        table.insert(key, value);
    }
    for (key, value) in from_file.unwrap_or_default() {
        sources.entry(key.clone()).or_insert_with(file_source);
        table.entry(key).or_insert(value);
    }
    for (key, value) in to_table(&defaults, &mut problems) {
        sources.entry(key.clone()).or_insert(Source::Default);
        table.entry(key).or_insert(value);
    }
    problems.sources = sources;
    match table.clone().try_into::<T>() {
        Ok(values) => {
            validate(&values, &mut problems);
            if problems.lines.is_empty() {
                let sources = problems.sources;
                return Ok(Layered { values, section: section.into(), file, keys, table, sources });
            }
        }
        Err(e) => problems.other(format_args!("[{section}]: {}", e.message())),
    }
    Err(ConfigErrors(problems.lines))
}

/// A section struct as a table; unset fields are left out.
fn to_table<T: Serialize>(values: &T, problems: &mut Problems) -> Table {
    Table::try_from(values).unwrap_or_else(|e| {
        problems.other(format_args!("a value cannot be expressed in TOML: {e}"));
        Table::new()
    })
}

/// The valid part of one section; what is invalid goes to `problems`.
fn read_section<T: DeserializeOwned>(path: &Path, section: &str, keys: &[&str], problems: &mut Problems) -> Table {
    let shown = path.display();
    let mut file = match std::fs::read_to_string(path)
        .map_err(|e| e.to_string())
        .and_then(|text| text.parse::<Table>().map_err(|e| e.to_string()))
    {
        Ok(file) => file,
        Err(e) => {
            problems.other(format_args!("configuration file {shown}: {}", e.trim_end()));
            return Table::new();
        }
    };
    let mut candidates = Table::new();
    for key in SHARED_KEYS {
        if let Some(value) = file.remove(key).filter(|_| keys.contains(&key)) {
            candidates.insert(key.into(), value);
        }
    }
    for name in file.keys().filter(|k| !SECTIONS.contains(&k.as_str())) {
        let known: Vec<&str> = SECTIONS.iter().chain(&SHARED_KEYS).copied().collect();
        problems.other(format_args!("{shown}: unknown section or key `{name}`{}", hint(name, &known)));
    }
    match file.remove(section) {
        Some(Value::Table(own)) => candidates.extend(own),
        Some(_) => problems.other(format_args!("{shown}: `{section}` is not a section; write [{section}]")),
        None => {}
    }
    candidates.retain(|key, value| {
        let key: &str = key;
        if !keys.contains(&key) {
            problems.other(format_args!("{shown}: [{section}] has an unknown key `{key}`{}", hint(key, keys)));
            return false;
        }
        // Alone, so that each bad value is found, not only the first.
        let alone = Table::from_iter([(key.to_string(), value.clone())]);
        match alone.try_into::<T>() {
            Ok(_) => true,
            Err(e) => {
                problems.other(format_args!("{shown}: [{section}] {key} = {value}: {}", e.message()));
                false
            }
        }
    });
    candidates
}

/// `; did you mean ...?` for the nearest of `known`, or the whole list.
fn hint(name: &str, known: &[&str]) -> String {
    match known.iter().map(|k| (edit_distance(name, k), *k)).min() {
        Some((distance, nearest)) if distance <= (nearest.len() / 2).max(2) => format!("; did you mean `{nearest}`?"),
        _ => format!("; known are {}", known.join(", ")),
    }
}

/// Levenshtein distance in characters, `_` and `-` being the same.
fn edit_distance(a: &str, b: &str) -> usize {
    let plain = |s: &str| s.to_lowercase().replace('_', "-").chars().collect::<Vec<_>>();
    let (a, b) = (plain(a), plain(b));
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The serialised field names of a struct, asked of its own `Deserialize`.
fn field_names<T: DeserializeOwned>() -> &'static [&'static str] {
    struct Names<'a>(&'a mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Names<'_> {
        type Error = serde::de::value::Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(serde::de::Error::custom("only asked for names"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Self::Error> {
            *self.0 = fields;
            self.deserialize_any(visitor)
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut names: &'static [&'static str] = &[];
    let _ = T::deserialize(Names(&mut names));
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Args, serde::Serialize, serde::Deserialize, Default, Debug, PartialEq, Clone)]
    #[serde(deny_unknown_fields, rename_all = "kebab-case")]
    struct Flags {
        #[arg(long, env = "DS4_SETTINGS_TEST_HTTP")]
        http: Option<std::net::SocketAddr>,
        #[arg(long)]
        max_batch: Option<u32>,
        #[arg(long)]
        model: Option<Vec<PathBuf>>,
        #[arg(long)]
        runtime_dir: Option<PathBuf>,
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        huge_pages: Option<bool>,
    }

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        config: ConfigArgs,
        #[command(flatten)]
        flags: Flags,
    }

    fn defaults() -> Flags {
        Flags { http: "127.0.0.1:8080".parse().ok(), max_batch: Some(16), ..Flags::default() }
    }

    fn run(file: &str, args: &[&str], section: &str) -> Result<Layered<Flags>, ConfigErrors> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ds4.toml");
        std::fs::write(&path, file).unwrap();
        let path = path.to_str().unwrap();
        let args = ["test", "--config", path].into_iter().chain(args.iter().copied());
        let (cli, origins) = crate::try_parse_from::<Cli, _, _>(args).unwrap();
        layer(section, &cli.config, cli.flags, defaults(), &origins, |v, p| {
            if v.max_batch == Some(0) {
                p.key("max-batch", "is 0: give at least 1");
            }
        })
    }

    #[test]
    fn flag_beats_file_beats_default() {
        let file = "[worker]\nmax-batch = 4\nhttp = '127.0.0.1:1'\nmodel = ['a', 'b']\n";
        let got = run(file, &["--max-batch", "8", "--huge-pages"], "worker").unwrap();
        assert_eq!(got.values.max_batch, Some(8));
        assert_eq!(got.values.http, "127.0.0.1:1".parse().ok());
        assert_eq!(got.values.model, Some(vec!["a".into(), "b".into()]));
        assert_eq!(got.values.huge_pages, Some(true));
        assert_eq!(got.values.runtime_dir, None);
        assert_eq!(got.source("max-batch"), Some(&Source::Flag));
        assert!(matches!(got.source("http"), Some(Source::File(_))));
        let other = run("[owner]\nmax-batch = 4\n", &[], "worker").unwrap();
        assert_eq!((other.values.max_batch, other.source("max-batch")), (Some(16), Some(&Source::Default)));
    }

    #[test]
    fn environment_is_named_as_the_source() {
        // Through clap's own machinery but without touching this process's environment, which other tests read too.
        let command = clap::Command::new("x").arg(clap::Arg::new("path_list").long("path-list").env("PATH"));
        let matches = command.clone().try_get_matches_from(["x"]).unwrap();
        let origins = Origins::new(&command, &matches);
        assert_eq!(origins.of("path-list"), Source::Environment("PATH".into()));
    }

    #[test]
    fn every_problem_is_reported_at_once() {
        let file = "[worker]\nmax_batch = 4\nhttp = 7\ncolour = 1\n[wroker]\n[serve]\nanything = 1\n";
        let errors = run(file, &["--max-batch", "0"], "worker").unwrap_err().0;
        let text = errors.join("\n");
        assert_eq!(errors.len(), 5, "{text}");
        assert!(text.contains("unknown key `max_batch`; did you mean `max-batch`?"), "{text}");
        assert!(text.contains("http = 7: invalid type"), "{text}");
        assert!(text.contains("unknown key `colour`"), "{text}");
        assert!(text.contains("`wroker`; did you mean `worker`?"), "{text}");
        assert!(text.contains("--max-batch is 0"), "{text}");
    }

    #[test]
    fn a_validation_error_names_the_file_that_set_the_value() {
        let text = run("[worker]\nmax-batch = 0\n", &[], "worker").unwrap_err().to_string();
        assert!(text.starts_with("max-batch (from file ") && text.ends_with("is 0: give at least 1"), "{text}");
    }

    #[test]
    fn shared_keys_apply_to_every_section_and_yield_to_its_own() {
        let file = "runtime-dir = '/a'\n[owner]\nruntime-dir = '/b'\n";
        assert_eq!(run(file, &[], "worker").unwrap().values.runtime_dir, Some("/a".into()));
        assert_eq!(run(file, &[], "owner").unwrap().values.runtime_dir, Some("/b".into()));
    }

    #[test]
    fn printed_configuration_is_a_configuration_file_with_the_same_meaning() {
        let got = run("[worker]\nmodel = [\"a 'b'\"]\n", &["--max-batch", "3"], "worker").unwrap();
        let text = got.to_toml();
        assert!(text.contains("max-batch = 3 # flag\n"), "{text}");
        assert!(text.contains("http = \"127.0.0.1:8080\" # default\n"), "{text}");
        assert!(text.contains("# runtime-dir is unset\n"), "{text}");
        assert_eq!(run(&text, &[], "worker").unwrap().values, got.values);
    }

    #[test]
    fn a_missing_or_malformed_file_is_named() {
        let config = ConfigArgs { config: Some("/nonexistent/ds4.toml".into()), print_config: false };
        let err = layer("worker", &config, Flags::default(), defaults(), &Origins::default(), |_, _| {}).unwrap_err();
        assert!(err.to_string().contains("/nonexistent/ds4.toml: No such file"), "{err}");
        let err = run("[worker\n", &[], "worker").unwrap_err().to_string();
        assert!(err.contains("ds4.toml") && err.contains("line 1"), "{err}");
        let err = run("worker = 3\n", &[], "worker").unwrap_err().to_string();
        assert!(err.contains("write [worker]"), "{err}");
    }

    #[test]
    fn unknown_flags_are_usage_errors() {
        assert!(Cli::try_parse_from(["test", "--colour"]).is_err());
    }
}
