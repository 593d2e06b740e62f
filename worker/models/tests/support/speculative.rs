//! Greedy decoding of one sequence with guesses, as the engine does it.

use ds4_kernels::{BatchPlan, CpuDevice, Device, StateSpec};
use ds4_models::deepseek_v4::DeepseekV4;
use ds4_models::speculation::{DraftCounts, DraftRequest, Drafter, Sequence, Verdict};
use ds4_models::{Model, ModelError, ModelShape};

use crate::support::argmax;

/// What a run may do.
pub struct Limits<'a> {
    /// Guesses a step.
    pub drafts: usize,
    /// Tokens to generate.
    pub tokens: usize,
    /// Longest sequence.
    pub context: usize,
    /// Tokens that end it.
    pub ends: &'a dyn Fn(u32) -> bool,
}

/// What came of it: the tokens, and the logits that each was decided by.
#[derive(Default)]
pub struct Run {
    pub tokens: Vec<u32>,
    pub logits: Vec<Vec<f32>>,
    pub counts: DraftCounts,
    /// Steps after the prompt.
    pub steps: usize,
}

/// Feeds `prompt` in chunks of `chunk` and decodes. With `drafts` 0 this is decoding token by token.
pub fn generate(
    device: &CpuDevice,
    model: &mut dyn Model<CpuDevice>,
    prompt: &[u32],
    chunk: usize,
    limits: &Limits<'_>,
) -> Run {
    let mut banks = vec![device.bank(model.state(), limits.context).unwrap()];
    let spec = model.drafter().map(|d| d.state().clone()).unwrap_or_default();
    let mut drafter_banks = vec![device.bank(&spec, limits.context + 16).unwrap()];
    let mut run = Run::default();
    let mut row = Vec::new();
    let (mut len, mut first) = (0, 0);
    for piece in prompt.chunks(chunk) {
        let mut plan = BatchPlan::default();
        let last = len + piece.len() == prompt.len();
        plan.push(0, len, piece, last);
        device.bank_commit(&mut banks[0], len + piece.len()).unwrap();
        model.forward(device, &plan, &mut banks).unwrap();
        if last {
            device.read(model.logits(), 0, &mut row);
            first = argmax(&row);
            run.logits.push(row.clone());
        }
        let next = if last { first } else { prompt[len + piece.len()] };
        let drafts = 0;
        let request = DraftRequest { bank: 0, first_row: 0, first_pos: len, rows: piece.len(), next, drafts };
        if let Some(d) = model.drafter() {
            d.draft(device, &plan, &[request], &mut drafter_banks, limits.ends).unwrap();
        }
        len += piece.len();
    }
    run.tokens.push(first);
    let mut sequence = Sequence::new(first);
    // The first step has no guesses: what the prompt's last row would give them for is tested through later steps.
    loop {
        let over = (limits.ends)(*run.tokens.last().unwrap());
        if over || run.tokens.len() == limits.tokens || len + sequence.pending().len() > limits.context {
            return run;
        }
        let checkpoint = (!sequence.drafts().is_empty()).then(|| device.bank_checkpoint(&banks[0], len).unwrap());
        let mut plan = BatchPlan::default();
        let at = sequence.push(&mut plan, 0, len);
        let rows = sequence.rows();
        device.bank_commit(&mut banks[0], len + rows).unwrap();
        model.forward(device, &plan, &mut banks).unwrap();
        run.steps += 1;
        for i in at.. {
            device.read(model.logits(), i, &mut row);
            let token = argmax(&row);
            run.tokens.push(token);
            run.logits.push(row.clone());
            let done = (limits.ends)(token) || run.tokens.len() == limits.tokens;
            if sequence.decide(token) == Verdict::Last || done {
                break;
            }
        }
        let settled = sequence.settle();
        run.counts += settled.counts;
        let first_pos = len + settled.first_new;
        if settled.rewind {
            device.bank_rewind(&mut banks[0], &checkpoint.unwrap());
        } else {
            len += rows;
        }
        let left = limits.tokens - run.tokens.len();
        let drafts = sequence.room(limits.drafts, len, limits.context, left);
        let request = DraftRequest {
            bank: 0,
            first_row: settled.first_new,
            first_pos,
            rows: settled.new_rows,
            next: sequence.next(),
            drafts,
        };
        if let Some(d) = model.drafter() {
            let mut got = d.draft(device, &plan, &[request], &mut drafter_banks, limits.ends).unwrap();
            let got = got.pop().unwrap();
            assert!(got.len() <= drafts);
            sequence.set_drafts(got);
        }
    }
}

/// Guesses by position of the first guess and their number.
pub type Script = Box<dyn Fn(usize, usize) -> Vec<u32> + Send>;

/// A model whose guesses come from a script.
pub struct Rigged {
    pub model: DeepseekV4<CpuDevice>,
    pub script: Script,
}

impl Model<CpuDevice> for Rigged {
    fn shape(&self) -> &ModelShape {
        self.model.shape()
    }

    fn state(&self) -> &StateSpec {
        Model::state(&self.model)
    }

    fn forward(
        &mut self,
        device: &CpuDevice,
        plan: &BatchPlan,
        banks: &mut [<CpuDevice as Device>::Bank],
    ) -> Result<(), ModelError> {
        self.model.forward(device, plan, banks)
    }

    fn logits(&self) -> &<CpuDevice as Device>::Buffer {
        self.model.logits()
    }

    fn drafter(&mut self) -> Option<&mut dyn Drafter<CpuDevice>> {
        Some(self)
    }
}

impl Drafter<CpuDevice> for Rigged {
    fn state(&self) -> &StateSpec {
        static NONE: StateSpec = StateSpec { slots: Vec::new() };
        &NONE
    }

    fn window(&self) -> usize {
        0
    }

    fn draft(
        &mut self,
        _: &CpuDevice,
        _: &BatchPlan,
        requests: &[DraftRequest],
        _: &mut [<CpuDevice as Device>::Bank],
        _: &dyn Fn(u32) -> bool,
    ) -> Result<Vec<Vec<u32>>, ModelError> {
        Ok(requests.iter().map(|r| (self.script)(r.first_pos + r.rows + 1, r.drafts)).collect())
    }
}
