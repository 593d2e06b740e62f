//! Launches of the tensor-core products (quantized.cu): types that carry large models, repacked into tiles when they are bound.

use super::buffer::{CudaBuffer, Growable};
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::narrow::{self, Member};
use super::kernels::{File, dim, int};
use super::split::{ActsArg, order, quantize};
use super::weight::CudaWeight;
use crate::kernel_args;
use ds4_manifests::GgmlType;

/// Outputs of a tile, and columns of a superblock.
pub(super) const TILE: usize = 16;
pub(super) const SUPERBLOCK: usize = 256;
/// Bytes of one copy of the IQ2_XXS kernel's tables in shared memory (`Luts` in tiled.cuh).
const TABLES: usize = (256 + 128) * 8;

/// Rows from which on a product may take the wide kernel.
const WIDE_FROM: usize = 48;

/// The kernels of a product, which give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    /// For decoding: reads every weight once for 4 rows.
    Narrow,
    /// For 16 rows.
    Middle,
    /// For prefill: 64 rows whose activations are in shared memory.
    Wide,
}

impl Width {
    /// Activation rows per item.
    fn rows(self) -> usize {
        match self {
            Self::Narrow => 4,
            Self::Middle => 16,
            Self::Wide => 64,
        }
    }

    /// The kernel for `rows` rows of each of `matrices` matrices, of `outputs` rows altogether, on a device of so many multiprocessors.
    fn of_rows(shape: TileShape, rows: usize, matrices: usize, outputs: usize, multiprocessors: usize) -> Self {
        let wide_units = rows.div_ceil(64) * matrices * outputs.div_ceil(8 * TILE);
        match rows {
            ..=4 => Self::Narrow,
            // Where 64 rows a block leave most of the device idle, 16 are faster.
            WIDE_FROM.. if shape.wide.is_some() && 2 * wide_units >= multiprocessors => Self::Wide,
            _ => Self::Middle,
        }
    }

    /// The kernel for `assignments` of rows to `experts` of types `all`: the widest whose items are about half full.
    fn of_experts(all: &[GgmlType], assignments: usize, experts: usize) -> Self {
        let has_wide = || all.iter().all(|ty| tile_shape(*ty).is_some_and(|s| s.wide.is_some()));
        match assignments / experts {
            ..8 => Self::Narrow,
            // At 12 of 64 rows, the middle one is 1.2 times as fast.
            24.. if has_wide() => Self::Wide,
            _ => Self::Middle,
        }
    }
}

/// How products with a type's tiles are launched (`Tiled…` in tiled.cuh).
#[derive(Clone, Copy, Debug)]
pub(super) struct TileShape {
    /// Shared memory of the wide kernel (`Shared` in quantized.cu), of types that have one.
    wide: Option<usize>,
}

/// The shape for a type that has one; `crate::tiles` has its bytes.
pub(super) fn tile_shape(ty: GgmlType) -> Option<TileShape> {
    // Two stages of 64 rows with the sums that some types want, and where two items' rows lie; then sums of quarters or tables.
    let wide = |mins: usize, more: usize| Some(2 * (64 * (512 + 4) + mins + 64 * 8) + more);
    let wide = match ty {
        GgmlType::Q8_0 => wide(16, 8 * 4 * TILE * 64 + 16),
        GgmlType::Q2_K => wide(64 * 64, 32),
        GgmlType::Q4_K => None,
        GgmlType::IQ2_XXS => wide(16, 16 + 8 * TABLES),
        _ => return None,
    };
    Some(TileShape { wide })
}

/// `Tiled` in tiled.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TiledArg {
    pub(super) qs: u64,
    pub(super) side: u64,
    pub(super) side2: u64,
}

/// `Items` in quantized.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ItemsArg {
    list: u64,
    count: u64,
    order: u64,
    per_row: i32,
    matrices: i32,
    rows: i32,
    known: i32,
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
kernel_args!(TiledArg, ItemsArg, PairArg);

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
    width: Width,
    most: usize,
    /// Number of the launch that makes them.
    made: u64,
}

impl Listed {
    /// Room for lists of `assignments`, for products with weights of types `all`; the next launch makes them.
    pub(super) fn room(
        d: &CudaDevice,
        to: &mut Groups,
        all: &[GgmlType],
        assignments: usize,
        experts: usize,
    ) -> Self {
        let width = Width::of_experts(all, assignments, experts);
        let most = assignments.min(experts + assignments / width.rows());
        Self {
            list: to.list.at_least(d.context(), most.max(128) * 16),
            count: to.count.at_least(d.context(), 4),
            order: to.order.at_least(d.context(), assignments.max(128) * 4),
            width,
            most,
            made: d.launches() + 1,
        }
    }

    /// Where kernels write the items, their number and the order, and how many rows an item has.
    pub(super) fn parts(&self) -> (u64, u64, u64, i32) {
        (self.list, self.count, self.order, int(self.width.rows()))
    }

    /// Whether they are what [`Listed::room`] would have room for.
    pub(super) fn serves(&self, all: &[GgmlType], assignments: usize, experts: usize) -> bool {
        self.width == Width::of_experts(all, assignments, experts)
    }
}

/// Lists the `assignments` expert ids at `ids` by expert, for products with weights of types `all`.
pub(super) fn group(
    d: &CudaDevice,
    to: &mut Groups,
    all: &[GgmlType],
    ids: DevicePtr,
    assignments: usize,
    experts: usize,
) -> Listed {
    let listed = Listed::room(d, to, all, assignments, experts);
    let (list, count, order, rows) = listed.parts();
    let args = (int(assignments), int(experts));
    let all: [&dyn KernelArg; 7] = [&ids, &args.0, &args.1, &rows, &list, &count, &order];
    d.launch(File::Moe, "group_experts", [1, 1, 1], [1024, 1, 1], 0, &all);
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
    let sms = usize::try_from(d.context().device().multiprocessors).unwrap_or(1);
    let (items, most, width) = match rows {
        Rows::Strided { matrices, rows } => {
            let width = Width::of_rows(shape, rows, matrices, outputs * w.len(), sms);
            let most = rows.div_ceil(width.rows()) * matrices;
            (ItemsArg { matrices: int(matrices), rows: int(rows), ..ItemsArg::default() }, most, width)
        }
        Rows::Listed(l) => {
            // The launch before the one that is running when this one starts.
            let known = i32::from(l.made < d.launches());
            let (list, count, order, per_row) = (l.list, l.count, l.order, int(per_row));
            let items = ItemsArg { list, count, order, per_row, known, ..ItemsArg::default() };
            (items, l.most, l.width)
        }
    };
    if width != Width::Wide {
        let members: Vec<Member<'_>> =
            w.iter().zip(out).map(|(weight, out)| Member { weight, outputs, out: *out }).collect();
        return narrow::product(d, &members, x, &items, most, width == Width::Narrow);
    }
    let grid = sms.min(most * (outputs / TILE).div_ceil(8) * w.len());
    let name = format!("product_{}_16", first.ty);
    let shared = shape.wide.unwrap_or(usize::MAX);
    d.launch(File::Quantized, &name, [dim(grid), 1, 1], [256, 1, 1], shared, &[&pair, x, &items]);
}

/// `outᵢ = x · wᵢᵀ` for tiled weights that share their inputs; neighbours of one shape go into one launch.
pub(super) fn matmul(d: &CudaDevice, x: &CudaBuffer, group: &mut [(&CudaWeight, &mut CudaBuffer)]) {
    for part in group.chunk_by_mut(|a, b| order(a.0.ty) == order(b.0.ty)) {
        let acts = match x.split(order(part[0].0.ty)) {
            Some(acts) => acts,
            None => quantize(d, &mut d.scratch().activations, part[0].0, x.start(), x.rows()),
        };
        matmul_one_order(d, x, &acts, part);
    }
}

fn matmul_one_order(d: &CudaDevice, x: &CudaBuffer, acts: &ActsArg, group: &mut [(&CudaWeight, &mut CudaBuffer)]) {
    let rows = x.rows();
    group.iter_mut().for_each(|(_, out)| out.resize(rows));
    if rows < WIDE_FROM {
        let width = if rows <= Width::Narrow.rows() { Width::Narrow } else { Width::Middle };
        let items = ItemsArg { matrices: 1, rows: int(rows), ..ItemsArg::default() };
        for alike in group.chunk_by(|a, b| (a.0.ty, a.0.cols) == (b.0.ty, b.0.cols)) {
            for part in alike.chunks(narrow::MEMBERS) {
                let members: Vec<Member<'_>> =
                    part.iter().map(|(w, out)| Member { weight: w, outputs: w.rows, out: out.start() }).collect();
                narrow::product(d, &members, acts, &items, rows.div_ceil(width.rows()), width == Width::Narrow);
            }
        }
        return;
    }
    for alike in group.chunk_by(|a, b| (a.0.ty, a.0.rows, a.0.cols) == (b.0.ty, b.0.rows, b.0.cols)) {
        for part in alike.chunks(2) {
            let w: Vec<&CudaWeight> = part.iter().map(|(w, _)| *w).collect();
            let out: Vec<DevicePtr> = part.iter().map(|(_, out)| out.start()).collect();
            product(d, &w, acts, Rows::Strided { matrices: 1, rows }, 1, w[0].rows, &out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::module::MAX_SHARED;
    use super::*;

    const TYPES: [GgmlType; 4] = [GgmlType::Q8_0, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::IQ2_XXS];

    #[test]
    fn wide_products_fit_shared_memory_and_are_for_types_that_have_one() {
        for ty in TYPES {
            let shape = tile_shape(ty).expect("tiles");
            for (rows, matrices, outputs) in [(48, 1, 8448), (512, 1, 2048), (2048, 8, 1024), (100_000, 1, 129_280)] {
                let width = Width::of_rows(shape, rows, matrices, outputs, 132);
                assert_eq!(width == Width::Wide, ty != GgmlType::Q4_K, "{ty}: {rows} rows");
            }
            let shared = dim(shape.wide.unwrap_or(0));
            assert!(shared <= MAX_SHARED, "{ty}: {shared} bytes");
        }
    }

    #[test]
    fn few_rows_or_units_take_kernels_of_fewer_rows() {
        let shape = tile_shape(GgmlType::Q8_0).expect("tiles");
        let of = |rows: usize, outputs: usize| Width::of_rows(shape, rows, 1, outputs, 132);
        assert_eq!([of(4, 65536), of(5, 65536), of(47, 65536)], [Width::Narrow, Width::Middle, Width::Middle]);
        assert_eq!([of(64, 2048), of(64, 8320), of(64, 8448)], [Width::Middle, Width::Middle, Width::Wide]);
        let both = [GgmlType::IQ2_XXS, GgmlType::Q2_K];
        let experts = |types: &[GgmlType], rows: usize| Width::of_experts(types, rows * 6, 256);
        assert_eq!(
            [experts(&both, 64), experts(&both, 512), experts(&both, 2048)],
            [Width::Narrow, Width::Middle, Width::Wide]
        );
        assert_eq!(experts(&[GgmlType::Q4_K, GgmlType::Q2_K], 2048), Width::Middle);
    }
}
