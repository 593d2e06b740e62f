//! The broker socket of a real owner: leases, refusals, and peers that misbehave.

mod support;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ds4_manifests::Backend;
use ds4_os::Mapping;
use ds4_os::stats::fd_count;
use ds4_proto::broker::{HELLO_TIMEOUT_S, Message, codes};
use nix::sys::signal::Signal;
use support::{Attached, Dir, Owner, attach, connect, receive, run_to_exit};

fn owner(seed: u8) -> Owner {
    let dir = Dir::new();
    let model = dir.tiny(seed);
    Owner::start(dir, &["--model", model.to_str().unwrap()])
}

/// Maps what was received and checks the manifest against the bytes.
fn verify(attached: &Attached, seed: u8) {
    let manifest = Mapping::read_only(&attached.manifest.0, attached.manifest.1).unwrap();
    let manifest = ds4_manifests::decode(manifest.as_ref()).unwrap();
    assert_eq!((manifest.epoch, manifest.model.name.as_str()), (attached.epoch, attached.model.as_str()));
    assert!(matches!(manifest.backend, Backend::Memfd { page } if page >= 4096));
    assert_eq!(manifest.chunks.len(), attached.chunks.len());
    let chunks: Vec<Mapping> = manifest
        .chunks
        .iter()
        .zip(&attached.chunks)
        .map(|(chunk, fd)| {
            let map = Mapping::read_only(fd, chunk.len).unwrap();
            assert_eq!(blake3::hash(map.as_ref()).as_bytes(), &chunk.blake3);
            map
        })
        .collect();
    let content = ds4_manifests::content_hash(&manifest.chunks, &manifest.tensors, &manifest.metadata);
    assert_eq!(content, manifest.model.content);
    assert_eq!(manifest.tensors.len(), 11);
    for tensor in &manifest.tensors {
        let start = usize::try_from(tensor.offset).unwrap();
        let bytes = &chunks[tensor.chunk as usize].as_ref()[start..][..usize::try_from(tensor.len).unwrap()];
        assert!(bytes.iter().all(|b| *b == seed), "{}", tensor.name);
    }
}

#[test]
fn a_lease_brings_the_manifest_and_the_very_bytes_of_the_file() {
    let owner = owner(7);
    for model in ["", "tiny-7"] {
        let attached = owner.attach(model).unwrap();
        assert_eq!(attached.model, "tiny-7");
        verify(&attached, 7);
    }
}

#[test]
fn l11_memory_outlives_the_owner_while_somebody_holds_it() {
    let mut owner = owner(7);
    let attached = owner.attach("").unwrap();
    owner.child.kill().unwrap();
    owner.child.wait().unwrap();
    verify(&attached, 7);
    assert!(attached.connection.recv(64).unwrap().is_none(), "the lease's end is visible");
}

#[test]
fn l7_refusals_carry_a_code_and_a_sentence() {
    let owner = owner(7);
    let refused = |model: &str, expected| attach(&owner.broker(), model, expected).err().unwrap();
    let (code, sentence) = refused("llama-9000", None);
    assert_eq!(code, codes::UNKNOWN_MODEL);
    assert!(sentence.contains("llama-9000") && sentence.contains("tiny-7"), "{sentence}");
    let (code, sentence) = refused("", Some([9; 32]));
    assert_eq!(code, codes::CONTENT_MISMATCH);
    assert!(sentence.contains("tiny-7") && sentence.contains(&"09".repeat(32)), "{sentence}");
    let empty = Owner::start(Dir::new(), &[]);
    let (code, sentence) = empty.attach("").err().unwrap();
    assert_eq!(code, codes::NO_MODEL);
    assert!(sentence.contains("--model"), "{sentence}");
}

#[test]
fn garbage_is_answered_and_disturbs_nobody() {
    let owner = owner(7);
    let steady = owner.attach("").unwrap();
    let hello = Message::Hello { model: String::new(), expected: None, client: "x".into() }.encode();
    let mut other_version = hello.clone();
    other_version[4] = 9;
    let mut flipped = hello.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let cases: [(&[u8], &str); 6] = [
        (b"GET / HTTP/1.1\r\n\r\n", codes::BAD_MESSAGE),
        (&[0xff; 2000], codes::BAD_MESSAGE),
        (&[0; 60_000], codes::BAD_MESSAGE),
        (&flipped, codes::BAD_MESSAGE),
        (&hello[..20], codes::BAD_MESSAGE),
        (&Message::Goodbye.encode(), codes::BAD_MESSAGE),
    ];
    for (bytes, expected) in cases {
        let connection = owner.connect();
        connection.send(bytes, &[]).unwrap();
        match receive(&connection) {
            (Message::Refused { code, sentence, .. }, _) => {
                assert_eq!(code, expected, "{sentence}");
                assert!(sentence.len() > 10);
            }
            other => panic!("{other:?}"),
        }
        assert!(connection.recv(64).unwrap().is_none());
    }
    // After the handshake, too, it costs only the offender's lease.
    let offender = owner.attach("").unwrap();
    offender.connection.send(b"nonsense", &[]).unwrap();
    assert!(offender.connection.recv(64).unwrap().is_none());
    // Descriptors that nobody asked for are closed.
    let before = fd_count(Some(owner.pid())).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..20 {
        let connection = owner.connect();
        connection.send(&hello, &[file.as_fd(); 100]).unwrap();
        assert!(matches!(receive(&connection).0, Message::Welcome { .. }));
    }
    support::eventually("descriptors are closed", || (fd_count(Some(owner.pid())).unwrap() <= before).then_some(()));
    verify(&steady, 7);
    assert!(owner.attach("").is_ok());
}

#[test]
fn l7_a_peer_of_another_protocol_version_is_told_both_versions() {
    let owner = owner(7);
    let mut hello = Message::Hello { model: String::new(), expected: None, client: "x".into() }.encode();
    hello[4..6].copy_from_slice(&9_u16.to_le_bytes());
    // The checksum as the module's description has it: FNV-1a over the first twelve bytes and the body.
    let mut hash: u32 = 2_166_136_261;
    for byte in hello[..12].iter().chain(&hello[16..]) {
        hash = (hash ^ u32::from(*byte)).wrapping_mul(16_777_619);
    }
    hello[12..16].copy_from_slice(&hash.to_le_bytes());
    let connection = owner.connect();
    connection.send(&hello, &[]).unwrap();
    match receive(&connection).0 {
        Message::Refused { code, sentence, .. } => {
            assert_eq!(code, codes::PROTOCOL_VERSION);
            assert!(sentence.contains("version 9") && sentence.contains("version 1"), "{sentence}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_silent_client_is_refused_at_the_deadline_and_blocks_nobody() {
    let owner = owner(7);
    let silent: Vec<_> = (0..10).map(|_| owner.connect()).collect();
    let start = Instant::now();
    assert!(owner.attach("").is_ok());
    assert!(start.elapsed() < Duration::from_secs(1));
    for connection in &silent {
        match receive(connection).0 {
            Message::Refused { code, .. } => assert_eq!(code, codes::HELLO_TIMEOUT),
            other => panic!("{other:?}"),
        }
    }
    let took = start.elapsed().as_secs();
    assert!((HELLO_TIMEOUT_S - 1..HELLO_TIMEOUT_S + 3).contains(&took), "{took} s");
}

#[test]
fn l3_two_hundred_attach_cycles_leave_no_descriptors_and_no_memory() {
    let owner = owner(7);
    for _ in 0..20 {
        drop(owner.attach("").unwrap());
    }
    let settled = || {
        support::eventually("leases end", || {
            let fds = fd_count(Some(owner.pid())).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            (fds == fd_count(Some(owner.pid())).unwrap()).then_some(fds)
        })
    };
    let fds = settled();
    let memory = ds4_os::stats::memory(Some(owner.pid())).unwrap();
    for _ in 0..200 {
        verify(&owner.attach("").unwrap(), 7);
    }
    assert_eq!(settled(), fds);
    let after = ds4_os::stats::memory(Some(owner.pid())).unwrap();
    assert!(after.resident < memory.resident + (1 << 20), "{memory:?} -> {after:?}");
    assert_eq!(after.shared, memory.shared, "the daemon mapped weights");
}

#[test]
fn owner_beyond_the_weights_stays_below_20_mib() {
    let owner = owner(7);
    let leases: Vec<_> = (0..50).map(|_| owner.attach("").unwrap()).collect();
    let memory = ds4_os::stats::memory(Some(owner.pid())).unwrap();
    assert!(memory.resident < 20 << 20, "{memory:?}");
    drop(leases);
}

#[tokio::test]
async fn a_killed_worker_loses_its_lease() {
    let owner = owner(7);
    // A process of its own, because SIGKILL is what is tested: it attaches, says so, and sleeps.
    let exe = std::env::current_exe().unwrap();
    let mut worker = std::process::Command::new(exe)
        .args(["--exact", "helper_attach_and_sleep", "--nocapture"])
        .env("OWNER_TEST_BROKER", owner.broker())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut control = owner.control().await;
    let start = Instant::now();
    let lease = loop {
        let leases = control.leases(ds4_proto::v1::LeasesRequest {}).await.unwrap().into_inner().leases;
        if let Some(lease) = leases.into_iter().next() {
            break lease;
        }
        assert!(start.elapsed() < support::LIMIT);
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!((lease.pid, lease.client.as_str(), lease.model.as_str()), (worker.id(), "test", "tiny-7"));
    worker.kill().unwrap();
    worker.wait().unwrap();
    let start = Instant::now();
    while !control.leases(ds4_proto::v1::LeasesRequest {}).await.unwrap().into_inner().leases.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(1));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The other process of `a_killed_worker_loses_its_lease`; as a test by itself it does nothing.
#[test]
fn helper_attach_and_sleep() {
    if let Some(path) = std::env::var_os("OWNER_TEST_BROKER") {
        let attached = attach(path.as_ref(), "", None);
        std::thread::sleep(Duration::from_secs(60));
        drop(attached);
    }
}

#[test]
fn l6_stop_waits_for_readers_and_then_lets_go() {
    let mut owner = owner(7);
    let reader = owner.attach("").unwrap();
    owner.signal(Signal::SIGTERM);
    owner.await_notice("STOPPING=1");
    match receive(&reader.connection).0 {
        Message::Drain { deadline_s, reason } => {
            assert_eq!(deadline_s, 30);
            assert!(reason.contains("stopping"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(owner.attach("").err().unwrap().0, codes::OWNER_STOPPING);
    std::thread::sleep(Duration::from_millis(300));
    assert!(owner.child.try_wait().unwrap().is_none(), "stopped under a reader");
    verify(&reader, 7);
    reader.connection.send(&Message::Goodbye.encode(), &[]).unwrap();
    let status = support::wait(&mut owner.child, support::LIMIT).expect("stops when the last reader is gone");
    assert_eq!(status.code(), Some(0));
    assert!(!owner.broker().exists());
}

#[test]
fn l6_a_reader_that_stays_gets_sigterm_at_the_deadline() {
    let dir = Dir::new();
    let model = dir.tiny(7);
    let mut owner = Owner::start(dir, &["--model", model.to_str().unwrap(), "--drain-deadline", "1"]);
    let mut worker = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_attach_and_sleep", "--nocapture"])
        .env("OWNER_TEST_BROKER", owner.broker())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    support::eventually("the worker attaches", || owner.log().contains("attached").then_some(()));
    let start = Instant::now();
    owner.signal(Signal::SIGTERM);
    let status = support::wait(&mut worker, support::LIMIT).expect("SIGTERM ends the worker");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(15));
    assert!(start.elapsed() >= Duration::from_millis(950), "{:?}", start.elapsed());
    assert_eq!(support::wait(&mut owner.child, support::LIMIT).and_then(|s| s.code()), Some(0));
}

#[test]
fn l6_a_second_signal_stops_at_once() {
    let mut owner = owner(7);
    let reader = owner.attach("").unwrap();
    owner.signal(Signal::SIGTERM);
    owner.await_notice("STOPPING=1");
    owner.signal(Signal::SIGTERM);
    assert_eq!(support::wait(&mut owner.child, Duration::from_secs(2)).and_then(|s| s.code()), Some(0));
    verify(&reader, 7);
}

#[test]
fn more_connections_than_may_wait_are_served_in_turn() {
    let owner = owner(7);
    // More strangers than the owner greets at once; when they hang up, the next are served.
    let silent: Vec<_> = (0..100).map(|_| connect(&owner.broker())).collect();
    drop(silent);
    assert!(owner.attach("").is_ok());
    let (code, _, _) = run_to_exit(&mut support::command(&owner.dir, &[]));
    assert_eq!(code, 2);
}
