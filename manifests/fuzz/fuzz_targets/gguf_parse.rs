//! Any bytes through the GGUF header parser; what parses must keep the parser's promises.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let file_len = bytes.len() as u64;
    let Ok(parsed) = ds4_manifests::gguf::parse(bytes, file_len) else { return };
    let mut tensors: Vec<_> = parsed.tensors.iter().collect();
    tensors.sort_by_key(|t| t.offset);
    let mut end = parsed.data_offset;
    for t in tensors {
        assert_eq!(t.ty.tensor_bytes(&t.shape), Some(t.len));
        assert!(t.offset >= end && t.offset + t.len <= file_len);
        end = t.offset + t.len;
    }
    // Whatever was read can be laid out and recognised (or refused) without a panic.
    let layout = ds4_manifests::plan_layout(&parsed.tensors);
    assert_eq!(layout.placed.len(), parsed.tensors.len());
    let _ = ds4_manifests::Catalog::builtin().identify(&parsed.metadata, &parsed.tensors, true);
});
