//! Continuation vectors in memory, and where they come from.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use ds4_settings::EXIT_USAGE;

use super::{official, vec_file};
use crate::failure::Failure;
use crate::generate::Effort;

/// A prompt and what followed it when it was recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Its name.
    pub id: String,
    /// The user's text, or with `raw` the text to continue.
    pub prompt: String,
    /// System message.
    pub system: Option<String>,
    /// Continue the prompt without a chat layout.
    pub raw: bool,
    /// How much the model thought; official captures were made without. `None`: what it does unasked.
    pub thinking: Option<Effort>,
    /// Prompt tokens that the recorder counted, control tokens included.
    pub prompt_tokens: Option<u32>,
    /// What followed.
    pub steps: Vec<Step>,
}

/// One recorded step.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Bytes of the token that was taken.
    pub token: Vec<u8>,
    /// Bytes and natural-log probability of candidates.
    pub top: Vec<(Vec<u8>, f64)>,
}

/// Candidates at or below this log-probability are the recorder's way of saying that it knows nothing of them.
pub const UNKNOWN: f64 = -1000.0;

/// A refusal of a recorded file, by place.
pub fn malformed(path: &Path, line: usize, what: impl std::fmt::Display) -> anyhow::Error {
    Failure::error(EXIT_USAGE, format!("{}:{line}: {what}", path.display()))
}

/// The text of a file.
pub fn read_text(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).map_err(|e| Failure::error(EXIT_USAGE, format!("{}: {e}", path.display())))
}

/// The cases of files and directories. A directory stands for the `.vec` files in it; if it has none, for the
/// `.official.json` files in it or in its folder `official`.
///
/// # Errors
/// Exit code 2 for what is missing, malformed or named twice.
pub fn collect(paths: &[PathBuf]) -> anyhow::Result<Vec<Case>> {
    let mut cases: Vec<Case> = Vec::new();
    for path in paths {
        let files = if path.is_dir() { files_of(path)? } else { vec![path.clone()] };
        for file in files {
            let found = match file.extension().and_then(|e| e.to_str()) {
                Some("vec") => vec_file::read(&file)?,
                Some("json") => vec![official::read(&file)?],
                _ => {
                    let text = format!("{}: neither .vec nor .json; give a vector file or a directory", file.display());
                    return Err(Failure::error(EXIT_USAGE, text));
                }
            };
            for case in found {
                if cases.iter().any(|c| c.id == case.id) {
                    let text = format!("{}: case {} is there already; give each case once", file.display(), case.id);
                    return Err(Failure::error(EXIT_USAGE, text));
                }
                cases.push(case);
            }
        }
    }
    Ok(cases)
}

fn files_of(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let ending = |dir: &Path, suffix: &str| -> anyhow::Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
        let mut files: Vec<PathBuf> = entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
        files.retain(|f| f.to_string_lossy().ends_with(suffix));
        files.sort();
        Ok(files)
    };
    let mut files = ending(dir, ".vec")?;
    for place in [dir.to_path_buf(), dir.join("official")] {
        if files.is_empty() && place.is_dir() {
            files = ending(&place, ".official.json")?;
        }
    }
    if files.is_empty() {
        return Err(Failure::error(EXIT_USAGE, format!("{}: no .vec and no .official.json in it", dir.display())));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_stands_for_its_vectors() {
        let dir = tempfile::tempdir().unwrap();
        let here = |name: &str| dir.path().join(name);
        let collected = || collect(&[dir.path().to_path_buf()]);
        assert!(collected().unwrap_err().to_string().contains("no .vec"));
        std::fs::create_dir(here("official")).unwrap();
        let json = r#"{"schema":"ds4-official-logprobs-v1","id":"ID","prompt":"p",
            "steps":[{"step":0,"token":{"text":"a","bytes":[97]},"top_logprobs":[]}]}"#;
        std::fs::write(here("official/b.official.json"), json.replace("ID", "b")).unwrap();
        std::fs::write(here("official/a.official.json"), json.replace("ID", "a")).unwrap();
        std::fs::write(here("official/readme.json"), "{}").unwrap();
        let ids = |cases: Vec<Case>| cases.into_iter().map(|c| c.id).collect::<Vec<_>>();
        assert_eq!(ids(collected().unwrap()), ["a", "b"]);
        std::fs::write(here("p.txt"), "prompt").unwrap();
        std::fs::write(here("x.vec"), "case v 10 1 p.txt\nstep 0 61 0\nend\n").unwrap();
        assert_eq!(ids(collected().unwrap()), ["v"], "the compact file is preferred");
        let twice = collect(&[here("x.vec"), here("x.vec")]).unwrap_err();
        assert!(twice.to_string().contains("case v is there already"), "{twice}");
        let other = collect(&[here("p.txt")]).unwrap_err();
        assert_eq!(Failure::code_of(&other), EXIT_USAGE);
        assert!(collect(&[here("none.vec")]).unwrap_err().to_string().contains("none.vec"));
    }
}
