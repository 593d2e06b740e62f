//! Small numerical building blocks that several devices and their tests share.

pub mod lowp;
pub mod packed;
pub mod sinkhorn;
pub mod yarn;
