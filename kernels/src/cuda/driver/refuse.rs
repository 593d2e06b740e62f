//! An allocation that is refused on purpose: what becomes of a process that runs out of memory, on a real device and without filling it.
//!
//! `DS4_CUDA_REFUSE=n` refuses the `n`-th allocation of the process (device memory, physical memory, address space and page-locked host
//! memory, counted together) as the driver would, and says so on standard error. For tests only; tests/gpu/run.sh goes through them all.

use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::CudaError;

/// Names the allocation that is refused.
pub const VARIABLE: &str = "DS4_CUDA_REFUSE";

/// Counts an allocation of `bytes` by `call`, which is about to be made.
///
/// # Errors
/// [`CudaError::OutOfMemory`] when it is the one.
pub(super) fn check(call: &'static str, bytes: u64) -> Result<(), CudaError> {
    static WANTED: OnceLock<Option<u64>> = OnceLock::new();
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let read = || {
        let value = std::env::var_os(VARIABLE)?;
        let wanted = wanted(&value.to_string_lossy());
        if wanted.is_none() {
            let _ =
                writeln!(std::io::stderr(), "{VARIABLE}={}: no number from 1 on, nothing is refused", value.display());
        }
        wanted
    };
    let Some(wanted) = *WANTED.get_or_init(read) else { return Ok(()) };
    if COUNT.fetch_add(1, Ordering::Relaxed) + 1 == wanted {
        let _ = writeln!(std::io::stderr(), "{VARIABLE}={wanted}: {call} of {bytes} bytes is refused");
        return Err(CudaError::OutOfMemory { call, bytes });
    }
    Ok(())
}

/// The number that `value` is, counted from 1.
fn wanted(value: &str) -> Option<u64> {
    value.parse().ok().filter(|n| *n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_from_1_on_name_an_allocation() {
        assert_eq!(["1", "35"].map(wanted), [Some(1), Some(35)]);
        for nonsense in ["", "0", "-1", "1.5", "1,2", "abc", "99999999999999999999"] {
            assert_eq!(wanted(nonsense), None, "{nonsense}");
        }
    }
}
