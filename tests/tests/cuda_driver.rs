//! The driver layer's owners against the strict fake driver. libcuda is found when a process starts, so each test runs
//! itself again with the fake in LD_LIBRARY_PATH.

use ds4_kernels::cuda::driver::{Access, Context, CudaError, Driver, Physical, Space, Staging, Stream, vmm};
use ds4_kernels::cuda::fatal::{self, OrFatal};
use ds4_tests::card::Card;

const STEP: u64 = 2 << 20;

fn context() -> Context {
    Context::new(Driver::open().unwrap(), 0).unwrap()
}

#[test]
fn memory_comes_back_when_its_owners_go() {
    if !Card::new().is_here("memory_comes_back_when_its_owners_go") {
        return;
    }
    let context = context();
    let (free, total) = context.memory().unwrap();
    assert_eq!((free, total), (1 << 30, 1 << 30));
    let mut space = Space::reserve(&context, 4 * STEP).unwrap();
    for k in 0..3 {
        space.map(k * STEP, Physical::create(&context, STEP).unwrap()).unwrap();
    }
    space.allow(0, 3 * STEP, Access::ReadWrite).unwrap();
    assert_eq!(context.memory().unwrap().0, free - 3 * STEP);
    let back = space.unmap(STEP).unwrap().unwrap();
    assert_eq!((back.len(), space.pieces().count()), (STEP, 2));
    drop(back);
    assert_eq!(context.memory().unwrap().0, free - 2 * STEP);
    drop(space);
    assert_eq!(context.memory().unwrap().0, free);
}

#[test]
fn staging_carries_bytes_both_ways_and_never_lends_a_buffer_that_is_being_read() {
    if !Card::new().is_here("staging_carries_bytes_both_ways_and_never_lends_a_buffer_that_is_being_read") {
        return;
    }
    let context = context();
    let mut space = Space::reserve(&context, STEP).unwrap();
    space.map(0, Physical::create(&context, STEP).unwrap()).unwrap();
    space.allow(0, STEP, Access::ReadWrite).unwrap();
    let mut staging = Staging::new(&space, 2, 4096).unwrap();
    // The fake copies as late as it may: a buffer that was lent too early would carry a later number.
    for k in 0..64_u8 {
        staging.buffer().unwrap().fill(k);
        staging.upload(1024, 1000, u64::from(k) * 1000).unwrap();
    }
    staging.zero(64_000, 100).unwrap();
    staging.finish().unwrap();
    for k in 0..64_u8 {
        let back = staging.download(u64::from(k) * 1000, 1000).unwrap();
        assert!(back.iter().all(|b| *b == k), "{k}");
    }
    assert!(staging.download(64_000, 100).unwrap().iter().all(|b| *b == 0));
    assert!(staging.download(65_536, 100).unwrap().iter().any(|b| *b != 0), "new memory is not zero by itself");
    assert!(matches!(staging.upload(4000, 100, 0), Err(CudaError::Range(_))));
    assert!(matches!(staging.upload(0, 100, STEP - 99), Err(CudaError::Range(_))));
    assert!(matches!(staging.download(0, 5000), Err(CudaError::Range(_))));
}

#[test]
fn read_only_mappings_refuse_writes_and_imports_are_not_passed_on() {
    if !Card::new().is_here("read_only_mappings_refuse_writes_and_imports_are_not_passed_on") {
        return;
    }
    let context = context();
    let original = Physical::create(&context, STEP).unwrap();
    let fd = original.export().unwrap();
    drop(original);
    let imported = Physical::import(&context, &fd, STEP).unwrap();
    let e = imported.export().unwrap_err();
    assert!(e.to_string().contains("original descriptor"), "{e}");
    let mut space = Space::reserve(&context, STEP).unwrap();
    space.map(0, imported).unwrap();
    let mut staging = Staging::new(&space, 1, 64).unwrap();
    assert!(staging.download(0, 64).is_err(), "no access was given yet");
    space.allow(0, STEP, Access::Read).unwrap();
    staging.download(0, 64).unwrap();
    let e = staging.upload(0, 64, 0).unwrap_err();
    assert!(!e.is_sticky() && e.to_string().contains("cuMemcpyHtoDAsync_v2"), "{e}");
}

#[test]
fn ranges_and_lengths_that_do_not_fit_are_refused() {
    if !Card::new().with("FAKE_CUDA_TOTAL_MIB", 8).is_here("ranges_and_lengths_that_do_not_fit_are_refused") {
        return;
    }
    let context = context();
    assert_eq!(vmm::granularity(&context).unwrap(), STEP);
    assert!(Physical::create(&context, STEP + 1).is_err());
    let e = Physical::create(&context, 5 * STEP).unwrap_err();
    assert_eq!(e, CudaError::OutOfMemory { call: "cuMemCreate", bytes: 5 * STEP });
    let mut space = Space::reserve(&context, 3 * STEP).unwrap();
    space.map(STEP, Physical::create(&context, 2 * STEP).unwrap()).unwrap();
    let overlapping = Physical::create(&context, STEP).unwrap();
    let e = space.map(2 * STEP, overlapping).unwrap_err();
    assert!(e.to_string().contains("overlap"), "{e}");
    let e = space.map(3 * STEP, Physical::create(&context, STEP).unwrap()).unwrap_err();
    assert!(e.to_string().contains("leave a space"), "{e}");
    // A hole at the front cannot be used.
    assert!(space.allow(0, 3 * STEP, Access::Read).is_err());
    space.allow(STEP, 2 * STEP, Access::Read).unwrap();
    assert!(matches!(Context::new(Driver::open().unwrap(), 1), Err(CudaError::NoSuchDevice { ordinal: 1, count: 1 })));
}

#[test]
fn a_lost_device_ends_the_process_at_once_with_its_cause_and_a_code_of_its_own() {
    let name = "a_lost_device_ends_the_process_at_once_with_its_cause_and_a_code_of_its_own";
    if std::env::var_os("FAKE_CUDA_TAG").is_some() {
        let stream = Stream::new(&context()).unwrap();
        stream.synchronize().or_fatal("the first step");
        stream.synchronize().or_fatal("the second step");
        panic!("it lives on");
    }
    let card = Card::new().with("FAKE_CUDA_FAIL", "cuStreamSynchronize:2:700");
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = card.give(&mut command).args(["--exact", name, "--nocapture"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(fatal::EXIT_CODE), "{said}");
    assert!(said.contains("fatal: the second step: cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{said}");
    assert!(said.contains("[cuda_device_lost]"), "{said}");
    // Not a code that supervisors take for one that a restart cannot cure.
    assert!(![0, 2, 4, 5].contains(&fatal::EXIT_CODE));
    assert_eq!(card.held(), (0, 0));
}

#[test]
fn refusals_of_memory_are_told_from_a_lost_device() {
    let plan = "cuMemCreate:1:2,cuMemCreate:2:700";
    if !Card::new().with("FAKE_CUDA_FAIL", plan).is_here("refusals_of_memory_are_told_from_a_lost_device") {
        return;
    }
    let context = context();
    let e = Physical::create(&context, STEP).unwrap_err();
    assert!(matches!(e, CudaError::OutOfMemory { bytes: STEP, .. }) && !e.is_sticky(), "{e}");
    let e = Physical::create(&context, STEP).unwrap_err();
    assert!(e.is_sticky() && e.code() == "cuda_device_lost", "{e}");
}

#[test]
fn any_allocation_can_be_refused_on_purpose_and_the_next_one_succeeds() {
    let name = "any_allocation_can_be_refused_on_purpose_and_the_next_one_succeeds";
    if !Card::new().with("DS4_CUDA_REFUSE", 4).is_here(name) {
        return;
    }
    let context = context();
    let mut space = Space::reserve(&context, 2 * STEP).unwrap();
    space.map(0, Physical::create(&context, STEP).unwrap()).unwrap();
    drop(Staging::new(&space, 1, 64).unwrap());
    let e = Physical::create(&context, STEP).unwrap_err();
    assert!(matches!(e, CudaError::OutOfMemory { call: "cuMemCreate", bytes: STEP }) && !e.is_sticky(), "{e}");
    space.map(STEP, Physical::create(&context, STEP).unwrap()).unwrap();
    space.allow(0, 2 * STEP, Access::ReadWrite).unwrap();
}
