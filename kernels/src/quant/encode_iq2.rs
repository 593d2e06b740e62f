//! Encoder of IQ2_XXS: in a group of 32, each eight elements are a codebook entry of magnitudes with an even number of minus
//! signs, under a 4-bit scale of the group and an f16 of the block.
//!
//! For a scale `s`, an entry `g` costs `Σ w (t − s·g)² = Σ w t² − 2s·Σ w t g + s²·Σ w g²`. The two sums do not depend on the
//! scale, so they are computed once for all 256 entries; then every scale that is tried costs one pass over two tables.

use half::f16;

use super::grids::IQ2_XXS;

/// The codebook with the element first: one row of 256 entries for each of the eight places.
static COLUMNS: [[f32; 256]; 8] = columns();
/// `Σ g²` of each entry.
static NORMS: [f32; 256] = norms();

const fn widen(v: i8) -> f32 {
    match v {
        8 => 8.0,
        25 => 25.0,
        _ => 43.0,
    }
}

const fn columns() -> [[f32; 256]; 8] {
    let mut out = [[0.0; 256]; 8];
    let mut i = 0;
    while i < 256 * 8 {
        out[i % 8][i / 8] = widen(IQ2_XXS[i / 8][i % 8]);
        i += 1;
    }
    out
}

const fn norms() -> [f32; 256] {
    let mut out = [0.0; 256];
    let mut i = 0;
    while i < 256 * 8 {
        let v = widen(IQ2_XXS[i / 8][i % 8]);
        out[i / 8] += v * v;
        i += 1;
    }
    out
}

/// Eight elements: their signs and what each codebook entry would be worth.
struct Eight {
    /// Bit `j`: element `j` is negative. An even number of bits.
    signs: u8,
    /// `Σ w t g` of each entry, where `t` is the element with its sign taken off.
    dots: [f32; 256],
    /// `Σ w g²` of each entry.
    norms: [f32; 256],
    /// `Σ w t²`.
    energy: f32,
    /// `Σ w`.
    weight: f32,
}

impl Eight {
    fn new(x: &[f32; 8], w: &[f32; 8], flat: bool) -> Self {
        let mut t = x.map(f32::abs);
        let mut signs = x.iter().enumerate().fold(0u8, |s, (j, v)| s | (u8::from(*v < 0.0) << j));
        if signs.count_ones() % 2 == 1 {
            // One sign must be wrong: the one that matters least. Its target is then below zero.
            let cost = |j: &usize| w[*j] * t[*j];
            let least = (0..8).min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(0);
            signs ^= 1 << least;
            t[least] = -t[least];
        }
        let mut eight = Self { signs, dots: [0.0; 256], norms: NORMS, energy: 0.0, weight: 0.0 };
        if !flat {
            eight.norms = [0.0; 256];
        }
        for ((column, t), w) in COLUMNS.iter().zip(t).zip(w) {
            eight.energy += w * t * t;
            eight.weight += w;
            let wt = w * t;
            for (dot, g) in eight.dots.iter_mut().zip(column) {
                *dot += wt * g;
            }
            if !flat {
                for (norm, g) in eight.norms.iter_mut().zip(column) {
                    *norm += w * g * g;
                }
            }
        }
        eight
    }

    /// Error of the best entry at scale `s`, less `energy`.
    #[inline]
    fn gain(&self, s: f32) -> f32 {
        let mut least = [f32::INFINITY; 8];
        for (dots, norms) in self.dots.as_chunks::<8>().0.iter().zip(self.norms.as_chunks::<8>().0) {
            for l in 0..8 {
                let v = s * (s * norms[l] - 2.0 * dots[l]);
                least[l] = if v < least[l] { v } else { least[l] };
            }
        }
        least.iter().fold(f32::INFINITY, |a, v| a.min(*v))
    }

    /// The best entry at scale `s`.
    fn entry(&self, s: f32) -> u8 {
        let mut best = (f32::INFINITY, 0);
        for ((i, dot), norm) in (0..=255).zip(&self.dots).zip(&self.norms) {
            let v = s * (s * norm - 2.0 * dot);
            if v < best.0 {
                best = (v, i);
            }
        }
        best.1
    }
}

fn gain(group: &[Eight], s: f32) -> f32 {
    group.iter().map(|e| e.gain(s)).sum()
}

/// `Σ w t g` and `Σ w g²` of the entries that are best at scale `s`.
fn moments(group: &[Eight], s: f32) -> (f32, f32) {
    group.iter().fold((0.0, 0.0), |(dot, norm), e| {
        let i = usize::from(e.entry(s));
        (dot + e.dots[i], norm + e.norms[i])
    })
}

/// The group's own best scale.
fn best_scale(group: &[Eight]) -> f32 {
    let (energy, weight) = group.iter().fold((0.0, 0.0), |(e, w), g| (e + g.energy, w + g.weight));
    if energy <= 0.0 || weight <= 0.0 {
        return 0.0;
    }
    let rms = (energy / weight).sqrt();
    // From "every element is a 43" to "every element is an 8", in steps of 15 %: codebook values lie much farther apart.
    let mut best = (f32::INFINITY, 0.0);
    let mut s = rms / 45.0;
    while s < rms / 7.5 {
        let v = gain(group, s);
        if v < best.0 {
            best = (v, s);
        }
        s *= 1.15;
    }
    for _ in 0..3 {
        let (dot, norm) = moments(group, best.1);
        if dot <= 0.0 || norm <= 0.0 {
            break;
        }
        let v = gain(group, dot / norm);
        if v >= best.0 {
            break;
        }
        best = (v, dot / norm);
    }
    best.1
}

/// Each group's 4-bit scale under `d`, and the error that is left.
fn choose(groups: &[[Eight; 4]; 8], scales: &[f32; 8], d: f16) -> (f32, [u8; 8]) {
    let unit = d.to_f32() / 8.0;
    let mut total = 0.0;
    let chosen = std::array::from_fn(|g| {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 15; the cast saturates")]
        let near = ((scales[g] / unit - 1.0) / 2.0).round().clamp(0.0, 15.0) as u8;
        let mut best = (f32::INFINITY, near);
        for s in near.saturating_sub(1)..=(near + 1).min(15) {
            let v = gain(&groups[g], unit * f32::from(2 * s + 1));
            if v < best.0 {
                best = (v, s);
            }
        }
        total += best.0;
        best.1
    });
    (total, chosen)
}

/// Encodes one block; the layout is at [`super::iq::iq2_xxs`]. `flat`: all weights are one.
pub(super) fn iq2_xxs(x: &[f32; 256], w: &[f32; 256], flat: bool, out: &mut Vec<u8>) {
    let (xs, ws) = (x.as_chunks::<8>().0, w.as_chunks::<8>().0);
    let groups: [[Eight; 4]; 8] =
        std::array::from_fn(|g| std::array::from_fn(|k| Eight::new(&xs[4 * g + k], &ws[4 * g + k], flat)));
    let scales: [f32; 8] = std::array::from_fn(|g| best_scale(&groups[g]));
    let largest = scales.iter().fold(0.0f32, |a, s| a.max(*s));
    let half = |v: f32| f16::from_f32(v.min(f16::MAX.to_f32()));
    let mut best = (f32::INFINITY, f16::ZERO, [0u8; 8]);
    // The largest scale is level 15 (31 eighths), or a little beyond or short of it.
    for reach in [31.0, 28.5, 33.0] {
        let d = half(largest * 8.0 / reach);
        if d == f16::ZERO {
            continue;
        }
        let (error, chosen) = choose(&groups, &scales, d);
        if error < best.0 {
            best = (error, d, chosen);
        }
    }
    for _ in 0..2 {
        let (mut dots, mut norms) = (0.0, 0.0);
        for (group, s) in groups.iter().zip(best.2) {
            let eighths = f32::from(2 * s + 1) / 8.0;
            let (dot, norm) = moments(group, best.1.to_f32() * eighths);
            dots += eighths * dot;
            norms += eighths * eighths * norm;
        }
        let d = if norms > 0.0 { half((dots / norms).max(0.0)) } else { f16::ZERO };
        if d == f16::ZERO || d == best.1 {
            break;
        }
        let (error, chosen) = choose(&groups, &scales, d);
        if error >= best.0 {
            break;
        }
        best = (error, d, chosen);
    }
    let (_, d, chosen) = best;
    out.extend(d.to_le_bytes());
    for (group, s) in groups.iter().zip(chosen) {
        let scale = d.to_f32() / 8.0 * f32::from(2 * s + 1);
        out.extend(group.iter().map(|e| e.entry(scale)));
        let signs =
            group.iter().zip([0, 7, 14, 21]).fold(0u32, |word, (e, at)| word | (u32::from(e.signs & 127) << at));
        out.extend((signs | (u32::from(s) << 28)).to_le_bytes());
    }
}
