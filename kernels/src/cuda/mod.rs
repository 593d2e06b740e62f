//! CUDA: the driver layer (feature `cuda-driver`, needs no nvcc) and, on top of it, the device and its kernels (feature
//! `cuda`).

pub mod driver;
