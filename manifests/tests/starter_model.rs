//! The real starter model through reader, catalog, layout, hash and codec.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ds4_manifests::{
    Backend, Catalog, GgmlType, GgufModel, ModelIdentity, TensorIndex, WeightManifest, decode, encode, hash_files,
    plan_layout,
};

const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

fn starter() -> PathBuf {
    let path = std::env::var_os("DS4_STARTER_MODEL").map(PathBuf::from).unwrap_or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME")
            .filter(|p| !p.is_empty())
            .map(PathBuf::from)
            .unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache"));
        cache.join("ds4/models").join(FILE)
    });
    assert!(path.is_file(), "{} is missing; run scripts/test, which fetches it", path.display());
    path
}

/// Counts as `gguf-dump` of the gguf package prints them.
#[test]
fn the_starter_model_reads_as_published() {
    let start = Instant::now();
    let model = GgufModel::open(&starter()).unwrap();
    let opened = start.elapsed();
    let count = |ty| model.tensors.iter().filter(|t| t.ty == ty).count();
    assert_eq!((count(GgmlType::Q4_1), count(GgmlType::Q8_0), count(GgmlType::F32)), (210, 1, 61));
    assert_eq!(model.tensors.len(), 272);
    assert_eq!(model.metadata.iter().count(), 33);
    assert_eq!(model.shards[0].data_offset, 1_785_664);
    let tokens = model.metadata.strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!((tokens.len(), tokens.get(1)), (49152, Some(&b"<|im_start|>"[..])));
    assert_eq!(model.metadata.strings("tokenizer.ggml.merges").unwrap().len(), 48900);
    assert_eq!(model.metadata.u64("tokenizer.ggml.eos_token_id"), Some(2));
    let norm = model.tensors.iter().find(|t| t.name == "output_norm.weight").unwrap();
    assert_eq!((norm.offset, norm.len), (1_785_664 + 96_574_464, 2304));
    assert!(opened < Duration::from_millis(150), "{opened:?}");
}

#[test]
fn the_starter_model_is_known_and_survives_the_codec() {
    let model = GgufModel::open(&starter()).unwrap();
    let found = Catalog::builtin().identify(&model.metadata, &model.tensors, false).unwrap();
    assert_eq!(found.entry.id, "smollm2-135m");
    // The table names exactly the file's tensors.
    let names: std::collections::BTreeSet<_> = model.tensors.iter().map(|t| t.name.clone()).collect();
    assert_eq!(found.tensors().into_iter().map(|t| t.name).collect::<std::collections::BTreeSet<_>>(), names);

    let (chunks, content) = hash_files(&model).unwrap();
    assert!(found.entry.is_known(&content), "content {}", blake3::Hash::from_bytes(content));
    let layout = plan_layout(&model.tensors);
    let manifest = WeightManifest {
        model: ModelIdentity {
            family: found.entry.family.clone(),
            artifact: found.entry.id.clone(),
            name: found.served_name.clone(),
            content,
            known: true,
        },
        epoch: 1,
        backend: Backend::Memfd { page: 4096 },
        chunks,
        tensors: layout.placed,
        metadata: model.metadata.clone(),
    };
    let bytes = encode(&manifest).unwrap();
    let start = Instant::now();
    let back = decode(&bytes).unwrap();
    println!("{} bytes decoded in {:?}", bytes.len(), start.elapsed());
    assert_eq!(back, manifest);
    let index = TensorIndex::new(&back.tensors);
    let at = index.get("blk.29.ffn_up.weight").unwrap();
    assert_eq!(back.tensors[at].shape, [576, 1536]);
    assert_eq!(index.get("blk.30.ffn_up.weight"), None);
    // A worker recognises the same entry from what it was sent.
    assert_eq!(Catalog::builtin().identify(&back.metadata, &back.tensors, false).unwrap().entry.id, "smollm2-135m");
}
