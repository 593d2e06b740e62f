//! Wire contracts between ds4 processes: gRPC control (generated) and the broker socket's messages.

pub mod broker;

/// gRPC control contracts, package `ds4.v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("ds4.v1");

    /// Encoded descriptor set, for reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ds4_descriptor.bin"));
}
