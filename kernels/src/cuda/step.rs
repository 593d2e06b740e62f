//! A plan in device memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::bank::{CudaBank, Layout};
use super::buffer::Growable;
use super::driver::{Context, CudaError, Event, Held, Memory, Pinned, Space, Stream, vmm::DevicePtr};
use super::fatal::OrFatal;
use crate::kernel_args;
use crate::plan::BatchPlan;

/// Addresses of a step's arrays, as kernels take them (`Step` in `common.cuh`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepArg {
    tokens: u64,
    positions: u64,
    span_of: u64,
    wanted: u64,
    first_pos: u64,
    first_row: u64,
    span_rows: u64,
    banks: u64,
}
kernel_args!(StepArg);

impl StepArg {
    /// Address of the rows' tokens.
    pub(super) fn tokens(self) -> u64 {
        self.tokens
    }

    /// For kernels that look at nothing but the tokens.
    pub(super) fn of_tokens(tokens: u64) -> Self {
        Self { tokens, ..Self::default() }
    }
}

/// Most rows of a step whose launches are held back and replayed as graphs: decode steps, and their kind. The kernels of longer
/// ones take long enough to hide their launches.
const MAX_HELD_ROWS: usize = 64;

/// Launches are sized for this many positions at least, and for more in eighths of a power of two, so that the steps of many tokens
/// are launched alike. Blocks for positions that are not there yet end at once.
const DEPTH_STEP: usize = 512;

/// The depth that launches are sized for.
fn padded_depth(deepest: usize) -> usize {
    deepest.next_multiple_of((deepest.next_power_of_two() / 8).max(DEPTH_STEP))
}

/// Sines and cosines of a step's positions.
#[derive(Debug)]
struct Turns {
    /// Address of the frequencies.
    of: DevicePtr,
    made: bool,
    memory: Growable,
}

/// Memory for one step's arrays; used again by later steps.
#[derive(Debug)]
struct Arena {
    turns: Mutex<Vec<Turns>>,
    // Waited for before `host` is written again or freed.
    copied: Event,
    device: Memory,
    host: Pinned,
}

impl Drop for Arena {
    fn drop(&mut self) {
        let _ = self.copied.synchronize();
    }
}

/// Arenas that no step uses, and whether steps start their launches at once.
#[derive(Clone, Debug, Default)]
pub(super) struct Arenas(Arc<Mutex<Vec<Arena>>>, Arc<AtomicBool>);

impl Arenas {
    /// Whether steps hold their launches back.
    pub(super) fn replay(&self, wanted: bool) {
        self.1.store(!wanted, Ordering::Relaxed);
    }
}

/// A plan made ready.
#[derive(Debug)]
pub struct CudaStep {
    /// Differs from that of every other step of the process, and from 0.
    pub(super) id: u64,
    pub(super) arg: StepArg,
    pub(super) rows: usize,
    pub(super) spans: usize,
    pub(super) wanted: usize,
    /// Position after the last row of the deepest span, or more: see [`padded_depth`].
    pub(super) deepest: usize,
    /// Rows of the longest span.
    pub(super) longest: usize,
    /// Largest token id.
    pub(super) top_token: u32,
    pub(super) distinct_banks: bool,
    layout: Option<Arc<Layout>>,
    arena: Option<Arena>,
    arenas: Arenas,
    /// Launches since this step was made, if they are held back.
    held: Option<Held>,
    _spaces: Vec<Arc<Mutex<Space>>>,
}

impl CudaStep {
    /// The layout of the step's banks.
    pub(super) fn layout(&self) -> &Layout {
        match &self.layout {
            Some(layout) => layout,
            None => panic!("a step without spans has no state"),
        }
    }

    /// Where the step has sines and cosines for the frequencies at `of`, `len` bytes, and whether they are there already; if not, the
    /// caller makes them.
    pub(super) fn turns(&self, context: &Context, of: DevicePtr, len: usize) -> (DevicePtr, bool) {
        let Some(arena) = &self.arena else { return (0, true) };
        let mut all = arena.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let i = all.iter().position(|t| t.of == of).unwrap_or_else(|| {
            all.push(Turns { of, made: false, memory: Growable::default() });
            all.len() - 1
        });
        let turns = &mut all[i];
        (turns.memory.at_least(context, len), std::mem::replace(&mut turns.made, true))
    }

    pub(super) fn new(
        context: &Context,
        stream: &Stream,
        arenas: &Arenas,
        plan: &BatchPlan,
        banks: &[CudaBank],
    ) -> Result<Self, CudaError> {
        let int = |n: usize| i32::try_from(n).map_err(|_| CudaError::Range(format!("{n} in a step's arrays")));
        let (rows, spans, wanted) = (plan.rows(), plan.spans.len(), plan.wanted.len());
        assert!(plan.wanted.iter().all(|w| *w < rows), "wanted rows are rows of the plan");
        let mut positions = Vec::with_capacity(rows);
        let mut span_of = Vec::with_capacity(rows);
        let mut layout: Option<Arc<Layout>> = None;
        let (mut distinct_banks, mut deepest, mut longest) = (true, 0, 0);
        for (i, s) in plan.spans.iter().enumerate() {
            assert_eq!(s.first_row, positions.len(), "spans cover the rows in order");
            let (bank, end) = (&banks[s.bank], s.first_pos + s.rows);
            assert!(end <= bank.tokens(), "span to position {end} of a bank committed to {}", bank.tokens());
            match &layout {
                None => layout = Some(Arc::clone(bank.layout())),
                Some(l) => assert!(*l == *bank.layout(), "banks of one step have one layout"),
            }
            (deepest, longest) = (deepest.max(end), longest.max(s.rows));
            for pos in s.first_pos..end {
                positions.push(int(pos)?);
                span_of.push(int(i)?);
            }
            // Two spans of one bank may follow each other but not write the same row.
            for b in &plan.spans[..i] {
                distinct_banks &= s.bank != b.bank;
                let apart = s.first_pos >= b.first_pos + b.rows || b.first_pos >= end;
                assert!(s.bank != b.bank || apart, "two spans write the same rows of bank {}", s.bank);
            }
        }
        assert_eq!(positions.len(), rows, "spans cover the rows");

        // Addresses first, then the arrays of 32-bit numbers, all in one copy.
        let mut bytes: Vec<u8> = plan.spans.iter().flat_map(|s| banks[s.bank].base().to_le_bytes()).collect();
        let mut starts = Vec::new();
        let mut put = |values: &mut dyn Iterator<Item = Result<i32, CudaError>>| -> Result<(), CudaError> {
            starts.push(bytes.len() as u64);
            for v in values {
                bytes.extend_from_slice(&v?.to_le_bytes());
            }
            Ok(())
        };
        put(&mut plan.tokens.iter().map(|t| Ok(t.cast_signed())))?;
        put(&mut positions.iter().map(|p| Ok(*p)))?;
        put(&mut span_of.iter().map(|s| Ok(*s)))?;
        put(&mut plan.wanted.iter().map(|w| int(*w)))?;
        put(&mut plan.spans.iter().map(|s| int(s.first_pos)))?;
        put(&mut plan.spans.iter().map(|s| int(s.first_row)))?;
        put(&mut plan.spans.iter().map(|s| int(s.rows)))?;

        let free = {
            let mut list = arenas.0.lock().unwrap_or_else(PoisonError::into_inner);
            // The same one for each of many like steps, whose launches are found again by what they are given.
            let fits = list.iter().enumerate().filter(|(_, a)| a.device.len() >= bytes.len());
            let best = fits.min_by_key(|(_, a)| (a.device.len(), a.device.start())).map(|(i, _)| i);
            best.map(|i| list.swap_remove(i))
        };
        let mut arena = match free {
            Some(arena) => arena,
            None => {
                let len = bytes.len().next_power_of_two().max(4096);
                Arena {
                    turns: Mutex::default(),
                    copied: Event::new(context)?,
                    device: Memory::new(context, len)?,
                    host: Pinned::new(context, len)?,
                }
            }
        };
        arena.turns.get_mut().unwrap_or_else(PoisonError::into_inner).iter_mut().for_each(|t| t.made = false);
        arena.copied.synchronize()?;
        arena.host[..bytes.len()].copy_from_slice(&bytes);
        #[allow(unsafe_code, reason = "a copy to the device")]
        // SAFETY: the arena's device memory is as large; earlier kernels that read it come before in the stream; the source is
        // written again only after `copied`.
        unsafe {
            stream.upload_pinned(arena.device.start(), &arena.host, bytes.len())?;
        }
        arena.copied.record(stream)?;
        let held = (rows <= MAX_HELD_ROWS && !arenas.1.load(Ordering::Relaxed)).then(|| stream.hold());
        if held.is_some() {
            deepest = padded_depth(deepest);
        }
        let base = arena.device.start();
        let at = |i: usize| base + starts.get(i).copied().unwrap_or(0);
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Ok(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            arg: StepArg {
                tokens: at(0),
                positions: at(1),
                span_of: at(2),
                wanted: at(3),
                first_pos: at(4),
                first_row: at(5),
                span_rows: at(6),
                banks: base,
            },
            rows,
            spans,
            wanted,
            deepest,
            longest,
            top_token: plan.tokens.iter().copied().max().unwrap_or(0),
            distinct_banks,
            layout,
            arena: Some(arena),
            arenas: arenas.clone(),
            held,
            _spaces: plan.spans.iter().map(|s| banks[s.bank].space()).collect(),
        })
    }
}

impl Drop for CudaStep {
    fn drop(&mut self) {
        // Launches that are held back use the arena.
        if let Some(held) = self.held.take() {
            held.release().or_fatal("a step");
        }
        if let Some(arena) = self.arena.take() {
            self.arenas.0.lock().unwrap_or_else(PoisonError::into_inner).push(arena);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_are_padded_by_little_and_seldom_change() {
        assert_eq!([0, 1, 512, 513, 4096, 4097].map(padded_depth), [0, 512, 512, 1024, 4096, 5120]);
        let mut sizes: Vec<usize> = (1..65_536).map(padded_depth).collect();
        sizes.dedup();
        assert_eq!(sizes.len(), 8 + 4 * 4, "graphs of a sequence of 65,536 tokens");
        assert!((4096..100_000).all(|d| padded_depth(d) >= d && padded_depth(d) * 4 <= d * 5));
    }
}
