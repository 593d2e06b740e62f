//! Log-probabilities under the unmodified model distribution.

use ds4_kernels::math::exp::exp_nonpositive;

use crate::request::TokenLogprob;
use crate::select::top_k;

/// The softmax normaliser of one logits row: `logprob(i) = logit[i] - max - ln(sum exp(logit - max))`, the sum in f64.
#[derive(Clone, Copy, Debug)]
pub struct LogSoftmax {
    max: f32,
    log_sum: f64,
}

impl LogSoftmax {
    /// Of a row with at least one finite logit.
    pub fn of(logits: &[f32]) -> Self {
        let max = crate::select::max(logits);
        let mut lanes = [0f64; 8];
        let chunks = logits.chunks_exact(8);
        let rest: f64 = chunks.remainder().iter().map(|l| f64::from(exp_nonpositive(l - max))).sum();
        for chunk in chunks {
            for (lane, l) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(exp_nonpositive(l - max));
            }
        }
        let sum = lanes.iter().sum::<f64>() + rest;
        Self::from_sum(max, sum)
    }

    /// Of a row whose best logit is `max`, and whose `exp(logit - max)` come to `sum`.
    pub fn from_sum(max: f32, sum: f64) -> Self {
        Self { max, log_sum: sum.ln() }
    }

    /// Natural-log probability of a logit of that row.
    #[allow(clippy::cast_possible_truncation, reason = "a log-probability is reported in f32")]
    pub fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.max) - self.log_sum) as f32
    }
}

/// The log-probability of `token` and the `k` best tokens of `logits`.
pub fn token_logprob(logits: &[f32], token: u32, k: usize, scratch: &mut Vec<(f32, u32)>) -> TokenLogprob {
    let norm = LogSoftmax::of(logits);
    top_k(logits, k, scratch);
    TokenLogprob {
        token,
        logprob: norm.logprob(logits[token as usize]),
        top: scratch.iter().map(|&(logit, id)| (id, norm.logprob(logit))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_distribution_it_was_made_of() {
        // ln of 1/2, 1/4, 1/8, 1/8, shifted by 3: the shift must not matter.
        let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].iter().map(|p| p.ln() + 3.0).collect();
        let got = token_logprob(&logits, 2, 3, &mut Vec::new());
        assert!((got.logprob - 0.125f32.ln()).abs() < 1e-6);
        let want = [(0, 0.5f32.ln()), (1, 0.25f32.ln()), (2, 0.125f32.ln())];
        for (got, want) in got.top.iter().zip(want) {
            assert_eq!(got.0, want.0);
            assert!((got.1 - want.1).abs() < 1e-6);
        }
        assert_eq!(got.top.len(), 3);
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let got = token_logprob(&[1e4, 1e4 - 1.0], 1, 0, &mut Vec::new());
        assert!((got.logprob - (-1.0 - (1.0 + (-1.0f32).exp()).ln())).abs() < 1e-3);
        assert!(got.top.is_empty());
    }

    #[test]
    fn asking_for_more_alternatives_than_tokens_gives_all() {
        assert_eq!(token_logprob(&[0.0, 1.0], 0, 20, &mut Vec::new()).top.len(), 2);
    }
}
