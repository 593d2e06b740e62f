//! Split models.

use std::path::{Path, PathBuf};

use super::super::{GgufError, GgufModel};
use super::*;

fn split(dir: &Path, n: usize) -> Vec<PathBuf> {
    sample().write_split(dir, "tiny", n).unwrap()
}

/// Writes shard `k` (from 1) of `n` with free `split.*` values.
fn shard(path: &Path, no: u64, count: u64, tensors: u64, tensor: &str) {
    GgufWriter::new()
        .metadata("split.no", Value::U64(no))
        .metadata("split.count", Value::U64(count))
        .metadata("split.tensors.count", Value::U64(tensors))
        .tensor(tensor, GgmlType::F32, &[4], vec![0; 16])
        .write_to(path)
        .unwrap();
}

#[test]
fn any_shard_opens_the_whole_model() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole.gguf");
    sample().write_to(&whole).unwrap();
    let whole = GgufModel::open(&whole).unwrap();
    let paths = split(dir.path(), 3);
    assert_eq!(paths[1].file_name().unwrap(), "tiny-00002-of-00003.gguf");
    for path in &paths {
        let model = GgufModel::open(path).unwrap();
        assert_eq!(model.shards.iter().map(|s| s.path.clone()).collect::<Vec<_>>(), paths);
        assert_eq!(model.metadata, whole.metadata, "split.* keys are no part of a model");
        let (names, shards): (Vec<_>, Vec<_>) = model.tensors.iter().map(|t| (t.name.as_str(), t.shard)).unzip();
        assert_eq!(names, ["a.weight", "b.weight", "c.weight"]);
        assert_eq!(shards, [0, 1, 2]);
        for (t, byte) in model.tensors.iter().zip([0, 1, 2]) {
            assert_eq!(std::fs::read(&model.shards[t.shard].path).unwrap()[index(t.offset)], byte);
        }
    }
}

#[test]
fn a_split_model_has_the_content_hash_of_the_whole_one() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole.gguf");
    sample().write_to(&whole).unwrap();
    let first = &split(dir.path(), 2)[0];
    let hash = |p: &Path| crate::hash_files(&GgufModel::open(p).unwrap()).unwrap();
    assert_eq!(hash(first), hash(&whole));
}

#[test]
fn a_missing_shard_is_named_by_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let paths = split(dir.path(), 3);
    std::fs::remove_file(&paths[1]).unwrap();
    for path in [&paths[0], &paths[2]] {
        let e = GgufModel::open(path).unwrap_err();
        assert_eq!(e.code(), "missing_shard");
        assert!(e.to_string().contains("shard 2 of 3"), "{e}");
        assert!(e.to_string().contains("tiny-00002-of-00003.gguf"), "{e}");
    }
}

#[test]
fn a_damaged_shard_is_named_with_its_cause() {
    let dir = tempfile::tempdir().unwrap();
    let paths = split(dir.path(), 3);
    std::fs::write(&paths[2], "<html>").unwrap();
    let e = GgufModel::open(&paths[0]).unwrap_err();
    assert_eq!(e.code(), "not_a_gguf");
    assert!(e.to_string().contains("shard 3 of 3") && e.to_string().contains("HTML"), "{e}");
}

#[test]
fn foreign_shards_are_named_with_the_difference() {
    let dir = tempfile::tempdir().unwrap();
    let paths = split(dir.path(), 3);
    let opened = |why: &str| {
        let e = GgufModel::open(&paths[0]).unwrap_err();
        assert_eq!(e.code(), "foreign_shard", "{e}");
        assert!(matches!(e, GgufError::ForeignShard { k: 2, n: 3, .. }));
        assert!(e.to_string().contains("shard 2 of 3") && e.to_string().contains(why), "{e}");
    };
    shard(&paths[1], 1, 4, 3, "b.weight");
    opened("split.count is 4");
    shard(&paths[1], 1, 3, 99, "b.weight");
    opened("split.tensors.count is 99");
    shard(&paths[1], 1, 3, 3, "a.weight");
    opened("holds tensor \"a.weight\", which shard 1 has");
    sample().write_to(&paths[1]).unwrap();
    opened("no split.count");
    GgufWriter::new()
        .metadata("general.architecture", Value::String("qwen3".into()))
        .metadata("split.no", Value::U64(1))
        .metadata("split.count", Value::U64(3))
        .metadata("split.tensors.count", Value::U64(3))
        .tensor("b.weight", GgmlType::F32, &[4], vec![0; 16])
        .write_to(&paths[1])
        .unwrap();
    opened("general.architecture differs");
}

#[test]
fn swapped_shards_are_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let paths = split(dir.path(), 3);
    let spare = dir.path().join("spare");
    std::fs::rename(&paths[1], &spare).unwrap();
    std::fs::rename(&paths[2], &paths[1]).unwrap();
    std::fs::rename(&spare, &paths[2]).unwrap();
    let e = GgufModel::open(&paths[0]).unwrap_err();
    assert_eq!(e.code(), "foreign_shard");
    assert!(e.to_string().contains("metadata says shard 3"), "{e}");
    // The one that is opened is itself misnamed.
    let e = GgufModel::open(&paths[1]).unwrap_err();
    assert_eq!(e.code(), "bad_split");
    assert!(e.to_string().contains("name says shard 2 of 3, its metadata says shard 3 of 3"), "{e}");
}

#[test]
fn a_total_that_does_not_add_up_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |k: u32| dir.path().join(format!("m-{k:05}-of-00002.gguf"));
    shard(&path(1), 0, 2, 5, "a");
    shard(&path(2), 1, 2, 5, "b");
    let e = GgufModel::open(&path(1)).unwrap_err();
    assert_eq!(e.code(), "bad_split");
    assert!(e.to_string().contains("split.tensors.count is 5") && e.to_string().contains("hold 2"), "{e}");
}

#[test]
fn names_and_counts_must_agree() {
    let dir = tempfile::tempdir().unwrap();
    let renamed = dir.path().join("renamed.gguf");
    shard(&renamed, 0, 2, 2, "a");
    let e = GgufModel::open(&renamed).unwrap_err();
    assert_eq!(e.code(), "bad_split");
    assert!(e.to_string().contains("-00001-of-00002.gguf"), "{e}");

    let whole = dir.path().join("whole-00001-of-00002.gguf");
    sample().write_to(&whole).unwrap();
    assert_eq!(GgufModel::open(&whole).unwrap_err().code(), "bad_split");

    let outside = dir.path().join("o-00001-of-00002.gguf");
    shard(&outside, 2, 2, 2, "a");
    assert_eq!(GgufModel::open(&outside).unwrap_err().code(), "bad_split");

    // One of one is a whole model.
    let one = dir.path().join("one-00001-of-00001.gguf");
    sample().write_to(&one).unwrap();
    assert_eq!(GgufModel::open(&one).unwrap().shards.len(), 1);
}
