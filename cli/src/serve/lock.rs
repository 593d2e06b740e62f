//! One supervisor a runtime directory.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::Context as _;
use ds4_os::wait::leads_to;
use ds4_settings::EXIT_USAGE;

use crate::failure::Failure;

const NAME: &str = "serve.lock";

/// Held while this process supervises a runtime directory; the kernel lets go when it dies.
#[derive(Debug)]
pub struct Lock(File);

impl Lock {
    /// Takes it and leaves our pid in it.
    ///
    /// # Errors
    /// Another supervisor has it (named by its pid), or the directory cannot be written.
    pub fn take(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join(NAME);
        let shown = path.display();
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .with_context(|| format!("cannot open {shown}"))?;
        match file.try_lock() {
            Ok(()) => {
                file.set_len(0)?;
                write!(file, "{}", std::process::id())?;
                Ok(Self(file))
            }
            Err(TryLockError::WouldBlock) => Err(Failure::error(
                EXIT_USAGE,
                format!(
                    "[already_supervised] `ds4 serve` (pid {}) already supervises {}; stop it with `ds4 ctl stop`, or choose \
                     another --runtime-dir",
                    read_pid(&mut file).map_or("unknown".into(), |pid| pid.to_string()),
                    dir.display()
                ),
            )),
            Err(TryLockError::Error(e)) => Err(e).with_context(|| format!("cannot lock {shown}")),
        }
    }

    /// False once somebody removed it from `dir`, or all of that: nobody finds this supervisor there then.
    pub fn intact(&self, dir: &Path) -> bool {
        leads_to(&dir.join(NAME), &self.0)
    }
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Pid of the supervisor of `dir`, if one is alive.
pub fn holder(dir: &Path) -> Option<u32> {
    let mut file = File::open(dir.join(NAME)).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => read_pid(&mut file),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_supervisor_is_refused_and_the_first_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(holder(dir.path()), None);
        let first = Lock::take(dir.path()).unwrap();
        let error = Lock::take(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        assert_eq!(holder(dir.path()), Some(std::process::id()));
        drop(first);
        assert_eq!(holder(dir.path()), None);
        Lock::take(dir.path()).unwrap();
    }
}
