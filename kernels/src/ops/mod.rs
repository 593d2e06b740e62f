//! Op sets beyond the dense transformer core of [`Device`](crate::device::Device), one trait per mechanism, so that a family
//! names what it needs and a device can grow one mechanism at a time. Row invariance holds for all of them.

mod hyper;
mod moe;
mod sample;
mod sparse;

pub use hyper::{HyperOps, HyperParams, HyperWeights};
pub use moe::{Experts, MoeOps, RouteBy, RouterParams, SharedExpert};
pub use sample::{Drawn, MAX_BEST, RowQuery, RowSummary, SUM_ERROR, summarise_row};
pub use sparse::{Compressor, Indexer, KvNumerics, Operands, SparseAttention, SparseOps};
