//! Raw rows of logits, for debugging and scoring.

use super::*;

/// A model whose row says what it was computed from: logit 0 is the sequence's length, logit 1 the sum of its tokens.
fn telling() -> MockModel {
    MockModel::scripted(Box::new(|tokens, logits| {
        logits[0] = f32::from(u16::try_from(tokens.len()).unwrap());
        logits[1] = f32::from(u16::try_from(tokens.iter().sum::<u32>()).unwrap());
        // The next token: one more than the last.
        logits[usize::try_from(tokens.last().unwrap() % 200 + 1).unwrap()] = 1e6;
    }))
}

/// Length and sum of the first `n` tokens.
fn facts(sequence: &[u32], n: usize) -> (f32, f32) {
    let sum: u32 = sequence[..n].iter().sum();
    (f32::from(u16::try_from(n).unwrap()), f32::from(u16::try_from(sum).unwrap()))
}

fn check(heard: &Heard, sequence: &[u32], positions: &[usize]) {
    assert_eq!(heard.rows.iter().map(|r| r.0).collect::<Vec<_>>(), positions);
    for (position, row) in &heard.rows {
        assert_eq!(row.len(), MockModel::VOCAB);
        assert_eq!((row[0], row[1]), facts(sequence, position + 1), "after token {position}");
    }
}

fn wanted(prompt: &[usize], steps: bool) -> LogitsWanted {
    LogitsWanted { steps, prompt: prompt.to_vec() }
}

#[test]
fn rows_of_steps_come_with_their_tokens() {
    let engine = start(telling(), small());
    let prompt = [10, 20, 30];
    let mut rx = engine.submit(GenerateRequest { logits: wanted(&[], true), ..request(&prompt, 3) }).unwrap();
    let mut heard = Heard::default();
    while let Some(event) = rx.blocking_recv() {
        if matches!(event, Event::Token { .. }) {
            assert_eq!(heard.rows.len(), heard.tokens.len() + 1, "a row precedes its token");
        }
        heard.take(event);
    }
    assert_eq!(heard.tokens, [31, 32, 33]);
    check(&heard, &[10, 20, 30, 31, 32], &[2, 3, 4]);
    let silent = hear(engine.submit(request(&prompt, 3)).unwrap());
    assert!(silent.rows.is_empty());
}

#[test]
fn rows_inside_a_prompt_are_the_same_in_any_chunks_and_whatever_is_cached() {
    let prompt: Vec<u32> = (0..300).map(|i| i * 7 % 190 + 2).collect();
    let some = [0, 1, 63, 64, 65, 200, 298];
    let all: Vec<usize> = (0..299).collect();
    for (chunk, room) in [(1, 4), (64, 8), (256, 64)] {
        let engine = start(telling(), EngineConfig { prefill_chunk: chunk, event_capacity: room, ..small() });
        for positions in [&some[..], &all] {
            // The first fills a bank, the second finds its rows there.
            for _ in 0..2 {
                let r = GenerateRequest { logits: wanted(positions, true), ..request(&prompt, 2) };
                let heard = hear(engine.submit(r).unwrap());
                let first = prompt[299] % 200 + 1;
                assert_eq!(heard.tokens, [first, first % 200 + 1]);
                let sequence = [&prompt[..], &[first]].concat();
                check(&heard, &sequence, &[positions, &[299, 300]].concat());
            }
        }
        let late = GenerateRequest { logits: wanted(&[250], false), ..request(&prompt, 1) };
        let heard = hear(engine.submit(late).unwrap());
        check(&heard, &prompt, &[250]);
        assert_eq!(heard.done().1.cached_tokens, 250, "rows before the first wanted one are reused");
    }
}

#[test]
fn a_client_that_does_not_read_its_rows_holds_nobody_up() {
    let engine = start(telling(), EngineConfig { event_capacity: 4, ..small() });
    let prompt: Vec<u32> = (0..200).map(|i| i % 190 + 2).collect();
    let all: Vec<usize> = (0..199).collect();
    let slow = engine.submit(GenerateRequest { logits: wanted(&all, false), ..request(&prompt, 2) }).unwrap();
    eventually(&engine, "paused", |s| s.paused == 1);
    let other = hear(engine.submit(request(&[5, 6], 4)).unwrap());
    assert_eq!(other.tokens, [7, 8, 9, 10]);
    let heard = hear(slow);
    check(&heard, &prompt, &all);
    assert_eq!(heard.tokens.len(), 2);
}

#[test]
fn batched_rows_go_to_those_who_asked() {
    let (gate, before) = gate();
    let engine = start(telling().before(before), EngineConfig { prefill_chunk: 400, ..small() });
    let blocker = engine.submit(request(&[3], 1)).unwrap();
    gate.held();
    let prompts: Vec<Vec<u32>> = (1..4).map(|k| (0..40).map(|i| i * k % 190 + 2).collect()).collect();
    let asked = [wanted(&[3, 7], false), wanted(&[], true), wanted(&[0, 38], true)];
    let receivers: Vec<_> = prompts
        .iter()
        .zip(&asked)
        .map(|(p, logits)| engine.submit(GenerateRequest { logits: logits.clone(), ..request(p, 1) }).unwrap())
        .collect();
    drop(gate);
    hear(blocker);
    for ((rx, prompt), positions) in receivers.into_iter().zip(&prompts).zip([&[3, 7][..], &[39], &[0, 38, 39]]) {
        check(&hear(rx), prompt, positions);
    }
}

#[test]
fn positions_that_make_no_sense_are_refused() {
    let engine = start(telling(), small());
    for (positions, shown) in [(&[2][..], "2"), (&[1, 1], "1"), (&[1, 0], "0"), (&[9], "9")] {
        let r = GenerateRequest { logits: wanted(positions, false), ..request(&[1, 2, 3], 1) };
        match engine.submit(r).unwrap_err() {
            EngineError::BadParameter { name: "positions", value, .. } => assert_eq!(value, shown),
            e => panic!("{e}"),
        }
    }
}

#[test]
fn rows_are_raw() {
    let engine = start(
        MockModel::scripted(Box::new(|_, logits| {
            logits[1] = f32::NAN;
            logits[2] = 3.0;
        })),
        small(),
    );
    let heard = hear(engine.submit(GenerateRequest { logits: wanted(&[], true), ..request(&[1], 1) }).unwrap());
    assert!(heard.rows[0].1[1].is_nan());
    assert_eq!(heard.tokens, [2]);
}
