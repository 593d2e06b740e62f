//! The batch plan: what one step computes, in the shape that kernels take.
//!
//! Decode of 16 rows, one prefill chunk and a mix of both are the same thing: spans of different lengths.

use std::ops::Range;

/// A run of consecutive tokens of one bank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the bank in the engine's bank table.
    pub bank: usize,
    /// Position in the sequence of the span's first token.
    pub first_pos: usize,
    /// Index of the span's first row among the plan's rows.
    pub first_row: usize,
    /// Number of tokens, at least 1.
    pub rows: usize,
}

/// One step: rows of tokens in spans, and the rows whose logits are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchPlan {
    /// Spans in row order; together they cover `tokens` exactly.
    pub spans: Vec<Span>,
    /// Token id of each row.
    pub tokens: Vec<u32>,
    /// Indices of rows whose logits are wanted, ascending; logits row `k` belongs to `wanted[k]`.
    pub wanted: Vec<usize>,
}

impl BatchPlan {
    /// Removes everything, keeping the allocations.
    pub fn clear(&mut self) {
        self.spans.clear();
        self.tokens.clear();
        self.wanted.clear();
    }

    /// Appends a span of `tokens` at `first_pos` of `bank`; `last_logits` asks for the logits of its last row.
    /// Returns the index of the logits row when asked for.
    pub fn push(&mut self, bank: usize, first_pos: usize, tokens: &[u32], last_logits: bool) -> Option<usize> {
        debug_assert!(!tokens.is_empty());
        let first_row = self.tokens.len();
        self.spans.push(Span { bank, first_pos, first_row, rows: tokens.len() });
        self.tokens.extend_from_slice(tokens);
        last_logits.then(|| {
            self.wanted.push(self.tokens.len() - 1);
            self.wanted.len() - 1
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// The plan in parts of about equal size, of at most `most` rows, that can be computed one after the other: the rows of each, and a
    /// plan of its own. No part wants logits, and none is larger than the first.
    pub fn parts(&self, most: usize) -> Vec<(Range<usize>, Self)> {
        let (rows, parts) = (self.rows(), self.rows().div_ceil(most.max(1)));
        let of = |i: usize| {
            let part = (i * rows).div_ceil(parts)..((i + 1) * rows).div_ceil(parts);
            let mut plan = Self::default();
            for s in &self.spans {
                let (from, to) = (s.first_row.max(part.start), (s.first_row + s.rows).min(part.end));
                if from < to {
                    plan.push(s.bank, s.first_pos + from - s.first_row, &self.tokens[from..to], false);
                }
            }
            (part, plan)
        };
        (0..parts).map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_rows_in_order_and_cut_spans_where_they_must() {
        let mut plan = BatchPlan::default();
        plan.push(3, 40, &[1], true);
        plan.push(0, 7, &[2, 3, 4, 5, 6, 7, 8], true);
        plan.push(1, 0, &[9, 10], false);
        let parts = plan.parts(4);
        assert_eq!(parts.iter().map(|(rows, _)| rows.clone()).collect::<Vec<_>>(), [0..4, 4..7, 7..10]);
        let spans =
            |i: usize| parts[i].1.spans.iter().map(|s| (s.bank, s.first_pos, s.first_row, s.rows)).collect::<Vec<_>>();
        assert_eq!(spans(0), [(3, 40, 0, 1), (0, 7, 1, 3)]);
        assert_eq!(spans(1), [(0, 10, 0, 3)]);
        assert_eq!(spans(2), [(0, 13, 0, 1), (1, 0, 1, 2)]);
        assert!(parts.iter().all(|(rows, p)| p.wanted.is_empty() && p.tokens == plan.tokens[rows.clone()]));
        // No part is so short that it would be taken for a decode step.
        for rows in [513, 1000, 1537, 4609, 100_000] {
            let mut long = BatchPlan::default();
            long.push(0, 0, &vec![0; rows], true);
            let sizes: Vec<usize> = long.parts(512).iter().map(|(_, p)| p.rows()).collect();
            assert!(
                sizes.iter().all(|n| (256..=512.min(sizes[0])).contains(n)) && sizes.iter().sum::<usize>() == rows,
                "{rows}: {sizes:?}"
            );
        }
        assert_eq!(plan.parts(10).len(), 1);
        assert!(BatchPlan::default().parts(4).is_empty());
    }
}
