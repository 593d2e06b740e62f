//! The CPU device passes the conformance suite on every instruction set that this machine has.

use ds4_kernels::conformance::{Bounds, run, run_invariance, run_operations};
use ds4_kernels::cpu::{CpuDevice, Isa};

const BOUNDS: Bounds = Bounds { activation: 1.0 / 65024.0 };

#[test]
fn the_best_isa_conforms_on_one_thread_and_on_two() {
    for threads in [1, 2] {
        run(&CpuDevice::with_isa(threads, Isa::detect()), BOUNDS);
    }
}

#[test]
fn every_other_isa_conforms() {
    for isa in Isa::available().into_iter().skip(1) {
        println!("{}", isa.name());
        let device = CpuDevice::with_isa(2, isa);
        run_operations(&device, BOUNDS);
        // Baseline x86 has no fused multiply-add and emulates it: a shorter prompt keeps this test short.
        run_invariance(&device, if isa.name() == "scalar" { 40 } else { 300 });
    }
}
