//! What the kernel says about a process: resident memory and open descriptors.

use std::fs;
use std::io;

/// Resident memory in bytes. Source: proc(5), `/proc/PID/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// All resident pages (`VmRSS`), those of shared mappings included.
    pub resident: u64,
    /// Anonymous pages (`RssAnon`): heap, stacks, copied private pages.
    pub anonymous: u64,
    /// Pages of files (`RssFile`): the program itself.
    pub file: u64,
    /// Pages of shared memory (`RssShmem`): mapped memfds, the weights.
    pub shared: u64,
}

impl ProcessMemory {
    /// Resident memory without mapped memfds.
    pub fn without_shared(&self) -> u64 {
        self.resident.saturating_sub(self.shared)
    }
}

fn directory(pid: Option<u32>) -> String {
    pid.map_or_else(|| "/proc/self".into(), |p| format!("/proc/{p}"))
}

/// Memory of process `pid`, or of this one.
///
/// # Errors
/// The process does not exist, or /proc is not mounted.
pub fn memory(pid: Option<u32>) -> io::Result<ProcessMemory> {
    Ok(parse_status(&fs::read_to_string(format!("{}/status", directory(pid)))?))
}

fn parse_status(text: &str) -> ProcessMemory {
    let field = |name: &str| kib_field(text, name).unwrap_or(0);
    ProcessMemory {
        resident: field("VmRSS:"),
        anonymous: field("RssAnon:"),
        file: field("RssFile:"),
        shared: field("RssShmem:"),
    }
}

/// The value of a `Name:   123 kB` line in bytes.
pub(crate) fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Open descriptors of process `pid`, or of this one (without the one that counting takes).
///
/// # Errors
/// The process does not exist or belongs to somebody else.
pub fn fd_count(pid: Option<u32>) -> io::Result<usize> {
    let count = fs::read_dir(format!("{}/fd", directory(pid)))?.count();
    Ok(if pid.is_none_or(|p| p == std::process::id()) { count.saturating_sub(1) } else { count })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_lines_are_read_in_bytes() {
        let text = "Name:\tx\nVmRSS:\t    2048 kB\nRssAnon:\t     100 kB\nRssFile:\t     3 kB\nRssShmem:\t  1024 kB\n";
        let memory = parse_status(text);
        assert_eq!(memory, ProcessMemory { resident: 2 << 20, anonymous: 102_400, file: 3072, shared: 1 << 20 });
        assert_eq!(memory.without_shared(), 1 << 20);
    }

    #[test]
    fn this_process_has_memory_and_its_descriptors_are_counted() {
        assert!(memory(None).unwrap().resident > 100_000);
        assert_eq!(memory(Some(std::process::id())).unwrap().resident >> 26, memory(None).unwrap().resident >> 26);
        // Other tests open files too when they share the process, hence far more than they would.
        let before = fd_count(None).unwrap();
        let files: Vec<_> = (0..100).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        let after = fd_count(None).unwrap();
        assert!(after >= before + 60 && after <= before + 140, "{before} {after}");
        drop(files);
        assert!(memory(Some(u32::MAX)).is_err());
    }
}
