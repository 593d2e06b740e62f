//! The weight owner: a small daemon that holds the descriptors of loaded models and hands them to workers.
//!
//! The daemon ([`daemon`]) never maps the weights. Each load is done by a child process ([`loader`]) that reads, checks,
//! hashes and seals, sends the descriptors and exits. [`ledger`] knows which epochs exist in which state and who holds
//! leases; [`broker`] serves leases on a SOCK_SEQPACKET socket, [`control`] serves gRPC.

// They panic where nobody can read them: `ds4_os::say!` and `ds4_os::show!` do not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod broker;
pub mod control;
pub mod daemon;
pub mod drain;
pub mod failure;
pub mod ledger;
pub mod loader;
pub mod loads;
pub mod options;
pub mod report;
pub mod runtime_dir;

pub use failure::Failure;
