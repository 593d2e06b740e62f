//! Opening files: what is not a model is called by its name.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;

use super::super::GgufModel;
use super::*;

#[test]
fn a_single_file_opens_with_its_table() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    sample().write_to(&path).unwrap();
    let model = GgufModel::open(&path).unwrap();
    let parsed = parse_all(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(model.tensors, parsed.tensors);
    assert_eq!(model.metadata, parsed.metadata);
    assert_eq!(model.shards.len(), 1);
    assert_eq!(model.shards[0].file_len, std::fs::metadata(&path).unwrap().len());
    assert_eq!(model.tensor_bytes(), 120 + 20 + 16);
}

/// A header longer than one read-ahead buffer (1 MiB).
#[test]
fn a_header_of_megabytes_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.gguf");
    let text = "x".repeat(3 << 20);
    sample().metadata("long", Value::String(text.clone())).write_to(&path).unwrap();
    assert_eq!(GgufModel::open(&path).unwrap().metadata.str("long"), Some(text.as_str()));
}

#[test]
fn g6_what_is_not_a_gguf_is_called_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut safetensors = 64_u64.to_le_bytes().to_vec();
    safetensors.extend_from_slice(b"{\"model.embed\":{\"dtype\":\"F32\"}}");
    for (content, word) in [
        (&b""[..], "empty"),
        (b"<!DOCTYPE html>\n<html><body>Please log in</body></html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98362432\n", "git-LFS pointer"),
        (&safetensors, "safetensors"),
        (b"PK\x03\x04\x00\x00\x08\x08\0\0\0\0\0\0\0\0archive/data.pkl", "PyTorch"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00model.bin", "zip"),
        (b"\x80\x02}q\x00(X\x05\x00\x00\x00", "PyTorch"),
    ] {
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, content).unwrap();
        let e = GgufModel::open(&path).unwrap_err();
        assert_eq!(e.code(), "not_a_gguf", "{word}");
        let said = e.to_string();
        assert!(said.contains(word) && said.contains("model.gguf"), "{said}");
    }
}

#[test]
fn missing_directory_and_pipe_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.gguf");
    let e = GgufModel::open(&absent).unwrap_err();
    assert_eq!(e.code(), "file_not_found");
    assert!(e.to_string().contains("absent.gguf"), "{e}");

    let e = GgufModel::open(dir.path()).unwrap_err();
    assert_eq!(e.code(), "not_a_file");
    assert!(e.to_string().contains("directory"), "{e}");

    // Opening a pipe for reading would wait for a writer for ever.
    let pipe = dir.path().join("pipe.gguf");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let e = GgufModel::open(&pipe).unwrap_err();
    assert_eq!(e.code(), "not_a_file");
    assert!(e.to_string().contains("pipe"), "{e}");
}

/// Root reads everything, so there the unreadable thing is a loop of links instead of a mode.
#[test]
fn unreadable_files_name_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("locked.gguf");
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&sample().to_vec().unwrap()).unwrap();
    file.set_permissions(std::fs::Permissions::from_mode(0o000)).unwrap();
    if std::fs::File::open(&path).is_err() {
        assert_eq!(GgufModel::open(&path).unwrap_err().code(), "unreadable");
    }
    let around = dir.path().join("loop.gguf");
    std::os::unix::fs::symlink(&around, &around).unwrap();
    let e = GgufModel::open(&around).unwrap_err();
    assert_eq!(e.code(), "unreadable");
    assert!(e.to_string().contains("loop.gguf"), "{e}");
}
