//! Quantised rows times a panel with AVX-512 VNNI.
//!
//! `vpdpbusd` multiplies the panel's unsigned bytes (16 outputs by 4 inputs) with four signed bytes of one activation row,
//! broadcast: once for the high bytes, then, shifted, for the low ones. The offset of the weights is taken out through the
//! sum of the activations.

#![allow(unsafe_code, reason = "std::arch intrinsics")]
#![allow(clippy::needless_range_loop, reason = "indices name registers and rows")]

use std::arch::x86_64::*;

use crate::cpu::dot::PAIR;
use crate::cpu::isa::{Isa, Kind};
use crate::cpu::lanes::{N, array};
use crate::cpu::panel::Panel;
use crate::cpu::q16::{Meta, Quants};

/// See [`crate::cpu::dot::product`].
pub(crate) fn product(isa: Isa, panel: &Panel, quants: &[Quants], meta: &[Meta], out: &mut [[f32; N]]) {
    assert_eq!(isa.kind(), Kind::Avx512);
    let n = out.len() * panel.blocks;
    let subs = 32 / panel.sub;
    assert!(quants.len() >= n && meta.len() >= n && panel.q.len() >= panel.blocks * 8);
    assert!(panel.scale.len() >= panel.blocks * subs && (!panel.has_min || panel.min.len() >= panel.blocks * subs));
    // SAFETY: the CPU has the features (an `Isa` of this kind exists) and every slice is as long as the loops assume.
    unsafe {
        match (panel.sub, panel.has_min, panel.offset != 0) {
            (32, false, _) => all_rows::<1, false, true>(panel, quants, meta, out),
            (32, true, false) => all_rows::<1, true, false>(panel, quants, meta, out),
            (32, true, true) => all_rows::<1, true, true>(panel, quants, meta, out),
            (_, false, _) => all_rows::<2, false, true>(panel, quants, meta, out),
            (_, true, false) => all_rows::<2, true, false>(panel, quants, meta, out),
            (_, true, true) => all_rows::<2, true, true>(panel, quants, meta, out),
        }
    }
}

/// See [`crate::cpu::dot::product_pair`].
///
/// With one panel, every `vpdpbusd` loads its activations and the loads are the limit (1.1 of them an instruction); with two
/// panels they serve twice. Measured on 120 rows of 512 or 4096 inputs: 192 and 182 GMAC/s with one, 225 and 220 with two.
pub(crate) fn product_pair(isa: Isa, panels: &[Panel; 2], quants: &[Quants], meta: &[Meta], out: &mut [[f32; PAIR]]) {
    let [a, b] = panels;
    let same = (a.blocks, a.sub, a.has_min, a.offset) == (b.blocks, b.sub, b.has_min, b.offset);
    assert!(isa.kind() == Kind::Avx512 && same, "two panels of one weight");
    let (n, subs) = (out.len() * a.blocks, a.blocks * (32 / a.sub));
    assert!(quants.len() >= n && meta.len() >= n);
    for p in panels {
        assert!(p.q.len() >= p.blocks * 8 && p.scale.len() >= subs && (!p.has_min || p.min.len() >= subs));
    }
    // SAFETY: the CPU has the features (an `Isa` of this kind exists) and every slice is as long as the loops assume.
    unsafe {
        match (a.sub, a.has_min, a.offset != 0) {
            (32, false, _) => all_pairs::<1, false, true>(panels, quants, meta, out),
            (32, true, false) => all_pairs::<1, true, false>(panels, quants, meta, out),
            (32, true, true) => all_pairs::<1, true, true>(panels, quants, meta, out),
            (_, false, _) => all_pairs::<2, false, true>(panels, quants, meta, out),
            (_, true, false) => all_pairs::<2, true, false>(panels, quants, meta, out),
            (_, true, true) => all_pairs::<2, true, true>(panels, quants, meta, out),
        }
    }
}

/// # Safety
/// As `product_pair` checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn all_pairs<const S: usize, const MIN: bool, const OFF: bool>(
    panels: &[Panel; 2],
    quants: &[Quants],
    meta: &[Meta],
    out: &mut [[f32; PAIR]],
) {
    let mut r = 0;
    while r < out.len() {
        let at = r * panels[0].blocks;
        let (q, m, o) = (quants[at..].as_ptr(), meta[at..].as_ptr(), &mut out[r..]);
        // SAFETY: `o` has at least as many rows as the instance takes; the rest as the caller promises.
        unsafe {
            r += match o.len() {
                1 => {
                    // One row alone needs several sums per panel to hide latency.
                    for (panel, half) in panels.iter().zip(o[0].as_chunks_mut::<N>().0) {
                        rows::<1, 4, S, MIN, OFF>(panel, q, m, std::slice::from_mut(half));
                    }
                    1
                }
                2 => pair::<2, S, MIN, OFF>(panels, q, m, o),
                3 => pair::<3, S, MIN, OFF>(panels, q, m, o),
                4 => pair::<4, S, MIN, OFF>(panels, q, m, o),
                5 => pair::<5, S, MIN, OFF>(panels, q, m, o),
                _ => pair::<6, S, MIN, OFF>(panels, q, m, o),
            };
        }
    }
}

/// `R` rows with both panels.
///
/// # Safety
/// As `product_pair` checks, with `out.len() >= R`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
unsafe fn pair<const R: usize, const S: usize, const MIN: bool, const OFF: bool>(
    panels: &[Panel; 2],
    quants: *const Quants,
    meta: *const Meta,
    out: &mut [[f32; PAIR]],
) -> usize {
    let (blocks, offset) = (panels[0].blocks, panels[0].offset);
    let per = 8 / S;
    let mut acc = [[_mm512_setzero_ps(); 2]; R];
    for b in 0..blocks {
        for s in 0..S {
            // SAFETY: in bounds by the caller's promise, as in `rows`, for both panels.
            unsafe {
                let w: [*const __m512i; 2] =
                    array!(2, std::ptr::null(), |p| panels[p].q.as_ptr().cast::<__m512i>().add(b * 8 + s * per));
                let mut sum = [[_mm512_setzero_si512(); 2]; R];
                // High bytes, then, on top of them shifted, low bytes.
                for half in 0..2 {
                    for k in 0..per {
                        let w = [_mm512_load_si512(w[0].add(k)), _mm512_load_si512(w[1].add(k))];
                        for r in 0..R {
                            let x = quants.add(r * blocks + b).cast::<i32>().add(8 * half + s * per + k);
                            let x = _mm512_set1_epi32(*x);
                            for p in 0..2 {
                                sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], w[p], x);
                            }
                        }
                    }
                    if half == 0 {
                        for sums in &mut sum {
                            *sums = [_mm512_slli_epi32::<8>(sums[0]), _mm512_slli_epi32::<8>(sums[1])];
                        }
                    }
                }
                let line = (b * S + s) * N;
                for r in 0..R {
                    let m = &*meta.add(r * blocks + b);
                    let x = if S == 1 { m.sum[0] + m.sum[1] } else { m.sum[s] };
                    let (off, d) = (_mm512_set1_epi32(if OFF { x * offset } else { 0 }), _mm512_set1_ps(m.d));
                    for p in 0..2 {
                        let sum = if OFF { _mm512_sub_epi32(sum[r][p], off) } else { sum[r][p] };
                        let scale = _mm512_load_ps(panels[p].scale.as_ptr().cast::<f32>().add(line));
                        acc[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, d), acc[r][p]);
                        if MIN {
                            let min = _mm512_load_ps(panels[p].min.as_ptr().cast::<f32>().add(line));
                            let x = if S == 1 { m.total } else { m.value[s] };
                            acc[r][p] = _mm512_fmadd_ps(min, _mm512_set1_ps(x), acc[r][p]);
                        }
                    }
                }
            }
        }
    }
    for (acc, out) in acc.iter().zip(out) {
        for (acc, half) in acc.iter().zip(out.as_chunks_mut::<N>().0) {
            // SAFETY: 16 floats.
            unsafe { _mm512_storeu_ps(half.as_mut_ptr(), *acc) };
        }
    }
    R
}

/// # Safety
/// As `product` checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn all_rows<const S: usize, const MIN: bool, const OFF: bool>(
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
                1 => rows::<1, 4, S, MIN, OFF>(panel, q, m, o),
                2 => rows::<2, 2, S, MIN, OFF>(panel, q, m, o),
                3 => rows::<3, 2, S, MIN, OFF>(panel, q, m, o),
                4 => rows::<4, 2, S, MIN, OFF>(panel, q, m, o),
                5 => rows::<5, 1, S, MIN, OFF>(panel, q, m, o),
                6 => rows::<6, 1, S, MIN, OFF>(panel, q, m, o),
                7 => rows::<7, 1, S, MIN, OFF>(panel, q, m, o),
                _ => rows::<8, 1, S, MIN, OFF>(panel, q, m, o),
            };
        }
    }
}

/// `R` rows; `C` independent sums per row and byte half, to hide the latency of `vpdpbusd` when rows are few (integer sums
/// are exact, so their order is free).
///
/// # Safety
/// As `product` checks, with `out.len() >= R`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
unsafe fn rows<const R: usize, const C: usize, const S: usize, const MIN: bool, const OFF: bool>(
    panel: &Panel,
    quants: *const Quants,
    meta: *const Meta,
    out: &mut [[f32; N]],
) -> usize {
    let blocks = panel.blocks;
    let per = 8 / S;
    let mut acc = [_mm512_setzero_ps(); R];
    for b in 0..blocks {
        for s in 0..S {
            // SAFETY: in bounds by the caller's promise: line `b * 8 + 7` of q, `b * S + s` of scale and min, block `b`
            // of rows 0..R of the activations, whose 64 bytes are read as 16 dwords.
            unsafe {
                let w = panel.q.as_ptr().cast::<__m512i>().add(b * 8 + s * per);
                let x: [*const i32; R] = std::array::from_fn(|r| quants.add(r * blocks + b).cast::<i32>().add(s * per));
                let mut hi = [[_mm512_setzero_si512(); C]; R];
                let mut lo = [[_mm512_setzero_si512(); C]; R];
                if C == 1 {
                    for k in 0..per {
                        let w = _mm512_load_si512(w.add(k));
                        for r in 0..R {
                            hi[r][0] = _mm512_dpbusd_epi32(hi[r][0], w, _mm512_set1_epi32(*x[r].add(k)));
                        }
                    }
                    for r in 0..R {
                        hi[r][0] = _mm512_slli_epi32::<8>(hi[r][0]);
                    }
                    for k in 0..per {
                        let w = _mm512_load_si512(w.add(k));
                        for r in 0..R {
                            hi[r][0] = _mm512_dpbusd_epi32(hi[r][0], w, _mm512_set1_epi32(*x[r].add(8 + k)));
                        }
                    }
                } else {
                    for k in 0..per {
                        let w = _mm512_load_si512(w.add(k));
                        let c = k % C;
                        for r in 0..R {
                            hi[r][c] = _mm512_dpbusd_epi32(hi[r][c], w, _mm512_set1_epi32(*x[r].add(k)));
                            lo[r][c] = _mm512_dpbusd_epi32(lo[r][c], w, _mm512_set1_epi32(*x[r].add(8 + k)));
                        }
                    }
                    for r in 0..R {
                        for c in 1..C {
                            hi[r][0] = _mm512_add_epi32(hi[r][0], hi[r][c]);
                            lo[r][0] = _mm512_add_epi32(lo[r][0], lo[r][c]);
                        }
                        hi[r][0] = _mm512_add_epi32(_mm512_slli_epi32::<8>(hi[r][0]), lo[r][0]);
                    }
                }
                let scale = _mm512_load_ps(panel.scale.as_ptr().cast::<f32>().add((b * S + s) * N));
                for r in 0..R {
                    let m = &*meta.add(r * blocks + b);
                    let mut sum = hi[r][0];
                    if OFF {
                        let x = if S == 1 { m.sum[0] + m.sum[1] } else { m.sum[s] };
                        sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(x * panel.offset));
                    }
                    acc[r] =
                        _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(m.d)), acc[r]);
                    if MIN {
                        let min = _mm512_load_ps(panel.min.as_ptr().cast::<f32>().add((b * S + s) * N));
                        let x = if S == 1 { m.total } else { m.value[s] };
                        acc[r] = _mm512_fmadd_ps(min, _mm512_set1_ps(x), acc[r]);
                    }
                }
            }
        }
    }
    for (acc, out) in acc.iter().zip(out) {
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *acc) };
    }
    R
}
