//! What a step of a real model asks of the driver: a decode step that has been seen twice is launched as graphs, nothing in it waits for the
//! device or copies to the host, and what comes back is the sampler's summary of its rows. Kernels do nothing on the fake driver;
//! their launches are compared with what nvcc compiled.

#[path = "../../worker/models/tests/support/mod.rs"]
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ds4_kernels::cuda::CudaDevice;
use ds4_kernels::cuda::fatal;
use ds4_kernels::ops::{RowQuery, RowSummary};
use ds4_kernels::{BatchPlan, Device, DeviceError};
use ds4_models::{Model, ModelError};
use ds4_tests::calls::{CallLog, Calls};
use ds4_tests::card::Card;
use support::{fixture, weights};

const MODELS: [&str; 2] = ["deepseek_v4/tiny-v4.gguf", "tiny-llama/tiny-llama.gguf"];
const BANKS: usize = 16;
/// More than the first memory of a bank has room for.
const CONTEXT: usize = 1 << 20;
/// Shorter runs of launches are no graph (`MIN_GRAPH` in kernels/src/cuda/driver/queue.rs): the last ones of a step.
const SHORTEST_GRAPH: usize = 8;

/// What binds a model's tensors from ordinary memory and finds the fixtures.
fn card() -> Card {
    Card::new()
        .logged()
        .with("FAKE_CUDA_PAGEABLE", 1)
        .with("DS4_FIXTURES", concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures"))
}

/// A model with its banks, and the driver's log.
struct Run {
    device: CudaDevice,
    model: Box<dyn Model<CudaDevice>>,
    banks: Vec<<CudaDevice as Device>::Bank>,
    /// Tokens of each bank.
    done: Vec<usize>,
    log: CallLog,
}

impl Run {
    fn new(model: &str) -> Self {
        let device = CudaDevice::open(0).unwrap();
        let model = ds4_models::build(&device, &weights(&fixture(model))).unwrap();
        let banks = (0..BANKS).map(|_| device.bank(model.state(), CONTEXT).unwrap()).collect();
        Self { device, model, banks, done: vec![0; BANKS], log: CallLog::open() }
    }

    /// One step of `n` tokens of each of the first `banks` banks.
    fn plan(&mut self, banks: usize, n: usize, wanted: bool) -> BatchPlan {
        let mut plan = BatchPlan::default();
        for b in 0..banks {
            let tokens: Vec<u32> = (0..n).map(|i| u32::try_from((self.done[b] + i) % 50).unwrap()).collect();
            plan.push(b, self.done[b], &tokens, wanted);
            self.done[b] += n;
            self.device.bank_commit(&mut self.banks[b], self.done[b]).unwrap();
        }
        plan
    }

    /// Calls of the step itself: everything between handing it over and asking for its results.
    fn forward(&mut self, plan: &BatchPlan) -> Calls {
        self.log.new_calls();
        self.model.forward(&self.device, plan, &mut self.banks).unwrap();
        self.log.new_calls()
    }

    fn summarise(&mut self, rows: usize, query: RowQuery) -> (Calls, Vec<RowSummary>) {
        let queries: Vec<_> = (0..rows).map(|row| RowQuery { row, ..query }).collect();
        let mut out = Vec::new();
        self.log.new_calls();
        self.device.summarise(self.model.logits(), &queries, &mut out);
        (self.log.new_calls(), out)
    }

    /// A decode step of that many rows, until its summary is there.
    fn decode(&mut self, rows: usize) -> Calls {
        let plan = self.plan(rows, 1, true);
        let calls = self.forward(&plan);
        self.summarise(rows, GREEDY);
        calls
    }
}

/// As the engine asks for a greedy request, and for one that draws from its best 40.
const GREEDY: RowQuery = RowQuery { row: 0, best: 1, scale: None, draw: None, norm: false };
const TOP_40: RowQuery = RowQuery { row: 0, best: 40, scale: Some(1.25), draw: Some(0.4), norm: true };

/// Bytes of a step's plan: a bank's address and three numbers for each span, three for each row, one for each wanted row.
fn plan_bytes(plan: &BatchPlan) -> usize {
    plan.spans.len() * (8 + 3 * 4) + plan.rows() * 3 * 4 + plan.wanted.len() * 4
}

/// Bytes of the summaries of `rows` rows: two sums and a margin in f64, the best and the drawn candidate of 8 bytes, a threshold of 4 and 4
/// to align the next (`SampleHead` in sample.cu); and where more than one of the best is wanted, 8 for each.
fn summary_bytes(rows: usize, query: RowQuery) -> usize {
    let list = if query.best > 1 { query.best * 8 } else { 0 };
    rows * (3 * 8 + 2 * 8 + 4 + 4 + list)
}

/// What a step may call: of all functions that wait only the one whose waiting is looked at, and none that allocates or copies to the host.
const STEP: [&str; 5] =
    ["cuEventSynchronize", "cuEventRecord", "cuMemcpyHtoDAsync_v2", "cuGraphLaunch", "cuLaunchKernelEx"];
/// And the first step that needs a kernel.
const LOOKS_UP_KERNELS: [&str; 4] =
    ["cuModuleGetFunction", "cuFuncGetParamInfo", "cuFuncGetAttribute", "cuFuncSetAttribute"];

/// A replayed step: its plan goes to the device in one copy, and the rest are graphs and what is too short for one.
fn check_replayed(calls: &Calls, plan: &BatchPlan, operations: usize) {
    calls.only(&STEP);
    assert_eq!(calls.sum("cuEventSynchronize"), 0, "it waits for nothing that has not happened: {calls:?}");
    assert_eq!(calls.numbers("cuMemcpyHtoDAsync_v2"), [plan_bytes(plan)]);
    assert!(calls.count("cuLaunchKernelEx") < SHORTEST_GRAPH, "{calls:?}");
    assert_eq!(calls.operations(), operations, "a replayed step does what it did before");
}

#[test]
fn a_decode_step_is_replayed_without_waiting_and_only_summaries_come_back() {
    let name = "a_decode_step_is_replayed_without_waiting_and_only_summaries_come_back";
    // As on an H200, and as on a GB10, where other kernels are chosen.
    if ![90, 121].into_iter().any(|architecture| card().with("FAKE_CUDA_ARCH", architecture).is_here(name)) {
        return;
    }
    for model in MODELS {
        let mut run = Run::new(model);
        for rows in [1, BANKS] {
            // Memory and tables are made in the first step; the launches of the second are those of all later ones, of which the third is
            // recorded at the latest.
            run.decode(rows);
            let operations = run.decode(rows).operations();
            assert!(operations > 40, "{model}: {operations} operations");
            (0..2).for_each(|_| drop(run.decode(rows)));
            run.summarise(rows, TOP_40);
            for query in [GREEDY, TOP_40].repeat(3) {
                let plan = run.plan(rows, 1, true);
                let calls = run.forward(&plan);
                check_replayed(&calls, &plan, operations);
                let (calls, summaries) = run.summarise(rows, query);
                assert_eq!(summaries.len(), rows);
                calls.only(&["cuLaunchKernelEx", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"]);
                let back = calls.numbers("cuMemcpyDtoHAsync_v2");
                assert_eq!(back, [summary_bytes(rows, query)], "{model}, {rows} rows");
                assert_eq!(calls.count("cuStreamSynchronize"), 1, "{model}, {rows} rows");
            }
        }
    }
}

#[test]
fn a_bank_that_grew_does_not_change_a_steps_launches() {
    if !card().is_here("a_bank_that_grew_does_not_change_a_steps_launches") {
        return;
    }
    for model in MODELS {
        let mut run = Run::new(model);
        (0..4).for_each(|_| drop(run.decode(2)));
        run.log.new_calls();
        // Memory for more tokens than there will be, before the step; its rows are where they were.
        run.device.bank_commit(&mut run.banks[1], CONTEXT).unwrap();
        let grown = run.log.new_calls();
        assert!(grown.count("cuMemCreate") > 0, "{model}: {grown:?}");
        let plan = run.plan(2, 1, true);
        let calls = run.forward(&plan);
        let operations = calls.operations();
        check_replayed(&calls, &plan, operations);
        run.summarise(2, GREEDY);
        // All of it is other memory when the sequence begins anew, at the same addresses.
        run.device.bank_trim(&mut run.banks[1], 0);
        run.done[1] = 0;
        let plan = run.plan(2, 1, true);
        check_replayed(&run.forward(&plan), &plan, operations);
    }
}

#[test]
fn a_prompts_chunks_follow_each_other_without_waiting_for_results() {
    if !card().is_here("a_prompts_chunks_follow_each_other_without_waiting_for_results") {
        return;
    }
    for model in MODELS {
        let mut run = Run::new(model);
        // Of 700 rows, attention takes parts with plans of their own.
        for (rows, plans) in [(200, 1), (700, if model.contains("v4") { 3 } else { 1 })] {
            for _ in 0..2 {
                let plan = run.plan(1, rows, false);
                run.forward(&plan);
            }
            run.device.synchronize().unwrap();
            let mut before = 0;
            for chunk in 0..3 {
                let plan = run.plan(1, rows, false);
                let calls = run.forward(&plan);
                calls.only(&[&STEP[..], &LOOKS_UP_KERNELS[..]].concat());
                assert_eq!(calls.count("cuMemcpyHtoDAsync_v2"), plans, "{model}, {rows} rows");
                // The memory of the plan before is written when that plan has been copied, which is after the chunk before it.
                let waited = calls.sum("cuEventSynchronize");
                assert!(
                    waited <= before + plans,
                    "{model}, {rows} rows, chunk {chunk}: waited for {waited} operations"
                );
                assert!(chunk > 0 || waited == 0, "{model}, {rows} rows: waited for {waited} operations");
                before = if chunk > 0 { calls.operations() } else { 0 };
                if rows == 200 {
                    assert_eq!(calls.sum("cuMemcpyHtoDAsync_v2"), plan_bytes(&plan), "{model}");
                }
            }
        }
    }
}

/// Graphs cost device memory, 112 KiB each and 2,450 bytes a launch: not more than 64 MiB in all, and those in use stay.
#[test]
fn graphs_of_ever_new_steps_do_not_accumulate() {
    if !card().is_here("graphs_of_ever_new_steps_do_not_accumulate") {
        return;
    }
    const MOST: usize = 64 << 20;
    let bytes = |calls: &Calls, name: &str| ((calls.count(name) * 112) << 10) + calls.sum(name) * 2450;
    let mut run = Run::new(MODELS[0]);
    let (mut made, mut gone) = (0, 0);
    let mut highest = 0;
    // Launches depend on the number of rows and on how deep the deepest is; the deepest first, so that no memory grows later.
    let depths = (9..20).rev().flat_map(|power| (4..8).rev().map(move |quarters| quarters << (power - 2)));
    for (i, depth) in depths.enumerate() {
        run.done[0] = depth;
        for rows in 1..=BANKS {
            for _ in 0..3 {
                let calls = run.decode(rows);
                made += bytes(&calls, "cuGraphInstantiateWithFlags");
                gone += bytes(&calls, "cuGraphExecDestroy");
                highest = highest.max(made - gone);
                assert!(made - gone <= MOST, "depth {depth}, {rows} rows: {made} bytes recorded, {gone} forgotten");
            }
        }
        // One that comes again and again is never forgotten.
        run.done[1] = 0;
        let mut plan = BatchPlan::default();
        plan.push(1, 0, &[1], true);
        for round in 0..3 {
            let calls = run.forward(&plan);
            made += bytes(&calls, "cuGraphInstantiateWithFlags");
            gone += bytes(&calls, "cuGraphExecDestroy");
            assert!(i == 0 || calls.count("cuGraphInstantiateWithFlags") == 0, "depth {depth}, round {round}");
            run.summarise(1, GREEDY);
        }
    }
    assert!(gone > MOST / 4 && highest > MOST / 2, "{made} bytes recorded, {highest} at once: too few for this test");
}

/// Whatever call fails for good, in a step or behind it, is the end of the process.
#[test]
fn a_device_lost_in_a_step_ends_the_process() {
    let name = "a_device_lost_in_a_step_ends_the_process";
    if std::env::var_os("FAKE_CUDA_TAG").is_some() {
        let mut run = Run::new(MODELS[0]);
        (0..8).for_each(|_| drop(run.decode(2)));
        panic!("it lives on");
    }
    // Without a failure, to know which call of a process is in the middle of its steps.
    let whole = card();
    whole.run_test(name);
    let calls = whole.calls();
    let before = &calls[..calls.find("cuGraphLaunch").expect("graphs")];
    for call in [
        "cuGraphLaunch",
        "cuLaunchKernelEx",
        "cuGraphInstantiateWithFlags",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamSynchronize",
        "cuEventRecord",
    ] {
        let nth = before.lines().filter(|l| l.starts_with(call)).count() + 3;
        for code in [700, 719] {
            let card = card().with("FAKE_CUDA_FAIL", format!("{call}:{nth}:{code}"));
            let (ended, said) = card.run_test(name);
            assert_eq!(ended, Some(fatal::EXIT_CODE), "{call}: {said}");
            assert!(
                said.contains(&format!("{call}: CUDA_ERROR_")) && said.contains("[cuda_device_lost]"),
                "{call}: {said}"
            );
            assert_eq!(card.held(), (0, 0), "{call}");
        }
    }
}

/// What a model does with a device, in the order of a worker. A step that memory was refused to is the end of its requests, and the
/// next one finds memory again.
fn start_and_serve(model: &str) -> Result<(), ModelError> {
    let device = CudaDevice::open(0).unwrap();
    let mut model = ds4_models::build(&device, &weights(&fixture(model)))?;
    let mut banks = Vec::new();
    banks.push(again("a bank", || Ok(device.bank(model.state(), CONTEXT)?)));
    // A prompt of parts, then decode steps of both kinds of summaries.
    for (first, rows, query) in
        [(0, 700, GREEDY), (700, 1, GREEDY), (701, 1, TOP_40), (702, 1, GREEDY), (703, 1, GREEDY)]
    {
        let mut plan = BatchPlan::default();
        plan.push(0, first, &vec![1; rows], true);
        again("a step", || {
            device.bank_commit(&mut banks[0], first + rows)?;
            model.forward(&device, &plan, &mut banks)
        });
        again("a summary", || {
            device.summarise(model.logits(), &[query], &mut Vec::new());
            Ok(())
        });
    }
    let kept = again("a checkpoint", || Ok(device.bank_checkpoint(&banks[0], 704)?));
    device.bank_rewind(&mut banks[0], &kept);
    Ok(())
}

/// Does it as the engine does, and if memory is refused, once more.
fn again<T>(what: &str, mut work: impl FnMut() -> Result<T, ModelError>) -> T {
    let mut run = || match catch_unwind(AssertUnwindSafe(&mut work)) {
        Ok(done) => done,
        Err(payload) => Err(payload
            .downcast::<DeviceError>()
            .map(|e| ModelError::Device(*e))
            .unwrap_or_else(|other| resume_unwind(other))),
    };
    match run() {
        Err(ModelError::Device(DeviceError::OutOfMemory { .. })) => {
            println!("refused to {what}");
            run().unwrap_or_else(|e| panic!("{what} again: {e}"))
        }
        other => other.unwrap(),
    }
}

#[test]
fn any_refused_allocation_ends_a_start_or_a_step_and_no_later_one() {
    let name = "any_refused_allocation_ends_a_start_or_a_step_and_no_later_one";
    if let Ok(model) = std::env::var("FAKE_CUDA_TEST_MODEL") {
        match start_and_serve(&model) {
            Err(ModelError::Device(DeviceError::OutOfMemory { .. })) => println!("refused to a start"),
            other => other.unwrap(),
        }
        return;
    }
    for model in MODELS {
        let card = card().with("FAKE_CUDA_TEST_MODEL", model);
        assert_eq!(card.run_test(name).0, Some(0));
        let calls = card.calls();
        let allocations = ["cuMemAlloc_v2 ", "cuMemCreate ", "cuMemAddressReserve ", "cuMemHostAlloc "];
        let total = calls.lines().filter(|l| allocations.iter().any(|a| l.starts_with(a))).count();
        let mut met = Vec::new();
        // Nearly all of a start are those of weights, one like the other.
        for n in (1..=total).filter(|n| n % 16 == 1 || n + 52 > total) {
            let refusing = self::card().with("FAKE_CUDA_TEST_MODEL", model).with("DS4_CUDA_REFUSE", n);
            let (ended, said) = refusing.run_test(name);
            assert!(said.contains(&format!("DS4_CUDA_REFUSE={n}: cuMem")), "{n} of {total}: {said}");
            let what = said.lines().find_map(|l| l.strip_prefix("refused to ")).unwrap_or("nobody");
            // A rotary table is made by a function that cannot refuse, before anybody is served.
            let table =
                ended == Some(fatal::EXIT_CODE) && said.contains("fatal: a rotary table: cuMemAlloc_v2: not enough");
            assert!(ended == Some(0) || table, "{n} of {total}, refused to {what}: {said}");
            met.push(what.to_owned());
            assert_eq!(refusing.held(), (0, 0));
        }
        for what in ["a start", "a bank", "a step", "a summary"] {
            assert!(met.iter().any(|m| m == what), "{model}: {what} was not met in {met:?}");
        }
    }
}
