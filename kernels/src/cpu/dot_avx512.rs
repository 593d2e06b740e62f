//! Quantised rows times a panel with AVX-512 VNNI.
//!
//! `vpdpbusd` multiplies the panel's unsigned bytes (16 outputs by 4 inputs) with four signed bytes of one activation row,
//! broadcast: once for the high bytes, then, shifted, for the low ones. The offset of the weights is taken out through the
//! sum of the activations.

#![allow(unsafe_code, reason = "std::arch intrinsics")]
#![allow(clippy::needless_range_loop, reason = "indices name registers and rows")]

use std::arch::x86_64::*;

use crate::cpu::isa::{Isa, Kind};
use crate::cpu::lanes::N;
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
