//! A scripted backend: tokens are bytes, and what it says, when, and how it fails is up to the test.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ds4_engine::{EngineError, EngineStats, Event, FinishReason, GenerateRequest, Timings, TokenLogprob};
use futures_util::StreamExt;
use tokio::sync::mpsc;

use crate::backend::{Backend, ChatMessage, Events, ModelInfo, PromptError};

/// Ends a generation; bytes are the tokens below it.
pub const EOG: u32 = 256;

/// What is served in tests.
pub fn model() -> ModelInfo {
    ModelInfo {
        name: "scripted".into(),
        family: "llama".into(),
        artifact: "scripted".into(),
        blake3: "00".repeat(32),
        epoch: 1,
        weight_bytes: 1000,
        context: 4096,
        context_train: 8192,
        vocab: 257,
        device: "script".into(),
        max_batch: 4,
        max_queue: 8,
        created: 1_700_000_000,
        ready_ms: 1.0,
    }
}

/// The script.
#[derive(Clone)]
pub struct Script {
    pub model: ModelInfo,
    /// What every generation says; the seed is appended when there is one.
    pub says: String,
    pub queued: Duration,
    pub prefill: Duration,
    pub per_token: Duration,
    /// Fails before the token of this index.
    pub fail_at: Option<(usize, EngineError)>,
    /// Refuses the k-th submission and later ones.
    pub refuse_from: Option<(usize, EngineError)>,
    pub seen: Arc<Mutex<Seen>>,
}

/// What happened.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub requests: Vec<GenerateRequest>,
    /// Stage of every request whose receiver was dropped before its end.
    pub cancelled: Vec<&'static str>,
    pub finished: usize,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            model: model(),
            says: "Hello, world!".into(),
            queued: Duration::ZERO,
            prefill: Duration::ZERO,
            per_token: Duration::ZERO,
            fail_at: None,
            refuse_from: None,
            seen: Arc::default(),
        }
    }
}

impl Script {
    pub fn seen(&self) -> Seen {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, f: impl FnOnce(&mut Seen)) {
        f(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits, and says whether the receiver is still there.
    async fn wait(&self, stage: &'static str, tx: &mpsc::Sender<Event>, time: Duration) -> bool {
        if time.is_zero() && !tx.is_closed() {
            return true;
        }
        tokio::select! {
            () = tx.closed() => {
                self.note(|s| s.cancelled.push(stage));
                false
            }
            () = tokio::time::sleep(time) => true,
        }
    }

    async fn play(self, request: GenerateRequest, tx: mpsc::Sender<Event>) {
        let mut said = self.says.clone();
        if let Some(seed) = request.sampling.seed {
            said.push_str(&format!(" seed {seed}"));
        }
        let mut tokens: Vec<u32> = said.bytes().map(u32::from).collect();
        tokens.push(EOG);
        let reason = if tokens.len() > request.max_tokens { FinishReason::Length } else { FinishReason::Stop };
        tokens.truncate(request.max_tokens);
        if !self.wait("queued", &tx, self.queued).await {
            return;
        }
        let _ = tx.send(Event::Admitted).await;
        if !self.wait("prefill", &tx, self.prefill).await {
            return;
        }
        let first = Instant::now();
        let mut held = Vec::new();
        for (i, token) in tokens.iter().enumerate() {
            if let Some((at, e)) = &self.fail_at
                && *at == i
            {
                let _ = tx.send(Event::Failed(e.clone())).await;
                return;
            }
            if i > 0 && !self.wait("decode", &tx, self.per_token).await {
                return;
            }
            held.extend(u8::try_from(*token));
            let text = match std::str::from_utf8(&held) {
                Ok(text) => text.to_owned(),
                Err(_) => String::new(),
            };
            if !text.is_empty() {
                held.clear();
            }
            let logprob = request.logprobs.map(|k| TokenLogprob {
                token: *token,
                logprob: -0.5,
                top: (0..k).map(|r| ((*token + r) % 256, -0.5 - f32::from(u8::try_from(r).unwrap_or(0)))).collect(),
            });
            if tx.send(Event::Token { token: *token, text, logprob }).await.is_err() {
                self.note(|s| s.cancelled.push("decode"));
                return;
            }
        }
        let timings = Timings {
            prompt_tokens: request.prompt.len(),
            cached_tokens: 0,
            completion_tokens: tokens.len(),
            queued: self.queued,
            prefill: self.prefill,
            decode: first.elapsed(),
        };
        self.note(|s| s.finished += 1);
        let text = String::from_utf8_lossy(&held).into_owned();
        let _ = tx.send(Event::Done { text, reason, timings }).await;
    }
}

impl Backend for Script {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn submit(&self, request: GenerateRequest) -> Result<Events, EngineError> {
        if request.prompt.len() >= self.model.context {
            return Err(EngineError::ContextExceeded { prompt: request.prompt.len(), context: self.model.context });
        }
        let count = self.seen().requests.len();
        if let Some((from, e)) = &self.refuse_from
            && count >= *from
        {
            return Err(e.clone());
        }
        self.note(|s| s.requests.push(request.clone()));
        let (tx, rx) = mpsc::channel(64);
        tokio::spawn(self.clone().play(request, tx));
        Ok(futures_util::stream::unfold(rx, |mut rx| async { rx.recv().await.map(|e| (e, rx)) }).boxed())
    }

    fn stats(&self) -> EngineStats {
        let seen = self.seen();
        EngineStats {
            requests: seen.requests.len() as u64,
            finished: seen.finished as u64,
            bank_bytes: 4096,
            decode_tokens: 77,
            ..EngineStats::default()
        }
    }

    fn tokenize(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        let limit = 4 * self.model.context;
        if text.len() > limit {
            return Err(PromptError::TooLong { at_least: limit });
        }
        Ok(text.bytes().map(u32::from).collect())
    }

    fn render(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, PromptError> {
        if messages.iter().any(|m| m.content == "refuse me") {
            return Err(PromptError::Template("roles must alternate".into()));
        }
        let text: String = messages.iter().map(|m| format!("{}: {}\n", m.role, m.content)).collect();
        self.tokenize(&text)
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        u8::try_from(token).map(|b| vec![b]).unwrap_or_default()
    }

    fn is_eog(&self, token: u32) -> bool {
        token == EOG
    }
}
