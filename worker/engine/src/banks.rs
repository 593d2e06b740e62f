//! The bank table: a fixed number of banks, what each holds, and which one a prompt gets.
//!
//! A freed bank keeps its rows and the tokens they belong to. A later prompt that starts with the same tokens is given that
//! bank, trimmed to the common prefix: by the device's row invariance the result is the same as computing them anew.

use std::cmp::Reverse;

use ds4_kernels::{Device, DeviceError, StateSpec};

/// Common prefixes shorter than this do not decide between banks that all hold something.
const WORTH_REUSING: usize = 16;

/// What a bank holds.
#[derive(Debug, Default)]
struct Slot {
    /// Tokens whose rows are in the bank.
    history: Vec<u32>,
    busy: bool,
    /// Clock value of the last release; smaller is older.
    released: u64,
}

/// All banks of an engine.
pub(crate) struct BankTable<D: Device> {
    banks: Vec<D::Bank>,
    slots: Vec<Slot>,
    bytes_per_token: usize,
    keep_bytes: usize,
    /// Whether a bank can be cut back to any length; otherwise it can only be continued from where it is.
    truncatable: bool,
    clock: u64,
}

/// A bank given to a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    /// Bank index.
    pub bank: usize,
    /// Leading prompt tokens whose rows are there already; less than the prompt's length.
    pub cached: usize,
}

impl<D: Device> BankTable<D> {
    /// Reserves `count` banks of `context` tokens; commits nothing.
    pub fn new(
        device: &D,
        spec: &StateSpec,
        count: usize,
        context: usize,
        keep_bytes: usize,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            banks: (0..count).map(|_| device.bank(spec, context)).collect::<Result<_, _>>()?,
            slots: (0..count).map(|_| Slot::default()).collect(),
            bytes_per_token: spec.bytes_per_token().max(1),
            keep_bytes,
            truncatable: spec.truncatable(),
            clock: 0,
        })
    }

    /// The banks, as a forward pass takes them.
    pub fn banks_mut(&mut self) -> &mut [D::Bank] {
        &mut self.banks
    }

    /// Rows in `bank`.
    pub fn len(&self, bank: usize) -> usize {
        self.slots[bank].history.len()
    }

    /// Gives a free bank to `prompt`, or `None` when all are busy.
    pub fn admit(&mut self, device: &D, prompt: &[u32]) -> Option<Admission> {
        let bank = self.choose(prompt)?;
        let slot = &mut self.slots[bank];
        let cached = reusable(&slot.history, prompt, self.truncatable);
        slot.history.truncate(cached);
        slot.busy = true;
        device.bank_trim(&mut self.banks[bank], cached);
        Some(Admission { bank, cached })
    }

    /// Which free bank: one of whose rows at least half would be reused, else an empty one (so that a long conversation is
    /// not thrown away for a shared system prompt), else the longest worthwhile prefix, else the one released longest ago.
    fn choose(&self, prompt: &[u32]) -> Option<usize> {
        let free = || self.slots.iter().enumerate().filter(|(_, s)| !s.busy);
        let longest = free()
            .map(|(i, s)| (reusable(&s.history, prompt, self.truncatable), Reverse(s.released), Reverse(i)))
            .max()?;
        // Of equal prefixes, the oldest bank's: conversations that share a system prompt must not evict the newest one.
        let (prefix, _, Reverse(bank)) = longest;
        if prefix > 0 && prefix * 2 >= self.slots[bank].history.len() {
            return Some(bank);
        }
        if let Some((empty, _)) = free().find(|(_, s)| s.history.is_empty()) {
            return Some(empty);
        }
        if prefix >= WORTH_REUSING {
            return Some(bank);
        }
        free().min_by_key(|(_, s)| s.released).map(|(i, _)| i)
    }

    /// Makes room for `tokens` rows in `bank`. When memory is short, idle banks give up theirs before this fails.
    pub fn commit(&mut self, device: &D, bank: usize, tokens: usize) -> Result<(), DeviceError> {
        match device.bank_commit(&mut self.banks[bank], tokens) {
            Err(DeviceError::OutOfMemory { .. }) if self.trim_idle(device, 0) > 0 => {
                device.bank_commit(&mut self.banks[bank], tokens)
            }
            other => other,
        }
    }

    /// Records that the rows of `tokens` were computed.
    pub fn extend(&mut self, bank: usize, tokens: &[u32]) {
        self.slots[bank].history.extend_from_slice(tokens);
    }

    /// Frees a bank. Its rows stay for reuse if `keep`, within the memory limit.
    pub fn release(&mut self, device: &D, bank: usize, keep: bool) {
        self.clock += 1;
        let slot = &mut self.slots[bank];
        slot.busy = false;
        slot.released = self.clock;
        if !keep {
            slot.history.clear();
        }
        let rows = slot.history.len();
        device.bank_trim(&mut self.banks[bank], rows);
        self.trim_idle(device, self.keep_bytes);
    }

    /// Trims idle banks, oldest first and from their ends, until all banks together commit at most `limit` bytes.
    /// Returns the bytes given back.
    pub fn trim_idle(&mut self, device: &D, limit: usize) -> usize {
        let before = self.committed(device);
        let mut total = before;
        while total > limit {
            let idle = |(_, s): &(usize, &Slot)| !s.busy && !s.history.is_empty();
            let Some((bank, _)) = self.slots.iter().enumerate().filter(idle).min_by_key(|(_, s)| s.released) else {
                break;
            };
            let held = device.bank_committed(&self.banks[bank]);
            let keep = held.saturating_sub(total - limit) / self.bytes_per_token;
            let history = &mut self.slots[bank].history;
            // Page rounding may free less than asked: an eighth less each time ends.
            let keep = keep.min(history.len() - history.len().div_ceil(8));
            let keep = if self.truncatable { keep } else { 0 };
            history.truncate(keep);
            device.bank_trim(&mut self.banks[bank], keep);
            total = self.committed(device);
        }
        before - total.min(before)
    }

    /// Trims idle banks down to the soft limit, which growing sequences may have passed.
    pub fn rebalance(&mut self, device: &D) {
        self.trim_idle(device, self.keep_bytes);
    }

    /// Bytes committed by all banks.
    pub fn committed(&self, device: &D) -> usize {
        self.banks.iter().map(|b| device.bank_committed(b)).sum()
    }

    /// Free banks that hold rows.
    pub fn idle(&self) -> usize {
        self.slots.iter().filter(|s| !s.busy && !s.history.is_empty()).count()
    }
}

/// Leading tokens of `prompt` whose rows in a bank that holds `history` can be used. The last prompt token is always
/// computed: its logits are what the first output token is drawn from. A bank that cannot be truncated is only of use whole.
fn reusable(history: &[u32], prompt: &[u32], truncatable: bool) -> usize {
    let common = common_prefix(history, prompt).min(prompt.len().saturating_sub(1));
    if truncatable || common == history.len() { common } else { 0 }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::{MockDevice, mock_spec};

    fn table(device: &MockDevice, count: usize, keep_tokens: usize) -> BankTable<MockDevice> {
        let spec = mock_spec();
        BankTable::new(device, &spec, count, 1000, keep_tokens * spec.bytes_per_token()).unwrap()
    }

    /// Runs a whole sequence through the table.
    fn serve(t: &mut BankTable<MockDevice>, device: &MockDevice, tokens: &[u32]) -> Admission {
        let got = t.admit(device, tokens).unwrap();
        t.commit(device, got.bank, tokens.len()).unwrap();
        device.write(&mut t.banks_mut()[got.bank], got.cached, &tokens[got.cached..]);
        t.extend(got.bank, &tokens[got.cached..]);
        t.release(device, got.bank, true);
        got
    }

    #[test]
    fn a_bank_that_cannot_be_truncated_is_continued_or_not_used() {
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 3, 4], false), 3);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 9, 4], false), 0);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 3], false), 0, "its last token would have to be taken back");
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 9, 4], true), 2);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 3], true), 2);
    }

    #[test]
    fn a_prefix_is_reused_but_never_the_last_token() {
        let device = MockDevice::default();
        let mut t = table(&device, 2, 1000);
        assert_eq!(serve(&mut t, &device, &[1, 2, 3]), Admission { bank: 0, cached: 0 });
        assert_eq!(serve(&mut t, &device, &[1, 2, 3, 4]), Admission { bank: 0, cached: 3 });
        assert_eq!(serve(&mut t, &device, &[1, 2, 3, 4]), Admission { bank: 0, cached: 3 });
        assert_eq!(serve(&mut t, &device, &[9, 2, 3]), Admission { bank: 1, cached: 0 });
    }

    #[test]
    fn a_long_conversation_survives_a_shared_system_prompt() {
        let device = MockDevice::default();
        let mut t = table(&device, 2, 1000);
        let long: Vec<u32> = (0..100).collect();
        assert_eq!(serve(&mut t, &device, &long).bank, 0);
        let mut other = long[..20].to_vec();
        other.push(777);
        assert_eq!(serve(&mut t, &device, &other), Admission { bank: 1, cached: 0 });
        assert_eq!(serve(&mut t, &device, &long), Admission { bank: 0, cached: 99 });
    }

    #[test]
    fn of_equal_prefixes_the_oldest_bank_is_overwritten() {
        let device = MockDevice::default();
        let mut t = table(&device, 3, 1000);
        let conversation = |n: u32| -> Vec<u32> { (0..20).chain((0..60).map(|i| 1000 * n + i)).collect() };
        for n in 1..=3 {
            assert_eq!(serve(&mut t, &device, &conversation(n)).cached, 0);
        }
        // Bank 0's conversation goes on, so bank 1 is the oldest when a new one arrives.
        assert_eq!(serve(&mut t, &device, &conversation(1)), Admission { bank: 0, cached: 79 });
        assert_eq!(serve(&mut t, &device, &conversation(4)), Admission { bank: 1, cached: 20 });
        assert_eq!(serve(&mut t, &device, &conversation(3)), Admission { bank: 2, cached: 79 });
    }

    #[test]
    fn busy_banks_are_not_given_twice() {
        let device = MockDevice::default();
        let mut t = table(&device, 1, 1000);
        assert!(t.admit(&device, &[1]).is_some());
        assert!(t.admit(&device, &[1]).is_none());
        t.release(&device, 0, true);
        assert!(t.admit(&device, &[1]).is_some());
    }

    #[test]
    fn k3_a_bank_of_a_failed_sequence_is_not_reused() {
        let device = MockDevice::default();
        let mut t = table(&device, 1, 1000);
        let got = t.admit(&device, &[1, 2, 3]).unwrap();
        t.commit(&device, 0, 3).unwrap();
        t.extend(got.bank, &[1, 2, 3]);
        t.release(&device, 0, false);
        assert_eq!(t.committed(&device), 0);
        assert_eq!(t.admit(&device, &[1, 2, 3]).unwrap().cached, 0);
    }

    #[test]
    fn m4_idle_banks_give_memory_back_oldest_first() {
        let device = MockDevice::default();
        let mut t = table(&device, 3, 100);
        let a: Vec<u32> = (1000..1060).collect();
        let b: Vec<u32> = (2000..2060).collect();
        serve(&mut t, &device, &a);
        serve(&mut t, &device, &b);
        assert!(t.committed(&device) <= t.keep_bytes);
        // b is whole; a lost its end, not its beginning.
        assert_eq!(serve(&mut t, &device, &b).cached, 59);
        let kept = serve(&mut t, &device, &a).cached;
        assert!((20..60).contains(&kept), "kept {kept}");
    }

    #[test]
    fn memory_pressure_trims_idle_banks_before_it_refuses() {
        let device = MockDevice::default();
        let mut t = table(&device, 2, 1000);
        serve(&mut t, &device, &(0..50).collect::<Vec<_>>());
        device.limit_tokens(60);
        let got = t.admit(&device, &[7; 30]).unwrap();
        assert_eq!(got.bank, 1);
        t.commit(&device, got.bank, 30).unwrap();
        assert_eq!(t.idle(), 0);
        assert!(matches!(t.commit(&device, got.bank, 61), Err(DeviceError::OutOfMemory { .. })));
    }
}
