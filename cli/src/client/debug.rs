//! A worker's debugging service: tokens of prompts and distributions at their steps.

use std::path::Path;

use anyhow::{Context as _, bail};
use ds4_proto::v1;
use ds4_proto::v1::debug_client::DebugClient;
use ds4_proto::v1::score_reply::Event;
use tonic::Streaming;
use tonic::transport::Channel;

use super::control;

/// Largest message taken: a row of 16 million logits.
const MAX_MESSAGE: usize = 64 << 20;

/// A client of the worker in `dir`.
///
/// # Errors
/// Exit code 3 when nothing listens there.
pub async fn connect(dir: &Path) -> anyhow::Result<DebugClient<Channel>> {
    let channel = control::worker_channel(dir).await?;
    Ok(DebugClient::new(channel).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE))
}

/// A prompt to be continued as it is.
pub fn raw_prompt(text: &str) -> v1::Prompt {
    v1::Prompt { form: Some(v1::prompt::Form::Text(text.into())) }
}

/// A conversation of one user message.
pub fn chat_prompt(system: Option<&str>, user: &str, thinking: v1::Thinking) -> v1::Prompt {
    let turn = |role: &str, content: &str| v1::ChatTurn { role: role.into(), content: content.into() };
    let messages = system.map(|s| turn("system", s)).into_iter().chain([turn("user", user)]).collect();
    v1::Prompt { form: Some(v1::prompt::Form::Chat(v1::ChatPrompt { messages, thinking: thinking.into() })) }
}

/// A running Score call; dropping it cancels the request.
pub struct Scores {
    /// What the worker said first.
    pub begin: v1::ScoreBegin,
    replies: Streaming<v1::ScoreReply>,
    ended: Option<String>,
}

impl Scores {
    /// Starts one.
    ///
    /// # Errors
    /// The worker's refusal.
    pub async fn start(client: &mut DebugClient<Channel>, request: v1::ScoreRequest) -> anyhow::Result<Self> {
        let mut replies = client.score(request).await.map_err(control::status)?.into_inner();
        match replies.message().await.map_err(control::status)?.and_then(|r| r.event) {
            Some(Event::Begin(begin)) => Ok(Self { begin, replies, ended: None }),
            other => bail!("the worker began its answer with {other:?}"),
        }
    }

    /// The next step; `None` at the end.
    ///
    /// # Errors
    /// The worker's failure, or a stream that breaks off.
    pub async fn next(&mut self) -> anyhow::Result<Option<v1::ScoreStep>> {
        if self.ended.is_some() {
            return Ok(None);
        }
        let reply = self.replies.message().await.map_err(control::status)?;
        match reply.context("the worker's answer broke off: it died or dropped the request")?.event {
            Some(Event::Step(step)) => Ok(Some(step)),
            Some(Event::End(end)) => {
                self.ended = Some(end.reason);
                Ok(None)
            }
            other => bail!("the worker sent {other:?} inside an answer"),
        }
    }

    /// Why it ended: `stop` or `length`.
    pub fn reason(&self) -> &str {
        self.ended.as_deref().unwrap_or("")
    }
}
