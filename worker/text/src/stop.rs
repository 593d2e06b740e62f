//! Stop strings over bytes.
//!
//! The rule is a property of the byte string and not of how it was cut into tokens: the generation stops at the first
//! byte that completes any stop string, and the output ends where that stop string begins (the longest one, when several
//! end at the same byte).

/// One stop string and how much of it the bytes seen so far end with.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `fall[i]`: length of the longest proper border of `bytes[..=i]` (Knuth, Morris and Pratt's failure function).
    fall: Vec<usize>,
    matched: usize,
}

impl Pattern {
    fn new(bytes: Vec<u8>) -> Self {
        let mut fall = vec![0; bytes.len()];
        let mut k = 0;
        for i in 1..bytes.len() {
            while k > 0 && bytes[i] != bytes[k] {
                k = fall[k - 1];
            }
            k += usize::from(bytes[i] == bytes[k]);
            fall[i] = k;
        }
        Self { bytes, fall, matched: 0 }
    }

    /// Takes one byte; true when it completes the string.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fall[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

/// Finds the first stop string in a stream of bytes, and holds back exactly the bytes that may still belong to one.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// Bytes taken and not released: a suffix of the input that is a proper prefix of some stop string.
    held: Vec<u8>,
    stopped: bool,
}

impl StopMatcher {
    /// A matcher of these strings. Empty ones are ignored: the API refuses them before this.
    pub fn new(stops: Vec<Vec<u8>>) -> Self {
        // A string that contains another one before its own end can never be the first to end. Without it, nothing is
        // held back in vain.
        let preempted = |a: &Vec<u8>| {
            stops
                .iter()
                .any(|b| !b.is_empty() && b.len() < a.len() && a[..a.len() - 1].windows(b.len()).any(|w| w == b))
        };
        let patterns =
            stops.iter().filter(|s| !s.is_empty() && !preempted(s)).map(|s| Pattern::new(s.clone())).collect();
        Self { patterns, held: Vec::new(), stopped: false }
    }

    /// True once a stop string was completed; nothing is taken after that.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Bytes that are held back now.
    pub fn held(&self) -> &[u8] {
        &self.held
    }

    /// Takes `bytes` and appends to `out` what can no longer belong to a stop string. Returns [`StopMatcher::stopped`].
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        if self.stopped {
            return true;
        }
        if self.patterns.is_empty() {
            out.extend_from_slice(bytes);
            return false;
        }
        let mut keep = self.held.len();
        for (i, &byte) in bytes.iter().enumerate() {
            let mut ended = 0;
            keep = 0;
            for p in &mut self.patterns {
                if p.step(byte) {
                    ended = ended.max(p.bytes.len());
                } else {
                    keep = keep.max(p.matched);
                }
            }
            if ended > 0 {
                self.held.extend_from_slice(&bytes[..=i]);
                out.extend_from_slice(&self.held[..self.held.len() - ended]);
                self.held.clear();
                self.stopped = true;
                return true;
            }
        }
        self.held.extend_from_slice(bytes);
        out.extend(self.held.drain(..self.held.len() - keep));
        false
    }

    /// The input has ended: appends what was held back.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.held);
        for p in &mut self.patterns {
            p.matched = 0;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::test_support::Rng;

    /// The rule by plain search over the whole byte string: the output, and whether it stopped.
    pub(crate) fn reference(all: &[u8], stops: &[Vec<u8>]) -> (Vec<u8>, bool) {
        for end in 1..=all.len() {
            let longest = stops.iter().filter(|s| !s.is_empty() && all[..end].ends_with(s)).map(Vec::len).max();
            if let Some(len) = longest {
                return (all[..end - len].to_vec(), true);
            }
        }
        (all.to_vec(), false)
    }

    fn run(all: &[u8], stops: &[&str], step: usize) -> (Vec<u8>, bool) {
        let mut m = StopMatcher::new(stops.iter().map(|s| s.as_bytes().to_vec()).collect());
        let mut out = Vec::new();
        for piece in all.chunks(step) {
            m.push(piece, &mut out);
        }
        m.finish(&mut out);
        (out, m.stopped())
    }

    #[test]
    fn stops_across_pieces_and_at_overlaps() {
        for step in 1..8 {
            assert_eq!(run(b"one END two", &["END"], step), (b"one ".to_vec(), true));
            assert_eq!(run(b"aaab", &["aab"], step), (b"a".to_vec(), true));
            assert_eq!(run(b"abcX", &["abcd", "bc"], step), (b"a".to_vec(), true));
            assert_eq!(run(b"xabc", &["abc", "bc"], step), (b"x".to_vec(), true));
            assert_eq!(run(b"no stop, EN", &["END"], step), (b"no stop, EN".to_vec(), false));
            assert_eq!(run(b"anything", &[], step), (b"anything".to_vec(), false));
        }
    }

    #[test]
    fn holds_no_byte_that_is_free() {
        let mut m = StopMatcher::new(vec![b"abcd".to_vec(), b"bc".to_vec()]);
        let mut out = Vec::new();
        m.push(b"xa", &mut out);
        // "abcd" can never be the first to end, so its "a" is free at once.
        assert_eq!((out.as_slice(), m.held()), (&b"xa"[..], &b""[..]));
        m.push(b"b", &mut out);
        assert_eq!((out.as_slice(), m.held()), (&b"xa"[..], &b"b"[..]));
        m.push(b"b", &mut out);
        assert_eq!((out.as_slice(), m.held()), (&b"xab"[..], &b"b"[..]));
    }

    #[test]
    fn random_strings_equal_plain_search_and_hold_is_minimal() {
        let mut rng = Rng::new(7);
        let mut stopped = 0;
        for _ in 0..20_000 {
            let letters = 2 + rng.below(2);
            let mut word =
                |max: usize| -> Vec<u8> { (0..rng.below(max)).map(|_| b"abc"[rng.below(letters)]).collect() };
            let stops: Vec<Vec<u8>> = (0..4).map(|_| word(6)).collect();
            let all = word(40);
            let mut m = StopMatcher::new(stops.clone());
            let mut out = Vec::new();
            let mut at = 0;
            while at < all.len() && !m.stopped() {
                let n = (1 + rng.below(5)).min(all.len() - at);
                m.push(&all[at..at + n], &mut out);
                at += n;
                if m.stopped() {
                    break;
                }
                // What is held is needed: some continuation of the input does stop where the held bytes begin.
                if !m.held().is_empty() {
                    let start = at - m.held().len();
                    let needed = stops.iter().filter(|s| s.starts_with(m.held())).any(|s| {
                        let mut longer = all[..at].to_vec();
                        longer.extend_from_slice(&s[m.held().len()..]);
                        reference(&longer, &stops) == (all[..start].to_vec(), true)
                    });
                    assert!(needed, "held {:?} of {:?} for {stops:?}", m.held(), &all[..at]);
                }
            }
            m.finish(&mut out);
            assert_eq!((out, m.stopped()), reference(&all, &stops), "{stops:?} in {all:?}");
            stopped += usize::from(m.stopped());
        }
        assert!((2_000..18_000).contains(&stopped), "the cases are lopsided: {stopped}");
    }

    #[test]
    fn a_long_repetitive_stop_is_linear() {
        // Comparing anew at every position would take 2·10^11 steps.
        let mut stop = vec![b'a'; 200_000];
        stop.push(b'b');
        let mut m = StopMatcher::new(vec![stop]);
        let mut out = Vec::new();
        let start = std::time::Instant::now();
        for _ in 0..1000 {
            m.push(&[b'a'; 1000], &mut out);
        }
        assert!(start.elapsed() < std::time::Duration::from_secs(5));
        assert_eq!(out.len() + m.held().len(), 1_000_000);
    }
}
