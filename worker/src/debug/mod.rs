//! The gRPC debugging service of proto/ds4/v1/debug.proto: tokens of prompts, and distributions at their steps.

mod distribution;

use std::sync::Arc;

use ds4_api::{Backend as _, PromptError};
use ds4_engine::{EngineError, Event, EventReceiver, GenerateRequest, LogitsWanted, SamplingParams};
use ds4_proto::v1;
use ds4_proto::v1::debug_server::Debug;
use ds4_proto::v1::score_reply::Event as Said;
use ds4_text::deepseek_v4::Thinking;
use ds4_text::{ChatInput, ChatMessage, TextError};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::backend::Serving;
use distribution::Distribution;

/// Name of the service, as health and reflection know it.
pub const SERVICE: &str = "ds4.v1.Debug";
/// Largest `top_k`.
const MAX_TOP_K: u32 = 1000;
/// Replies that may wait for a client. Each may hold a row of logits; the engine pauses the request behind them.
const REPLIES: usize = 4;

/// The service.
pub struct Inspector {
    pub serving: Arc<Serving>,
}

fn narrow(n: impl TryInto<u32>) -> u32 {
    n.try_into().unwrap_or(u32::MAX)
}

fn invalid(e: impl std::fmt::Display) -> Status {
    Status::invalid_argument(e.to_string())
}

/// An engine's refusal, with the code that says whether trying again helps.
fn refusal(e: &EngineError) -> Status {
    let text = e.to_string();
    match e {
        EngineError::QueueFull { .. } | EngineError::Draining => Status::unavailable(text),
        EngineError::ContextExceeded { .. } | EngineError::EmptyPrompt | EngineError::BadParameter { .. } => {
            Status::invalid_argument(text)
        }
        EngineError::Stalled { .. } => Status::aborted(text),
        EngineError::OutOfMemory(_) => Status::resource_exhausted(text),
        EngineError::Unenforceable(_) => Status::invalid_argument(text),
        EngineError::Internal(_) => Status::internal(text),
    }
}

fn too_long(at_least: usize, context: usize) -> Status {
    invalid(format!(
        "the prompt has at least {at_least} tokens and the context is {context}; shorten it or raise --ctx"
    ))
}

/// Token ids of a prompt. Long texts take long: to be called off the runtime.
fn tokens_of(serving: &Serving, prompt: Option<v1::Prompt>) -> Result<Vec<u32>, Status> {
    use v1::prompt::Form;
    match prompt.and_then(|p| p.form) {
        None => Err(invalid("the request has no prompt: give text, chat or tokens")),
        Some(Form::Text(text)) => serving.tokenize(&text).map_err(|e| match e {
            PromptError::TooLong { at_least } => too_long(at_least, serving.info.context),
            e => invalid(e),
        }),
        Some(Form::Tokens(tokens)) => Ok(tokens.ids),
        Some(Form::Chat(chat)) => {
            let template = serving.template.as_ref().ok_or_else(|| {
                Status::failed_precondition("this model has no chat template; give the prompt as text (--raw)")
            })?;
            let rendered =
                template.render(&chat_input(&chat, template.abilities().reasoning)?).map_err(|e| match e {
                    TextError::Refused { reason } => {
                        invalid(format!("the model's chat template refuses this conversation: {reason}"))
                    }
                    e => invalid(e),
                })?;
            let limit = serving.info.context.saturating_mul(4);
            rendered.encode_up_to(&serving.tokenizer, limit).map_err(|e| too_long(e.at_least, serving.info.context))
        }
    }
}

/// The conversation. `reasons`: the model has a reasoning mode, in which the HTTP API answers unless told otherwise.
fn chat_input(chat: &v1::ChatPrompt, reasons: bool) -> Result<ChatInput, Status> {
    let thinking = match v1::Thinking::try_from(chat.thinking) {
        Ok(v1::Thinking::Unspecified) if reasons => Some(Thinking::High),
        Ok(v1::Thinking::Unspecified) => None,
        Ok(v1::Thinking::Off) => Some(Thinking::None),
        Ok(v1::Thinking::High) => Some(Thinking::High),
        Ok(v1::Thinking::Max) => Some(Thinking::Max),
        Err(_) => return Err(invalid(format!("thinking is {}: no such mode", chat.thinking))),
    };
    let messages = chat.messages.iter().map(|m| ChatMessage::new(&m.role, &m.content)).collect();
    let mut input = ChatInput { thinking, ..ChatInput::of(messages) };
    // What Jinja templates of models that can think call it.
    if let Some(mode) = thinking {
        input.variables.insert("enable_thinking".into(), (mode != Thinking::None).into());
    }
    Ok(input)
}

fn sampling_of(sampling: Option<v1::Sampling>) -> SamplingParams {
    let Some(s) = sampling else { return SamplingParams::greedy() };
    let default = SamplingParams::default();
    SamplingParams {
        temperature: s.temperature.unwrap_or(default.temperature),
        top_p: s.top_p.unwrap_or(default.top_p),
        top_k: s.top_k.unwrap_or(default.top_k),
        min_p: s.min_p.unwrap_or(default.min_p),
        seed: s.seed,
        ..default
    }
}

/// Prompt positions as the engine counts them: after which token a row is wanted.
fn rows_before(positions: &[u32], prompt: usize) -> Result<Vec<usize>, Status> {
    let mut before = None;
    let mut rows = Vec::with_capacity(positions.len());
    for &position in positions {
        let at = usize::try_from(position).unwrap_or(usize::MAX);
        if at == 0 || at >= prompt || before.is_some_and(|b| b >= at) {
            return Err(invalid(format!(
                "positions has {position}: they must ascend and lie between 1 and {}, the prompt's last token",
                prompt.saturating_sub(1)
            )));
        }
        before = Some(at);
        rows.push(at - 1);
    }
    Ok(rows)
}

impl Inspector {
    fn token(&self, id: u32) -> v1::Token {
        let t = &self.serving.tokenizer;
        v1::Token { id, bytes: t.token_bytes(id).to_vec(), control: t.is_control(id), end: t.is_eog(id) }
    }

    async fn tokens(&self, prompt: Option<v1::Prompt>) -> Result<Vec<u32>, Status> {
        let serving = Arc::clone(&self.serving);
        tokio::task::spawn_blocking(move || tokens_of(&serving, prompt))
            .await
            .map_err(|e| Status::internal(format!("reading the prompt failed: {e}")))?
    }
}

#[tonic::async_trait]
impl Debug for Inspector {
    async fn tokenize(&self, request: Request<v1::TokenizeRequest>) -> Result<Response<v1::TokenizeReply>, Status> {
        let tokens = self.tokens(request.into_inner().prompt).await?;
        Ok(Response::new(v1::TokenizeReply {
            tokens: tokens.into_iter().map(|t| self.token(t)).collect(),
            model: self.serving.info.name.clone(),
            context: narrow(self.serving.info.context),
        }))
    }

    type ScoreStream = ReceiverStream<Result<v1::ScoreReply, Status>>;

    async fn score(&self, request: Request<v1::ScoreRequest>) -> Result<Response<Self::ScoreStream>, Status> {
        let r = request.into_inner();
        if r.top_k > MAX_TOP_K {
            return Err(invalid(format!("top_k is {}: give at most {MAX_TOP_K}", r.top_k)));
        }
        let prompt = self.tokens(r.prompt).await?;
        let info = &self.serving.info;
        let (context, steps) = (info.context, usize::try_from(r.steps).unwrap_or(usize::MAX));
        if prompt.len() < context && steps > context - prompt.len() {
            return Err(invalid(format!(
                "the prompt has {} tokens and {steps} more are wanted, but the context is {context}; ask for fewer or \
                 raise --ctx",
                prompt.len()
            )));
        }
        let rows = rows_before(&r.positions, prompt.len())?;
        let events = self
            .serving
            .engine
            .submit(GenerateRequest {
                id: "debug".into(),
                prompt: prompt.clone(),
                max_tokens: if steps == 0 { usize::MAX } else { steps },
                sampling: sampling_of(r.sampling),
                stop: Vec::new(),
                format: None,
                logprobs: None,
                // An end token is a step like any other; whether it is the last one is judged here.
                ignore_eos: true,
                logits: LogitsWanted { steps: true, prompt: rows },
            })
            .map_err(|e| refusal(&e))?;
        let begin = v1::ScoreBegin {
            prompt: prompt.clone(),
            model: info.name.clone(),
            blake3: info.blake3.clone(),
            vocab: narrow(info.vocab),
            context: narrow(context),
        };
        let (replies, stream) = mpsc::channel(REPLIES);
        let scoring = Scoring {
            inspector: Self { serving: Arc::clone(&self.serving) },
            prompt,
            top_k: usize::try_from(r.top_k).unwrap_or(usize::MAX),
            logits: r.logits,
            past_end: r.past_end,
            replies,
        };
        tokio::spawn(scoring.run(begin, events));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// One running Score call.
struct Scoring {
    inspector: Inspector,
    prompt: Vec<u32>,
    top_k: usize,
    logits: bool,
    past_end: bool,
    replies: mpsc::Sender<Result<v1::ScoreReply, Status>>,
}

impl Scoring {
    /// Until the end, or until the client leaves: then `events` is dropped, which cancels the request.
    async fn run(self, begin: v1::ScoreBegin, mut events: EventReceiver) {
        if !self.say(Said::Begin(begin)).await {
            return;
        }
        let mut row = None;
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                () = self.replies.closed() => return,
            };
            let (said, last) = match event {
                Some(Event::Admitted) => continue,
                Some(Event::Logits { position, row: got }) => match self.prompt.get(position + 1) {
                    Some(token) => (Said::Step(self.step(position + 1, *token, got)), false),
                    None => {
                        row = Some((position + 1, got));
                        continue;
                    }
                },
                Some(Event::Token { token, .. }) => {
                    let Some((position, row)) = row.take() else {
                        self.fail(Status::internal("the engine gave a token without its logits")).await;
                        return;
                    };
                    let step = self.step(position, token, row);
                    let over = !self.past_end && step.token.as_ref().is_some_and(|t| t.end);
                    (Said::Step(step), over)
                }
                Some(Event::Done { .. }) => {
                    self.say(Said::End(v1::ScoreEnd { reason: "length".into() })).await;
                    return;
                }
                Some(Event::Failed(e)) => return self.fail(refusal(&e)).await,
                None => return,
            };
            if !self.say(said).await {
                return;
            }
            if last {
                self.say(Said::End(v1::ScoreEnd { reason: "stop".into() })).await;
                return;
            }
        }
    }

    fn step(&self, position: usize, token: u32, row: Vec<f32>) -> v1::ScoreStep {
        let logits = if self.logits { row.iter().flat_map(|l| l.to_le_bytes()).collect() } else { Vec::new() };
        let d = Distribution::of(row);
        let logit = d.logit(token).unwrap_or(f32::NEG_INFINITY);
        let candidate = |(id, logit): (u32, f32)| v1::Candidate {
            token: Some(self.inspector.token(id)),
            logprob: d.logprob(logit),
            logit,
        };
        v1::ScoreStep {
            position: narrow(position),
            token: Some(self.inspector.token(token)),
            logprob: d.logprob(logit),
            rank: narrow(d.rank(logit)),
            top: d.top(self.top_k).into_iter().map(candidate).collect(),
            logits,
            not_finite: d.not_finite,
        }
    }

    async fn say(&self, event: Said) -> bool {
        self.replies.send(Ok(v1::ScoreReply { event: Some(event) })).await.is_ok()
    }

    async fn fail(&self, status: Status) {
        // A client that has left needs no answer.
        let _ = self.replies.send(Err(status)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_name_the_token_that_is_predicted() {
        assert_eq!(rows_before(&[1, 2, 9], 10).unwrap(), [0, 1, 8]);
        for (bad, shown) in [(&[0][..], "0"), (&[10], "10"), (&[3, 3], "3"), (&[4, 3], "3")] {
            let e = rows_before(bad, 10).unwrap_err();
            assert_eq!(e.code(), tonic::Code::InvalidArgument);
            assert!(e.message().contains(shown) && e.message().contains("between 1 and 9"), "{e}");
        }
    }

    #[test]
    fn thinking_reaches_every_kind_of_template() {
        let chat = |thinking: v1::Thinking| v1::ChatPrompt {
            messages: vec![v1::ChatTurn { role: "user".into(), content: "x".into() }],
            thinking: thinking.into(),
        };
        let off = chat_input(&chat(v1::Thinking::Off), true).unwrap();
        assert_eq!((off.thinking, off.variables["enable_thinking"].as_bool()), (Some(Thinking::None), Some(false)));
        let max = chat_input(&chat(v1::Thinking::Max), true).unwrap();
        assert_eq!((max.thinking, max.variables["enable_thinking"].as_bool()), (Some(Thinking::Max), Some(true)));
        let unsaid = |reasons| chat_input(&chat(v1::Thinking::Unspecified), reasons).unwrap();
        assert!(unsaid(false).thinking.is_none() && unsaid(false).variables.is_empty());
        assert_eq!(unsaid(true).thinking, Some(Thinking::High), "as over HTTP");
        assert!(chat_input(&v1::ChatPrompt { thinking: 7, ..Default::default() }, true).is_err());
    }

    #[test]
    fn a_request_without_sampling_is_greedy() {
        assert_eq!(sampling_of(None), SamplingParams::greedy());
        let warm = sampling_of(Some(v1::Sampling { top_p: Some(0.5), ..Default::default() }));
        assert_eq!(warm, SamplingParams { top_p: 0.5, ..Default::default() });
    }
}
