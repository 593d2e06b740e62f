//! Order statistics of a handful of samples.

/// The `p`-th percentile (0 to 100) by nearest rank; 0 for no samples.
pub fn percentile(samples: &[f64], p: u32) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * usize::try_from(p.min(100)).unwrap_or(100)).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// The median: the middle sample, or the mean of the two middle ones; 0 for no samples.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_rank() {
        // Example of the definition: for 15, 20, 35, 40, 50 the 30th percentile is 20, the 40th 20, the 50th 35, the 100th 50.
        let samples = [50.0, 15.0, 40.0, 20.0, 35.0];
        assert_eq!([30, 40, 50, 100, 0].map(|p| percentile(&samples, p)), [20.0, 20.0, 35.0, 50.0, 15.0]);
        assert_eq!(percentile(&[], 50), 0.0);
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
