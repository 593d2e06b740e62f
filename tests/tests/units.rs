//! The systemd units: what systemd itself thinks of them.

use std::path::{Path, PathBuf};
use std::process::Command;

use ds4_tests::bin;

fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd")
}

/// The units with the built binaries in place of the installed ones, where systemd-analyze can find them.
fn installed() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["ds4-owner.service", "ds4-worker.service", "ds4-worker.socket"] {
        let mut text = std::fs::read_to_string(units().join(name)).unwrap();
        for program in ["ds4-weight-owner", "ds4-worker"] {
            text = text.replace(&format!("/usr/bin/{program} "), &format!("{} ", bin(program).display()));
        }
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn verify(dir: &Path) -> (bool, String) {
    let names = ["ds4-owner.service", "ds4-worker.service", "ds4-worker.socket"].map(|n| dir.join(n));
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=yes"])
        .args(names)
        .output()
        .expect("systemd-analyze");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// systemd's own checker is part of every systemd distribution; containers may lack it, and then only the text is checked.
fn has_systemd_analyze() -> bool {
    Command::new("systemd-analyze").arg("--version").output().is_ok()
}

#[test]
fn systemd_accepts_the_units_and_would_refuse_a_typo() {
    if !has_systemd_analyze() {
        eprintln!("systemd-analyze is not installed: the units were not verified");
        return;
    }
    let dir = installed();
    let (ok, errors) = verify(dir.path());
    assert!(ok, "{errors}");
    let worker = dir.path().join("ds4-worker.service");
    let text = std::fs::read_to_string(&worker).unwrap();
    std::fs::write(&worker, text.replace("OOMScoreAdjust", "OOMScoreAjust")).unwrap();
    let (ok, errors) = verify(dir.path());
    assert!(!ok || errors.contains("OOMScoreAjust"), "the check itself works: {errors}");
}

#[test]
fn m10_refusals_that_do_not_get_better_are_not_retried() {
    for name in ["ds4-owner.service", "ds4-worker.service"] {
        let text = std::fs::read_to_string(units().join(name)).unwrap();
        for line in ["RestartPreventExitStatus=2 4 5", "StartLimitBurst=", "StartLimitIntervalSec=", "Type=notify"] {
            assert!(text.lines().any(|l| l.starts_with(line)), "{name}: no {line}");
        }
    }
}

#[test]
fn a_worker_without_a_model_waits_and_does_not_use_up_its_starts() {
    let text = std::fs::read_to_string(units().join("ds4-worker.service")).unwrap();
    let number = |key: &str| {
        let at = text.find(key).unwrap_or_else(|| panic!("no {key}")) + key.len();
        let digits: String = text[at..].trim_start().chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u64>().unwrap()
    };
    let wait = number("--owner-wait ");
    assert!(wait < number("\nTimeoutStartSec="), "systemd must not take the wait for a hang");
    assert!(number("\nStartLimitIntervalSec=") / wait < number("\nStartLimitBurst="));
}

#[test]
fn the_kernel_takes_a_worker_before_the_owner() {
    let score = |name: &str| {
        let text = std::fs::read_to_string(units().join(name)).unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix("OOMScoreAdjust=").map(String::from)).unwrap();
        line.parse::<i32>().unwrap()
    };
    assert!(score("ds4-owner.service") < 0 && score("ds4-worker.service") > 0);
}
