//! The handle through which the rest of the worker talks to the engine thread.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::channel::{self, EventReceiver, EventSender};
use crate::request::{EngineError, GenerateRequest};
use crate::stats::{EngineStats, StatsCells};

/// What the engine thread is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// A request that holds a queue slot.
    Submit(Box<Submission>),
    /// Something changed: a receiver was dropped or made room.
    Wake,
    /// Refuse what waits, finish what runs until the deadline, stop.
    Drain(Instant),
    /// End everything now.
    Shutdown,
}

/// A request on its way to the engine thread.
#[derive(Debug)]
pub(crate) struct Submission {
    pub request: GenerateRequest,
    pub events: EventSender,
    pub submitted: Instant,
}

/// Where the engine is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// Admits and runs.
    Running,
    /// Refuses new requests and finishes what runs.
    Draining,
    /// Ended as asked, by a drain or a shutdown.
    Stopped,
    /// A step failed; every request was told. The process should exit non-zero so that its supervisor starts another.
    Failed(String),
}

impl EngineState {
    /// True when the engine thread has ended.
    pub fn is_final(&self) -> bool {
        matches!(self, EngineState::Stopped | EngineState::Failed(_))
    }
}

/// What both sides share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub context: usize,
    pub vocab: usize,
    pub max_batch: usize,
    pub max_queue: usize,
    pub event_capacity: usize,
    pub device: String,
    pub stats: StatsCells,
    pub state: watch::Sender<EngineState>,
}

/// A cheaply cloned handle to the engine thread. The engine ends when all handles are dropped and all requests done.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) commands: Sender<Command>,
    pub(crate) thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl EngineHandle {
    /// Queues a request. Returns at once; the events say the rest. `max_tokens` is clamped to what the context leaves.
    ///
    /// # Errors
    /// A typed refusal: bad parameter, empty or overlong prompt, token id outside the vocabulary, full queue, draining.
    pub fn submit(&self, mut request: GenerateRequest) -> Result<EventReceiver, EngineError> {
        let shared = &*self.shared;
        match &*shared.state.borrow() {
            EngineState::Running => {}
            EngineState::Draining | EngineState::Stopped => return Err(EngineError::Draining),
            EngineState::Failed(why) => return Err(EngineError::Internal(why.clone())),
        }
        check(&request, shared.context, shared.vocab)?;
        request.max_tokens = request.max_tokens.min(shared.context - request.prompt.len());
        if !shared.stats.reserve_queue_slot(shared.max_queue) {
            shared.stats.refused.fetch_add(1, Relaxed);
            return Err(EngineError::QueueFull { limit: shared.max_queue });
        }
        let (events, receiver) = channel::channel(shared.event_capacity, self.commands.clone());
        let submission = Box::new(Submission { request, events, submitted: Instant::now() });
        if self.commands.send(Command::Submit(submission)).is_err() {
            shared.stats.release_queue_slot();
            return Err(EngineError::Draining);
        }
        shared.stats.requests.fetch_add(1, Relaxed);
        Ok(receiver)
    }

    /// A snapshot of the counters.
    pub fn stats(&self) -> EngineStats {
        self.shared.stats.snapshot()
    }

    /// Longest sequence in tokens, prompt and output together.
    pub fn context(&self) -> usize {
        self.shared.context
    }

    /// Sequences that can run at the same time.
    pub fn max_batch(&self) -> usize {
        self.shared.max_batch
    }

    /// Requests that may wait.
    pub fn max_queue(&self) -> usize {
        self.shared.max_queue
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        &self.shared.device
    }

    /// The engine's state now.
    pub fn state(&self) -> EngineState {
        self.shared.state.borrow().clone()
    }

    /// Completes when the engine thread has ended, with [`EngineState::Stopped`] or [`EngineState::Failed`].
    pub async fn stopped(&self) -> EngineState {
        let mut state = self.shared.state.subscribe();
        match state.wait_for(EngineState::is_final).await {
            Ok(state) => state.clone(),
            Err(_) => EngineState::Stopped,
        }
    }

    /// Refuses new requests from now on (`Draining`), lets running and waiting ones finish for at most `deadline`, then
    /// ends them with `Failed(Draining)` and stops the thread. Returns at once; await [`EngineHandle::stopped`].
    pub fn drain(&self, deadline: Duration) {
        self.shared.state.send_if_modified(|state| {
            let running = *state == EngineState::Running;
            if running {
                *state = EngineState::Draining;
            }
            running
        });
        let _ = self.commands.send(Command::Drain(Instant::now() + deadline));
    }

    /// Ends every request with `Failed(Draining)` after the current step and stops the thread. Returns at once.
    pub fn shutdown(&self) {
        let _ = self.commands.send(Command::Shutdown);
    }

    /// Waits for the engine thread to end; call [`EngineHandle::drain`] or [`EngineHandle::shutdown`] before.
    pub fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread reports its own failures through the state.
            let _ = thread.join();
        }
    }
}

/// Everything about a request that can be judged without the engine thread.
fn check(request: &GenerateRequest, context: usize, vocab: usize) -> Result<(), EngineError> {
    request.sampling.validate()?;
    if request.max_tokens == 0 {
        return Err(EngineError::BadParameter { name: "max_tokens", value: "0".into(), rule: "must be at least 1" });
    }
    if request.prompt.is_empty() {
        return Err(EngineError::EmptyPrompt);
    }
    if request.prompt.len() >= context {
        return Err(EngineError::ContextExceeded { prompt: request.prompt.len(), context });
    }
    let known = |token: &u32| usize::try_from(*token).is_ok_and(|t| t < vocab);
    if let Some(at) = request.prompt.iter().position(|t| !known(t)) {
        return Err(EngineError::BadParameter {
            name: "prompt",
            value: format!("token {} at index {at}", request.prompt[at]),
            rule: "token ids must lie inside the model's vocabulary",
        });
    }
    let wanted = &request.logits.prompt;
    let last = request.prompt.len() - 1;
    if let Some(bad) = wanted.iter().zip(wanted.iter().skip(1)).find_map(|(a, b)| (a >= b).then_some(b)) {
        return Err(EngineError::BadParameter {
            name: "positions",
            value: bad.to_string(),
            rule: "positions must ascend without repetition",
        });
    }
    if let Some(bad) = wanted.last().filter(|p| **p >= last) {
        return Err(EngineError::BadParameter {
            name: "positions",
            value: bad.to_string(),
            rule: "positions must lie before the prompt's last token",
        });
    }
    if let Some((token, _)) = request.sampling.logit_bias.iter().find(|(t, _)| !known(t)) {
        return Err(EngineError::BadParameter {
            name: "logit_bias",
            value: format!("token {token}"),
            rule: "token ids must lie inside the model's vocabulary",
        });
    }
    if request.stop.iter().any(Vec::is_empty) {
        return Err(EngineError::BadParameter {
            name: "stop",
            value: "\"\"".into(),
            rule: "stop strings must not be empty",
        });
    }
    Ok(())
}
