//! Selection over logits without a full sort. Order: larger logit first, then lower token id; zeros of both signs are equal. Rows
//! hold no NaN (see [`sanitise`]).

use std::cmp::Ordering;

/// The total order of candidates `(logit, token)`, best first.
pub fn better(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    // Adding 0 makes a zero of either sign the positive one.
    (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(a.1.cmp(&b.1))
}

/// Makes a row fit to be ordered: NaN becomes `-inf`, `+inf` the largest number. Returns how many values were not finite.
pub fn sanitise(logits: &mut [f32]) -> usize {
    if logits.iter().all(|l| l.is_finite()) {
        return 0;
    }
    let mut bad = 0;
    for l in logits {
        if !l.is_finite() {
            bad += 1;
            *l = if *l == f32::INFINITY { f32::MAX } else { f32::NEG_INFINITY };
        }
    }
    bad
}

/// The largest value; NaN is passed over. `-inf` for an empty row.
pub fn max(row: &[f32]) -> f32 {
    // Independent lanes let the compiler vectorise; a single running maximum would be one long dependency chain.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = row.chunks_exact(16);
    let mut best = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    for lane in lanes {
        best = best.max(lane);
    }
    best
}

/// The index of the largest value, the lowest one on ties; `None` when there is no value above `-inf`.
pub fn argmax(row: &[f32]) -> Option<u32> {
    let best = max(row);
    if best == f32::NEG_INFINITY {
        return None;
    }
    row.iter().position(|&x| x == best).and_then(|i| u32::try_from(i).ok())
}

/// Logits of which [`top_k`] takes the best one for its threshold.
const GROUP: usize = 64;

/// Fills `out` with the `k` best `(logit, token)` of `row`, best first.
pub fn top_k(row: &[f32], k: usize, out: &mut Vec<(f32, u32)>) {
    out.clear();
    if k == 0 {
        return;
    }
    // At least k logits reach the k-th best of the groups' best ones, and few more do.
    let mut tops: Vec<f32> = row.chunks(GROUP).map(max).collect();
    let threshold =
        if k < tops.len() { *tops.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1 } else { f32::NEG_INFINITY };
    out.extend(row.iter().zip(0u32..).filter(|(l, _)| **l >= threshold).map(|(&l, id)| (l, id)));
    keep_best(out, k);
}

/// Reduces `candidates` to its `k` best, sorted.
pub fn keep_best(candidates: &mut Vec<(f32, u32)>, k: usize) {
    if k == 0 {
        candidates.clear();
    } else if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, better);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(better);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lowest_id() {
        assert_eq!(argmax(&[0.0, 2.0, 2.0, 1.0]), Some(1));
        let mut row = vec![0.0f32; 100];
        row[97] = 5.0;
        row[33] = 5.0;
        assert_eq!(argmax(&row), Some(33));
        let mut out = Vec::new();
        top_k(&row, 3, &mut out);
        assert_eq!(out, [(5.0, 33), (5.0, 97), (0.0, 0)]);
    }

    #[test]
    fn zeros_of_both_signs_are_one_value() {
        let row = [-1.0, -0.0, 0.0, -0.0];
        let mut out = Vec::new();
        top_k(&row, 3, &mut out);
        assert_eq!(out.iter().map(|c| c.1).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(argmax(&row), Some(1));
    }

    #[test]
    fn bad_numbers_get_places_in_the_order() {
        let mut row = [f32::NAN, 1.0, f32::NEG_INFINITY, f32::INFINITY];
        assert_eq!(sanitise(&mut row), 3);
        assert_eq!(row, [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, f32::MAX]);
        assert_eq!(sanitise(&mut row[1..2]), 0);
    }

    #[test]
    fn nothing_finite_has_no_argmax() {
        assert_eq!(argmax(&[f32::NEG_INFINITY; 20]), None);
        assert_eq!(argmax(&[]), None);
        assert_eq!(argmax(&[f32::NAN, 1.0]), Some(1));
    }

    #[test]
    fn selection_equals_a_full_sort() {
        let row: Vec<f32> = (0..1000u32).map(|i| ((i * 7919) % 251) as f32).collect();
        let mut all: Vec<(f32, u32)> = row.iter().zip(0..).map(|(&l, i)| (l, i)).collect();
        all.sort_by(better);
        for k in [1, 2, 5, 15, 16, 17, 250, 999, 1000, 2000] {
            let mut out = Vec::new();
            top_k(&row, k, &mut out);
            assert_eq!(out, all[..k.min(1000)], "k={k}");
        }
    }
}
