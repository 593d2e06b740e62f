//! A scripted backend: tokens are bytes, and what it says, when, and how it fails is up to the test.

use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ds4_engine::{EngineError, EngineStats, Event, FinishReason, GenerateRequest, Timings, TokenLogprob};
use ds4_manifests::GgufModel;
use ds4_text::{ChatContent, ChatInput, ChatTemplate, Part, Piece, PlainReader, Read, Specials, Steer, Tokenizer};
use futures_util::StreamExt;
use tokio::sync::mpsc;

use crate::backend::{Backend, Events, ModelInfo, Prompt, PromptError};

/// Ends a generation; bytes are the tokens below it.
pub const EOG: u32 = 256;

/// What is served in tests.
pub fn model() -> ModelInfo {
    ModelInfo {
        name: "scripted".into(),
        family: "llama".into(),
        artifact: "scripted".into(),
        synthetic: false,
        drafter: None,
        abilities: Default::default(),
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
    /// The text side of a real family in place of bytes. What is said is then in its tokens.
    pub text: Option<&'static Text>,
}

/// A model's text side.
pub struct Text {
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
}

/// That of the tiny DeepSeek V4 of the end-to-end tests: bytes, a few words and the family's control tokens.
pub static DEEPSEEK_V4: LazyLock<Text> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/deepseek_v4/tiny-v4.gguf");
    let metadata = GgufModel::open(&path).expect("the fixture").metadata;
    Text {
        tokenizer: Tokenizer::from_metadata(&metadata).expect("tokenizer"),
        template: ChatTemplate::compile(&metadata).expect("template"),
    }
});

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
            text: None,
        }
    }
}

impl Script {
    /// A DeepSeek V4 that says this.
    pub fn deepseek_v4(says: &str) -> Self {
        let text: &'static Text = &DEEPSEEK_V4;
        let model = ModelInfo {
            vocab: text.tokenizer.vocab_size(),
            abilities: text.template.abilities(),
            family: "dev-deepseek4".into(),
            ..model()
        };
        Self { model, says: says.into(), text: Some(text), ..Self::default() }
    }

    /// What is said, as tokens, without an end.
    pub fn tokens(&self, said: &str) -> Vec<u32> {
        match self.text {
            Some(text) => text.tokenizer.encode(said, Specials::Parse),
            None => said.bytes().map(u32::from).collect(),
        }
    }

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
        let mut waiting = self.tokens(&said).into_iter().peekable();
        let end = self.text.and_then(|t| t.tokenizer.eos()).unwrap_or(EOG);
        let mut reader = match &request.format {
            Some(format) => format.reader(request.stop.clone()),
            None => Box::new(PlainReader::new(request.stop.clone())),
        };
        if !self.wait("queued", &tx, self.queued).await {
            return;
        }
        let _ = tx.send(Event::Admitted).await;
        if !self.wait("prefill", &tx, self.prefill).await {
            return;
        }
        let first = Instant::now();
        let (mut made, mut reasoning_tokens, mut called) = (0, 0, false);
        let mut count = |read: &Read| {
            reasoning_tokens += read.settled.iter().filter(|p| **p == Part::Reasoning).count();
            called |= read.pieces.iter().any(|p| matches!(p, Piece::CallEnd));
        };
        let reason = loop {
            if made == request.max_tokens {
                break FinishReason::Length;
            }
            if let Some((at, e)) = &self.fail_at
                && *at == made
            {
                let _ = tx.send(Event::Failed(e.clone())).await;
                return;
            }
            if made > 0 && !self.wait("decode", &tx, self.per_token).await {
                return;
            }
            let token = match reader.steer() {
                Steer::Force(token) => token,
                // What it would say if it may, else the first that it may.
                Steer::OneOf(tokens) => {
                    let said = waiting.peek().copied().filter(|t| tokens.contains(t));
                    said.map_or(tokens[0], |t| {
                        waiting.next();
                        t
                    })
                }
                _ => waiting.next().or_else(|| reader.instead_of_end()).unwrap_or(end),
            };
            made += 1;
            let control = self.text.is_some_and(|t| t.tokenizer.is_control(token));
            let read = reader.push(token, &self.token_bytes(token), control || token == end);
            count(&read);
            let ended = read.ended || token == end;
            let logprob = request.logprobs.map(|k| TokenLogprob {
                token,
                logprob: -0.5,
                top: (0..k).map(|r| ((token + r) % 256, -0.5 - f32::from(u8::try_from(r).unwrap_or(0)))).collect(),
            });
            if tx.send(Event::Token { token, read, logprob }).await.is_err() {
                self.note(|s| s.cancelled.push("decode"));
                return;
            }
            if ended {
                break FinishReason::Stop;
            }
        };
        let read = reader.finish(reason == FinishReason::Length);
        count(&read);
        let reason = if called && reason == FinishReason::Stop { FinishReason::ToolCalls } else { reason };
        let timings = Timings {
            prompt_tokens: request.prompt.len(),
            cached_tokens: 0,
            completion_tokens: made,
            reasoning_tokens,
            queued: self.queued,
            prefill: self.prefill,
            decode: first.elapsed(),
        };
        self.note(|s| s.finished += 1);
        let _ = tx.send(Event::Done { read, reason, timings }).await;
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

    fn render(&self, input: &ChatInput) -> Result<Prompt, PromptError> {
        if let Some(text) = self.text {
            let prompt = text.template.render(input).map_err(|e| PromptError::Template(e.to_string()))?;
            let format = text.template.answer_format(input, &text.tokenizer)?;
            return Ok(Prompt { tokens: prompt.encode(&text.tokenizer), format });
        }
        let mut text = String::new();
        for m in &input.messages {
            let ChatContent::Text(content) = &m.content else {
                return Err(PromptError::Template("only text".into()));
            };
            if content == "refuse me" {
                return Err(PromptError::Template("roles must alternate".into()));
            }
            text.push_str(&format!("{}: {content}\n", m.role));
        }
        Ok(Prompt { tokens: self.tokenize(&text)?, format: None })
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        match self.text {
            Some(text) => text.tokenizer.token_bytes(token).to_vec(),
            None => u8::try_from(token).map(|b| vec![b]).unwrap_or_default(),
        }
    }

    fn is_eog(&self, token: u32) -> bool {
        self.text.map_or(token == EOG, |t| t.tokenizer.is_eog(token))
    }
}
