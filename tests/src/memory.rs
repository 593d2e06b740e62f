//! What a process really holds, as the kernel counts it.

/// A field of /proc/PID/smaps_rollup in bytes, e.g. `Pss_Shmem`. See proc_pid_smaps(5).
///
/// # Panics
/// When the process or the field is not there.
pub fn smaps(pid: u32, field: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("smaps_rollup");
    kib(&text, field)
}

/// A field of /proc/PID/status in bytes, e.g. `RssAnon`. See proc_pid_status(5).
///
/// # Panics
/// When the process or the field is not there.
pub fn status(pid: u32, field: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    kib(&text, field)
}

fn kib(text: &str, field: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
    let number = line.and_then(|l| l.split_whitespace().next()).and_then(|n| n.parse::<u64>().ok());
    number.unwrap_or_else(|| panic!("no {field} in\n{text}")) * 1024
}

/// Open descriptors of a process.
///
/// # Panics
/// When it is gone.
pub fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("fd").count()
}
