//! The fuzz targets' committed corpus, in every ordinary test run. A file's name begins with the answer that it must get.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ds4_manifests::{Catalog, codec, gguf};

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|e| e.unwrap().path())
        // What a fuzzing run left behind is named by a hash alone.
        .filter(|p| p.to_string_lossy().contains("--"))
        .collect();
    paths.sort();
    paths
        .into_iter()
        .map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&p).unwrap()))
        .collect()
}

#[test]
fn the_gguf_corpus_gets_the_answers_in_its_names() {
    let files = corpus("gguf_parse");
    assert!(files.len() >= 45, "only {} files", files.len());
    let mut codes = BTreeSet::new();
    for (name, bytes) in &files {
        let expected = name.split("--").next().unwrap();
        let said = match gguf::parse(bytes, bytes.len() as u64) {
            Ok(parsed) => {
                // The fuzz target goes on like this.
                let _ = Catalog::builtin().identify(&parsed.metadata, &parsed.tensors, true);
                "ok"
            }
            Err(e) => e.code(),
        };
        assert_eq!(said, expected, "{name}");
        codes.insert(said);
    }
    assert!(codes.len() >= 17, "only these answers are covered: {codes:?}");
}

#[test]
fn the_tiny_llama_of_the_corpus_is_a_model() {
    let (_, bytes) = corpus("gguf_parse").into_iter().find(|(name, _)| name == "ok--tiny_llama").unwrap();
    let parsed = gguf::parse(&bytes, bytes.len() as u64).unwrap();
    let found = Catalog::builtin().identify(&parsed.metadata, &parsed.tensors, true).unwrap();
    assert_eq!((found.entry.id.as_str(), found.hyper.int("hidden")), ("dev-llama", Some(32)));
}

#[test]
fn the_manifest_corpus_gets_the_answers_in_its_names() {
    let files = corpus("manifest_decode");
    assert!(files.len() >= 24, "only {} files", files.len());
    for (name, bytes) in &files {
        let mut parts = name.split("--");
        let framed = match parts.next() {
            Some("body") => codec::frame(bytes),
            Some("whole") => bytes.clone(),
            other => panic!("{name}: {other:?}"),
        };
        let said = codec::decode(&framed).map_or_else(|e| e.code(), |_| "ok");
        assert_eq!(Some(said), parts.next(), "{name}");
    }
}
