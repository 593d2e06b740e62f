//! Every family of kernels at DeepSeek V4 Flash's shapes on the fake driver, as on an H200 and on a GB10: each launch has the parameters,
//! block and shared memory that its kernel was compiled for there. A launch that has not ends the process.

use std::collections::BTreeSet;

use ds4_kernels::bench::kernel::{self, FAMILIES, Options, Size};
use ds4_kernels::cuda::CudaDevice;
use ds4_tests::card::Card;

/// Decode steps and chunks of a prompt: kernels are chosen by the number of rows.
const ROWS: [usize; 4] = [1, 5, 16, 300];

#[test]
fn every_launch_fits_its_kernel_on_both_cards() {
    let name = "every_launch_fits_its_kernel_on_both_cards";
    if let Ok(family) = std::env::var("FAKE_CUDA_TEST_FAMILY") {
        let device = CudaDevice::open(0).unwrap();
        // What it computes is nothing, and so is how far that is from what it should be.
        let options = Options { rows: ROWS.into(), size: Size::Flash, seed: 1 };
        let lines = kernel::run(&device, &family, &options).unwrap().unwrap();
        assert!(lines.len() >= ROWS.len(), "{} lines", lines.len());
        return;
    }
    for architecture in [90, 121] {
        for (family, _) in FAMILIES {
            let card = Card::new().logged().with("FAKE_CUDA_PAGEABLE", 1).with("FAKE_CUDA_TOTAL_MIB", 16_384);
            let card = card.with("FAKE_CUDA_ARCH", architecture).with("FAKE_CUDA_TEST_FAMILY", family);
            card.is_here(name);
            let calls = card.calls();
            let kernels: BTreeSet<_> = calls.lines().filter_map(|l| l.strip_prefix("cuLaunchKernelEx ")).collect();
            assert!(kernels.len() >= 3, "{family}: {kernels:?}");
        }
    }
}
