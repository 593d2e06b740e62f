//! Errors in the middle of a forward pass.
//!
//! Operations return nothing, because what they start fails later, if at all. Once a launch or a copy has failed, what is in device
//! memory is not to be trusted, and after most such errors the driver refuses every further call. So the process ends at once,
//! with the cause on standard error and exit code [`EXIT_CODE`]; a supervisor starts a worker with a new context, which the weights
//! survive. Nothing is cleaned up: destructors would call the driver that has just failed, and the kernel frees a dead process's
//! device memory.

use super::driver::CudaError;

/// Exit code of a process that lost its device.
pub const EXIT_CODE: i32 = 71;

/// Ends the process with what failed and what the driver said.
pub fn fatal(what: &str, error: &CudaError) -> ! {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "fatal: {what}: {error} [{}]", error.code());
    #[allow(unsafe_code, reason = "exit without destructors")]
    // SAFETY: ends the process; no preconditions.
    unsafe {
        libc::_exit(EXIT_CODE)
    }
}

/// The value, or the end of the process.
pub trait OrFatal<T> {
    /// The value, or the end of the process with `what` it was for.
    fn or_fatal(self, what: &str) -> T;
}

impl<T> OrFatal<T> for Result<T, CudaError> {
    fn or_fatal(self, what: &str) -> T {
        self.unwrap_or_else(|e| fatal(what, &e))
    }
}
