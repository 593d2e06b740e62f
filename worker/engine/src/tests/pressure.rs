//! Limits: the queue, slow clients, sleep.

use super::*;

#[test]
fn a_full_queue_refuses_with_its_limit() {
    let (gate, before) = gate();
    let engine = start(MockModel::hashing().before(before), EngineConfig { max_batch: 1, max_queue: 2, ..small() });
    let mut all = vec![engine.submit(request(&[1], 2)).unwrap()];
    gate.held();
    all.extend((0..2).map(|_| engine.submit(request(&[2], 2)).unwrap()));
    let error = engine.submit(request(&[3], 2)).unwrap_err();
    assert_eq!(error, EngineError::QueueFull { limit: 2 });
    assert!(error.to_string().contains("--max-queue"));
    assert_eq!(engine.stats().refused, 1);
    drop(gate);
    assert!(all.into_iter().all(|rx| hear(rx).tokens.len() == 2));
    assert!(engine.submit(request(&[3], 2)).is_ok());
}

#[test]
fn a_slow_client_is_paused_and_others_go_on() {
    let engine = start(MockModel::hashing(), EngineConfig { event_capacity: 4, ..small() });
    let slow = engine.submit(request(&[1, 2, 3], 50)).unwrap();
    let fast = hear(engine.submit(request(&[4, 5, 6], 50)).unwrap());
    assert_eq!(fast.tokens, alone(request(&[4, 5, 6], 50)).tokens);
    let stats = eventually(&engine, "paused", |s| s.paused == 1);
    assert_eq!(stats.running, 1);
    // Admitted and two tokens; one slot stays free for the end.
    assert_eq!(stats.decode_tokens, 50 + 2);
    let heard = hear(slow);
    assert_eq!(heard.tokens, alone(request(&[1, 2, 3], 50)).tokens);
    assert_eq!(heard.done().0, FinishReason::Length);
}

#[test]
fn a_client_that_never_reads_is_cancelled() {
    let config = EngineConfig { event_capacity: 4, stall_timeout: Duration::from_millis(50), ..small() };
    let engine = start(MockModel::hashing(), config);
    let stuck = engine.submit(request(&[1, 2, 3], 50)).unwrap();
    let stats = eventually(&engine, "stalled", |s| s.stalled == 1 && s.running == 0);
    assert_eq!(stats.decode_tokens, 2);
    let heard = hear(stuck);
    assert_eq!(heard.tokens.len(), 2);
    assert_eq!(heard.error(), EngineError::Stalled { seconds: 0 });
}

/// Processor time of this process's engine thread, in clock ticks.
fn engine_ticks() -> u64 {
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
        if stat.contains("(ds4-engine)") {
            // Fields 14 and 15 of proc(5); the command name is field 2.
            let rest = stat.rsplit(')').next().unwrap();
            let fields: Vec<&str> = rest.split_whitespace().collect();
            return fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        }
    }
    panic!("no engine thread");
}

#[test]
fn an_idle_or_stalled_engine_sleeps() {
    let engine = start(MockModel::hashing(), EngineConfig { event_capacity: 4, ..small() });
    let stuck = engine.submit(request(&[1, 2, 3], 50)).unwrap();
    eventually(&engine, "paused", |s| s.paused == 1);
    let before = engine_ticks();
    std::thread::sleep(Duration::from_millis(400));
    // A spinning thread would use 40 ticks.
    assert!(engine_ticks() - before <= 2);
    assert_eq!(hear(stuck).tokens.len(), 50);
    let before = engine_ticks();
    std::thread::sleep(Duration::from_millis(400));
    assert!(engine_ticks() - before <= 2);
}

#[test]
fn m4_idle_memory_stays_under_its_limit_over_many_requests() {
    let device = MockDevice::default();
    let config = EngineConfig { idle_keep_bytes: Some(8 * 300), ..small() };
    let engine = start_on(device, MockModel::hashing(), config);
    for i in 0..40u32 {
        let prompt: Vec<u32> = (0..150).map(|j| (i * 7 + j * (i + 1)) % 250).collect();
        assert_eq!(hear(engine.submit(request(&prompt, 4)).unwrap()).tokens.len(), 4);
        eventually(&engine, "trimmed", |s| s.running == 0 && s.bank_bytes <= 8 * 300);
    }
    assert!(engine.stats().idle_banks > 0, "what fits the limit is kept");
}
