//! Launches of the sampler's kernels: see [`crate::ops::RowQuery`].

use super::buffer::{CudaBuffer, Growable};
use super::dense::BLOCK;
use super::device::CudaDevice;
use super::driver::KernelArg;
use super::fatal::OrFatal;
use super::host::Host;
use super::kernels::{File, dim, int};
use crate::Device;
use crate::kernel_args;
use crate::ops::{Drawn, MAX_BEST, RowQuery, RowSummary, summarise_row};

/// Logits a block, groups of them whose best ones make a threshold, most logits of a row, candidates that are listed, and queries of a
/// launch (`CHUNK`, `GROUPS`, `MAX_CHUNKS`, `LIST`, `QUERIES` in sample.cu). Wider rows are read.
const CHUNK: usize = 2048;
const GROUPS: usize = 16;
const MAX_WIDTH: usize = 256 * CHUNK;
const LIST: usize = 1024;
const QUERIES: usize = 64;

/// As kernels take a query (`SampleQuery`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Query {
    draw: f64,
    row: i32,
    best: i32,
    scale: f32,
    norm: i32,
}

/// `SampleQueries`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Queries([Query; QUERIES]);
kernel_args!(Queries);

/// Bytes of what a kernel says of a row as a whole (`SampleHead`).
const HEAD: usize = 48;

/// Memory of these operations.
#[derive(Debug, Default)]
pub(super) struct Memory {
    groups: Growable,
    lists: Growable,
    sums: Growable,
    /// Counters, zero between launches: tickets of the rows, and lengths of their lists.
    counters: Growable,
    /// Heads, and behind them the best candidates.
    results: Growable,
    host: Host,
}

/// A candidate as kernels pack it: the key that orders logits as integers, above the complement of the token.
fn unpack(candidate: u64) -> (f32, u32) {
    let [_, key] = halves(candidate);
    let [token, _] = halves(!candidate);
    (f32::from_bits(if key >> 31 == 1 { key ^ 0x8000_0000 } else { !key }), token)
}

/// The low and the high 32 bits.
fn halves(x: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = x.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// The `i`-th word of eight bytes.
fn word(bytes: &[u8], i: usize) -> u64 {
    bytes.as_chunks::<8>().0.get(i).map_or(0, |b| u64::from_le_bytes(*b))
}

/// See [`crate::Device::summarise`].
pub(super) fn summarise(d: &CudaDevice, logits: &CudaBuffer, queries: &[RowQuery], out: &mut Vec<RowSummary>) {
    out.clear();
    if logits.width() > MAX_WIDTH {
        let mut row = Vec::new();
        for q in queries {
            d.read(logits, q.row, &mut row);
            out.push(summarise_row(&mut row, q));
        }
        return;
    }
    for some in queries.chunks(QUERIES) {
        launch(d, logits, some, out);
    }
}

fn launch(d: &CudaDevice, logits: &CudaBuffer, queries: &[RowQuery], out: &mut Vec<RowSummary>) {
    let width = logits.width();
    let chunks = width.div_ceil(CHUNK);
    let mut arg = Queries([Query { draw: -1.0, row: 0, best: 1, scale: 0.0, norm: 0 }; QUERIES]);
    for (to, q) in arg.0.iter_mut().zip(queries) {
        assert!(q.row < logits.rows() && (1..=MAX_BEST).contains(&q.best), "{q:?} of {} rows", logits.rows());
        *to = Query {
            draw: q.draw.unwrap_or(-1.0),
            row: int(q.row),
            best: int(q.best.min(width)),
            scale: q.scale.unwrap_or(0.0),
            norm: i32::from(q.norm),
        };
    }
    let most = queries.iter().map(|q| q.best.min(width)).max().unwrap_or(1);
    let whole = most > 1 || queries.iter().any(|q| q.norm || q.scale.is_some());

    let mut scratch = d.scratch();
    let m = &mut scratch.sample;
    let context = d.context();
    let groups = m.groups.at_least(context, QUERIES * chunks * GROUPS * 8);
    let lists = m.lists.at_least(context, QUERIES * LIST * 8);
    let sums = m.sums.at_least(context, QUERIES * chunks * 2 * 8);
    let results = m.results.at_least(context, QUERIES * (HEAD + MAX_BEST * 8));
    let tickets = if m.counters.start() == 0 {
        let len = 2 * QUERIES * 4;
        let start = m.counters.at_least(context, len);
        #[allow(unsafe_code, reason = "a fill of device memory")]
        // SAFETY: it has just been allocated with this length.
        unsafe { d.stream().fill(start, 0, len) }.or_fatal("counters of the sampler");
        start
    } else {
        m.counters.start()
    };
    let (listed, best) = (tickets + (QUERIES * 4) as u64, results + (queries.len() * HEAD) as u64);
    let (n, each, grid) = (int(width), int(most), [dim(chunks), dim(queries.len()), 1]);
    let from = logits.start();
    let first: [&dyn KernelArg; 6] = [&arg, &from, &n, &groups, &tickets, &results];
    d.launch(File::Sample, "sample_best", grid, BLOCK, 0, &first);
    if whole {
        let second: [&dyn KernelArg; 10] = [&arg, &from, &n, &each, &lists, &listed, &sums, &tickets, &results, &best];
        d.launch(File::Sample, "sample_rows", grid, BLOCK, 0, &second);
    }
    let len = queries.len() * (HEAD + if most > 1 { most * 8 } else { 0 });
    // All there may be: it need not grow.
    let bytes = &mut m.host.at_least(context, QUERIES * (HEAD + MAX_BEST * 8))[..len];
    #[allow(unsafe_code, reason = "a copy from the device")]
    // SAFETY: `results` has room for more.
    unsafe { d.stream().download(results, bytes) }.or_fatal("reading results");
    let (heads, lists) = bytes.split_at(queries.len() * HEAD);
    let lists = lists.chunks(most * 8).chain(std::iter::repeat(&[][..]));
    for ((q, head), list) in queries.iter().zip(heads.as_chunks::<HEAD>().0).zip(lists) {
        let [norm, total, margin] = [0, 1, 2].map(|i| f64::from_bits(word(head, i)));
        let (top, drawn) = (word(head, 3), word(head, 4));
        let best = match q.best.min(width) {
            1 => vec![unpack(top)],
            k => (0..k).map(|i| unpack(word(list, i))).collect(),
        };
        let drawn = q.draw.filter(|_| margin >= 0.0).map(|draw| {
            let (logit, token) = unpack(drawn);
            Drawn { draw, token, logit, margin: margin / total }
        });
        out.push(RowSummary { best, total, norm, drawn });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_unpacked_as_they_are_packed() {
        assert_eq!(size_of::<Queries>(), QUERIES * 24, "no padding");
        for (logit, token) in [(1.5f32, 0u32), (-2.25, 129_279), (0.0, 7), (f32::MAX, 1), (f32::NEG_INFINITY, 3)] {
            let bits = logit.to_bits();
            let key = if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 };
            assert_eq!(unpack(u64::from(key) << 32 | u64::from(!token)), (logit, token));
        }
    }
}
