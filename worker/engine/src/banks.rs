//! The bank table: a fixed number of banks, what each holds, and which one a prompt gets.
//!
//! A freed bank keeps its rows and the tokens they belong to. A later prompt that starts with the same tokens is given that
//! bank, cut back to the common prefix: by the device's row invariance the result is the same as computing them anew. Where the
//! family's state cannot be cut at any token, the bank goes back to a checkpoint, or is continued whole.

use std::cmp::Reverse;

use ds4_kernels::{Device, DeviceError, StateSpec};

use crate::checkpoints::{CheckpointPolicy, Checkpoints};

/// Common prefixes shorter than this do not decide between banks that all hold something.
const WORTH_REUSING: usize = 16;

/// What a bank holds.
struct Slot<D: Device> {
    /// Tokens whose rows are in the bank.
    history: Vec<u32>,
    busy: bool,
    /// Clock value of the last release; smaller is older.
    released: u64,
    checkpoints: Checkpoints<D>,
}

impl<D: Device> Default for Slot<D> {
    fn default() -> Self {
        Self { history: Vec::new(), busy: false, released: 0, checkpoints: Checkpoints::default() }
    }
}

/// All banks of an engine.
pub(crate) struct BankTable<D: Device> {
    banks: Vec<D::Bank>,
    slots: Vec<Slot<D>>,
    spec: StateSpec,
    keep_bytes: usize,
    /// Whether a bank can be cut back to any length; otherwise it is continued from where it is, or from a checkpoint.
    truncatable: bool,
    policy: CheckpointPolicy,
    clock: u64,
}

/// A bank given to a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    /// Bank index.
    pub bank: usize,
    /// Leading prompt tokens whose rows are there already; less than the prompt's length.
    pub cached: usize,
    /// Whether the bank was taken back to a checkpoint for it.
    pub rewound: bool,
}

impl<D: Device> BankTable<D> {
    /// Reserves `count` banks of `context` tokens; commits nothing.
    pub fn new(
        device: &D,
        spec: &StateSpec,
        count: usize,
        context: usize,
        keep_bytes: usize,
        policy: CheckpointPolicy,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            banks: (0..count).map(|_| device.bank(spec, context)).collect::<Result<_, _>>()?,
            slots: (0..count).map(|_| Slot::default()).collect(),
            truncatable: spec.truncatable(),
            spec: spec.clone(),
            keep_bytes,
            policy,
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
        let cached = self.reusable(bank, prompt);
        let whole = cached == self.len(bank);
        self.slots[bank].busy = true;
        self.cut(device, bank, cached);
        if whole {
            // A new turn begins here; when its message is edited, this is where to go back to.
            self.checkpoint(device, bank, true);
        }
        Some(Admission { bank, cached, rewound: cached > 0 && !whole && !self.truncatable })
    }

    /// Leading tokens of `prompt` whose rows in `bank` can be used. The last prompt token is always computed: its logits are
    /// what the first output token is drawn from.
    fn reusable(&self, bank: usize, prompt: &[u32]) -> usize {
        let slot = &self.slots[bank];
        let common = common_prefix(&slot.history, prompt).min(prompt.len().saturating_sub(1));
        if self.truncatable || common == slot.history.len() { common } else { slot.checkpoints.at_or_before(common) }
    }

    /// Cuts `bank` back to `tokens` tokens: its own length, a checkpoint's, 0, or any where state can be truncated.
    fn cut(&mut self, device: &D, bank: usize, tokens: usize) {
        let slot = &mut self.slots[bank];
        if tokens == 0 {
            slot.checkpoints.clear();
        } else if !self.truncatable && tokens < slot.history.len() {
            let found = slot.checkpoints.rewind(device, &mut self.banks[bank], tokens);
            assert!(found, "no checkpoint of {tokens} tokens");
        }
        slot.history.truncate(tokens);
        device.bank_trim(&mut self.banks[bank], tokens);
    }

    /// Which free bank: one of whose rows at least half would be reused, else an empty one (so that a long conversation is
    /// not thrown away for a shared system prompt), else the longest worthwhile prefix, else the one released longest ago.
    fn choose(&self, prompt: &[u32]) -> Option<usize> {
        let free = || self.slots.iter().enumerate().filter(|(_, s)| !s.busy);
        let longest = free().map(|(i, s)| (self.reusable(i, prompt), Reverse(s.released), Reverse(i))).max()?;
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

    /// Where prompt tokens `from..to` of a prompt of `len` should end. The same prompt again needs everything but its last
    /// token, and where a client rewrites its history (a turn's reasoning is dropped) what follows the prompt differs or even
    /// its last token does: so that a checkpoint can be there, a prompt's last token is a step of its own.
    pub fn prompt_end(&self, from: usize, to: usize, len: usize) -> usize {
        if !self.truncatable && self.policy.per_bank > 0 && to == len && from + 1 < to { to - 1 } else { to }
    }

    /// Takes a checkpoint of `bank` as it is, if `wanted` or when the last one is far behind. Needs memory, but none that a
    /// sequence could use: when it cannot be had there is no checkpoint.
    pub fn checkpoint(&mut self, device: &D, bank: usize, wanted: bool) {
        if self.truncatable || self.policy.per_bank == 0 {
            return;
        }
        let (len, last) = (self.len(bank), self.slots[bank].checkpoints.last());
        if len == last || !(wanted || len - last >= self.policy.interval) {
            return;
        }
        let need = self.spec.checkpoint_bytes(len);
        while self.slots[bank].checkpoints.count() >= self.policy.per_bank {
            self.slots[bank].checkpoints.thin(len);
        }
        while self.checkpoint_bytes() + need > self.policy.bytes {
            // Idle banks first, the oldest of them first; then this one's own.
            let idle = self.slots.iter().enumerate().filter(|(_, s)| !s.busy && !s.checkpoints.is_empty());
            let from = idle.min_by_key(|(_, s)| s.released).map_or(bank, |(i, _)| i);
            let slot = &mut self.slots[from];
            if slot.checkpoints.thin(slot.history.len()) == 0 {
                return;
            }
        }
        let slot = &mut self.slots[bank];
        if let Err(e) = slot.checkpoints.take(device, &self.banks[bank], &self.spec, len) {
            tracing::debug!(bank, tokens = len, error = %e, "no checkpoint");
        }
    }

    /// A checkpoint of `bank` as it is, for a step that may have to be undone.
    ///
    /// # Errors
    /// When memory for it cannot be had.
    pub fn snapshot(&self, device: &D, bank: usize) -> Result<D::Checkpoint, DeviceError> {
        device.bank_checkpoint(&self.banks[bank], self.len(bank))
    }

    /// Takes `bank` back to where `snapshot` was taken, before anything was recorded of the step.
    pub fn undo(&mut self, device: &D, bank: usize, snapshot: &D::Checkpoint) {
        device.bank_rewind(&mut self.banks[bank], snapshot);
    }

    /// Frees a bank. Its rows stay for reuse if `keep`, within the memory limit.
    pub fn release(&mut self, device: &D, bank: usize, keep: bool) {
        self.clock += 1;
        let slot = &mut self.slots[bank];
        slot.busy = false;
        slot.released = self.clock;
        let rows = if keep { slot.history.len() } else { 0 };
        self.cut(device, bank, rows);
        self.trim_idle(device, self.keep_bytes);
    }

    /// Shrinks idle banks, oldest first, until all banks together commit at most `limit` bytes: from their ends, or, where
    /// state cannot be truncated, first by their checkpoints and then as a whole. Returns the bytes given back.
    pub fn trim_idle(&mut self, device: &D, limit: usize) -> usize {
        let before = self.committed(device);
        let mut total = before;
        while total > limit {
            let idle = |(_, s): &(usize, &Slot<D>)| !s.busy && !s.history.is_empty();
            let Some((bank, _)) = self.slots.iter().enumerate().filter(idle).min_by_key(|(_, s)| s.released) else {
                break;
            };
            let len = self.len(bank);
            if self.truncatable {
                let held = device.bank_committed(&self.banks[bank]);
                let keep = held.saturating_sub(total - limit) / self.spec.bytes_per_token().max(1);
                // Page rounding may free less than asked: an eighth less each time ends.
                self.cut(device, bank, keep.min(len - len.div_ceil(8)));
            } else if self.slots[bank].checkpoints.thin(len) == 0 {
                self.cut(device, bank, 0);
            }
            total = self.committed(device);
        }
        before - total.min(before)
    }

    /// Trims idle banks down to the soft limit, which growing sequences may have passed.
    pub fn rebalance(&mut self, device: &D) {
        self.trim_idle(device, self.keep_bytes);
    }

    /// Bytes committed by all banks, checkpoints included.
    pub fn committed(&self, device: &D) -> usize {
        self.banks.iter().map(|b| device.bank_committed(b)).sum::<usize>() + self.checkpoint_bytes()
    }

    /// Bytes of all checkpoints.
    pub fn checkpoint_bytes(&self) -> usize {
        self.slots.iter().map(|s| s.checkpoints.bytes()).sum()
    }

    /// Free banks that hold rows.
    pub fn idle(&self) -> usize {
        self.slots.iter().filter(|s| !s.busy && !s.history.is_empty()).count()
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::{MockDevice, mock_spec, mock_windowed_spec};

    fn table(device: &MockDevice, count: usize, keep_tokens: usize) -> BankTable<MockDevice> {
        let spec = mock_spec();
        BankTable::new(device, &spec, count, 1000, keep_tokens * spec.bytes_per_token(), POLICY).unwrap()
    }

    const POLICY: CheckpointPolicy = CheckpointPolicy { interval: 50, per_bank: 4, bytes: 1 << 20 };

    /// A table of banks that cannot be truncated.
    fn windowed(device: &MockDevice, count: usize, policy: CheckpointPolicy) -> BankTable<MockDevice> {
        BankTable::new(device, &mock_windowed_spec(), count, 1000, 1 << 20, policy).unwrap()
    }

    /// Runs a whole sequence through the table, 20 tokens a step.
    fn serve(t: &mut BankTable<MockDevice>, device: &MockDevice, tokens: &[u32]) -> Admission {
        let got = t.admit(device, tokens).unwrap();
        let mut from = got.cached;
        while from < tokens.len() {
            let to = t.prompt_end(from, tokens.len().min(from + 20), tokens.len());
            t.commit(device, got.bank, to).unwrap();
            device.write(&mut t.banks_mut()[got.bank], from, &tokens[from..to]);
            t.extend(got.bank, &tokens[from..to]);
            t.checkpoint(device, got.bank, to + 1 == tokens.len());
            from = to;
        }
        t.release(device, got.bank, true);
        got
    }

    fn fresh(bank: usize, cached: usize) -> Admission {
        Admission { bank, cached, rewound: false }
    }

    fn rewound(bank: usize, cached: usize) -> Admission {
        Admission { bank, cached, rewound: true }
    }

    #[test]
    fn deepseek_v4_a_bank_that_cannot_be_truncated_goes_back_to_checkpoints() {
        let device = MockDevice::default();
        let mut t = windowed(&device, 1, POLICY);
        let turn: Vec<u32> = (0..100).collect();
        assert_eq!(serve(&mut t, &device, &turn), fresh(0, 0));
        // The same again; then with another last token; then cut off before the end of the prompt.
        assert_eq!(serve(&mut t, &device, &turn), rewound(0, 99));
        let mut other = turn[..99].to_vec();
        other.push(500);
        assert_eq!(serve(&mut t, &device, &other), rewound(0, 99));
        // Continued whole, twice; the second time from where the first continuation began.
        let mut next = other.clone();
        next.extend(600..640);
        assert_eq!(serve(&mut t, &device, &next), fresh(0, 100));
        next.truncate(100);
        next.extend(700..740);
        assert_eq!(serve(&mut t, &device, &next), rewound(0, 100));
        // A checkpoint of the interval: steps of 20 tokens reach it at 60.
        let mut early = turn[..70].to_vec();
        early.extend(800..810);
        assert_eq!(serve(&mut t, &device, &early), rewound(0, 60));
        // Nothing in common, or less than the first checkpoint: computed anew.
        assert_eq!(serve(&mut t, &device, &[9, 9, 9]), fresh(0, 0));
        assert_eq!(serve(&mut t, &device, &[9, 8, 7]), fresh(0, 0));
    }

    #[test]
    fn deepseek_v4_checkpoints_are_bounded_in_number_and_bytes() {
        let device = MockDevice::default();
        let mut t = windowed(&device, 2, POLICY);
        let long: Vec<u32> = (0..900).collect();
        serve(&mut t, &device, &long);
        let each = mock_windowed_spec().checkpoint_bytes(900);
        assert_eq!(t.slots[0].checkpoints.count(), 4);
        assert_eq!(t.checkpoint_bytes(), 4 * each);
        assert_eq!(t.committed(&device), 900 * 8 + 4 * each, "checkpoints are in the account");
        // Room for three: the idle bank gives its own up for the busy one, then that one thins out.
        t.policy.bytes = 3 * each;
        serve(&mut t, &device, &(2000..2900).collect::<Vec<_>>());
        assert_eq!([0, 1].map(|i| t.slots[i].checkpoints.count()), [0, 3]);
        // None at all when there is no room for one, and sequences are served all the same.
        t.policy.bytes = each - 1;
        t.cut(&device, 1, 0);
        serve(&mut t, &device, &(3000..3900).collect::<Vec<_>>());
        assert_eq!(t.checkpoint_bytes(), 0);
    }

    #[test]
    fn deepseek_v4_without_checkpoints_a_bank_is_continued_or_not_used() {
        let device = MockDevice::default();
        let mut t = windowed(&device, 1, CheckpointPolicy { per_bank: 0, ..POLICY });
        let turn: Vec<u32> = (0..100).collect();
        assert_eq!(t.prompt_end(0, 100, 100), 100, "no step of its own for a last token");
        serve(&mut t, &device, &turn);
        let mut next = turn.clone();
        next.push(7);
        assert_eq!(serve(&mut t, &device, &next), fresh(0, 100));
        assert_eq!(serve(&mut t, &device, &next), fresh(0, 0), "its last token would have to be taken back");
    }

    #[test]
    fn deepseek_v4_memory_pressure_takes_checkpoints_before_it_takes_rows() {
        let device = MockDevice::default();
        let mut t = windowed(&device, 1, POLICY);
        let turn: Vec<u32> = (0..200).collect();
        serve(&mut t, &device, &turn);
        let rows = device.bank_committed(&t.banks[0]);
        assert!(t.trim_idle(&device, rows) > 0);
        assert_eq!((t.checkpoint_bytes(), t.len(0)), (0, 200));
        assert!(t.trim_idle(&device, rows - 1) > 0);
        assert_eq!((t.committed(&device), t.len(0)), (0, 0));
    }

    #[test]
    fn a_prefix_is_reused_but_never_the_last_token() {
        let device = MockDevice::default();
        let mut t = table(&device, 2, 1000);
        assert_eq!(serve(&mut t, &device, &[1, 2, 3]), fresh(0, 0));
        assert_eq!(serve(&mut t, &device, &[1, 2, 3, 4]), fresh(0, 3));
        assert_eq!(serve(&mut t, &device, &[1, 2, 3, 4]), fresh(0, 3));
        assert_eq!(serve(&mut t, &device, &[9, 2, 3]), fresh(1, 0));
    }

    #[test]
    fn a_long_conversation_survives_a_shared_system_prompt() {
        let device = MockDevice::default();
        let mut t = table(&device, 2, 1000);
        let long: Vec<u32> = (0..100).collect();
        assert_eq!(serve(&mut t, &device, &long).bank, 0);
        let mut other = long[..20].to_vec();
        other.push(777);
        assert_eq!(serve(&mut t, &device, &other), fresh(1, 0));
        assert_eq!(serve(&mut t, &device, &long), fresh(0, 99));
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
        assert_eq!(serve(&mut t, &device, &conversation(1)), fresh(0, 79));
        assert_eq!(serve(&mut t, &device, &conversation(4)), fresh(1, 20));
        assert_eq!(serve(&mut t, &device, &conversation(3)), fresh(2, 79));
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
