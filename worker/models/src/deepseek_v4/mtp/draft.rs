//! Drafting with the prediction block: it follows the model row by row, and runs ahead on its own output.

use ds4_kernels::ops::{HyperOps, MoeOps, RowQuery, RowSummary, SparseOps};
use ds4_kernels::{BatchPlan, StateSpec};

use super::{Base, MtpAlignment};
use crate::ModelError;
use crate::deepseek_v4::forward::DeepseekV4;
use crate::deepseek_v4::steps::Steps;
use crate::speculation::{DraftRequest, Drafter, MAX_DRAFTS};

/// A sequence that is being guessed for.
struct Run {
    /// Index of its request.
    request: usize,
    /// Row of the block's last step with its state.
    row: usize,
    /// Its logits row.
    logits: usize,
    /// Position of the next recursive row.
    pos: usize,
}

/// The best token of a row and by how much its logit leads the second's: NaN when there is nothing to choose from, and without limit where
/// the second was not asked for.
fn best(row: &RowSummary) -> (u32, f32) {
    match row.best[..] {
        [(first, token), (second, _), ..] => (token, first - second),
        [(first, token)] if first > f32::NEG_INFINITY => (token, f32::INFINITY),
        _ => (0, f32::NAN),
    }
}

impl<D: SparseOps + HyperOps + MoeOps> DeepseekV4<D> {
    /// Logits row `row` of the block's last step: for tests and debugging.
    pub fn mtp_logits(&self, device: &D, row: usize, out: &mut Vec<f32>) {
        if let Some(mtp) = &self.mtp {
            device.read(&mtp.logits, row, out);
        }
    }

    /// Runs the block over `plan`, whose rows are paired with `rows` of the model's last states (`None`: with these rows of its own
    /// last output).
    fn run_mtp(
        &mut self,
        device: &D,
        plan: &BatchPlan,
        banks: &mut [D::Bank],
        base_rows: Option<&[usize]>,
        own_rows: &[usize],
    ) -> Result<(), ModelError> {
        for span in &plan.spans {
            device.bank_commit(&mut banks[span.bank], span.first_pos + span.rows)?;
        }
        let steps = Steps::new(device, plan, banks, self.attention_rows)?;
        let Some(mtp) = &mut self.mtp else { return Ok(()) };
        let n = self.p.hyper.streams;
        match base_rows {
            Some(rows) => mtp.take(device, n, &self.streams, rows),
            None => mtp.take_own(device, n, own_rows),
        }
        let base = Base { p: &self.p, global: &self.global, rotary: &self.rotary, numerics: self.numerics };
        mtp.run(device, &steps, &base, &mut self.scratch, !plan.wanted.is_empty());
        Ok(())
    }
}

impl<D: SparseOps + HyperOps + MoeOps> Drafter<D> for DeepseekV4<D> {
    fn state(&self) -> &StateSpec {
        static NONE: StateSpec = StateSpec { slots: Vec::new() };
        self.mtp.as_ref().map_or(&NONE, |m| &m.spec)
    }

    fn window(&self) -> usize {
        self.p.window
    }

    fn draft(
        &mut self,
        device: &D,
        plan: &BatchPlan,
        requests: &[DraftRequest],
        banks: &mut [D::Bank],
        ends: &dyn Fn(u32) -> bool,
    ) -> Result<Vec<Vec<u32>>, ModelError> {
        let mut drafts: Vec<Vec<u32>> = requests.iter().map(|_| Vec::new()).collect();
        let Some(settings) = self.mtp.as_ref().map(|m| m.settings) else { return Ok(drafts) };
        if requests.is_empty() {
            return Ok(drafts);
        }
        let mut own = BatchPlan::default();
        let mut rows = Vec::new();
        let mut runs = Vec::new();
        for (i, r) in requests.iter().enumerate() {
            debug_assert!(r.rows > 0 && r.drafts <= MAX_DRAFTS, "{r:?}");
            let right = r.first_row..r.first_row + r.rows;
            let tokens: Vec<u32> = match settings.alignment {
                MtpAlignment::SameToken => plan.tokens[right.clone()].to_vec(),
                MtpAlignment::NextToken => {
                    plan.tokens[right.start + 1..right.end].iter().copied().chain([r.next]).collect()
                }
            };
            rows.extend(right);
            let wanted = r.drafts > 0 && !ends(r.next);
            let logits = own.push(r.bank, r.first_pos, &tokens, wanted);
            if let Some(logits) = logits {
                runs.push(Run { request: i, row: own.rows() - 1, logits, pos: r.first_pos + r.rows });
            }
        }
        self.run_mtp(device, &own, banks, Some(&rows), &[])?;

        let mut answers = Vec::new();
        // Who leads by how much is not asked for where any lead will do.
        let wanted = if settings.margin > 0.0 { 2 } else { 1 };
        // In the first round of this alignment the block and the model speak of the same token.
        let mut proven = settings.alignment == MtpAlignment::NextToken;
        loop {
            let mut feed = BatchPlan::default();
            let mut states = Vec::new();
            let mut going = Vec::new();
            if let Some(mtp) = &self.mtp {
                let query = |r: &Run| RowQuery { row: r.logits, best: wanted, scale: None, draw: None, norm: false };
                device.summarise(&mtp.logits, &runs.iter().map(query).collect::<Vec<_>>(), &mut answers);
            }
            for (run, row) in runs.iter().zip(&answers) {
                let r = &requests[run.request];
                let (token, lead) = best(row);
                let guesses = &mut drafts[run.request];
                if proven {
                    // Not so when the lead is NaN.
                    let sure = lead >= settings.margin;
                    if !sure {
                        continue;
                    }
                    guesses.push(token);
                    if guesses.len() == r.drafts || ends(token) {
                        continue;
                    }
                } else if token != r.next {
                    continue;
                }
                states.push(run.row);
                if let Some(logits) = feed.push(r.bank, run.pos, &[token], true) {
                    going.push(Run { request: run.request, row: feed.rows() - 1, logits, pos: run.pos + 1 });
                }
            }
            if going.is_empty() {
                return Ok(drafts);
            }
            self.run_mtp(device, &feed, banks, None, &states)?;
            (runs, proven) = (going, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use ds4_kernels::ops::{RowQuery, RowSummary, summarise_row};

    use super::best;

    fn of(row: &[f32], wanted: usize) -> RowSummary {
        summarise_row(&mut row.to_vec(), &RowQuery { row: 0, best: wanted, scale: None, draw: None, norm: false })
    }

    #[test]
    fn deepseek_v4_mtp_lead_is_over_the_second_best() {
        assert_eq!(best(&of(&[1.0, 4.0, 2.5, 4.0], 2)), (1, 0.0));
        assert_eq!(best(&of(&[1.0, 2.5, 4.0], 2)), (2, 1.5));
        assert_eq!(best(&of(&[4.0, 2.5, 1.0], 2)), (0, 1.5));
        assert_eq!(best(&of(&[4.0, 5.0, 1.0], 1)), (1, f32::INFINITY));
        for wanted in [1, 2] {
            assert!(best(&of(&[f32::NAN, f32::NAN], wanted)).1.is_nan());
        }
    }
}
