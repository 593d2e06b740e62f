//! Prints a model's chunk hashes and content hash, for the catalog's `[[known]]` lists.
//!
//! `cargo run --release -p ds4-manifests --example content_hash -- MODEL.gguf`; `tests/oracles/content_hash.py` computes
//! the same independently.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: content_hash MODEL.gguf")?;
    let model = ds4_manifests::GgufModel::open(Path::new(&path))?;
    let (chunks, content) = ds4_manifests::hash_files(&model)?;
    for chunk in chunks {
        println!("chunk {} {}", chunk.len, blake3::Hash::from_bytes(chunk.blake3));
    }
    println!("content {}", blake3::Hash::from_bytes(content));
    Ok(())
}
