//! Summaries of logits against their definition.

use super::{Random, Suite};
use crate::device::Device;
use crate::ops::{MAX_BEST, RowQuery, RowSummary, SUM_ERROR, summarise_row};

/// Rows that are easy and hard to select from.
const KINDS: usize = 14;

/// A row of logits of order 3.
fn row(rng: &mut Random, kind: usize, width: usize) -> Vec<f32> {
    let normal = |rng: &mut Random| (0..6).map(|_| rng.unit()).sum::<f32>() * 2.1;
    (0..width)
        .map(|i| {
            let (x, dice) = (normal(rng), rng.below(1000));
            match kind {
                // Ties; all equal; side by side; flat; sharp.
                1 => x.floor(),
                2 => 0.5,
                3 if (700..900).contains(&i) => x + 20.0,
                4 => 0.05 * x,
                5 => x * 8.0,
                // Numbers that are none, and rows with little else, or nothing.
                6 if dice < 20 => f32::NAN,
                7 if dice < 2 => f32::INFINITY,
                8 if i + 3 < width => f32::NEG_INFINITY,
                8 => [0.0, -0.0][dice % 2],
                9 => [f32::NAN, f32::NEG_INFINITY][dice % 2],
                // One far ahead; heavy tails; differences that overflow; two flat heaps.
                10 if i == 77 => 1e6,
                11 => (x.abs() * 8.0).exp().copysign(x),
                12 => x * 8e37,
                13 => [100.0 + 1e-5 * x, 10.0 + 1e-4 * x][usize::from(dice < 875)],
                _ => x,
            }
        })
        .collect()
}

fn query(rng: &mut Random, row: usize) -> RowQuery {
    let best = [1, 2, 20, 64, 128, MAX_BEST][rng.below(6)];
    let scale = (rng.below(4) > 0).then(|| 1.6 + 1.5 * rng.unit());
    let draw = scale.and((rng.below(4) > 0).then(|| f64::from(rng.unit().abs().min(0.999))));
    RowQuery { row, best, scale, draw, norm: rng.below(2) == 0 }
}

impl<D: Device> Suite<'_, D> {
    pub(super) fn summaries(&self) {
        let mut rng = self.random(77);
        let mut drawn = (0, 0);
        for width in [1usize, 3, 300, 1001, 4096, 49_152, 129_279, 129_280] {
            let rows: Vec<Vec<f32>> = (0..2 * KINDS).map(|i| row(&mut rng, i % KINDS, width)).collect();
            let logits = self.upload(width, &rows.concat());
            // More queries than rows, and than one launch takes; every row in some order.
            let queries: Vec<RowQuery> = (0..70).map(|i| query(&mut rng, (i * 7) % rows.len())).collect();
            let mut got = vec![RowSummary::default()];
            self.device.summarise(&logits, &queries, &mut got);
            assert_eq!(got.len(), queries.len());
            for (q, got) in queries.iter().zip(&got) {
                let want = summarise_row(&mut rows[q.row].clone(), q);
                let what = format!("{q:?} of {width}, kind {} (DS4_SEED={})", q.row % KINDS, self.seed);
                assert_eq!(got.best, want.best, "{what}: best tokens");
                for (name, got, want) in [("total", got.total, want.total), ("norm", got.norm, want.norm)] {
                    assert!((got - want).abs() <= SUM_ERROR * want, "{what}: {name} {got:e}, not {want:e}");
                }
                let sure = |s: &RowSummary| s.drawn.filter(|d| d.margin > SUM_ERROR).map(|d| (d.token, d.logit));
                assert_eq!(got.drawn.map(|d| d.draw), q.draw.filter(|_| want.drawn.is_some()), "{what}: drawn");
                // One of two whose margin is at its edge may be sure alone.
                if let (Some(got), Some(want)) = (sure(got), sure(&want)) {
                    assert_eq!(got, want, "{what}: token");
                    drawn.0 += 1;
                }
                drawn.1 += usize::from(want.drawn.is_some());
            }
            // A row's answer does not depend on the other queries.
            let mut alone = Vec::new();
            for i in [0, 3, 69] {
                self.device.summarise(&logits, &queries[i..=i], &mut alone);
                assert!(
                    alone[0] == got[i],
                    "{:?} of {width} has other bits alone (DS4_SEED={})",
                    queries[i],
                    self.seed
                );
            }
        }
        assert!(drawn.0 * 10 > drawn.1 * 9, "{drawn:?}: draws are seldom sure (DS4_SEED={})", self.seed);
    }
}
