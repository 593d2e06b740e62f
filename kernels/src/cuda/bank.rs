//! State memory of one sequence: address space for the whole context, device memory mapped as rows arrive.
//!
//! Device memory comes in pieces of 2 MiB, and a Flash bank has about 170 slots: a region for each would commit 340 MiB for the first
//! token. So rings and fixed blocks, whose size does not depend on the context, share one region, and the growing slots share
//! another one that is cut into blocks of some number of tokens, each with every slot's rows of those tokens.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::CudaDevice;
use super::driver::{Context, CudaError, Memory, Space, vmm};
use super::fatal::OrFatal;
use crate::device::DeviceError;
use crate::kernel_args;
use crate::state::{StateKind, StateSpec, StateType};

/// Most tokens of a block: beyond it, commits would be coarser than they need to be.
const MAX_BLOCK_TOKENS: usize = 4096;

/// Where a slot's rows lie, as kernels take it (`Slot` in `common.cuh`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotArg {
    pub(super) offset: i64,
    pub(super) block_stride: i64,
    pub(super) rows_per_block: i32,
    pub(super) row_bytes: i32,
    pub(super) ring: i32,
    pub(super) ty: i32,
    pub(super) rotary: i32,
    pub(super) width: i32,
}
kernel_args!(SlotArg);

/// How the slots of a spec share a bank's addresses. Independent of the context, so banks of one model have the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    slots: Vec<(StateKind, SlotArg)>,
    /// Bytes of rings and fixed blocks, which a checkpoint copies, and in whole pieces.
    kept: usize,
    fixed: usize,
    /// Tokens of a block of the growing slots, and its bytes.
    block_tokens: usize,
    block_bytes: usize,
    piece: usize,
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Layout {
    fn new(spec: &StateSpec, piece: usize) -> Option<Self> {
        // Tokens per row of a growing slot.
        let each = |kind: &StateKind| match kind {
            StateKind::Append { .. } => Some(1),
            StateKind::Pooled { tokens, .. } => Some(*tokens),
            StateKind::Ring { .. } | StateKind::Fixed { .. } => None,
        };
        let row_bytes = |kind: &StateKind| kind.ty().row_bytes(kind.width());
        let whole = spec.slots.iter().filter_map(each).fold(1usize, |a, b| a / gcd(a, b) * b);
        let block_bytes = |tokens: usize| -> usize {
            spec.slots.iter().filter_map(|k| Some((tokens / each(k)? * row_bytes(k)).next_multiple_of(16))).sum()
        };
        let mut block_tokens = whole;
        while block_tokens * 2 <= MAX_BLOCK_TOKENS && block_bytes(block_tokens) < piece {
            block_tokens *= 2;
        }
        let (mut fixed, mut growing) = (0usize, 0usize);
        let mut slots = Vec::with_capacity(spec.slots.len());
        for kind in &spec.slots {
            let (ty, rotary) = match kind.ty() {
                StateType::F16 => (0, 0),
                StateType::F32 => (1, 0),
                StateType::Fp8 { rotary } => (2, rotary),
                StateType::Fp4 => (3, 0),
            };
            let (rows, ring, at) = match (*kind, each(kind)) {
                (_, Some(tokens)) => (block_tokens / tokens, 0, &mut growing),
                (StateKind::Ring { rows, .. }, None) => (rows, rows, &mut fixed),
                (_, None) => (1, 0, &mut fixed),
            };
            let int = |n: usize| i32::try_from(n).ok();
            slots.push((
                *kind,
                SlotArg {
                    offset: i64::try_from(*at).ok()?,
                    block_stride: 0,
                    rows_per_block: int(rows)?,
                    row_bytes: int(row_bytes(kind))?,
                    ring: int(ring)?,
                    ty,
                    rotary: int(rotary)?,
                    width: int(kind.width())?,
                },
            ));
            *at = (*at + rows * row_bytes(kind)).next_multiple_of(if each(kind).is_some() { 16 } else { 256 });
        }
        let (kept, fixed) = (fixed, fixed.next_multiple_of(piece));
        for (kind, slot) in &mut slots {
            if each(kind).is_some() {
                slot.offset += i64::try_from(fixed).ok()?;
                slot.block_stride = i64::try_from(growing).ok()?;
            }
        }
        Some(Self { slots, kept, fixed, block_tokens, block_bytes: growing, piece })
    }

    /// Bytes, in whole pieces, that `tokens` tokens need from the bank's base.
    fn end(&self, tokens: usize) -> Option<usize> {
        if tokens == 0 {
            return Some(0);
        }
        let growing = tokens.div_ceil(self.block_tokens).checked_mul(self.block_bytes)?;
        self.fixed.checked_add(growing)?.checked_next_multiple_of(self.piece)
    }

    /// What kernels get for `slot`.
    pub(super) fn slot(&self, slot: usize) -> SlotArg {
        self.slots[slot].1
    }

    /// Its kind.
    pub(super) fn kind(&self, slot: usize) -> StateKind {
        self.slots[slot].0
    }

    /// Storage rows `rows` of `slot` as runs of consecutive bytes: offset from the base and length.
    fn runs(&self, slot: usize, rows: Range<usize>) -> Vec<(usize, usize)> {
        let (_, s) = &self.slots[slot];
        let n = |v: i64| usize::try_from(v).unwrap_or(0);
        let (per, bytes) = (n(s.rows_per_block.into()), n(s.row_bytes.into()));
        let (mut at, mut runs) = (rows.start, Vec::new());
        while at < rows.end {
            let (block, within) = (at / per, at % per);
            let count = (per - within).min(rows.end - at);
            runs.push((n(s.offset) + block * n(s.block_stride) + within * bytes, count * bytes));
            at += count;
        }
        runs
    }
}

/// One sequence's state.
#[derive(Debug)]
pub struct CudaBank {
    space: Arc<Mutex<Space>>,
    base: u64,
    layout: Arc<Layout>,
    context_tokens: usize,
    tokens: usize,
    committed: usize,
}

/// A copy of a bank's rings and fixed blocks.
#[derive(Debug)]
pub struct CudaCheckpoint {
    copy: Memory,
    tokens: usize,
}

fn lock(space: &Mutex<Space>) -> MutexGuard<'_, Space> {
    space.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refusal(what: &'static str, e: &CudaError, missing: usize) -> DeviceError {
    if e.is_sticky() {
        super::fatal::fatal(what, e);
    }
    DeviceError::OutOfMemory { what, missing }
}

impl CudaBank {
    pub(super) fn new(context: &Context, spec: &StateSpec, tokens: usize) -> Result<Self, DeviceError> {
        let what = "bank address space";
        let too_long = || DeviceError::OutOfMemory { what, missing: usize::MAX };
        let piece = vmm::granularity(context).map_err(|e| refusal(what, &e, 0))?;
        let piece = usize::try_from(piece).map_err(|_| too_long())?;
        let layout = Layout::new(spec, piece).ok_or_else(too_long)?;
        let len = layout.end(tokens).ok_or_else(too_long)?.max(piece);
        let space = Space::reserve(context, len as u64).map_err(|e| refusal(what, &e, len))?;
        let base = space.start();
        let space = Arc::new(Mutex::new(space));
        Ok(Self { space, base, layout: Arc::new(layout), context_tokens: tokens, tokens: 0, committed: 0 })
    }

    pub(super) fn commit(&mut self, tokens: usize) -> Result<(), DeviceError> {
        assert!(tokens <= self.context_tokens, "commit of {tokens} tokens in a bank of {}", self.context_tokens);
        let want = self.layout.end(tokens).unwrap_or(usize::MAX);
        let mut space = lock(&self.space);
        while self.committed < want {
            let added = space.fill(self.committed as u64, self.layout.piece as u64);
            added.map_err(|e| refusal("bank", &e, want - self.committed))?;
            self.committed += self.layout.piece;
        }
        self.tokens = self.tokens.max(tokens);
        Ok(())
    }

    pub(super) fn trim(&mut self, tokens: usize) {
        let keep = self.layout.end(tokens).unwrap_or(usize::MAX);
        self.tokens = self.tokens.min(tokens);
        if keep >= self.committed {
            return;
        }
        let mut space = lock(&self.space);
        // Kernels that are still under way may use what is about to go.
        space.context().synchronize().or_fatal("trimming a bank");
        while self.committed > keep {
            self.committed -= self.layout.piece;
            space.unmap(self.committed as u64).or_fatal("trimming a bank");
        }
    }

    pub(super) fn committed(&self) -> usize {
        self.committed
    }

    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Keeps the addresses mapped.
    pub(super) fn space(&self) -> Arc<Mutex<Space>> {
        Arc::clone(&self.space)
    }

    pub(super) fn checkpoint(&self, device: &CudaDevice, tokens: usize) -> Result<CudaCheckpoint, DeviceError> {
        assert!(tokens <= self.tokens, "a checkpoint at {tokens} of a bank of {} tokens", self.tokens);
        let len = if tokens == 0 { 0 } else { self.layout.kept };
        let copy = Memory::new(device.context(), len).map_err(|e| refusal("checkpoint", &e, len))?;
        if len > 0 {
            #[allow(unsafe_code, reason = "a copy on the device")]
            // SAFETY: both are `kept` bytes, the bank's committed since it has tokens.
            unsafe { device.stream().copy(copy.start(), self.base, len) }.or_fatal("checkpoint");
        }
        Ok(CudaCheckpoint { copy, tokens })
    }

    pub(super) fn rewind(&mut self, device: &CudaDevice, checkpoint: &CudaCheckpoint) {
        let tokens = checkpoint.tokens;
        assert!(tokens <= self.tokens, "rewind to {tokens} of a bank of {} tokens", self.tokens);
        self.trim(tokens);
        if !checkpoint.copy.is_empty() {
            #[allow(unsafe_code, reason = "a copy on the device")]
            // SAFETY: both are `kept` bytes, the bank's committed since it has tokens.
            unsafe { device.stream().copy(self.base, checkpoint.copy.start(), checkpoint.copy.len()) }
                .or_fatal("rewind");
        }
    }

    fn check_rows(&self, slot: usize, rows: &Range<usize>) {
        let have = self.layout.kind(slot).rows(self.tokens);
        assert!(rows.start <= rows.end && rows.end <= have, "rows {rows:?} of slot {slot}, which has {have}");
    }

    pub(super) fn export(&self, device: &CudaDevice, slot: usize, rows: Range<usize>, out: &mut Vec<u8>) {
        self.check_rows(slot, &rows);
        for (offset, len) in self.layout.runs(slot, rows) {
            let at = out.len();
            out.resize(at + len, 0);
            #[allow(unsafe_code, reason = "a copy from the device")]
            // SAFETY: rows that exist lie in committed memory.
            unsafe { device.stream().download(self.base + offset as u64, &mut out[at..]) }.or_fatal("bank export");
        }
    }

    pub(super) fn import(&mut self, device: &CudaDevice, slot: usize, rows: Range<usize>, mut bytes: &[u8]) {
        self.check_rows(slot, &rows);
        let runs = self.layout.runs(slot, rows);
        assert_eq!(bytes.len(), runs.iter().map(|(_, len)| len).sum::<usize>(), "bytes of state rows");
        for (offset, len) in runs {
            let (part, rest) = bytes.split_at(len);
            bytes = rest;
            #[allow(unsafe_code, reason = "a copy to the device")]
            // SAFETY: rows that exist lie in committed memory, and the bank is exclusively ours.
            unsafe { device.stream().upload(self.base + offset as u64, part) }.or_fatal("bank import");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = 2 << 20;

    fn flash_like() -> StateSpec {
        let ty = StateType::Fp8 { rotary: 64 };
        let mut slots = Vec::new();
        for _ in 0..21 {
            slots.push(StateKind::Ring { rows: 128, width: 512, ty: StateType::F16 });
            slots.push(StateKind::Pooled { width: 512, ty, tokens: 4 });
            slots.push(StateKind::Fixed { elems: 32768 });
            slots.push(StateKind::Pooled { width: 512, ty, tokens: 128 });
        }
        StateSpec { slots }
    }

    #[test]
    fn rows_never_overlap_and_lie_within_what_is_committed() {
        let spec = flash_like();
        let layout = Layout::new(&spec, PIECE).expect("a layout");
        for tokens in [1, 127, 128, 5000] {
            let end = layout.end(tokens).expect("an end");
            let mut runs: Vec<(usize, usize)> =
                (0..spec.slots.len()).flat_map(|s| layout.runs(s, 0..spec.slots[s].rows(tokens))).collect();
            runs.sort_unstable();
            assert!(runs.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{tokens}");
            assert!(runs.last().is_none_or(|(at, len)| at + len <= end), "{tokens}");
            let bytes: usize = runs.iter().map(|r| r.1).sum();
            assert_eq!(bytes, spec.bytes(tokens), "{tokens}: every row has its bytes");
        }
    }

    #[test]
    fn a_short_sequence_commits_little() {
        let layout = Layout::new(&flash_like(), PIECE).expect("a layout");
        assert!(layout.end(1).expect("an end") <= layout.fixed + 3 * PIECE);
        assert_eq!(layout.end(0), Some(0));
        assert_eq!(layout.end(usize::MAX), None, "an impossible context is an error");
    }

    #[test]
    fn runs_follow_the_blocks() {
        let ty = StateType::F32;
        let spec = StateSpec {
            slots: vec![StateKind::Append { width: 4, ty }, StateKind::Pooled { width: 4, ty, tokens: 3 }],
        };
        let layout = Layout::new(&spec, 64).expect("a layout");
        let per = usize::try_from(layout.slot(0).rows_per_block).unwrap();
        assert_eq!(per % 3, 0, "whole rows of every slot in a block");
        let runs = layout.runs(0, per - 1..per + 1);
        assert_eq!(runs, [((per - 1) * 16, 16), (layout.block_bytes, 16)]);
    }
}
