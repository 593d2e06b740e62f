//! How much memory can be had: the machine's estimate and the limits of our cgroups, whichever is smaller.

use std::fs;
use std::path::{Path, PathBuf};

use crate::stats::kib_field;

/// An estimate of memory that can be allocated without reclaiming anything that is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// Bytes.
    pub bytes: u64,
    /// Whose estimate, e.g. `MemAvailable` or `cgroup limit /sys/fs/cgroup/...`.
    pub source: String,
    /// All memory of the machine, in bytes; 0 when unknown.
    pub total: u64,
}

/// The smaller of the kernel's `MemAvailable` and the room below each cgroup limit that applies to this process.
/// `None` when /proc cannot be read.
pub fn available() -> Option<Available> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    smallest(&meminfo, &cgroups, Path::new("/sys/fs/cgroup"))
}

fn smallest(meminfo: &str, cgroups: &str, root: &Path) -> Option<Available> {
    let total = kib_field(meminfo, "MemTotal:").unwrap_or(0);
    let machine = Available { bytes: kib_field(meminfo, "MemAvailable:")?, source: "MemAvailable".into(), total };
    let limits = cgroup_dirs(cgroups, root).into_iter().filter_map(|dir| {
        Some(Available { bytes: room(&dir)?, source: format!("cgroup limit {}", dir.display()), total })
    });
    limits.chain([machine]).min_by_key(|a| a.bytes)
}

/// Directories of the memory controller that apply to us, innermost first. Lines are `id:controllers:path`
/// (cgroups(7)); the v2 hierarchy is `0::path`. Inside a container the path may not exist; its prefix `/` does.
fn cgroup_dirs(cgroups: &str, root: &Path) -> Vec<PathBuf> {
    let mut dirs = Vec::new();
    for line in cgroups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let base = match controllers {
            "" => root.to_owned(),
            c if c.split(',').any(|c| c == "memory") => root.join("memory"),
            _ => continue,
        };
        let inner = Path::new(path.trim_start_matches('/'));
        dirs.extend(inner.ancestors().map(|a| if a.as_os_str().is_empty() { base.clone() } else { base.join(a) }));
    }
    dirs
}

/// Bytes that the cgroup at `dir` may still charge, counting page cache that it can drop at once as free.
fn room(dir: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    // "max" does not parse, which is what no limit means; v1 says it with a number near i64::MAX.
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    if limit >= 1 << 60 {
        return None;
    }
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let key = if dir.join("memory.current").exists() { "inactive_file" } else { "total_inactive_file" };
    let droppable =
        stat.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' ')?.trim().parse::<u64>().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(droppable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  500 kB\n";

    fn cgroup(dir: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(dir).unwrap();
        for (name, text) in files {
            fs::write(dir.join(name), text).unwrap();
        }
    }

    #[test]
    fn without_limits_the_machine_decides() {
        let dir = tempfile::tempdir().unwrap();
        let got = smallest(MEMINFO, "0::/a/b\n", dir.path()).unwrap();
        assert_eq!(got, Available { bytes: 500 << 10, source: "MemAvailable".into(), total: 1000 << 10 });
        cgroup(&dir.path().join("a/b"), &[("memory.max", "max\n"), ("memory.current", "5\n")]);
        assert_eq!(smallest(MEMINFO, "0::/a/b\n", dir.path()).unwrap(), got);
    }

    #[test]
    fn the_tightest_ancestor_limit_wins_and_inactive_cache_counts_as_free() {
        let dir = tempfile::tempdir().unwrap();
        cgroup(
            &dir.path().join("a"),
            &[
                ("memory.max", "100000\n"),
                ("memory.current", "90000\n"),
                ("memory.stat", "anon 1\ninactive_file 20000\n"),
            ],
        );
        cgroup(&dir.path().join("a/b"), &[("memory.max", "300000\n"), ("memory.current", "90000\n")]);
        let got = smallest(MEMINFO, "0::/a/b\n", dir.path()).unwrap();
        assert_eq!(got.bytes, 30_000);
        assert!(got.source.starts_with("cgroup limit ") && got.source.ends_with("/a"), "{}", got.source);
    }

    #[test]
    fn version_one_limits_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let lines = "9:name=systemd:/\n4:cpu,memory:/pod\n0::/\n";
        cgroup(&dir.path().join("memory/pod"), &[("memory.limit_in_bytes", "4096"), ("memory.usage_in_bytes", "1096")]);
        cgroup(
            &dir.path().join("memory"),
            &[("memory.limit_in_bytes", "9223372036854771712"), ("memory.usage_in_bytes", "1")],
        );
        assert_eq!(smallest(MEMINFO, lines, dir.path()).unwrap().bytes, 3000);
    }

    #[test]
    fn this_machine_has_memory() {
        let got = available().unwrap();
        assert!(got.bytes > 1 << 20 && got.bytes <= got.total, "{got:?}");
    }
}
