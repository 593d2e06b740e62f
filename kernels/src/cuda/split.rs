//! Launches that split activations into 16-bit numbers, as the products on tensor cores take them (split.cuh).

use ds4_manifests::GgmlType;

use super::buffer::Growable;
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::kernels::{File, dim, long};
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
kernel_args!(ActsArg);

/// Device memory for split activations.
#[derive(Debug, Default)]
pub(super) struct Activations {
    q: Growable,
    m: Growable,
    sums: Growable,
    scale: Growable,
}

impl Activations {
    /// Room for `rows` rows of `cols` columns.
    pub(super) fn at_least(&mut self, d: &CudaDevice, rows: usize, cols: usize) -> ActsArg {
        let room = rows.max(16) * (cols / SUPERBLOCK);
        let at = |g: &mut Growable, bytes: usize| g.at_least(d.context(), room * bytes);
        ActsArg {
            q: at(&mut self.q, 512),
            m: at(&mut self.m, 64),
            sums: at(&mut self.sums, 32),
            scale: at(&mut self.scale, 4),
        }
    }
}

/// The order in which a type's kernel takes activations (`Order` in split.cuh).
pub(super) fn order(ty: GgmlType) -> i32 {
    i32::from(ty == GgmlType::Q2_K)
}

/// Splits `rows` rows of floats at `x` into 16-bit activations for products with `w`, and with other weights of as many columns whose
/// type takes them in the same order.
pub(super) fn quantize(d: &CudaDevice, to: &mut Activations, w: &CudaWeight, x: DevicePtr, rows: usize) -> ActsArg {
    let total = rows * (w.cols / SUPERBLOCK);
    let acts = to.at_least(d, rows, w.cols);
    let args = (order(w.ty), long(total));
    let all: [&dyn KernelArg; 4] = [&x, &args.0, &args.1, &acts];
    d.launch(File::Split, "quantize_rows", [dim(total.div_ceil(8)), 1, 1], [256, 1, 1], 0, &all);
    acts
}
