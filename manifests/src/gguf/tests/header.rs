//! Keys, tensor table, placement.

use super::*;

#[test]
fn every_kind_of_value_comes_back() {
    let writer = sample();
    let bytes = writer.to_vec().unwrap();
    let parsed = parse_all(&bytes).unwrap();
    let m = &parsed.metadata;
    assert_eq!(m.iter().count(), 13);
    assert_eq!(m.str("general.architecture"), Some("llama"));
    assert_eq!((m.u64("u32"), m.u64("u64")), (Some(7), Some(1 << 40)));
    assert_eq!(m.get("i32"), Some(&Value::I64(-7)));
    assert_eq!(m.get("i64"), Some(&Value::I64(-(1 << 40))));
    assert_eq!((m.f64("f32"), m.f64("f64"), m.bool("bool")), (Some(0.5), Some(0.1), Some(true)));
    let words: Vec<&[u8]> = m.strings("strings").unwrap().iter().collect();
    assert_eq!(words, [&b"a"[..], b"", b"\xff\xfe", "\u{1f600}".as_bytes()]);
    assert_eq!(m.ints("ints"), Some(&[1, -2, 3][..]));
    assert_eq!(m.ints("longs"), Some(&[1 << 40, -1][..]));
    assert_eq!(m.get("floats"), Some(&Value::Floats(vec![1.5, f32::MIN_POSITIVE])));
    assert_eq!(m.get("bools"), Some(&Value::Bools(vec![true, false])));

    let shape: Vec<_> = parsed.tensors.iter().map(|t| (t.name.as_str(), t.ty, t.shape.clone(), t.len)).collect();
    assert_eq!(
        shape,
        [
            ("a.weight", GgmlType::Q4_1, vec![64, 3], 120),
            ("b.weight", GgmlType::F32, vec![5], 20),
            ("c.weight", GgmlType::F16, vec![2, 2, 2], 16),
        ]
    );
    let at = |i: usize| index(parsed.tensors[i].offset);
    assert_eq!(bytes[at(0)..at(0) + 120], (0..120).collect::<Vec<u8>>());
    assert_eq!(bytes[at(1)..at(1) + 20], [1; 20]);
    assert_eq!((at(0) % 32, at(1) - at(0), at(2) - at(1)), (0, 128, 32));
}

/// The scalar and array types that the writer does not produce, byte by byte.
#[test]
fn narrow_types_are_read() {
    let array = |ty: u32, n: u64, data: &[u8]| [&ty.to_le_bytes()[..], &n.to_le_bytes(), data].concat();
    let raw = Raw::new()
        .key(b"u8", 0, &[200])
        .key(b"i8", 1, &[0xfe])
        .key(b"u16", 2, &[0x34, 0x12])
        .key(b"i16", 3, &[0xff, 0xff])
        .key(b"a.u8", 9, &array(0, 2, &[1, 255]))
        .key(b"a.i8", 9, &array(1, 2, &[1, 255]))
        .key(b"a.u16", 9, &array(2, 1, &[0xff, 0xff]))
        .key(b"a.i16", 9, &array(3, 1, &[0xff, 0xff]))
        .key(b"a.u32", 9, &array(4, 1, &[0xff; 4]))
        .key(b"a.u64", 9, &array(10, 1, &5_u64.to_le_bytes()))
        .key(b"a.f64", 9, &array(12, 1, &0.25_f64.to_le_bytes()))
        .key(b"a.none", 9, &array(5, 0, &[]));
    let m = parse_all(&raw.bytes()).unwrap().metadata;
    assert_eq!(m.u64("u8"), Some(200));
    assert_eq!(m.get("i8"), Some(&Value::I64(-2)));
    assert_eq!(m.u64("u16"), Some(0x1234));
    assert_eq!(m.get("i16"), Some(&Value::I64(-1)));
    assert_eq!(m.ints("a.u8"), Some(&[1, 255][..]));
    assert_eq!(m.ints("a.i8"), Some(&[1, -1][..]));
    assert_eq!(m.ints("a.u16"), Some(&[65535][..]));
    assert_eq!(m.ints("a.i16"), Some(&[-1][..]));
    assert_eq!(m.ints("a.u32"), Some(&[0xffff_ffff][..]));
    assert_eq!(m.ints("a.u64"), Some(&[5][..]));
    assert_eq!(m.get("a.f64"), Some(&Value::Floats(vec![0.25])));
    assert_eq!(m.ints("a.none"), Some(&[][..]));
}

#[test]
fn arrays_longer_than_a_read_batch_are_whole() {
    let long: Vec<i64> = (0..50_000).map(|i| i * 3 - 70_000).collect();
    let bytes = GgufWriter::new().metadata("long", Value::Ints(long.clone())).to_vec().unwrap();
    assert_eq!(parse_all(&bytes).unwrap().metadata.ints("long"), Some(&long[..]));
}

#[test]
fn other_versions_are_refused_by_name() {
    for (version, expected, said) in [
        (1, "unsupported_version", "version 1"),
        (2, "unsupported_version", "version 2"),
        (4, "unsupported_version", "version 4"),
        (0, "unsupported_version", "version 0"),
        (3_u32.swap_bytes(), "big_endian", "big-endian GGUF (version 3)"),
    ] {
        let e = parse_all(&Raw { version, ..Raw::new() }.bytes()).unwrap_err();
        assert_eq!(e.code(), expected, "{version}");
        assert!(e.to_string().contains(said), "{e}");
    }
}

#[test]
fn values_outside_their_type_are_refused() {
    let array = |ty: u32, n: u64, data: &[u8]| [&ty.to_le_bytes()[..], &n.to_le_bytes(), data].concat();
    for (ty, payload, expected) in [
        (7, vec![2], "bad_metadata_value"),
        (8, string(b"\xff"), "bad_metadata_value"),
        (9, array(7, 2, &[1, 9]), "bad_metadata_value"),
        (9, array(10, 1, &[0xff; 8]), "bad_metadata_value"),
        (9, array(9, 1, &[0; 12]), "nested_array"),
        (9, array(13, 1, &[0; 8]), "unknown_value_type"),
        (13, vec![0; 8], "unknown_value_type"),
        (u32::MAX, vec![0; 8], "unknown_value_type"),
    ] {
        let e = parse_all(&Raw::new().key(b"the.key", ty, &payload).bytes()).unwrap_err();
        assert_eq!(e.code(), expected, "{ty} {payload:?}");
        assert!(e.to_string().contains("the.key"), "{e}");
    }
}

#[test]
fn names_must_be_unique_utf8_and_not_empty() {
    let twice = Raw::new().key(b"k", 7, &[1]).key(b"k", 7, &[1]);
    assert_eq!(code(&twice.bytes()), "duplicate_key");
    let twice = Raw::new().tensor(b"t", &[1], 0, 0).tensor(b"t", &[1], 0, 32).data(64);
    assert_eq!(code(&twice.bytes()), "duplicate_tensor");
    assert_eq!(code(&Raw::new().key(b"\xff", 7, &[1]).data(64).bytes()), "bad_name");
    assert_eq!(code(&Raw::new().key(b"", 7, &[1]).data(64).bytes()), "bad_name");
    assert_eq!(code(&Raw::new().tensor(b"\xc3", &[1], 0, 0).data(64).bytes()), "bad_name");
}

#[test]
fn unknown_and_removed_tensor_types_are_named() {
    for (id, said) in [(4, "Q4_2, removed"), (31, "Q4_0_4_4, removed"), (5000, "type 5000, which is unknown")] {
        let e = parse_all(&Raw::new().tensor(b"blk.0.x", &[256], id, 0).data(4096).bytes()).unwrap_err();
        assert_eq!(e.code(), "unknown_tensor_type");
        assert!(e.to_string().contains(said) && e.to_string().contains("blk.0.x"), "{e}");
    }
}

#[test]
fn rows_must_be_whole_blocks() {
    let e = parse_all(&Raw::new().tensor(b"t", &[33, 2], GgmlType::Q4_1.id(), 0).data(4096).bytes()).unwrap_err();
    assert_eq!(e.code(), "bad_shape");
    assert!(e.to_string().contains("whole blocks"), "{e}");
    assert_eq!(code(&Raw::new().tensor(b"t", &[0, 2], 0, 0).data(64).bytes()), "bad_shape");
    assert_eq!(code(&Raw::new().tensor(b"t", &[], 0, 0).data(64).bytes()), "bad_shape");
    assert_eq!(code(&Raw::new().tensor(b"t", &[1; 9], 0, 0).data(64).bytes()), "bad_shape");
}

#[test]
fn alignment_must_be_a_power_of_two_and_is_obeyed() {
    for bad in [0_u32, 3, 33, u32::MAX] {
        assert_eq!(
            code(&Raw::new().key(b"general.alignment", 4, &bad.to_le_bytes()).bytes()),
            "bad_alignment",
            "{bad}"
        );
    }
    assert_eq!(code(&Raw::new().key(b"general.alignment", 8, &string(b"32")).bytes()), "bad_alignment");
    let bytes = sample().alignment(512).to_vec().unwrap();
    let parsed = parse_all(&bytes).unwrap();
    assert_eq!(parsed.alignment, 512);
    assert!(parsed.tensors.iter().all(|t| t.offset % 512 == 0));
    assert_eq!(bytes[index(parsed.tensors[1].offset)], 1);
    assert_eq!(code(&Raw::new().tensor(b"t", &[1], 0, 4).data(64).bytes()), "bad_offset");
}

#[test]
fn tensors_must_not_overlap() {
    let raw = Raw::new().tensor(b"first", &[16], 0, 32).tensor(b"second", &[9], 0, 0).data(96);
    let e = parse_all(&raw.bytes()).unwrap_err();
    assert_eq!(e.code(), "overlapping_tensors");
    assert!(e.to_string().contains("\"second\" and \"first\""), "{e}");
    let touching = Raw::new().tensor(b"first", &[16], 0, 32).tensor(b"second", &[8], 0, 0).data(96);
    assert_eq!(code(&touching.bytes()), "parsed");
}

#[test]
fn the_writer_refuses_wrong_sizes() {
    for (ty, shape, len) in [(GgmlType::F32, &[4][..], 15), (GgmlType::Q4_1, &[33], 20), (GgmlType::F32, &[], 4)] {
        assert!(GgufWriter::new().tensor("t", ty, shape, vec![0; len]).to_vec().is_err(), "{ty} {shape:?} {len}");
    }
}

#[test]
fn a_planned_file_is_the_collected_one() {
    let mut metadata = crate::metadata::Metadata::default();
    metadata.set("general.architecture", Value::String("llama".into()));
    let shapes: [(&str, GgmlType, &[u64]); 2] = [("a", GgmlType::F16, &[3]), ("b", GgmlType::Q8_0, &[32, 2])];
    let plan = crate::GgufPlan::new(&metadata, &shapes).unwrap();
    let mut streamed = plan.header.clone();
    streamed.resize(usize::try_from(plan.file_len).unwrap(), 0);
    let mut collected = GgufWriter::new().metadata("general.architecture", Value::String("llama".into()));
    for ((name, ty, shape), (offset, len)) in shapes.iter().zip(&plan.tensors) {
        let (at, len) = (usize::try_from(*offset).unwrap(), usize::try_from(*len).unwrap());
        streamed[at..at + len].fill(7);
        collected = collected.tensor(name, *ty, shape, vec![7; len]);
    }
    assert_eq!(streamed, collected.to_vec().unwrap());
    assert!(crate::GgufPlan::new(&metadata, &[("a", GgmlType::Q8_0, &[31])]).is_err());
}
