//! Products on tensor cores (narrow.cu, wide.cu): types that carry large models, repacked into tiles when they are bound.

use super::buffer::{CudaBuffer, Growable};
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::kernels::{File, int};
use super::narrow::{self, Member};
use super::split::{ActsArg, order, quantize};
use super::weight::CudaWeight;
use super::wide;
use crate::kernel_args;
use ds4_manifests::GgmlType;

/// Outputs of a tile, and columns of a superblock.
pub(super) const TILE: usize = 16;
pub(super) const SUPERBLOCK: usize = 256;
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
            Self::Wide => wide::ROWS,
        }
    }

    /// The kernel for `rows` rows of each of `matrices` matrices of type `ty`, of `outputs` rows altogether, on a device of so many
    /// multiprocessors.
    fn of_rows(ty: GgmlType, rows: usize, matrices: usize, outputs: usize, multiprocessors: usize) -> Self {
        let wide_units = wide::units(rows.div_ceil(wide::ROWS) * matrices, outputs);
        match rows {
            ..=4 => Self::Narrow,
            // Where 64 rows a block leave most of the device idle, 16 are faster.
            WIDE_FROM.. if wide::has(ty) && 2 * wide_units >= multiprocessors => Self::Wide,
            _ => Self::Middle,
        }
    }

    /// The kernel for `assignments` of rows to `experts` of types `all`.
    fn of_experts(all: &[GgmlType], assignments: usize, experts: usize) -> Self {
        match assignments / experts {
            ..8 => Self::Narrow,
            // At 8 rows each it takes 1.65 ms for the large shape, the middle one 1.83; at 48, 3.5 and 6.6.
            _ if all.iter().all(|ty| wide::has(*ty)) => Self::Wide,
            _ => Self::Middle,
        }
    }
}

/// `Tiled` in tiled.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TiledArg {
    pub(super) qs: u64,
    pub(super) side: u64,
    pub(super) side2: u64,
}

/// `Items` in tiled.cuh.
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

kernel_args!(TiledArg, ItemsArg);

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
    pub(super) fn room(d: &CudaDevice, to: &mut Groups, all: &[GgmlType], assignments: usize, experts: usize) -> Self {
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
    assert!(outputs.is_multiple_of(TILE), "{}: matrices of {outputs} rows are not whole tiles of {TILE}", first.name);
    let sms = usize::try_from(d.context().device().multiprocessors).unwrap_or(1);
    let (items, most, width, item_rows) = match rows {
        Rows::Strided { matrices, rows } => {
            let width = Width::of_rows(first.ty, rows, matrices, outputs * w.len(), sms);
            let each = if width == Width::Wide { width.rows() } else { narrow::item_rows(first.ty, rows) };
            let items = ItemsArg { matrices: int(matrices), rows: int(rows), ..ItemsArg::default() };
            (items, rows.div_ceil(each) * matrices, width, each)
        }
        Rows::Listed(l) => {
            // Made before the launch before the previous one: that has ended when this one starts (see `let_next_in` in common.cuh).
            let known = i32::from(l.made + 1 < d.launches());
            let (list, count, order, per_row) = (l.list, l.count, l.order, int(per_row));
            let items = ItemsArg { list, count, order, per_row, known, ..ItemsArg::default() };
            (items, l.most, l.width, l.width.rows())
        }
    };
    if width != Width::Wide {
        let members: Vec<Member<'_>> =
            w.iter().zip(out).map(|(weight, out)| Member { weight, outputs, out: *out }).collect();
        return narrow::product(d, &members, x, &items, most, item_rows);
    }
    wide::product(d, w, x, &items, most, outputs, out);
}

/// `outᵢ = x · wᵢᵀ` for tiled weights that share their inputs; neighbours of one shape go into one launch. `room` is for the inputs as
/// [`quantize`] splits them.
pub(super) fn matmul(d: &CudaDevice, x: &CudaBuffer, group: &mut [(&CudaWeight, &mut CudaBuffer)], room: DevicePtr) {
    for part in group.chunk_by_mut(|a, b| order(a.0.ty) == order(b.0.ty)) {
        let acts = match x.split(order(part[0].0.ty)) {
            Some(acts) => acts,
            None => quantize(d, room, part[0].0, x.start(), x.rows()),
        };
        matmul_one_order(d, x, &acts, part);
    }
}

fn matmul_one_order(d: &CudaDevice, x: &CudaBuffer, acts: &ActsArg, group: &mut [(&CudaWeight, &mut CudaBuffer)]) {
    let rows = x.rows();
    group.iter_mut().for_each(|(_, out)| out.resize(rows));
    if rows < WIDE_FROM {
        let items = ItemsArg { matrices: 1, rows: int(rows), ..ItemsArg::default() };
        for alike in group.chunk_by(|a, b| (a.0.ty, a.0.cols) == (b.0.ty, b.0.cols)) {
            for part in alike.chunks(narrow::MEMBERS) {
                let members: Vec<Member<'_>> =
                    part.iter().map(|(w, out)| Member { weight: w, outputs: w.rows, out: out.start() }).collect();
                let each = narrow::item_rows(part[0].0.ty, rows);
                narrow::product(d, &members, acts, &items, rows.div_ceil(each), each);
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
    use super::*;

    const TYPES: [GgmlType; 4] = [GgmlType::Q8_0, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::IQ2_XXS];

    #[test]
    fn products_of_many_rows_are_wide() {
        for ty in TYPES {
            for (rows, matrices, outputs) in [(48, 1, 16_896), (512, 1, 4096), (2048, 8, 1024), (100_000, 1, 129_280)] {
                let width = Width::of_rows(ty, rows, matrices, outputs, 132);
                assert_eq!(width, Width::Wide, "{ty}: {rows} rows");
            }
        }
    }

    #[test]
    fn few_rows_or_units_take_kernels_of_fewer_rows() {
        let of = |rows: usize, outputs: usize| Width::of_rows(GgmlType::Q8_0, rows, 1, outputs, 132);
        assert_eq!([of(4, 65536), of(5, 65536), of(47, 65536)], [Width::Narrow, Width::Middle, Width::Middle]);
        assert_eq!([of(64, 4096), of(64, 16_640), of(64, 16_896)], [Width::Middle, Width::Middle, Width::Wide]);
        let both = [GgmlType::IQ2_XXS, GgmlType::Q2_K];
        let experts = |types: &[GgmlType], rows: usize| Width::of_experts(types, rows * 6, 256);
        assert_eq!(
            [experts(&both, 64), experts(&both, 300), experts(&both, 352), experts(&both, 2048)],
            [Width::Narrow, Width::Narrow, Width::Wide, Width::Wide]
        );
        assert_eq!(experts(&[GgmlType::Q4_K, GgmlType::F16], 2048), Width::Middle);
    }
}
