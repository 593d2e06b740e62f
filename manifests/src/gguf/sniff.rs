//! Names what a file that is not a GGUF looks like, so that its owner knows what went wrong with the download.

/// A phrase for the first bytes of a file without the GGUF magic.
pub(super) fn describe(head: &[u8]) -> String {
    let text = head.trim_ascii_start();
    let lower = text[..text.len().min(64)].to_ascii_lowercase();
    let known = if head.is_empty() {
        "it is empty (the download never began, or the disk was full)"
    } else if lower.starts_with(b"<!doctype html") || lower.starts_with(b"<html") || lower.starts_with(b"<head") {
        "it is an HTML page (a login, licence or error page saved under the model's name); download the file itself"
    } else if lower.starts_with(b"<?xml") {
        "it is XML (usually a storage server's error message); download the file itself"
    } else if head.starts_with(b"version https://git-lfs.github.com/spec/") {
        "it is a git-LFS pointer, not the file it points to; run `git lfs pull`, or download the file itself"
    } else if is_safetensors(head) {
        "it is a safetensors file; convert it to GGUF"
    } else if head.starts_with(b"PK\x03\x04") {
        if contains(head, b"data.pkl") || contains(head, b"/version") || contains(head, b".data/") {
            "it is a PyTorch checkpoint; convert it to GGUF"
        } else {
            "it is a zip archive (perhaps a PyTorch checkpoint); unpack or convert it"
        }
    } else if is_pickle(head) {
        "it is a PyTorch checkpoint (pickle); convert it to GGUF"
    } else if head.starts_with(b"lmgg")
        || head.starts_with(b"fmgg")
        || head.starts_with(b"tjgg")
        || head.starts_with(b"algg")
    {
        "it is a model in a GGML format from before GGUF; get a current conversion"
    } else if head.starts_with(b"FUGG") {
        "it is a byte-swapped (big-endian) GGUF; convert it with gguf-convert-endian from the gguf Python package"
    } else if head.starts_with(b"\x1f\x8b") || head.starts_with(b"\x28\xb5\x2f\xfd") || head.starts_with(b"\xfd7zXZ") {
        "it is compressed (gzip, zstd or xz); decompress it"
    } else if head.starts_with(b"\x7fELF") {
        "it is an ELF program"
    } else if head.starts_with(b"\x89HDF\r\n") {
        "it is an HDF5 file; convert it to GGUF"
    } else if head.iter().all(|b| *b == 0) {
        "it begins with zero bytes (space was reserved, but the download never wrote here); fetch it again"
    } else if text.starts_with(b"{") || text.starts_with(b"[") {
        "it is JSON (a configuration file, or a server's error message); download the file itself"
    } else {
        return match std::str::from_utf8(&head[..head.len().min(4)]) {
            Ok(s) if s.chars().all(|c| !c.is_control() || c.is_whitespace()) && looks_like_text(head) => {
                let line: String =
                    String::from_utf8_lossy(head).lines().next().unwrap_or_default().chars().take(60).collect();
                format!("it is text beginning with {line:?}; download the file itself")
            }
            _ => {
                let hex: Vec<String> = head.iter().take(4).map(|b| format!("{b:02x}")).collect();
                format!("it begins with bytes {} instead of the magic \"GGUF\"; fetch it again", hex.join(" "))
            }
        };
    };
    known.to_owned()
}

/// A u64 header length and a JSON object.
fn is_safetensors(head: &[u8]) -> bool {
    let Some((len, rest)) = head.split_first_chunk::<8>() else { return false };
    // The format caps its header at 100 MB.
    (2..=100_000_000).contains(&u64::from_le_bytes(*len)) && rest.starts_with(b"{")
}

/// Pickle protocol 2 to 5, as torch.save wrote before it used zip.
fn is_pickle(head: &[u8]) -> bool {
    matches!(head, [0x80, 2..=5, ..])
}

fn contains(head: &[u8], needle: &[u8]) -> bool {
    head.windows(needle.len()).any(|w| w == needle)
}

fn looks_like_text(head: &[u8]) -> bool {
    head.iter().take(64).all(|b| *b >= 0x20 || b.is_ascii_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_impostor_is_called_by_its_name() {
        let mut safetensors = 300_u64.to_le_bytes().to_vec();
        safetensors.extend_from_slice(b"{\"__metadata__\":{}}");
        for (head, word) in [
            (&b""[..], "empty"),
            (b"<!DOCTYPE html><html>", "HTML"),
            (b"\n  <HTML lang=en>", "HTML"),
            (b"<?xml version='1.0'?><Error>", "XML"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git-LFS pointer"),
            (&safetensors, "safetensors"),
            (b"PK\x03\x04\0\0\0\0archive/data.pklFB", "PyTorch"),
            (b"PK\x03\x04\0\0\0\0readme.md", "zip"),
            (b"\x80\x02\x8a\x0a\x6c\xfc", "PyTorch"),
            (b"tjgg\x03\0\0\0", "before GGUF"),
            (b"FUGG\0\0\0\x03", "big-endian"),
            (b"\x1f\x8b\x08\0", "gzip"),
            (b"\x7fELF\x02", "ELF"),
            (b"\0\0\0\0\0\0\0\0", "zero bytes"),
            (b"{\"error\":\"not found\"}", "JSON"),
            (b"Entry not found", "\"Entry not found\""),
            (b"\xde\xad\xbe\xef\x01", "de ad be ef"),
        ] {
            let said = describe(head);
            assert!(said.contains(word), "{head:?}: {said}");
        }
    }
}
