//! Writes the planned file: many threads, each reading, encoding and writing its own pieces, so that memory holds a piece a
//! thread and never a tensor.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context as _, anyhow};
use ds4_manifests::{GgmlType, GgufPlan};
use indicatif::ProgressBar;

use super::checkpoint::Checkpoint;
use super::encode;
use super::names::{Planned, Segment};

/// Elements of a piece, about: what is read for one is 1 MiB at most.
const PIECE: u64 = 1 << 18;

/// A tensor and the type that it is written in.
pub struct Typed {
    pub planned: Planned,
    pub ty: GgmlType,
    /// Importance of each input channel of each slab: `slabs · shape[0]` or `shape[0]` values.
    pub importance: Option<Vec<f32>>,
}

/// A run of whole rows of one segment.
struct Piece<'a> {
    tensor: &'a Typed,
    segment: &'a Segment,
    /// Number of the segment: the expert, for stacked tensors.
    slab: usize,
    /// Number of its first element in the segment.
    first: u64,
    elements: u64,
    /// Where it goes.
    offset: u64,
}

fn pieces<'a>(tensors: &'a [Typed], plan: &GgufPlan) -> anyhow::Result<Vec<Piece<'a>>> {
    let mut out = Vec::new();
    for (tensor, (start, _)) in tensors.iter().zip(&plan.tensors) {
        let row = tensor.planned.shape[0];
        let step = (PIECE / row).max(1) * row;
        let mut offset = *start;
        for (slab, segment) in tensor.planned.segments.iter().enumerate() {
            let mut first = 0;
            while first < segment.elements {
                let elements = step.min(segment.elements - first);
                out.push(Piece { tensor, segment, slab, first, elements, offset });
                offset += tensor.ty.row_bytes(elements).context("rows are whole blocks")?;
                first += elements;
            }
        }
    }
    Ok(out)
}

/// What a thread keeps between pieces.
#[derive(Default)]
struct Buffers {
    read: Vec<u8>,
    values: Vec<f32>,
    importance: Vec<f32>,
}

impl Piece<'_> {
    fn encode(&self, checkpoint: &Checkpoint, experts: u64, b: &mut Buffers) -> anyhow::Result<Vec<u8>> {
        let segment = self.segment;
        let bits = segment.form.bits();
        let at = segment.offset + self.first * bits / 8;
        read(checkpoint, segment.source, (at, self.elements * bits / 8), &mut b.read)?;
        let name = &self.tensor.planned.name;
        if self.tensor.ty == GgmlType::I32 {
            return encode::table((segment, self.first), &b.read, experts);
        }
        encode::widen(segment.form, &b.read, &mut b.values);
        if let Some(scales) = &segment.scales {
            let row = self.tensor.planned.shape[0];
            let (first, end) = (self.first / row, (self.first + self.elements) / row);
            let (from, to) = (first / scales.block[0], (end - 1) / scales.block[0] + 1);
            let line = scales.grid[1] * if scales.wide { 4 } else { 1 };
            read(checkpoint, scales.source, (scales.offset + from * line, (to - from) * line), &mut b.read)?;
            encode::scale(scales, &b.read, (first, usize::try_from(row)?), &mut b.values)?;
        }
        let importance = match &self.tensor.importance {
            None => None,
            Some(all) => {
                let row = usize::try_from(self.tensor.planned.shape[0])?;
                // One row of importance serves all slabs, or each has its own.
                let own = if all.len() == row { all } else { &all[self.slab * row..(self.slab + 1) * row] };
                b.importance.clear();
                (0..b.values.len() / row).for_each(|_| b.importance.extend_from_slice(own));
                Some(&b.importance[..])
            }
        };
        encode::weights(self.tensor.ty, (name, segment, self.first), &b.values, importance)
    }
}

fn read(checkpoint: &Checkpoint, source: usize, (offset, len): (u64, u64), out: &mut Vec<u8>) -> anyhow::Result<()> {
    out.resize(usize::try_from(len)?, 0);
    let path = &checkpoint.sources[source].path;
    checkpoint.read(source, offset, out).with_context(|| format!("cannot read {}", path.display()))
}

/// Fills `file`.
pub fn write(
    file: &File,
    plan: &GgufPlan,
    tensors: &[Typed],
    (checkpoint, experts): (&Checkpoint, u64),
    threads: usize,
    bar: &ProgressBar,
) -> anyhow::Result<()> {
    file.set_len(plan.file_len)?;
    file.write_all_at(&plan.header, 0)?;
    let pieces = pieces(tensors, plan)?;
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let one = |piece: &Piece<'_>, buffers: &mut Buffers| -> anyhow::Result<()> {
        let bytes = piece.encode(checkpoint, experts, buffers)?;
        file.write_all_at(&bytes, piece.offset).context("cannot write; is there room?")?;
        bar.inc(u64::try_from(bytes.len())?);
        Ok(())
    };
    let work = || -> anyhow::Result<()> {
        let mut buffers = Buffers::default();
        while !failed.load(Ordering::Relaxed) {
            let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            one(piece, &mut buffers).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err(anyhow!("a converting thread panicked"))))
    })
}
