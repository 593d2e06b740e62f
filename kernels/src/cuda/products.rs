//! Launches of the products with F16 weights on the tensor cores (dense.cu): all weights that one input meets in one launch.

use super::buffer::{CudaBuffer, Growable};
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::kernels::{File, dim, int};
use super::weight::CudaWeight;
use crate::kernel_args;
use ds4_manifests::GgmlType;

/// Columns with one scale, and columns of a step of the loops (`CHUNK`, `GROUP` in dense.cu).
const CHUNK: usize = 256;
const GROUP: usize = 32;
/// Weights of one launch (`MOST` in dense.cu).
const MOST: usize = 8;
/// Stages of the kernels for many rows (`MANY` in dense.cu).
const STAGES: usize = 4;
/// Most rows of a kernel that splits activations where it uses them.
const FEW: usize = 32;
/// Most bytes of sums that one of its blocks keeps.
const MOST_SUMS: usize = 64 * 1024;

/// `Members` in dense.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct GroupArg {
    all: [[u64; 2]; MOST],
    outputs: [i32; MOST],
    count: i32,
    cols: i32,
}
kernel_args!(GroupArg);

/// Device memory for activations in two halves.
#[derive(Debug, Default)]
pub(super) struct Halves {
    hi: Growable,
    lo: Growable,
    scale: Growable,
}

/// Whether a weight has these kernels: rows of whole 16 bytes of halves.
pub(super) fn fits(w: &CudaWeight) -> bool {
    has_kernel(w.ty, w.cols) && !w.is_tiled() && w.start().is_multiple_of(16)
}

fn has_kernel(ty: GgmlType, cols: usize) -> bool {
    ty == GgmlType::F16 && cols.is_multiple_of(8)
}

/// How a product is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// Rows by `8 * tiles`, 16 outputs for each of `slices`, whose chunks `warps` warps share.
    Few { tiles: usize, warps: usize, slices: usize },
    /// Blocks of `outputs` by `rows` after a kernel that splits the activations.
    Many { outputs: usize, rows: usize, threads: u32 },
}

impl Kernel {
    /// For weights of so many `outputs` each. All kernels give the same bits.
    fn of(rows: usize, cols: usize, outputs: &[usize], multiprocessors: usize) -> Self {
        let chunks = cols.div_ceil(CHUNK);
        let tiles = if rows <= 8 { 1 } else { 2 };
        let warps = chunks.min(8);
        let few = Self::Few { tiles, warps, slices: (8 / warps).max(1) };
        if rows <= FEW && few.shared(chunks) <= MOST_SUMS {
            return few;
        }
        let large = Self::Many { outputs: 128, rows: 128, threads: 256 };
        let [x, y] = large.blocks(rows, outputs);
        // Small blocks share less of what they read, but all multiprocessors have some.
        if x * y >= multiprocessors { large } else { Self::Many { outputs: 64, rows: 64, threads: 128 } }
    }

    /// Bytes of shared memory of a block.
    fn shared(self, chunks: usize) -> usize {
        match self {
            Self::Few { tiles, slices, .. } => chunks * slices * tiles * (128 + 8) * 4,
            Self::Many { outputs, rows, .. } => STAGES * 2 * GROUP * (outputs + 2 * rows),
        }
    }

    /// Blocks over outputs and over rows.
    fn blocks(self, rows: usize, outputs: &[usize]) -> [usize; 2] {
        let (across, down) = match self {
            Self::Few { tiles, slices, .. } => (16 * slices, 8 * tiles),
            Self::Many { outputs, rows, .. } => (outputs, rows),
        };
        [outputs.iter().map(|n| n.div_ceil(across)).sum(), rows.div_ceil(down)]
    }
}

/// `outᵢ = x · wᵢᵀ` for weights that [`fits`] and share their inputs.
pub(super) fn matmul(d: &CudaDevice, x: &CudaBuffer, group: &mut [(&CudaWeight, &mut CudaBuffer)]) {
    let rows = x.rows();
    for (_, out) in group.iter_mut() {
        out.resize(rows);
    }
    if rows == 0 {
        return;
    }
    let sms = usize::try_from(d.context().device().multiprocessors).unwrap_or(1);
    let cols = x.width();
    let mut halves = None;
    for part in group.chunks_mut(MOST) {
        let mut arg = GroupArg { count: int(part.len()), cols: int(cols), ..GroupArg::default() };
        let mut outputs = Vec::with_capacity(part.len());
        for (i, (w, out)) in part.iter().enumerate() {
            (arg.all[i], arg.outputs[i]) = ([w.start(), out.start()], int(w.rows));
            outputs.push(w.rows);
        }
        let kernel = Kernel::of(rows, cols, &outputs, sms);
        let ([across, down], shared) = (kernel.blocks(rows, &outputs), kernel.shared(cols.div_ceil(CHUNK)));
        let grid = [dim(across), dim(down), 1];
        let all = (x.start(), int(cols), int(rows));
        match kernel {
            Kernel::Few { tiles, warps, slices } => {
                let (name, block) = (format!("dense_few_{tiles}"), [32, dim(warps), dim(slices)]);
                d.launch(File::Dense, &name, grid, block, shared, &[&arg, &all.0, &all.1, &all.2]);
            }
            Kernel::Many { outputs, rows, threads } => {
                let [hi, lo, scale] = *halves.get_or_insert_with(|| split(d, x));
                let name = format!("dense_many_{outputs}_{rows}");
                d.launch(File::Dense, &name, grid, [threads, 1, 1], shared, &[&arg, &hi, &lo, &scale, &all.2]);
            }
        }
    }
}

/// Splits the rows of `x`.
fn split(d: &CudaDevice, x: &CudaBuffer) -> [DevicePtr; 3] {
    let (rows, cols) = (x.rows(), x.width());
    let (chunks, plane) = (cols.div_ceil(CHUNK), cols.next_multiple_of(GROUP) * 2);
    let mut scratch = d.scratch();
    let to = &mut scratch.halves;
    let at = |g: &mut Growable, bytes: usize| g.at_least(d.context(), rows * bytes);
    let all = [at(&mut to.hi, plane), at(&mut to.lo, plane), at(&mut to.scale, chunks * 4)];
    let args = (x.start(), int(cols), int(rows));
    let each: [&dyn KernelArg; 7] = [&args.0, &args.1, &args.1, &args.2, &all[0], &all[1], &all[2]];
    d.launch(File::Dense, "dense_split", [dim((rows * chunks).div_ceil(8)), 1, 1], [256, 1, 1], 0, &each);
    all
}

#[cfg(test)]
mod tests {
    use super::super::driver::module::MAX_SHARED;
    use super::*;

    #[test]
    fn every_launch_fits_a_block_and_covers_all_outputs() {
        for cols in [8, 256, 520, 1024, 4096, 16384, 65536] {
            for rows in [1, 8, 9, 16, 33, 512, 2048] {
                for outputs in [&[1][..], &[24], &[64, 8192], &[1024, 1024, 256, 256, 64]] {
                    let kernel = Kernel::of(rows, cols, outputs, 132);
                    let shared = dim(kernel.shared(cols.div_ceil(CHUNK)));
                    assert!(shared <= MAX_SHARED, "{kernel:?}, {cols} columns: {shared} bytes");
                    let [across, down] = kernel.blocks(rows, outputs);
                    let (each, high, threads) = match kernel {
                        Kernel::Few { tiles, warps, slices } => (16 * slices, 8 * tiles, warps * slices * 32),
                        Kernel::Many { outputs, rows, threads } => (outputs, rows, threads as usize),
                    };
                    assert!(threads <= 512 && across * each >= outputs.iter().sum(), "{kernel:?}");
                    assert!(down * high >= rows && (down - 1) * high < rows, "{kernel:?}: {down} for {rows} rows");
                }
            }
        }
    }

    #[test]
    fn few_rows_are_split_in_place_and_few_blocks_are_made_smaller() {
        let of = |rows, outputs: &[usize]| Kernel::of(rows, 4096, outputs, 132);
        assert_eq!(of(1, &[256]), Kernel::Few { tiles: 1, warps: 8, slices: 1 });
        assert_eq!(Kernel::of(16, 1024, &[8192], 132), Kernel::Few { tiles: 2, warps: 4, slices: 2 });
        assert_eq!(of(2048, &[256]), Kernel::Many { outputs: 64, rows: 64, threads: 128 });
        assert_eq!(of(2048, &[1024, 1024]), Kernel::Many { outputs: 128, rows: 128, threads: 256 });
    }

    #[test]
    fn only_whole_pieces_of_halves_have_these_kernels() {
        assert!(has_kernel(GgmlType::F16, 4096) && has_kernel(GgmlType::F16, 8));
        assert!(!has_kernel(GgmlType::F16, 12) && !has_kernel(GgmlType::BF16, 256) && !has_kernel(GgmlType::F32, 256));
    }
}
