//! State memory of one sequence: address space for the whole context, pages committed as rows arrive.

#![allow(unsafe_code, reason = "one anonymous mapping and raw rows inside it")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::device::DeviceError;
use crate::state::{StateKind, StateSpec, StateType};

/// An anonymous private mapping without swap reservation. Pages never written cost nothing.
struct Reservation {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; who may read and write it when is the business of `CpuBank` and of the kernels' row split.
unsafe impl Send for Reservation {}
// SAFETY: as above.
unsafe impl Sync for Reservation {}

impl Reservation {
    fn new(len: usize) -> Result<Self, DeviceError> {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing of ours.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        match NonNull::new(p.cast::<u8>()) {
            Some(base) if p != libc::MAP_FAILED => {
                // A huge page would commit 2 MiB per slot for the first row. Advice only: a refusal changes nothing but cost.
                // SAFETY: our own mapping.
                let _ = unsafe { libc::madvise(p, len, libc::MADV_NOHUGEPAGE) };
                Ok(Self { base, len })
            }
            _ => Err(DeviceError::OutOfMemory { what: "bank address space", missing: len }),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: base and len are of our own mapping, and nothing refers to it any more (it is only reached through
        // the `Arc` that is being dropped).
        let _ = unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Where one slot's rows lie.
#[derive(Clone, Copy)]
pub(crate) struct Slot {
    offset: usize,
    pub(crate) kind: StateKind,
    /// Elements per row.
    pub(crate) width: usize,
    pub(crate) ty: StateType,
    committed: usize,
}

/// One sequence's state: per slot, rows `[context, width]` in address space of their own.
pub struct CpuBank {
    memory: Arc<Reservation>,
    slots: Vec<Slot>,
    context: usize,
    tokens: usize,
    page: usize,
}

/// Rings and fixed blocks of a bank at one length: their rows in slot order.
pub struct CpuCheckpoint {
    tokens: usize,
    bytes: Vec<u8>,
}

/// A bank as a step sees it: the memory stays mapped as long as the step lives, whatever happens to the bank.
#[derive(Clone)]
pub(crate) struct BankView {
    memory: Arc<Reservation>,
    slots: Vec<Slot>,
    tokens: usize,
}

impl CpuBank {
    /// Reserves address space for `context` tokens.
    pub(crate) fn new(spec: &StateSpec, context: usize) -> Result<Self, DeviceError> {
        // SAFETY: sysconf has no preconditions.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
        let too_long = DeviceError::OutOfMemory { what: "bank address space", missing: usize::MAX };
        let mut offset = 0usize;
        let mut slots = Vec::with_capacity(spec.slots.len());
        for kind in spec.slots.iter().copied() {
            slots.push(Slot { offset, kind, width: kind.width(), ty: kind.ty(), committed: 0 });
            let end = kind
                .bytes(context)
                .and_then(|bytes| bytes.checked_next_multiple_of(page))
                .and_then(|bytes| offset.checked_add(bytes));
            let Some(end) = end else { return Err(too_long) };
            offset = end;
        }
        let memory = Arc::new(Reservation::new(offset.max(page))?);
        Ok(Self { memory, slots, context, tokens: 0, page })
    }

    /// Makes `tokens` rows of every slot usable.
    pub(crate) fn commit(&mut self, tokens: usize) -> Result<(), DeviceError> {
        assert!(tokens <= self.context, "commit of {tokens} tokens in a bank of {}", self.context);
        for slot in &mut self.slots {
            let want = slot.kind.bytes(tokens).unwrap_or(usize::MAX / 2).next_multiple_of(self.page);
            if want <= slot.committed {
                continue;
            }
            let (at, len) = (slot.offset + slot.committed, want - slot.committed);
            // SAFETY: page-aligned and inside our mapping (`want` is at most the slot's reserved size). Populating
            // writes nothing to pages that are there.
            let rc = unsafe { libc::madvise(self.memory.base.as_ptr().add(at).cast(), len, libc::MADV_POPULATE_WRITE) };
            // Kernels before 5.14 do not know the advice (EINVAL); there pages come on first touch.
            if rc != 0 && std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL) {
                return Err(DeviceError::OutOfMemory { what: "bank", missing: len });
            }
            slot.committed = want;
        }
        self.tokens = self.tokens.max(tokens);
        Ok(())
    }

    /// Forgets rows from `tokens` on; whole pages beyond them go back to the system.
    pub(crate) fn trim(&mut self, tokens: usize) {
        for slot in &mut self.slots {
            let keep = slot.kind.bytes(tokens).unwrap_or(usize::MAX / 2).next_multiple_of(self.page);
            if keep >= slot.committed {
                continue;
            }
            // SAFETY: page-aligned and inside our mapping; the range stays mapped and reads as zeros afterwards.
            let _ = unsafe {
                libc::madvise(
                    self.memory.base.as_ptr().add(slot.offset + keep).cast(),
                    slot.committed - keep,
                    libc::MADV_DONTNEED,
                )
            };
            slot.committed = keep;
        }
        self.tokens = self.tokens.min(tokens);
    }

    /// Bytes in committed pages.
    pub(crate) fn committed(&self) -> usize {
        self.slots.iter().map(|s| s.committed).sum()
    }

    /// The memory of storage rows `rows` of `slot`.
    fn span(&self, slot: usize, rows: &Range<usize>) -> (*mut u8, usize) {
        let s = self.slots[slot];
        let have = s.kind.rows(self.tokens);
        assert!(
            rows.start <= rows.end && rows.end <= have,
            "rows {rows:?} of slot {slot}, which has {have} in a bank committed to {}",
            self.tokens
        );
        let bytes = s.ty.row_bytes(s.width);
        // SAFETY: the slot's first `have` rows are inside the mapping.
        let at = unsafe { self.memory.base.as_ptr().add(s.offset + rows.start * bytes) };
        (at, rows.len() * bytes)
    }

    /// Appends the bytes of storage rows to `out`.
    pub(crate) fn export(&self, slot: usize, rows: &Range<usize>, out: &mut Vec<u8>) {
        let (at, len) = self.span(slot, rows);
        // SAFETY: `span` checked the range; pages read as zeros until written. No operation runs: they all return before
        // their caller can get at the bank again.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(at, len) });
    }

    /// Overwrites storage rows.
    pub(crate) fn import(&mut self, slot: usize, rows: &Range<usize>, bytes: &[u8]) {
        let (at, len) = self.span(slot, rows);
        assert_eq!(bytes.len(), len, "bytes of rows {rows:?} of slot {slot}");
        // SAFETY: as in `export`; the bank is borrowed exclusively, and `bytes` is not bank memory, of which nothing lends slices.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, len) };
    }

    /// Copies rings and fixed blocks.
    pub(crate) fn checkpoint(&self, tokens: usize) -> Result<CpuCheckpoint, DeviceError> {
        assert!(tokens <= self.tokens, "checkpoint at {tokens} in a bank committed to {}", self.tokens);
        let kinds = || self.slots.iter().map(|s| s.kind).enumerate().filter(|(_, k)| k.checkpointed());
        let len = kinds().map(|(_, k)| k.bytes(tokens).unwrap_or(usize::MAX)).fold(0, usize::saturating_add);
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(len).is_err() {
            return Err(DeviceError::OutOfMemory { what: "checkpoint", missing: len });
        }
        for (slot, kind) in kinds() {
            self.export(slot, &(0..kind.rows(tokens)), &mut bytes);
        }
        Ok(CpuCheckpoint { tokens, bytes })
    }

    /// Goes back to a checkpoint of this bank.
    pub(crate) fn rewind(&mut self, to: &CpuCheckpoint) {
        assert!(to.tokens <= self.tokens, "rewind to {} of a bank of {}", to.tokens, self.tokens);
        self.trim(to.tokens);
        let mut rest = to.bytes.as_slice();
        for slot in 0..self.slots.len() {
            let kind = self.slots[slot].kind;
            if !kind.checkpointed() {
                continue;
            }
            let rows = kind.rows(to.tokens);
            let (bytes, after) = rest.split_at(rows * kind.ty().row_bytes(kind.width()));
            self.import(slot, &(0..rows), bytes);
            rest = after;
        }
        assert!(rest.is_empty(), "a checkpoint of another state spec");
    }

    pub(crate) fn view(&self) -> BankView {
        BankView { memory: Arc::clone(&self.memory), slots: self.slots.clone(), tokens: self.tokens }
    }
}

impl BankView {
    /// Rows that may be read and written.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    pub(crate) fn slot(&self, slot: usize) -> Slot {
        self.slots[slot]
    }

    /// The first byte of `slot`'s rows. Rows `0..self.tokens()` are inside the mapping.
    pub(crate) fn rows(&self, slot: usize) -> *mut u8 {
        // SAFETY: the slot's offset is inside the mapping.
        unsafe { self.memory.base.as_ptr().add(self.slots[slot].offset) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident(bank: &CpuBank) -> usize {
        let pages = bank.memory.len.div_ceil(bank.page);
        let mut map = vec![0u8; pages];
        // SAFETY: the mapping is ours and `map` has a byte for each of its pages.
        let rc = unsafe { libc::mincore(bank.memory.base.as_ptr().cast(), bank.memory.len, map.as_mut_ptr()) };
        assert_eq!(rc, 0);
        map.iter().filter(|b| **b & 1 != 0).count() * bank.page
    }

    fn spec() -> StateSpec {
        StateSpec {
            slots: vec![
                StateKind::Append { width: 192, ty: StateType::F16 },
                StateKind::Append { width: 100, ty: StateType::F32 },
            ],
        }
    }

    #[test]
    fn pages_come_with_rows_and_go_with_trim() {
        let mut bank = CpuBank::new(&spec(), 1 << 20).expect("address space");
        assert_eq!((bank.committed(), resident(&bank)), (0, 0));
        bank.commit(1).expect("memory");
        assert_eq!(bank.committed(), 2 * bank.page);
        bank.commit(1000).expect("memory");
        let page = bank.page;
        let want = (1000 * 384usize).next_multiple_of(page) + (1000 * 400usize).next_multiple_of(page);
        assert_eq!(bank.committed(), want);
        assert_eq!(resident(&bank), want, "the kernel's account agrees");
        bank.trim(10);
        assert_eq!(bank.committed(), 384usize.next_multiple_of(page) + 4000usize.next_multiple_of(page));
        assert_eq!(resident(&bank), bank.committed());
        bank.trim(0);
        assert_eq!((bank.committed(), resident(&bank)), (0, 0));
    }

    #[test]
    fn an_impossible_context_is_an_error() {
        assert!(CpuBank::new(&spec(), usize::MAX / 2).is_err());
        assert!(CpuBank::new(&spec(), 1 << 46).is_err());
    }

    #[test]
    fn a_view_outlives_its_bank() {
        let mut bank = CpuBank::new(&spec(), 64).expect("address space");
        bank.commit(64).expect("memory");
        let view = bank.view();
        drop(bank);
        // SAFETY: row 63 of slot 0 is inside the mapping that the view keeps.
        unsafe { view.rows(0).add(63 * 384).write(7) };
        assert_eq!(view.tokens(), 64);
    }

    fn mixed() -> StateSpec {
        let ty = StateType::F16;
        StateSpec {
            slots: vec![
                StateKind::Append { width: 3, ty },
                StateKind::Pooled { width: 3, ty, tokens: 4 },
                StateKind::Ring { rows: 5, width: 700, ty },
                StateKind::Fixed { elems: 11 },
            ],
        }
    }

    /// All storage of a bank of `tokens` tokens.
    fn contents(bank: &CpuBank, tokens: usize) -> Vec<Vec<u8>> {
        (0..bank.slots.len())
            .map(|slot| {
                let mut out = Vec::new();
                bank.export(slot, &(0..bank.slots[slot].kind.rows(tokens)), &mut out);
                out
            })
            .collect()
    }

    fn fill(bank: &mut CpuBank, tokens: usize, salt: u8) {
        for slot in 0..bank.slots.len() {
            let kind = bank.slots[slot].kind;
            let rows = kind.rows(tokens);
            let len = rows * kind.ty().row_bytes(kind.width());
            let bytes: Vec<u8> = (0u8..251).cycle().map(|b| b ^ salt).take(len).collect();
            bank.import(slot, &(0..rows), &bytes);
        }
    }

    #[test]
    fn deepseek_v4_a_rewound_bank_is_what_it_was() {
        // Before and after the ring is full, and with nothing there.
        for tokens in [0, 1, 4, 5, 9] {
            let mut bank = CpuBank::new(&mixed(), 64).expect("address space");
            bank.commit(tokens).expect("memory");
            fill(&mut bank, tokens, 0);
            let before = contents(&bank, tokens);
            let checkpoint = bank.checkpoint(tokens).expect("memory");
            assert_eq!(checkpoint.bytes.len(), mixed().checkpoint_bytes(tokens));
            bank.commit(40).expect("memory");
            let kept: Vec<Vec<u8>> = before[..2].to_vec();
            fill(&mut bank, 40, 0xff);
            // Rows before the checkpoint do not change in use; `fill` overwrote them.
            for (slot, bytes) in kept.iter().enumerate() {
                let rows = bank.slots[slot].kind.rows(tokens);
                bank.import(slot, &(0..rows), bytes);
            }
            bank.rewind(&checkpoint);
            assert_eq!(contents(&bank, tokens), before, "{tokens} tokens");
            assert_eq!(bank.tokens, tokens);
        }
    }

    #[test]
    #[should_panic(expected = "rewind to 9 of a bank of 8")]
    fn deepseek_v4_a_bank_trimmed_below_a_checkpoint_cannot_be_rewound_to_it() {
        let mut bank = CpuBank::new(&mixed(), 64).expect("address space");
        bank.commit(9).expect("memory");
        let checkpoint = bank.checkpoint(9).expect("memory");
        bank.trim(8);
        bank.rewind(&checkpoint);
    }

    #[test]
    #[should_panic(expected = "rows 0..3 of slot 1, which has 2")]
    fn deepseek_v4_rows_that_do_not_exist_are_not_exported() {
        let mut bank = CpuBank::new(&mixed(), 64).expect("address space");
        bank.commit(9).expect("memory");
        bank.export(1, &(0..3), &mut Vec::new());
    }
}
