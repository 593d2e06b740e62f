//! The one room for operating-system work that needs `unsafe`: mappings, memfds, descriptor passing, and what the
//! machine says about memory and this process.

// They panic where nobody can read them: `ds4_os::say!` and `ds4_os::show!` do not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod activation;
pub mod mapping;
pub mod memfd;
pub mod memory;
pub mod parent;
pub mod say;
pub mod seqpacket;
pub mod shared;
pub mod stats;
pub mod wait;

pub use mapping::Mapping;
pub use shared::SharedBytes;
