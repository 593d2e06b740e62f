//! Launches of the products for decoding (narrow.cu): up to 16 activation rows an item, weights of one type and width that share
//! their inputs in one launch.

use ds4_manifests::GgmlType;

use super::device::CudaDevice;
use super::driver::vmm::DevicePtr;
use super::kernels::{File, dim, int};
use super::quantized::{ItemsArg, SUPERBLOCK, TILE, TiledArg};
use super::split::ActsArg;
use super::weight::CudaWeight;
use crate::kernel_args;
use crate::tiles;

/// Most weights in a launch (`MEMBERS` in narrow.cu).
pub(super) const MEMBERS: usize = 6;
/// Warps that share a tile, and units that a group of them finds at once (`SPLIT` and `PLANNED` in narrow.cu).
const SPLIT: usize = 4;
const PLANNED: usize = 16;
/// Bytes of IQ2_XXS's selectors in shared memory (`Selectors` in narrow.cu).
const SELECTORS: usize = 256 * 2 * 32 * 4;

/// `Members` in narrow.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MembersArg {
    w: [TiledArg; MEMBERS],
    out: [u64; MEMBERS],
    start: [i32; MEMBERS + 1],
    count: i32,
    superblocks: i32,
    pad: i32,
}
kernel_args!(MembersArg);

/// A weight of a launch, the rows of one of its matrices, and where its results go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member<'a> {
    pub(super) weight: &'a CudaWeight,
    pub(super) outputs: usize,
    pub(super) out: DevicePtr,
}

/// How a kernel is launched: `NARROW` in narrow.cu says the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// At the end of the kernel's name: four activation rows each.
    columns: usize,
    /// Superblocks that a warp has room for.
    stages: usize,
    /// Groups of four warps in a block, each of which computes a tile.
    groups: usize,
    /// As many blocks as a multiprocessor of sm_90 has room for, no fewer: where there was room for more, those of the next launch, started
    /// early, came to lie unevenly, and a Q2_K product took 88 µs instead of 73.
    blocks: usize,
    shared: usize,
}

impl Shape {
    /// For items of up to 4 rows (`few`), or of up to 16.
    fn of(ty: GgmlType, few: bool) -> Option<Self> {
        let columns = if few { 1 } else { 4 };
        let (stages, groups, blocks) = match (ty, few) {
            (GgmlType::Q8_0, true) => (3, 1, 4),
            (GgmlType::Q8_0, false) => (2, 1, 3),
            (GgmlType::Q2_K, true) => (4, 2, 2),
            (GgmlType::Q2_K, false) => (4, 1, 4),
            (GgmlType::Q4_K, true) => (3, 1, 4),
            (GgmlType::Q4_K, false) => (3, 1, 2),
            (GgmlType::IQ2_XXS, true) => (3, 2, 2),
            (GgmlType::IQ2_XXS, false) => (3, 1, 2),
            _ => return None,
        };
        let table = if ty == GgmlType::IQ2_XXS { SELECTORS } else { 0 };
        let slot = TILE * tiles::parts(ty)?.iter().sum::<usize>();
        let rows = 4 * columns;
        let units = PLANNED * (16 + 2 * 4 * rows);
        let sums = 2 * SPLIT * rows * TILE * 4;
        let shared = table + groups * (SPLIT * stages * slot + units + sums);
        Some(Self { columns, stages, groups, blocks, shared })
    }
}

/// `outᵢ = x · wᵢᵀ` for items of up to 4 rows (`few`) or 16, of which there are at most `items_most`. The members are of one type and width.
pub(super) fn product(
    d: &CudaDevice,
    members: &[Member<'_>],
    x: &ActsArg,
    items: &ItemsArg,
    items_most: usize,
    few: bool,
) {
    let Some(first) = members.first().map(|m| m.weight) else { return };
    let Some(shape) = Shape::of(first.ty, few) else { panic!("{}: {} has no tiles", first.name, first.ty) };
    assert!(members.len() <= MEMBERS, "{}: {} members", first.name, members.len());
    let mut arg =
        MembersArg { count: int(members.len()), superblocks: int(first.cols / SUPERBLOCK), ..MembersArg::default() };
    let mut tiles = 0;
    for (i, m) in members.iter().enumerate() {
        let w = m.weight;
        assert!(w.ty == first.ty && w.cols == first.cols, "{}: not of one launch with {}", w.name, first.name);
        assert!(
            m.outputs > 0 && m.outputs.is_multiple_of(TILE),
            "{}: matrices of {} rows are not whole tiles of {TILE}",
            w.name,
            m.outputs
        );
        (arg.w[i], arg.out[i], arg.start[i]) = (w.tiles(), m.out, int(tiles));
        tiles += m.outputs / TILE;
    }
    arg.start[members.len()..].fill(int(tiles));
    let sms = usize::try_from(d.context().device().multiprocessors).unwrap_or(1);
    let grid = (items_most * tiles).div_ceil(shape.groups).min(sms * shape.blocks);
    let name = format!("narrow_{}_{}", first.ty, shape.columns);
    let threads = dim(shape.groups * SPLIT * 32);
    d.launch(File::Narrow, &name, [dim(grid), 1, 1], [threads, 1, 1], shape.shared, &[&arg, x, items]);
}

#[cfg(test)]
mod tests {
    use super::super::driver::module::MAX_SHARED;
    use super::*;

    #[test]
    fn every_kernel_fits_shared_memory_and_copies_ahead_of_what_is_planned() {
        for ty in [GgmlType::Q8_0, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::IQ2_XXS] {
            for few in [true, false] {
                let shape = Shape::of(ty, few).expect("tiles");
                assert!(dim(shape.shared) <= MAX_SHARED, "{ty}: {shape:?}");
                // A warp whose quarter is one superblock copies as many units ahead as there are stages.
                assert!(shape.stages >= 2 && shape.stages < PLANNED / 2, "{ty}: {shape:?}");
            }
        }
        assert!(Shape::of(GgmlType::F16, true).is_none());
    }
}
