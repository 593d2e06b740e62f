//! What the HTTP surfaces need from the rest of the worker. The binary implements it over engine, tokenizer and template;
//! tests implement it over a script.

use std::sync::Arc;
use std::time::Duration;

use ds4_engine::{EngineError, EngineStats, Event, GenerateRequest};
use ds4_text::{AnswerFormat, ChatAbilities, ChatInput, Unenforceable};
use futures_util::stream::BoxStream;

/// What is served, as `/v1/models`, `/v1/stats` and the parsers need it.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Name that requests must give.
    pub name: String,
    /// Architecture family.
    pub family: String,
    /// Catalog entry.
    pub artifact: String,
    /// The weights are random: speeds are real, answers are not.
    pub synthetic: bool,
    /// Name of the prediction block that guesses tokens ahead, if there is one.
    pub drafter: Option<String>,
    /// What conversations may hold beside plain messages.
    pub abilities: ChatAbilities,
    /// Hex BLAKE3 of the content.
    pub blake3: String,
    /// The owner's epoch.
    pub epoch: u64,
    /// Bytes of weights, shared with every other worker of the owner.
    pub weight_bytes: u64,
    /// Longest sequence that this worker serves, in tokens.
    pub context: usize,
    /// Longest context that the model was trained for, in tokens.
    pub context_train: usize,
    /// Vocabulary size: token ids are below it.
    pub vocab: usize,
    /// Device description.
    pub device: String,
    /// Sequences that run at the same time.
    pub max_batch: usize,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Unix time at which the worker became ready, in seconds.
    pub created: u64,
    /// From exec to ready, in milliseconds.
    pub ready_ms: f64,
}

/// A conversation, ready to be continued.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// How the answer is read; `None`: it is plain text.
    pub format: Option<Arc<dyn AnswerFormat>>,
}

/// Why a prompt could not be turned into tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// The chat template refused the conversation (its own message).
    #[error("the model's chat template refuses this conversation: {0}")]
    Template(String),
    /// The model has no chat template.
    #[error("this model has no chat template; use /v1/completions")]
    NoTemplate,
    /// Its answer cannot be held to its schema.
    #[error(transparent)]
    Schema(#[from] Unenforceable),
    /// So long that it was not tokenised to its end.
    #[error("the prompt has at least {at_least} tokens")]
    TooLong {
        /// Tokens counted before giving up; beyond the context.
        at_least: usize,
    },
}

/// Events of one submitted request. Dropping the stream cancels the request.
pub type Events = BoxStream<'static, Event>;

/// The worker behind the API. Methods may be called from any thread; `tokenize` and `render` may take long and are
/// called off the runtime for long inputs.
pub trait Backend: Send + Sync + 'static {
    /// What is served.
    fn model(&self) -> &ModelInfo;

    /// Queues one sequence.
    ///
    /// # Errors
    /// The engine's typed refusals.
    fn submit(&self, request: GenerateRequest) -> Result<Events, EngineError>;

    /// The engine's counters.
    fn stats(&self) -> EngineStats;

    /// Tokens of a raw prompt: special tokens that the text spells out are recognised, and the model's
    /// beginning-of-sequence token is added where its tokenizer says so.
    ///
    /// # Errors
    /// [`PromptError::TooLong`].
    fn tokenize(&self, text: &str) -> Result<Vec<u32>, PromptError>;

    /// Tokens of a conversation, ending where the assistant's turn begins. Text inside messages never becomes a special token.
    ///
    /// # Errors
    /// The template's refusal, or [`PromptError::TooLong`].
    fn render(&self, input: &ChatInput) -> Result<Prompt, PromptError>;

    /// Bytes that a token stands for; empty for an unknown id.
    fn token_bytes(&self, token: u32) -> Vec<u8>;

    /// True for tokens that end a generation.
    fn is_eog(&self, token: u32) -> bool;
}

/// Limits and deadlines of the HTTP side. Every deadline that the server has is here (and in the worker's configuration).
#[derive(Clone, Debug)]
pub struct ApiConfig {
    /// Largest request body in bytes.
    pub max_body: usize,
    /// Bytes of request bodies held at the same time, over all connections.
    pub max_body_total: usize,
    /// Deepest nesting of a JSON body.
    pub max_json_depth: usize,
    /// Long bodies that are parsed at the same time; more wait, and leave with their clients. Cores are the engine's first.
    pub max_parsing: usize,
    /// Bodies parsed at the same time that ask for a grammar, which may take half a second each; beside the others, so that these wait for
    /// none of them.
    pub max_grammars: usize,
    /// Connections served at the same time; more wait in the listen queue.
    pub max_connections: usize,
    /// A connection that has not sent a whole request head this long after it was opened (or after its last response)
    /// is closed.
    pub header_timeout: Duration,
    /// A body whose next bytes do not arrive for this long ends in 408.
    pub body_idle_timeout: Duration,
    /// A body that is not complete after this long ends in 408.
    pub body_timeout: Duration,
    /// A client that takes no byte of its response for this long loses its connection.
    pub stall_timeout: Duration,
    /// Longest life of a generation, queueing included; `None`: no limit.
    pub request_timeout: Option<Duration>,
    /// Pause after which an event stream carries a comment line, so that clients see life while queued or prefilling.
    pub keepalive_interval: Duration,
}

impl Default for ApiConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            max_parsing: cores.div_ceil(2),
            max_grammars: cores.div_ceil(8),
            max_body: 64 << 20,
            max_body_total: 256 << 20,
            max_json_depth: 64,
            max_connections: 1024,
            header_timeout: Duration::from_secs(30),
            body_idle_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(300),
            stall_timeout: Duration::from_secs(30),
            request_timeout: None,
            keepalive_interval: Duration::from_secs(4),
        }
    }
}
