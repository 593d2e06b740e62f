//! Draft and verify: several tokens in one step, with the very output of one token a step.
//!
//! A [`Drafter`] guesses what follows the next token. The guesses are computed behind that token in one span, and each row's
//! logits decide as they would without guesses: as long as a decision equals the guess that was computed behind it, the next
//! row is the one that decoding token by token would have computed, bit for bit (devices are row-invariant). The first
//! decision that differs is the last one taken; rows behind it are undone. So guesses cost or save time and change nothing,
//! whatever the sampler, and however bad they are.
//!
//! **Undoing.** Rings and fixed blocks cannot forget rows, so a step with guesses starts from a checkpoint, and a rejected guess
//! rewinds the bank to it. The tokens that were right are then known but not in the bank: they are *pending*, and head the
//! next span, whose rows would mostly wait for the same weights anyway. Only a step without pending tokens takes guesses, so
//! pending tokens never pile up. Every step decides at least one token: bad guesses cost rows, never steps.

use ds4_kernels::{BatchPlan, Device, StateSpec};

use crate::ModelError;

/// Most guesses for one step.
pub const MAX_DRAFTS: usize = 16;

/// One sequence's part of the last step, for [`Drafter::draft`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRequest {
    /// Bank of the drafter that belongs to the sequence.
    pub bank: usize,
    /// First row of the last step's plan that the drafter has not seen.
    pub first_row: usize,
    /// Its position in the sequence.
    pub first_pos: usize,
    /// Rows from there that are right (prompt, pending and accepted tokens); at least 1.
    pub rows: usize,
    /// The token that follows the last of them.
    pub next: u32,
    /// Most guesses wanted for what follows `next`; 0 only takes note of the rows. At most [`MAX_DRAFTS`].
    pub drafts: usize,
}

/// The part of a model that guesses ahead.
pub trait Drafter<D: Device> {
    /// What it keeps of one sequence, in a bank of its own. Never needs a checkpoint: rows of guesses that came to nothing are
    /// overwritten before they are read. Rows that are missing (a sequence restored from elsewhere) only make guesses worse.
    fn state(&self) -> &StateSpec;

    /// How many of the last rows before a position a guess there can depend on: earlier rows of a prompt need not be shown.
    fn window(&self) -> usize;

    /// Takes note of rows of the last [`crate::Model::forward`], which was for `plan`, and guesses what follows. Commits its
    /// banks itself. One list a request; it is empty, or shorter than wanted, when the drafter is not sure enough or a guess
    /// `ends` the output.
    ///
    /// # Errors
    /// [`ModelError`] when the device refuses memory.
    fn draft(
        &mut self,
        device: &D,
        plan: &BatchPlan,
        requests: &[DraftRequest],
        banks: &mut [D::Bank],
        ends: &dyn Fn(u32) -> bool,
    ) -> Result<Vec<Vec<u32>>, ModelError>;
}

/// Guesses and what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Guesses computed.
    pub drafted: u64,
    /// Guesses that the model then decided for.
    pub accepted: u64,
}

impl std::ops::AddAssign for DraftCounts {
    fn add_assign(&mut self, other: Self) {
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }
}

/// What a decision means for the rows behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It equals the guess that was computed behind it: the next row counts.
    Agrees,
    /// No further row counts.
    Last,
}

/// One decoding sequence: tokens that are decided but not in its bank, and guesses behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Decided tokens that the bank lacks; never empty.
    pending: Vec<u32>,
    drafts: Vec<u32>,
    /// Decisions of the step under way.
    decided: Vec<u32>,
    /// Rows at the head of the next span that the drafter has seen.
    seen: usize,
}

/// What [`Sequence::settle`] says about a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settled {
    /// The bank must be rewound to the checkpoint from before the step; otherwise all rows of the span stay.
    pub rewind: bool,
    /// First row of the span that is new to the drafter.
    pub first_new: usize,
    /// New right rows from there.
    pub new_rows: usize,
    /// What became of the guesses.
    pub counts: DraftCounts,
}

impl Sequence {
    /// A sequence whose bank holds everything before `next`, which was decided.
    pub fn new(next: u32) -> Self {
        Self { pending: vec![next], drafts: Vec::new(), decided: Vec::new(), seen: 0 }
    }

    /// The latest decided token.
    pub fn next(&self) -> u32 {
        self.pending[self.pending.len() - 1]
    }

    /// Decided tokens that head the span.
    pub fn pending(&self) -> &[u32] {
        &self.pending
    }

    /// Guesses that end the span.
    pub fn drafts(&self) -> &[u32] {
        &self.drafts
    }

    /// How many guesses the next step may take when the bank holds `len` tokens and may hold `context`, and `left` more tokens
    /// are wanted after [`Sequence::next`]: no row may be computed that can never be used.
    pub fn room(&self, wanted: usize, len: usize, context: usize, left: usize) -> usize {
        if self.pending.len() > 1 {
            return 0;
        }
        // A step with k guesses decides k + 1 tokens when all are right.
        wanted.min(MAX_DRAFTS).min(left.saturating_sub(1)).min(context.saturating_sub(len + 1))
    }

    /// Keeps at most `most` of the next span's guesses.
    pub fn limit_drafts(&mut self, most: usize) {
        self.drafts.truncate(most);
    }

    /// Gives the next span its guesses.
    ///
    /// # Panics
    /// When tokens besides the next one are pending, which [`Sequence::room`] rules out.
    pub fn set_drafts(&mut self, drafts: Vec<u32>) {
        assert!(drafts.is_empty() || self.pending.len() == 1, "guesses behind pending tokens");
        self.drafts = drafts;
    }

    /// Rows of the next span.
    pub fn rows(&self) -> usize {
        self.pending.len() + self.drafts.len()
    }

    /// Appends the next span to `plan`; the logits of its last `1 + drafts` rows are wanted, in order. Returns the index of the first
    /// of these logits rows.
    pub fn push(&self, plan: &mut BatchPlan, bank: usize, first_pos: usize) -> usize {
        let span: Vec<u32> = self.pending.iter().chain(&self.drafts).copied().collect();
        plan.push(bank, first_pos, &span, false);
        let end = plan.rows();
        let first = plan.wanted.len();
        plan.wanted.extend(end - self.drafts.len() - 1..end);
        first
    }

    /// Takes the decision of the next logits row of the span.
    ///
    /// # Panics
    /// When the last decision was [`Verdict::Last`].
    pub fn decide(&mut self, token: u32) -> Verdict {
        let row = self.decided.len();
        assert!(row <= self.drafts.len() && self.decided[..] == self.drafts[..row], "no row is left to decide");
        self.decided.push(token);
        if self.drafts.get(row) == Some(&token) { Verdict::Agrees } else { Verdict::Last }
    }

    /// Ends the sequence in the middle of a step, after decisions that all agreed: what [`Settled::rewind`] and the counts say
    /// still holds, nothing else does.
    pub fn end(&mut self) -> Settled {
        let (drafted, accepted) = (self.drafts.len(), self.decided.len());
        let counts = DraftCounts { drafted: drafted as u64, accepted: accepted as u64 };
        Settled { rewind: accepted < drafted, first_new: 0, new_rows: 0, counts }
    }

    /// Ends the step after its last decision.
    ///
    /// # Panics
    /// When nothing was decided.
    pub fn settle(&mut self) -> Settled {
        let Some(next) = self.decided.pop() else { panic!("a step without a decision") };
        let accepted = self.decided.len();
        let rejected = self.drafts.len() - accepted;
        let counts = DraftCounts { drafted: self.drafts.len() as u64, accepted: accepted as u64 };
        let (first_new, right) = (self.seen, self.pending.len() + accepted);
        if rejected == 0 {
            self.pending.clear();
            self.seen = 0;
        } else {
            self.pending.append(&mut self.decided);
            self.seen = right;
        }
        self.pending.push(next);
        self.decided.clear();
        self.drafts.clear();
        Settled { rewind: rejected > 0, first_new, new_rows: right - first_new, counts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(s: &mut Sequence, drafts: &[u32], decisions: &[u32]) -> Settled {
        s.set_drafts(drafts.to_vec());
        for (i, d) in decisions.iter().enumerate() {
            let last = i + 1 == decisions.len();
            assert_eq!(s.decide(*d) == Verdict::Last, last, "decision {i}");
        }
        s.settle()
    }

    #[test]
    fn deepseek_v4_speculation_right_guesses_stay_in_the_bank() {
        let mut s = Sequence::new(5);
        let got = step(&mut s, &[6, 7], &[6, 7, 8]);
        let counts = DraftCounts { drafted: 2, accepted: 2 };
        assert_eq!(got, Settled { rewind: false, first_new: 0, new_rows: 3, counts });
        assert_eq!((s.pending(), s.drafts()), (&[8][..], &[][..]));
    }

    #[test]
    fn deepseek_v4_speculation_a_wrong_guess_leaves_the_right_ones_pending() {
        let mut s = Sequence::new(5);
        let got = step(&mut s, &[6, 7, 8], &[6, 9]);
        let counts = DraftCounts { drafted: 3, accepted: 1 };
        assert_eq!(got, Settled { rewind: true, first_new: 0, new_rows: 2, counts });
        assert_eq!(s.pending(), [5, 6, 9]);
        assert_eq!(s.room(4, 100, 1000, 50), 0, "no guesses behind pending tokens");
        let mut plan = BatchPlan::default();
        assert_eq!(s.push(&mut plan, 3, 20), 0);
        assert_eq!((plan.tokens.as_slice(), plan.wanted.as_slice()), (&[5, 6, 9][..], &[2][..]));
        // The drafter has seen 5 and 6.
        let got = step(&mut s, &[], &[10]);
        assert_eq!(got, Settled { rewind: false, first_new: 2, new_rows: 1, counts: DraftCounts::default() });
        assert_eq!(s.pending(), [10]);
    }

    #[test]
    fn deepseek_v4_speculation_wants_the_logits_of_the_next_token_and_every_guess() {
        let mut s = Sequence::new(1);
        s.set_drafts(vec![2, 3]);
        let mut plan = BatchPlan::default();
        plan.push(0, 0, &[9, 9], true);
        assert_eq!(s.push(&mut plan, 1, 7), 1);
        assert_eq!(plan.wanted, [1, 2, 3, 4]);
        assert_eq!((plan.spans[1].first_pos, plan.spans[1].rows), (7, 3));
    }

    #[test]
    fn deepseek_v4_speculation_has_no_room_past_any_end() {
        let s = Sequence::new(1);
        assert_eq!(s.room(4, 10, 100, 50), 4);
        assert_eq!(s.room(100, 10, 100, 50), MAX_DRAFTS);
        assert_eq!(s.room(4, 10, 100, 3), 2, "two guesses and the row behind them are three tokens");
        assert_eq!((s.room(4, 10, 100, 1), s.room(4, 10, 100, 0)), (0, 0));
        assert_eq!((s.room(4, 97, 100, 50), s.room(4, 99, 100, 50)), (2, 0), "97, the next one and two guesses");
    }

    #[test]
    #[should_panic(expected = "no row is left")]
    fn deepseek_v4_speculation_takes_no_decision_behind_the_last() {
        let mut s = Sequence::new(1);
        s.set_drafts(vec![2, 3]);
        s.decide(7);
        s.decide(3);
    }
}
