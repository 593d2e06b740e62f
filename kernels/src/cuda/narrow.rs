//! Launches of the products for decoding (narrow.cu, few.cu): up to 16 activation rows an item, weights of one type and width that share
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

/// Most weights in a launch (`MEMBERS` in units.cuh).
pub(super) const MEMBERS: usize = 6;
/// Warps that share a tile, and units that a group of them finds at once (`SPLIT` in tiled.cuh and `PLANNED` in units.cuh).
const SPLIT: usize = 4;
const PLANNED: usize = 16;
/// Bytes of IQ2_XXS's selectors in shared memory (`Selectors` in narrow.cuh).
const SELECTORS: usize = 256 * 2 * 32 * 4;
/// Rows of an item of few.cu, superblocks of its rows, warps of a block and the bytes of shared memory that it wants.
const FEW_ROWS: usize = 4;
const FEW_SUPERBLOCKS: usize = 16;
const FEW_WARPS: usize = 16;
const FEW_SHARED: usize = SELECTORS + FEW_WARPS * (PLANNED * unit(FEW_ROWS) + 4);

/// Bytes of `Unit` in units.cuh.
const fn unit(rows: usize) -> usize {
    16 + 2 * 4 * rows
}

/// `Members` in units.cuh.
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
    /// Fours of activation rows that a warp computes.
    columns: usize,
    /// Warps that share a quarter of a tile, each with its rows.
    shares: usize,
    /// Tiles of a unit.
    tiles: usize,
    /// Superblocks that a warp has room for.
    stages: usize,
    /// Groups of warps in a block, each of which computes a tile.
    groups: usize,
    /// As many blocks as a multiprocessor of sm_90 has room for (in registers or shared memory), no fewer: where there was room for
    /// more, those of the next launch, started early, came to lie unevenly, and a Q2_K product took 88 µs instead of 73.
    blocks: usize,
    shared: usize,
}

impl Shape {
    /// For items of up to `rows` rows (4, 8 or 16) and units of `tiles` tiles (1 or 2), where a type has such a kernel.
    fn of(ty: GgmlType, rows: usize, tiles: usize) -> Option<Self> {
        let (columns, shares, stages, groups, blocks) = match (ty, rows, tiles) {
            (GgmlType::Q8_0, 4, 1) => (1, 1, 3, 1, 4),
            (GgmlType::Q8_0, 8, 1) => (1, 2, 2, 1, 2),
            (GgmlType::Q8_0, 16, _) => (2, 2, 2, 1, 2),
            (GgmlType::Q2_K, 4, _) => (1, 1, 4, 2, 2),
            (GgmlType::Q2_K, 16, 1) => (4, 1, 4, 1, 4),
            (GgmlType::Q4_K, 4, 1) => (1, 1, 3, 1, 4),
            (GgmlType::Q4_K, 16, 1) => (4, 1, 3, 1, 2),
            (GgmlType::IQ2_XXS, 4, 1) => (1, 1, 3, 2, 2),
            (GgmlType::IQ2_XXS, 16, 1) => (4, 1, 3, 1, 2),
            _ => return None,
        };
        let table = if ty == GgmlType::IQ2_XXS { SELECTORS } else { 0 };
        let slot = TILE * tiles::parts(ty)?.iter().sum::<usize>();
        let units = PLANNED * unit(rows);
        let sums = 2 * SPLIT * rows * tiles * TILE * 4;
        let shared = table + groups * (SPLIT * stages * slot + units + sums);
        Some(Self { columns, shares, tiles, stages, groups, blocks, shared })
    }

    /// Blocks that a multiprocessor holds at once, whose largest block may have `room` bytes of shared memory; the driver keeps 1 KiB of
    /// a multiprocessor's for each block.
    fn resident(&self, room: usize) -> usize {
        ((room + 1024) / (self.shared + 1024)).clamp(1, self.blocks)
    }
}

/// Rows of an item where a product has `rows` of them.
pub(super) fn item_rows(ty: GgmlType, rows: usize) -> usize {
    match rows {
        ..=4 => 4,
        ..=8 if ty == GgmlType::Q8_0 => 8,
        _ => 16,
    }
}

/// `outᵢ = x · wᵢᵀ` for items of up to `rows` rows (4, 16 or what [`item_rows`] says), of which there are at most `items_most`. The members
/// are of one type and width.
pub(super) fn product(
    d: &CudaDevice,
    members: &[Member<'_>],
    x: &ActsArg,
    items: &ItemsArg,
    items_most: usize,
    rows: usize,
) {
    let Some(first) = members.first().map(|m| m.weight) else { return };
    assert!(members.len() <= MEMBERS, "{}: {} members", first.name, members.len());
    let superblocks = first.cols / SUPERBLOCK;
    let mut arg = MembersArg { count: int(members.len()), superblocks: int(superblocks), ..MembersArg::default() };
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
    let device = d.context().device();
    let of = |n: u32| usize::try_from(n).unwrap_or(1);
    let (sms, room) = (of(device.multiprocessors), of(device.shared_bytes));
    if first.ty == GgmlType::IQ2_XXS && rows == FEW_ROWS && superblocks == FEW_SUPERBLOCKS {
        let (grid, threads) = ((items_most * tiles).min(sms), 32 * FEW_WARPS);
        let grid = [dim(grid), 1, 1];
        d.launch(File::Few, "few_IQ2_XXS", grid, [dim(threads), 1, 1], FEW_SHARED, &[&arg, x, items]);
        return;
    }
    let even = members.iter().all(|m| (m.outputs / TILE).is_multiple_of(2));
    let single = Shape::of(first.ty, rows, 1);
    let pairs = Shape::of(first.ty, rows, 2).filter(|_| even);
    let rounds = |s: &Shape| (items_most * tiles).div_ceil(s.tiles * s.groups * s.resident(room) * sms);
    let shape = match (single, pairs) {
        // Two tiles at once take about 1.8 times as long as one.
        (Some(one), Some(two)) if 18 * rounds(&two) <= 10 * rounds(&one) => two,
        (Some(one), _) => one,
        _ => panic!("{}: no kernel for {rows} rows of {}", first.name, first.ty),
    };
    let grid = (items_most * tiles / shape.tiles).div_ceil(shape.groups).min(sms * shape.resident(room));
    let name = format!("narrow_{}_{}_{}_{}", first.ty, shape.columns, shape.shares, shape.tiles);
    let threads = dim(shape.groups * shape.shares * SPLIT * 32);
    d.launch(File::Narrow, &name, [dim(grid), 1, 1], [threads, 1, 1], shape.shared, &[&arg, x, items]);
}

#[cfg(test)]
mod tests {
    use super::super::driver::module::MAX_SHARED;
    use super::*;

    #[test]
    fn every_kernel_fits_shared_memory_and_copies_ahead_of_what_is_planned() {
        for ty in [GgmlType::Q8_0, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::IQ2_XXS] {
            for rows in [4, item_rows(ty, 7), 16] {
                assert!(Shape::of(ty, rows, 1).is_some(), "{ty}: {rows} rows");
                for shape in [1, 2].into_iter().filter_map(|tiles| Shape::of(ty, rows, tiles)) {
                    assert!(4 * shape.columns * shape.shares == rows, "{ty}: {shape:?}");
                    assert!(dim(shape.shared) <= MAX_SHARED, "{ty}: {shape:?}");
                    // sm_90 has 227 KiB for a block, sm_121 has 99.
                    assert_eq!(shape.resident(227 << 10), shape.blocks, "{ty}: {shape:?}");
                    assert!((1..=shape.blocks).contains(&shape.resident(99 << 10)), "{ty}: {shape:?}");
                    // A warp whose quarter is one superblock copies as many units ahead as there are stages.
                    assert!(shape.stages >= 2 && shape.stages < PLANNED / 2, "{ty}: {shape:?}");
                }
            }
        }
        // As in narrow.cu.
        let bytes = [
            (GgmlType::Q8_0, 4, 1, 55040),
            (GgmlType::Q8_0, 8, 1, 40192),
            (GgmlType::Q8_0, 16, 1, 45312),
            (GgmlType::Q8_0, 16, 2, 53504),
            (GgmlType::Q2_K, 4, 1, 48640),
            (GgmlType::Q2_K, 4, 2, 52736),
            (GgmlType::Q2_K, 16, 1, 32000),
            (GgmlType::Q4_K, 4, 1, 30464),
            (GgmlType::Q4_K, 16, 1, 38144),
            (GgmlType::IQ2_XXS, 4, 1, 96512),
            (GgmlType::IQ2_XXS, 16, 1, 88704),
        ];
        for (ty, rows, tiles, bytes) in bytes {
            assert_eq!(Shape::of(ty, rows, tiles).map(|s| s.shared), Some(bytes), "{ty}: {rows} rows, {tiles} tiles");
        }
        assert!(Shape::of(GgmlType::F16, 4, 1).is_none());
        assert_eq!(FEW_SHARED, 77888, "as in few.cu");
        assert!(dim(FEW_SHARED) <= MAX_SHARED);
    }
}
