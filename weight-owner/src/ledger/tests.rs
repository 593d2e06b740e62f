use ds4_proto::broker::Message;

use super::*;

const PEER: PeerCredentials = PeerCredentials { pid: 4242, uid: 1, gid: 1 };

fn held(seed: u8) -> Held {
    Held {
        manifest: ds4_os::memfd::sealed("test", b"manifest").unwrap(),
        manifest_len: 8,
        chunks: vec![ds4_os::memfd::sealed("test", &[seed; 16]).unwrap()],
        bytes: 16,
        blake3: blake3::Hash::from([seed; 32]).to_hex().to_string(),
        known: false,
    }
}

fn load(ledger: &Ledger, name: &str, seed: u8) -> u64 {
    let epoch = ledger.next_epoch();
    ledger.begin(epoch, name, Path::new("/models/x.gguf"));
    ledger.publish(epoch, held(seed), Duration::from_secs(1));
    epoch
}

fn code(result: Result<(Lease, Arc<Held>), Message>) -> String {
    match result.map(drop) {
        Err(Message::Refused { code, sentence, .. }) => {
            assert!(sentence.len() > 20, "{sentence}");
            code
        }
        other => panic!("no refusal: {other:?}"),
    }
}

#[test]
fn nothing_is_visible_before_ready() {
    let ledger = Arc::new(Ledger::default());
    assert_eq!(code(ledger.lease("", None, PEER, "w")), "no_model");
    let epoch = ledger.next_epoch();
    ledger.begin(epoch, "m", Path::new("/m"));
    assert_eq!(code(ledger.lease("", None, PEER, "w")), "model_loading");
    assert_eq!(code(ledger.lease("m", None, PEER, "w")), "model_loading");
    assert_eq!(code(ledger.lease("n", None, PEER, "w")), "unknown_model");
    ledger.publish(epoch, held(1), Duration::ZERO);
    let (lease, descriptors) = ledger.lease("", None, PEER, "w").unwrap();
    assert_eq!((lease.epoch, lease.model.as_str(), descriptors.chunks.len()), (epoch, "m", 1));
}

#[test]
fn l4_a_failed_load_is_not_served_and_says_why() {
    let ledger = Arc::new(Ledger::default());
    let epoch = ledger.next_epoch();
    ledger.begin(epoch, "m", Path::new("/m"));
    ledger.fail(epoch, &Failure::model("truncated_file", "it ends early"));
    match ledger.lease("m", None, PEER, "w").map(drop) {
        Err(Message::Refused { code, sentence, .. }) => {
            assert_eq!(code, "model_failed");
            assert!(sentence.contains("it ends early") && sentence.contains("truncated_file"), "{sentence}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(ledger.models()[0].error_code, "truncated_file");
    // A new attempt from the same path replaces the old failure.
    load(&ledger, "m", 1);
    ledger.begin(9, "m", Path::new("/m"));
    assert!(ledger.models().iter().all(|m| m.error_code.is_empty()));
}

#[test]
fn failures_are_remembered_up_to_a_bound() {
    let ledger = Ledger::default();
    for i in 0..100 {
        let epoch = ledger.next_epoch();
        ledger.begin(epoch, "m", Path::new(&format!("/{i}")));
        ledger.fail(epoch, &Failure::model("x", "y"));
    }
    assert_eq!(ledger.models().len(), KEEP_FAILED);
    assert_eq!(ledger.models().last().unwrap().path, "/99");
}

#[test]
fn l2_other_content_than_expected_is_refused_with_both_hashes() {
    let ledger = Arc::new(Ledger::default());
    load(&ledger, "m", 7);
    assert!(ledger.lease("m", Some(&[7; 32]), PEER, "w").is_ok());
    match ledger.lease("m", Some(&[8; 32]), PEER, "w").map(drop) {
        Err(Message::Refused { code, sentence, .. }) => {
            assert_eq!(code, "content_mismatch");
            assert!(sentence.contains(&"07".repeat(32)) && sentence.contains(&"08".repeat(32)), "{sentence}");
        }
        other => panic!("{other:?}"),
    }
    assert!(ledger.leases().is_empty());
}

#[test]
fn a_new_epoch_drains_the_old_one_whose_memory_goes_with_its_last_lease() {
    let ledger = Arc::new(Ledger::default());
    let first = load(&ledger, "m", 1);
    let (one, held_by_broker) = ledger.lease("m", None, PEER, "w1").unwrap();
    let (two, _) = ledger.lease("m", None, PEER, "w2").unwrap();
    let old = Arc::downgrade(&held_by_broker);
    drop(held_by_broker);
    let second = load(&ledger, "m", 2);
    assert_eq!(one.drain.borrow().as_ref().unwrap().0, 0);
    assert_eq!(ledger.lease("", None, PEER, "w3").unwrap().0.epoch, second);
    drop(one);
    assert!(old.upgrade().is_some());
    assert_eq!(ledger.holding(), [first, second]);
    drop(two);
    assert!(old.upgrade().is_none());
    assert_eq!(ledger.holding(), [second]);
}

#[test]
fn an_epoch_without_leases_is_released_at_once() {
    let ledger = Arc::new(Ledger::default());
    load(&ledger, "m", 1);
    load(&ledger, "other", 2);
    assert_eq!(code(ledger.lease("", None, PEER, "w")), "ambiguous_model");
    assert_eq!(ledger.drain("m", 0, 5, "test").unwrap().1, 0);
    assert_eq!(ledger.models().len(), 1);
    assert_eq!(code(ledger.lease("m", None, PEER, "w")), "unknown_model");
    assert!(ledger.drain("m", 0, 5, "test").unwrap_err().contains("held are other"));
    assert!(ledger.drain("other", 77, 5, "test").unwrap_err().contains("epoch 77"));
}

#[tokio::test]
async fn l6_release_is_awaited_until_the_last_reader_is_gone() {
    let ledger = Arc::new(Ledger::default());
    let epoch = load(&ledger, "m", 1);
    let (lease, _) = ledger.lease("m", None, PEER, "w").unwrap();
    let (epochs, leases) = ledger.drain("m", 0, 3, "test").unwrap();
    assert_eq!((epochs.as_slice(), leases), (&[epoch][..], 1));
    assert_eq!(lease.drain.borrow().as_ref().unwrap().0, 3);
    assert_eq!(code(ledger.lease("m", None, PEER, "w")), "model_draining");
    let released = ledger.released(&epochs);
    tokio::pin!(released);
    let early = tokio::time::timeout(Duration::from_millis(50), &mut released).await;
    assert!(early.is_err());
    assert_eq!(ledger.holders(&epochs), [PEER]);
    drop(lease);
    tokio::time::timeout(Duration::from_secs(5), released).await.unwrap();
}

#[test]
fn a_stopping_owner_grants_nothing() {
    let ledger = Arc::new(Ledger::default());
    load(&ledger, "m", 1);
    let (lease, _) = ledger.lease("m", None, PEER, "w").unwrap();
    ledger.stop(9);
    assert_eq!(code(ledger.lease("m", None, PEER, "w")), "owner_stopping");
    assert_eq!(lease.drain.borrow().as_ref().unwrap().0, 9);
    drop(lease);
    assert!(ledger.holding().is_empty());
}

#[test]
fn leases_are_bounded() {
    let ledger = Arc::new(Ledger::default());
    load(&ledger, "m", 1);
    let leases: Vec<_> = (0..MAX_LEASES).map(|_| ledger.lease("m", None, PEER, "w").unwrap()).collect();
    assert_eq!(code(ledger.lease("m", None, PEER, "w")), "too_many_leases");
    drop(leases);
    assert!(ledger.lease("m", None, PEER, "w").is_ok());
}

#[test]
fn watchers_see_every_state_in_order() {
    let ledger = Arc::new(Ledger::default());
    let (now, mut events) = ledger.watch();
    assert!(now.is_empty());
    load(&ledger, "m", 1);
    ledger.drain("m", 0, 1, "test").unwrap();
    let mut seen = Vec::new();
    let mut last = 0;
    while let Ok(event) = events.try_recv() {
        assert!(event.sequence > last);
        last = event.sequence;
        seen.push(event.model.unwrap().state());
    }
    use v1::ModelState::{Draining, Loading, Ready, Released};
    assert_eq!(seen, [Loading, Ready, Draining, Released]);
}

#[test]
fn unloading_clears_failed_loads_and_watchers_hear_of_it() {
    let ledger = Arc::new(Ledger::default());
    let failed = ledger.next_epoch();
    ledger.begin(failed, "m", Path::new("/broken"));
    ledger.fail(failed, &Failure::model("truncated_file", "it ends early"));
    let (_, mut events) = ledger.watch();
    assert_eq!(ledger.drain("m", 0, 1, "unload"), Ok((vec![failed], 0)));
    assert!(ledger.models().is_empty());
    let event = events.try_recv().unwrap().model.unwrap();
    assert_eq!((event.epoch, event.state()), (failed, v1::ModelState::Released));
    assert!(ledger.drain("m", 0, 1, "unload").is_err(), "there is nothing left");
    let loading = ledger.next_epoch();
    ledger.begin(loading, "m", Path::new("/m"));
    assert!(ledger.drain("m", 0, 1, "unload").unwrap_err().contains("LOADING"), "a load in flight is not thrown away");
}

#[test]
fn after_an_unload_a_failed_load_of_another_model_does_not_stand_for_all() {
    let ledger = Arc::new(Ledger::default());
    let failed = ledger.next_epoch();
    ledger.begin(failed, "broken", Path::new("/broken"));
    ledger.fail(failed, &Failure::model("truncated_file", "it ends early"));
    assert_eq!(code(ledger.lease("", None, PEER, "w")), "model_failed", "nothing else was ever there");
    load(&ledger, "m", 1);
    ledger.drain("m", 0, 1, "unload").unwrap();
    assert_eq!(code(ledger.lease("", None, PEER, "w")), "no_model");
    assert_eq!(code(ledger.lease("broken", None, PEER, "w")), "model_failed");
}

#[test]
fn a_block_without_its_model_is_called_that() {
    let ledger = Arc::new(Ledger::default());
    let epoch = load(&ledger, "block", 1);
    let family = ds4_manifests::Catalog::builtin().drafter_of("deepseek4").unwrap().family.clone();
    ledger.lock().epochs.get_mut(&epoch).unwrap().family = family;
    match ledger.lease("", None, PEER, "w").map(drop) {
        Err(Message::Refused { code, sentence, .. }) => {
            assert_eq!(code, "no_model");
            assert!(sentence.contains("prediction block") && sentence.contains("\"block\""), "{sentence}");
        }
        other => panic!("{other:?}"),
    }
    assert!(ledger.lease("block", None, PEER, "w").is_ok());
}
