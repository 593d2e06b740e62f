//! The engine before its thread starts: a model on a device with its banks.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, mpsc};

use ds4_kernels::{BatchPlan, Device, DeviceError};
use ds4_models::speculation::Sequence;
use ds4_models::{Model, ModelError};
use tokio::sync::watch;

use crate::banks::BankTable;
use crate::config::EngineConfig;
use crate::drafting::Drafting;
use crate::handle::{EngineHandle, EngineState, Shared};
use crate::request::EngineError;
use crate::scheduler::Scheduler;
use crate::stats::StatsCells;
use crate::vocab::Vocabulary;

/// A model with its banks, ready to be probed and started.
pub struct Engine<D: Device> {
    pub(crate) device: D,
    pub(crate) model: Box<dyn Model<D>>,
    pub(crate) vocab: Arc<dyn Vocabulary>,
    pub(crate) banks: BankTable<D>,
    pub(crate) drafting: Option<Drafting<D>>,
    pub(crate) config: EngineConfig,
}

impl<D: Device> Engine<D> {
    /// Reserves the banks' address space; commits nothing. Values of `config` out of range are moved into it.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] when address space cannot be had.
    pub fn new(
        device: D,
        mut model: Box<dyn Model<D>>,
        vocab: Arc<dyn Vocabulary>,
        config: EngineConfig,
    ) -> Result<Self, EngineError> {
        let config = config.normalised(model.shape().context);
        let (spec, keep) = (model.state(), config.keep_bytes(model.state()));
        let policy = config.checkpoint_policy();
        let banks = BankTable::new(&device, spec, config.max_batch, config.context, keep, policy)
            .map_err(|e| EngineError::OutOfMemory(e.to_string()))?;
        let drafting = Drafting::new(&device, &mut *model, config.drafts, config.max_batch, config.context)
            .map_err(|e| EngineError::OutOfMemory(e.to_string()))?;
        Ok(Self { device, model, vocab, banks, drafting, config })
    }

    /// The settings in force.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Starts the engine thread.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn spawn(self) -> std::io::Result<EngineHandle> {
        let (commands, received) = mpsc::channel();
        let shared = Arc::new(Shared {
            context: self.config.context,
            vocab: self.model.shape().vocab,
            max_batch: self.config.max_batch,
            max_queue: self.config.max_queue,
            event_capacity: self.config.event_capacity,
            device: self.device.describe(),
            stats: StatsCells::default(),
            state: watch::Sender::new(EngineState::Running),
        });
        let scheduler = Scheduler::new(self, Arc::clone(&shared), received);
        let thread = std::thread::Builder::new().name("ds4-engine".into()).spawn(move || scheduler.run_to_end())?;
        Ok(EngineHandle { shared, commands, thread: Arc::new(Mutex::new(Some(thread))) })
    }

    /// Bytes committed by all banks, the drafter's included.
    pub(crate) fn committed(&self) -> usize {
        let drafter = self.drafting.as_ref().map_or(0, |d| d.committed(&self.device));
        self.banks.committed(&self.device) + drafter
    }

    /// Prepares `bank`, which holds `len` tokens, for a span of `sequence`: with guesses in it, a snapshot is what it goes
    /// back to. Guesses for which there is no memory are dropped.
    pub(crate) fn place(&mut self, bank: usize, len: usize, sequence: &mut Sequence) -> Option<D::Checkpoint> {
        if sequence.drafts().is_empty() {
            return None;
        }
        let snapshot = self.banks.snapshot(&self.device, bank);
        let placed = snapshot.and_then(|s| self.banks.commit(&self.device, bank, len + sequence.rows()).map(|()| s));
        if let Err(e) = &placed {
            tracing::debug!(bank, error = %e, "no room for guesses");
            sequence.limit_drafts(0);
        }
        placed.ok()
    }

    /// First row and number of rows of prompt positions `from..to` that the drafter is to be shown, of a prompt of `len`.
    pub(crate) fn shown(&self, from: usize, to: usize, len: usize) -> (usize, usize) {
        let skipped = self.drafting.as_ref().map_or(0, |d| d.skip(from, to, len));
        (skipped, to - from - skipped)
    }

    /// Runs a plan.
    pub(crate) fn forward(&mut self, plan: &BatchPlan) -> Result<(), ModelError> {
        memory_or_error(|| self.model.forward(&self.device, plan, self.banks.banks_mut()))
    }
}

/// Runs a step. Operations of a device return nothing: one that finds no memory for activations unwinds with a [`DeviceError`], which
/// becomes an error here. What the step has written is for banks that its requests give up.
pub(crate) fn memory_or_error<T>(step: impl FnOnce() -> Result<T, ModelError>) -> Result<T, ModelError> {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|payload| match payload.downcast::<DeviceError>() {
        Ok(e) => Err(ModelError::Device(*e)),
        Err(other) => resume_unwind(other),
    })
}
