//! An allocation that is refused on purpose: what becomes of a process that runs out of memory, on a real device and without filling it.
//!
//! `DS4_CUDA_REFUSE=n` refuses the `n`-th allocation of the process (device memory, physical memory, address space and page-locked host
//! memory, counted together) as the driver would, and says so on standard error. For tests only; tests/gpu/run.sh goes through them all.

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
    let wanted = WANTED.get_or_init(|| std::env::var(VARIABLE).ok().and_then(|n| n.parse().ok()));
    let Some(wanted) = *wanted else { return Ok(()) };
    if COUNT.fetch_add(1, Ordering::Relaxed) + 1 == wanted {
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "{VARIABLE}={wanted}: {call} of {bytes} bytes is refused");
        return Err(CudaError::OutOfMemory { call, bytes });
    }
    Ok(())
}
