//! What an answer must begin with, when there is a choice of beginnings: a call of any of several tools.
//!
//! Each beginning is one sequence of tokens, as the tokenizer writes it and the model was trained on it. Sorted, those that agree with what
//! was generated are neighbours, and so are those that go on with the same token.

use std::ops::Range;
use std::sync::Arc;

/// All that an answer may begin with.
#[derive(Clone, Debug)]
pub(super) struct Beginnings(Arc<[Vec<u32>]>);

impl Beginnings {
    /// One of these; none of them leaves the answer free.
    pub(super) fn new(mut all: Vec<Vec<u32>>) -> Self {
        all.sort_unstable();
        all.dedup();
        Self(all.into())
    }

    /// For an answer of which nothing was generated.
    pub(super) fn begin(&self) -> Beginning {
        let mut b = Beginning { all: Arc::clone(&self.0), alive: 0..self.0.len(), at: 0, next: Vec::new() };
        b.look();
        b
    }
}

/// Where an answer stands in its beginning.
#[derive(Debug)]
pub(super) struct Beginning {
    all: Arc<[Vec<u32>]>,
    /// Those that agree with what was generated.
    alive: Range<usize>,
    /// Tokens generated.
    at: usize,
    next: Vec<u32>,
}

impl Beginning {
    /// The tokens of which the next one must be, ascending and distinct; none when the beginning is complete.
    pub(super) fn next(&self) -> &[u32] {
        &self.next
    }

    /// This token was generated. One that must not be next changes nothing.
    pub(super) fn take(&mut self, token: u32) {
        if self.next.binary_search(&token).is_err() {
            return;
        }
        let alive = &self.all[self.alive.clone()];
        let of = |other: u32| alive.partition_point(|tokens| tokens[self.at] < other);
        let end = token.checked_add(1).map_or(alive.len(), of);
        self.alive = self.alive.start + of(token)..self.alive.start + end;
        self.at += 1;
        self.look();
    }

    fn look(&mut self) {
        self.next.clear();
        let alive = &self.all[self.alive.clone()];
        // Sorted, one that ends here is the first: it is complete, whatever goes on from there.
        if alive.first().is_some_and(|tokens| tokens.len() > self.at) {
            self.next.extend(alive.iter().map(|tokens| tokens[self.at]));
            self.next.dedup();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All sequences that can be generated, by trying every token that is let through.
    fn spelled(b: &Beginnings) -> Vec<Vec<u32>> {
        let (mut done, mut todo) = (Vec::new(), vec![Vec::<u32>::new()]);
        while let Some(prefix) = todo.pop() {
            let mut at = b.begin();
            prefix.iter().for_each(|t| at.take(*t));
            if at.next().is_empty() {
                done.push(prefix);
            } else {
                todo.extend(at.next().iter().map(|t| [prefix.as_slice(), &[*t]].concat()));
            }
        }
        done.sort();
        done
    }

    #[test]
    fn deepseek_v4_every_beginning_can_be_spelled_and_nothing_else() {
        let all =
            vec![vec![1, 9, 5], vec![1, 2, 3, 7], vec![1, 2, 7], vec![1, 2, 3, 4], vec![1, 9, 5], vec![1, u32::MAX]];
        let mut want = all.clone();
        want.sort();
        want.dedup();
        assert_eq!(spelled(&Beginnings::new(all)), want);
        assert_eq!(spelled(&Beginnings::new(Vec::new())), [Vec::<u32>::new()]);
        assert_eq!(spelled(&Beginnings::new(vec![vec![4, 5], vec![4]])), [vec![4]], "a complete one goes no further");
    }

    #[test]
    fn deepseek_v4_a_token_that_must_not_be_next_changes_nothing() {
        let mut b = Beginnings::new(vec![vec![1, 2], vec![1, 3]]).begin();
        for (token, next) in [(2, &[1][..]), (1, &[2, 3]), (1, &[2, 3]), (4, &[2, 3]), (3, &[]), (3, &[])] {
            b.take(token);
            assert_eq!(b.next(), next, "after {token}");
        }
    }
}
