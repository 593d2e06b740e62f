//! Launches that split activations into 16-bit numbers, as the products on tensor cores take them (split.cuh).

use ds4_manifests::GgmlType;

use super::buffer::Growable;
use super::device::CudaDevice;
use super::driver::{Context, KernelArg, vmm::DevicePtr};
use super::kernels::{File, dim, int, long};
use super::quantized::SUPERBLOCK;
use super::weight::CudaWeight;
use crate::kernel_args;

/// `Acts` in split.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct ActsArg {
    q: u64,
    m: u64,
    sums: u64,
    scale: u64,
}

/// `Swiglu` in split.cu: gated rows that are split as they are made.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct SwigluArg {
    gate: u64,
    up: u64,
    weights: u64,
    to: ActsArg,
    total: i64,
    superblocks: i32,
    order: i32,
}
kernel_args!(ActsArg, SwigluArg);

impl SwigluArg {
    /// Rows of `width` columns for products with `w`; `weights` has a factor for each, or is 0.
    pub(super) fn new(
        (gate, up): (DevicePtr, DevicePtr),
        weights: DevicePtr,
        to: ActsArg,
        rows: usize,
        w: &CudaWeight,
    ) -> Self {
        let superblocks = w.cols / SUPERBLOCK;
        let order = order(w.ty);
        Self { gate, up, weights, to, total: long(rows * superblocks), superblocks: int(superblocks), order }
    }
}

/// Gates two sets of rows, or one, and splits them.
pub(super) fn swiglu(d: &CudaDevice, first: &SwigluArg, second: Option<&SwigluArg>, clamp: f32) {
    let none = SwigluArg { total: 0, ..*first };
    let second = second.unwrap_or(&none);
    let blocks = usize::try_from(first.total + second.total).unwrap_or(0).div_ceil(8);
    d.launch(File::Split, "split_swiglu", [dim(blocks), 1, 1], [256, 1, 1], 0, &[first, second, &clamp]);
}

/// Bytes of a superblock in each part of [`ActsArg`].
const PARTS: [usize; 4] = [512, 64, 32, 4];

/// Superblocks that there is room for.
fn room(rows: usize, cols: usize) -> usize {
    rows.max(16) * (cols / SUPERBLOCK)
}

/// Bytes for `rows` rows of `cols` columns.
pub(super) fn bytes(rows: usize, cols: usize) -> usize {
    room(rows, cols) * PARTS.iter().sum::<usize>()
}

/// Device memory for split activations.
#[derive(Debug)]
pub(super) struct Activations(Growable);

impl ActsArg {
    /// For a kernel that shall not split.
    pub(super) const NONE: Self = Self { q: 0, m: 0, sums: 0, scale: 0 };

    /// Rows of `cols` columns from row `first` on.
    pub(super) fn after_rows(self, first: usize, cols: usize) -> Self {
        let [q, m, sums, scale] = PARTS.map(|bytes| (first * (cols / SUPERBLOCK) * bytes) as u64);
        Self { q: self.q + q, m: self.m + m, sums: self.sums + sums, scale: self.scale + scale }
    }

    /// Room for `rows` rows of `cols` columns in [`bytes`] bytes at `start`.
    pub(super) fn at(start: DevicePtr, rows: usize, cols: usize) -> Self {
        let mut next = start;
        let [q, m, sums, scale] = PARTS.map(|bytes| {
            let at = next;
            next += (room(rows, cols) * bytes) as u64;
            at
        });
        Self { q, m, sums, scale }
    }
}

impl Activations {
    /// In such memory.
    pub(super) fn of(memory: Growable) -> Self {
        Self(memory)
    }

    /// Keeps the memory of `other`.
    pub(super) fn borrow(&mut self, other: &Self) {
        self.0.borrow(&other.0, 0);
    }

    /// Room for `rows` rows of `cols` columns.
    pub(super) fn at_least(&mut self, context: &Context, rows: usize, cols: usize) -> ActsArg {
        ActsArg::at(self.0.at_least(context, bytes(rows, cols)), rows, cols)
    }
}

/// The order of most types, in which kernels split what they make for any product.
pub(super) const PLAIN: i32 = 0;

/// The order in which a type's kernel takes activations (`Order` in split.cuh).
pub(super) fn order(ty: GgmlType) -> i32 {
    i32::from(ty == GgmlType::Q2_K)
}

/// Splits `rows` rows of floats at `x` into 16-bit activations for products with `w`, and with other weights of as many columns whose
/// type takes them in the same order. `to` has [`bytes`] bytes.
pub(super) fn quantize(d: &CudaDevice, to: DevicePtr, w: &CudaWeight, x: DevicePtr, rows: usize) -> ActsArg {
    let total = rows * (w.cols / SUPERBLOCK);
    let acts = ActsArg::at(to, rows, w.cols);
    let args = (order(w.ty), long(total));
    let all: [&dyn KernelArg; 4] = [&x, &args.0, &args.1, &acts];
    d.launch(File::Split, "quantize_rows", [dim(total.div_ceil(8)), 1, 1], [256, 1, 1], 0, &all);
    acts
}
