//! The compact text form of continuation vectors.
//!
//! Lines; `#` begins a comment line. A case is `case ID CTX STEPS PROMPTFILE`, then for each of STEPS steps
//! `step INDEX HEX NTOP` and NTOP lines `top HEX LOGPROB`, then `end`. HEX is a token's bytes, PROMPTFILE the exact user text.
//! CTX is the context that the recording program was given; nothing depends on it here.

use std::path::{Path, PathBuf};

use super::case::{Case, Step, UNKNOWN, malformed, read_text};
use crate::dump::shown::unhex;
use crate::generate::Effort;

/// Most steps of a case and most candidates of a step: beyond it a file is damaged.
const MAX_COUNT: usize = 100_000;

/// A case that is being read.
struct Open {
    case: Case,
    steps: usize,
    /// Candidates that the last step still lacks.
    missing: usize,
    line: usize,
}

/// The cases of a file.
///
/// # Errors
/// Exit code 2, with file and line.
pub fn read(path: &Path) -> anyhow::Result<Vec<Case>> {
    parse(path, &read_text(path)?)
}

fn parse(path: &Path, text: &str) -> anyhow::Result<Vec<Case>> {
    let mut cases: Vec<Case> = Vec::new();
    let mut open: Option<Open> = None;
    for (line, content) in (1..).zip(text.lines()) {
        let bad = |what: String| malformed(path, line, what);
        let content = content.trim();
        if content.is_empty() || content.starts_with('#') {
            continue;
        }
        let (word, rest) = content.split_once(char::is_whitespace).unwrap_or((content, ""));
        match (word, &mut open) {
            ("case", None) => {
                let (case, steps) = begin(path, rest).map_err(bad)?;
                if cases.iter().any(|c| c.id == case.id) {
                    return Err(bad(format!("case {} is there already", case.id)));
                }
                open = Some(Open { case, steps, missing: 0, line });
            }
            ("case", Some(o)) => return Err(bad(format!("case {} of line {} has no end", o.case.id, o.line))),
            ("step", Some(o)) => o.step(rest).map_err(bad)?,
            ("top", Some(o)) => o.top(rest).map_err(bad)?,
            ("end", Some(o)) if rest.is_empty() => {
                o.complete().map_err(bad)?;
                cases.extend(open.take().map(|o| o.case));
            }
            ("step" | "top" | "end", None) => return Err(bad(format!("`{word}` outside of a case"))),
            _ => return Err(bad(format!("`{content}` is no line of a vector file"))),
        }
    }
    if let Some(o) = open {
        return Err(malformed(path, text.lines().count(), format!("the file ends inside case {}", o.case.id)));
    }
    if cases.is_empty() {
        return Err(malformed(path, text.lines().count().max(1), "the file has no case"));
    }
    Ok(cases)
}

fn begin(path: &Path, rest: &str) -> Result<(Case, usize), String> {
    let mut words = rest.splitn(4, char::is_whitespace);
    let mut word = || words.next().map(str::trim).filter(|w| !w.is_empty());
    let (Some(id), Some(context), Some(steps), Some(file)) = (word(), word(), word(), word()) else {
        return Err("expected `case ID CTX STEPS PROMPTFILE`".into());
    };
    count(context, "the context")?;
    let steps = count(steps, "the number of steps")?;
    if steps == 0 {
        return Err("a case needs at least one step".into());
    }
    let file = find(path, file)?;
    let prompt = std::fs::read_to_string(&file).map_err(|e| format!("prompt file {}: {e}", file.display()))?;
    let case = Case {
        id: id.into(),
        prompt,
        system: None,
        raw: false,
        thinking: Some(Effort::Off),
        prompt_tokens: None,
        steps: Vec::new(),
    };
    Ok((case, steps))
}

/// Published files name their prompts from the top of their repository: the file is looked for beside the vectors, then in
/// each directory above, then from here.
fn find(vectors: &Path, name: &str) -> Result<PathBuf, String> {
    let absolute = std::path::absolute(vectors).map_err(|e| e.to_string())?;
    let places = absolute.ancestors().skip(1).map(|dir| dir.join(name)).chain([PathBuf::from(name)]);
    let mut places = places.filter(|p| p.is_file());
    places.next().ok_or_else(|| {
        format!("prompt file {name} is neither beside the vectors, nor in a directory above, nor in the current one")
    })
}

fn count(word: &str, what: &str) -> Result<usize, String> {
    let number = word.parse::<usize>().map_err(|_| format!("{what} is `{word}`, expected a whole number"))?;
    // Contexts reach a million and more; nothing is allocated for them.
    if number > MAX_COUNT && what != "the context" {
        return Err(format!("{what} is {number}, at most {MAX_COUNT} can be meant"));
    }
    Ok(number)
}

fn token(word: &str) -> Result<Vec<u8>, String> {
    unhex(word).filter(|b| !b.is_empty()).ok_or_else(|| format!("`{word}` is no token in hex digits"))
}

impl Open {
    fn step(&mut self, rest: &str) -> Result<(), String> {
        self.no_candidate_is_missing()?;
        let words: Vec<&str> = rest.split_whitespace().collect();
        let [index, bytes, top] = words[..] else { return Err("expected `step INDEX HEX NTOP`".into()) };
        let index = count(index, "the step's index")?;
        if index != self.case.steps.len() {
            return Err(format!("step {index} stands where step {} belongs", self.case.steps.len()));
        }
        if index >= self.steps {
            return Err(format!("step {index} of a case of {}", self.steps));
        }
        self.missing = count(top, "the number of candidates")?;
        self.case.steps.push(Step { token: token(bytes)?, top: Vec::new() });
        Ok(())
    }

    fn top(&mut self, rest: &str) -> Result<(), String> {
        let words: Vec<&str> = rest.split_whitespace().collect();
        let [bytes, logprob] = words[..] else { return Err("expected `top HEX LOGPROB`".into()) };
        let Some(step) = self.case.steps.last_mut() else { return Err("`top` before the first step".into()) };
        let Some(left) = self.missing.checked_sub(1) else {
            return Err(format!("more candidates than the {} of their step", step.top.len()));
        };
        let value = logprob.parse::<f64>().ok().filter(|v| v.is_finite() && *v <= 1e-3);
        let value = value.ok_or_else(|| format!("`{logprob}` is no log-probability"))?;
        self.missing = left;
        let token = token(bytes)?;
        if value > UNKNOWN {
            step.top.push((token, value));
        }
        Ok(())
    }

    fn no_candidate_is_missing(&self) -> Result<(), String> {
        match self.missing {
            0 => Ok(()),
            n => Err(format!("the last step lacks {n} of its candidates")),
        }
    }

    fn complete(&self) -> Result<(), String> {
        self.no_candidate_is_missing()?;
        if self.case.steps.len() == self.steps {
            return Ok(());
        }
        Err(format!("case {} has {} steps, not {}", self.case.id, self.case.steps.len(), self.steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# made by hand\n\ncase one 16384 2 prompts/one two.txt\nstep 0 416461 2\ntop 416461 -0.5\ntop 20C3A9 -9999\n\
        step 1 0a 0\nend\ncase two 4096 1 prompts/one two.txt\nstep 0 31 1\ntop 31 0\nend\n";

    fn dir() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("prompts")).unwrap();
        std::fs::create_dir_all(dir.path().join("deep/er")).unwrap();
        std::fs::write(dir.path().join("prompts/one two.txt"), "Chi era?\n").unwrap();
        dir
    }

    fn parsed(text: &str) -> Result<Vec<Case>, String> {
        let dir = dir();
        parse(&dir.path().join("deep/er/x.vec"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn deepseek_v4_a_vector_file_is_read() {
        let cases = parsed(GOOD).unwrap();
        assert_eq!(cases.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), ["one", "two"]);
        assert_eq!(cases[0].prompt, "Chi era?\n", "the prompt is taken as it is, found in a directory above");
        assert_eq!(cases[0].steps[0], Step { token: b"Ada".to_vec(), top: vec![(b"Ada".to_vec(), -0.5)] });
        assert_eq!(cases[0].steps[1], Step { token: b"\n".to_vec(), top: vec![] });
        assert_eq!(cases[1].steps[0].top, [(b"1".to_vec(), 0.0)]);
    }

    #[test]
    fn deepseek_v4_a_malformed_vector_file_is_refused_by_line() {
        let first = "case one 9 1 prompts/one two.txt\n";
        let cases: [(&str, usize, &str); 19] = [
            ("", 1, "no case"),
            ("# only\n# comments\n", 2, "no case"),
            ("step 0 41 0\n", 1, "outside of a case"),
            ("case one 9 1\n", 1, "case ID CTX STEPS PROMPTFILE"),
            ("case one nine 1 prompts/one two.txt\n", 1, "nine"),
            ("case one 9 0 prompts/one two.txt\n", 1, "at least one"),
            ("case one 9 999999999 prompts/one two.txt\n", 1, "999999999"),
            ("case one 9 1 prompts/none.txt\n", 1, "prompts/none.txt"),
            (&format!("{first}step 1 41 0\n"), 2, "step 1 stands where step 0"),
            (&format!("{first}step 0 41\n"), 2, "step INDEX HEX NTOP"),
            (&format!("{first}step 0 4x 0\n"), 2, "4x"),
            (&format!("{first}step 0 41 0\nstep 1 41 0\n"), 3, "step 1 of a case of 1"),
            (&format!("{first}step 0 41 1\nend\n"), 3, "lacks 1"),
            (&format!("{first}top 41 0\n"), 2, "before the first step"),
            (&format!("{first}step 0 41 0\ntop 41 0\n"), 3, "more candidates"),
            (&format!("{first}step 0 41 1\ntop 41 nan\n"), 3, "nan"),
            (&format!("{first}step 0 41 1\ntop 41 0.5\n"), 3, "0.5"),
            (&format!("{first}end\n"), 2, "has 0 steps, not 1"),
            (&format!("{first}nonsense here\n"), 2, "nonsense here"),
        ];
        for (text, line, wanted) in cases {
            let e = parsed(text).unwrap_err();
            assert!(e.contains(&format!("x.vec:{line}: ")) && e.contains(wanted), "{text:?}: {e}");
        }
        let cut = &GOOD[..GOOD.len() - 4];
        assert!(parsed(cut).unwrap_err().contains("ends inside case two"));
        let nested = GOOD.replacen("end\n", "", 1);
        assert!(parsed(&nested).unwrap_err().contains("x.vec:8: case one of line 3 has no end"));
        let twice = GOOD.replace("case two", "case one");
        assert!(parsed(&twice).unwrap_err().contains("case one is there already"));
    }
}
