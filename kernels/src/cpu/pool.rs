//! A fork-join pool for kernels: a few microseconds per dispatch, no CPU when idle.
//!
//! The caller takes part and never waits for a worker that has not begun: a worker *joins* a job while it is open, and
//! the caller closes the job when no items are left, then waits only for those inside. A second core that is busy with
//! something else therefore costs its share of the work, not a stall. Items are claimed dynamically.

#![allow(unsafe_code, reason = "a borrowed closure is lent to the workers for the duration of one call")]

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Polls before a worker parks: about 100 microseconds, a few times the longest gap between two kernels of a step.
const SPINS: u32 = 4000;

const OPEN: u64 = 1 << 15;
const ACTIVE: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 16;

type Work<'a> = dyn Fn(Range<usize>) + Sync + 'a;

/// What the job cell holds before the first job; never called.
static IDLE: fn(Range<usize>) = |_| {};

struct Job {
    work: *const Work<'static>,
    items: usize,
    grain: usize,
}

struct Shared {
    /// `epoch << 16 | open << 15 | workers inside`.
    state: AtomicU64,
    /// Written by the caller while the job is closed and nobody is inside; read by those who joined.
    job: UnsafeCell<Job>,
    next: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    park: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is the only non-Sync field; the protocol on `state` orders its writes before every read (see `run` and
// `worker`), and the closure behind the pointer is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is only followed while the caller keeps the closure alive.
unsafe impl Send for Shared {}

/// Fixed worker threads plus the calling thread.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One job at a time; a second caller waits here.
    turn: Mutex<()>,
}

impl Pool {
    /// A pool that computes on `threads` threads, the caller included (so it starts `threads - 1`). At least 1.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(Job { work: &raw const IDLE as *const Work<'static>, items: 0, grain: 1 }),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            park: Mutex::new(()),
            wake: Condvar::new(),
        });
        let workers = (1..threads.max(1))
            .filter_map(|i| {
                let shared = Arc::clone(&shared);
                // A thread that the system refuses costs speed, not function: the others take its items.
                std::thread::Builder::new().name(format!("cpu-{i}")).spawn(move || worker(&shared)).ok()
            })
            .collect();
        Self { shared, workers, turn: Mutex::new(()) }
    }

    /// Threads that take part, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `work` over disjoint ranges that cover `0..items`, `grain` items at a time, and returns when all are done.
    ///
    /// A panic in `work` is raised again here, after every thread has left it. `work` must not call `run` on the same pool.
    pub fn run(&self, items: usize, grain: usize, work: &Work<'_>) {
        let grain = grain.max(1);
        if self.workers.is_empty() || items <= grain {
            if items > 0 {
                work(0..items);
            }
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let s = &*self.shared;
        // SAFETY: the lifetime is erased for the time of this call only: `run` closes the job and waits until no worker
        // is inside before it returns or unwinds. The job cell is ours: the last job is closed and empty.
        unsafe {
            let work = std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work);
            *s.job.get() = Job { work, items, grain };
        }
        s.next.store(0, Ordering::Relaxed);
        let epoch = (s.state.load(Ordering::Relaxed) & !(EPOCH - 1)).wrapping_add(EPOCH);
        s.state.store(epoch | OPEN, Ordering::SeqCst);
        if s.sleepers.load(Ordering::SeqCst) > 0 {
            drop(s.park.lock());
            s.wake.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| claim(s, work, items, grain)));
        if mine.is_err() {
            // Nobody need begin what is left.
            s.next.store(items, Ordering::Relaxed);
        }
        let mut state = s.state.fetch_and(!OPEN, Ordering::AcqRel) & !OPEN;
        let mut polls = 0u32;
        while state & ACTIVE != 0 {
            polls += 1;
            // Someone inside lost its core: give ours away rather than burn it.
            if polls > SPINS {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            state = s.state.load(Ordering::Acquire);
        }
        let theirs = s.panicked.swap(false, Ordering::AcqRel);
        drop(turn);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!theirs, "a kernel panicked on a pool thread");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.park.lock());
        self.shared.wake.notify_all();
        for w in self.workers.drain(..) {
            // A worker catches the panics of its jobs, so joining cannot fail in a way that matters here.
            let _ = w.join();
        }
    }
}

fn claim(s: &Shared, work: &Work<'_>, items: usize, grain: usize) {
    loop {
        let at = s.next.fetch_add(grain, Ordering::Relaxed);
        if at >= items {
            return;
        }
        work(at..items.min(at + grain));
    }
}

fn worker(s: &Shared) {
    let mut done = 0u64;
    let mut polls = 0u32;
    loop {
        if s.stop.load(Ordering::Relaxed) {
            return;
        }
        let state = s.state.load(Ordering::Acquire);
        let epoch = state & !(EPOCH - 1);
        if state & OPEN == 0 || epoch == done {
            polls += 1;
            if polls < SPINS {
                std::hint::spin_loop();
                continue;
            }
            polls = 0;
            let mut guard = s.park.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            s.sleepers.fetch_add(1, Ordering::SeqCst);
            // The caller stores `state` before it reads `sleepers`, we write `sleepers` before we read `state`: one of
            // us sees the other, so no wake-up is lost.
            while !s.stop.load(Ordering::SeqCst) {
                let state = s.state.load(Ordering::SeqCst);
                if state & OPEN != 0 && state & !(EPOCH - 1) != done {
                    break;
                }
                guard = s.wake.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            s.sleepers.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        if s.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            continue;
        }
        // SAFETY: we are counted inside an open job, so the caller neither rewrites the cell nor returns (which would
        // end the closure's life) before we leave; its write happened before the `state` that we acquired.
        let (work, items, grain) = unsafe {
            let job = &*s.job.get();
            (&*job.work, job.items, job.grain)
        };
        if catch_unwind(AssertUnwindSafe(|| claim(s, work, items, grain))).is_err() {
            s.next.store(items, Ordering::Relaxed);
            s.panicked.store(true, Ordering::Release);
        }
        done = epoch;
        polls = 0;
        s.state.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn every_item_runs_once() {
        let pool = Pool::new(3);
        for items in [0, 1, 2, 7, 100, 1000] {
            for grain in [1, 3, 64] {
                let hits: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.run(items, grain, &|r| {
                    for i in r {
                        hits[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "items {items} grain {grain}");
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        for round in 0..20 {
            let r = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, 1, &|r| assert!(r.start != 40, "expected"));
            }));
            assert!(r.is_err(), "round {round}");
        }
        let n = AtomicUsize::new(0);
        pool.run(100, 1, &|r| {
            n.fetch_add(r.len(), Ordering::Relaxed);
        });
        assert_eq!(n.load(Ordering::Relaxed), 100);
    }

    #[test]
    fn many_small_jobs_from_several_callers() {
        let pool = Arc::new(Pool::new(2));
        let callers: Vec<_> = (0..3)
            .map(|_| {
                let pool = Arc::clone(&pool);
                std::thread::spawn(move || {
                    for i in 0..2000usize {
                        let n = AtomicUsize::new(0);
                        pool.run(i % 9, 1, &|r| {
                            n.fetch_add(r.len(), Ordering::Relaxed);
                        });
                        assert_eq!(n.load(Ordering::Relaxed), i % 9);
                    }
                })
            })
            .collect();
        for c in callers {
            c.join().expect("no caller panics");
        }
    }

    #[test]
    fn an_idle_pool_uses_no_cpu() {
        fn cpu_time() -> Duration {
            let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the pointer is to a live timespec.
            let rc = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut ts) };
            assert_eq!(rc, 0);
            Duration::new(ts.tv_sec.unsigned_abs(), u32::try_from(ts.tv_nsec).expect("below 1e9"))
        }
        // nextest runs each test in a process of its own, so the process's time is this pool's.
        let pool = Pool::new(2);
        pool.run(64, 1, &|_| {});
        std::thread::sleep(Duration::from_millis(50));
        let (cpu, wall) = (cpu_time(), Instant::now());
        std::thread::sleep(Duration::from_millis(300));
        let used = cpu_time() - cpu;
        assert!(used < Duration::from_millis(10), "used {used:?} in {:?}", wall.elapsed());
    }
}
