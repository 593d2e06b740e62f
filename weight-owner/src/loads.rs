//! Loads as the daemon sees them: one at a time, joined by whoever asks for the same file meanwhile, each with a deadline.

mod attempt;
mod child;
mod follower;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::Failure;
use crate::ledger::{Ledger, Ready};
use crate::loader::backend::Choice;
use attempt::Attempt;
use follower::{Flight, loading};

pub use child::LOADER_COMMAND;
pub use follower::Follower;

/// What somebody asks for.
#[derive(Clone, Debug, Default)]
pub struct LoadRequest {
    /// The GGUF or any of its shards.
    pub path: PathBuf,
    /// Name; empty: the catalog's.
    pub name: String,
    /// Only the plan.
    pub dry_run: bool,
    /// Content hash that it must have, in hexadecimal.
    pub expect_blake3: Option<String>,
    /// A new epoch even when the content is READY already.
    pub reload: bool,
    /// How long it may take.
    pub deadline: Duration,
}

/// What all loads have in common.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Bytes to leave free.
    pub reserve_bytes: u64,
    /// Accept catalog entries for development.
    pub allow_dev_models: bool,
    /// Whose memory.
    pub backend: Choice,
}

/// The end of a load that went well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// What is READY now; `None` after a dry run.
    pub ready: Option<Ready>,
}

struct InFlight {
    name: String,
    flight: watch::Receiver<Flight>,
}

/// Runs loads.
pub struct Loads {
    ledger: Arc<Ledger>,
    options: LoadOptions,
    in_flight: Mutex<HashMap<PathBuf, InFlight>>,
    /// One loader at a time: the plan of a second one would be judged by memory that the first is about to take.
    gate: tokio::sync::Mutex<()>,
    stop: watch::Sender<bool>,
}

impl Loads {
    /// No loads yet.
    pub fn new(ledger: Arc<Ledger>, options: LoadOptions) -> Self {
        Self {
            ledger,
            options,
            in_flight: Mutex::default(),
            gate: tokio::sync::Mutex::default(),
            stop: watch::channel(false).0,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, InFlight>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What backend loads ask for.
    pub fn backend(&self) -> &'static str {
        self.options.backend.name()
    }

    /// Ends running loads and refuses new ones.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Starts a load, or joins the one of the same file. The load goes on when nobody follows it any more.
    ///
    /// # Errors
    /// The request contradicts the load that it would join, or the owner is stopping.
    pub fn begin(self: &Arc<Self>, mut request: LoadRequest) -> Result<Follower, Failure> {
        if *self.stop.borrow() {
            return Err(Failure::other("owner_stopping", "the weight owner is stopping; load when it is back"));
        }
        // One name a file, however it is spelled. A path that does not exist is the loader's to refuse.
        request.path = std::fs::canonicalize(&request.path).unwrap_or(request.path);
        let expect_blake3 = request.expect_blake3.clone();
        let follow = |flight| Ok(Follower::new(flight, expect_blake3));
        let (sender, flight) = watch::channel(Flight::default());
        if !request.dry_run {
            let mut in_flight = self.lock();
            if let Some(running) = in_flight.get(&request.path) {
                if !request.name.is_empty() && request.name != running.name {
                    let under = match running.name.as_str() {
                        "" => "its own name".to_owned(),
                        name => format!("the name {name:?}"),
                    };
                    let text = format!(
                        "{} is being loaded under {under}; wait for that, then load it as {:?}",
                        request.path.display(),
                        request.name
                    );
                    return Err(Failure::usage("load_in_flight", text));
                }
                return follow(running.flight.clone());
            }
            let entry = InFlight { name: request.name.clone(), flight: flight.clone() };
            in_flight.insert(request.path.clone(), entry);
        }
        let loads = Arc::clone(self);
        tokio::spawn(async move {
            let end = loads.run(&request, &sender).await;
            if let Err(failure) = &end {
                tracing::error!(path = %request.path.display(), code = failure.code, "load failed: {}", failure.message);
            }
            if !request.dry_run {
                loads.lock().remove(&request.path);
            }
            sender.send_modify(|f| f.end = Some(end));
        });
        follow(flight)
    }

    async fn run(&self, request: &LoadRequest, flight: &watch::Sender<Flight>) -> Result<Loaded, Failure> {
        let mut stop = self.stop.subscribe();
        let stopped = async {
            // The sender lives as long as self.
            let _ = stop.wait_for(|s| *s).await;
            Failure::other("owner_stopping", "the weight owner is stopping; the load was cancelled")
        };
        let attempt = async {
            let _turn = match self.gate.try_lock() {
                Ok(turn) => turn,
                Err(_) => {
                    flight.send_modify(|f| f.milestones.push(loading("queued")));
                    self.gate.lock().await
                }
            };
            let epoch = self.ledger.next_epoch();
            let mut attempt = Attempt::new(self, request, flight, epoch);
            let end = match tokio::time::timeout(request.deadline, attempt.run()).await {
                Ok(end) => end,
                Err(_) => Err(Failure::other(
                    "load_deadline",
                    format!(
                        "the load of {} did not finish within {} s; raise --load-deadline if the disk is that slow",
                        request.path.display(),
                        request.deadline.as_secs()
                    ),
                )),
            };
            if let (Err(failure), true) = (&end, attempt.entered()) {
                self.ledger.fail(epoch, failure);
            }
            end
        };
        tokio::select! {
            end = attempt => end,
            failure = stopped => Err(failure),
        }
    }
}
