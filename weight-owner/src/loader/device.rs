//! Filling a CUDA device: files → page-locked buffers → hash → asynchronous copies.
//!
//! Each thread takes 64 MiB of a chunk at a time and has a ring of buffers and a stream of its own, so that as many
//! reads are in flight as there are threads, and a copy runs while the next piece is read and hashed. Every byte passes
//! the CPU's cache once between its read and its copy, which is where it is hashed; there is no second copy in the
//! machine's memory and the page cache does not grow. The descriptors of the memory are made as it is allocated; they
//! keep it when this process has gone.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use blake3::hazmat::ChainingValue;
use ds4_kernels::cuda::driver::{Access, Context, CudaError, Physical, Pinned, Space, Staging};
use ds4_manifests::Chunk;
use ds4_os::seqpacket::Connection;

use super::source::{BLOCK, Source};
use super::{
    Counters, Done, Prepared, Segment, Stop, add, collect, open_shards, read_failure, segments, send, send_stage, tree,
};
use crate::Failure;
use crate::report::{Report, bytes};

/// Bytes of one copy. With 256 KiB the driver's own work per copy was what a load waited for (H200, 16 cores: 3.3 s for
/// 80.8 GiB instead of 2.4 s).
const READ: usize = 2 << 20;
/// Buffers of a thread. One is filled while the others are being copied.
const SLOTS: usize = 3;
/// Fewest and most threads: reads in flight that a disk wants even where cores are few, and where the bus is full.
const THREADS: (usize, usize) = (4, 32);

/// Some bytes of one chunk.
#[derive(Clone, Copy)]
struct Slab {
    chunk: usize,
    index: u64,
}

/// Allocates, fills and hashes all chunks; what comes back keeps the memory.
pub(super) fn fill(prepared: &Prepared, context: &Context, connection: &Connection) -> Result<Vec<Done>, Stop> {
    let start = Instant::now();
    let lengths = &prepared.layout.chunks;
    let rounded: Vec<u64> = lengths.iter().map(|len| prepared.memory.rounded(*len)).collect();
    #[allow(unused_mut, reason = "changed by builds with kernels only")]
    let (mut space, fds, offsets) = allocate(context, &rounded).map_err(|(e, what)| refusal(&e, &what))?;
    send_stage(connection, "allocate", space.len(), start.elapsed())?;

    let sources = open(prepared, context, connection)?;
    let segments = segments(prepared);
    let slabs: Vec<Slab> = lengths
        .iter()
        .enumerate()
        .flat_map(|(chunk, len)| (0..tree::pieces(*len)).map(move |index| Slab { chunk, index }))
        .collect();
    let total = prepared.layout.total_bytes();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).clamp(THREADS.0, THREADS.1);
    let threads = threads.min(slabs.len()).max(1);
    let counters = Counters::default();
    let next = AtomicUsize::new(0);
    let (results, finished) = mpsc::channel();
    let mut values: Vec<Option<ChainingValue>> = vec![None; slabs.len()];

    let start = Instant::now();
    std::thread::scope(|scope| -> Result<(), Stop> {
        for _ in 0..threads {
            let results = results.clone();
            let (slabs, next, counters, segments, sources, space, offsets) =
                (&slabs, &next, &counters, &segments, &sources, &space, &offsets);
            scope.spawn(move || {
                let mut thread = Thread { prepared, sources, counters, staging: None };
                loop {
                    let k = next.fetch_add(1, Ordering::Relaxed);
                    let Some(slab) = slabs.get(k) else { break };
                    let (Some(own), Some(offset)) = (segments.get(slab.chunk), offsets.get(slab.chunk)) else { break };
                    if results.send((k, thread.slab(space, *slab, own, *offset))).is_err() {
                        return;
                    }
                }
                // The last copies: an error of theirs is an error of the load.
                if let Err(failure) = thread.finish() {
                    let _ = results.send((usize::MAX, Err(failure)));
                }
            });
        }
        drop(results);
        let outcome = collect(&finished, &mut values, &counters, connection, "read", total);
        counters.stop.store(outcome.is_err(), Ordering::Relaxed);
        outcome
    })?;
    let wall = start.elapsed();
    #[cfg(feature = "cuda")]
    tile(prepared, context, &mut space, &offsets, connection)?;

    send_stage(connection, "read", total, counters.share(&counters.read_ns, threads))?;
    send_stage(connection, "hash", total, counters.share(&counters.hash_ns, threads))?;
    send_stage(connection, "copy", total, wall)?;
    let mut values = values.into_iter();
    lengths
        .iter()
        .zip(fds)
        .map(|(len, fd)| {
            let count = usize::try_from(tree::pieces(*len)).unwrap_or(usize::MAX);
            let own: Option<Vec<ChainingValue>> = values.by_ref().take(count).collect();
            let own = own.ok_or_else(|| Failure::other("loader_bug", "a part of a chunk was never loaded"))?;
            Ok(Done { chunk: Chunk { len: *len, blake3: tree::root(*len, &own) }, fd: Some(fd) })
        })
        .collect()
}

/// Arranges the tensors as the kernels take them. Byte-neutral, on the device: every byte is read and written twice at its speed.
#[cfg(feature = "cuda")]
fn tile(
    prepared: &Prepared,
    context: &Context,
    space: &mut Space,
    offsets: &[u64],
    connection: &Connection,
) -> Result<(), Stop> {
    use ds4_kernels::cuda::{CudaDevice, Placed};
    let start = Instant::now();
    let device =
        CudaDevice::open(context.device().ordinal).map_err(|e| refusal(&e, "the kernels that arrange weights"))?;
    let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let placed = |t: &ds4_manifests::TensorEntry| {
        let cols = size(t.shape.first().copied().unwrap_or(0));
        let rows = t.shape.iter().skip(1).fold(1, |n: usize, d| n.saturating_mul(size(*d)));
        let offset = offsets.get(size(t.chunk.into()))?.checked_add(t.offset)?;
        Some(Placed { ty: t.ty, rows, cols, offset })
    };
    let all: Vec<Placed> = prepared.layout.placed.iter().filter_map(placed).collect();
    device.tile_in_place(space, &all).map_err(|e| refusal(&e, "memory to arrange weights in"))?;
    send_stage(connection, "arrange", prepared.layout.total_bytes(), start.elapsed())
}

type Allocated = (Space, Vec<OwnedFd>, Vec<u64>);

/// One allocation per chunk, all mapped side by side; what failed comes with the error.
fn allocate(context: &Context, rounded: &[u64]) -> Result<Allocated, (CudaError, String)> {
    let total: u64 = rounded.iter().fold(0, |sum, len| sum.saturating_add(*len));
    let said = |what: String| move |e: CudaError| (e, what);
    let mut space =
        Space::reserve(context, total).map_err(said(format!("address space for {} of weights", bytes(total))))?;
    let (mut fds, mut offsets) = (Vec::new(), Vec::new());
    let mut at = 0;
    for (k, len) in rounded.iter().enumerate() {
        let what = || format!("chunk {k} of {} ({})", rounded.len(), bytes(*len));
        let physical = Physical::create(context, *len).map_err(said(what()))?;
        fds.push(physical.export().map_err(said(what()))?);
        space.map(at, physical).map_err(said(what()))?;
        offsets.push(at);
        at += len;
    }
    if total > 0 {
        space.allow(0, total, Access::ReadWrite).map_err(said("access to the weights".into()))?;
    }
    Ok((space, fds, offsets))
}

/// A failure of the device while doing `what`.
fn refusal(e: &CudaError, what: &str) -> Failure {
    match e {
        CudaError::OutOfMemory { .. } => Failure::memory(format!(
            "{what} could not be had although the plan fitted ({e}): another process took memory meanwhile; free it, or \
             raise --reserve-mib so that the plan is judged more carefully, and load again"
        )),
        other => {
            let mut failure = Failure::from(other.clone());
            failure.message = format!("{what}: {}", failure.message);
            failure
        }
    }
}

/// Opens all shards, past the page cache where that is possible; says so where it is not.
fn open(prepared: &Prepared, context: &Context, connection: &Connection) -> Result<Vec<Source>, Stop> {
    // Checks that no shard has changed since its header was read.
    open_shards(&prepared.model)?;
    let mut scratch = Pinned::new(context, READ).map_err(|e| refusal(&e, "a page-locked buffer"))?;
    let mut sources = Vec::new();
    for shard in &prepared.model.shards {
        let (source, cached) = Source::open(&shard.path, &mut scratch)
            .map_err(|e| Failure::model("unreadable", format!("{} cannot be read: {e}", shard.path.display())))?;
        if let Some(why) = cached {
            let text = format!("{} is read through the page cache: O_DIRECT says {why}", shard.path.display());
            send(connection, &Report::Note { text }, &[])?;
        }
        sources.push(source);
    }
    Ok(sources)
}

/// One thread of the load.
struct Thread<'a> {
    prepared: &'a Prepared,
    sources: &'a [Source],
    counters: &'a Counters,
    staging: Option<Staging<'a>>,
}

impl<'a> Thread<'a> {
    /// Loads and hashes one slab of a chunk that lies at `chunk_offset` of the space. Bytes between tensors become zero.
    fn slab(
        &mut self,
        space: &'a Space,
        slab: Slab,
        segments: &[Segment],
        chunk_offset: u64,
    ) -> Result<ChainingValue, Failure> {
        let len = self.prepared.layout.chunks.get(slab.chunk).copied().unwrap_or(0);
        let begin = slab.index * tree::PIECE;
        let end = len.min(begin.saturating_add(tree::PIECE));
        let mut hasher = tree::hasher(len, slab.index);
        let mut staging = match self.staging.take() {
            Some(staging) => staging,
            None => {
                let room = READ + 2 * usize::try_from(BLOCK).unwrap_or(0);
                Staging::new(space, SLOTS, room).map_err(|e| refusal(&e, "page-locked buffers"))?
            }
        };
        let mut at = begin;
        let first = segments.partition_point(|s| s.offset.saturating_add(s.len) <= begin);
        for segment in segments.iter().skip(first).take_while(|s| s.offset < end) {
            self.zero(&staging, &mut hasher, chunk_offset, at, segment.offset)?;
            at = at.max(segment.offset);
            let stop = end.min(segment.offset.saturating_add(segment.len));
            while at < stop {
                let n = usize::try_from(stop - at).unwrap_or(READ).min(READ);
                self.piece(&mut staging, &mut hasher, segment, at, n, chunk_offset)?;
                at += n as u64;
            }
        }
        self.zero(&staging, &mut hasher, chunk_offset, at, end)?;
        self.staging = Some(staging);
        Ok(tree::finish(len, &hasher))
    }

    fn piece(
        &self,
        staging: &mut Staging<'_>,
        hasher: &mut blake3::Hasher,
        segment: &Segment,
        at: u64,
        n: usize,
        chunk_offset: u64,
    ) -> Result<(), Failure> {
        if self.counters.stop.load(Ordering::Relaxed) {
            return Err(Failure::other("cancelled", "the load was cancelled"));
        }
        let source = self.sources.get(segment.shard);
        let source = source.ok_or_else(|| Failure::other("loader_bug", "a tensor lies in no file"))?;
        let buffer = staging.buffer()?;
        let start = Instant::now();
        let mut hashing = Duration::ZERO;
        let from = source
            .read(segment.file_offset + (at - segment.offset), n, buffer, |fresh| {
                let start = Instant::now();
                hasher.update(fresh);
                hashing += start.elapsed();
            })
            .map_err(|e| read_failure(&self.prepared.model, segment.shard, &e))?;
        add(&self.counters.hash_ns, hashing);
        add(&self.counters.read_ns, start.elapsed().saturating_sub(hashing));
        staging.upload(from, n, chunk_offset + at)?;
        self.counters.bytes.fetch_add(n as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Zeros from `at` to `end` of a chunk, where no tensor is: nobody promises what is in new device memory.
    fn zero(
        &self,
        staging: &Staging<'_>,
        hasher: &mut blake3::Hasher,
        chunk_offset: u64,
        at: u64,
        end: u64,
    ) -> Result<(), Failure> {
        if at < end {
            super::pad(hasher, end - at);
            staging.zero(chunk_offset + at, end - at)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<(), Failure> {
        match self.staging {
            Some(staging) => Ok(staging.finish()?),
            None => Ok(()),
        }
    }
}
