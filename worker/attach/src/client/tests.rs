//! The client against owners that behave, misbehave, or are not there.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;

use super::*;
use crate::Notice;
use ds4_manifests::{Backend, Chunk, GgmlType, Metadata, ModelIdentity, TensorEntry, Value};
use ds4_os::memfd::sealed;
use ds4_os::seqpacket::Listener;
use ds4_proto::broker::codes;

/// A model of one tensor of `chunk` bytes (f32).
fn manifest(chunk: &[u8]) -> WeightManifest {
    let mut metadata = Metadata::default();
    metadata.set("general.architecture", Value::String("llama".into()));
    let chunks = vec![Chunk { len: chunk.len() as u64, blake3: *blake3::hash(chunk).as_bytes() }];
    let tensors = vec![TensorEntry {
        name: "t".into(),
        ty: GgmlType::F32,
        shape: vec![chunk.len() as u64 / 4],
        chunk: 0,
        offset: 0,
        len: chunk.len() as u64,
    }];
    let content = content_hash(&chunks, &tensors, &metadata);
    let model = ModelIdentity { family: "llama".into(), artifact: "a".into(), name: "m".into(), content, known: false };
    WeightManifest { model, epoch: 7, backend: Backend::Memfd { page: 4096 }, chunks, tensors, metadata }
}

const BYTES: [u8; 64] = [42; 64];

fn welcome(m: &WeightManifest) -> (Message, OwnedFd) {
    let encoded = ds4_manifests::encode(m).unwrap();
    let message = Message::Welcome {
        lease: 5,
        epoch: m.epoch,
        chunks: u32::try_from(m.chunks.len()).unwrap(),
        manifest_len: encoded.len() as u64,
        model: m.model.name.clone(),
    };
    (message, sealed("manifest", &encoded).unwrap())
}

/// An owner for one connection: reads the Hello, then does what `behave` says.
fn owner(dir: &Path, behave: impl FnOnce(Connection, Message) + Send + 'static) -> (PathBuf, JoinHandle<()>) {
    let path = dir.join("broker.sock");
    let listener = Listener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let connection = listener.accept().unwrap();
        let hello = connection.recv(MAX_FRAME).unwrap().unwrap();
        behave(connection, Message::decode(&hello.bytes).unwrap());
    });
    (path, thread)
}

fn serve(connection: &Connection, m: &WeightManifest, chunk: &[u8]) {
    let (message, fd) = welcome(m);
    connection.send(&message.encode(), &[fd.as_fd()]).unwrap();
    let fd = sealed("chunk", chunk).unwrap();
    // A client that refused the manifest has gone already.
    let _ = connection.send(&Message::Chunks { first: 0, count: 1 }.encode(), &[fd.as_fd()]);
}

fn refused_with(
    behave: impl FnOnce(Connection, Message) + Send + 'static,
    change: impl FnOnce(&mut Options),
) -> AttachError {
    let dir = tempfile::tempdir().unwrap();
    let (path, thread) = owner(dir.path(), behave);
    let mut options = Options::new(path);
    options.timeout = Duration::from_secs(1);
    change(&mut options);
    let error = attach(&options).err().expect("an error");
    thread.join().unwrap();
    error
}

#[test]
fn a_lease_lasts_as_long_as_it_is_held_and_carries_notices() {
    let dir = tempfile::tempdir().unwrap();
    let (go, wait) = mpsc::channel();
    let (path, thread) = owner(dir.path(), move |connection, hello| {
        assert!(matches!(hello, Message::Hello { ref model, .. } if model == "m"), "{hello:?}");
        serve(&connection, &manifest(&BYTES), &BYTES);
        let notice = Message::Drain { deadline_s: 9, reason: "unload".into() };
        connection.send(&notice.encode(), &[]).unwrap();
        wait.recv().unwrap();
        let goodbye = connection.recv(MAX_FRAME).unwrap().unwrap();
        assert_eq!(Message::decode(&goodbye.bytes), Ok(Message::Goodbye));
    });
    let attached = attach(&Options { model: Some("m".into()), ..Options::new(path) }).unwrap();
    assert_eq!((attached.lease.id, attached.lease.epoch), (5, 7));
    assert_eq!(&*attached.weights.tensor("t").unwrap().1, &BYTES);
    let (tx, notices) = mpsc::channel();
    attached.lease.watch(move |n| tx.send(n).unwrap()).unwrap();
    let patience = Duration::from_secs(5);
    let drain = Notice::Drain { deadline: Duration::from_secs(9), reason: "unload".into() };
    assert_eq!(notices.recv_timeout(patience), Ok(drain));
    go.send(()).unwrap();
    drop(attached.lease);
    thread.join().unwrap();
    // The owner is gone; what was mapped is still there.
    assert_eq!(notices.recv_timeout(patience), Ok(Notice::OwnerGone));
    assert_eq!(&*attached.weights.chunks[0], &BYTES);
}

#[test]
fn l4_an_absent_owner_is_named_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broker.sock");
    let started = Instant::now();
    let e = attach(&Options::new(&path)).err().unwrap();
    assert_eq!(e.code(), "owner_absent");
    let message = e.to_string();
    assert!(message.contains(path.to_str().unwrap()) && message.contains("start the owner with"), "{message}");
    drop(Listener::bind(&path).unwrap());
    let e = attach(&Options::new(&path)).err().unwrap();
    assert_eq!(e.code(), "owner_absent");
    assert!(e.to_string().contains("leftover"), "{e}");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn l4_a_silent_owner_costs_the_deadline_and_no_more() {
    let started = Instant::now();
    let e = refused_with(
        |connection, _| {
            std::thread::sleep(Duration::from_millis(600));
            drop(connection);
        },
        |o| o.timeout = Duration::from_millis(300),
    );
    assert_eq!(e.code(), "owner_silent", "{e}");
    assert!(started.elapsed() < Duration::from_secs(5));
    // Descriptors that never come are silence too.
    let e = refused_with(
        |connection, _| {
            let (message, fd) = welcome(&manifest(&BYTES));
            connection.send(&message.encode(), &[fd.as_fd()]).unwrap();
            std::thread::sleep(Duration::from_millis(600));
        },
        |o| o.timeout = Duration::from_millis(300),
    );
    assert_eq!(e.code(), "owner_silent", "{e}");
}

#[test]
fn l7_a_refusal_carries_code_and_sentence() {
    let e = refused_with(
        |c, _| c.send(&Message::refused(codes::PEER_NOT_ALLOWED, "user 12 may not attach", 0).encode(), &[]).unwrap(),
        |_| {},
    );
    assert_eq!(e.code(), codes::PEER_NOT_ALLOWED);
    assert!(e.to_string().contains("user 12 may not attach"), "{e}");
    let e = refused_with(|c, _| drop(c), |_| {});
    assert_eq!(e.code(), "owner_closed", "{e}");
    let e = refused_with(|c, _| c.send(b"220 smtp ready", &[]).unwrap(), |_| {});
    assert_eq!(e.code(), "protocol", "{e}");
}

#[test]
fn l2_other_content_is_refused_by_name() {
    // One byte swapped in the middle, same size: another content hash.
    let mut other = BYTES;
    other[31] ^= 1;
    let wanted = manifest(&BYTES).model.content;
    let e = refused_with(move |c, _| serve(&c, &manifest(&other), &other), move |o| o.expected = Some(wanted));
    assert_eq!(e.code(), codes::CONTENT_MISMATCH);
    let message = e.to_string();
    assert!(message.contains("`m`") && message.contains(&*blake3::Hash::from(wanted).to_hex()), "{message}");
    assert!(e.is_about_the_model());
    // An owner that passes other bytes under the right manifest is found out by a full hash.
    let e = refused_with(move |c, _| serve(&c, &manifest(&BYTES), &other), |o| o.verify = true);
    assert_eq!(e.code(), "hash_mismatch", "{e}");
    // A manifest whose chunk hashes were exchanged does not add up.
    let mut stale = manifest(&BYTES);
    stale.chunks[0].blake3 = [0; 32];
    let e = refused_with(move |c, _| serve(&c, &stale, &BYTES), |_| {});
    assert_eq!(e.code(), "hash_mismatch", "{e}");
}

#[test]
fn another_version_of_the_manifest_is_named() {
    let e = refused_with(
        |c, _| {
            let m = manifest(&BYTES);
            let mut encoded = ds4_manifests::encode(&m).unwrap();
            encoded[8] = 99;
            let Message::Welcome { lease, epoch, chunks, model, .. } = welcome(&m).0 else { unreachable!() };
            let message = Message::Welcome { lease, epoch, chunks, manifest_len: encoded.len() as u64, model };
            c.send(&message.encode(), &[sealed("manifest", &encoded).unwrap().as_fd()]).unwrap();
        },
        |_| {},
    );
    assert_eq!(e.code(), "manifest_version", "{e}");
    assert!(e.to_string().contains("99"), "{e}");
}

#[test]
fn what_was_not_asked_for_is_refused() {
    let e = refused_with(|c, _| serve(&c, &manifest(&BYTES), &BYTES), |o| o.model = Some("other".into()));
    assert_eq!(e.code(), "model_mismatch", "{e}");
    let e = refused_with(|c, _| serve(&c, &manifest(&BYTES), &BYTES), |o| o.epoch = Some(8));
    assert_eq!(e.code(), "epoch_mismatch", "{e}");
}

#[test]
fn g5_memory_that_is_short_or_unsealed_is_not_mapped() {
    let e = refused_with(|c, _| serve(&c, &manifest(&BYTES), &BYTES[..60]), |_| {});
    assert_eq!(e.code(), "map", "{e}");
    let e = refused_with(
        |c, _| {
            let (message, fd) = welcome(&manifest(&BYTES));
            c.send(&message.encode(), &[fd.as_fd()]).unwrap();
            let file = std::fs::File::open("/dev/zero").unwrap();
            c.send(&Message::Chunks { first: 0, count: 1 }.encode(), &[file.as_fd()]).unwrap();
        },
        |_| {},
    );
    assert_eq!(e.code(), "map", "{e}");
}

#[test]
fn chunk_messages_that_lie_are_refused() {
    let lies: [(u32, u32, usize); 4] = [(1, 1, 1), (0, 0, 0), (0, 2, 2), (0, 1, 2)];
    for (first, count, fds) in lies {
        let e = refused_with(
            move |c, _| {
                let (message, fd) = welcome(&manifest(&BYTES));
                c.send(&message.encode(), &[fd.as_fd()]).unwrap();
                let fd = sealed("chunk", &BYTES).unwrap();
                c.send(&Message::Chunks { first, count }.encode(), &vec![fd.as_fd(); fds]).unwrap();
            },
            |_| {},
        );
        assert_eq!(e.code(), "protocol", "{e}");
    }
}

#[test]
fn a_loading_model_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broker.sock");
    let listener = Listener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        for _ in 0..2 {
            let c = listener.accept().unwrap();
            c.recv(MAX_FRAME).unwrap();
            c.send(&Message::refused(codes::MODEL_LOADING, "m is loading: 43 %", 20).encode(), &[]).unwrap();
        }
        let c = listener.accept().unwrap();
        c.recv(MAX_FRAME).unwrap();
        serve(&c, &manifest(&BYTES), &BYTES);
        // Until the lease ends.
        let _ = c.recv(MAX_FRAME);
    });
    let attached = attach(&Options { wait: Duration::from_secs(5), ..Options::new(&path) }).unwrap();
    drop(attached);
    thread.join().unwrap();
}
