//! A peer of another user. Alone in its file, because it changes the user of the whole process for a moment.

mod support;

use std::io::ErrorKind;

use ds4_os::seqpacket::Connection;
use ds4_proto::broker::codes;
use nix::unistd::{Uid, geteuid, seteuid};
use support::{Dir, Owner, attach};

const ALLOWED: u32 = 65_533;
const STRANGER: u32 = 65_534;

fn as_user<T>(uid: u32, f: impl FnOnce() -> T) -> T {
    seteuid(Uid::from_raw(uid)).unwrap();
    let result = f();
    seteuid(Uid::from_raw(0)).unwrap();
    result
}

/// Needs root, as every machine that runs scripts/test in a container gives; another user cannot become a third one, so
/// there only the part that holds for every user is checked.
#[test]
fn a_peer_of_another_user_is_refused_by_code_or_by_the_kernel() {
    let dir = Dir::new();
    let model = dir.tiny(1);
    let open = Owner::start(dir, &["--model", model.to_str().unwrap(), "--allow-uid", &ALLOWED.to_string()]);
    assert!(open.attach("").is_ok(), "the owner's own user may attach");
    if !geteuid().is_root() {
        return;
    }
    let (code, sentence) = as_user(STRANGER, || attach(&open.broker(), "", None)).err().unwrap();
    assert_eq!(code, codes::PEER_NOT_ALLOWED);
    assert!(sentence.contains("--allow-uid 65534"), "{sentence}");
    assert!(as_user(ALLOWED, || attach(&open.broker(), "", None)).is_ok());
    // The control socket is the owner's own in any case.
    let control = open.dir.join("run/owner.sock");
    let kind = as_user(ALLOWED, || std::os::unix::net::UnixStream::connect(control)).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::PermissionDenied);

    // Without --allow-uid nobody else can even connect.
    let dir = Dir::new();
    let model = dir.tiny(1);
    let closed = Owner::start(dir, &["--model", model.to_str().unwrap()]);
    let error = as_user(STRANGER, || Connection::connect(&closed.broker())).unwrap_err();
    assert_eq!(error.kind(), Some(ErrorKind::PermissionDenied));
    assert!(closed.attach("").is_ok());
}
