//! What one row of logits says: log-probabilities in f64 over the whole row.

use ds4_engine::select::{keep_best, max};

/// A row's softmax normaliser, and the row made fit to be ordered: NaN is impossible, `+inf` the largest number, as the
/// sampler has it.
pub struct Distribution {
    row: Vec<f32>,
    /// Logits that were NaN or infinite.
    pub not_finite: u32,
    max: f64,
    log_sum: f64,
}

impl Distribution {
    /// Of a row as the model gave it.
    pub fn of(mut row: Vec<f32>) -> Self {
        let mut not_finite = 0;
        for l in row.iter_mut().filter(|l| !l.is_finite()) {
            not_finite += 1;
            *l = if *l == f32::INFINITY { f32::MAX } else { f32::NEG_INFINITY };
        }
        let max = f64::from(max(&row));
        let log_sum = row.iter().map(|l| (f64::from(*l) - max).exp()).sum::<f64>().ln();
        Self { row, not_finite, max, log_sum }
    }

    /// Natural-log probability of a logit.
    pub fn logprob(&self, logit: f32) -> f64 {
        f64::from(logit) - self.max - self.log_sum
    }

    /// The logit of `token`; `None` for an id outside of the row.
    pub fn logit(&self, token: u32) -> Option<f32> {
        self.row.get(usize::try_from(token).ok()?).copied()
    }

    /// How many tokens have a larger logit.
    pub fn rank(&self, logit: f32) -> usize {
        self.row.iter().filter(|l| **l > logit).count()
    }

    /// The `k` most likely `(token, logit)`, best first, equal ones by id.
    pub fn top(&self, k: usize) -> Vec<(u32, f32)> {
        if k == 0 {
            return Vec::new();
        }
        let mut all: Vec<(f32, u32)> = self.row.iter().copied().zip(0..).collect();
        keep_best(&mut all, k);
        all.into_iter().map(|(logit, token)| (token, logit)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_are_of_the_whole_row() {
        // 1/2, 1/4, 1/8, 1/8, whatever the shift.
        for shift in [-300.0, 0.0, 7.0] {
            let row: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].iter().map(|p| p.ln() + shift).collect();
            let d = Distribution::of(row.clone());
            for (logit, p) in row.iter().zip([0.5f64, 0.25, 0.125, 0.125]) {
                assert!((d.logprob(*logit) - p.ln()).abs() < 1e-4, "{shift}");
            }
            assert_eq!(d.top(3).iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1, 2]);
            assert_eq!((d.rank(row[3]), d.rank(row[0]), d.not_finite), (2, 0, 0));
        }
    }

    #[test]
    fn a_long_flat_row_loses_nothing() {
        // A running f32 sum of 2^25 ones stops at 2^24.
        let d = Distribution::of(vec![1.0; 1 << 25]);
        assert!((d.logprob(1.0) + 25.0 * std::f64::consts::LN_2).abs() < 1e-12);
    }

    #[test]
    fn values_that_are_no_numbers_are_counted_and_impossible() {
        let d = Distribution::of(vec![f32::NAN, 0.0, f32::NEG_INFINITY, 0.0]);
        assert_eq!(d.not_finite, 2);
        assert!((d.logprob(0.0) - 0.5f64.ln()).abs() < 1e-12);
        assert_eq!(d.logprob(f32::NEG_INFINITY), f64::NEG_INFINITY);
        assert_eq!(d.top(2), [(1, 0.0), (3, 0.0)]);
        assert_eq!((d.logit(0), d.logit(4)), (Some(f32::NEG_INFINITY), None));
    }
}
