//! Small numerical building blocks that several devices and their tests share.

pub mod exp;
pub mod lowp;
pub mod packed;
pub mod select;
pub mod sinkhorn;
pub mod yarn;
