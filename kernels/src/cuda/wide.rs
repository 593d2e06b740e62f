//! Launches of the products for prefill (wide.cu): up to 64 activation rows an item, one or two weights of one type and shape.

use ds4_manifests::GgmlType;

use super::device::CudaDevice;
use super::driver::vmm::DevicePtr;
use super::kernels::{File, dim, int};
use super::quantized::{ItemsArg, SUPERBLOCK, TILE, TiledArg};
use super::split::ActsArg;
use super::weight::CudaWeight;
use crate::kernel_args;

/// Activation rows of an item (`WIDE_ROWS` in wide.cuh).
pub(super) const ROWS: usize = 64;
/// Outputs of a block, its threads, and units whose rows it knows (`WARPS` and `PLACES` in wide.cu).
const OUTPUTS: usize = 16 * TILE;
const THREADS: u32 = 512;
const PLACES: usize = 4;

/// `Pair` in wide.cu.
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
kernel_args!(PairArg);

/// Bytes of shared memory of a type's kernel (`Shared` in wide.cu), of types that have one.
fn shared(ty: GgmlType) -> Option<usize> {
    // Two stages of rows with their scales and what a type wants beside them; four units and where their rows lie; barriers and
    // numbers; and tables.
    let of = |beside: usize, tables: usize| {
        Some(2 * (ROWS * (512 + 4) + beside) + PLACES * (ROWS * 8 + 16) + 4 * 8 + 8 + tables)
    };
    match ty {
        GgmlType::Q8_0 => of(16, 8),
        GgmlType::Q2_K | GgmlType::Q4_K => of(ROWS * 64, 8),
        GgmlType::IQ2_XXS => of(16, (256 + 128) * 16 * 4),
        _ => None,
    }
}

/// Whether weights of a type have these kernels.
pub(super) fn has(ty: GgmlType) -> bool {
    shared(ty).is_some()
}

/// Blocks' worth of work of `items` of matrices that have `outputs` rows together.
pub(super) fn units(items: usize, outputs: usize) -> usize {
    items * outputs.div_ceil(OUTPUTS)
}

/// `outᵢ = x · wᵢᵀ` for items of up to [`ROWS`] rows, of which there are at most `items_most`; `outputs` rows each matrix.
pub(super) fn product(
    d: &CudaDevice,
    w: &[&CudaWeight],
    x: &ActsArg,
    items: &ItemsArg,
    items_most: usize,
    outputs: usize,
    out: &[DevicePtr],
) {
    let Some(first) = w.first() else { return };
    let Some(shared) = shared(first.ty) else { panic!("{}: {} has no kernel for many rows", first.name, first.ty) };
    assert!(w.len() <= 2, "{}: {} weights", first.name, w.len());
    let mut pair = PairArg {
        w: [first.tiles(); 2],
        out: [0; 2],
        count: int(w.len()),
        outputs: int(outputs),
        superblocks: int(first.cols / SUPERBLOCK),
        pad: 0,
    };
    for (i, (w, o)) in w.iter().zip(out).enumerate() {
        let shape = |w: &CudaWeight| (w.ty, w.cols, w.rows);
        assert!(shape(w) == shape(first), "{}: no pair of {}", w.name, first.name);
        (pair.w[i], pair.out[i]) = (w.tiles(), *o);
    }
    let sms = usize::try_from(d.context().device().multiprocessors).unwrap_or(1);
    let grid = sms.min(units(items_most, outputs) * w.len());
    let name = format!("wide_{}", first.ty);
    d.launch(File::Wide, &name, [dim(grid), 1, 1], [THREADS, 1, 1], shared, &[&pair, x, items]);
}

#[cfg(test)]
mod tests {
    use super::super::driver::module::MAX_SHARED;
    use super::*;

    #[test]
    fn kernels_fit_shared_memory_of_every_device() {
        for ty in [GgmlType::Q8_0, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::IQ2_XXS] {
            let shared = shared(ty).expect("a kernel");
            assert!(dim(shared) <= MAX_SHARED && shared > 2 * ROWS * 512, "{ty}: {shared} bytes");
        }
        assert!(!has(GgmlType::F16));
    }

    #[test]
    fn units_are_of_256_outputs() {
        assert_eq!([units(1, 16), units(3, 256), units(3, 272)], [1, 3, 6]);
    }
}
