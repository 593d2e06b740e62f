//! Launches of the tensor-core products (quantized.cu): types that carry large models, repacked into tiles when they are bound.

use super::buffer::{CudaBuffer, Growable};
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::kernels::{File, dim, int, long};
use super::weight::CudaWeight;
use crate::kernel_args;
use ds4_manifests::GgmlType;

/// Outputs of a tile, and columns of a superblock.
pub(super) const TILE: usize = 16;
pub(super) const SUPERBLOCK: usize = 256;
/// Activation rows per item of the narrow and of the wide kernel.
const NARROW: usize = 4;
const WIDE: usize = 16;
/// The IQ2_XXS kernel's tables in shared memory (`Luts` in tiled.cuh).
const LUTS: usize = (256 + 128) * 16 * 8;

/// How products with a type's tiles are launched (`Tiled…` in tiled.cuh).
#[derive(Clone, Copy, Debug)]
pub(super) struct TileShape {
    /// Blocks of the narrow kernel per multiprocessor.
    blocks: usize,
    luts: bool,
}

/// The shape for a type that has one; `crate::tiles` has its bytes.
pub(super) fn tile_shape(ty: GgmlType) -> Option<TileShape> {
    let (blocks, luts) = match ty {
        GgmlType::Q8_0 => (2, false),
        GgmlType::Q2_K => (2, false),
        GgmlType::Q4_K => (3, false),
        GgmlType::IQ2_XXS => (2, true),
        _ => return None,
    };
    Some(TileShape { blocks, luts })
}

/// `Tiled` in tiled.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TiledArg {
    pub(super) qs: u64,
    pub(super) side: u64,
    pub(super) side2: u64,
}

/// `Acts` in tiled.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct ActsArg {
    q: u64,
    m: u64,
    sums: u64,
    scale: u64,
}

/// `Items` in quantized.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct ItemsArg {
    list: u64,
    count: u64,
    order: u64,
    per_row: i32,
    matrices: i32,
    rows: i32,
    pad: i32,
}

/// `Pair` in quantized.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PairArg {
    w: [TiledArg; 2],
    out: [u64; 2],
    count: i32,
    outputs: i32,
    superblocks: i32,
    pad: i32,
}
kernel_args!(TiledArg, ActsArg, ItemsArg, PairArg);

/// Device memory for split activations.
#[derive(Debug, Default)]
pub(super) struct Activations {
    q: Growable,
    m: Growable,
    sums: Growable,
    scale: Growable,
}

/// Lists of assignments by expert.
#[derive(Debug, Default)]
pub(super) struct Groups {
    list: Growable,
    count: Growable,
    order: Growable,
}

/// Which activation rows meet which matrices.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rows {
    /// Row `r * matrices + k` of the inputs and of the outputs belongs to matrix `k`, for `rows` rows `r`.
    Strided { matrices: usize, rows: usize },
    /// As [`group`] listed them.
    Listed(Listed),
}

/// Assignments by expert.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listed {
    list: u64,
    count: u64,
    order: u64,
    wide: bool,
    most: usize,
}

/// The order in which a type's kernel takes activations (`Order` in tiled.cuh).
fn order(ty: GgmlType) -> i32 {
    i32::from(ty == GgmlType::Q2_K)
}

/// Splits `rows` rows of floats at `x` into 16-bit activations for products with `w`, and with other weights of as many columns whose
/// type takes them in the same order.
pub(super) fn quantize(d: &CudaDevice, to: &mut Activations, w: &CudaWeight, x: DevicePtr, rows: usize) -> ActsArg {
    let superblocks = w.cols / SUPERBLOCK;
    let total = rows * superblocks;
    let room = rows.max(16) * superblocks;
    let at = |g: &mut Growable, bytes: usize| g.at_least(d.context(), room * bytes);
    let acts = ActsArg {
        q: at(&mut to.q, 512),
        m: at(&mut to.m, 64),
        sums: at(&mut to.sums, 32),
        scale: at(&mut to.scale, 4),
    };
    let args = (order(w.ty), long(total));
    let all: [&dyn KernelArg; 7] = [&x, &args.0, &args.1, &acts.q, &acts.m, &acts.sums, &acts.scale];
    d.launch(File::Quantized, "quantize_rows", [dim(total.div_ceil(8)), 1, 1], [256, 1, 1], 0, &all);
    acts
}

/// Lists the `assignments` expert ids at `ids` by expert.
pub(super) fn group(d: &CudaDevice, to: &mut Groups, ids: DevicePtr, assignments: usize, experts: usize) -> Listed {
    // Enough rows per expert to fill the wide kernel's items by half.
    let wide = assignments >= experts * WIDE / 2;
    let rows = if wide { WIDE } else { NARROW };
    let most = assignments.min(experts + assignments / rows);
    let listed = Listed {
        list: to.list.at_least(d.context(), most.max(128) * 16),
        count: to.count.at_least(d.context(), 4),
        order: to.order.at_least(d.context(), assignments.max(128) * 4),
        wide,
        most,
    };
    let args = (int(assignments), int(experts), int(rows));
    let all: [&dyn KernelArg; 7] = [&ids, &args.0, &args.1, &args.2, &listed.list, &listed.count, &listed.order];
    d.launch(File::Quantized, "group_experts", [1, 1, 1], [1024, 1, 1], 0, &all);
    listed
}

/// `out = x · wᵀ` for one or two weights of one type and shape; `outputs` rows each matrix. `per_row`: outputs of a listed row share
/// input row `output / per_row`.
pub(super) fn product(
    d: &CudaDevice,
    w: &[&CudaWeight],
    x: &ActsArg,
    rows: Rows,
    per_row: usize,
    outputs: usize,
    out: &[DevicePtr],
) {
    let Some(first) = w.first() else { return };
    let Some(shape) = tile_shape(first.ty) else { panic!("{}: {} has no tiles", first.name, first.ty) };
    assert!(outputs.is_multiple_of(TILE), "{}: matrices of {outputs} rows are not whole tiles of {TILE}", first.name);
    let mut pair = PairArg {
        w: [first.tiles(); 2],
        out: [0; 2],
        count: int(w.len()),
        outputs: int(outputs),
        superblocks: int(first.cols / SUPERBLOCK),
        pad: 0,
    };
    for (i, (w, o)) in w.iter().zip(out).enumerate() {
        assert!(
            w.ty == first.ty && w.cols == first.cols && w.rows == first.rows,
            "{}: no pair of {}",
            w.name,
            first.name
        );
        (pair.w[i], pair.out[i]) = (w.tiles(), *o);
    }
    let (items, most, wide) = match rows {
        Rows::Strided { matrices, rows } => {
            let wide = rows > NARROW;
            let most = rows.div_ceil(if wide { WIDE } else { NARROW }) * matrices;
            (ItemsArg { matrices: int(matrices), rows: int(rows), ..ItemsArg::default() }, most, wide)
        }
        Rows::Listed(l) => {
            let items =
                ItemsArg { list: l.list, count: l.count, order: l.order, per_row: int(per_row), ..ItemsArg::default() };
            (items, l.most, l.wide)
        }
    };
    let units = most * (outputs / TILE) * w.len();
    let sms = usize::try_from(d.context().device().multiprocessors).unwrap_or(1);
    let (n, tiles_at_once, blocks, threads, parts) =
        if wide { (4, 1, 3, 128, 4 * TILE * WIDE * 4) } else { (1, 2, shape.blocks, 256, 2 * 4 * TILE * NARROW * 4) };
    let grid = units.div_ceil(tiles_at_once).min(sms * blocks);
    let shared = parts + if shape.luts { LUTS } else { 0 };
    let name = format!("product_{}_{n}", first.ty);
    d.launch(File::Quantized, &name, [dim(grid), 1, 1], [threads, 1, 1], shared, &[&pair, x, &items]);
}

/// `outᵢ = x · wᵢᵀ` for tiled weights that share their inputs; neighbours of one shape go into one launch.
pub(super) fn matmul(d: &CudaDevice, x: &CudaBuffer, group: &mut [(&CudaWeight, &mut CudaBuffer)]) {
    for part in group.chunk_by_mut(|a, b| order(a.0.ty) == order(b.0.ty)) {
        let acts = quantize(d, &mut d.scratch().activations, part[0].0, x.start(), x.rows());
        matmul_one_order(d, x, &acts, part);
    }
}

fn matmul_one_order(d: &CudaDevice, x: &CudaBuffer, acts: &ActsArg, group: &mut [(&CudaWeight, &mut CudaBuffer)]) {
    let rows = Rows::Strided { matrices: 1, rows: x.rows() };
    let mut at = 0;
    while at < group.len() {
        let shape = |i: usize| group.get(i).map(|(w, _)| (w.ty, w.rows, w.cols));
        let n = if shape(at) == shape(at + 1) { 2 } else { 1 };
        let part = &mut group[at..at + n];
        let out: Vec<DevicePtr> = part
            .iter_mut()
            .map(|(_, out)| {
                out.resize(x.rows());
                out.start()
            })
            .collect();
        let w: Vec<&CudaWeight> = part.iter().map(|(w, _)| *w).collect();
        product(d, &w, acts, rows, 1, w[0].rows, &out);
        at += n;
    }
}
