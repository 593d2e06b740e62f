//! Clients that leave, in every stage.

use super::*;

#[test]
fn a1_a_client_that_leaves_during_prefill_costs_at_most_the_running_chunk() {
    let (gate, before) = gate();
    let engine =
        start(MockModel::hashing().before(before), EngineConfig { prefill_chunk: 64, max_batch: 1, ..small() });
    let prompt: Vec<u32> = (0..1000).map(|i| i % 250).collect();
    let rx = engine.submit(request(&prompt, 5)).unwrap();
    assert_eq!(gate.held().rows(), 64);
    drop(rx);
    gate.let_go();
    let stats = eventually(&engine, "cancelled", |s| s.cancelled_prefill == 1 && s.running == 0);
    assert_eq!((stats.steps, stats.prefill_tokens), (1, 64));
    assert!(gate.plans.try_recv().is_err(), "no further step may run for a client that left");
    // Its rows are kept: the same prompt resumes after the chunk.
    drop(gate);
    let (_, timings) = hear(engine.submit(request(&prompt, 5)).unwrap()).done();
    assert_eq!(timings.cached_tokens, 64);
}

#[test]
fn a1_a_client_that_leaves_during_decode_is_gone_from_the_next_step() {
    let (gate, before) = gate();
    let engine = start(MockModel::hashing().before(before), small());
    let staying = engine.submit(request(&[1, 2, 3], 20)).unwrap();
    gate.held();
    let leaving = engine.submit(request(&[4, 5], 20)).unwrap();
    gate.let_go();
    // Prefill of the second beside the first's decode, then both decode.
    assert_eq!(gate.held().spans.len(), 2);
    gate.let_go();
    let both = gate.held();
    assert_eq!((both.spans.len(), both.rows()), (2, 2));
    drop(leaving);
    gate.let_go();
    let one = gate.held();
    assert_eq!(one.spans.len(), 1);
    assert_eq!(one.spans[0].bank, both.spans[0].bank);
    drop(gate);
    assert_eq!(hear(staying).tokens, alone(request(&[1, 2, 3], 20)).tokens);
    assert_eq!(engine.stats().cancelled_decode, 1);
}

#[test]
fn a2_dead_queued_clients_are_reaped_and_never_take_a_bank() {
    let (gate, before) = gate();
    let engine = start(MockModel::hashing().before(before), EngineConfig { max_batch: 1, max_queue: 3, ..small() });
    let first = engine.submit(request(&[1, 2, 3], 3)).unwrap();
    gate.held();
    let dead: Vec<_> = (0..2).map(|i| engine.submit(request(&[10 + i; 50], 9)).unwrap()).collect();
    let alive = engine.submit(request(&[7, 8], 3)).unwrap();
    assert!(matches!(engine.submit(request(&[1], 1)), Err(EngineError::QueueFull { limit: 3 })));
    drop(dead);
    gate.let_go();
    // One step later their places are free again.
    gate.held();
    let stats = engine.stats();
    assert_eq!((stats.reaped, stats.queued), (2, 1));
    assert!(engine.submit(request(&[1], 1)).is_ok());
    drop(gate);
    assert_eq!(hear(first).tokens.len(), 3);
    assert_eq!(hear(alive).tokens.len(), 3);
    let stats = eventually(&engine, "idle", |s| s.running == 0 && s.queued == 0);
    // 3 + 2 + 1 prompt tokens were computed at most; nothing of the dead ones' 100.
    assert!(stats.prefill_tokens <= 6, "{stats:?}");
}

#[test]
fn a2_a_queue_of_only_dead_clients_is_emptied_without_a_running_request() {
    let (gate, before) = gate();
    let engine = start(MockModel::hashing().before(before), EngineConfig { max_batch: 1, ..small() });
    let first = engine.submit(request(&[1], 1)).unwrap();
    gate.held();
    let dead: Vec<_> = (0..5).map(|_| engine.submit(request(&[2], 1)).unwrap()).collect();
    drop(dead);
    gate.let_go();
    assert_eq!(hear(first).tokens.len(), 1);
    let stats = eventually(&engine, "reaped", |s| s.queued == 0);
    assert_eq!((stats.reaped, stats.steps), (5, 1));
}
