//! The loader: a child process that brings one model into memory, reports, sends the descriptors and exits.
//!
//! Order matters. The file is validated and the plan judged before the first large allocation; every byte is hashed, by the CPU
//! while it is still in its cache or by a device that has it; nothing is published before everything is there.
//!
//! In the machine's memory (`memfd`) reads go straight into the final mapping and a chunk is sealed as soon as it is full:
//! there is no second copy, and for models larger than a quarter of the machine the page cache is given back chunk by
//! chunk. A CUDA device is filled by [`device`]; [`backend`] chooses between the two.

pub mod backend;
mod device;
mod on_device;
mod source;
mod tree;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ds4_manifests::catalog::{CatalogError, Known};
use ds4_manifests::{
    Catalog, Chunk, GgufModel, Layout, ModelIdentity, WeightManifest, content_hash, encode, plan_layout,
};
use ds4_os::memfd::{self, Filling};
use ds4_os::memory;
use ds4_os::seqpacket::{Connection, MAX_FDS};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::Failure;
use crate::report::{Job, MAX_REPORT, Plan, Report};
use backend::{Chosen, Memory};

/// Bytes read and hashed at a time: small enough for the L2 cache, large enough for a system call.
const PIECE: usize = 1 << 20;
/// Reads in flight. More gained nothing on NVMe with 1 MiB pieces, and the machine has other work.
const MAX_THREADS: usize = 8;
/// Time between progress reports; also how soon a loader notices that its daemon is gone.
const TICK: Duration = Duration::from_millis(100);

/// A validated model, before anything large was allocated.
pub struct Prepared {
    model: GgufModel,
    layout: Layout,
    /// Contents of the artifact's files that were checked.
    known: &'static [Known],
    manifest: WeightManifest,
    memory: Memory,
    /// What it takes.
    pub plan: Plan,
}

/// Opens and validates the model of `job`, chooses its memory and computes its plan; allocates nothing but headers (and,
/// on a CUDA device, a context).
///
/// # Errors
/// The file is bad, no catalog entry fits, or the memory that was asked for is not to be had.
pub fn prepare(job: &Job) -> Result<Prepared, Failure> {
    // A context costs 0.2 s on an H200, a header of 130,000 tokens some tens of milliseconds: side by side.
    let (chosen, model) = std::thread::scope(|scope| {
        let choosing = scope.spawn(|| backend::choose(job.backend));
        let model = GgufModel::open(&job.path);
        let chosen = choosing.join().unwrap_or_else(|_| Err(Failure::other("backend", "choosing a backend panicked")));
        (chosen, model)
    });
    let model = model?;
    let found = identify(&model, job.allow_dev_models)
        .map_err(|e| Failure::model(e.code(), format!("{}: {e}", job.path.display())))?;
    let layout = plan_layout(&model.tensors);
    let Chosen { memory, why } = chosen?;
    let name = if job.name.is_empty() { found.name } else { job.name.clone() };
    let chunks: Vec<Chunk> = layout.chunks.iter().map(|len| Chunk { len: *len, blake3: [0; 32] }).collect();
    let manifest = WeightManifest {
        model: ModelIdentity {
            family: found.family.clone(),
            artifact: found.artifact.clone(),
            name: name.clone(),
            content: [0; 32],
            known: false,
        },
        epoch: job.epoch,
        backend: memory.facts(page_size()),
        chunks,
        tensors: layout.placed.clone(),
        metadata: model.metadata.clone(),
    };
    let metadata_bytes = encode(&manifest).map_err(|e| Failure::model(e.code(), e.to_string()))?.len();
    let available = memory.available()?;
    let plan = Plan {
        model: name,
        family: found.family,
        artifact: found.artifact,
        synthetic: model.metadata.is_synthetic(),
        weight_bytes: layout.chunks.iter().fold(0, |sum, len| sum.saturating_add(memory.rounded(*len))),
        metadata_bytes: metadata_bytes as u64,
        reserve_bytes: job.reserve_bytes,
        available_bytes: available.bytes,
        available_source: available.source,
        chunks: layout.chunks.len() as u64,
        backend: manifest.backend.name().into(),
        why,
    };
    Ok(Prepared { model, layout, known: found.known, manifest, memory, plan })
}

/// What the catalog says of a file.
struct Found {
    family: String,
    artifact: String,
    name: String,
    known: &'static [Known],
}

/// A model, or a companion of models such as a prediction block.
fn identify(model: &GgufModel, allow_dev: bool) -> Result<Found, CatalogError> {
    let catalog = Catalog::builtin();
    if let Some(drafter) = catalog.identify_drafter(&model.metadata, &model.tensors, allow_dev) {
        let found = drafter?;
        return Ok(Found { family: found.family.to_owned(), artifact: found.artifact, name: found.name, known: &[] });
    }
    let found = catalog.identify(&model.metadata, &model.tensors, allow_dev)?;
    Ok(Found {
        family: found.family.name.clone(),
        artifact: found.entry.id.clone(),
        name: found.served_name,
        known: &found.entry.known,
    })
}

fn page_size() -> u64 {
    let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    size.and_then(|s| u64::try_from(s).ok()).unwrap_or(4096)
}

/// Runs the child: takes the job from `connection`, reports there, and returns the exit code.
pub fn run(connection: &Connection) -> u8 {
    // When memory does run out, this process shall go and not a worker that serves.
    let _ = std::fs::write("/proc/self/oom_score_adj", "500");
    let outcome = receive_job(connection).and_then(|job| work(&job, connection));
    match outcome {
        Ok(()) => 0,
        Err(Stop::Daemon) => crate::failure::EXIT_OTHER,
        Err(Stop::Failed(failure)) => {
            let exit = failure.exit;
            // The daemon may be gone; then nobody is left to tell.
            let _ = send(connection, &Report::Failed(failure), &[]);
            exit
        }
    }
}

/// Why a loader ends early.
enum Stop {
    /// The daemon is gone.
    Daemon,
    /// It failed.
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

fn receive_job(connection: &Connection) -> Result<Job, Stop> {
    let message = connection.recv(MAX_REPORT).map_err(|_| Stop::Daemon)?.ok_or(Stop::Daemon)?;
    serde_json::from_slice(&message.bytes).map_err(|e| Failure::other("bad_job", format!("unreadable job: {e}")).into())
}

fn send(connection: &Connection, report: &Report, fds: &[BorrowedFd<'_>]) -> Result<(), Stop> {
    let bytes = serde_json::to_vec(report).map_err(|e| Failure::other("report", e.to_string()))?;
    connection.send(&bytes, fds).map_err(|_| Stop::Daemon)
}

fn send_stage(connection: &Connection, stage: &str, bytes: u64, took: Duration) -> Result<(), Stop> {
    let seconds = took.as_secs_f64();
    let gib_per_s = if bytes > 0 { bytes as f64 / (1_u64 << 30) as f64 / seconds.max(1e-9) } else { 0.0 };
    send(connection, &Report::Stage { stage: stage.into(), bytes, gib_per_s, seconds }, &[])
}

fn work(job: &Job, connection: &Connection) -> Result<(), Stop> {
    let start = Instant::now();
    let mut prepared = prepare(job)?;
    send_stage(connection, "validate", 0, start.elapsed())?;
    if let Some(loaded) = &job.unless_blake3 {
        let chunks = pass(&prepared, connection, "verify", false)?;
        let hashes = chunks.iter().map(|c| c.chunk.clone()).collect();
        if *loaded == prepared.hash(hashes) {
            check_expected(job, loaded)?;
            return send(connection, &Report::Unchanged, &[]);
        }
    }
    send(connection, &Report::Planned(prepared.plan.clone()), &[])?;
    if !prepared.plan.fits() {
        return Err(prepared.plan.refusal().into());
    }
    if job.plan_only {
        return Ok(());
    }
    let done = match &prepared.memory {
        Memory::Host => pass(&prepared, connection, "read", true)?,
        Memory::Device { context, .. } => device::fill(&prepared, context, connection)?,
    };
    let start = Instant::now();
    let (hashes, fds): (Vec<Chunk>, Vec<OwnedFd>) = done.into_iter().filter_map(|d| Some((d.chunk, d.fd?))).unzip();
    let lengths: Vec<u64> = hashes.iter().map(|c| c.len).collect();
    let blake3 = prepared.hash(hashes);
    check_expected(job, &blake3)?;
    let known = prepared.known.iter().any(|k| k.content == prepared.manifest.model.content);
    prepared.manifest.model.known = known;
    let encoded = encode(&prepared.manifest).map_err(|e| Failure::model(e.code(), e.to_string()))?;
    let manifest = memfd::sealed("ds4-manifest", &encoded).map_err(Failure::from)?;
    for group in fds.chunks(MAX_FDS) {
        let group: Vec<BorrowedFd<'_>> = group.iter().map(AsFd::as_fd).collect();
        send(connection, &Report::Chunks { count: group.len() as u64 }, &group)?;
    }
    send_stage(connection, "publish", 0, start.elapsed())?;
    let sealed = matches!(prepared.memory, Memory::Host);
    let published = Report::Published { manifest_len: encoded.len() as u64, chunks: lengths, blake3, known, sealed };
    send(connection, &published, &[manifest.as_fd()])
}

fn check_expected(job: &Job, actual: &str) -> Result<(), Failure> {
    match &job.expect_blake3 {
        Some(expected) if !expected.eq_ignore_ascii_case(actual) => Err(Failure::model(
            "content_mismatch",
            format!(
                "the content of {} is BLAKE3 {actual}, but {expected} was expected; fetch the file again, or correct \
                 --expect-blake3",
                job.path.display()
            ),
        )),
        _ => Ok(()),
    }
}

impl Prepared {
    /// Puts the chunks' hashes into the manifest; returns the content hash in hexadecimal.
    fn hash(&mut self, chunks: Vec<Chunk>) -> String {
        let content = content_hash(&chunks, &self.manifest.tensors, &self.manifest.metadata);
        self.manifest.chunks = chunks;
        self.manifest.model.content = content;
        blake3::Hash::from(content).to_hex().to_string()
    }
}

/// A tensor's bytes: where they are and where they go.
#[derive(Clone, Copy)]
struct Segment {
    shard: usize,
    file_offset: u64,
    offset: u64,
    len: u64,
}

/// A finished chunk; without descriptor when it was only verified.
struct Done {
    chunk: Chunk,
    fd: Option<OwnedFd>,
}

#[derive(Default)]
struct Counters {
    bytes: AtomicU64,
    read_ns: AtomicU64,
    hash_ns: AtomicU64,
    stop: AtomicBool,
}

impl Counters {
    /// Time a thread, so that the figure is comparable to a device's or a core's.
    fn share(&self, ns: &AtomicU64, threads: usize) -> Duration {
        Duration::from_nanos(ns.load(Ordering::Relaxed) / threads.max(1) as u64)
    }
}

/// One pass over all content: reads and hashes every chunk, into memory of its own when `keep`.
fn pass(prepared: &Prepared, connection: &Connection, stage: &str, keep: bool) -> Result<Vec<Done>, Stop> {
    let files = open_shards(&prepared.model)?;
    let segments = segments(prepared);
    let count = segments.len();
    let total: u64 = prepared.layout.total_bytes();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS).min(count).max(1);
    let drop_cache = memory::available().is_some_and(|m| total > m.total / 4);
    let counters = Counters::default();
    let next = AtomicUsize::new(0);
    let (results, finished) = mpsc::channel();
    let mut done: Vec<Option<Done>> = (0..count).map(|_| None).collect();

    std::thread::scope(|scope| -> Result<(), Stop> {
        for _ in 0..threads {
            let results = results.clone();
            let (counters, next, files, segments) = (&counters, &next, &files, &segments);
            scope.spawn(move || {
                loop {
                    let k = next.fetch_add(1, Ordering::Relaxed);
                    let (Some(own), Some(len)) = (segments.get(k), prepared.layout.chunks.get(k)) else { break };
                    let result = one_chunk(&prepared.model, files, own, *len, keep, counters);
                    if drop_cache {
                        forget_cache(files, own);
                    }
                    if results.send((k, result)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(results);
        let keep = |k: usize, chunk| {
            if let Some(slot) = done.get_mut(k) {
                *slot = Some(chunk);
            }
            Ok(())
        };
        let outcome = collect(&finished, keep, &counters, connection, stage, total);
        counters.stop.store(outcome.is_err(), Ordering::Relaxed);
        outcome
    })?;

    send_stage(connection, stage, total, counters.share(&counters.read_ns, threads))?;
    send_stage(connection, "hash", total, counters.share(&counters.hash_ns, threads))?;
    done.into_iter().map(|d| d.ok_or_else(|| Failure::other("loader_bug", "a chunk was never loaded").into())).collect()
}

/// Gives results to `take` and reports progress until all threads are through.
fn collect<T>(
    finished: &mpsc::Receiver<(usize, Result<T, Failure>)>,
    mut take: impl FnMut(usize, T) -> Result<(), Failure>,
    counters: &Counters,
    connection: &Connection,
    stage: &str,
    total: u64,
) -> Result<(), Stop> {
    loop {
        match finished.recv_timeout(TICK) {
            Ok((k, result)) => take(k, result?)?,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let bytes = counters.bytes.load(Ordering::Relaxed);
                send(connection, &Report::Progress { stage: stage.into(), done: bytes, total }, &[])?;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

fn open_shards(model: &GgufModel) -> Result<Vec<File>, Failure> {
    let open = |shard: &ds4_manifests::gguf::Shard| {
        let shown = shard.path.display();
        let failed = |e: io::Error| Failure::model("unreadable", format!("{shown} cannot be read: {e}"));
        let file = File::open(&shard.path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        if len != shard.file_len {
            let text = format!(
                "{shown} changed from {} to {len} bytes while it was being loaded; load it again",
                shard.file_len
            );
            return Err(Failure::model("file_changed", text));
        }
        // A hint for readahead.
        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_SEQUENTIAL);
        Ok(file)
    };
    model.shards.iter().map(open).collect()
}

/// The segments of each chunk, by offset.
fn segments(prepared: &Prepared) -> Vec<Vec<Segment>> {
    let mut chunks: Vec<Vec<Segment>> = vec![Vec::new(); prepared.layout.chunks.len()];
    for (tensor, entry) in prepared.model.tensors.iter().zip(&prepared.layout.placed) {
        if let Some(chunk) = chunks.get_mut(entry.chunk as usize) {
            let (shard, file_offset) = (tensor.shard, tensor.offset);
            chunk.push(Segment { shard, file_offset, offset: entry.offset, len: entry.len });
        }
    }
    chunks.iter_mut().for_each(|c| c.sort_by_key(|s| s.offset));
    chunks
}

fn one_chunk(
    model: &GgufModel,
    files: &[File],
    segments: &[Segment],
    len: u64,
    keep: bool,
    counters: &Counters,
) -> Result<Done, Failure> {
    if !keep {
        let mut scratch = vec![0; PIECE];
        let hash = fill(model, files, segments, len, Target::Scratch(&mut scratch), counters)?;
        return Ok(Done { chunk: Chunk { len, blake3: hash }, fd: None });
    }
    let mut memory = Filling::create("ds4-weights", len)?;
    let hash = fill(model, files, segments, len, Target::Memory(&mut memory), counters)?;
    let fd = memory.seal()?;
    Ok(Done { chunk: Chunk { len, blake3: hash }, fd: Some(fd) })
}

/// Where bytes are read to.
enum Target<'a> {
    /// Their place in the chunk.
    Memory(&'a mut [u8]),
    /// One buffer again and again.
    Scratch(&'a mut [u8]),
}

/// Reads and hashes one chunk. Bytes between tensors are zero.
fn fill(
    model: &GgufModel,
    files: &[File],
    segments: &[Segment],
    len: u64,
    mut target: Target<'_>,
    counters: &Counters,
) -> Result<[u8; 32], Failure> {
    let mut hasher = blake3::Hasher::new();
    let mut at = 0;
    for segment in segments {
        pad(&mut hasher, segment.offset.saturating_sub(at));
        at = segment.offset.saturating_add(segment.len);
        let mut done: u64 = 0;
        while done < segment.len {
            if counters.stop.load(Ordering::Relaxed) {
                return Err(Failure::other("cancelled", "the load was cancelled"));
            }
            let n = usize::try_from(segment.len - done).unwrap_or(PIECE).min(PIECE);
            let buffer = match &mut target {
                Target::Scratch(scratch) => scratch.get_mut(..n),
                Target::Memory(memory) => usize::try_from(segment.offset + done)
                    .ok()
                    .and_then(|from| Some(from..from.checked_add(n)?))
                    .and_then(|range| memory.get_mut(range)),
            };
            let (Some(buffer), Some(file)) = (buffer, files.get(segment.shard)) else {
                return Err(Failure::other("loader_bug", "a tensor lies outside its chunk"));
            };
            let start = Instant::now();
            file.read_exact_at(buffer, segment.file_offset + done)
                .map_err(|e| read_failure(model, segment.shard, &e))?;
            let read = Instant::now();
            hasher.update(buffer);
            add(&counters.hash_ns, read.elapsed());
            add(&counters.read_ns, read - start);
            counters.bytes.fetch_add(n as u64, Ordering::Relaxed);
            done += n as u64;
        }
    }
    pad(&mut hasher, len.saturating_sub(at));
    Ok(*hasher.finalize().as_bytes())
}

fn add(counter: &AtomicU64, took: Duration) {
    counter.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(0), Ordering::Relaxed);
}

fn pad(hasher: &mut blake3::Hasher, mut zeros: u64) {
    const ZEROS: [u8; 256] = [0; 256];
    while zeros > 0 {
        let n = usize::try_from(zeros).unwrap_or(ZEROS.len()).min(ZEROS.len());
        hasher.update(&ZEROS[..n]);
        zeros -= n as u64;
    }
}

fn read_failure(model: &GgufModel, shard: usize, e: &io::Error) -> Failure {
    let path = model.shards.get(shard).map(|s| s.path.display().to_string()).unwrap_or_default();
    if e.kind() == io::ErrorKind::UnexpectedEof {
        return Failure::model(
            "truncated_file",
            format!("{path} became shorter while it was being read; fetch it again"),
        );
    }
    Failure::model("read_error", format!("{path} cannot be read: {e}; check the disk (the kernel log may say more)"))
}

/// Gives the page cache of a chunk's bytes back.
fn forget_cache(files: &[File], segments: &[Segment]) {
    for s in segments {
        let (Ok(offset), Ok(len)) = (i64::try_from(s.file_offset), i64::try_from(s.len)) else { continue };
        if let Some(file) = files.get(s.shard) {
            let _ = posix_fadvise(file, offset, len, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        }
    }
}
