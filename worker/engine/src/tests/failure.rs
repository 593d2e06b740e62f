//! Refusals, failures, drain and shutdown.

use ds4_models::ModelError;

use super::*;
use crate::EngineState;

fn stopped(engine: &EngineHandle) -> EngineState {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(engine.stopped())
}

fn refusal(change: impl FnOnce(&mut GenerateRequest)) -> EngineError {
    let engine = start(MockModel::hashing(), small());
    let mut r = request(&[1, 2, 3], 4);
    change(&mut r);
    let error = engine.submit(r).unwrap_err();
    // Nothing else is disturbed.
    assert_eq!(hear(engine.submit(request(&[1, 2, 3], 4)).unwrap()).tokens.len(), 4);
    error
}

#[test]
fn bad_requests_are_refused_by_name() {
    assert_eq!(refusal(|r| r.prompt.clear()), EngineError::EmptyPrompt);
    assert_eq!(refusal(|r| r.prompt = vec![1; 2048]), EngineError::ContextExceeded { prompt: 2048, context: 2048 });
    let name = |e: EngineError| match e {
        EngineError::BadParameter { name, value, .. } => (name, value),
        other => panic!("{other:?}"),
    };
    assert_eq!(name(refusal(|r| r.max_tokens = 0)), ("max_tokens", "0".into()));
    assert_eq!(name(refusal(|r| r.prompt = vec![1, 300])), ("prompt", "token 300 at index 1".into()));
    assert_eq!(name(refusal(|r| r.sampling.top_p = 2.0)), ("top_p", "2".into()));
    assert_eq!(name(refusal(|r| r.sampling.logit_bias = vec![(300, 1.0)])).0, "logit_bias");
    assert_eq!(name(refusal(|r| r.stop = vec![Vec::new()])).0, "stop");
}

#[test]
fn a_huge_max_tokens_is_clamped_to_the_context() {
    let engine = start(MockModel::hashing(), EngineConfig { context: 40, ..small() });
    let heard = hear(engine.submit(request(&[1; 30], 1_000_000_000)).unwrap());
    assert_eq!(heard.tokens.len(), 10);
    assert_eq!(heard.done().0, FinishReason::Length);
    // The longest prompt that is accepted leaves room for one token.
    assert_eq!(hear(engine.submit(request(&[1; 39], 5)).unwrap()).tokens.len(), 1);
}

#[test]
fn the_context_is_never_longer_than_the_model_was_trained_for() {
    let engine = start(MockModel::hashing(), EngineConfig { context: 1 << 30, ..small() });
    assert_eq!(engine.context(), 4096);
}

#[test]
fn a_step_error_fails_everyone_and_the_engine() {
    let (both_submitted, wait) = channel::<()>();
    let mut steps = 0;
    let model = MockModel::hashing().before(Box::new(move |_| {
        steps += 1;
        if steps == 1 {
            wait.recv().unwrap();
        }
        if steps == 5 { Err(ModelError::Bind("cosmic ray".into())) } else { Ok(()) }
    }));
    let engine = start(model, EngineConfig { max_batch: 1, ..small() });
    let running = engine.submit(request(&[1], 50)).unwrap();
    let queued = engine.submit(request(&[2], 50)).unwrap();
    both_submitted.send(()).unwrap();
    let want = EngineError::Internal("cosmic ray".into());
    assert_eq!(hear(running).error(), want);
    assert_eq!(hear(queued).error(), want);
    assert_eq!(stopped(&engine), EngineState::Failed("cosmic ray".into()));
    assert_eq!(engine.submit(request(&[1], 1)).unwrap_err(), want);
}

#[test]
fn a_panic_in_a_step_is_a_failure_with_its_message() {
    let model = MockModel::hashing().before(Box::new(|_| panic!("shape mismatch 3 != 4")));
    let engine = start(model, small());
    let error = hear(engine.submit(request(&[1], 5)).unwrap()).error();
    assert!(error.to_string().contains("shape mismatch 3 != 4"), "{error}");
    assert!(matches!(stopped(&engine), EngineState::Failed(_)));
}

#[test]
fn k3_a_sequence_without_finite_logits_fails_alone_and_is_not_reused() {
    let model = MockModel::scripted(Box::new(|tokens, logits| {
        if tokens.starts_with(&[66]) && tokens.len() > 40 {
            logits.fill(f32::NAN);
        } else {
            logits[65] = 1.0;
        }
    }));
    let engine = start(model, EngineConfig { max_batch: 2, ..small() });
    let healthy = engine.submit(request(&[1; 30], 60)).unwrap();
    let sick = hear(engine.submit(request(&[66; 30], 60)).unwrap());
    assert_eq!(sick.tokens.len(), 11);
    assert!(matches!(sick.error(), EngineError::Internal(_)));
    assert_eq!(hear(healthy).tokens.len(), 60);
    let (_, timings) = hear(engine.submit(request(&[66; 31], 2)).unwrap()).done();
    assert_eq!(timings.cached_tokens, 0, "rows of a failed sequence must not be trusted");
}

#[test]
fn memory_refused_to_one_request_does_not_harm_another() {
    let device = MockDevice::default();
    device.limit_tokens(100);
    let (gate, before) = gate();
    let engine = start_on(device, MockModel::hashing().before(before), small());
    let modest = engine.submit(request(&[1; 10], 20)).unwrap();
    gate.held();
    let greedy = engine.submit(request(&[2; 200], 20)).unwrap();
    drop(gate);
    match hear(greedy).error() {
        EngineError::OutOfMemory(text) => assert!(text.contains("--ctx"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(hear(modest).tokens, alone(request(&[1; 10], 20)).tokens);
    assert_eq!(engine.state(), EngineState::Running);
}

#[test]
fn drain_finishes_what_runs_and_what_waits_and_refuses_what_comes() {
    let (gate, before) = gate();
    let engine = start(MockModel::hashing().before(before), EngineConfig { max_batch: 1, ..small() });
    let running = engine.submit(request(&[1, 2], 10)).unwrap();
    gate.held();
    let waiting = engine.submit(request(&[3, 4], 10)).unwrap();
    engine.drain(PATIENCE);
    assert_eq!(engine.submit(request(&[5], 1)).unwrap_err(), EngineError::Draining);
    assert_eq!(engine.state(), EngineState::Draining);
    drop(gate);
    assert_eq!(hear(running).tokens.len(), 10);
    assert_eq!(hear(waiting).tokens, alone(request(&[3, 4], 10)).tokens);
    assert_eq!(stopped(&engine), EngineState::Stopped);
    engine.join();
}

#[test]
fn a_drain_ends_at_its_deadline() {
    let model = MockModel::hashing().before(Box::new(|_| {
        std::thread::sleep(Duration::from_millis(5));
        Ok(())
    }));
    let engine = start(model, EngineConfig { max_batch: 1, ..small() });
    let endless = engine.submit(request(&[1, 2], 2000)).unwrap();
    let waiting = engine.submit(request(&[3, 4], 10)).unwrap();
    eventually(&engine, "running", |s| s.decode_tokens > 2);
    let asked = Instant::now();
    engine.drain(Duration::from_millis(60));
    for cut in [endless, waiting] {
        assert_eq!(hear(cut).error(), EngineError::Draining);
    }
    assert_eq!(engine.stats().queued, 0);
    assert!(asked.elapsed() < Duration::from_secs(2));
    assert_eq!(stopped(&engine), EngineState::Stopped);
}

#[test]
fn a_drain_does_not_wait_for_a_client_that_does_not_read() {
    let engine = start(MockModel::hashing(), EngineConfig { event_capacity: 4, ..small() });
    let stuck = engine.submit(request(&[1, 2], 2000)).unwrap();
    eventually(&engine, "paused", |s| s.paused == 1);
    engine.drain(Duration::from_millis(50));
    assert_eq!(stopped(&engine), EngineState::Stopped);
    assert_eq!(hear(stuck).error(), EngineError::Draining);
}

#[test]
fn an_idle_engine_drains_and_shuts_down_at_once() {
    let engine = start(MockModel::hashing(), small());
    engine.drain(PATIENCE);
    assert_eq!(stopped(&engine), EngineState::Stopped);
    let engine = start(MockModel::hashing(), small());
    let running = engine.submit(request(&[1, 2], 2000)).unwrap();
    engine.shutdown();
    engine.join();
    assert_eq!(hear(running).error(), EngineError::Draining);
    assert_eq!(engine.state(), EngineState::Stopped);
}

#[test]
fn the_engine_ends_when_nobody_holds_it() {
    let engine = start(MockModel::hashing(), small());
    let rx = engine.submit(request(&[1, 2], 30)).unwrap();
    let state = engine.shared.state.subscribe();
    drop(engine);
    assert_eq!(hear(rx).tokens.len(), 30, "a request outlives the handle that made it");
    let end = Instant::now() + PATIENCE;
    while !state.borrow().is_final() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn memory_refused_in_a_step_ends_its_requests_and_not_the_engine() {
    use ds4_kernels::DeviceError;
    let refused = || DeviceError::OutOfMemory { what: "activations", missing: 4096 };
    // As an error, and as what an operation that returns nothing unwinds with.
    let ways: [fn(DeviceError) -> Result<(), ModelError>; 2] =
        [|e| Err(ModelError::Device(e)), |e| std::panic::resume_unwind(Box::new(e))];
    for way in ways {
        let mut steps = 0;
        let model = MockModel::hashing().before(Box::new(move |_| {
            steps += 1;
            if steps == 3 { way(refused()) } else { Ok(()) }
        }));
        let engine = start(model, EngineConfig { max_batch: 1, ..small() });
        let (first, second) = (request(&[1], 50), request(&[1], 50));
        let want = hear(start(MockModel::hashing(), small()).submit(second.clone()).unwrap()).tokens;
        let error = hear(engine.submit(first).unwrap()).error();
        assert_eq!(error, EngineError::OutOfMemory(refused().to_string()));
        // The bank of the failed step is not continued from.
        assert_eq!(hear(engine.submit(second).unwrap()).tokens, want);
        assert_eq!(engine.stats().cached_tokens, 0);
    }
}
