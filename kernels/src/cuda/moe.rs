//! Launches of the mixture of experts' kernels. Routing stays on the device: nothing on the host knows which experts were taken.

use super::buffer::{CudaBuffer, Growable};
use super::dense::{BLOCK, blocks, rows_of, swiglu};
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::kernels::{File, dim, int, long};
use super::quantized;
use super::split;
use super::step::CudaStep;
use super::weight::CudaWeight;
use crate::ops::{Experts, MoeOps, RouterParams};

/// Most experts that the router's block holds.
const MAX_EXPERTS: usize = 1024;

/// Per row: `used` experts and their weights, in device memory.
#[derive(Debug, Default)]
pub struct CudaRouting {
    used: usize,
    rows: usize,
    ids: Growable,
    weights: Growable,
}

impl CudaRouting {
    fn resize(&mut self, d: &CudaDevice, rows: usize, used: usize) -> (DevicePtr, DevicePtr) {
        (self.rows, self.used) = (rows, used);
        let len = rows.max(16) * used * 4;
        (self.ids.at_least(d.context(), len), self.weights.at_least(d.context(), len))
    }
}

impl MoeOps for CudaDevice {
    type Routing = CudaRouting;

    fn route_learned(&self, p: &RouterParams, logits: &CudaBuffer, bias: Option<&CudaWeight>, out: &mut CudaRouting) {
        let (rows, experts) = (logits.rows(), logits.width());
        assert!(experts <= MAX_EXPERTS && p.used <= experts, "{experts} experts, {} used", p.used);
        let (ids, weights) = out.resize(self, rows, p.used);
        let bias = bias.map_or(0, CudaWeight::vector);
        let args = (logits.start(), int(experts), int(p.used));
        let all: [&dyn KernelArg; 8] = [&args.0, &bias, &args.1, &args.2, &p.scale, &p.floor, &ids, &weights];
        self.launch(File::Moe, "route_learned", [dim(rows), 1, 1], BLOCK, 0, &all);
    }

    fn route_table(
        &self,
        p: &RouterParams,
        step: &CudaStep,
        table: &CudaWeight,
        logits: &CudaBuffer,
        out: &mut CudaRouting,
    ) {
        rows_of(step, logits);
        assert_eq!(table.cols, p.used, "{}: table of another width", table.name);
        assert_eq!(table.ty, ds4_manifests::GgmlType::I32, "{}: an integer table", table.name);
        let (ids, weights) = out.resize(self, step.rows, p.used);
        let args = (int(step.rows), table.start(), logits.start(), int(logits.width()), int(p.used));
        let all: [&dyn KernelArg; 10] =
            [&step.arg, &args.0, &args.1, &args.2, &args.3, &args.4, &p.scale, &p.floor, &ids, &weights];
        self.launch(File::Moe, "route_table", blocks(step.rows), BLOCK, 0, &all);
    }

    fn expert_ffn(
        &self,
        experts: &Experts<CudaWeight>,
        routing: &CudaRouting,
        clamp: f32,
        x: &CudaBuffer,
        out: &mut CudaBuffer,
    ) {
        assert_eq!(routing.rows, x.rows(), "routing of another step");
        let (used, rows) = (routing.used, x.rows());
        let (ff, hidden) = (experts.gate.rows / experts.count, experts.down.rows / experts.count);
        assert_eq!(hidden, out.width(), "expert output of another width");
        assert!(experts.gate.cols == x.width() && experts.down.cols == ff, "expert shape");
        out.resize(rows);
        let assignments = rows * used;
        let mut scratch = self.scratch();
        let s = &mut *scratch;
        let len = assignments.max(16) * ff * 4;
        let (gate, up) = (s.gate.at_least(self.context(), len), s.up.at_least(self.context(), len));
        let parts = s.parts.at_least(self.context(), assignments.max(16) * hidden * 4);
        let ids = routing.ids.start();
        let tiled = [&experts.gate, &experts.up, &experts.down].into_iter().filter(|w| w.is_tiled());
        let tiled: Vec<_> = tiled.map(|w| w.ty).collect();
        let rows_of = (!tiled.is_empty()).then(|| {
            quantized::Rows::Listed(quantized::group(self, &mut s.groups, &tiled, ids, assignments, experts.count))
        });
        let exact = |w: &CudaWeight, outputs: usize, from: DevicePtr, per_row: usize, to: DevicePtr| {
            let args = (w.start(), long(w.row_bytes), int(w.cols), int(outputs), int(per_row));
            let all: [&dyn KernelArg; 8] = [&args.0, &args.1, &args.2, &args.3, &ids, &from, &args.4, &to];
            let grid = [dim(outputs.div_ceil(4)), dim(assignments), 1];
            self.launch(File::Matmul, &format!("expert_matmul_{}", w.ty), grid, [32, 4, 1], 0, &all);
        };
        let both = |w: &CudaWeight| (w.ty, w.is_tiled());
        match rows_of {
            Some(r) if experts.gate.is_tiled() && both(&experts.gate) == both(&experts.up) => {
                let acts = split::quantize(self, &mut s.activations, &experts.gate, x.start(), rows);
                quantized::product(self, &[&experts.gate, &experts.up], &acts, r, used, ff, &[gate, up]);
            }
            _ => {
                for (w, to) in [(&experts.gate, gate), (&experts.up, up)] {
                    match rows_of.filter(|_| w.is_tiled()) {
                        Some(r) => {
                            let acts = split::quantize(self, &mut s.activations, w, x.start(), rows);
                            quantized::product(self, &[w], &acts, r, used, ff, &[to]);
                        }
                        None => exact(w, ff, x.start(), used, to),
                    }
                }
            }
        }
        let n = assignments * ff;
        let args = (routing.weights.start(), int(ff), long(n));
        let all: [&dyn KernelArg; 7] = [&gate, &up, &clamp, &args.0, &args.1, &gate, &args.2];
        self.launch(File::Elementwise, "swiglu_weighted", blocks(n), BLOCK, 0, &all);
        match rows_of.filter(|_| experts.down.is_tiled()) {
            Some(r) => {
                let acts = split::quantize(self, &mut s.activations, &experts.down, gate, assignments);
                quantized::product(self, &[&experts.down], &acts, r, 1, hidden, &[parts]);
            }
            None => exact(&experts.down, hidden, gate, 1, parts),
        }
        let args = (int(used), int(hidden), out.start());
        let grid = [dim(rows), dim(hidden.div_ceil(256)), 1];
        self.launch(File::Moe, "expert_sum", grid, BLOCK, 0, &[&parts, &args.0, &args.1, &args.2]);
    }

    fn swiglu_clamped(&self, gate: &CudaBuffer, up: &CudaBuffer, clamp: f32, out: &mut CudaBuffer) {
        swiglu(self, gate, up, clamp, out);
    }
}
