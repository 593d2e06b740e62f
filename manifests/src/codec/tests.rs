//! Every part of the wire form is flipped, cut and lengthened; every inconsistency is refused by name.

use std::time::{Duration, Instant};

use super::*;

fn strings(n: usize) -> Value {
    let mut t = StringTable::default();
    (0..n).for_each(|i| t.push(format!("\u{120}token{i}").as_bytes()).unwrap());
    Value::Strings(t)
}

fn entry(name: &str, chunk: u32, offset: u64) -> TensorEntry {
    TensorEntry { name: name.into(), ty: GgmlType::Q4_1, shape: vec![64, 3], chunk, offset, len: 120 }
}

fn manifest() -> WeightManifest {
    let mut metadata = Metadata::default();
    for (key, value) in [
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f64", Value::F64(0.1)),
        ("bool", Value::Bool(true)),
        ("string", Value::String("zażółć \u{1f600}".into())),
        ("strings", strings(300)),
        ("ints", Value::Ints(vec![-1, 2, i64::from(i32::MAX)])),
        ("longs", Value::Ints(vec![-1, i64::MAX])),
        ("floats", Value::Floats(vec![1.5, -0.0])),
        ("bools", Value::Bools(vec![true, false, true])),
        ("none", Value::Ints(vec![])),
    ] {
        metadata.set(key, value);
    }
    WeightManifest {
        model: ModelIdentity {
            family: "llama".into(),
            artifact: "smollm2-135m".into(),
            name: "smollm2-135m-instruct".into(),
            content: [7; 32],
            known: true,
        },
        epoch: 42,
        backend: Backend::Memfd { page: 4096 },
        chunks: vec![Chunk { len: 512, blake3: [1; 32] }, Chunk { len: 256, blake3: [2; 32] }],
        tensors: vec![entry("a", 0, 0), entry("b", 0, 256), entry("c", 1, 0)],
        metadata,
    }
}

#[test]
fn what_is_encoded_comes_back() {
    let m = manifest();
    assert_eq!(decode(&encode(&m).unwrap()).unwrap(), m);
}

fn on_a_device() -> WeightManifest {
    let backend = Backend::CudaVmm {
        device: std::array::from_fn(|k| u8::try_from(k).unwrap()),
        device_name: "NVIDIA H200".into(),
        granularity: 2 << 20,
        driver: 13_000,
        layout: crate::LAYOUT_GGUF.into(),
    };
    WeightManifest { backend, ..manifest() }
}

#[test]
fn device_facts_come_back_and_an_impossible_granularity_is_refused() {
    let m = on_a_device();
    assert_eq!(decode(&encode(&m).unwrap()).unwrap(), m);
    assert_eq!(m.backend.name(), "cuda-vmm");
    for bytes in [0, 3 << 20] {
        let mut bad = on_a_device();
        if let Backend::CudaVmm { granularity, .. } = &mut bad.backend {
            *granularity = bytes;
        }
        let e = encode(&bad).unwrap_err();
        assert!(e.code() == "manifest_invalid" && e.to_string().contains(&bytes.to_string()), "{e}");
    }
}

#[test]
fn every_flipped_header_byte_has_its_error() {
    let good = encode(&manifest()).unwrap();
    for at in 0..HEADER_BYTES {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            let code = decode(&bad).unwrap_err().code();
            let expected: &[&str] = match at {
                0..8 => &["manifest_magic"],
                8..12 => &["manifest_version"],
                12..20 => &["manifest_truncated", "manifest_trailing_bytes", "manifest_too_large"],
                _ => &["manifest_hash"],
            };
            assert!(expected.contains(&code), "byte {at} bit {bit}: {code}");
        }
    }
}

#[test]
fn every_flipped_body_byte_fails_the_hash() {
    let good = encode(&manifest()).unwrap();
    for at in (HEADER_BYTES..good.len()).step_by(7).chain([good.len() - 1]) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        assert_eq!(decode(&bad), Err(ManifestError::Hash), "byte {at}");
    }
}

#[test]
fn cuts_and_tails_are_named() {
    let good = encode(&manifest()).unwrap();
    for len in (0..good.len()).step_by(11).chain(0..=HEADER_BYTES) {
        assert_eq!(decode(&good[..len]).unwrap_err().code(), "manifest_truncated", "{len} bytes");
    }
    let mut long = good.clone();
    long.extend_from_slice(&[0; 3]);
    assert_eq!(decode(&long), Err(ManifestError::Trailing { extra: 3 }));
}

#[test]
fn another_version_names_both_and_the_lever() {
    let mut other = encode(&manifest()).unwrap();
    other[8..12].copy_from_slice(&9_u32.to_le_bytes());
    let e = decode(&other).unwrap_err();
    assert_eq!(e, ManifestError::Version { found: 9, supported: VERSION });
    let said = e.to_string();
    assert!(said.contains("version 9") && said.contains(&format!("version {VERSION}")), "{said}");
    assert!(said.contains("same release"), "{said}");
}

#[test]
fn a_length_beyond_the_cap_is_refused_before_anything_is_read() {
    let mut bad = encode(&manifest()).unwrap();
    bad[12..20].copy_from_slice(&(MAX_BODY_BYTES + 1).to_le_bytes());
    assert_eq!(decode(&bad), Err(ManifestError::TooLarge { len: MAX_BODY_BYTES + 1 }));
}

/// With the hash made to fit, a damaged body must be an error or a consistent manifest, and must not panic.
#[test]
fn damaged_bodies_under_a_fitting_hash_never_break_a_promise() {
    let good = encode(&manifest()).unwrap();
    let body = &good[HEADER_BYTES..];
    let mut decoded = 0;
    for at in 0..body.len() {
        for value in [0, 1, 0x7f, 0xff] {
            let mut bad = body.to_vec();
            bad[at] = value;
            match decode(&frame(&bad)) {
                Ok(m) => {
                    decoded += 1;
                    validate(&m).unwrap();
                }
                Err(e) => assert!(matches!(e.code(), "manifest_body" | "manifest_invalid"), "byte {at}: {e}"),
            }
        }
    }
    assert!(decoded > 100, "only {decoded} bodies decoded");
    for len in 0..body.len() {
        assert!(decode(&frame(&body[..len])).is_err(), "{len} bytes of body");
    }
    let longer = [body, &[0]].concat();
    assert_eq!(decode(&frame(&longer)).unwrap_err().code(), "manifest_body");
}

/// A count of 2^60 items in a tiny body reserves nothing.
#[test]
fn g3_a_tiny_body_cannot_ask_for_gigabytes() {
    let empty = WeightManifest { chunks: vec![], tensors: vec![], metadata: Metadata::default(), ..manifest() };
    let good = encode(&empty).unwrap();
    let body = &good[HEADER_BYTES..];
    // The three lists are the last three u64 counts.
    for back in [8, 16, 24] {
        let mut bad = body.to_vec();
        let at = body.len() - back;
        bad[at..at + 8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
        assert_eq!(decode(&frame(&bad)).unwrap_err().code(), "manifest_body");
    }
}

#[test]
fn contradictions_are_refused_on_both_sides() {
    type Damage = (&'static str, fn(&mut WeightManifest));
    let cases: [Damage; 9] = [
        ("\"a\" occurs twice", |m| m.tensors[1].name = "a".into()),
        ("lies in chunk 2, but there are 2", |m| m.tensors[1].chunk = 2),
        ("leaves chunk 0 of 512 bytes", |m| m.tensors[1].offset = 512 - 119),
        ("leaves chunk", |m| m.tensors[1].offset = u64::MAX),
        ("needs 120 bytes, but has 119", |m| m.tensors[1].len = 119),
        ("cannot exist", |m| m.tensors[1].shape = vec![63, 3]),
        ("cannot exist", |m| m.tensors[1].shape = vec![u64::MAX / 64 * 64, u64::MAX]),
        ("key \"bool\" occurs twice", |m| m.metadata.entries.push(("bool".into(), Value::U64(1)))),
        ("damaged string table", |m| {
            let table = StringTable { bytes: vec![0; 4], ends: vec![3, 2, 4] };
            m.metadata.set("strings", Value::Strings(table));
        }),
    ];
    for (said, break_it) in cases {
        let mut m = manifest();
        break_it(&mut m);
        let e = encode(&m).unwrap_err();
        assert!(e.to_string().contains(said), "{e}");
        let body = bincode::encode_to_vec(WireManifest::from(&m), BODY_CONFIG).unwrap();
        assert_eq!(decode(&frame(&body)), Err(e));
    }
}

#[test]
fn unknown_types_and_booleans_are_refused() {
    let m = WeightManifest { tensors: vec![entry("a", 0, 0)], ..manifest() };
    let mut wire = WireManifest::from(&m);
    wire.tensors.0[0].ty = 4;
    let e = decode(&frame(&bincode::encode_to_vec(wire, BODY_CONFIG).unwrap())).unwrap_err();
    assert!(e.to_string().contains("\"a\" has unknown type 4"), "{e}");

    let mut wire = WireManifest::from(&m);
    wire.metadata.0.push(WireEntry { key: "x".into(), value: WireValue::Bools(Cow::Owned(vec![2])) });
    assert_eq!(
        decode(&frame(&bincode::encode_to_vec(wire, BODY_CONFIG).unwrap())).unwrap_err().code(),
        "manifest_body"
    );

    let mut wire = WireManifest::from(&m);
    wire.metadata.0.push(WireEntry { key: "x".into(), value: WireValue::Floats(Cow::Owned(vec![0; 6])) });
    assert_eq!(
        decode(&frame(&bincode::encode_to_vec(wire, BODY_CONFIG).unwrap())).unwrap_err().code(),
        "manifest_body"
    );
}

/// A worker decodes the manifest in every restart, of which 150 ms are allowed in all.
#[test]
fn a_manifest_with_a_large_vocabulary_decodes_in_milliseconds() {
    let mut m = manifest();
    m.metadata.set("tokens", strings(130_000));
    m.metadata.set("merges", strings(130_000));
    m.metadata.set("scores", Value::Floats(vec![-1.0; 130_000]));
    m.metadata.set("types", Value::Ints(vec![1; 130_000]));
    m.chunks = vec![Chunk { len: 2000 * 256, blake3: [0; 32] }];
    m.tensors = (0..2000_u32).map(|i| entry(&format!("blk.{i}.weight"), 0, u64::from(i) * 256)).collect();
    let bytes = encode(&m).unwrap();
    let best = (0..5)
        .map(|_| {
            let start = Instant::now();
            assert_eq!(decode(&bytes).unwrap().tensors.len(), 2000);
            start.elapsed()
        })
        .min()
        .unwrap();
    println!("{} bytes decoded in {best:?}", bytes.len());
    assert!(best < Duration::from_millis(20), "{best:?}");
}
