//! State memory of one sequence: address space for the whole context, pages committed as rows arrive.

#![allow(unsafe_code, reason = "one anonymous mapping and raw rows inside it")]

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
}
