//! Launches of the products with F16 and BF16 weights on the tensor cores (dense.cu): all weights of a type that one input meets in one
//! launch, and block-diagonal ones.

use super::buffer::CudaBuffer;
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
/// Rows of a tile of split activations, and the most rows of a block of a kernel.
const TILE: usize = 16;
const BLOCK: usize = 64;
/// Most rows of the kernel that splits activations where it uses them: with more, a launch that does it for all blocks costs less.
const FEW: usize = 4;
/// Most bytes of shared memory for sums, of a block that has its weights there, and what each block takes of a multiprocessor's besides.
const MOST_SUMS: usize = 64 * 1024;
const MOST_WEIGHTS: usize = 99 * 1024;
const RESERVED: usize = 1024;

/// `Member` in dense.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MemberArg {
    weight: u64,
    out: u64,
    outputs: i32,
    stride: i32,
    from: i32,
    unused: i32,
}

/// `Members` in dense.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct GroupArg {
    all: [MemberArg; MOST],
    count: i32,
    cols: i32,
    width: i32,
    unused: i32,
}
kernel_args!(GroupArg);

/// Parts that activations are cut into for weights of type `ty`, if it has these kernels (dense_parts.cuh).
fn parts(ty: GgmlType) -> Option<usize> {
    match ty {
        GgmlType::F16 => Some(2),
        GgmlType::BF16 => Some(3),
        _ => None,
    }
}

/// Bytes of activations in parts: of their pieces, and with the scales.
fn sizes(parts: usize, rows: usize, cols: usize) -> [usize; 2] {
    // Kernels read whole blocks of rows.
    let room = rows.next_multiple_of(BLOCK);
    let pieces = room * cols.next_multiple_of(GROUP) * 2 * parts;
    [pieces, pieces + room * cols.div_ceil(CHUNK) * 4]
}

/// Bytes that products of `rows` rows of `cols` columns want for weights of type `ty`.
pub(super) fn bytes(ty: GgmlType, rows: usize, cols: usize) -> usize {
    parts(ty).map_or(0, |parts| sizes(parts, rows, cols)[1])
}

/// Whether a weight has these kernels: rows of whole 16 bytes.
pub(super) fn fits(w: &CudaWeight) -> bool {
    has_kernel(w.ty, w.cols) && !w.is_tiled() && w.start().is_multiple_of(16)
}

fn has_kernel(ty: GgmlType, cols: usize) -> bool {
    parts(ty).is_some() && cols.is_multiple_of(8)
}

/// How a product is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// All rows, 8 outputs for each of `slices`, whose chunks `warps` warps share; each has room for the weights of `held` chunks.
    Few { warps: usize, slices: usize, held: usize },
    /// 16 rows, 16 outputs for each of `slices`, after a kernel that splits the activations.
    Some { warps: usize, slices: usize },
    /// Blocks of `rows` by `outputs`, after that kernel too.
    Many { rows: usize, outputs: usize, threads: u32, stages: usize },
}

impl Kernel {
    /// For weights of so many `outputs` each, on so many multiprocessors, whose largest block may have `room` bytes of shared memory. All
    /// kernels give the same bits. The bounds are from times on 132 multiprocessors.
    fn of(
        parts: usize,
        rows: usize,
        cols: usize,
        outputs: &[usize],
        (multiprocessors, room): (usize, usize),
        beside: bool,
    ) -> Self {
        let chunks = cols.div_ceil(CHUNK);
        let tiles: usize = outputs.iter().map(|n| n.div_ceil(16)).sum();
        let units = tiles * rows.div_ceil(TILE);
        // Many warps have all of a small matrix on its way at once; of a large one they would be too much for a multiprocessor. With its
        // weights in registers they would wait for the end of a kernel that it runs beside.
        let shares = |together: usize| {
            let warps = chunks.min(together);
            (warps, (together / warps).max(1))
        };
        // More rows of many outputs cost less where activations are split once.
        if rows <= if 2 * units <= 3 * multiprocessors { FEW } else { 2 } {
            let (warps, slices) = shares(if units <= multiprocessors && rows == 1 { 16 } else { 8 });
            let all = Self::Few { warps, slices, held: chunks.div_ceil(warps) };
            let at_once = multiprocessors * ((room + RESERVED) / (all.shared(parts, rows, chunks) + RESERVED));
            // Weights that have no room all at once come faster in more and smaller blocks.
            let fits = all.shared(parts, rows, chunks) <= MOST_WEIGHTS && all.blocks(rows, outputs)[0] <= at_once;
            let few = if fits { all } else { Self::Few { warps, slices, held: 1 } };
            if few.shared(parts, rows, chunks) <= MOST_WEIGHTS {
                return few;
            }
        }
        let (warps, slices) = shares(if units <= multiprocessors && !beside { 16 } else { 8 });
        let some = Self::Some { warps, slices };
        // Where weights are read for many rows more than once, tiles of them are faster.
        if (rows <= TILE || units <= 5 * multiprocessors) && some.shared(parts, rows, chunks) <= MOST_SUMS {
            return some;
        }
        let large = [
            Self::Many { rows: 64, outputs: 128, threads: 128, stages: 3 },
            Self::Many { rows: 64, outputs: 64, threads: 128, stages: 4 },
        ];
        let fills = |kernel: &Self| kernel.blocks(rows, outputs).iter().product::<usize>() * 2 >= multiprocessors * 3;
        let small = Self::Many { rows: 32, outputs: 32, threads: 64, stages: 4 };
        large.into_iter().find(fills).unwrap_or(small)
    }

    /// Bytes of shared memory of a block.
    fn shared(self, parts: usize, rows: usize, chunks: usize) -> usize {
        match self {
            Self::Few { warps, slices, held } => {
                slices * (warps * (held * 8 + rows * parts) * CHUNK * 2 + chunks * rows * 9 * 4)
            }
            Self::Some { slices, .. } => slices * chunks * 2 * 4 * 32 * 4,
            Self::Many { rows, outputs, stages, .. } => stages * 2 * GROUP * (outputs + parts * rows),
        }
    }

    /// Blocks over outputs and over rows.
    fn blocks(self, rows: usize, outputs: &[usize]) -> [usize; 2] {
        let (across, down) = match self {
            Self::Few { slices, .. } => (8 * slices, rows),
            Self::Some { slices, .. } => (16 * slices, TILE),
            Self::Many { outputs, rows, .. } => (outputs, rows),
        };
        [outputs.iter().map(|n| n.div_ceil(across)).sum(), rows.div_ceil(down)]
    }
}

/// Products that are about to be launched.
#[derive(Debug)]
pub(super) struct Prepared {
    ty: GgmlType,
    kernel: Kernel,
    /// Pieces and scales of split activations, for kernels that take them.
    split: Option<[DevicePtr; 2]>,
}

/// Chooses the kernel for weights of type `ty` and of so many `outputs` each that meet `cols` columns of the rows of `x`, and splits the
/// activations if it takes them so. `beside`: the products will be launched beside others that read `x`. `room` has [`bytes`] bytes.
fn prepare_for(
    d: &CudaDevice,
    x: &CudaBuffer,
    (ty, cols, outputs): (GgmlType, usize, &[usize]),
    beside: bool,
    room: DevicePtr,
) -> Prepared {
    let device = d.context().device();
    let on = [device.multiprocessors, device.shared_bytes].map(|n| usize::try_from(n).unwrap_or(1)).into();
    let parts = parts(ty).unwrap_or_default();
    let kernel = Kernel::of(parts, x.rows(), cols, outputs, on, beside);
    let any = !outputs.is_empty() && x.rows() > 0;
    let split = (any && !matches!(kernel, Kernel::Few { .. })).then(|| {
        let (rows, cols) = (x.rows(), x.width());
        let scale = room + sizes(parts, rows, cols)[0] as u64;
        let args = (x.start(), int(cols), int(rows));
        let all: [&dyn KernelArg; 5] = [&args.0, &args.1, &args.2, &room, &scale];
        let grid = [dim(cols.div_ceil(CHUNK)), dim(rows.div_ceil(TILE)), 1];
        d.launch(File::Dense, &format!("dense_split_{ty}"), grid, [512, 1, 1], 0, &all);
        [room, scale]
    });
    Prepared { ty, kernel, split }
}

/// As [`matmul`] needs it, for the first weights of `group`, of one type. `beside`: they will be launched beside others that read `x`. `room`
/// has as many bytes as [`bytes`] says for every type in `group`.
pub(super) fn prepare(
    d: &CudaDevice,
    x: &CudaBuffer,
    group: &[(&CudaWeight, &mut CudaBuffer)],
    beside: bool,
    room: DevicePtr,
) -> Option<Prepared> {
    let first = group.chunk_by(|a, b| a.0.ty == b.0.ty).next()?;
    let outputs: Vec<usize> = first.iter().map(|(w, _)| w.rows).collect();
    Some(prepare_for(d, x, (first[0].0.ty, x.width(), &outputs), beside, room))
}

/// `outᵢ = x · wᵢᵀ` for weights that [`fits`], of one type after the other, the first of which are [`prepare`]d. `beside`: the launch
/// before this one reads `x` too, or what was made of it, so that all that it waited for is there.
pub(super) fn matmul(
    d: &CudaDevice,
    x: &CudaBuffer,
    group: &mut [(&CudaWeight, &mut CudaBuffer)],
    prepared: Option<Prepared>,
    beside: bool,
    room: DevicePtr,
) {
    let (mut prepared, mut beside) = (prepared, beside);
    for alike in group.chunk_by_mut(|a, b| a.0.ty == b.0.ty) {
        let Some(prepared) = prepared.take().or_else(|| prepare(d, x, alike, false, room)) else { continue };
        let members: Vec<MemberArg> = alike
            .iter_mut()
            .map(|(w, out)| {
                out.resize(x.rows());
                let outputs = int(w.rows);
                MemberArg { weight: w.start(), out: out.start(), outputs, stride: outputs, ..MemberArg::default() }
            })
            .collect();
        launch(d, x, x.width(), &members, &prepared, beside);
        beside = false;
    }
}

/// Whether a weight has these kernels as `groups` blocks on a diagonal: each begins with a whole chunk of the inputs.
pub(super) fn fits_grouped(w: &CudaWeight, groups: usize) -> bool {
    fits(w) && (groups == 1 || w.cols.is_multiple_of(CHUNK))
}

/// Block-diagonal product with a weight that [`fits_grouped`].
pub(super) fn grouped(d: &CudaDevice, x: &CudaBuffer, w: &CudaWeight, groups: usize, out: &mut CudaBuffer) {
    out.resize(x.rows());
    let room = d.scratch().work.at_least(d.context(), bytes(w.ty, x.rows(), x.width()));
    let rank = w.rows / groups;
    let prepared = prepare_for(d, x, (w.ty, w.cols, &vec![rank; groups]), false, room);
    let members: Vec<MemberArg> = (0..groups)
        .map(|k| MemberArg {
            weight: w.start() + (k * rank * w.row_bytes) as u64,
            out: out.start() + (k * rank * 4) as u64,
            outputs: int(rank),
            stride: int(w.rows),
            from: int(k * w.cols),
            unused: 0,
        })
        .collect();
    launch(d, x, w.cols, &members, &prepared, false);
}

fn launch(d: &CudaDevice, x: &CudaBuffer, cols: usize, members: &[MemberArg], prepared: &Prepared, beside: bool) {
    let (ty, kernel, rows) = (prepared.ty, prepared.kernel, x.rows());
    if rows == 0 {
        return;
    }
    let mut beside = i32::from(beside);
    for part in members.chunks(MOST) {
        let mut arg =
            GroupArg { count: int(part.len()), cols: int(cols), width: int(x.width()), ..GroupArg::default() };
        arg.all[..part.len()].copy_from_slice(part);
        let outputs: Vec<usize> = part.iter().map(|m| usize::try_from(m.outputs).unwrap_or_default()).collect();
        let [across, down] = kernel.blocks(rows, &outputs);
        let shared = kernel.shared(parts(ty).unwrap_or_default(), rows, cols.div_ceil(CHUNK));
        let grid = [dim(across), dim(down), 1];
        let (from, n) = (x.start(), int(rows));
        let [pieces, scale] = prepared.split.unwrap_or_default();
        match kernel {
            Kernel::Few { warps, slices, held } => {
                let (block, held) = ([32, dim(warps), dim(slices)], int(held));
                let name = format!("dense_few_{ty}");
                d.launch(File::Dense, &name, grid, block, shared, &[&arg, &from, &n, &held, &beside]);
            }
            Kernel::Some { warps, slices } => {
                let block = [32, dim(warps), dim(slices)];
                let name = format!("dense_some_{ty}");
                d.launch(File::Dense, &name, grid, block, shared, &[&arg, &pieces, &scale, &n, &beside]);
            }
            Kernel::Many { rows, outputs, threads, .. } => {
                let name = format!("dense_many_{ty}_{rows}_{outputs}");
                d.launch(File::Dense, &name, grid, [threads, 1, 1], shared, &[&arg, &pieces, &scale, &n]);
            }
        }
        // Further launches wait as usual; no model has more than `MOST` weights that meet one input.
        beside = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::module::MAX_SHARED;
    use super::*;

    const H200: (usize, usize) = (132, 227 << 10);

    #[test]
    fn every_launch_fits_a_block_and_covers_all_outputs() {
        for parts in [2, 3] {
            for cols in [8, 256, 520, 1024, 4096, 16384, 65536] {
                for rows in [1, 4, 5, 16, 33, 512, 2048] {
                    for outputs in [&[1][..], &[24], &[64, 8192], &[1024, 1024, 256, 256, 64]] {
                        let kernel = Kernel::of(parts, rows, cols, outputs, H200, rows % 2 == 1);
                        let shared = dim(kernel.shared(parts, rows, cols.div_ceil(CHUNK)));
                        assert!(shared <= MAX_SHARED, "{kernel:?}, {cols} columns: {shared} bytes");
                        let [across, down] = kernel.blocks(rows, outputs);
                        let (each, high, threads) = match kernel {
                            Kernel::Few { warps, slices, .. } => (8 * slices, rows, warps * slices * 32),
                            Kernel::Some { warps, slices } => (16 * slices, TILE, warps * slices * 32),
                            Kernel::Many { outputs, rows, threads, .. } => (outputs, rows, threads as usize),
                        };
                        assert!(threads <= 512 && across * each >= outputs.iter().sum(), "{kernel:?}");
                        assert!(down * high >= rows && (down - 1) * high < rows, "{kernel:?}: {down} for {rows} rows");
                        assert!(BLOCK.is_multiple_of(high) || matches!(kernel, Kernel::Few { .. }), "{kernel:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_launch_is_chosen_by_how_often_weights_are_read_and_how_many_blocks_there_are() {
        let of = |rows, outputs: &[usize]| Kernel::of(2, rows, 4096, outputs, H200, false);
        let group = [1024, 1024, 256, 256, 64];
        let few = |warps, slices, held| Kernel::Few { warps, slices, held };
        assert_eq!([of(1, &[256]), of(4, &[256]), of(1, &group)], [few(16, 1, 1), few(8, 1, 2), few(8, 1, 2)]);
        assert_eq!([of(2, &group), of(4, &group), of(1, &[4096])], [few(8, 1, 1); 3]);
        assert_eq!(Kernel::of(2, 1, 4096, &[512, 512], H200, true), few(16, 1, 1));
        assert_eq!(Kernel::of(2, 1, 1024, &[8192], H200, false), few(4, 2, 1));
        assert_eq!(Kernel::of(2, 1, 16384, &[24], H200, false), few(16, 1, 1));
        assert_eq!([of(3, &[4096]), of(16, &[32768])], [Kernel::Some { warps: 8, slices: 1 }; 2]);
        assert_eq!([of(5, &[512, 512]), of(512, &[256])], [16, 8].map(|warps| Kernel::Some { warps, slices: 1 }));
        let size = |kernel| match kernel {
            Kernel::Many { rows, outputs, .. } => [rows, outputs],
            _ => [0; 2],
        };
        assert_eq!([size(of(512, &group)), size(of(2048, &group))], [[64, 64], [64, 128]]);
        assert_eq!([size(of(64, &group)), size(of(2048, &[256]))], [[0, 0], [32, 32]]);
    }

    #[test]
    fn only_whole_pieces_of_two_byte_types_have_these_kernels() {
        assert!(has_kernel(GgmlType::F16, 4096) && has_kernel(GgmlType::F16, 8) && has_kernel(GgmlType::BF16, 256));
        assert!(!has_kernel(GgmlType::F16, 12) && !has_kernel(GgmlType::BF16, 4) && !has_kernel(GgmlType::F32, 256));
    }
}
