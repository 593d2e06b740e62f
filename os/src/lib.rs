//! The one room for operating-system work that needs `unsafe`: mappings, memfds, descriptor passing, address reservations.

pub mod shared;

pub use shared::SharedBytes;
