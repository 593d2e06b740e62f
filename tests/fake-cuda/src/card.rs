//! What the card is like, from the environment, and how much of its memory is free.

use std::collections::HashMap;
use std::ffi::c_int;
use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::Code;

fn number(name: &str, otherwise: i64) -> i64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

fn small(name: &str, otherwise: i64) -> c_int {
    c_int::try_from(number(name, otherwise)).unwrap_or(0)
}

pub fn devices() -> c_int {
    small("FAKE_CUDA_DEVICES", 1).clamp(0, 1)
}

pub fn version() -> c_int {
    small("FAKE_CUDA_VERSION", 13_000)
}

pub fn uuid() -> u8 {
    u8::try_from(number("FAKE_CUDA_UUID", 17)).unwrap_or(17)
}

pub fn copy_us() -> u64 {
    u64::try_from(number("FAKE_CUDA_COPY_US", 0)).unwrap_or(0)
}

pub fn pageable() -> bool {
    number("FAKE_CUDA_PAGEABLE", 0) == 1
}

/// Number of the copy to the device that arrives wrong, from 1 on.
pub fn flipped() -> u64 {
    u64::try_from(number("FAKE_CUDA_FLIP", 0)).unwrap_or(0)
}

/// The file that calls are written to.
pub fn log() -> Option<fs::File> {
    let path = std::env::var_os("FAKE_CUDA_LOG")?;
    fs::File::options().create(true).append(true).open(path).ok()
}

pub fn total() -> usize {
    usize::try_from(number("FAKE_CUDA_TOTAL_MIB", 1024)).unwrap_or(0) << 20
}

/// 90, or 121.
pub fn architecture() -> u32 {
    if number("FAKE_CUDA_ARCH", 90) == 121 { 121 } else { 90 }
}

/// Bytes of shared memory that a block may have when it is asked for.
pub fn shared() -> usize {
    if architecture() == 90 { 227 << 10 } else { 99 << 10 }
}

/// The numbers of CUdevice_attribute.
pub fn attribute(attribute: c_int) -> c_int {
    match attribute {
        // Multiprocessors of an H200 or a GB10; compute capability.
        16 => {
            if architecture() == 90 {
                132
            } else {
                48
            }
        }
        75 => architecture().cast_signed() / 10,
        76 => architecture().cast_signed() % 10,
        97 => c_int::try_from(shared()).unwrap_or(0),
        18 => small("FAKE_CUDA_INTEGRATED", 0),
        // Virtual memory management, POSIX descriptors.
        102 | 103 => small("FAKE_CUDA_VMM", 1),
        _ => 0,
    }
}

/// Name of every memfd of this card.
pub fn memfd_name() -> String {
    format!("fake-cuda-{}", std::env::var("FAKE_CUDA_TAG").unwrap_or_else(|_| "0".into()))
}

/// What is left after everything that any process holds a descriptor of. Descriptors in a socket's queue are not seen.
pub fn free() -> usize {
    let prefix = format!("/memfd:{} ", memfd_name());
    let mut held: HashMap<u64, u64> = HashMap::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        // Other users' processes and those that have just ended cannot be read.
        for fd in fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
            let is_ours = fs::read_link(fd.path()).is_ok_and(|l| l.to_string_lossy().starts_with(&prefix));
            if let (true, Ok(metadata)) = (is_ours, fs::metadata(fd.path())) {
                held.insert(metadata.ino(), metadata.len());
            }
        }
    }
    let used: u64 = held.values().sum();
    total().saturating_sub(usize::try_from(used).unwrap_or(usize::MAX))
}

/// The code with which call number `nth` of `name` must fail.
pub fn failure(name: &str, nth: u32) -> Option<Code> {
    let plan = std::env::var("FAKE_CUDA_FAIL").ok()?;
    plan.split(',').find_map(|entry| {
        let mut parts = entry.split(':');
        let matches = parts.next() == Some(name) && parts.next()?.parse() == Ok(nth);
        parts.next()?.parse().ok().filter(|_| matches)
    })
}
