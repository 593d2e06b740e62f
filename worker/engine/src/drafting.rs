//! Guesses ahead in the engine: the drafter's banks, and what it is shown after each step.
//!
//! Guesses are made for greedy requests, and for others where their answer's syntax leaves the sampler no choice. Verification
//! would be exact for any sampler (see [`ds4_models::speculation`]), and is where sampled text follows guessed syntax; but
//! guesses come true too rarely where tokens are drawn at random.

use ds4_kernels::{BatchPlan, Device, DeviceError};
use ds4_models::Model;
use ds4_models::speculation::{DraftRequest, MAX_DRAFTS};

use crate::engine::memory_or_error;

/// The drafter's side of the engine.
pub(crate) struct Drafting<D: Device> {
    /// One for each bank of the model, of the same index.
    banks: Vec<D::Bank>,
    /// Most guesses a step.
    pub drafts: usize,
    /// Rows of a prompt's end that the drafter is shown.
    window: usize,
}

impl<D: Device> Drafting<D> {
    /// Reserves banks for the drafter of `model`; `None` when it has none, or no guesses are wanted.
    ///
    /// # Errors
    /// When address space cannot be had.
    pub fn new(
        device: &D,
        model: &mut dyn Model<D>,
        drafts: usize,
        count: usize,
        context: usize,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(drafter) = model.drafter().filter(|_| drafts > 0) else { return Ok(None) };
        // Guesses run ahead of the sequence.
        let bank = |_| device.bank(drafter.state(), context + MAX_DRAFTS);
        let banks = (0..count).map(bank).collect::<Result<_, _>>()?;
        Ok(Some(Self { banks, drafts: drafts.min(MAX_DRAFTS), window: drafter.window() }))
    }

    /// Bytes committed by its banks.
    pub fn committed(&self, device: &D) -> usize {
        self.banks.iter().map(|b| device.bank_committed(b)).sum()
    }

    /// Rows of prompt positions `from..to` that need not be shown, of a prompt of `len` tokens.
    pub fn skip(&self, from: usize, to: usize, len: usize) -> usize {
        len.saturating_sub(self.window).clamp(from, to) - from
    }

    /// Shows the drafter rows of the step that `plan` described and takes its guesses, one list a request. A drafter that
    /// fails (for want of memory) guesses nothing: output never depends on it.
    pub fn guess(
        &mut self,
        device: &D,
        model: &mut dyn Model<D>,
        plan: &BatchPlan,
        requests: &[DraftRequest],
        ends: &dyn Fn(u32) -> bool,
    ) -> Vec<Vec<u32>> {
        let Some(drafter) = model.drafter().filter(|_| !requests.is_empty()) else { return Vec::new() };
        memory_or_error(|| drafter.draft(device, plan, requests, &mut self.banks, ends)).unwrap_or_else(|e| {
            tracing::warn!(error = %e, "no guesses in this step");
            Vec::new()
        })
    }
}
