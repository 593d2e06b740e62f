//! The weights as the owner holds them, hashed from outside: through its descriptors, not through anything it says.

use std::fs;
use std::io::Read as _;

use anyhow::{Context as _, ensure};

/// BLAKE3 over the content of every memfd that process `pid` holds, in the order of their names, sizes and contents.
///
/// # Errors
/// The process is gone, is another user's, or holds no memfd.
pub fn hash(pid: u32) -> anyhow::Result<String> {
    let dir = format!("/proc/{pid}/fd");
    let mut parts = Vec::new();
    for entry in fs::read_dir(&dir).with_context(|| format!("cannot look into {dir}"))? {
        let path = entry?.path();
        let Ok(target) = fs::read_link(&path) else { continue };
        let name = target.to_string_lossy().into_owned();
        if !name.starts_with("/memfd:") {
            continue;
        }
        // A sealed memfd may be opened anew for reading; its offset is then ours.
        let mut file = fs::File::open(&path).with_context(|| format!("cannot open {name} of process {pid}"))?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        let mut total = 0_u64;
        loop {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            hasher.update(&buffer[..n]);
            total += u64::try_from(n)?;
        }
        parts.push((name, total, *hasher.finalize().as_bytes()));
    }
    ensure!(!parts.is_empty(), "process {pid} holds no memfd: it has no weights");
    parts.sort();
    let mut all = blake3::Hasher::new();
    for (name, total, content) in &parts {
        all.update(name.as_bytes()).update(&total.to_le_bytes()).update(content);
    }
    Ok(all.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn one_changed_byte_changes_the_hash() {
        let file = fs::File::from(memfd_create("weights", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all_at(&[7; 5000], 0).unwrap();
        let own = std::process::id();
        let before = hash(own).unwrap();
        assert_eq!(before, hash(own).unwrap());
        file.write_all_at(&[8], 4321).unwrap();
        assert_ne!(before, hash(own).unwrap());
    }
}
