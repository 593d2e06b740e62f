//! The one room for operating-system work that needs `unsafe`: mappings, memfds, descriptor passing, and what the
//! machine says about memory and this process.

pub mod activation;
pub mod mapping;
pub mod memfd;
pub mod memory;
pub mod parent;
pub mod seqpacket;
pub mod shared;
pub mod stats;
pub mod wait;

pub use mapping::Mapping;
pub use shared::SharedBytes;
