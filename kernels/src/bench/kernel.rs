//! One kernel at a time, for `ds4 bench kernel`: is it right, and how near is it to what the device can do.
//!
//! Every family of operations is run on fresh random inputs at DeepSeek V4 Flash's shapes and compared, for each number of rows:
//!
//! * the first rows with the CPU's result for them, within the bound that the family states (products: with exact arithmetic, within the
//!   conformance suite's bound). On the CPU itself the comparison is with its scalar instruction set;
//! * the first and the last rows with the bits that the same rows have in a launch of their own ("row invariance" in
//!   [`crate::device`]): so the kernels of many rows, which are too much work for a reference, are held to those of few.
//!
//! Then it is timed, on several copies of its weights where one would stay in a cache.

mod compress;
mod experts;
mod prepare;
mod products;
mod rows;
mod sampling;
mod sparse;
mod timed;

pub use timed::Timed;

use ds4_manifests::GgmlType;
use ds4_os::SharedBytes;

use crate::conformance::Random;
use crate::device::{Device, DeviceError, TensorSource};
use crate::ops::RowSummary;
use crate::plan::BatchPlan;
use crate::state::StateSpec;
use crate::{CpuDevice, quant};

/// Rows that are compared with the reference and with launches of their own.
const CHECKED: usize = 6;
/// Most rows of a decode step, each of a sequence of its own; more are a chunk of one sequence.
const DECODE: usize = 16;

/// How much of everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// DeepSeek V4 Flash's shapes.
    Flash,
    /// Shapes of a few hundred elements, which a test has time for.
    Tiny,
}

/// What is to be measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers of rows.
    pub rows: Vec<usize>,
    /// Shapes.
    pub size: Size,
    /// Of the inputs.
    pub seed: u64,
}

/// One line of a report: one shape and number of rows.
#[derive(Clone, Debug)]
pub struct Line {
    /// Type and shape.
    pub what: String,
    /// Rows.
    pub rows: usize,
    /// Median.
    pub microseconds: f64,
    /// Bytes of weights and state that it must read.
    pub bytes: f64,
    /// Multiply-adds.
    pub macs: f64,
    /// Of what the device is known to reach: bytes, multiply-adds.
    pub of_ceiling: Option<(f64, f64)>,
    /// The largest error, in the measure that the family states, and its bound.
    pub error: f64,
    /// See `error`.
    pub bound: f64,
    /// Rows that had other bits in a launch of their own; 0 is right.
    pub varying_rows: usize,
}

impl Line {
    /// Whether it is within its bound and row-invariant.
    pub fn passed(&self) -> bool {
        self.error <= self.bound && self.varying_rows == 0
    }
}

/// Names of all families, and what they are.
pub const FAMILIES: [(&str, &str); 11] = [
    ("quantised", "products with Q8_0, Q4_K, Q2_K and IQ2_XXS matrices, against exact arithmetic"),
    ("dense", "products with F16, BF16 and F32 matrices, against exact arithmetic"),
    ("grouped", "the attention output's block-diagonal product"),
    ("experts", "the routed feed-forward part: grouping, gate and up, SwiGLU, down, weighted sum"),
    ("norms", "RMS norm of rows and of heads, clamped SwiGLU, rotation of heads' tails"),
    ("hyper", "hyper-connections before a sublayer, with its norm, and after it"),
    ("prepare", "norms, rotation and rounding of queries and key-value rows before an attention"),
    ("compressor", "pooling of windows into compressed rows, in both storage types"),
    ("indexer", "scores of compressed rows in FP4 and the best 512 of them"),
    ("attention", "sparse attention over a window of 128 rows and 512 compressed ones"),
    ("sampling", "best tokens, sums of weights and a draw, of rows of logits"),
];

/// Runs family `name`; `None` when there is none of that name.
///
/// # Errors
/// The device has not got the memory, or refuses a type.
pub fn run<D: Timed>(device: &D, name: &str, options: &Options) -> Option<Result<Vec<Line>, DeviceError>> {
    let bench = Bench { device, reference: device.reference(), options };
    Some(match name {
        "quantised" => products::quantised(&bench),
        "dense" => products::dense(&bench),
        "grouped" => products::grouped(&bench),
        "experts" => experts::experts(&bench),
        "norms" => rows::norms(&bench),
        "hyper" => rows::hyper(&bench),
        "prepare" => prepare::prepare(&bench),
        "compressor" => compress::compressors(&bench),
        "indexer" => sparse::indexer(&bench),
        "attention" => sparse::attention(&bench),
        "sampling" => sampling::sampling(&bench),
        _ => return None,
    })
}

struct Bench<'a, D: Timed> {
    device: &'a D,
    reference: CpuDevice,
    options: &'a Options,
}

impl<D: Timed> Bench<'_, D> {
    fn random(&self) -> Random {
        Random::new(self.options.seed)
    }

    /// Flash's value, or the small one.
    fn size(&self, flash: usize, tiny: usize) -> usize {
        if self.options.size == Size::Flash { flash } else { tiny }
    }

    /// Checks and times `kernel` at every number of rows.
    fn sweep<K: Kernel>(&self, kernel: &K) -> Result<Vec<Line>, DeviceError> {
        self.against(kernel, kernel)
    }

    /// As [`Bench::sweep`], with `model` as the reference's kernel.
    fn against<K: Kernel>(&self, kernel: &K, model: &K) -> Result<Vec<Line>, DeviceError> {
        let d = self.device;
        let copies =
            if d.cache() == 0 { 1 } else { (2 * d.cache()).div_ceil(kernel.weight_bytes().max(1)).clamp(2, 16) };
        let weights = Weights {
            here: kernel.bind(d, copies)?,
            there: model.bind(&self.reference, 1)?,
            reference: &self.reference,
            kernel,
            model,
        };
        self.options.rows.iter().map(|rows| measure(d, &weights, *rows, self.options.seed)).collect()
    }
}

/// A kernel and its reference, made ready.
struct Weights<'a, D: Timed, K: Kernel> {
    here: K::Bound<D>,
    there: K::Bound<CpuDevice>,
    reference: &'a CpuDevice,
    kernel: &'a K,
    model: &'a K,
}

/// One operation at one shape.
trait Kernel {
    /// Its weights on a device.
    type Bound<D: Timed>;

    /// Type and shape.
    fn what(&self) -> String;

    /// Binds as many copies of the weights.
    fn bind<D: Timed>(&self, d: &D, copies: usize) -> Result<Self::Bound<D>, DeviceError>;

    /// Bytes of one copy.
    fn weight_bytes(&self) -> usize;

    /// Widths of the buffers.
    fn widths(&self) -> Vec<usize>;

    /// How many of the buffers, from the first on, are inputs.
    fn inputs(&self) -> usize;

    /// Values of input `k` for `rows` positions from `first` on.
    fn input(&self, k: usize, rng: &mut Random, first: usize, rows: usize) -> Vec<f32> {
        let _ = first;
        rng.activations(rows * self.widths()[k])
    }

    /// State of a sequence.
    fn state(&self) -> StateSpec {
        StateSpec::default()
    }

    /// Tokens of a sequence before the step.
    fn depth(&self) -> usize {
        0
    }

    /// Storage bytes of `slot` when the step's rows begin at `first` and end at `end`; empty for a slot that keeps what it has.
    fn stored(&self, slot: usize, first: usize, end: usize) -> Vec<u8> {
        let _ = (slot, first, end);
        Vec::new()
    }

    /// Whether the last rows of a chunk can be computed without the others.
    fn has_tail(&self) -> bool {
        true
    }

    /// What comes before the operation, once for new inputs.
    fn prepare<D: Timed>(&self, _: &D, _: &Self::Bound<D>, _: &mut Place<D>, _: &mut [D::Buffer]) {}

    /// The operation, with copy `i` of the weights, modulo their number.
    fn run<D: Timed>(&self, d: &D, bound: &Self::Bound<D>, i: usize, place: &mut Place<D>, buffers: &mut [D::Buffer]);

    /// What it has computed for rows `rows`.
    fn output<D: Timed>(
        &self,
        d: &D,
        place: &Place<D>,
        buffers: &[D::Buffer],
        rows: std::ops::Range<usize>,
    ) -> Vec<f32> {
        let _ = place;
        let mut all = Vec::new();
        if let Some(last) = buffers.last() {
            let mut row = Vec::new();
            for r in rows {
                d.read(last, r, &mut row);
                all.extend_from_slice(&row);
            }
        }
        all
    }

    /// What the first rows must be, from `inputs`; `None`: what the reference device makes of them.
    fn exact(&self, inputs: &[Vec<f32>], got: &[f32], activation: f64) -> Option<f64> {
        let _ = (inputs, got, activation);
        None
    }

    /// How far `got` is from `want`.
    fn distance(&self, got: &[f32], want: &[f32]) -> f64 {
        apart(got, want)
    }

    /// The bound of [`Kernel::exact`] or [`Kernel::distance`].
    fn bound(&self) -> f64;

    /// Bytes read for so many rows.
    fn bytes(&self, rows: usize) -> f64;

    /// Multiply-adds for so many rows.
    fn macs(&self, rows: usize) -> f64;
}

/// A step and its sequences.
struct Place<D: Timed> {
    step: D::Step,
    banks: Vec<D::Bank>,
    selection: D::Selection,
    routings: Vec<D::Routing>,
    summaries: Vec<RowSummary>,
    first: usize,
    rows: usize,
}

impl<D: Timed> Place<D> {
    /// Rows from `first` on, each of a sequence of its own (`apart`) or all of one.
    fn new<K: Kernel>(d: &D, kernel: &K, first: usize, rows: usize, apart: bool) -> Result<Self, DeviceError> {
        let spec = kernel.state();
        let each = if apart { 1 } else { rows };
        let stored: Vec<Vec<u8>> = (0..spec.slots.len()).map(|slot| kernel.stored(slot, first, first + each)).collect();
        let mut banks = Vec::new();
        let mut plan = BatchPlan::default();
        for bank in 0..rows / each {
            let mut new = d.bank(&spec, first + each)?;
            d.bank_commit(&mut new, first + each)?;
            for (slot, (kind, bytes)) in spec.slots.iter().zip(&stored).enumerate() {
                if !bytes.is_empty() {
                    let have = bytes.len() / kind.ty().row_bytes(kind.width());
                    d.bank_import(&mut new, slot, 0..have, bytes);
                }
            }
            banks.push(new);
            plan.push(bank, first, &(0..u32::try_from(each).unwrap_or(u32::MAX)).collect::<Vec<_>>(), false);
        }
        let step = d.step(&plan, &mut banks)?;
        Ok(Self {
            step,
            banks,
            selection: D::Selection::default(),
            routings: Vec::new(),
            summaries: Vec::new(),
            first,
            rows,
        })
    }
}

/// What `kernel` makes of `inputs`, and everything it needs to do it again.
fn once<D: Timed, K: Kernel>(
    d: &D,
    kernel: &K,
    bound: &K::Bound<D>,
    (first, rows, apart): (usize, usize, bool),
    inputs: &[Vec<f32>],
) -> Result<(Place<D>, Vec<D::Buffer>), DeviceError> {
    let mut buffers = Vec::new();
    for (k, width) in kernel.widths().into_iter().enumerate() {
        buffers.push(match inputs.get(k) {
            Some(values) => upload(d, width, values)?,
            None => d.buffer(width),
        });
    }
    let mut place = Place::new(d, kernel, first, rows, apart)?;
    kernel.prepare(d, bound, &mut place, &mut buffers);
    kernel.run(d, bound, 0, &mut place, &mut buffers);
    Ok((place, buffers))
}

/// Checks and times a kernel on `d`.
fn measure<D: Timed, K: Kernel>(d: &D, w: &Weights<'_, D, K>, rows: usize, seed: u64) -> Result<Line, DeviceError> {
    let Weights { here: bound, there, reference, kernel, model } = w;
    let (kernel, model, reference) = (*kernel, *model, *reference);
    let (depth, apart) = (kernel.depth(), rows <= DECODE);
    let mut rng = Random::new(seed ^ 0x5eed);
    let widths = kernel.widths();
    let inputs: Vec<Vec<f32>> = (0..kernel.inputs())
        .map(|k| {
            if apart {
                // Rows of sequences that are alike up to here.
                (0..rows).flat_map(|_| kernel.input(k, &mut rng, depth, 1)).collect()
            } else {
                kernel.input(k, &mut rng, depth, rows)
            }
        })
        .collect();
    let part = |from: usize, n: usize| -> Vec<Vec<f32>> {
        inputs.iter().zip(&widths).map(|(x, w)| x[from * w..(from + n) * w].to_vec()).collect()
    };
    let some = rows.min(CHECKED);

    let head = {
        let (place, buffers) = once(d, kernel, bound, (depth, some, apart), &part(0, some))?;
        kernel.output(d, &place, &buffers, 0..some)
    };
    let error = match kernel.exact(&part(0, some), &head, d.activation()) {
        Some(error) => error,
        None => {
            let (place, buffers) = once(reference, model, there, (depth, some, apart), &part(0, some))?;
            model.distance(&head, &model.output(reference, &place, &buffers, 0..some))
        }
    };
    // The last rows on their own: of a chunk, at their positions.
    let tail = if rows > some && (apart || kernel.has_tail()) {
        let from = rows - some;
        let first = if apart { depth } else { depth + from };
        let (place, buffers) = once(d, kernel, bound, (first, some, apart), &part(from, some))?;
        Some(kernel.output(d, &place, &buffers, 0..some))
    } else {
        None
    };
    let (mut place, mut buffers) = once(d, kernel, bound, (depth, rows, apart), &inputs)?;
    let mut varying = differing(&head, &kernel.output(d, &place, &buffers, 0..some), some);
    if let Some(tail) = tail {
        varying += differing(&tail, &kernel.output(d, &place, &buffers, rows - some..rows), some);
    }
    let n = if rows > 64 { 3 } else { 24 };
    let microseconds = d.time(n, &mut |i| kernel.run(d, bound, i, &mut place, &mut buffers))?;
    let (bytes, macs) = (kernel.bytes(rows), kernel.macs(rows));
    let per_second = 1e6 / microseconds;
    Ok(Line {
        what: kernel.what(),
        rows,
        microseconds,
        bytes,
        macs,
        of_ceiling: d.ceiling().map(|(b, m)| (bytes * per_second / b, macs * per_second / m)),
        error,
        bound: kernel.bound(),
        varying_rows: varying,
    })
}

/// Rows out of `rows` whose bits differ.
fn differing(a: &[f32], b: &[f32], rows: usize) -> usize {
    let width = (a.len() / rows.max(1)).max(1);
    let same = |(a, b): (&[f32], &[f32])| a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits()));
    a.chunks(width).zip(b.chunks(width)).filter(|pair| !same(*pair)).count() + usize::from(a.len() != b.len())
}

/// Largest difference over the root mean square of `want`; infinite when a value is not finite.
#[allow(clippy::cast_precision_loss, reason = "a count")]
fn apart(got: &[f32], want: &[f32]) -> f64 {
    if got.len() != want.len() || got.iter().any(|v| !v.is_finite()) {
        return f64::INFINITY;
    }
    let squares: f64 = want.iter().map(|w| f64::from(*w).powi(2)).sum();
    let worst = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - f64::from(*w)).abs()).fold(0.0, f64::max);
    worst / (squares / want.len().max(1) as f64).sqrt().max(1e-30)
}

/// Random blocks, made from a few MiB that repeat: neither time nor error depends on how far apart equal ones are.
fn blocks(rng: &mut Random, ty: GgmlType, elems: usize) -> SharedBytes {
    let want = quant::row_bytes(ty, elems);
    // Of an odd number of rows' worth, so that rows of a matrix differ.
    let some = rng.weights(ty, 1, elems.min((1 << 22) + 256 * 37));
    let mut all = Vec::with_capacity(want);
    while all.len() < want {
        all.extend_from_slice(&some[..some.len().min(want - all.len())]);
    }
    SharedBytes::from_vec(all)
}

fn weight<D: Device>(
    d: &D,
    ty: GgmlType,
    rows: usize,
    cols: usize,
    bytes: &SharedBytes,
) -> Result<D::Weight, DeviceError> {
    d.bind(&TensorSource { name: format!("bench.{ty}"), ty, cols, rows, bytes: bytes.clone() })
}

fn floats<D: Device>(d: &D, rows: usize, cols: usize, values: &[f32]) -> Result<D::Weight, DeviceError> {
    let bytes = SharedBytes::from_vec(values.iter().flat_map(|v| v.to_le_bytes()).collect());
    weight(d, GgmlType::F32, rows, cols, &bytes)
}

/// Rows of activations on the device: the op set's way in is a table of embeddings.
fn upload<D: Device>(d: &D, width: usize, x: &[f32]) -> Result<D::Buffer, DeviceError> {
    let rows = x.len() / width;
    let table = floats(d, rows, width, x)?;
    let mut banks = [d.bank(&StateSpec::default(), rows)?];
    d.bank_commit(&mut banks[0], rows)?;
    let mut plan = BatchPlan::default();
    plan.push(0, 0, &(0..u32::try_from(rows).unwrap_or(u32::MAX)).collect::<Vec<_>>(), false);
    let mut out = d.buffer(width);
    d.embed(&d.step(&plan, &mut banks)?, &table, &mut out);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(seed: u64) -> Options {
        Options { rows: vec![1, 5, 40], size: Size::Tiny, seed }
    }

    #[test]
    fn every_family_passes_on_the_cpu_and_counts_its_work() {
        let device = CpuDevice::new(2);
        let options = tiny(Random::fresh_seed());
        for (name, _) in FAMILIES {
            let lines = run(&device, name, &options).expect("a family").expect("memory");
            assert!(lines.len() > 1, "{name}");
            for line in &lines {
                assert!(line.passed(), "{name}: {line:?} (seed {})", options.seed);
                assert!(line.microseconds > 0.0 && line.bytes > 0.0, "{name}: {line:?}");
            }
        }
        assert!(run(&device, "nothing", &options).is_none());
    }

    #[test]
    fn a_wrong_result_fails() {
        let (device, options) = (CpuDevice::new(1), tiny(3));
        let (bench, other) = (
            Bench { device: &device, reference: device.reference(), options: &options },
            Options { seed: 4, ..options.clone() },
        );
        let wrong = Bench { device: &device, reference: device.reference(), options: &other };
        // The reference has other weights.
        for lines in [rows::against(&bench, &wrong), sparse::against(&bench, &wrong), experts::against(&bench, &wrong)]
        {
            assert_eq!(lines.len(), options.rows.len());
            assert!(lines.iter().all(|l| l.error > l.bound && !l.passed()), "{lines:?}");
        }
        assert!(products::exact_of_wrong(&bench) > 1.0);
        assert_eq!(differing(&[1.0, 2.0, 3.0, 4.0], &[1.0, 2.0, 3.0, 4.5], 2), 1);
        assert_eq!(apart(&[f32::NAN], &[1.0]), f64::INFINITY);
    }
}
