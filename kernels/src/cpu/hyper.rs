//! Hyper-connections on the CPU.

use std::sync::PoisonError;

use crate::cpu::elementwise;
use crate::cpu::isa::multiversion;
use crate::cpu::lanes::{Lanes, N};
use crate::cpu::{CpuBuffer, CpuDevice, CpuWeight};
use crate::device::Device;
use crate::math::sinkhorn::{mixing_weights, sigmoid};
use crate::ops::{HyperOps, HyperParams, HyperWeights};

/// `out += factor · x`, or `out = factor · x` when `first`.
#[inline(always)]
fn axpy_impl<L: Lanes>(factor: f32, x: &[f32], first: bool, out: &mut [f32]) {
    let f = L::splat(factor);
    let (xs, x_rest) = x.as_chunks::<N>();
    let (os, o_rest) = out.as_chunks_mut::<N>();
    for (x, o) in xs.iter().zip(os) {
        let base = if first { L::splat(0.0) } else { L::load(o) };
        f.fma(L::load(x), base).store(o);
    }
    for (x, o) in x_rest.iter().zip(o_rest) {
        *o = factor.mul_add(*x, if first { 0.0 } else { *o });
    }
}

multiversion! {
    /// `out (+)= factor · x`.
    pub(crate) fn axpy = axpy_impl(factor: f32, x: &[f32], first: bool, out: &mut [f32]);
}

/// `out[d] = Σ_h gates[h] · S[h][d]`, in order of `h`, from zero.
#[inline(always)]
fn combine_impl<L: Lanes>(gates: &[f32], state: &[f32], out: &mut [f32]) {
    let width = out.len();
    for (i, o) in out.chunks_mut(N).enumerate() {
        if let Some(o) = o.first_chunk_mut() {
            let mut sum = L::splat(0.0);
            for (h, gate) in gates.iter().enumerate() {
                let x = state[h * width + N * i..].first_chunk().expect("16 elements");
                sum = L::splat(*gate).fma(L::load(x), sum);
            }
            sum.store(o);
        } else {
            for (j, o) in o.iter_mut().enumerate() {
                *o = 0.0;
                for (h, gate) in gates.iter().enumerate() {
                    *o = gate.mul_add(state[h * width + N * i + j], *o);
                }
            }
        }
    }
}

multiversion! {
    /// `Σ_h gate[h] · S[h]` for one row.
    fn combine = combine_impl(gates: &[f32], state: &[f32], out: &mut [f32]);
}

/// Streams that are mixed in registers.
const STREAMS: usize = 8;

/// Sixteen columns of all streams.
#[inline(always)]
fn mix_column<L: Lanes>(mix: &[f32], n: usize, y: L, state: &[L; STREAMS], out: &mut [L; STREAMS]) {
    for d in 0..n {
        let mut sum = L::splat(mix[n + d]).fma(y, L::splat(0.0));
        for s in 0..n {
            sum = L::splat(mix[2 * n + s * n + d]).fma(state[s], sum);
        }
        out[d] = sum;
    }
}

#[inline(always)]
fn mix_impl<L: Lanes>(mix: &[f32], y: &[f32], state: &mut [f32]) {
    let (width, n) = (y.len(), state.len() / y.len());
    let zero = L::splat(0.0);
    let (mut old, mut new) = ([zero; STREAMS], [zero; STREAMS]);
    for (i, y) in y.chunks(N).enumerate() {
        let at = |s: usize| s * width + N * i;
        if let Some(y) = y.first_chunk() {
            for s in 0..n {
                old[s] = L::load(state[at(s)..].first_chunk().expect("16 elements"));
            }
            mix_column(mix, n, L::load(y), &old, &mut new);
            for s in 0..n {
                new[s].store(state[at(s)..].first_chunk_mut().expect("16 elements"));
            }
        } else {
            let load = |x: &[f32]| {
                let mut v = [0.0; N];
                v[..y.len()].copy_from_slice(&x[..y.len()]);
                v
            };
            for s in 0..n {
                old[s] = L::load(&load(&state[at(s)..]));
            }
            mix_column(mix, n, L::load(&load(y)), &old, &mut new);
            for s in 0..n {
                let mut v = [0.0; N];
                new[s].store(&mut v);
                state[at(s)..at(s) + y.len()].copy_from_slice(&v[..y.len()]);
            }
        }
    }
}

multiversion! {
    /// `S'[d] = post[d] · y + Σ_s comb[s][d] · S[s]` for one row; `mix` is pre, post, comb. [`STREAMS`] streams at most.
    fn mix_streams = mix_impl(mix: &[f32], y: &[f32], state: &mut [f32]);
}

impl CpuDevice {
    /// Raw mixer outputs of the RMS-normalised state, `[rows, outputs]`.
    fn mixer(&self, p: &HyperParams, w: &CpuWeight, state: &CpuBuffer, out: &mut CpuBuffer) {
        // The norm has no weight; dividing the products instead of the inputs would change the quantisation of nothing,
        // since mixers are float tensors, but the reference divides first and so do we.
        let mut flat = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        flat.width = state.width();
        flat.resize(state.rows());
        let isa = self.isa();
        self.for_rows(&mut flat, |r, out| {
            let scale = elementwise::inverse_rms(isa, state.row(r), p.rms_eps);
            axpy(isa, scale, state.row(r), true, out);
        });
        self.matmul(&flat, &mut [(w, out)]);
    }
}

impl HyperOps for CpuDevice {
    fn hyper_start(&self, streams: usize, x: &CpuBuffer, state: &mut CpuBuffer) {
        assert_eq!(x.width() * streams, state.width(), "streams of another width");
        state.resize(x.rows());
        self.for_rows(state, |r, out| out.chunks_exact_mut(x.width()).for_each(|s| s.copy_from_slice(x.row(r))));
    }

    fn hyper_pre(
        &self,
        p: &HyperParams,
        w: &HyperWeights<CpuWeight>,
        state: &CpuBuffer,
        mix: &mut CpuBuffer,
        x: &mut CpuBuffer,
    ) {
        let n = p.streams;
        assert!(state.width() == n * x.width() && mix.width() == 2 * n + n * n, "hyper-connection shape");
        self.mixer(p, &w.mixer, state, mix);
        self.for_rows(mix, |_, m| {
            mixing_weights(m, w.scale.vector(), w.base.vector(), n, p.iterations, p.eps);
        });
        x.resize(state.rows());
        let isa = self.isa();
        self.for_rows(x, |r, out| combine(isa, &mix.row(r)[..n], state.row(r), out));
    }

    fn hyper_post(&self, p: &HyperParams, mix: &CpuBuffer, y: &CpuBuffer, state: &mut CpuBuffer) {
        let n = p.streams;
        let width = y.width();
        assert!(state.width() == n * width && mix.width() == 2 * n + n * n && n <= STREAMS, "hyper-connection shape");
        let isa = self.isa();
        self.for_rows(state, |r, s| {
            mix_streams(isa, mix.row(r), y.row(r), s);
        });
    }

    fn hyper_head(&self, p: &HyperParams, w: &HyperWeights<CpuWeight>, state: &CpuBuffer, x: &mut CpuBuffer) {
        let n = p.streams;
        assert_eq!(state.width(), n * x.width(), "hyper-connection shape");
        let mut mix = self.buffer(n);
        self.mixer(p, &w.mixer, state, &mut mix);
        let (scale, base) = (w.scale.vector()[0], w.base.vector());
        x.resize(state.rows());
        let isa = self.isa();
        self.for_rows(x, |r, out| {
            let gates: Vec<f32> = mix.row(r).iter().zip(base).map(|(m, b)| sigmoid(m * scale + b) + p.eps).collect();
            combine(isa, &gates, state.row(r), out);
        });
    }

    fn hyper_split(&self, streams: usize, state: &CpuBuffer, rows: &[usize], out: &mut CpuBuffer) {
        let width = out.width();
        assert_eq!(state.width(), streams * width, "streams of another width");
        out.resize(rows.len() * streams);
        self.for_rows(out, |r, out| {
            let at = r % streams * width;
            out.copy_from_slice(&state.row(rows[r / streams])[at..at + width]);
        });
    }

    fn hyper_join(&self, streams: usize, x: &CpuBuffer, state: &mut CpuBuffer) {
        let width = x.width();
        assert!(state.width() == streams * width && x.rows() == state.rows() * streams, "streams of another width");
        let isa = self.isa();
        self.for_rows(state, |r, s| {
            for (h, stream) in s.chunks_exact_mut(width).enumerate() {
                elementwise::add(isa, stream, x.row(r * streams + h));
            }
        });
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deepseek_v4_streams_split_into_rows_and_join_again() {
        let device = CpuDevice::new(2);
        let fill = |width, values: &[f32]| {
            let mut b = device.buffer(width);
            b.resize(values.len() / width);
            b.data_mut().copy_from_slice(values);
            b
        };
        // Two streams of three; rows 2 and 0, in that order.
        let state = fill(6, &(0..18_u8).map(f32::from).collect::<Vec<_>>());
        let mut rows = device.buffer(3);
        device.hyper_split(2, &state, &[2, 0], &mut rows);
        assert_eq!(rows.data(), [12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        let mut sum = fill(6, &[100.0; 12]);
        device.hyper_join(2, &rows, &mut sum);
        assert_eq!(sum.row(0), [112.0, 113.0, 114.0, 115.0, 116.0, 117.0]);
        assert_eq!(sum.row(1), [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]);
    }
}
