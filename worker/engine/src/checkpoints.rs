//! The checkpoints of one bank: where a sequence that cannot be truncated can be taken back to.
//!
//! Few are kept, so which ones matters. People edit, regenerate and continue near the end of a conversation: checkpoints lie
//! densely there and sparsely towards the beginning, each about as far from its neighbours as a fixed fraction of its distance
//! from the end. What a rewind has to compute again is then in proportion to what it takes back.

use ds4_kernels::{Device, DeviceError, StateSpec};

/// How many checkpoints are taken and kept. Families whose state is only appended to need none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointPolicy {
    /// Tokens after which a growing sequence gets one.
    pub interval: usize,
    /// Most of one bank.
    pub per_bank: usize,
    /// Most bytes of all banks.
    pub bytes: usize,
}

struct Kept<C> {
    tokens: usize,
    bytes: usize,
    state: C,
}

/// Checkpoints of one bank, by length.
pub(crate) struct Checkpoints<D: Device> {
    kept: Vec<Kept<D::Checkpoint>>,
}

impl<D: Device> Default for Checkpoints<D> {
    fn default() -> Self {
        Self { kept: Vec::new() }
    }
}

impl<D: Device> Checkpoints<D> {
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    pub fn count(&self) -> usize {
        self.kept.len()
    }

    /// Bytes that they hold.
    pub fn bytes(&self) -> usize {
        self.kept.iter().map(|k| k.bytes).sum()
    }

    /// Length of the last one; 0 without any.
    pub fn last(&self) -> usize {
        self.kept.last().map_or(0, |k| k.tokens)
    }

    /// Length of the last one that has at most `tokens` tokens; 0 without any.
    pub fn at_or_before(&self, tokens: usize) -> usize {
        self.kept.iter().rev().find(|k| k.tokens <= tokens).map_or(0, |k| k.tokens)
    }

    /// Copies the bank as it is after `tokens` tokens, more than the last checkpoint has.
    pub fn take(&mut self, device: &D, bank: &D::Bank, spec: &StateSpec, tokens: usize) -> Result<(), DeviceError> {
        debug_assert!(tokens > self.last(), "checkpoints are taken in order");
        let state = device.bank_checkpoint(bank, tokens)?;
        self.kept.push(Kept { tokens, bytes: spec.checkpoint_bytes(tokens), state });
        Ok(())
    }

    /// Takes `bank` back to the checkpoint of `tokens` tokens; later ones are dropped. False when there is none.
    pub fn rewind(&mut self, device: &D, bank: &mut D::Bank, tokens: usize) -> bool {
        let Some(at) = self.kept.iter().position(|k| k.tokens == tokens) else { return false };
        device.bank_rewind(bank, &self.kept[at].state);
        self.kept.truncate(at + 1);
        true
    }

    /// Drops all.
    pub fn clear(&mut self) {
        self.kept.clear();
    }

    /// Drops the one that is missed least in a sequence of `len` tokens; returns the bytes given back.
    pub fn thin(&mut self, len: usize) -> usize {
        let lengths: Vec<usize> = self.kept.iter().map(|k| k.tokens).collect();
        match least_missed(&lengths, len) {
            Some(at) => self.kept.remove(at).bytes,
            None => 0,
        }
    }
}

/// Which of ascending `lengths` is missed least in a sequence of `len` tokens: without it, a rewind between its neighbours
/// computes the gap between them anew, which is judged against the distance of that gap's beginning from the end.
fn least_missed(lengths: &[usize], len: usize) -> Option<usize> {
    let gap = |i: usize| {
        let before = if i == 0 { 0 } else { lengths[i - 1] };
        let after = lengths.get(i + 1).copied().unwrap_or(len.max(lengths[i]));
        #[allow(clippy::cast_precision_loss, reason = "a judgement, not an account")]
        let share = (after - before) as f64 / (len.max(after) - before).max(1) as f64;
        share
    };
    (0..lengths.len()).min_by(|a, b| gap(*a).total_cmp(&gap(*b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::{MockDevice, mock_windowed_spec};

    #[test]
    fn deepseek_v4_checkpoints_thin_out_towards_the_beginning() {
        let mut lengths: Vec<usize> = Vec::new();
        for i in 1..=64 {
            lengths.push(i * 1000);
            if lengths.len() > 8 {
                let at = least_missed(&lengths, i * 1000).unwrap();
                lengths.remove(at);
            }
        }
        assert_eq!(lengths.last(), Some(&64_000), "the newest is never the one that goes");
        // Wherever the sequence is cut, what is computed again is at most twice what was taken back. (Eight evenly spaced ones
        // would make it eight times for the last thousand.)
        for back in (1000..64_000).step_by(500) {
            let to = 64_000 - back;
            let from = lengths.iter().rev().find(|l| **l <= to).copied().unwrap_or(0);
            assert!(to - from <= 2 * back, "{to} is computed from {from}: {lengths:?}");
        }
    }

    #[test]
    fn deepseek_v4_of_two_neighbours_the_earlier_goes() {
        // Only cuts at exactly 1000 need the first one.
        assert_eq!(least_missed(&[1000, 1001, 5000], 5000), Some(0));
        assert_eq!(least_missed(&[7], 7), Some(0));
        assert_eq!(least_missed(&[], 7), None);
    }

    #[test]
    fn deepseek_v4_a_rewind_finds_its_checkpoint_and_drops_later_ones() {
        let (device, spec) = (MockDevice::default(), mock_windowed_spec());
        let mut bank = device.bank(&spec, 100).unwrap();
        device.bank_commit(&mut bank, 30).unwrap();
        let mut kept = Checkpoints::<MockDevice>::default();
        for (i, chunk) in (0..30).collect::<Vec<u32>>().chunks(10).enumerate() {
            device.write(&mut bank, 10 * i, chunk);
            kept.take(&device, &bank, &spec, 10 * (i + 1)).unwrap();
        }
        assert_eq!((kept.count(), kept.bytes(), kept.last()), (3, 3 * 4 * 8, 30));
        assert_eq!([9, 10, 29, 99].map(|n| kept.at_or_before(n)), [0, 10, 20, 30]);
        assert!(!kept.rewind(&device, &mut bank, 15));
        assert!(kept.rewind(&device, &mut bank, 20));
        assert_eq!((kept.count(), kept.last()), (2, 20));
        device.bank_commit(&mut bank, 21).unwrap();
        device.write(&mut bank, 20, &[99]);
    }
}
