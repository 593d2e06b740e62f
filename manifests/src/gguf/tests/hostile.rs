//! Files made to hurt: overflow, gigabytes from nothing, truncation at every byte, random damage, and the price of all
//! that care.

use std::time::{Duration, Instant};

use super::*;
use crate::StringTable;

#[test]
fn g1_dimension_products_that_wrap_are_refused() {
    for dims in [
        vec![1 << 32, 1 << 32], // product 2^64 wraps to 0
        vec![1 << 62, 4],       // in elements
        vec![1 << 62, 1, 1, 1], // in bytes: 2^62 * 4
        vec![u64::MAX, u64::MAX, 2, 2],
        vec![1 << 22, 1 << 21, 1 << 21],
        vec![256; 8],
    ] {
        let e = parse_all(&Raw::new().tensor(b"t", &dims, 0, 0).data(4096).bytes()).unwrap_err();
        assert!(matches!(e.code(), "bad_shape" | "truncated_file"), "{dims:?}: {e}");
    }
    let e = parse_all(&Raw::new().tensor(b"t", &[1 << 32, 1 << 32], 0, 0).data(64).bytes()).unwrap_err();
    assert!(e.to_string().contains("overflows"), "{e}");
    // An offset whose end wraps.
    let raw = Raw::new().tensor(b"t", &[8], 0, u64::MAX - 31).data(64);
    assert_eq!(code(&raw.bytes()), "bad_offset");
}

/// Peak of this process's address space, in bytes.
fn vm_peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmPeak:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn g3_tiny_file_asks_for_gigabytes() {
    let array = |ty: u32, n: u64| [&ty.to_le_bytes()[..], &n.to_le_bytes(), &[1; 24]].concat();
    let huge = [1 << 28, 1 << 33, 1 << 40, u64::MAX / 8, u64::MAX];
    let before = vm_peak();
    for n in huge {
        let key_count = Raw { key_count: Some(n), ..Raw::new() }.key(b"k", 7, &[1]).data(64);
        assert_eq!(code(&key_count.bytes()), "count_too_large", "keys {n}");
        let tensor_count = Raw { tensor_count: Some(n), ..Raw::new() }.tensor(b"t", &[1], 0, 0).data(64);
        assert_eq!(code(&tensor_count.bytes()), "count_too_large", "tensors {n}");
        for ty in [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12] {
            let bytes = Raw::new().key(b"k", 9, &array(ty, n)).data(64).bytes();
            assert!(bytes.len() <= 160, "{} bytes", bytes.len());
            assert_eq!(code(&bytes), "count_too_large", "array of type {ty}, {n}");
        }
        let long_string = Raw::new().key(b"k", 8, &n.to_le_bytes()).data(64);
        assert_eq!(code(&long_string.bytes()), "truncated_file", "string {n}");
        let mut long_key = Raw::new();
        long_key.keys.push(n.to_le_bytes().to_vec());
        assert_eq!(code(&long_key.data(64).bytes()), "truncated_file", "key {n}");
    }
    let grown = vm_peak().saturating_sub(before);
    assert!(grown < 64 << 20, "address space grew by {grown} bytes for files of 160");
}

/// The file is really as long as its counts need (sparse), but nobody's header is: refused by the cap, not by memory.
#[test]
fn g3_sparse_file_of_gigabytes_is_refused_by_the_header_cap() {
    let before = vm_peak();
    let head = Raw::new().key(b"k", 9, &[&4_u32.to_le_bytes()[..], &(1_u64 << 33).to_le_bytes()].concat()).bytes();
    let e = parse(&head, 1 << 40).unwrap_err();
    assert_eq!(e.code(), "header_too_large");
    let head = Raw::new().key(b"k", 8, &(1_u64 << 33).to_le_bytes()).bytes();
    assert_eq!(parse(&head, 1 << 40).unwrap_err().code(), "header_too_large");
    assert!(vm_peak().saturating_sub(before) < 64 << 20);
}

/// Header bytes and the vocabulary of a 130,000-token model: tokens, scores, types, merges.
fn large_vocabulary() -> Vec<u8> {
    let n: u32 = 130_000;
    let (mut tokens, mut merges) = (StringTable::default(), StringTable::default());
    for i in 0..n {
        tokens.push(format!("\u{120}tok{}", i.wrapping_mul(2_654_435_761)).as_bytes()).unwrap();
        merges.push(format!("\u{120}to k{}", i.wrapping_mul(40_503)).as_bytes()).unwrap();
    }
    GgufWriter::new()
        .metadata("general.architecture", Value::String("llama".into()))
        .metadata("tokenizer.ggml.tokens", Value::Strings(tokens))
        .metadata("tokenizer.ggml.scores", Value::Floats(vec![-1.0; 130_000]))
        .metadata("tokenizer.ggml.token_type", Value::Ints(vec![1; 130_000]))
        .metadata("tokenizer.ggml.merges", Value::Strings(merges))
        .to_vec()
        .unwrap()
}

#[test]
fn g4_a_large_vocabulary_parses_in_under_150_ms() {
    let bytes = large_vocabulary();
    let best = (0..3)
        .map(|_| {
            let start = Instant::now();
            let parsed = parse_all(&bytes).unwrap();
            assert_eq!(parsed.metadata.strings("tokenizer.ggml.tokens").unwrap().len(), 130_000);
            start.elapsed()
        })
        .min()
        .unwrap();
    println!("130,000 tokens, scores, types and merges in {best:?}");
    assert!(best < Duration::from_millis(150), "{best:?}");
}

/// A table of many tensors and keys costs time in proportion.
#[test]
fn g4_many_tensors_and_keys_are_not_quadratic() {
    let mut raw = Raw::new();
    for i in 0_u64..60_000 {
        raw = raw.key(format!("key.{i}").as_bytes(), 7, &[1]).tensor(format!("t.{i}").as_bytes(), &[1], 0, i * 32);
    }
    let bytes = raw.data(60_000 * 32).bytes();
    let start = Instant::now();
    assert_eq!(parse_all(&bytes).unwrap().tensors.len(), 60_000);
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
}

#[test]
fn g5_truncation_at_every_byte_is_an_error() {
    let bytes = sample().to_vec().unwrap();
    assert_eq!(code(&bytes), "parsed");
    for len in 0..bytes.len() {
        let e = parse_all(&bytes[..len]).map(|_| ()).expect_err("a file that lacks its last bytes");
        let expected: &[&str] = match len {
            0 => &["not_a_gguf"],
            // A count may outgrow the file before the cut is reached.
            _ => &["truncated_file", "count_too_large"],
        };
        assert!(expected.contains(&e.code()), "{len} bytes: {e}");
    }
}

#[test]
fn g5_a_tensor_beyond_the_end_is_named_with_its_bytes() {
    let bytes = sample().to_vec().unwrap();
    let e = parse_all(&bytes[..bytes.len() - 1]).unwrap_err();
    let said = e.to_string();
    assert!(said.contains("c.weight") && said.contains(&format!("ends at {}", bytes.len() - 1)), "{said}");
}

/// Bytes that `file_len` promises but `bytes` does not have.
#[test]
fn g5_a_file_that_shrinks_while_it_is_read_is_truncated() {
    let bytes = sample().to_vec().unwrap();
    // The header's last bytes are at most one alignment before the data.
    let header = index(parse_all(&bytes).unwrap().data_offset) - 32;
    for len in 1..=header {
        assert_eq!(parse(&bytes[..len], bytes.len() as u64).unwrap_err().code(), "truncated_file", "{len}");
    }
}

/// Damage of every kind: whatever parses must still keep every promise of [`parse`].
#[test]
fn random_damage_never_breaks_a_promise() {
    let clean = sample().to_vec().unwrap();
    let mut state: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % below as u64).unwrap()
    };
    let mut parsed_anyway = 0;
    for _ in 0..100_000 {
        let mut bytes = clean.clone();
        for _ in 0..=random(4) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] ^= 1 << random(8),
                1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random(5)],
                2 => drop(bytes.drain(at..(at + 1 + random(9)).min(bytes.len()))),
                _ => bytes.insert(at, u8::try_from(random(256)).unwrap()),
            }
        }
        if let Ok(parsed) = parse_all(&bytes) {
            parsed_anyway += 1;
            let mut end = parsed.data_offset;
            let mut tensors: Vec<_> = parsed.tensors.iter().collect();
            tensors.sort_by_key(|t| t.offset);
            for t in tensors {
                assert_eq!(t.ty.tensor_bytes(&t.shape), Some(t.len));
                assert!(t.offset >= end && t.offset % parsed.alignment == 0);
                end = t.offset + t.len;
            }
            assert!(parsed.tensors.is_empty() || end <= bytes.len() as u64);
        }
    }
    assert!(
        parsed_anyway > 1000,
        "only {parsed_anyway} damaged files parsed: the damage is too coarse to test anything"
    );
}
