//! Runs a job: submits its sequences, merges their events, and answers as one JSON document or as an event stream.
//!
//! Whoever holds the run holds the engine's receivers: hyper drops the handler or the body when the connection goes, and
//! with it every sequence of the request.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use ds4_engine::{EngineError, Event, FinishReason, Timings, TokenLogprob};
use ds4_text::{Part, Piece, Read};
use futures_util::stream::{SelectAll, Stream, StreamExt};
use hyper::StatusCode;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use tokio::time::{Instant, Sleep};

use crate::backend::Backend;
use crate::error::{ApiError, ErrorType};
use crate::job::Job;
use crate::track::Tracker;
use crate::wire::{Choice, TimingsWire, Usage, Wire, reason_name};

/// Bytes of events that are gathered before a frame is handed on.
const FRAME: usize = 16 << 10;

type Tagged = futures_util::stream::BoxStream<'static, (usize, Option<Event>)>;

/// Deadlines of a run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest life of the request from its arrival.
    pub request_timeout: Option<Duration>,
    /// Longest silence of an event stream.
    pub keepalive_interval: Duration,
}

/// A submitted job.
struct Run {
    backend: Arc<dyn Backend>,
    events: SelectAll<Tagged>,
    tracker: Tracker,
    done: Vec<Option<(FinishReason, Timings)>>,
    /// For each choice, log-probabilities of tokens of which it is not certain yet where they belong.
    waiting: Vec<VecDeque<Option<TokenLogprob>>>,
    /// The answers have parts.
    parts: bool,
    prompt_tokens: usize,
    n: usize,
    ignore_eos: bool,
    include_usage: bool,
    deadline: Option<Pin<Box<Sleep>>>,
}

/// What one event means to the projections.
enum Step {
    /// Nothing to show.
    Quiet,
    /// Something to show.
    Delta(usize, News),
    /// A choice ended, with the last that it has to show.
    Closed(usize, News, FinishReason),
}

/// Newly released pieces and log-probabilities.
#[derive(Default)]
struct News {
    pieces: Vec<Piece>,
    logprobs: Vec<(Part, TokenLogprob)>,
}

impl News {
    fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.logprobs.is_empty()
    }
}

impl Run {
    /// Submits every sequence of `job`. When one is refused those before it are cancelled.
    fn submit(job: &Job, backend: Arc<dyn Backend>, mut tracker: Tracker, limits: Limits) -> Result<Self, ApiError> {
        let mut events = SelectAll::new();
        for (index, request) in job.requests(tracker.id()).into_iter().enumerate() {
            match backend.submit(request) {
                // The end of a stream is made visible: one that ends without a last event must not hang its request.
                Ok(stream) => events
                    .push(stream.map(Some).chain(futures_util::stream::iter([None])).map(move |e| (index, e)).boxed()),
                Err(e) => {
                    let e = e.into();
                    tracker.fail(&e);
                    return Err(e);
                }
            }
        }
        tracker.submitted(job.prompt_tokens(), job.choices(), job.common.stream);
        let deadline =
            limits.request_timeout.map(|t| Box::pin(tokio::time::sleep_until((tracker.started() + t).into())));
        Ok(Self {
            backend,
            events,
            done: vec![None; job.choices()],
            waiting: vec![VecDeque::new(); job.choices()],
            parts: job.format.is_some(),
            prompt_tokens: job.prompt_tokens(),
            n: job.common.n,
            ignore_eos: job.common.ignore_eos,
            include_usage: job.common.include_usage,
            tracker,
            deadline,
        })
    }

    /// Books one event.
    fn step(&mut self, index: usize, event: Option<Event>) -> Result<Step, ApiError> {
        match event {
            Some(Event::Admitted) => {
                self.tracker.admitted();
                Ok(Step::Quiet)
            }
            Some(Event::Token { token, read, logprob }) => {
                self.tracker.token(index);
                // The token that ends a generation is no part of its content.
                let shown = self.ignore_eos || !self.backend.is_eog(token);
                self.waiting[index].push_back(logprob.filter(|_| shown));
                let news = self.settle(index, read);
                Ok(if news.is_empty() { Step::Quiet } else { Step::Delta(index, news) })
            }
            Some(Event::Done { read, reason, timings }) => {
                self.tracker.choice_done(&timings);
                self.done[index] = Some((reason, timings));
                Ok(Step::Closed(index, self.settle(index, read), reason))
            }
            // This surface never asks for rows.
            Some(Event::Logits { .. }) => Ok(Step::Quiet),
            Some(Event::Failed(e)) => Err(e.into()),
            None if self.done[index].is_some() => Ok(Step::Quiet),
            None => Err(EngineError::Internal("the engine ended a request without a word".into()).into()),
        }
    }

    /// Gives the tokens that became certain their log-probabilities. Hidden ones have none: they would show markup.
    fn settle(&mut self, index: usize, read: Read) -> News {
        let waiting = &mut self.waiting[index];
        let of = |part: Part| Some((part, waiting.pop_front()??));
        let logprobs = read.settled.into_iter().filter_map(of).filter(|(part, _)| *part != Part::Hidden).collect();
        News { pieces: read.pieces, logprobs }
    }

    fn is_done(&self) -> bool {
        self.done.iter().all(Option::is_some)
    }

    fn timings(&self) -> Vec<&Timings> {
        self.done.iter().flatten().map(|(_, t)| t).collect()
    }

    fn totals(&self) -> (Usage, TimingsWire) {
        let timings = self.timings();
        (Usage::new(self.prompt_tokens, self.n, &timings, self.parts), TimingsWire::new(&timings))
    }

    /// Logs the end. Choices that ended differently are reported by the first.
    fn finish(&mut self, usage: &Usage) {
        let reason = self.done.first().and_then(Option::as_ref).map_or("stop", |(r, _)| reason_name(*r));
        self.tracker.finish(reason, usage.completion_tokens);
    }

    /// Ready when the request's own deadline has passed.
    fn poll_deadline(&mut self, cx: &mut Context<'_>, limits: Limits) -> Poll<ApiError> {
        match &mut self.deadline {
            Some(deadline) => deadline.as_mut().poll(cx).map(|()| timed_out(limits)),
            None => Poll::Pending,
        }
    }
}

fn timed_out(limits: Limits) -> ApiError {
    let seconds = limits.request_timeout.unwrap_or_default().as_secs_f64();
    ApiError::new(
        StatusCode::GATEWAY_TIMEOUT,
        ErrorType::Server,
        "request_timeout",
        format!("the request did not finish within {seconds} s (--request-timeout)"),
    )
}

/// Submits `job`, lets go of `entering`, and answers. However it ends, the job's completion line is written.
///
/// # Errors
/// Refusals, and failures of a request that is not streamed.
pub async fn answer(
    job: Job,
    wire: impl Wire,
    backend: Arc<dyn Backend>,
    tracker: Tracker,
    limits: Limits,
    entering: impl Send,
) -> Result<Response, ApiError> {
    let run = Run::submit(&job, backend, tracker, limits)?;
    drop(entering);
    if job.common.stream {
        return Ok(event_stream(run, wire, limits));
    }
    whole(run, wire, limits).await
}

/// Waits for every choice.
async fn whole(mut run: Run, wire: impl Wire, limits: Limits) -> Result<Response, ApiError> {
    let mut choices = vec![Choice::default(); run.done.len()];
    while !run.is_done() {
        let next = std::future::poll_fn(|cx| match run.events.poll_next_unpin(cx) {
            Poll::Ready(event) => Poll::Ready(Ok(event)),
            Poll::Pending => run.poll_deadline(cx, limits).map(Err),
        });
        let step = match next.await {
            Ok(Some((index, event))) => run.step(index, event),
            Ok(None) => Err(EngineError::Internal("the engine ended a request without a word".into()).into()),
            Err(e) => Err(e),
        };
        match step {
            Ok(Step::Quiet) => {}
            Ok(Step::Delta(index, news)) => {
                choices[index].add(news.pieces);
                choices[index].logprobs.extend(news.logprobs);
            }
            Ok(Step::Closed(index, news, reason)) => {
                choices[index].add(news.pieces);
                choices[index].logprobs.extend(news.logprobs);
                choices[index].reason = Some(reason);
            }
            Err(e) => {
                run.tracker.fail(&e);
                return Err(e);
            }
        }
    }
    let (usage, timings) = run.totals();
    let body = wire.response(&choices, &usage, &timings);
    run.finish(&usage);
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

fn event_stream(run: Run, wire: impl Wire, limits: Limits) -> Response {
    let stream = SseStream {
        opened: vec![false; run.done.len()],
        keepalive: Box::pin(tokio::time::sleep(limits.keepalive_interval)),
        run,
        wire,
        limits,
        ended: false,
    };
    let mut response = Response::new(Body::from_stream(stream));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks reverse proxies of the nginx kind not to gather events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// The body of a streamed answer.
struct SseStream<W> {
    run: Run,
    wire: W,
    limits: Limits,
    opened: Vec<bool>,
    keepalive: Pin<Box<Sleep>>,
    ended: bool,
}

impl<W: Wire> SseStream<W> {
    fn open(&mut self, index: usize, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.opened[index], true) {
            self.wire.open(index, out);
        }
    }

    fn write(&mut self, step: Step, out: &mut Vec<u8>) {
        match step {
            Step::Quiet => {}
            Step::Delta(index, news) => {
                self.open(index, out);
                self.wire.delta(index, &news.pieces, &news.logprobs, out);
            }
            Step::Closed(index, news, reason) => {
                self.open(index, out);
                if !news.is_empty() {
                    self.wire.delta(index, &news.pieces, &news.logprobs, out);
                }
                let timings = self.run.done[index].as_ref().map(|(_, t)| TimingsWire::new(&[t])).unwrap_or_default();
                self.wire.close(index, reason, &timings, out);
            }
        }
    }

    fn fail(&mut self, e: &ApiError, out: &mut Vec<u8>) {
        self.run.tracker.fail(e);
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&e.to_json());
        out.extend_from_slice(b"\n\n");
        self.ended = true;
        // Cancels what still runs now, not when the client has read the error.
        self.run.events.clear();
    }

    fn complete(&mut self, out: &mut Vec<u8>) {
        let (usage, timings) = self.run.totals();
        if self.run.include_usage {
            self.wire.usage(&usage, &timings, out);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        self.run.finish(&usage);
        self.ended = true;
    }
}

impl<W: Wire> Stream for SseStream<W> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        let mut out = Vec::new();
        while !this.ended && out.len() < FRAME {
            match this.run.events.poll_next_unpin(cx) {
                Poll::Ready(Some((index, event))) => match this.run.step(index, event) {
                    Ok(step) => this.write(step, &mut out),
                    Err(e) => this.fail(&e, &mut out),
                },
                Poll::Ready(None) => {
                    let e = ApiError::internal("the engine ended a request without a word");
                    this.fail(&e, &mut out);
                }
                Poll::Pending => break,
            }
            if !this.ended && this.run.is_done() {
                this.complete(&mut out);
            }
        }
        if out.is_empty() {
            let limits = this.limits;
            if let Poll::Ready(e) = this.run.poll_deadline(cx, limits) {
                this.fail(&e, &mut out);
            } else if this.keepalive.as_mut().poll(cx).is_ready() {
                out.extend_from_slice(b": keep-alive\n\n");
            }
        }
        if out.is_empty() {
            return Poll::Pending;
        }
        this.keepalive.as_mut().reset(Instant::now() + this.limits.keepalive_interval);
        Poll::Ready(Some(Ok(out.into())))
    }
}
