//! RoPE frequency tables, with and without YaRN scaling.
//!
//! Source: YaRN (arXiv 2309.00071) with the interpolation bounds that DeepSeek V4 uses; the attention factor is 1.

/// YaRN parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Context extension factor.
    pub factor: f64,
    /// Context length of the original training.
    pub original_context: f64,
    /// Rotations above which a pair is not scaled.
    pub beta_fast: f64,
    /// Rotations below which a pair is fully scaled.
    pub beta_slow: f64,
}

impl Yarn {
    /// First and last pair index of the ramp for `dim` rotated elements.
    pub fn bounds(&self, dim: usize, base: f64) -> (f64, f64) {
        #[allow(clippy::cast_precision_loss, reason = "a head width")]
        let d = dim as f64;
        let c = |beta: f64| d * (self.original_context / (2.0 * std::f64::consts::PI * beta)).ln() / (2.0 * base.ln());
        (c(self.beta_fast).floor().max(0.0), c(self.beta_slow).ceil().min(d - 1.0))
    }
}

/// Angular frequency of each pair: `base^(-2i/dim)`, blended towards `1/factor` of it along YaRN's ramp.
pub fn frequencies(dim: usize, base: f64, yarn: Option<&Yarn>) -> Vec<f64> {
    let ramp = yarn.map(|y| (y.bounds(dim, base), y.factor));
    (0..dim / 2)
        .map(|i| {
            #[allow(clippy::cast_precision_loss, reason = "a head width")]
            let (i, d) = (i as f64, dim as f64);
            let f = base.powf(-2.0 * i / d);
            match ramp {
                None => f,
                Some(((low, high), factor)) => {
                    let r = ((i - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    f * (1.0 - r) + f / factor * r
                }
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: Yarn = Yarn { factor: 16.0, original_context: 65536.0, beta_fast: 32.0, beta_slow: 1.0 };

    #[test]
    fn published_bounds_and_frequencies() {
        assert_eq!(V4.bounds(64, 160_000.0), (15.0, 25.0));
        let plain = frequencies(64, 10_000.0, None);
        let scaled = frequencies(64, 160_000.0, Some(&V4));
        // Fact sheet, section 3.5.
        for (i, p, s) in [
            (0, 1.0, 1.0),
            (1, 0.749_894_209, 0.687_656_022),
            (15, 0.013_335_214_3, 0.003_635_538_58),
            (16, 0.01, 0.002_265_625),
            (20, 0.003_162_277_66, 0.000_296_977_778),
            (24, 0.001, 1.953_125e-5),
            (25, 0.000_749_894_209, 5.372_312_67e-6),
            (31, 0.000_133_352_143, 5.680_529_04e-7),
        ] {
            assert!((plain[i] / p - 1.0).abs() < 1e-8, "plain {i}");
            assert!((scaled[i] / s - 1.0).abs() < 1e-8, "scaled {i}");
        }
    }
}
