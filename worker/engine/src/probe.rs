//! The start-up self-test: a model that loads well may still compute nonsense.

use std::time::{Duration, Instant};

use ds4_kernels::{BatchPlan, Device, DeviceError};
use ds4_models::ModelError;

use crate::engine::Engine;
use crate::select;

/// Why a model failed its self-test.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// No prompt to probe with.
    #[error("self-test: no probe prompt fits a context of {context} tokens; raise --ctx")]
    NoPrompt {
        /// Context length.
        context: usize,
    },
    /// A step failed.
    #[error("self-test: {0}")]
    Step(String),
    /// Memory was refused.
    #[error("self-test: {0}")]
    OutOfMemory(String),
    /// NaN or infinity in the logits.
    #[error(
        "self-test: {bad} of {vocab} logits are not finite; the weights are damaged or of a kind this build miscomputes"
    )]
    NotFinite {
        /// How many.
        bad: usize,
        /// Logits in a row.
        vocab: usize,
    },
    /// Every logit is the same.
    #[error("self-test: all {vocab} logits are equal; the weights are empty or damaged")]
    Constant {
        /// Logits in a row.
        vocab: usize,
    },
    /// The model answers with control tokens only.
    #[error(
        "self-test: the model answers a plain prompt with control tokens only ({tokens:?}); its weights or its tokenizer are damaged"
    )]
    OnlyControl {
        /// What it generated.
        tokens: Vec<u32>,
    },
}

/// What a passed self-test saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeReport {
    /// Generated tokens.
    pub tokens: Vec<u32>,
    /// Time it took.
    pub took: Duration,
}

/// Generated tokens of a probe: the first from prefill, the second from a decode step, so that both paths run.
const PROBE_TOKENS: usize = 2;

impl<D: Device> Engine<D> {
    /// Prefills `prompt` (a few tokens of plain text) and decodes greedily; the logits must be finite and not constant, and
    /// the tokens not control tokens only. Leaves no trace in the banks.
    ///
    /// # Errors
    /// [`ProbeError`], in one sentence; the process should exit with its self-test code.
    pub fn probe(&mut self, prompt: &[u32]) -> Result<ProbeReport, ProbeError> {
        let started = Instant::now();
        let context = self.config.context;
        if prompt.is_empty() || prompt.len() + PROBE_TOKENS > context {
            return Err(ProbeError::NoPrompt { context });
        }
        let admission = self.banks.admit(&self.device, prompt).ok_or(ProbeError::NoPrompt { context })?;
        let outcome = self.generate(admission.bank, prompt);
        self.banks.release(&self.device, admission.bank, false);
        let tokens = outcome?;
        // An end of generation is a legitimate answer; a BOS, a pad or a role mark for ever is not.
        if tokens.iter().all(|&t| self.vocab.is_control(t) && !self.vocab.is_eog(t)) {
            return Err(ProbeError::OnlyControl { tokens });
        }
        Ok(ProbeReport { tokens, took: started.elapsed() })
    }

    fn generate(&mut self, bank: usize, prompt: &[u32]) -> Result<Vec<u32>, ProbeError> {
        let mut tokens = Vec::with_capacity(PROBE_TOKENS);
        let mut input = prompt.to_vec();
        let mut pos = 0;
        let mut plan = BatchPlan::default();
        let mut row = Vec::new();
        while tokens.len() < PROBE_TOKENS {
            plan.clear();
            let at = plan.push(bank, pos, &input, true).unwrap_or(0);
            pos += input.len();
            self.banks.commit(&self.device, bank, pos).map_err(|e| failed(e.into()))?;
            self.forward(&plan).map_err(failed)?;
            self.device.read(self.model.logits(), at, &mut row);
            let token = judge(&row)?;
            tokens.push(token);
            input = vec![token];
        }
        Ok(tokens)
    }
}

fn failed(e: ModelError) -> ProbeError {
    match e {
        ModelError::Device(DeviceError::OutOfMemory { .. }) => ProbeError::OutOfMemory(e.to_string()),
        e => ProbeError::Step(e.to_string()),
    }
}

/// The greedy token of a healthy row.
fn judge(row: &[f32]) -> Result<u32, ProbeError> {
    let vocab = row.len();
    let bad = row.iter().filter(|l| !l.is_finite()).count();
    if bad > 0 {
        return Err(ProbeError::NotFinite { bad, vocab });
    }
    match select::argmax(row) {
        Some(token) if row.iter().any(|l| *l != row[0]) => Ok(token),
        _ => Err(ProbeError::Constant { vocab }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::EngineConfig;
    use crate::mock::{MockDevice, MockModel, MockVocabulary};

    fn probe(model: MockModel) -> Result<ProbeReport, ProbeError> {
        let mut engine = Engine::new(
            MockDevice::default(),
            Box::new(model),
            Arc::new(MockVocabulary),
            EngineConfig { context: 64, ..EngineConfig::default() },
        )
        .unwrap();
        let outcome = engine.probe(&[1, 2, 3]);
        assert_eq!(engine.banks.committed(&engine.device), 0, "the probe must leave nothing behind");
        outcome
    }

    fn constant(token: u32) -> MockModel {
        MockModel::scripted(Box::new(move |_, logits| logits[token as usize] = 1.0))
    }

    #[test]
    fn a_healthy_model_passes() {
        assert_eq!(probe(MockModel::replying(3, vec![65, 66])).unwrap().tokens, [65, 66]);
        assert_eq!(probe(constant(MockVocabulary::EOG)).unwrap().tokens.len(), 2);
    }

    #[test]
    fn g8_bos_for_ever_fails_the_self_test() {
        let error = probe(constant(MockVocabulary::BOS)).unwrap_err();
        assert_eq!(error, ProbeError::OnlyControl { tokens: vec![257, 257] });
        assert!(error.to_string().contains("control tokens only"));
    }

    #[test]
    fn g8_nan_and_flat_logits_fail_the_self_test() {
        let nan = MockModel::scripted(Box::new(|_, logits| logits[5] = f32::NAN));
        assert_eq!(probe(nan), Err(ProbeError::NotFinite { bad: 1, vocab: 300 }));
        // Only the decode step goes wrong.
        let late = MockModel::scripted(Box::new(|tokens, logits| {
            logits[7] = if tokens.len() > 3 { f32::INFINITY } else { 1.0 };
        }));
        assert_eq!(probe(late), Err(ProbeError::NotFinite { bad: 1, vocab: 300 }));
        let flat = MockModel::scripted(Box::new(|_, logits| logits.fill(0.25)));
        assert_eq!(probe(flat), Err(ProbeError::Constant { vocab: 300 }));
    }

    #[test]
    fn g8_a_step_error_is_named() {
        let model = MockModel::hashing().before(Box::new(|_| Err(ds4_models::ModelError::Bind("out of luck".into()))));
        assert_eq!(probe(model), Err(ProbeError::Step("out of luck".into())));
    }
}
