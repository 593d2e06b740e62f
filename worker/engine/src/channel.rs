//! The per-request event channel: bounded, and never a place where the engine thread waits.
//!
//! The engine keeps one slot free for the terminal event, so a request can always be ended. A receiver that frees a slot
//! of a paused request, or goes away, wakes the engine thread: it needs no polling.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::task::{Context, Poll};

use tokio::sync::mpsc;

use crate::handle::Command;
use crate::request::{EngineError, Event};

/// Creates a channel of `capacity` events whose receiver wakes the engine behind `wake`.
pub(crate) fn channel(capacity: usize, wake: Sender<Command>) -> (EventSender, EventReceiver) {
    let (tx, rx) = mpsc::channel(capacity);
    let paused = Arc::new(AtomicBool::new(false));
    (EventSender { tx, paused: Arc::clone(&paused) }, EventReceiver { rx, paused, wake, ended: false })
}

/// The engine's end.
#[derive(Debug)]
pub(crate) struct EventSender {
    tx: mpsc::Sender<Event>,
    paused: Arc<AtomicBool>,
}

impl EventSender {
    /// True once the receiver is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.tx.is_closed()
    }

    /// How many events can surely be sent now with a slot left for the terminal one.
    pub(crate) fn room(&self) -> usize {
        self.tx.capacity().saturating_sub(1)
    }

    /// Whether `events` more fit and still leave a slot for the terminal one. When not, the receiver's next read wakes the
    /// engine.
    pub(crate) fn has_room(&self, events: usize) -> bool {
        if self.room() >= events {
            return true;
        }
        // Set before the second look: a read between the two either is seen here or sees the flag.
        self.paused.store(true, Ordering::SeqCst);
        if self.room() >= events {
            self.paused.store(false, Ordering::SeqCst);
            return true;
        }
        false
    }

    /// Sends without waiting. Callers ask [`EventSender::has_room`] first, or hold the reserved slot; an event for a
    /// receiver that is gone is dropped.
    pub(crate) fn send(&self, event: Event) {
        if let Err(mpsc::error::TrySendError::Full(event)) = self.tx.try_send(event) {
            debug_assert!(false, "event channel overran its reserve");
            tracing::error!(?event, "event dropped: channel full");
        }
    }
}

/// A request's events. Dropping it cancels the request within one step, in whatever stage it is.
#[derive(Debug)]
pub struct EventReceiver {
    rx: mpsc::Receiver<Event>,
    paused: Arc<AtomicBool>,
    wake: Sender<Command>,
    ended: bool,
}

impl EventReceiver {
    /// The next event; `None` after [`Event::Done`] or [`Event::Failed`]. An engine that vanished without a word is
    /// reported as `Failed(Internal)`.
    pub async fn recv(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.rx.recv().await;
        Some(self.took(event))
    }

    /// [`EventReceiver::recv`] for plain threads. Panics inside an async runtime.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.rx.blocking_recv();
        Some(self.took(event))
    }

    /// [`EventReceiver::recv`] as a poll function, for streams.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.rx.poll_recv(cx).map(|event| Some(self.took(event)))
    }

    /// An event that is already there, or `None`.
    pub fn try_recv(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        match self.rx.try_recv() {
            Ok(event) => Some(self.took(Some(event))),
            Err(mpsc::error::TryRecvError::Empty) => None,
            Err(mpsc::error::TryRecvError::Disconnected) => Some(self.took(None)),
        }
    }

    fn took(&mut self, event: Option<Event>) -> Event {
        if self.paused.swap(false, Ordering::SeqCst) {
            // An engine that is gone needs no waking.
            let _ = self.wake.send(Command::Wake);
        }
        let event = event.unwrap_or_else(|| Event::Failed(EngineError::Internal("the engine stopped".into())));
        self.ended = matches!(event, Event::Done { .. } | Event::Failed(_));
        event
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        self.rx.close();
        if !self.ended {
            let _ = self.wake.send(Command::Wake);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ds4_text::Read;
    use std::sync::mpsc as std_mpsc;

    fn token(n: u32) -> Event {
        Event::Token { token: n, read: Read::default(), logprob: None }
    }

    #[test]
    fn keeps_a_slot_for_the_end_and_wakes_when_room_returns() {
        let (wake, woken) = std_mpsc::channel();
        let (tx, mut rx) = channel(4, wake);
        for n in 0..3 {
            assert!(tx.has_room(1));
            tx.send(token(n));
        }
        assert!(!tx.has_room(1));
        assert!(woken.try_recv().is_err());
        assert!(matches!(rx.try_recv(), Some(Event::Token { token: 0, .. })));
        assert!(matches!(woken.try_recv(), Ok(Command::Wake)));
        assert!(tx.has_room(1));
        tx.send(token(3));
        assert!(!tx.has_room(1));
        tx.send(Event::Failed(EngineError::Stalled { seconds: 1 }));
        let mut seen = 0;
        while rx.try_recv().is_some() {
            seen += 1;
        }
        assert_eq!(seen, 4);
    }

    #[test]
    fn dropping_the_receiver_wakes_the_engine() {
        let (wake, woken) = std_mpsc::channel();
        let (tx, rx) = channel(4, wake);
        assert!(!tx.is_closed());
        drop(rx);
        assert!(tx.is_closed());
        assert!(matches!(woken.try_recv(), Ok(Command::Wake)));
    }

    #[test]
    fn an_engine_that_vanished_is_a_failure_not_an_end() {
        let (wake, _woken) = std_mpsc::channel();
        let (tx, mut rx) = channel(4, wake);
        drop(tx);
        assert!(matches!(rx.blocking_recv(), Some(Event::Failed(EngineError::Internal(_)))));
        assert!(rx.blocking_recv().is_none());
    }
}
