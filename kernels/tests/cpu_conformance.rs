//! The CPU device passes the conformance suite on every instruction set that this machine has.

use ds4_kernels::conformance::{Bounds, run};
use ds4_kernels::cpu::{CpuDevice, Isa};

const BOUNDS: Bounds = Bounds { activation: 1.0 / 65024.0 };

#[test]
fn every_isa_conforms_on_one_thread_and_on_two() {
    for isa in Isa::available() {
        for threads in [1, 2] {
            println!("{} with {threads} threads", isa.name());
            run(&CpuDevice::with_isa(threads, isa), BOUNDS);
        }
    }
}
