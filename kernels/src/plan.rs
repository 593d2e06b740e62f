//! The batch plan: what one step computes, in the shape that kernels take.
//!
//! Decode of 16 rows, one prefill chunk and a mix of both are the same thing: spans of different lengths.

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
}
