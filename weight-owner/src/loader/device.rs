//! Filling a CUDA device: files → page-locked buffers → asynchronous copies, hashed on the device or before they are copied.
//!
//! Each thread takes 64 MiB of a chunk at a time and has a ring of buffers and a stream of its own, so that as many
//! reads are in flight as there are threads, and a copy runs while the next piece is read. There is no second copy in the machine's
//! memory and the page cache does not grow. With kernels ([`OnDevice`]) a slab is hashed after its copies; without, every byte
//! is hashed by the CPU between its read and its copy, while the cache has it. The descriptors of the memory are made as it is
//! allocated; they keep it when this process has gone.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use blake3::hazmat::ChainingValue;
use ds4_kernels::cuda::driver::{Access, Context, CudaError, Event, Physical, Pinned, Space, Staging};
use ds4_manifests::Chunk;
use ds4_os::seqpacket::Connection;

use super::on_device::OnDevice;
use super::source::{BLOCK, Source};
use super::{
    Counters, Done, Prepared, Segment, Stop, add, collect, open_shards, read_failure, segments, send, send_stage, tree,
};
use crate::Failure;
use crate::report::{Report, bytes};

/// Bytes of one copy. With 256 KiB the driver's own work per copy was what a load waited for (H200, 16 cores: 3.3 s for
/// 80.8 GiB instead of 2.4 s).
const READ: usize = 2 << 20;
/// Buffers of a thread. One is filled while the other is being copied; page-locking a third costs 1 ms a thread, one thread
/// after the other, and gains nothing.
const SLOTS: usize = 2;
/// Fewest and most threads: reads in flight that a disk wants even where cores are few, and where the bus is full.
const THREADS: (usize, usize) = (4, 32);

/// Some bytes of one chunk: what a thread takes at a time.
#[derive(Clone, Copy)]
pub(super) struct Slab {
    pub(super) chunk: usize,
    /// Within the chunk.
    pub(super) index: u64,
    pub(super) chunk_len: u64,
    /// Where the chunk is in the space.
    pub(super) chunk_offset: u64,
}

impl Slab {
    /// Where it begins in its chunk.
    pub(super) fn begin(&self) -> u64 {
        self.index * tree::PIECE
    }

    pub(super) fn len(&self) -> u64 {
        self.chunk_len.saturating_sub(self.begin()).min(tree::PIECE)
    }
}

/// What becomes of a slab.
enum Arrived {
    /// It is on its way, and this is the value of its bytes.
    Hashed(ChainingValue),
    /// It is on its way, and the device will have hashed it by then.
    Started(Event),
}

/// Allocates, fills and hashes all chunks; what comes back keeps the memory.
pub(super) fn fill(prepared: &Prepared, context: &Context, connection: &Connection) -> Result<Vec<Done>, Stop> {
    let start = Instant::now();
    let lengths = &prepared.layout.chunks;
    let slabs = slabs(prepared);
    let rounded: Vec<u64> = lengths.iter().map(|len| prepared.memory.rounded(*len)).collect();
    let (allocated, on_device) = std::thread::scope(|scope| {
        let opening = scope.spawn(|| OnDevice::open(context, &prepared.layout, slabs.len()));
        let allocated = allocate(context, &rounded).map_err(|(e, what)| refusal(&e, &what));
        let opened = opening.join().map_err(|_| Failure::other("kernels", "loading kernels panicked"));
        (
            allocated,
            opened.and_then(|o| o.map_err(|e| refusal(&e, "kernels that hash and arrange weights, and their memory"))),
        )
    });
    let ((space, fds), on_device) = (allocated?, on_device?);
    send_stage(connection, "allocate", space.len(), start.elapsed())?;

    let sources = open(prepared, context, connection)?;
    let segments = segments(prepared);
    let total = prepared.layout.total_bytes();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).clamp(THREADS.0, THREADS.1);
    let threads = threads.min(slabs.len()).max(1);
    let counters = Counters::default();
    let next = AtomicUsize::new(0);
    let (results, finished) = mpsc::channel();
    let mut values: Vec<ChainingValue> = vec![[0; 32]; slabs.len()];
    let mut hashed: Vec<Vec<Event>> = lengths.iter().map(|_| Vec::new()).collect();
    let mut arrived = 0;

    let start = Instant::now();
    std::thread::scope(|scope| -> Result<(), Stop> {
        for _ in 0..threads {
            let results = results.clone();
            let (slabs, next, segments) = (&slabs, &next, &segments);
            let thread = Thread {
                prepared,
                sources: &sources,
                counters: &counters,
                space: &space,
                on_device: on_device.as_ref(),
            };
            scope.spawn(move || {
                let mut staging = None;
                loop {
                    let k = next.fetch_add(1, Ordering::Relaxed);
                    let Some(slab) = slabs.get(k) else { break };
                    let Some(own) = segments.get(slab.chunk) else { break };
                    if results.send((k, thread.slab(&mut staging, k, slab, own))).is_err() {
                        return;
                    }
                }
                // The last copies: an error of theirs is an error of the load.
                if let Some(Err(e)) = staging.as_ref().map(Staging::finish) {
                    let _ = results.send((usize::MAX, Err(e.into())));
                }
            });
        }
        drop(results);
        let take = |k: usize, slab: Arrived| {
            arrived += 1;
            match (slab, slabs.get(k), &on_device) {
                (Arrived::Hashed(value), ..) => values.get_mut(k).into_iter().for_each(|v| *v = value),
                (Arrived::Started(event), Some(slab), Some(on_device)) => {
                    let Some(chunk) = hashed.get_mut(slab.chunk) else { return Ok(()) };
                    chunk.push(event);
                    if chunk.len() as u64 == tree::pieces(slab.chunk_len) {
                        let tensors = prepared.layout.placed.iter().filter(|t| t.chunk as usize == slab.chunk);
                        on_device.arrange(&space, slab.chunk_offset, tensors, chunk)?;
                    }
                }
                _ => {}
            }
            Ok(())
        };
        let outcome = collect(&finished, take, &counters, connection, "read", total);
        counters.stop.store(outcome.is_err(), Ordering::Relaxed);
        outcome
    })?;
    if arrived != slabs.len() {
        return Err(Failure::other("loader_bug", "a part of a chunk was never loaded").into());
    }
    if let Some(on_device) = on_device {
        values = on_device.finish().map_err(Failure::from)?;
    }
    let wall = start.elapsed();

    send_stage(connection, "read", total, counters.share(&counters.read_ns, threads))?;
    if counters.hash_ns.load(Ordering::Relaxed) > 0 {
        send_stage(connection, "hash", total, counters.share(&counters.hash_ns, threads))?;
    }
    send_stage(connection, "copy", total, wall)?;
    let mut values = values.into_iter();
    lengths
        .iter()
        .zip(fds)
        .map(|(len, fd)| {
            let count = usize::try_from(tree::pieces(*len)).unwrap_or(usize::MAX);
            let own: Vec<ChainingValue> = values.by_ref().take(count).collect();
            Ok(Done { chunk: Chunk { len: *len, blake3: tree::root(*len, &own) }, fd: Some(fd) })
        })
        .collect()
}

/// All slabs, chunk after chunk, which lie side by side in the space.
fn slabs(prepared: &Prepared) -> Vec<Slab> {
    let (mut slabs, mut chunk_offset) = (Vec::new(), 0_u64);
    for (chunk, len) in prepared.layout.chunks.iter().enumerate() {
        for index in 0..tree::pieces(*len) {
            slabs.push(Slab { chunk, index, chunk_len: *len, chunk_offset });
        }
        chunk_offset = chunk_offset.saturating_add(prepared.memory.rounded(*len));
    }
    slabs
}

type Allocated = (Space, Vec<OwnedFd>);

/// One allocation per chunk, all mapped side by side; what failed comes with the error.
fn allocate(context: &Context, rounded: &[u64]) -> Result<Allocated, (CudaError, String)> {
    let total: u64 = rounded.iter().fold(0, |sum, len| sum.saturating_add(*len));
    let said = |what: String| move |e: CudaError| (e, what);
    let mut space =
        Space::reserve(context, total).map_err(said(format!("address space for {} of weights", bytes(total))))?;
    let (mut fds, mut at) = (Vec::new(), 0);
    for (k, len) in rounded.iter().enumerate() {
        let what = || format!("chunk {k} of {} ({})", rounded.len(), bytes(*len));
        let physical = Physical::create(context, *len).map_err(said(what()))?;
        fds.push(physical.export().map_err(said(what()))?);
        space.map(at, physical).map_err(said(what()))?;
        at += len;
    }
    if total > 0 {
        space.allow(0, total, Access::ReadWrite).map_err(said("access to the weights".into()))?;
    }
    Ok((space, fds))
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
    space: &'a Space,
    on_device: Option<&'a OnDevice>,
}

impl<'a> Thread<'a> {
    /// Loads one slab, and hashes it or has it hashed. Bytes between tensors become zero. The buffers are kept for the next slab.
    fn slab(
        &self,
        kept: &mut Option<Staging<'a>>,
        k: usize,
        slab: &Slab,
        segments: &[Segment],
    ) -> Result<Arrived, Failure> {
        let staging = match kept {
            Some(staging) => staging,
            None => {
                let room = READ + 2 * usize::try_from(BLOCK).unwrap_or(0);
                kept.insert(Staging::new(self.space, SLOTS, room).map_err(|e| refusal(&e, "page-locked buffers"))?)
            }
        };
        let (begin, end) = (slab.begin(), slab.begin() + slab.len());
        let mut hasher = self.on_device.is_none().then(|| tree::hasher(slab.chunk_len, slab.index));
        let mut at = begin;
        let first = segments.partition_point(|s| s.offset.saturating_add(s.len) <= begin);
        for segment in segments.iter().skip(first).take_while(|s| s.offset < end) {
            zero(staging, hasher.as_mut(), slab, at, segment.offset)?;
            at = at.max(segment.offset);
            let stop = end.min(segment.offset.saturating_add(segment.len));
            while at < stop {
                let n = usize::try_from(stop - at).unwrap_or(READ).min(READ);
                let (from, buffer) = (segment.file_offset + (at - segment.offset), staging.buffer()?);
                let from = self.piece(buffer, hasher.as_mut(), segment.shard, from, n)?;
                staging.upload(from, n, slab.chunk_offset + at)?;
                self.counters.bytes.fetch_add(n as u64, Ordering::Relaxed);
                at += n as u64;
            }
        }
        zero(staging, hasher.as_mut(), slab, at, end)?;
        Ok(match (self.on_device, hasher) {
            (Some(on_device), _) => Arrived::Started(on_device.hash(staging.stream(), self.space, k, slab)?),
            (None, hasher) => Arrived::Hashed(hasher.map_or([0; 32], |h| tree::finish(slab.chunk_len, &h))),
        })
    }

    /// Reads `n` bytes at `offset` of a file into `buffer`; where in it they begin.
    fn piece(
        &self,
        buffer: &mut [u8],
        hasher: Option<&mut blake3::Hasher>,
        shard: usize,
        offset: u64,
        n: usize,
    ) -> Result<usize, Failure> {
        if self.counters.stop.load(Ordering::Relaxed) {
            return Err(Failure::other("cancelled", "the load was cancelled"));
        }
        let source = self.sources.get(shard);
        let source = source.ok_or_else(|| Failure::other("loader_bug", "a tensor lies in no file"))?;
        let (start, mut hashing) = (Instant::now(), Duration::ZERO);
        let mut hasher = hasher;
        let from = source
            .read(offset, n, buffer, |fresh| {
                if let Some(hasher) = &mut hasher {
                    let start = Instant::now();
                    hasher.update(fresh);
                    hashing += start.elapsed();
                }
            })
            .map_err(|e| read_failure(&self.prepared.model, shard, &e))?;
        add(&self.counters.hash_ns, hashing);
        add(&self.counters.read_ns, start.elapsed().saturating_sub(hashing));
        Ok(from)
    }
}

/// Zeros from `at` to `end` of a slab's chunk, where no tensor is: nobody promises what is in new device memory.
fn zero(
    staging: &Staging<'_>,
    hasher: Option<&mut blake3::Hasher>,
    slab: &Slab,
    at: u64,
    end: u64,
) -> Result<(), Failure> {
    if at < end {
        if let Some(hasher) = hasher {
            super::pad(hasher, end - at);
        }
        staging.zero(slab.chunk_offset + at, end - at)?;
    }
    Ok(())
}
