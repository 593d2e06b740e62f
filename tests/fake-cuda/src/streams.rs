//! Streams and events. Nothing runs before somebody waits for it.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::kernels::Work;
use crate::memory::Memory;
use crate::{CAPTURE_UNSUPPORTED, Code, ILLEGAL_ADDRESS, INVALID_HANDLE, card};

#[derive(Clone, Copy)]
pub enum Op {
    Upload {
        to: u64,
        from: usize,
        len: usize,
    },
    Download {
        to: usize,
        from: u64,
        len: usize,
    },
    Copy {
        to: u64,
        from: u64,
        len: usize,
    },
    Fill {
        to: u64,
        value: u8,
        len: usize,
    },
    /// Most compute nothing.
    Kernel(Option<Work>),
}

#[derive(Default)]
struct Stream {
    pushed: u64,
    waiting: VecDeque<(u64, Op)>,
    /// Operations that are recorded instead of run.
    recording: Option<Vec<Op>>,
}

#[derive(Default)]
pub struct Streams {
    last: u64,
    streams: HashMap<u64, Stream>,
    /// Stream and number of the operation that an event waits for; `None`: never recorded.
    events: HashMap<u64, Option<(u64, u64)>>,
}

fn pointer<T>(at: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(at)
}

impl Op {
    /// What a stream does later fails later, and takes the context with it.
    fn run(&self, memory: &Memory) -> Result<(), Code> {
        if let Some(host) = self.host() {
            memory.check_pinned(host.start, host.len()).map_err(|_| ILLEGAL_ADDRESS)?;
        }
        self.run_pageable(memory)
    }

    /// As it runs, from or to whatever memory of the host.
    pub fn run_pageable(&self, memory: &Memory) -> Result<(), Code> {
        match *self {
            Self::Upload { to, from, len } => {
                // SAFETY: page-locked memory of this fake, or what the caller of the driver's function promises.
                let source = unsafe { std::slice::from_raw_parts(pointer::<u8>(from), len) };
                memory.write(to, source)?;
                static UPLOADS: AtomicU64 = AtomicU64::new(0);
                if UPLOADS.fetch_add(1, Ordering::Relaxed) + 1 == card::flipped() {
                    memory.write(to, &[source[0] ^ 16])?;
                }
            }
            Self::Download { to, from, len } => {
                let source = memory.bytes(from, len)?;
                // SAFETY: as above.
                unsafe { pointer::<u8>(to).copy_from_nonoverlapping(source.as_ptr(), len) };
            }
            Self::Copy { to, from, len } => {
                let source = memory.bytes(from, len)?.to_vec();
                memory.write(to, &source)?;
            }
            Self::Fill { to, value, len } => memory.write(to, &vec![value; len])?,
            Self::Kernel(work) => return work.map_or(Ok(()), |w| w.run(memory)),
        }
        match card::copy_us() {
            0 => {}
            us => std::thread::sleep(Duration::from_micros(us)),
        }
        Ok(())
    }

    fn host(&self) -> Option<Range<usize>> {
        match *self {
            Self::Upload { from: at, len, .. } | Self::Download { to: at, len, .. } => Some(at..at + len),
            Self::Copy { .. } | Self::Fill { .. } | Self::Kernel(_) => None,
        }
    }
}

impl Streams {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub fn create(&mut self) -> u64 {
        let id = self.next();
        self.streams.insert(id, Stream::default());
        id
    }

    pub fn check(&self, stream: u64) -> Result<(), Code> {
        if self.streams.contains_key(&stream) { Ok(()) } else { Err(INVALID_HANDLE) }
    }

    pub fn destroy(&mut self, stream: u64, memory: &Memory) -> Result<(), Code> {
        self.run(stream, u64::MAX, memory)?;
        self.streams.remove(&stream);
        Ok(())
    }

    pub fn push(&mut self, stream: u64, op: Op) -> Result<(), Code> {
        let stream = self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
        if let Some(recorded) = &mut stream.recording {
            if op.host().is_some() {
                return Err(CAPTURE_UNSUPPORTED);
            }
            recorded.push(op);
            return Ok(());
        }
        stream.pushed += 1;
        stream.waiting.push_back((stream.pushed, op));
        Ok(())
    }

    /// Records what is put into the stream from here on.
    pub fn record_graph(&mut self, stream: u64) -> Result<(), Code> {
        let stream = self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
        if stream.recording.is_some() {
            return Err(CAPTURE_UNSUPPORTED);
        }
        stream.recording = Some(Vec::new());
        Ok(())
    }

    /// What was recorded.
    pub fn recorded(&mut self, stream: u64) -> Result<Vec<Op>, Code> {
        self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?.recording.take().ok_or(CAPTURE_UNSUPPORTED)
    }

    pub fn refuse_while_recording(&self) -> Result<(), Code> {
        let recording = self.streams.values().any(|s| s.recording.is_some());
        if recording { Err(CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Runs a stream up to operation number `until`; says how many had not run before.
    pub fn run(&mut self, stream: u64, until: u64, memory: &Memory) -> Result<usize, Code> {
        self.refuse_while_recording()?;
        let stream = self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
        let mut ran = 0;
        while let Some((_, op)) = stream.waiting.pop_front_if(|(number, _)| *number <= until) {
            op.run(memory)?;
            ran += 1;
        }
        Ok(ran)
    }

    pub fn run_all(&mut self, memory: &Memory) -> Result<usize, Code> {
        let all: Vec<u64> = self.streams.keys().copied().collect();
        all.into_iter().try_fold(0, |ran, stream| Ok(ran + self.run(stream, u64::MAX, memory)?))
    }

    /// True when an operation that has not run yet touches `range` of the host's memory.
    pub fn uses(&self, range: &Range<usize>) -> bool {
        let mut waiting = self.streams.values().flat_map(|s| &s.waiting);
        waiting.any(|(_, op)| op.host().is_some_and(|r| r.start < range.end && range.start < r.end))
    }

    pub fn create_event(&mut self) -> u64 {
        let id = self.next();
        self.events.insert(id, None);
        id
    }

    pub fn destroy_event(&mut self, event: u64) -> Result<(), Code> {
        self.events.remove(&event).map(drop).ok_or(INVALID_HANDLE)
    }

    pub fn record(&mut self, event: u64, stream: u64) -> Result<(), Code> {
        let number = self.streams.get(&stream).ok_or(INVALID_HANDLE)?.pushed;
        *self.events.get_mut(&event).ok_or(INVALID_HANDLE)? = Some((stream, number));
        Ok(())
    }

    pub fn wait(&mut self, event: u64, memory: &Memory) -> Result<usize, Code> {
        match *self.events.get(&event).ok_or(INVALID_HANDLE)? {
            // A stream that is gone was run to its end.
            Some((stream, until)) if self.streams.contains_key(&stream) => self.run(stream, until, memory),
            _ => Ok(0),
        }
    }
}
