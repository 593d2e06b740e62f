//! The mixing weights of a hyper-connection: gates in and out of the residual streams and a doubly stochastic mixer.
//!
//! Source: DeepSeek V4's manifold-constrained hyper-connections (fact sheet, section 3.2).

/// `1 / (1 + e^-x)`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Splits the `2n + n²` raw mixer outputs of one token into `pre[n]`, `post[n]` and `comb[n×n]` (row = source stream,
/// column = destination), in place: `raw` holds the results in that order.
///
/// `scale` has 3 values and `base` as many as `raw`. The mixer is made doubly stochastic by `iterations` Sinkhorn rounds, the
/// first of which is the column normalisation after the row softmax.
pub fn mixing_weights(raw: &mut [f32], scale: &[f32], base: &[f32], n: usize, iterations: usize, eps: f32) {
    debug_assert_eq!(raw.len(), 2 * n + n * n);
    for (i, v) in raw.iter_mut().enumerate() {
        let s = if i < n {
            scale[0]
        } else if i < 2 * n {
            scale[1]
        } else {
            scale[2]
        };
        *v = *v * s + base[i];
    }
    let (gates, comb) = raw.split_at_mut(2 * n);
    for (i, v) in gates.iter_mut().enumerate() {
        *v = if i < n { sigmoid(*v) + eps } else { 2.0 * sigmoid(*v) };
    }
    for row in comb.chunks_exact_mut(n) {
        let max = row.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
        let mut sum = 0.0;
        for v in row.iter_mut() {
            *v = (*v - max).exp();
            sum += *v;
        }
        for v in row {
            *v = *v / sum + eps;
        }
    }
    normalise_columns(comb, n, eps);
    for _ in 1..iterations {
        for row in comb.chunks_exact_mut(n) {
            let sum = row.iter().sum::<f32>() + eps;
            row.iter_mut().for_each(|v| *v /= sum);
        }
        normalise_columns(comb, n, eps);
    }
}

fn normalise_columns(comb: &mut [f32], n: usize, eps: f32) {
    for c in 0..n {
        let sum = (0..n).map(|r| comb[r * n + c]).sum::<f32>() + eps;
        for r in 0..n {
            comb[r * n + c] /= sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_check_value() {
        #[rustfmt::skip]
        let comb = [1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.5, 0.0, 0.0, -1.0];
        let mut raw = vec![0.0; 8];
        raw.extend_from_slice(&comb);
        mixing_weights(&mut raw, &[1.0; 3], &[0.0; 24], 4, 20, 1e-6);
        #[rustfmt::skip]
        let want = [
            0.416_004, 0.127_260, 0.084_175, 0.372_560, 0.098_729, 0.606_622, 0.054_303, 0.240_345,
            0.065_303, 0.054_303, 0.721_419, 0.158_974, 0.419_963, 0.211_814, 0.140_102, 0.228_121,
        ];
        for (got, want) in raw[8..].iter().zip(want) {
            assert!((got - want).abs() < 2e-6, "{got} {want}");
        }
        assert!(raw[..4].iter().all(|p| (p - 0.500_001).abs() < 1e-6));
        assert!(raw[4..8].iter().all(|p| (p - 1.0).abs() < 1e-6));
    }
}
