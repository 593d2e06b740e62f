//! Quantised rows times a panel with NEON's dot-product instructions.
//!
//! `sdot` multiplies signed bytes, so the panel's bytes are taken 128 lower, which the correction by the sum of the
//! activations undoes together with the format's own offset. Correctness was shown under qemu; speed is unmeasured.

#![allow(unsafe_code, reason = "std::arch intrinsics")]

use std::arch::aarch64::*;
use std::arch::asm;

use crate::cpu::isa::{Isa, Kind};
use crate::cpu::lanes::N;
use crate::cpu::panel::Panel;
use crate::cpu::q16::{Meta, Quants};

/// See [`crate::cpu::dot::product`].
pub(crate) fn product(isa: Isa, panel: &Panel, quants: &[Quants], meta: &[Meta], out: &mut [[f32; N]]) {
    assert_eq!(isa.kind(), Kind::NeonDot);
    let n = out.len() * panel.blocks;
    let subs = 32 / panel.sub;
    assert!(quants.len() >= n && meta.len() >= n && panel.q.len() >= panel.blocks * 8);
    assert!(panel.scale.len() >= panel.blocks * subs && (!panel.has_min || panel.min.len() >= panel.blocks * subs));
    let mut r = 0;
    while r < out.len() {
        let at = r * panel.blocks;
        let (q, m, o) = (quants[at..].as_ptr(), meta[at..].as_ptr(), &mut out[r..]);
        // SAFETY: the CPU has the feature (an `Isa` of this kind exists), every slice is as long as the loops assume, and
        // `o` has at least as many rows as the instance takes.
        unsafe {
            r += match (o.len(), subs) {
                (1, 1) => rows::<1, 1>(panel, q, m, o),
                (1, _) => rows::<1, 2>(panel, q, m, o),
                (_, 1) => rows::<2, 1>(panel, q, m, o),
                _ => rows::<2, 2>(panel, q, m, o),
            };
        }
    }
}

/// Four outputs: `acc[o] += w[4o..4o + 4] · x[4o..4o + 4]`.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn sdot(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: one register instruction of the enabled feature. (Its intrinsic is not stable yet.)
    unsafe {
        asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) acc, in(vreg) w, in(vreg) x,
             options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// # Safety
/// As `product` checks, with `out.len() >= R`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn rows<const R: usize, const S: usize>(
    panel: &Panel,
    quants: *const Quants,
    meta: *const Meta,
    out: &mut [[f32; N]],
) -> usize {
    let blocks = panel.blocks;
    let per = 8 / S;
    let flip = vdupq_n_s8(-128);
    let mut acc = [[vdupq_n_f32(0.0); 4]; R];
    for b in 0..blocks {
        for s in 0..S {
            // SAFETY: in bounds by the caller's promise: line `b * 8 + 7` of q, `b * S + s` of scale and min, block `b`
            // of rows 0..R of the activations, whose 64 bytes are read as 16 dwords.
            unsafe {
                let w = panel.q.as_ptr().cast::<i8>().add((b * 8 + s * per) * 64);
                let x: [*const i32; R] = std::array::from_fn(|r| quants.add(r * blocks + b).cast::<i32>().add(s * per));
                let mut sum = [[vdupq_n_s32(0); 4]; R];
                // High bytes, then low ones.
                for half in 0..2 {
                    if half == 1 {
                        for v in sum.as_flattened_mut() {
                            *v = vshlq_n_s32::<8>(*v);
                        }
                    }
                    for k in 0..per {
                        let w: [int8x16_t; 4] =
                            std::array::from_fn(|i| veorq_s8(vld1q_s8(w.add(k * 64 + i * 16)), flip));
                        for r in 0..R {
                            let x = vreinterpretq_s8_s32(vdupq_n_s32(*x[r].add(8 * half + k)));
                            for i in 0..4 {
                                sum[r][i] = sdot(sum[r][i], w[i], x);
                            }
                        }
                    }
                }
                let scale = panel.scale.as_ptr().cast::<f32>().add((b * S + s) * N);
                for r in 0..R {
                    let m = &*meta.add(r * blocks + b);
                    let total = if S == 1 { m.sum[0] + m.sum[1] } else { m.sum[s] };
                    let correction = vdupq_n_s32(total * (panel.offset - 128));
                    for i in 0..4 {
                        let v = vcvtq_f32_s32(vsubq_s32(sum[r][i], correction));
                        let scale = vmulq_n_f32(vld1q_f32(scale.add(4 * i)), m.d);
                        acc[r][i] = vfmaq_f32(acc[r][i], v, scale);
                        if panel.has_min {
                            let min = vld1q_f32(panel.min.as_ptr().cast::<f32>().add((b * S + s) * N + 4 * i));
                            let x = if S == 1 { m.total } else { m.value[s] };
                            acc[r][i] = vfmaq_f32(acc[r][i], min, vdupq_n_f32(x));
                        }
                    }
                }
            }
        }
    }
    for (acc, out) in acc.iter().zip(out) {
        for (i, v) in acc.iter().enumerate() {
            // SAFETY: four times 4 of 16 floats.
            unsafe { vst1q_f32(out.as_mut_ptr().add(4 * i), *v) };
        }
    }
    R
}
