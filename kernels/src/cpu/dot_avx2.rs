//! Quantised rows times a panel with AVX2: `vpmaddwd` on pairs of 16-bit integers, 8 outputs a register.

#![allow(unsafe_code, reason = "std::arch intrinsics")]
#![allow(clippy::needless_range_loop, reason = "indices name registers and rows")]

use std::arch::x86_64::*;

use crate::cpu::isa::{Isa, Kind};
use crate::cpu::lanes::N;
use crate::cpu::panel::Panel;
use crate::cpu::q16::{Meta, Quants};

/// See [`crate::cpu::dot::product`].
pub(crate) fn product(isa: Isa, panel: &Panel, quants: &[Quants], meta: &[Meta], out: &mut [[f32; N]]) {
    assert_eq!(isa.kind(), Kind::Avx2);
    let n = out.len() * panel.blocks;
    let subs = 32 / panel.sub;
    assert!(quants.len() >= n && meta.len() >= n && panel.q.len() >= panel.blocks * 16);
    assert!(panel.scale.len() >= panel.blocks * subs && (!panel.has_min || panel.min.len() >= panel.blocks * subs));
    // SAFETY: the CPU has the features (an `Isa` of this kind exists) and every slice is as long as the loops assume.
    unsafe {
        match (panel.sub, panel.has_min) {
            (32, false) => all_rows::<1, false>(panel, quants, meta, out),
            (32, true) => all_rows::<1, true>(panel, quants, meta, out),
            (_, false) => all_rows::<2, false>(panel, quants, meta, out),
            (_, true) => all_rows::<2, true>(panel, quants, meta, out),
        }
    }
}

/// # Safety
/// As `product` checks.
#[target_feature(enable = "avx2,fma")]
unsafe fn all_rows<const S: usize, const MIN: bool>(
    panel: &Panel,
    quants: &[Quants],
    meta: &[Meta],
    out: &mut [[f32; N]],
) {
    let mut r = 0;
    while r < out.len() {
        let at = r * panel.blocks;
        let (q, m, o) = (quants[at..].as_ptr(), meta[at..].as_ptr(), &mut out[r..]);
        // SAFETY: `o` has at least as many rows as the instance takes; the rest as the caller promises.
        unsafe {
            r += match o.len() {
                1 => rows::<1, 2, S, MIN>(panel, q, m, o),
                2 => rows::<2, 1, S, MIN>(panel, q, m, o),
                _ => rows::<3, 1, S, MIN>(panel, q, m, o),
            };
        }
    }
}

/// `R` rows, with `C` independent sums each.
///
/// # Safety
/// As `product` checks, with `out.len() >= R`.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn rows<const R: usize, const C: usize, const S: usize, const MIN: bool>(
    panel: &Panel,
    quants: *const Quants,
    meta: *const Meta,
    out: &mut [[f32; N]],
) -> usize {
    let blocks = panel.blocks;
    let per = 16 / S;
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    for b in 0..blocks {
        for s in 0..S {
            // SAFETY: in bounds by the caller's promise: line `b * 16 + 15` of q, `b * S + s` of scale and min, block `b`
            // of rows 0..R of the activations, whose 64 bytes are read as 16 pairs.
            unsafe {
                let w = panel.q.as_ptr().cast::<__m256i>().add((b * 16 + s * per) * 2);
                let x: [*const i32; R] = std::array::from_fn(|r| quants.add(r * blocks + b).cast::<i32>().add(s * per));
                let mut sum = [[[_mm256_setzero_si256(); 2]; C]; R];
                for k in 0..per {
                    let w = [_mm256_load_si256(w.add(2 * k)), _mm256_load_si256(w.add(2 * k + 1))];
                    for r in 0..R {
                        let x = _mm256_set1_epi32(*x[r].add(k));
                        for h in 0..2 {
                            let s = &mut sum[r][k % C][h];
                            *s = _mm256_add_epi32(*s, _mm256_madd_epi16(w[h], x));
                        }
                    }
                }
                for r in 0..R {
                    let m = &*meta.add(r * blocks + b);
                    for h in 0..2 {
                        let mut total = sum[r][0][h];
                        for c in 1..C {
                            total = _mm256_add_epi32(total, sum[r][c][h]);
                        }
                        let at = (b * S + s) * N + 8 * h;
                        let scale = _mm256_load_ps(panel.scale.as_ptr().cast::<f32>().add(at));
                        let scale = _mm256_mul_ps(scale, _mm256_set1_ps(m.d));
                        acc[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, acc[r][h]);
                        if MIN {
                            let min = _mm256_load_ps(panel.min.as_ptr().cast::<f32>().add(at));
                            let x = if S == 1 { m.total } else { m.value[s] };
                            acc[r][h] = _mm256_fmadd_ps(min, _mm256_set1_ps(x), acc[r][h]);
                        }
                    }
                }
            }
        }
    }
    for (acc, out) in acc.iter().zip(out) {
        // SAFETY: twice 8 of 16 floats.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), acc[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), acc[1]);
        }
    }
    R
}
