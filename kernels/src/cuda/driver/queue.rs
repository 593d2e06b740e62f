//! Launches held back, so that a run of them that comes again is replayed as one graph.
//!
//! A decode step of DeepSeek V4 Flash is over a thousand short kernels. Started one by one, each costs the host 2 to 3 µs, which is
//! longer than many of them run; as graphs they cost it a few calls. While a stream is held ([`Stream::hold`]), its launches and
//! copies on the device are collected. When there are enough ([`segment`]), and whenever something needs them to have been started, they go to
//! the device: the first time as they are, the second time they are recorded as a graph, and from then on that graph is
//! launched, so that the device works on one segment while the host collects the next.
//!
//! A graph is found by everything that its launches consist of: functions, shapes, and every byte of their arguments, compared and
//! not only hashed. So it does what the launches would have done, whoever made them; there is nothing to invalidate when buffers
//! move or models change. What varies from step to step (tokens, positions, lengths, addresses of banks) must therefore be device
//! data and not arguments.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::error::check;
use super::module::{self, Shape};
use super::{Context, CudaError, Graph, Stream};

/// Fewest and most operations that are started together.
const SEGMENT: (usize, usize) = (8, 512);
/// Shorter runs are not worth a graph.
const MIN_GRAPH: usize = 8;
/// Most bytes of the device that all graphs take, by [`bytes`]: some 18 steps of Flash. Steps are others for every number of rows and for each
/// of the 24 depths of 65,536 tokens; what was not used for longest is forgotten.
const MAX_RECORDED: usize = 64 << 20;
/// Most runs that were seen once: more are forgotten, all at once.
const MAX_SEEN: usize = 4096;

/// Operations to start together after `started` since the stream was held: few at first, because the device has nothing to do until the
/// host has collected them (0.7 µs each, and 10 µs for a graph's own launch), then as many as were started before. Each takes the device
/// some 5 µs, so it is always several times longer busy than the host needs for the next ones.
fn segment(started: usize) -> usize {
    started.clamp(SEGMENT.0, SEGMENT.1)
}

/// Bytes of the device that a graph of so many operations takes, by those that graphs of 8 to 512 launches took on an H200 (130 KiB, 256 for
/// 64, 1,344 for 512), and twice that of the host. The driver keeps what forgotten ones had for the next ones.
fn bytes(operations: usize) -> usize {
    (112 << 10) + operations * 2450
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Launch { function: sys::CUfunction, shape: Shape, first: usize, count: usize },
    Copy { to: u64, from: u64, len: usize },
}

/// Operations with their arguments.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Work {
    nodes: Vec<Node>,
    /// Where each argument begins in `words`.
    offsets: Vec<usize>,
    /// The arguments' bytes, each from a word of its own on.
    words: Vec<u64>,
}

impl Work {
    fn hash(&self) -> u64 {
        let mut h = 0xcbf2_9ce4_8422_2325_u64;
        let mut mix = |v: u64| h = (h.rotate_left(5) ^ v).wrapping_mul(0x517c_c1b7_2722_0a95);
        for node in &self.nodes {
            match node {
                Node::Launch { function, shape: Shape { grid, block, shared }, count, .. } => {
                    mix(function.addr() as u64);
                    grid.iter().chain(block).chain([shared]).for_each(|v| mix(u64::from(*v)));
                    mix(*count as u64);
                }
                Node::Copy { to, from, len } => [*to, *from, *len as u64].into_iter().for_each(&mut mix),
            }
        }
        self.words.iter().for_each(|w| mix(*w));
        h
    }

    /// Starts everything in `stream`; with `early`, kernels that follow kernels as [`module::start`] says.
    fn issue(&self, stream: sys::CUstream, early: bool) -> Result<(), CudaError> {
        self.issue_some(stream, early, |_| true)
    }

    /// As [`Work::issue`], the operations whose numbers are wanted.
    pub(super) fn issue_some(
        &self,
        stream: sys::CUstream,
        early: bool,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<(), CudaError> {
        let mut params: Vec<*mut c_void> = Vec::new();
        let mut after_kernel = false;
        for (_, node) in self.nodes.iter().enumerate().filter(|(i, _)| wanted(*i)) {
            match *node {
                Node::Launch { function, shape, first, count } => {
                    params.clear();
                    let offsets = self.offsets.get(first..first + count).unwrap_or_default();
                    params.extend(
                        offsets
                            .iter()
                            .filter_map(|at| self.words.get(*at))
                            .map(|w| std::ptr::from_ref(w).cast_mut().cast()),
                    );
                    // SAFETY: function and arguments were checked against each other by `Stream::launch`, which copied the arguments;
                    // what they point to is its caller's promise. The driver only reads them.
                    unsafe { module::start(function, shape, stream, &mut params, early && after_kernel) }?;
                    after_kernel = true;
                }
                Node::Copy { to, from, len } => {
                    // SAFETY: the promise of whoever called `Stream::copy`.
                    check("cuMemcpyDtoDAsync_v2", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len, stream) })?;
                    after_kernel = false;
                }
            }
        }
        Ok(())
    }

    /// Function and blocks of each launch; none for a copy.
    pub(super) fn functions(&self) -> impl Iterator<Item = Option<(sys::CUfunction, [u32; 3])>> {
        self.nodes.iter().map(|node| match node {
            Node::Launch { function, shape, .. } => Some((*function, shape.grid)),
            Node::Copy { .. } => None,
        })
    }

    /// Puts other operations after these.
    fn append(&mut self, other: &Self) {
        let (words, offsets) = (self.words.len(), self.offsets.len());
        self.words.extend(&other.words);
        self.offsets.extend(other.offsets.iter().map(|at| at + words));
        self.nodes.extend(other.nodes.iter().map(|node| match *node {
            Node::Launch { function, shape, first, count } => {
                Node::Launch { function, shape, first: first + offsets, count }
            }
            copy @ Node::Copy { .. } => copy,
        }));
    }

    fn clear(&mut self) {
        self.nodes.clear();
        self.offsets.clear();
        self.words.clear();
    }
}

/// A graph of what it does.
#[derive(Debug)]
struct Recorded {
    work: Work,
    graph: Graph,
    /// Number of its last replay.
    used: u64,
}

#[derive(Debug, Default)]
struct State {
    work: Work,
    /// By the hashes of their works; of two with one hash, the later one.
    graphs: HashMap<u64, Recorded>,
    /// Bytes that all graphs take.
    recorded: usize,
    /// Replays so far.
    replays: u64,
    seen: HashSet<u64>,
    /// Operations started since the stream was held.
    started: usize,
    /// What was started since somebody asked for it to be kept.
    kept: Option<Work>,
    /// An error that nobody has been told yet.
    failed: Option<CudaError>,
    closed: bool,
}

impl State {
    /// The graph that does what is held back.
    fn graph(&mut self, hash: u64) -> Option<&mut Graph> {
        let found = self.graphs.get_mut(&hash).filter(|r| r.work == self.work)?;
        self.replays += 1;
        found.used = self.replays;
        Some(&mut found.graph)
    }

    fn insert(&mut self, hash: u64, work: Work, graph: Graph) {
        self.forget(hash);
        let most = MAX_RECORDED.saturating_sub(bytes(work.nodes.len()));
        while self.recorded > most
            && let Some(oldest) = self.graphs.iter().min_by_key(|(_, r)| r.used).map(|(hash, _)| *hash)
        {
            self.forget(oldest);
        }
        self.recorded += bytes(work.nodes.len());
        self.replays += 1;
        self.graphs.insert(hash, Recorded { work, graph, used: self.replays });
    }

    fn forget(&mut self, hash: u64) {
        self.recorded -= self.graphs.remove(&hash).map_or(0, |r| bytes(r.work.nodes.len()));
    }

    fn forget_all(&mut self) {
        self.graphs.clear();
        self.recorded = 0;
    }
}

/// What a stream holds back.
#[derive(Debug)]
pub(super) struct Queue {
    stream: sys::CUstream,
    holding: AtomicBool,
    /// Whether kernels are started before the one before them has ended.
    early: AtomicBool,
    replayed: AtomicU64,
    started: AtomicU64,
    state: Mutex<State>,
}

// SAFETY: streams and functions are handles that any thread with the context current may use; what changes is behind a mutex.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Queue {
    pub(super) fn new(stream: sys::CUstream, early: bool) -> Self {
        let (replayed, started) = (AtomicU64::new(0), AtomicU64::new(0));
        let (holding, early) = (AtomicBool::new(false), AtomicBool::new(early));
        Self { stream, holding, early, replayed, started, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_holding(&self) -> bool {
        self.holding.load(Ordering::Relaxed)
    }

    pub(super) fn is_early(&self) -> bool {
        self.early.load(Ordering::Relaxed)
    }

    /// Keeps a launch whose arguments lie at these addresses with these sizes.
    ///
    /// # Safety
    /// They do, and function and arguments fit each other.
    pub(super) unsafe fn launch(
        &self,
        context: &Context,
        function: sys::CUfunction,
        shape: Shape,
        args: impl Iterator<Item = (*const u8, usize)>,
    ) -> Result<(), CudaError> {
        let mut state = self.state();
        let work = &mut state.work;
        let first = work.offsets.len();
        for (from, size) in args {
            let at = work.words.len();
            work.offsets.push(at);
            work.words.resize(at + size.div_ceil(8), 0);
            // SAFETY: the words from `at` on are `size` bytes or more; the source is the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(from, work.words[at..].as_mut_ptr().cast::<u8>(), size) };
        }
        let count = work.offsets.len() - first;
        work.nodes.push(Node::Launch { function, shape, first, count });
        self.flush_if_long(context, state)
    }

    pub(super) fn copy(&self, context: &Context, to: u64, from: u64, len: usize) -> Result<(), CudaError> {
        let mut state = self.state();
        state.work.nodes.push(Node::Copy { to, from, len });
        self.flush_if_long(context, state)
    }

    fn flush_if_long(&self, context: &Context, state: MutexGuard<'_, State>) -> Result<(), CudaError> {
        if state.work.nodes.len() < segment(state.started) { Ok(()) } else { self.start(context, state) }
    }

    /// Starts what is held back. The context is current.
    pub(super) fn flush(&self, context: &Context) -> Result<(), CudaError> {
        if !self.is_holding() {
            return Ok(());
        }
        self.start(context, self.state())
    }

    /// As [`Queue::flush`], for those who cannot pass an error on: it is told to the next one who can.
    pub(super) fn flush_quietly(&self, context: &Context) {
        if self.is_holding()
            && let Err(e) = self.start(context, self.state())
        {
            self.state().failed.get_or_insert(e);
        }
    }

    fn start(&self, context: &Context, mut state: MutexGuard<'_, State>) -> Result<(), CudaError> {
        if let Some(e) = state.failed.take() {
            state.work.clear();
            return Err(e);
        }
        if state.closed {
            state.work.clear();
        }
        let n = state.work.nodes.len();
        if n == 0 {
            return Ok(());
        }
        let state = &mut *state;
        state.started += n;
        if let Some(kept) = &mut state.kept {
            kept.append(&state.work);
        }
        let hash = state.work.hash();
        if let Some(graph) = state.graph(hash) {
            self.replayed.fetch_add(n as u64, Ordering::Relaxed);
            // SAFETY: its memory is what the same launches would have used.
            let done = unsafe { graph.launch_in(self.stream) };
            state.work.clear();
            return done;
        }
        self.started.fetch_add(n as u64, Ordering::Relaxed);
        if n < MIN_GRAPH || !state.seen.remove(&hash) {
            if state.seen.len() >= MAX_SEEN {
                state.seen.clear();
            }
            state.seen.insert(hash);
            let done = state.work.issue(self.stream, self.is_early());
            state.work.clear();
            return done;
        }
        let work = std::mem::take(&mut state.work);
        let mut graph = Graph::record_in(context, self.stream, || work.issue(self.stream, self.is_early()))?;
        // SAFETY: what it consists of was to be started now.
        unsafe { graph.launch_in(self.stream) }?;
        state.insert(hash, work, graph);
        Ok(())
    }

    /// Keeps operations that are started from here on, or gives those back that were kept.
    pub(super) fn keep(&self, wanted: bool) -> Option<Work> {
        std::mem::replace(&mut self.state().kept, wanted.then(Work::default))
    }

    /// The stream is about to go.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.work.clear();
        state.forget_all();
    }
}

/// Holds a stream; see the module's description.
#[derive(Debug)]
pub struct Held {
    queue: Arc<Queue>,
    context: Context,
}

impl Held {
    /// Starts what was held back, and later launches at once.
    ///
    /// # Errors
    /// What a launch failed with.
    pub fn release(self) -> Result<(), CudaError> {
        self.context.bind()?;
        self.queue.flush(&self.context)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Nothing is left after a `release`.
        self.queue.flush_quietly(&self.context);
        self.queue.holding.store(false, Ordering::Relaxed);
    }
}

impl Stream {
    /// Holds launches and device copies back until they are needed or the result is released. Anything else that is done in
    /// the stream starts them first, and so does giving memory of the context back; other streams do not know of them.
    pub fn hold(&self) -> Held {
        self.queue().state().started = 0;
        self.queue().holding.store(true, Ordering::Relaxed);
        self.context().watch(self.queue());
        Held { queue: Arc::clone(self.queue()), context: self.context().clone() }
    }

    /// Whether kernels are started while the one before them runs, and wait there for its end: they are on devices that can (compute
    /// capability 9.0 and later) unless told otherwise. Results have the same bits either way. Recorded graphs are forgotten.
    ///
    /// # Errors
    /// What a launch that was held back failed with.
    pub fn start_early(&self, wanted: bool) -> Result<(), CudaError> {
        self.ready()?;
        let can = module::can_start_early(self.context().device().capability);
        self.queue().early.store(wanted && can, Ordering::Relaxed);
        self.queue().state().forget_all();
        Ok(())
    }

    /// Operations that were replayed in graphs, and that were started one by one, while it was held.
    pub fn replayed(&self) -> (u64, u64) {
        (self.queue().replayed.load(Ordering::Relaxed), self.queue().started.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_begins_with_few_operations_and_goes_on_with_ever_more() {
        let mut started = 0;
        let mut all = Vec::new();
        while started < 1500 {
            all.push(segment(started));
            started += segment(started);
        }
        assert_eq!(all, [8, 8, 16, 32, 64, 128, 256, 512, 512]);
    }

    #[test]
    fn works_are_equal_when_every_byte_is() {
        let work = |arg: u64, shared: u32| Work {
            nodes: vec![Node::Launch {
                function: std::ptr::null_mut(),
                shape: Shape { grid: [1; 3], block: [32, 1, 1], shared },
                first: 0,
                count: 1,
            }],
            offsets: vec![0],
            words: vec![arg],
        };
        assert_eq!((work(1, 0), work(1, 0).hash()), (work(1, 0), work(1, 0).hash()));
        for other in [work(2, 0), work(1, 4)] {
            assert!(other != work(1, 0) && other.hash() != work(1, 0).hash());
        }
    }

    #[test]
    fn what_is_kept_of_several_runs_has_the_arguments_of_each() {
        let work = |args: &[u64]| Work {
            nodes: (0..args.len())
                .map(|first| Node::Launch {
                    function: std::ptr::null_mut(),
                    shape: Shape { grid: [1; 3], block: [32, 1, 1], shared: 0 },
                    first,
                    count: 1,
                })
                .collect(),
            offsets: (0..args.len()).collect(),
            words: args.to_vec(),
        };
        let mut kept = work(&[3, 5]);
        kept.append(&work(&[7]));
        assert_eq!(kept, work(&[3, 5, 7]));
        assert_eq!(kept.functions().count(), 3);
    }
}
