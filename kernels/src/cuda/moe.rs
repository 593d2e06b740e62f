//! Launches of the mixture of experts' kernels. Routing stays on the device: nothing on the host knows which experts were taken.

use super::buffer::{CudaBuffer, Growable};
use super::dense::{BLOCK, blocks, rows_of, swiglu};
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::fatal::OrFatal;
use super::kernels::{File, dim, int, long};
use super::quantized;
use super::split::{self, ActsArg, SwigluArg};
use super::step::CudaStep;
use super::weight::CudaWeight;
use crate::device::Device;
use crate::kernel_args;
use crate::ops::{Experts, MoeOps, RouteBy, RouterParams, SharedExpert};

/// Most experts that the router's block holds.
const MAX_EXPERTS: usize = 1024;

/// Per row: `used` experts and their weights, in device memory.
#[derive(Debug, Default)]
pub struct CudaRouting {
    used: usize,
    rows: usize,
    ids: Growable,
    weights: Growable,
    /// The assignments by expert, where the routing's kernel listed them.
    listed: Option<quantized::Listed>,
    groups: quantized::Groups,
}

impl CudaRouting {
    fn resize(&mut self, d: &CudaDevice, rows: usize, used: usize) -> (DevicePtr, DevicePtr) {
        (self.rows, self.used, self.listed) = (rows, used, None);
        let len = rows.max(16) * used * 4;
        (self.ids.at_least(d.context(), len), self.weights.at_least(d.context(), len))
    }
}

/// Most rows whose routing and lists are one block's (`FEW_ROWS`, `FEW` in moe.cu), and most experts and experts a row of it.
const FEW_ROWS: usize = 16;
const FEW_ASSIGNMENTS: usize = 128;
const FEW_EXPERTS: usize = 512;
const FEW_USED: usize = 32;

/// `Route` in moe.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RouteArg {
    logits: u64,
    bias: u64,
    table: u64,
    tokens: u64,
    ids: u64,
    weights: u64,
    list: u64,
    count: u64,
    order: u64,
    rows: i32,
    experts: i32,
    used: i32,
    per: i32,
    scale: f32,
    floor: f32,
    early: i32,
    pad: i32,
}
kernel_args!(RouteArg);

/// Routing, and of few rows the lists too, in one kernel; `false` when there are more experts than it is for. `early`: the logits were there
/// before the previous kernel was launched, which does not use `out`.
fn route(
    d: &CudaDevice,
    p: &RouterParams,
    by: RouteBy<'_, CudaDevice>,
    logits: &CudaBuffer,
    early: bool,
    out: &mut CudaRouting,
) -> bool {
    let (rows, experts, assignments) = (logits.rows(), logits.width(), logits.rows() * p.used);
    if rows == 0 || experts > FEW_EXPERTS || p.used > FEW_USED {
        return false;
    }
    let few = rows <= FEW_ROWS && assignments <= FEW_ASSIGNMENTS;
    let (ids, weights) = out.resize(d, rows, p.used);
    let listed = few.then(|| quantized::Listed::room(d, &mut out.groups, &[], assignments, experts));
    let (list, count, order, per) = listed.as_ref().map_or((0, 0, 0, 1), quantized::Listed::parts);
    let (bias, table, tokens) = match by {
        RouteBy::Learned(bias) => (bias.map_or(0, CudaWeight::vector), 0, 0),
        RouteBy::Table(step, table) => (0, table.start(), step.arg.tokens()),
    };
    let arg = RouteArg {
        logits: logits.start(),
        bias,
        table,
        tokens,
        ids,
        weights,
        list,
        count,
        order,
        rows: int(rows),
        experts: int(experts),
        used: int(p.used),
        per,
        scale: p.scale,
        floor: p.floor,
        early: i32::from(early),
        pad: 0,
    };
    let size = if experts <= 256 { 8 } else { 16 };
    if few {
        d.launch(File::Moe, &format!("route_few_{size}"), [1, 1, 1], [dim(32 * FEW_ROWS), 1, 1], 0, &[&arg]);
    } else {
        d.launch(File::Moe, &format!("route_rows_{size}"), [dim(rows.div_ceil(8)), 1, 1], BLOCK, 0, &[&arg]);
    }
    out.listed = listed;
    true
}

/// Checks what a table must be.
fn check_table(p: &RouterParams, table: &CudaWeight) {
    assert_eq!(table.cols, p.used, "{}: table of another width", table.name);
    assert_eq!(table.ty, ds4_manifests::GgmlType::I32, "{}: an integer table", table.name);
}

/// Adds up `terms`, several rows for each of `rows`, in place.
pub(super) fn sum_terms(d: &CudaDevice, terms: &mut CudaBuffer, rows: usize) {
    let (from, used, width) = (terms.start(), terms.rows() / rows.max(1), terms.width());
    if used <= 1 {
        return;
    }
    let sum = d.scratch().parts.at_least(d.context(), rows.max(16) * width * 4);
    expert_sum(d, from, (rows, used, width), sum);
    terms.resize(rows);
    #[allow(unsafe_code, reason = "a copy on the device")]
    // SAFETY: the rows exist on both sides, which do not overlap.
    unsafe { d.stream().copy(terms.start(), sum, rows * width * 4) }.or_fatal("sum_terms");
}

fn expert_sum(d: &CudaDevice, parts: DevicePtr, (rows, used, width): (usize, usize, usize), to: DevicePtr) {
    let args = (int(used), int(width));
    let grid = [dim(rows), dim(width.div_ceil(256)), 1];
    d.launch(File::Moe, "expert_sum", grid, BLOCK, 0, &[&parts, &args.0, &args.1, &to]);
}

/// The shared expert, from its gate and up products to its output.
struct Shared<'a> {
    gate: &'a CudaBuffer,
    up: &'a CudaBuffer,
    down: &'a CudaWeight,
    act: &'a mut CudaBuffer,
    out: &'a mut CudaBuffer,
}

/// The experts' outputs to `parts`, a row for each assignment and at least 16, and the shared expert's.
fn ffn(
    d: &CudaDevice,
    experts: &Experts<CudaWeight>,
    routing: &CudaRouting,
    clamp: f32,
    x: &CudaBuffer,
    parts: DevicePtr,
    shared: Option<Shared<'_>>,
) {
    assert_eq!(routing.rows, x.rows(), "routing of another step");
    let (used, rows) = (routing.used, x.rows());
    let (ff, hidden) = (experts.gate.rows / experts.count, experts.down.rows / experts.count);
    assert!(experts.gate.cols == x.width() && experts.down.cols == ff, "expert shape");
    let assignments = rows * used;
    let mut scratch = d.scratch();
    let s = &mut *scratch;
    let len = assignments.max(16) * ff * 4;
    // The halves are used up before `down` writes, if its inputs are split between: they can lie where it will write.
    let in_parts = experts.down.is_tiled() && 2 * ff <= hidden;
    let acts = split::bytes(rows, x.width()).max(split::bytes(assignments, ff));
    let [halves, room] = s.work.pieces(d.context(), [if in_parts { 0 } else { 2 * len }, acts]);
    let gate = if in_parts { parts } else { halves };
    let up = gate + len as u64;
    let ids = routing.ids.start();
    let tiled = [&experts.gate, &experts.up, &experts.down].into_iter().filter(|w| w.is_tiled());
    let tiled: Vec<_> = tiled.map(|w| w.ty).collect();
    let rows_of = (!tiled.is_empty()).then(|| {
        let known = routing.listed.filter(|l| l.serves(&tiled, assignments, experts.count));
        let listed =
            known.unwrap_or_else(|| quantized::group(d, &mut s.groups, &tiled, ids, assignments, experts.count));
        quantized::Rows::Listed(listed)
    });
    let exact = |w: &CudaWeight, outputs: usize, from: DevicePtr, per_row: usize, to: DevicePtr| {
        let args = (w.start(), long(w.row_bytes), int(w.cols), int(outputs), int(per_row));
        let all: [&dyn KernelArg; 8] = [&args.0, &args.1, &args.2, &args.3, &ids, &from, &args.4, &to];
        let grid = [dim(outputs.div_ceil(4)), dim(assignments), 1];
        d.launch(File::Matmul, &format!("expert_matmul_{}", w.ty), grid, [32, 4, 1], 0, &all);
    };
    let split =
        |w: &CudaWeight| x.split(split::order(w.ty)).unwrap_or_else(|| split::quantize(d, room, w, x.start(), rows));
    let both = |w: &CudaWeight| (w.ty, w.is_tiled());
    match rows_of {
        Some(r) if experts.gate.is_tiled() && both(&experts.gate) == both(&experts.up) => {
            let acts = split(&experts.gate);
            quantized::product(d, &[&experts.gate, &experts.up], &acts, r, used, ff, &[gate, up]);
        }
        _ => {
            for (w, to) in [(&experts.gate, gate), (&experts.up, up)] {
                match rows_of.filter(|_| w.is_tiled()) {
                    Some(r) => {
                        let acts = split(w);
                        quantized::product(d, &[w], &acts, r, used, ff, &[to]);
                    }
                    None => exact(w, ff, x.start(), used, to),
                }
            }
        }
    }
    // Both down products' inputs in one kernel where they are split.
    let mut shared = shared;
    let mut of_shared = None;
    if let Some(sh) = shared.as_mut().filter(|sh| sh.down.is_tiled()) {
        assert!(
            sh.gate.rows() == rows && sh.up.rows() == rows && sh.down.cols == sh.gate.width(),
            "shared expert's shape"
        );
        sh.act.resize(rows);
        let to = sh.act.split_here(split::order(sh.down.ty));
        of_shared = Some(SwigluArg::new((sh.gate.start(), sh.up.start()), 0, to, rows, sh.down));
    }
    let weights = routing.weights.start();
    match rows_of.filter(|_| experts.down.is_tiled()) {
        Some(r) => {
            let acts = ActsArg::at(room, assignments, ff);
            let of_experts = SwigluArg::new((gate, up), weights, acts, assignments, &experts.down);
            split::swiglu(d, &of_experts, of_shared.as_ref(), clamp);
            quantized::product(d, &[&experts.down], &acts, r, 1, hidden, &[parts]);
        }
        None => {
            let n = assignments * ff;
            let args = (int(ff), long(n));
            let all: [&dyn KernelArg; 7] = [&gate, &up, &clamp, &weights, &args.0, &gate, &args.1];
            d.launch(File::Elementwise, "swiglu_weighted", blocks(n), BLOCK, 0, &all);
            exact(&experts.down, hidden, gate, 1, parts);
            if let Some(of_shared) = &of_shared {
                split::swiglu(d, of_shared, None, clamp);
            }
        }
    }
    // What follows takes the scratch memory itself.
    drop(scratch);
    if let Some(sh) = shared {
        if of_shared.is_none() {
            swiglu(d, sh.gate, sh.up, clamp, sh.act);
        }
        d.matmul(sh.act, &mut [(sh.down, sh.out)]);
    }
}

impl MoeOps for CudaDevice {
    type Routing = CudaRouting;

    fn route_learned(&self, p: &RouterParams, logits: &CudaBuffer, bias: Option<&CudaWeight>, out: &mut CudaRouting) {
        let (rows, experts) = (logits.rows(), logits.width());
        assert!(experts <= MAX_EXPERTS && p.used <= experts, "{experts} experts, {} used", p.used);
        if route(self, p, RouteBy::Learned(bias), logits, false, out) {
            return;
        }
        let bias = bias.map_or(0, CudaWeight::vector);
        let (ids, weights) = out.resize(self, rows, p.used);
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
        check_table(p, table);
        if route(self, p, RouteBy::Table(step, table), logits, false, out) {
            return;
        }
        let (ids, weights) = out.resize(self, step.rows, p.used);
        let args = (int(step.rows), table.start(), logits.start(), int(logits.width()), int(p.used));
        let all: [&dyn KernelArg; 10] =
            [&step.arg, &args.0, &args.1, &args.2, &args.3, &args.4, &p.scale, &p.floor, &ids, &weights];
        self.launch(File::Moe, "route_table", blocks(step.rows), BLOCK, 0, &all);
    }

    fn project_and_route(
        &self,
        x: &CudaBuffer,
        p: &RouterParams,
        (router, logits): (&CudaWeight, &mut CudaBuffer),
        by: RouteBy<'_, Self>,
        others: &mut [(&CudaWeight, &mut CudaBuffer)],
        out: &mut CudaRouting,
    ) {
        self.matmul(x, &mut [(router, &mut *logits)]);
        let routed = self.launches();
        self.matmul(x, others);
        // The block that routes runs beside the other products.
        let early = self.launches() > routed;
        if let RouteBy::Table(step, table) = by {
            rows_of(step, logits);
            check_table(p, table);
        }
        if !route(self, p, by, logits, early, out) {
            match by {
                RouteBy::Learned(bias) => self.route_learned(p, logits, bias, out),
                RouteBy::Table(step, table) => self.route_table(p, step, table, logits, out),
            }
        }
    }

    fn expert_ffn(
        &self,
        experts: &Experts<CudaWeight>,
        routing: &CudaRouting,
        clamp: f32,
        x: &CudaBuffer,
        out: &mut CudaBuffer,
    ) {
        let (rows, used, hidden) = (x.rows(), routing.used, out.width());
        assert_eq!(experts.down.rows / experts.count, hidden, "expert output of another width");
        out.resize(rows);
        let parts = self.scratch().parts.at_least(self.context(), (rows * used).max(16) * hidden * 4);
        ffn(self, experts, routing, clamp, x, parts, None);
        expert_sum(self, parts, (rows, used, hidden), out.start());
    }

    fn ffn_terms(
        &self,
        experts: &Experts<CudaWeight>,
        routing: &CudaRouting,
        clamp: f32,
        x: &CudaBuffer,
        shared: SharedExpert<'_, Self>,
        terms: &mut CudaBuffer,
    ) {
        assert_eq!(experts.down.rows / experts.count, terms.width(), "expert output of another width");
        terms.resize(x.rows() * routing.used);
        let SharedExpert { gate, up, down, act, out } = shared;
        ffn(self, experts, routing, clamp, x, terms.start(), Some(Shared { gate, up, down, act, out }));
    }

    fn swiglu_clamped(&self, gate: &CudaBuffer, up: &CudaBuffer, clamp: f32, out: &mut CudaBuffer) {
        swiglu(self, gate, up, clamp, out);
    }
}
