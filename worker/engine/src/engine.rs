//! The engine before its thread starts: a model on a device with its banks.

use std::sync::{Arc, Mutex, mpsc};

use ds4_kernels::{BatchPlan, Device};
use ds4_models::{Model, ModelError};
use tokio::sync::watch;

use crate::banks::BankTable;
use crate::config::EngineConfig;
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
    pub(crate) config: EngineConfig,
}

impl<D: Device> Engine<D> {
    /// Reserves the banks' address space; commits nothing. Values of `config` out of range are moved into it.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] when address space cannot be had.
    pub fn new(
        device: D,
        model: Box<dyn Model<D>>,
        vocab: Arc<dyn Vocabulary>,
        config: EngineConfig,
    ) -> Result<Self, EngineError> {
        let config = config.normalised(model.shape().context);
        let (spec, keep) = (model.state(), config.keep_bytes(model.state()));
        let policy = config.checkpoint_policy();
        let banks = BankTable::new(&device, spec, config.max_batch, config.context, keep, policy)
            .map_err(|e| EngineError::OutOfMemory(e.to_string()))?;
        Ok(Self { device, model, vocab, banks, config })
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

    /// Runs a plan.
    pub(crate) fn forward(&mut self, plan: &BatchPlan) -> Result<(), ModelError> {
        self.model.forward(&self.device, plan, self.banks.banks_mut())
    }
}
