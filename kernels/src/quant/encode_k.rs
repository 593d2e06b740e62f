//! Encoders of Q4_K and Q2_K: `x ≈ d·sc·q − dmin·m`, found by search for the least (weighted) squared error.
//!
//! Each sub-block is fitted alone first: levels for a scale and a minimum, then the scale and minimum that are best for those
//! levels, in turns (Lloyd's method), from several starts. Then the scales become small integers under one f16 per block, each
//! sub-block choosing among the neighbouring integers, and that f16 is fitted again.

use half::f16;

/// Sums are kept in lanes, so that the compiler may use vector registers: floating point addition is not reordered otherwise.
const LANES: usize = 8;

/// Start of the search: how much wider than the values' range the levels reach (in levels, negative: narrower), and how
/// much of the range below zero is given up.
type Start = (f32, f32);

/// Sixteen levels: the range itself is nearly right.
const STARTS_16: &[Start] = &[(0.0, 0.0), (-0.9, 0.0), (0.5, 0.0), (-0.5, 0.06), (-1.6, 0.1)];
/// Four levels: clipping the extremes pays.
const STARTS_4: &[Start] = &[(0.0, 0.0), (-0.3, 0.0), (0.3, 0.0), (-0.3, 0.15), (-0.6, 0.3), (0.0, 0.3)];

/// A block of `G` sub-blocks: the format's fields, unpacked.
struct Block<const G: usize> {
    d: f16,
    dmin: f16,
    scales: [u8; G],
    mins: [u8; G],
    levels: [u8; 256],
}

/// Rounds to a level from 0 to `top` (at most 63). NaN becomes 0.
#[inline]
fn level(v: f32, top: f32) -> f32 {
    // Adding and taking away 1.5·2^23 rounds to the nearest integer without a call into the mathematics library.
    const SHIFT: f32 = 12_582_912.0;
    let v = if v > 0.0 { v } else { 0.0 };
    let v = if v < top { v } else { top };
    (v + SHIFT) - SHIFT
}

/// The best levels for a scale and a minimum, and their squared error.
#[inline]
fn assign<const N: usize>(x: &[f32; N], w: &[f32; N], (scale, min): (f32, f32), top: f32, q: &mut [f32; N]) -> f32 {
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let mut error = [0.0f32; LANES];
    for at in (0..N).step_by(LANES) {
        for (l, sum) in error.iter_mut().enumerate() {
            let i = at + l;
            q[i] = level((x[i] + min) * inverse, top);
            let e = scale * q[i] - min - x[i];
            *sum += w[i] * e * e;
        }
    }
    error.iter().sum()
}

/// The scale and minimum of least error for given levels; `None` when no scale above zero is any good.
fn least_squares<const N: usize>(x: &[f32; N], w: &[f32; N], q: &[f32; N]) -> Option<(f32, f32)> {
    let mut sums = [[0.0f32; LANES]; 5];
    for at in (0..N).step_by(LANES) {
        for l in 0..LANES {
            let (x, w, q) = (x[at + l], w[at + l], q[at + l]);
            sums[0][l] += w;
            sums[1][l] += w * x;
            sums[2][l] += w * q;
            sums[3][l] += w * q * q;
            sums[4][l] += w * q * x;
        }
    }
    let [sw, sx, sq, sqq, sqx] = sums.map(|lanes| lanes.iter().map(|v| f64::from(*v)).sum::<f64>());
    solve(sqq, sq, sw, sqx, sx)
}

/// Minimises `Σ w (a·s − b·m − x)²` from the sums of `w·a²`, `w·a·b`, `w·b²`, `w·a·x` and `w·b·x`; `s > 0`, `m ≥ 0`.
#[allow(clippy::cast_possible_truncation, reason = "results are of the inputs' magnitude")]
fn solve(aa: f64, ab: f64, bb: f64, ax: f64, bx: f64) -> Option<(f32, f32)> {
    let det = aa * bb - ab * ab;
    if det > 1e-9 * aa * bb {
        let (s, m) = ((bb * ax - ab * bx) / det, (ab * ax - aa * bx) / det);
        if m >= 0.0 {
            return (s > 0.0).then_some((s as f32, m as f32));
        }
    }
    (aa > 0.0 && ax > 0.0).then(|| ((ax / aa) as f32, 0.0))
}

/// Scale and minimum of one sub-block, not yet quantised.
fn fit<const N: usize>(x: &[f32; N], w: &[f32; N], top: f32, starts: &[Start]) -> (f32, f32) {
    let low = x.iter().fold(0.0f32, |a, v| a.min(*v));
    let high = x.iter().fold(low, |a, v| a.max(*v));
    if high <= low {
        // All the same and not above zero: the minimum says it all.
        return (0.0, -low);
    }
    let mut q = [0.0; N];
    let mut best = (f32::INFINITY, (0.0, 0.0));
    for (over, cut) in starts {
        let from = low * (1.0 - cut);
        let mut at = ((high - from) / (top + over), -from);
        let mut before = f32::INFINITY;
        for _ in 0..4 {
            let error = assign(x, w, at, top, &mut q);
            if error < best.0 {
                best = (error, at);
            }
            if error > before * 0.999 {
                break;
            }
            before = error;
            match least_squares(x, w, &q) {
                Some(next) => at = next,
                None => break,
            }
        }
    }
    best.1
}

/// Rounds to f16, towards zero when rounding would overflow.
fn half(v: f32) -> f16 {
    f16::from_f32(v.min(f16::MAX.to_f32()))
}

/// `v / unit` to a whole number up to `top`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 63")]
fn ratio(v: f32, unit: f32, top: u8) -> u8 {
    if unit > 0.0 { level(v / unit, f32::from(top)) as u8 } else { 0 }
}

/// Chooses each sub-block's integers under `d` and `dmin`, starting from its own best scale and minimum. Returns the error.
fn choose<const N: usize, const G: usize>(
    x: &[f32; 256],
    w: &[f32; 256],
    top: u8,
    top_scale: u8,
    fits: &[(f32, f32); G],
    block: &mut Block<G>,
) -> f32 {
    let (d, dmin) = (block.d.to_f32(), block.dmin.to_f32());
    let (xs, ws) = (x.as_chunks::<N>().0, w.as_chunks::<N>().0);
    let mut total = 0.0;
    let mut q = [0.0; N];
    for (g, (scale, min)) in fits.iter().enumerate() {
        let (s0, m0) = (ratio(*scale, d, top_scale), ratio(*min, dmin, top_scale));
        let near = |v: u8| v.saturating_sub(1)..=(v + 1).min(top_scale);
        let mut best = (f32::INFINITY, s0, m0);
        for s in near(s0) {
            for m in near(m0) {
                let at = (d * f32::from(s), dmin * f32::from(m));
                let error = assign(&xs[g], &ws[g], at, f32::from(top), &mut q);
                if error < best.0 {
                    best = (error, s, m);
                }
            }
        }
        (block.scales[g], block.mins[g]) = (best.1, best.2);
        total += assign(&xs[g], &ws[g], (d * f32::from(best.1), dmin * f32::from(best.2)), f32::from(top), &mut q);
        for (to, q) in block.levels[g * N..].iter_mut().zip(q) {
            *to = ratio(q, 1.0, top);
        }
    }
    total
}

/// The `d` and `dmin` of least error for the integers of `block`.
fn refit<const N: usize, const G: usize>(x: &[f32; 256], w: &[f32; 256], block: &Block<G>) -> Option<(f16, f16)> {
    let [mut aa, mut ab, mut bb, mut ax, mut bx] = [0.0f64; 5];
    for i in 0..256 {
        let g = i / N;
        let (a, b) = (f64::from(block.scales[g]) * f64::from(block.levels[i]), f64::from(block.mins[g]));
        let (x, w) = (f64::from(x[i]), f64::from(w[i]));
        aa += w * a * a;
        ab += w * a * b;
        bb += w * b * b;
        ax += w * a * x;
        bx += w * b * x;
    }
    solve(aa, ab, bb, ax, bx).map(|(d, dmin)| (half(d), half(dmin)))
}

fn encode<const N: usize, const G: usize>(
    x: &[f32; 256],
    w: &[f32; 256],
    top: u8,
    top_scale: u8,
    starts: &[Start],
) -> Block<G> {
    let (xs, ws) = (x.as_chunks::<N>().0, w.as_chunks::<N>().0);
    let fits: [(f32, f32); G] = std::array::from_fn(|g| fit(&xs[g], &ws[g], f32::from(top), starts));
    let largest = fits.iter().fold((0.0f32, 0.0f32), |(s, m), f| (s.max(f.0), m.max(f.1)));
    let empty = |d, dmin| Block { d, dmin, scales: [0; G], mins: [0; G], levels: [0; 256] };
    let mut best = empty(half(largest.0 / f32::from(top_scale)), half(largest.1 / f32::from(top_scale)));
    let mut error = choose::<N, G>(x, w, top, top_scale, &fits, &mut best);
    for _ in 0..3 {
        let Some((d, dmin)) = refit::<N, G>(x, w, &best) else { break };
        let mut next = empty(d, dmin);
        let found = choose::<N, G>(x, w, top, top_scale, &fits, &mut next);
        if found >= error {
            break;
        }
        (best, error) = (next, found);
    }
    best
}

/// Encodes one block of Q4_K; the layout is at [`super::k::q4_k`].
pub(super) fn q4_k(x: &[f32; 256], w: &[f32; 256], out: &mut Vec<u8>) {
    let b: Block<8> = encode::<32, 8>(x, w, 15, 63, STARTS_16);
    out.extend(b.d.to_le_bytes());
    out.extend(b.dmin.to_le_bytes());
    let mut packed = [0u8; 12];
    for j in 0..4 {
        packed[j] = b.scales[j] | ((b.scales[j + 4] >> 4) << 6);
        packed[j + 4] = b.mins[j] | ((b.mins[j + 4] >> 4) << 6);
        packed[j + 8] = (b.scales[j + 4] & 15) | ((b.mins[j + 4] & 15) << 4);
    }
    out.extend(packed);
    for pair in b.levels.as_chunks::<64>().0 {
        out.extend((0..32).map(|j| pair[j] | (pair[j + 32] << 4)));
    }
}

/// Encodes one block of Q2_K; the layout is at [`super::k::q2_k`].
pub(super) fn q2_k(x: &[f32; 256], w: &[f32; 256], out: &mut Vec<u8>) {
    let b: Block<16> = encode::<16, 16>(x, w, 3, 15, STARTS_4);
    out.extend((0..16).map(|g| b.scales[g] | (b.mins[g] << 4)));
    for half in b.levels.as_chunks::<128>().0 {
        out.extend((0..32).map(|j| half[j] | (half[j + 32] << 2) | (half[j + 64] << 4) | (half[j + 96] << 6)));
    }
    out.extend(b.d.to_le_bytes());
    out.extend(b.dmin.to_le_bytes());
}
