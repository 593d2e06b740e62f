//! How a load stands, for everybody who follows it.

use ds4_proto::v1;
use tokio::sync::watch;

use super::Loaded;
use crate::Failure;

/// How a load stands: everything worth keeping, the newest progress, and the end.
#[derive(Clone, Debug, Default)]
pub(super) struct Flight {
    pub milestones: Vec<v1::LoadProgress>,
    pub latest: Option<v1::LoadProgress>,
    pub end: Option<Result<Loaded, Failure>>,
}

/// Follows one load.
#[derive(Clone)]
pub struct Follower {
    flight: watch::Receiver<Flight>,
    seen: usize,
    ended: bool,
    expect_blake3: Option<String>,
}

impl Follower {
    /// Of this load, from its beginning, by a client that expects such content.
    pub(super) fn new(flight: watch::Receiver<Flight>, expect_blake3: Option<String>) -> Self {
        Self { flight, seen: 0, ended: false, expect_blake3 }
    }

    /// The next thing to tell; `None` after the end (READY, FAILED, or the plan of a dry run) was told.
    pub async fn next(&mut self) -> Option<v1::LoadProgress> {
        loop {
            if self.ended {
                return None;
            }
            let now = self.flight.borrow_and_update().clone();
            if let Some(milestone) = now.milestones.get(self.seen) {
                self.seen += 1;
                return Some(milestone.clone());
            }
            if let Some(end) = now.end {
                self.ended = true;
                return Some(self.last(end));
            }
            if self.flight.changed().await.is_err() {
                self.ended = true;
                return Some(failed(&Failure::other("owner_stopping", "the weight owner stopped during the load")));
            }
            // Only progress changed: tell the newest.
            let now = self.flight.borrow();
            if now.milestones.len() == self.seen
                && now.end.is_none()
                && let Some(latest) = &now.latest
            {
                return Some(latest.clone());
            }
        }
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The load's failure.
    pub async fn outcome(mut self) -> Result<Loaded, Failure> {
        let end = self.flight.wait_for(|f| f.end.is_some()).await.ok().and_then(|f| f.end.clone());
        let end =
            end.unwrap_or_else(|| Err(Failure::other("owner_stopping", "the weight owner stopped during the load")));
        self.judge(end)
    }

    /// A joined load may not have what this client expects.
    fn judge(&self, end: Result<Loaded, Failure>) -> Result<Loaded, Failure> {
        let loaded = end?;
        if let (Some(expected), Some(ready)) = (&self.expect_blake3, &loaded.ready)
            && !expected.eq_ignore_ascii_case(&ready.blake3)
        {
            let text = format!(
                "{:?} has content {}, but {expected} was expected; load the right file",
                ready.model, ready.blake3
            );
            return Err(Failure::model("content_mismatch", text));
        }
        Ok(loaded)
    }

    fn last(&self, end: Result<Loaded, Failure>) -> v1::LoadProgress {
        match self.judge(end) {
            Err(failure) => failed(&failure),
            Ok(Loaded { ready: None }) => v1::LoadProgress {
                state: v1::ModelState::Unspecified.into(),
                stage: "plan".into(),
                ..Default::default()
            },
            Ok(Loaded { ready: Some(ready) }) => v1::LoadProgress {
                state: v1::ModelState::Ready.into(),
                stage: "publish".into(),
                epoch: ready.epoch,
                model: ready.model,
                blake3: ready.blake3,
                ..Default::default()
            },
        }
    }
}

fn failed(failure: &Failure) -> v1::LoadProgress {
    v1::LoadProgress {
        state: v1::ModelState::Failed.into(),
        error_code: failure.code.clone(),
        error: failure.message.clone(),
        ..Default::default()
    }
}

pub(super) fn loading(stage: &str) -> v1::LoadProgress {
    v1::LoadProgress { state: v1::ModelState::Loading.into(), stage: stage.into(), ..Default::default() }
}
