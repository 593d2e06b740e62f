//! One running request: from its bank to its last event.

use std::time::Instant;

use ds4_text::{ConstraintError, Part, Piece, PlainReader, Read, Reader, Steer};

use ds4_kernels::ops::RowQuery;
use ds4_models::speculation::Sequence;

use crate::channel::EventSender;
use crate::handle::Submission;
use crate::logprobs::token_logprob;
use crate::request::{EngineError, Event, FinishReason, GenerateRequest, Timings};
use crate::row::Row;
use crate::sampler::{Sampler, Scratch};
use crate::short::{Short, token_logprob_short, with_logprobs, with_syntax};
use crate::vocab::Vocabulary;

/// Most rows of logits inside of one chunk of a prompt: bounds the model's logits buffer, 17 MB for 129,280 tokens.
const MAX_PROMPT_ROWS: usize = 32;

/// What a request needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Prompt tokens from this index on are to be computed.
    Prefill(usize),
    /// This token was generated and its row is to be computed.
    Decode(u32),
}

/// What became of a request after a token. The scheduler sends the terminal event once its own books are in order, so that
/// a client that has heard the end finds it counted.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It goes on.
    Continues,
    /// It is over, with this `Done`.
    Finished(Event),
    /// It is over, with this `Failed`; its bank must not be reused.
    Broken(Event),
}

/// A request that holds a bank.
pub(crate) struct Active {
    pub request: GenerateRequest,
    pub events: EventSender,
    pub bank: usize,
    pub phase: Phase,
    /// What the next decode step computes; there from the first token on.
    pub sequence: Option<Sequence>,
    /// Since when its client has left no room for events.
    pub paused: Option<Instant>,
    sampler: Sampler,
    reader: Box<dyn Reader>,
    called: bool,
    generated: usize,
    timings: Timings,
    admitted: Instant,
    first_token: Instant,
}

impl Active {
    /// Starts a request on `bank`, whose first `cached` rows are the prompt's already, and tells its client.
    pub fn admit(submission: Submission, bank: usize, cached: usize, now: Instant) -> Self {
        let Submission { mut request, events, submitted } = submission;
        let timings = Timings {
            prompt_tokens: request.prompt.len(),
            cached_tokens: cached,
            queued: now.saturating_duration_since(submitted),
            ..Timings::default()
        };
        let sampler = Sampler::new(request.sampling.clone(), &request.prompt);
        let stop = std::mem::take(&mut request.stop);
        let reader = match &request.format {
            Some(format) => format.reader(stop),
            None => Box::new(PlainReader::new(stop)),
        };
        events.send(Event::Admitted);
        Self {
            request,
            events,
            bank,
            phase: Phase::Prefill(cached),
            sequence: None,
            paused: None,
            sampler,
            reader,
            called: false,
            generated: 0,
            timings,
            admitted: now,
            first_token: now,
        }
    }

    /// Tokens that it may still generate.
    pub fn left(&self) -> usize {
        self.request.max_tokens.saturating_sub(self.generated)
    }

    /// Whether tokens may be guessed ahead for it now or later, so that a drafter must be shown its rows.
    pub fn guessable(&self) -> bool {
        self.greedy() || self.request.format.as_ref().is_some_and(|f| f.has_syntax())
    }

    /// Whether the token after the latest one is the most likely one, so that guessing it is worth a try.
    pub fn guessable_now(&self) -> bool {
        self.greedy() || self.reader.steer() != Steer::Free
    }

    fn greedy(&self) -> bool {
        self.request.sampling.temperature == 0.0
    }

    /// Events that a token of this request may send before its terminal one.
    pub fn events_a_step(&self) -> usize {
        1 + usize::from(self.request.logits.steps)
    }

    /// Where a chunk of prompt tokens `from..to` must end so that the rows wanted inside of it have room in the client's
    /// channel, beside what a first token needs; `from` when it must wait. `None`: nothing is wanted of this prompt.
    pub fn cut_for_logits(&self, from: usize, to: usize) -> Option<usize> {
        if self.request.logits.prompt.is_empty() {
            return None;
        }
        let wanted = self.request.logits.within(from, to);
        if !self.events.has_room(self.events_a_step() + usize::from(!wanted.is_empty())) {
            return Some(from);
        }
        let room = self.events.room().saturating_sub(self.events_a_step()).min(MAX_PROMPT_ROWS);
        Some(wanted.get(room).map_or(to, |over| *over))
    }

    /// What to ask of logits row `row`, of `vocab` logits, which decides the `ahead`-th token after the next one. `None`: the row itself
    /// is needed.
    pub fn query(&self, row: usize, ahead: usize, vocab: usize) -> Option<RowQuery> {
        if self.request.logits.steps {
            return None;
        }
        let mut q = self.sampler.query(row, ahead, vocab)?;
        if matches!(self.reader.steer(), Steer::OneOf(_)) {
            q = with_syntax(q);
        }
        self.request.logprobs.map_or(Some(q), |k| with_logprobs(q, k as usize))
    }

    /// Chooses the next token, from what is known of the row if that is enough. Where the answer is held to a grammar, what was
    /// chosen as ever is asked about first: most of the time it is permitted, and then neither the row nor a mask is needed.
    fn choose(&mut self, row: &mut Row<'_>, scratch: &mut Scratch) -> Result<Option<u32>, ConstraintError> {
        let counted = self.reader.steer() == Steer::Free;
        let Some(token) = self.choose_freely(row, scratch) else { return Ok(None) };
        let Some(constraint) = self.reader.constraint() else { return Ok(Some(token)) };
        if constraint.permits(token)? {
            return Ok(Some(token));
        }
        let mut held = std::mem::take(&mut scratch.held);
        held.clear();
        held.extend_from_slice(row.whole());
        constraint.restrict(&mut held)?;
        let token = if counted {
            self.sampler.uncount();
            self.sampler.sample(&mut held, scratch)
        } else {
            self.sampler.best(&mut held, scratch)
        };
        scratch.held = held;
        Ok(token)
    }

    /// Chooses the next token, whatever the answer is held to.
    fn choose_freely(&mut self, row: &mut Row<'_>, scratch: &mut Scratch) -> Option<u32> {
        let steer = self.reader.steer();
        if let Steer::Force(token) = steer {
            return Some(token).filter(|t| usize::try_from(*t).is_ok_and(|t| t < row.width));
        }
        let short = row.summary.map_or(Short::NeedsRow, |s| match steer {
            Steer::Greedy => self.sampler.best_short(s),
            Steer::OneOf(tokens) => self.sampler.best_of_short(s, tokens),
            Steer::Free | Steer::Force(_) => self.sampler.sample_short(s, row.width, scratch),
        });
        match (short, steer) {
            (Short::Token(token), _) => token,
            (Short::NeedsRow, Steer::Greedy) => self.sampler.best(row.whole(), scratch),
            (Short::NeedsRow, Steer::OneOf(tokens)) => self.sampler.best_of(row.whole(), tokens, scratch),
            (Short::NeedsRow, Steer::Free | Steer::Force(_)) => self.sampler.sample(row.whole(), scratch),
        }
    }

    /// Draws the next token from a logits row and sends it to the client.
    pub fn take_logits(&mut self, row: &mut Row<'_>, vocab: &dyn Vocabulary, scratch: &mut Scratch) -> Outcome {
        if self.request.logits.steps {
            let position = self.request.prompt.len() + self.generated - 1;
            self.events.send(Event::Logits { position, row: row.raw().to_vec() });
        }
        let broken = |e: EngineError| Outcome::Broken(Event::Failed(e));
        let mut token = match self.choose(row, scratch) {
            Ok(Some(token)) => token,
            Ok(None) => {
                return broken(EngineError::Internal("the model gave no finite logit for this sequence".into()));
            }
            Err(e) => return broken(EngineError::Unenforceable(e.0)),
        };
        let now = Instant::now();
        if self.generated == 0 {
            self.first_token = now;
            self.timings.prefill = now.saturating_duration_since(self.admitted);
        }
        self.generated += 1;
        let mut end = vocab.is_eog(token);
        if end && let Some(instead) = self.reader.instead_of_end() {
            (token, end) = (instead, false);
        }
        if end && !self.request.ignore_eos {
            return self.finish(FinishReason::Stop, now);
        }
        let logprob = self.request.logprobs.map(|k| {
            let (k, vocab) = (k as usize, row.width);
            let short = row.summary.and_then(|s| token_logprob_short(s, token, k, vocab));
            short.unwrap_or_else(|| token_logprob(row.whole(), token, k, &mut scratch.candidates))
        });
        // Structure is not text: a role mark, or an end token that is being ignored, shows nothing.
        let read = self.reader.push(token, vocab.token_bytes(token), end || vocab.is_control(token));
        self.count(&read);
        let ended = read.ended;
        self.events.send(Event::Token { token, read, logprob });
        if ended {
            return self.finish(FinishReason::Stop, now);
        }
        if self.generated >= self.request.max_tokens {
            return self.finish(FinishReason::Length, now);
        }
        self.phase = Phase::Decode(token);
        Outcome::Continues
    }

    fn count(&mut self, read: &Read) {
        self.called |= read.pieces.iter().any(|p| matches!(p, Piece::CallEnd));
        self.timings.reasoning_tokens += read.settled.iter().filter(|p| **p == Part::Reasoning).count();
    }

    fn finish(&mut self, reason: FinishReason, now: Instant) -> Outcome {
        let read = self.reader.finish(reason == FinishReason::Length);
        self.count(&read);
        let reason = if self.called && reason == FinishReason::Stop { FinishReason::ToolCalls } else { reason };
        self.timings.completion_tokens = self.generated;
        self.timings.decode = now.saturating_duration_since(self.first_token);
        Outcome::Finished(Event::Done { read, reason, timings: std::mem::take(&mut self.timings) })
    }

    /// Ends the request with an error.
    pub fn fail(&self, error: EngineError) {
        self.events.send(Event::Failed(error));
    }
}
