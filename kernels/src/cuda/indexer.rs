//! Launches of the lightning indexer's kernels.

use super::buffer::{CudaBuffer, Growable};
use super::dense::{BLOCK, per_lane, rows_of};
use super::device::CudaDevice;
use super::driver::KernelArg;
use super::fatal::OrFatal;
use super::kernels::{File, dim, int};
use super::step::CudaStep;
use crate::ops::Indexer;

/// Indexer keys per block (index_scores in indexer.cu).
const INDEX_KEYS: usize = 64;

/// Per row: the selected compressed rows, in device memory.
#[derive(Debug, Default)]
pub struct CudaSelection {
    pub(super) top_k: usize,
    pub(super) rows: usize,
    pub(super) selected: Growable,
    pub(super) counts: Growable,
}

impl CudaSelection {
    /// What was selected, per row: `None` for all visible rows, or the selected ones in ascending order. For tests and debugging:
    /// waits for the device.
    pub fn download(&self, d: &CudaDevice) -> Vec<Option<Vec<usize>>> {
        let read = |from: u64, n: usize| -> Vec<i32> {
            let mut bytes = vec![0u8; 4 * n];
            #[allow(unsafe_code, reason = "a copy from the device")]
            // SAFETY: as many were allocated by `index_select`.
            unsafe { d.stream().download(from, &mut bytes) }.or_fatal("reading a selection");
            bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
        };
        let (selected, counts) =
            (read(self.selected.start(), self.rows * self.top_k), read(self.counts.start(), self.rows));
        let rows = counts.iter().enumerate();
        rows.map(|(r, count)| {
            let count = usize::try_from(*count).ok()?;
            Some(
                selected[r * self.top_k..][..count].iter().map(|k| usize::try_from(*k).unwrap_or(usize::MAX)).collect(),
            )
        })
        .collect()
    }
}

/// See [`crate::ops::SparseOps::index_select`].
pub(super) fn index_select(
    d: &CudaDevice,
    step: &CudaStep,
    p: &Indexer,
    q: &CudaBuffer,
    w: &CudaBuffer,
    out: &mut CudaSelection,
) {
    rows_of(step, q);
    assert!(q.width() == p.heads * p.head_dim && w.width() == p.heads, "indexer shape");
    let rows = step.rows;
    (out.rows, out.top_k) = (rows, p.top_k);
    let selected = out.selected.at_least(d.context(), rows.max(16) * p.top_k * 4);
    let counts = out.counts.at_least(d.context(), rows.max(16) * 4);
    if rows == 0 {
        return;
    }
    let visible = step.deepest / p.ratio;
    let mut scores = 0;
    // Whole blocks of keys: the stride need not change with every token.
    let stride = visible.next_multiple_of(INDEX_KEYS);
    let (top_k, ratio, n) = (int(p.top_k), int(p.ratio), int(stride));
    if visible > p.top_k {
        scores = d.scratch().scores.at_least(d.context(), rows * stride * 4);
        let slot = step.layout().slot(p.rows_slot);
        let args = (int(p.heads), int(p.head_dim), q.start(), w.start());
        let all: [&dyn KernelArg; 11] =
            [&step.arg, &slot, &args.0, &args.1, &top_k, &ratio, &p.scale, &args.2, &args.3, &n, &scores];
        let name = format!("index_scores_{}", per_lane(p.head_dim, 8));
        let grid = [dim(stride / INDEX_KEYS), dim(rows), 1];
        d.launch(File::Indexer, &name, grid, BLOCK, p.heads * p.head_dim * 4, &all);
    }
    let all: [&dyn KernelArg; 7] = [&step.arg, &top_k, &ratio, &scores, &n, &selected, &counts];
    d.launch(File::Indexer, "index_top", [dim(rows), 1, 1], [512, 1, 1], 0, &all);
}
