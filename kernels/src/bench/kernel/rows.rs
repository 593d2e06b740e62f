//! Operations on rows by themselves: norms, gates, rotations, hyper-connections.

use ds4_manifests::GgmlType;
use ds4_os::SharedBytes;

use super::{Bench, Kernel, Line, Place, Timed, blocks, floats, weight};
use crate::conformance::Random;
use crate::device::DeviceError;
use crate::math::yarn;
use crate::ops::{HyperParams, HyperWeights};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    RmsNorm,
    HeadRms,
    Swiglu,
    RopeTail,
}

struct Elementwise {
    op: Row,
    width: usize,
    head_dim: usize,
    rope_dim: usize,
    norm: Vec<f32>,
}

/// A norm's weight and a rotary table.
struct Constants<W, T> {
    norm: W,
    table: T,
}

impl Kernel for Elementwise {
    type Bound<D: Timed> = Constants<D::Weight, D::RopeTable>;

    fn what(&self) -> String {
        match self.op {
            Row::RmsNorm => format!("rms_norm ({})", self.width),
            Row::HeadRms => format!("head_rms ({} x {})", self.width / self.head_dim, self.head_dim),
            Row::Swiglu => format!("swiglu_clamped ({})", self.width),
            Row::RopeTail => {
                format!("rope_tail ({} x {} of {})", self.width / self.head_dim, self.rope_dim, self.head_dim)
            }
        }
    }

    fn bind<D: Timed>(&self, d: &D, _: usize) -> Result<Self::Bound<D>, DeviceError> {
        let table = d.upload_rope(&yarn::frequencies(self.rope_dim, 1e4, None));
        Ok(Constants { norm: floats(d, 1, self.width, &self.norm)?, table })
    }

    fn weight_bytes(&self) -> usize {
        self.width * 4
    }

    fn widths(&self) -> Vec<usize> {
        match self.op {
            Row::RmsNorm => vec![self.width; 2],
            Row::Swiglu => vec![self.width; 3],
            Row::HeadRms | Row::RopeTail => vec![self.width],
        }
    }

    fn inputs(&self) -> usize {
        if self.op == Row::Swiglu { 2 } else { 1 }
    }

    fn depth(&self) -> usize {
        if self.op == Row::RopeTail { 60_000 } else { 0 }
    }

    fn run<D: Timed>(&self, d: &D, c: &Self::Bound<D>, _: usize, place: &mut Place<D>, buffers: &mut [D::Buffer]) {
        match (self.op, buffers) {
            (Row::RmsNorm, [x, out]) => d.rms_norm(x, &c.norm, 1e-6, out),
            (Row::Swiglu, [gate, up, out]) => d.swiglu_clamped(gate, up, 10.0, out),
            (Row::HeadRms, [x]) => d.head_rms(x, self.head_dim, 1e-6),
            (Row::RopeTail, [x]) => d.rope_tail(&place.step, &c.table, self.head_dim, false, x),
            _ => {}
        }
    }

    /// A few roundings of values of up to 30 times the root mean square.
    fn bound(&self) -> f64 {
        3e-5
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes(&self, rows: usize) -> f64 {
        let rotated = if self.op == Row::RopeTail { self.rope_dim as f64 / self.head_dim as f64 } else { 1.0 };
        let streams = if self.op == Row::Swiglu { 3 } else { 2 };
        (streams * rows * self.width * 4) as f64 * rotated
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn macs(&self, rows: usize) -> f64 {
        (2 * rows * self.width) as f64
    }
}

fn elementwise<D: Timed>(b: &Bench<'_, D>, op: Row) -> Elementwise {
    let (heads, head_dim) = (b.size(64, 4), b.size(512, 128));
    let width = match op {
        Row::RmsNorm => b.size(4096, 512),
        Row::Swiglu => b.size(2048, 512),
        Row::HeadRms | Row::RopeTail => heads * head_dim,
    };
    Elementwise { op, width, head_dim, rope_dim: 64, norm: b.random().activations(width) }
}

pub(super) fn norms<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    let mut lines = Vec::new();
    for op in [Row::RmsNorm, Row::HeadRms, Row::Swiglu, Row::RopeTail] {
        lines.extend(b.sweep(&elementwise(b, op))?);
    }
    Ok(lines)
}

/// A hyper-connection before a sublayer with its norm, after it, or after it with the next mixer at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    PreNorm,
    Post,
    PostToward,
}

struct Hyper {
    side: Side,
    norm: Vec<f32>,
    p: HyperParams,
    hidden: usize,
    mixer: SharedBytes,
    scale: Vec<f32>,
    base: Vec<f32>,
}

impl Hyper {
    fn new<D: Timed>(b: &Bench<'_, D>, side: Side) -> Self {
        let (n, hidden) = (4, b.size(4096, 512));
        let mut rng = b.random();
        Self {
            side,
            norm: (0..hidden).map(|_| 1.0 + 0.2 * rng.unit()).collect(),
            p: HyperParams { streams: n, iterations: 20, eps: 1e-6, rms_eps: 1e-6 },
            hidden,
            mixer: blocks(&mut rng, GgmlType::F16, n * hidden * (2 * n + n * n)),
            // Products of the normed state with such a mixer are of order 100: gates and sums that are neither open nor shut.
            scale: (0..3).map(|_| 0.02 + 0.005 * rng.unit()).collect(),
            base: (0..2 * n + n * n).map(|_| rng.unit()).collect(),
        }
    }

    fn after(&self) -> bool {
        self.side != Side::PreNorm
    }

    fn outputs(&self) -> usize {
        2 * self.p.streams + self.p.streams * self.p.streams
    }
}

impl Kernel for Hyper {
    type Bound<D: Timed> = (Vec<HyperWeights<D::Weight>>, D::Weight);

    fn what(&self) -> String {
        let name = match self.side {
            Side::PreNorm => "hyper_pre_norm",
            Side::Post => "hyper_post",
            Side::PostToward => "hyper_post_toward",
        };
        format!("{name} ({} streams of {})", self.p.streams, self.hidden)
    }

    fn bind<D: Timed>(&self, d: &D, copies: usize) -> Result<Self::Bound<D>, DeviceError> {
        let (outputs, cols) = (self.outputs(), self.p.streams * self.hidden);
        let one = |_| {
            Ok(HyperWeights {
                mixer: weight(d, GgmlType::F16, outputs, cols, &self.mixer)?,
                scale: floats(d, 1, 3, &self.scale)?,
                base: floats(d, 1, outputs, &self.base)?,
            })
        };
        Ok(((0..copies).map(one).collect::<Result<_, DeviceError>>()?, floats(d, 1, self.hidden, &self.norm)?))
    }

    fn weight_bytes(&self) -> usize {
        self.mixer.len()
    }

    fn widths(&self) -> Vec<usize> {
        let state = self.p.streams * self.hidden;
        // What is judged comes last: the sublayer's input, or the state.
        if self.after() {
            vec![self.outputs(), self.hidden, state]
        } else {
            vec![state, self.outputs(), self.hidden, self.hidden]
        }
    }

    fn inputs(&self) -> usize {
        if self.after() { 3 } else { 1 }
    }

    fn input(&self, k: usize, rng: &mut Random, _: usize, rows: usize) -> Vec<f32> {
        let n = rows * self.widths()[k];
        // Mixing weights are below 1, and their square part's rows sum to 1: the state does not grow without end.
        if self.after() && k == 0 { (0..n).map(|_| 0.125 + 0.125 * rng.unit()).collect() } else { rng.activations(n) }
    }

    fn run<D: Timed>(&self, d: &D, (w, norm): &Self::Bound<D>, i: usize, _: &mut Place<D>, buffers: &mut [D::Buffer]) {
        match (self.side, buffers) {
            (Side::Post, [mix, y, state]) => d.hyper_post(&self.p, mix, y, state),
            (Side::PostToward, [mix, y, state]) => {
                d.hyper_post_toward(&self.p, mix, y, state, Some(&w[i % w.len()]));
            }
            (Side::PreNorm, [state, mix, x, out]) => {
                d.hyper_pre_norm(&self.p, &w[i % w.len()], state, (norm, 1e-6), mix, x, out);
            }
            _ => {}
        }
    }

    /// The mixer's sum has a rounding error of 1e-6 of its terms, which the gates and 20 rounds of normalisation pass on.
    fn bound(&self) -> f64 {
        1e-4
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes(&self, rows: usize) -> f64 {
        let state = self.p.streams * self.hidden * 4;
        let mixer = if self.side == Side::Post { 0 } else { self.mixer.len() };
        let rows = rows * if self.after() { 2 * state + self.hidden * 4 } else { state + self.hidden * 4 };
        (mixer + rows) as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn macs(&self, rows: usize) -> f64 {
        let n = self.p.streams;
        let mixed = n * self.outputs();
        let each = match self.side {
            Side::PreNorm => mixed + n,
            Side::Post => n * (n + 1),
            Side::PostToward => mixed + n * (n + 1),
        };
        (rows * self.hidden * each) as f64
    }
}

pub(super) fn hyper<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    let mut lines = Vec::new();
    let toward = b.device.begins_mixers().then_some(Side::PostToward);
    for side in [Side::PreNorm, Side::Post].into_iter().chain(toward) {
        lines.extend(b.sweep(&Hyper::new(b, side))?);
    }
    Ok(lines)
}

/// With a reference that has other weights.
#[cfg(test)]
pub(super) fn against<D: Timed>(b: &Bench<'_, D>, other: &Bench<'_, D>) -> Vec<Line> {
    let [kernel, model] = [b, other].map(|b| Hyper::new(b, Side::PreNorm));
    b.against(&kernel, &model).expect("memory")
}
