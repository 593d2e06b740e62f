//! The routed feed-forward part as a whole.

use ds4_manifests::GgmlType;
use ds4_os::SharedBytes;

use super::{Bench, Kernel, Line, Place, Timed, blocks, upload, weight};
use crate::conformance::Random;
use crate::device::DeviceError;
use crate::ops::{Experts, RouterParams};

/// Routings that a timing goes through, so that few rows do not find the same experts in a cache.
const ROUTINGS: usize = 16;

struct Routed {
    gate: (GgmlType, SharedBytes),
    down: (GgmlType, SharedBytes),
    count: usize,
    hidden: usize,
    ff: usize,
    router: RouterParams,
    seed: u64,
}

impl Routed {
    fn new<D: Timed>(b: &Bench<'_, D>, gate: GgmlType, down: GgmlType) -> Self {
        let (count, hidden, ff) = (b.size(256, 8), b.size(4096, 512), b.size(2048, 256));
        let mut rng = b.random();
        Self {
            gate: (gate, blocks(&mut rng, gate, count * ff * hidden)),
            down: (down, blocks(&mut rng, down, count * ff * hidden)),
            count,
            hidden,
            ff,
            router: RouterParams { used: b.size(6, 3), scale: 1.5, floor: 6.103_515_6e-5 },
            seed: b.options.seed,
        }
    }

    /// Router outputs of `rows` rows: all of one size, so that experts are drawn evenly.
    fn logits(&self, rng: &mut Random, rows: usize) -> Vec<f32> {
        (0..rows * self.count).map(|_| rng.unit() * 4.0).collect()
    }

    /// Router outputs of the routings that only timings use.
    fn others(&self, rows: usize) -> Vec<Vec<f32>> {
        let mut rng = Random::new(self.seed ^ 0xe0);
        (1..ROUTINGS).map(|_| self.logits(&mut rng, rows)).collect()
    }

    /// Experts that a step of `rows` rows touches, on average.
    #[allow(clippy::cast_precision_loss, reason = "small counts")]
    fn touched(&self, rows: usize) -> f64 {
        let all = self.others(rows);
        let mut sum = 0;
        for logits in &all {
            let mut seen = vec![false; self.count];
            for row in logits.chunks(self.count) {
                let mut sorted = row.to_vec();
                let (_, least, _) = sorted.select_nth_unstable_by(self.router.used - 1, |a, b| b.total_cmp(a));
                row.iter().zip(&mut seen).filter(|(v, _)| *v >= least).for_each(|(_, seen)| *seen = true);
            }
            sum += seen.iter().filter(|s| **s).count();
        }
        sum as f64 / all.len() as f64
    }
}

impl Kernel for Routed {
    type Bound<D: Timed> = Experts<D::Weight>;

    fn what(&self) -> String {
        format!("{} gate and up, {} down, {} of {}", self.gate.0, self.down.0, self.router.used, self.count)
    }

    fn bind<D: Timed>(&self, d: &D, _: usize) -> Result<Experts<D::Weight>, DeviceError> {
        let (count, hidden, ff) = (self.count, self.hidden, self.ff);
        Ok(Experts {
            gate: weight(d, self.gate.0, count * ff, hidden, &self.gate.1)?,
            up: weight(d, self.gate.0, count * ff, hidden, &self.gate.1)?,
            down: weight(d, self.down.0, count * hidden, ff, &self.down.1)?,
            count,
        })
    }

    fn weight_bytes(&self) -> usize {
        2 * self.gate.1.len() + self.down.1.len()
    }

    fn widths(&self) -> Vec<usize> {
        vec![self.hidden, self.count, self.hidden]
    }

    fn inputs(&self) -> usize {
        2
    }

    fn input(&self, k: usize, rng: &mut Random, _: usize, rows: usize) -> Vec<f32> {
        if k == 0 { rng.activations(rows * self.hidden) } else { self.logits(rng, rows) }
    }

    fn prepare<D: Timed>(&self, d: &D, _: &Experts<D::Weight>, place: &mut Place<D>, buffers: &mut [D::Buffer]) {
        let mut route = |logits: &D::Buffer| {
            let mut routing = D::Routing::default();
            d.route_learned(&self.router, logits, None, &mut routing);
            place.routings.push(routing);
        };
        route(&buffers[1]);
        for other in self.others(place.rows) {
            if let Ok(logits) = upload(d, self.count, &other) {
                route(&logits);
            }
        }
    }

    fn run<D: Timed>(&self, d: &D, e: &Experts<D::Weight>, i: usize, place: &mut Place<D>, buffers: &mut [D::Buffer]) {
        let [x, _, out] = buffers else { return };
        d.expert_ffn(e, &place.routings[i % place.routings.len()], 10.0, x, out);
    }

    /// Both devices round activations to 16 bits, the CPU per 32 and others per 256 with outliers 30 times the rest: 1.4e-4 of a product on
    /// average, and the largest of many after three products and a gate some 20 times that. A wrong rule is off by 1.
    fn bound(&self) -> f64 {
        1e-2
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes(&self, rows: usize) -> f64 {
        self.touched(rows) * self.weight_bytes() as f64 / self.count as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn macs(&self, rows: usize) -> f64 {
        (3 * rows * self.router.used * self.ff * self.hidden) as f64
    }
}

pub(super) fn experts<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    use GgmlType as T;
    let mut lines = b.sweep(&Routed::new(b, T::IQ2_XXS, T::Q2_K))?;
    lines.extend(b.sweep(&Routed::new(b, T::Q4_K, T::Q4_K))?);
    Ok(lines)
}

/// With a reference that has other weights.
#[cfg(test)]
pub(super) fn against<D: Timed>(b: &Bench<'_, D>, other: &Bench<'_, D>) -> Vec<Line> {
    let [kernel, model] = [b, other].map(|b| Routed::new(b, GgmlType::Q8_0, GgmlType::Q8_0));
    b.against(&kernel, &model).expect("memory")
}
