//! Quantised rows times a panel: the order of operations, its plain version, and the choice among versions.
//!
//! Per output and row, over blocks (or halves of blocks, where scales cover 16 inputs) in order:
//!
//! ```text
//! s   = sum of (q - offset) * x        exact, in i32: at most 32 * 255 * 32512 < 2^28
//! acc = fma(f32(s), scale * d, acc)    scale of the weights, d of the activations
//! acc = fma(min, d * sum of x, acc)    where the format has minimums
//! ```
//!
//! Every version computes exactly that, so all agree bit for bit, for one row or many.

use crate::cpu::isa::{Isa, Kind, multiversion};
use crate::cpu::lanes::{Lanes, N};
use crate::cpu::panel::Panel;
use crate::cpu::q16::{BLOCK, Meta, Quants};

/// `out[r] = x[r] · panel` for each of the `out.len()` rows of `quants` and `meta` (`[rows, panel.blocks]`).
pub(crate) fn product(isa: Isa, panel: &Panel, quants: &[Quants], meta: &[Meta], out: &mut [[f32; N]]) {
    let n = out.len() * panel.blocks;
    let (quants, meta) = (&quants[..n], &meta[..n]);
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 => crate::cpu::dot_avx512::product(isa, panel, quants, meta, out),
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => crate::cpu::dot_avx2::product(isa, panel, quants, meta, out),
        #[cfg(target_arch = "aarch64")]
        Kind::NeonDot => crate::cpu::dot_neon::product(isa, panel, quants, meta, out),
        Kind::Scalar => plain(isa, panel, quants, meta, out),
    }
}

/// Outputs of two panels.
pub(crate) const PAIR: usize = 2 * N;

/// [`product`] with two panels of one weight side by side: the same bits, and quicker where rows are many.
pub(crate) fn product_pair(
    isa: Isa,
    panels: &[Panel; 2],
    quants: &[Quants],
    meta: &[Meta],
    part: &mut Vec<[f32; N]>,
    out: &mut [[f32; PAIR]],
) {
    #[cfg(target_arch = "x86_64")]
    if isa.kind() == Kind::Avx512 {
        crate::cpu::dot_avx512::product_pair(isa, panels, quants, meta, out);
        return;
    }
    part.resize(out.len(), [0.0; N]);
    for (p, panel) in panels.iter().enumerate() {
        product(isa, panel, quants, meta, part);
        for (out, part) in out.iter_mut().zip(part.iter()) {
            out.as_chunks_mut::<N>().0[p] = *part;
        }
    }
}

#[inline(always)]
fn plain_impl<L: Lanes>(panel: &Panel, quants: &[Quants], meta: &[Meta], out: &mut [[f32; N]]) {
    let subs = BLOCK / panel.sub;
    let pairs = 16 / subs;
    for (r, out) in out.iter_mut().enumerate() {
        let mut acc = L::splat(0.0);
        for b in 0..panel.blocks {
            let (x, m) = (&quants[r * panel.blocks + b].0, &meta[r * panel.blocks + b]);
            for s in 0..subs {
                let mut sum = [0i32; N];
                for p in s * pairs..(s + 1) * pairs {
                    let (x0, x1) = (i32::from(x[2 * p]), i32::from(x[2 * p + 1]));
                    for (sum, w) in sum.iter_mut().zip(panel.q[b * 16 + p].0) {
                        let [a, b, c, d] = w.to_bits().to_le_bytes();
                        let (w0, w1) = (i16::from_le_bytes([a, b]), i16::from_le_bytes([c, d]));
                        *sum += i32::from(w0) * x0 + i32::from(w1) * x1;
                    }
                }
                #[allow(clippy::cast_precision_loss, reason = "rounding to f32 is part of the definition")]
                let sum = L::load(&sum.map(|s| s as f32));
                let scale = L::load(&panel.scale[b * subs + s].0).mul(L::splat(m.d));
                acc = sum.fma(scale, acc);
                if panel.has_min {
                    let value = if subs == 1 { m.total } else { m.value[s] };
                    acc = L::load(&panel.min[b * subs + s].0).fma(L::splat(value), acc);
                }
            }
        }
        acc.store(out);
    }
}

multiversion! {
    fn plain = plain_impl(panel: &Panel, quants: &[Quants], meta: &[Meta], out: &mut [[f32; N]]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;
    use crate::cpu::q16::{self, Activations};
    use crate::quant;

    fn run(
        isa: Isa,
        ty: ds4_manifests::GgmlType,
        weights: &[u8],
        cols: usize,
        x: &[f32],
        rows: usize,
    ) -> Vec<[f32; N]> {
        let mut acts = Activations::default();
        acts.resize(rows, cols);
        q16::quantize(isa, x, &mut acts.quants, &mut acts.meta);
        let mut panel = Panel::default();
        let w: Vec<&[u8]> = weights.chunks_exact(quant::row_bytes(ty, cols)).collect();
        panel.unpack(isa, ty, &w, cols);
        let mut out = vec![[f32::NAN; N]; rows];
        product(isa, &panel, &acts.quants, &acts.meta, &mut out);
        out
    }

    #[test]
    fn every_isa_gives_the_bits_of_the_plain_version() {
        let seed = Random::fresh_seed();
        let mut rng = Random::new(seed);
        for ty in quant::SUPPORTED.into_iter().filter(|t| t.block_elems() > 1) {
            for (cols, outputs) in [(512, 16), (768, 5), (if ty.block_elems() == 32 { 96 } else { 256 }, 16)] {
                let w = rng.weights(ty, outputs, cols);
                for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 31] {
                    let x = rng.activations(rows * cols);
                    let all: Vec<_> =
                        Isa::available().into_iter().map(|i| (i, run(i, ty, &w, cols, &x, rows))).collect();
                    let (_, plain) = all.last().expect("scalar is always there");
                    for (isa, got) in &all {
                        for (r, (got, want)) in got.iter().zip(plain).enumerate() {
                            let (got, want) = (&got[..outputs], &want[..outputs]);
                            let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                            assert!(
                                same,
                                "{ty} on {} row {r} of {rows}: {got:?} {want:?} (DS4_SEED={seed})",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn pairs_give_the_bits_of_single_panels() {
        let seed = Random::fresh_seed();
        let mut rng = Random::new(seed);
        for ty in quant::SUPPORTED.into_iter().filter(|t| t.block_elems() > 1) {
            let cols = 512;
            let w = [rng.weights(ty, N, cols), rng.weights(ty, N, cols)];
            for rows in [1, 2, 3, 4, 5, 6, 7, 11, 12, 17] {
                let x = rng.activations(rows * cols);
                for isa in Isa::available() {
                    let mut acts = Activations::default();
                    acts.resize(rows, cols);
                    q16::quantize(isa, &x, &mut acts.quants, &mut acts.meta);
                    let panels = [0, 1].map(|p: usize| {
                        let mut panel = Panel::default();
                        let w: Vec<&[u8]> = w[p].chunks_exact(quant::row_bytes(ty, cols)).collect();
                        panel.unpack(isa, ty, &w, cols);
                        panel
                    });
                    let mut out = vec![[f32::NAN; PAIR]; rows];
                    product_pair(isa, &panels, &acts.quants, &acts.meta, &mut Vec::new(), &mut out);
                    for (p, w) in w.iter().enumerate() {
                        for (want, got) in run(isa, ty, w, cols, &x, rows).iter().zip(&out) {
                            let got = &got[p * N..(p + 1) * N];
                            let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                            assert!(same, "{ty} on {} with {rows} rows (DS4_SEED={seed})", isa.name());
                        }
                    }
                }
            }
        }
    }

    /// The extremes of every factor do not overflow the integer sum.
    #[test]
    fn greatest_magnitudes_are_exact() {
        use ds4_manifests::GgmlType;
        let cols = 64;
        let mut w = vec![0x80u8; quant::row_bytes(GgmlType::Q8_0, cols)];
        for b in w.chunks_exact_mut(34) {
            b[..2].copy_from_slice(&half::f16::ONE.to_le_bytes());
        }
        let x = vec![-2.0; cols];
        for isa in Isa::available() {
            assert_eq!(run(isa, GgmlType::Q8_0, &w, cols, &x, 1)[0][0], 128.0 * 2.0 * 64.0, "{}", isa.name());
        }
    }
}
