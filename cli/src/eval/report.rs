//! What scoring found, for people and for scripts.

use serde_json::{Value, json};

use super::score::Problem;
use crate::ctl::render::{cell, table};
use crate::dump::shown::hex;

/// Problems of a case that a person is shown: a step can have a thousand.
const PRINTED: usize = 10;

/// What became of a case.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    /// Left out by name.
    Skipped,
    /// The worker refused it.
    Refused(String),
    /// Scored: the problems of each step.
    Scored { prompt_tokens: usize, steps: Vec<ScoredStep> },
}

/// A scored step.
#[derive(Debug, PartialEq)]
pub struct ScoredStep {
    /// Bytes of the local best token.
    pub token: Vec<u8>,
    /// Its log-probability.
    pub logprob: f64,
    /// Why it fails, if it does.
    pub problems: Vec<Problem>,
}

/// A case and its outcome.
#[derive(Debug, PartialEq)]
pub struct Line {
    /// The case's name.
    pub id: String,
    /// Prompt tokens that the recorder counted.
    pub recorded_prompt_tokens: Option<u32>,
    /// What became of it.
    pub outcome: Outcome,
}

impl Line {
    /// `pass`, `FAIL`, `skipped` or `REFUSED`.
    pub fn verdict(&self) -> &'static str {
        match &self.outcome {
            Outcome::Skipped => "skipped",
            Outcome::Refused(_) => "REFUSED",
            Outcome::Scored { steps, .. } if steps.iter().all(|s| s.problems.is_empty()) => "pass",
            Outcome::Scored { .. } => "FAIL",
        }
    }

    /// Whether it keeps the whole from passing.
    pub fn failed(&self) -> bool {
        matches!(self.verdict(), "FAIL" | "REFUSED")
    }

    fn passed_steps(&self) -> (usize, usize) {
        match &self.outcome {
            Outcome::Scored { steps, .. } => (steps.iter().filter(|s| s.problems.is_empty()).count(), steps.len()),
            _ => (0, 0),
        }
    }

    fn prompt(&self) -> String {
        match (&self.outcome, self.recorded_prompt_tokens) {
            (Outcome::Scored { prompt_tokens, .. }, Some(n)) if u32::try_from(*prompt_tokens) != Ok(n) => {
                format!("{prompt_tokens} (recorded {n})")
            }
            (Outcome::Scored { prompt_tokens, .. }, _) => prompt_tokens.to_string(),
            _ => String::new(),
        }
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        let (passed, count) = self.passed_steps();
        let mut value = json!({
            "id": self.id,
            "verdict": self.verdict().to_lowercase(),
            "recorded_prompt_tokens": self.recorded_prompt_tokens,
        });
        match &self.outcome {
            Outcome::Skipped => {}
            Outcome::Refused(why) => value["error"] = why.as_str().into(),
            Outcome::Scored { prompt_tokens, steps } => {
                value["prompt_tokens"] = (*prompt_tokens).into();
                value["steps_passed"] = passed.into();
                value["steps_scored"] = count.into();
                let step = |s: &ScoredStep| {
                    json!({
                        "token": {"text": String::from_utf8_lossy(&s.token), "hex": hex(&s.token)},
                        "logprob": s.logprob,
                        "problems": s.problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
                    })
                };
                value["steps"] = steps.iter().map(step).collect();
            }
        }
        value
    }
}

/// All cases as JSON. The model is unknown (empty) when it refused every case.
pub fn json(model: &str, lines: &[Line]) -> Value {
    let count = |verdict: &str| lines.iter().filter(|l| l.verdict() == verdict).count();
    json!({
        "model": Some(model).filter(|m| !m.is_empty()),
        "passed": count("pass"),
        "failed": lines.iter().filter(|l| l.failed()).count(),
        "skipped": count("skipped"),
        "cases": lines.iter().map(Line::json).collect::<Vec<_>>(),
    })
}

/// A table, then the problems one by one, then the sum.
pub fn text(model: &str, lines: &[Line]) -> String {
    let row = |l: &Line| {
        let (passed, count) = l.passed_steps();
        let steps = if count == 0 { String::new() } else { format!("{passed}/{count}") };
        vec![
            cell("case", l.id.as_str()),
            cell("prompt_tokens", l.prompt()),
            cell("steps", steps),
            cell("verdict", l.verdict()),
        ]
    };
    let mut text = table(&lines.iter().map(row).collect::<Vec<_>>());
    for line in lines {
        match &line.outcome {
            Outcome::Refused(why) => text.push_str(&format!("{}: {why}\n", line.id)),
            Outcome::Scored { steps, .. } => {
                let numbered = steps.iter().enumerate();
                let mut problems = numbered.flat_map(|(at, step)| step.problems.iter().map(move |p| (at, p)));
                for (at, problem) in problems.by_ref().take(PRINTED) {
                    text.push_str(&format!("{} step {at}: {problem}\n", line.id));
                }
                match problems.count() {
                    0 => {}
                    more => text.push_str(&format!("{}: {more} more problems; --json has them all\n", line.id)),
                }
            }
            Outcome::Skipped => {}
        }
    }
    let scored = lines.iter().filter(|l| l.verdict() != "skipped").count();
    let passed = lines.iter().filter(|l| l.verdict() == "pass").count();
    let model = if model.is_empty() { String::new() } else { format!("{model}: ") };
    text + &format!("{model}{passed} of {scored} cases pass\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> Vec<Line> {
        let step = |problems| ScoredStep { token: b"16".to_vec(), logprob: -0.5, problems };
        let scored = |steps| Outcome::Scored { prompt_tokens: 18, steps };
        let problem = Problem::Token { wanted: b"17".to_vec(), got: b"16".to_vec() };
        vec![
            Line { id: "good".into(), recorded_prompt_tokens: Some(18), outcome: scored(vec![step(vec![])]) },
            Line {
                id: "bad".into(),
                recorded_prompt_tokens: Some(19),
                outcome: scored(vec![step(vec![]), step(vec![problem])]),
            },
            Line { id: "left".into(), recorded_prompt_tokens: None, outcome: Outcome::Skipped },
            Line { id: "long".into(), recorded_prompt_tokens: None, outcome: Outcome::Refused("too long".into()) },
        ]
    }

    #[test]
    fn deepseek_v4_a_person_reads_a_table_and_the_problems() {
        assert_eq!(
            text("m", &lines()),
            "CASE  PROMPT TOKENS     STEPS  VERDICT\n\
             good  18                1/1    pass\n\
             bad   18 (recorded 19)  1/2    FAIL\n\
             left  -                 -      skipped\n\
             long  -                 -      REFUSED\n\
             bad step 1: \"16\" is most likely, not \"17\"\n\
             long: too long\n\
             m: 1 of 3 cases pass\n"
        );
    }

    #[test]
    fn deepseek_v4_a_person_is_not_flooded_with_problems() {
        let problem = |n: usize| Problem::NotInTop { candidate: format!("c{n}").into_bytes(), top: 1 };
        let step = |range: std::ops::Range<usize>| ScoredStep {
            token: b"16".to_vec(),
            logprob: -0.5,
            problems: range.map(problem).collect(),
        };
        let outcome = |steps| Outcome::Scored { prompt_tokens: 1, steps };
        let line = |id: &str, steps| Line { id: id.into(), recorded_prompt_tokens: None, outcome: outcome(steps) };
        let lines = [line("few", vec![step(0..PRINTED)]), line("many", vec![step(0..7), step(7..30)])];
        let shown = text("m", &lines);
        let of = |id: &str| shown.lines().filter(|l| l.starts_with(&format!("{id} step"))).count();
        assert_eq!((of("few"), of("many")), (PRINTED, PRINTED), "{shown}");
        assert!(shown.contains("many step 1: \"c9\"") && shown.contains("many: 20 more problems; --json"), "{shown}");
        assert!(!shown.contains("few: "), "{shown}");
        assert_eq!(json("m", &lines)["cases"][1]["steps"][1]["problems"].as_array().map(Vec::len), Some(23));
    }

    #[test]
    fn deepseek_v4_a_script_reads_counts_and_steps() {
        let value = json("m", &lines());
        assert_eq!((&value["passed"], &value["failed"], &value["skipped"]), (&json!(1), &json!(2), &json!(1)));
        assert_eq!(value["cases"][1]["verdict"], "fail");
        assert_eq!((&value["model"], &json("", &lines())["model"]), (&json!("m"), &Value::Null));
        assert!(text("", &lines()).ends_with("\n1 of 3 cases pass\n"));
        assert_eq!(value["cases"][1]["steps"][1]["problems"][0], "\"16\" is most likely, not \"17\"");
        assert_eq!((&value["cases"][1]["steps_passed"], &value["cases"][3]["error"]), (&json!(1), &json!("too long")));
        assert_eq!(value["cases"][0]["steps"][0]["token"]["hex"], "3136");
    }
}
