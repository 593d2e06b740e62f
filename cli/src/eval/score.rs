//! The rule by which a step passes: the local best token has the recorded bytes, and every recorded candidate is among the
//! local best with nearly its recorded log-probability. What follows is the continuation of the local token in any case.

use super::case::Step;
use crate::dump::shown::readable;

/// How much a model may differ.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A recorded candidate must be among this many most likely tokens.
    pub top: usize,
    /// Largest difference of its log-probabilities.
    pub tolerance: f64,
}

/// What the model says at a step: bytes and log-probability, most likely first.
pub type Local = Vec<(Vec<u8>, f64)>;

/// Why a step fails.
#[derive(Clone, Debug, PartialEq)]
pub enum Problem {
    /// Another token is the most likely one.
    Token { wanted: Vec<u8>, got: Vec<u8> },
    /// A candidate is not among the most likely.
    NotInTop { candidate: Vec<u8>, top: usize },
    /// A candidate is much more or less likely than it was.
    Logprob { candidate: Vec<u8>, recorded: f64, local: f64 },
    /// The worker stopped before this step.
    Missing,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Token { wanted, got } => write!(f, "{} is most likely, not {}", readable(got), readable(wanted)),
            Self::NotInTop { candidate, top } => write!(f, "{} is not among the best {top}", readable(candidate)),
            Self::Logprob { candidate, recorded, local } => {
                write!(f, "{} has logprob {local:.3}, recorded {recorded:.3}", readable(candidate))
            }
            Self::Missing => write!(f, "the worker ended before it"),
        }
    }
}

/// The problems of one step; none: it passes.
pub fn judge(recorded: &Step, local: &Local, limits: Limits) -> Vec<Problem> {
    let Some((best, _)) = local.first() else { return vec![Problem::Missing] };
    let mut problems = Vec::new();
    if *best != recorded.token {
        problems.push(Problem::Token { wanted: recorded.token.clone(), got: best.clone() });
    }
    for (candidate, logprob) in &recorded.top {
        match local.iter().take(limits.top).find(|(bytes, _)| bytes == candidate) {
            None => problems.push(Problem::NotInTop { candidate: candidate.clone(), top: limits.top }),
            Some((_, here)) => {
                let distance = (here - logprob).abs();
                if distance > limits.tolerance || distance.is_nan() {
                    problems.push(Problem::Logprob { candidate: candidate.clone(), recorded: *logprob, local: *here });
                }
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local() -> Local {
        [("a", -0.1), ("b", -3.0), ("c", -5.0)].map(|(t, l)| (t.as_bytes().to_vec(), l)).to_vec()
    }

    fn step(token: &str, top: &[(&str, f64)]) -> Step {
        Step { token: token.into(), top: top.iter().map(|(t, l)| (t.as_bytes().to_vec(), *l)).collect() }
    }

    const LIMITS: Limits = Limits { top: 20, tolerance: 4.0 };

    #[test]
    fn deepseek_v4_equal_bytes_and_near_candidates_pass() {
        assert_eq!(judge(&step("a", &[("a", 0.0)]), &local(), LIMITS), []);
        assert_eq!(judge(&step("a", &[("a", 0.0), ("b", -7.0), ("c", -1.0)]), &local(), LIMITS), []);
        assert_eq!(judge(&step("a", &[]), &local(), LIMITS), []);
    }

    #[test]
    fn deepseek_v4_each_rule_fails_for_itself() {
        let token = judge(&step("b", &[]), &local(), LIMITS);
        assert_eq!(token, [Problem::Token { wanted: b"b".to_vec(), got: b"a".to_vec() }]);
        let far = judge(&step("a", &[("b", -7.001)]), &local(), LIMITS);
        assert_eq!(far, [Problem::Logprob { candidate: b"b".to_vec(), recorded: -7.001, local: -3.0 }]);
        assert_eq!(far[0].to_string(), "\"b\" has logprob -3.000, recorded -7.001");
        let absent = judge(&step("a", &[("d", -0.5)]), &local(), LIMITS);
        assert_eq!(absent, [Problem::NotInTop { candidate: b"d".to_vec(), top: 20 }]);
        assert_eq!(judge(&step("a", &[]), &Vec::new(), LIMITS), [Problem::Missing]);
        let everything = judge(&step("x", &[("c", 0.0), ("y", 0.0)]), &local(), LIMITS);
        assert_eq!(everything.len(), 3);
    }

    #[test]
    fn deepseek_v4_both_limits_can_be_moved() {
        let s = step("a", &[("c", -5.5)]);
        assert_eq!(judge(&s, &local(), Limits { top: 2, tolerance: 4.0 }).len(), 1, "third of two");
        assert_eq!(judge(&s, &local(), Limits { top: 3, tolerance: 0.4 }).len(), 1);
        assert_eq!(judge(&s, &local(), Limits { top: 3, tolerance: 0.5 }), []);
        let nan = vec![(b"a".to_vec(), f64::NAN)];
        assert_eq!(judge(&step("a", &[("a", 0.0)]), &nan, LIMITS).len(), 1, "NaN is near nothing");
    }
}
