//! CUDA: the driver layer (feature `cuda-driver`, needs no nvcc) and, on top of it, the device and its kernels (feature
//! `cuda`).

pub mod driver;
pub mod fatal;

#[cfg(feature = "cuda")]
mod bank;
#[cfg(feature = "cuda")]
mod buffer;
#[cfg(feature = "cuda")]
mod compress;
#[cfg(feature = "cuda")]
mod dense;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
pub mod hash;
#[cfg(feature = "cuda")]
mod host;
#[cfg(feature = "cuda")]
mod hyper;
#[cfg(feature = "cuda")]
mod indexer;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod moe;
#[cfg(feature = "cuda")]
mod narrow;
#[cfg(feature = "cuda")]
mod products;
#[cfg(feature = "cuda")]
mod qkv;
#[cfg(feature = "cuda")]
mod quantized;
#[cfg(feature = "cuda")]
mod room;
#[cfg(feature = "cuda")]
mod sample;
#[cfg(feature = "cuda")]
mod sparse;
#[cfg(feature = "cuda")]
mod sparse_attention;
#[cfg(feature = "cuda")]
mod sparse_tensor;
#[cfg(feature = "cuda")]
mod split;
#[cfg(feature = "cuda")]
mod step;
#[cfg(feature = "cuda")]
mod streams;
#[cfg(feature = "cuda")]
mod weight;
#[cfg(feature = "cuda")]
mod wide;

#[cfg(feature = "cuda")]
pub use bank::{CudaBank, CudaCheckpoint};
#[cfg(feature = "cuda")]
pub use buffer::CudaBuffer;
#[cfg(feature = "cuda")]
pub use device::CudaDevice;
#[cfg(feature = "cuda")]
pub use indexer::CudaSelection;
#[cfg(feature = "cuda")]
pub use moe::CudaRouting;
#[cfg(feature = "cuda")]
pub use sparse::CudaRope;
#[cfg(feature = "cuda")]
pub use step::CudaStep;
#[cfg(feature = "cuda")]
pub use weight::{CudaWeight, Placed};
