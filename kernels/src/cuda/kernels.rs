//! The compiled kernels and their launches.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use super::driver::{Context, CudaError, Function, KernelArg, Module, Stream};
use super::fatal::OrFatal;

/// Fatbins want 16-byte alignment, which `include_bytes` alone does not give.
#[repr(C, align(16))]
pub(super) struct Aligned<T: ?Sized>(pub(super) T);

macro_rules! files {
    ($($variant:ident = $file:literal;)*) => {
        /// A file of kernels: `kernels/cuda/*.cu`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum File { $(
            #[doc = concat!("`", $file, ".cu`")]
            $variant,
        )* }

        impl File {
            const ALL: &'static [File] = &[$(File::$variant),*];

            fn image(self) -> &'static [u8] {
                match self { $(
                    File::$variant => {
                        static IMAGE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/", $file, ".fatbin")));
                        &IMAGE.0
                    }
                )* }
            }
        }
    };
}

files! {
    Attention = "attention";
    Compress = "compress";
    CompressRows = "compress_rows";
    Dense = "dense";
    Elementwise = "elementwise";
    Few = "few";
    Hyper = "hyper";
    IndexScores = "index_scores";
    IndexTop = "index_top";
    Indexer = "indexer";
    Matmul = "matmul";
    Moe = "moe";
    Narrow = "narrow";
    Quantized = "quantized";
    Sample = "sample";
    Qkv = "qkv";
    SparseAttention = "sparse_attention";
    SparseScores = "sparse_scores";
    SparseValues = "sparse_values";
    SparseValuesNarrow = "sparse_values_narrow";
    Split = "split";
    State = "state";
    Streams = "streams";
    Wide = "wide";
}

/// All modules, and the functions that were asked for so far.
#[derive(Debug)]
pub(super) struct Kernels {
    modules: Vec<Module>,
    functions: RwLock<HashMap<String, Function>>,
}

impl Kernels {
    /// Loads every module: a device that one of them does not run on is refused here and not in the middle of a request.
    pub(super) fn load(context: &Context) -> Result<Self, CudaError> {
        let modules = File::ALL.iter().map(|f| Module::load(context, f.image())).collect::<Result<_, _>>()?;
        Ok(Self { modules, functions: RwLock::default() })
    }

    fn function(&self, file: File, name: &str) -> Function {
        if let Some(f) = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(name) {
            return f.clone();
        }
        let function = self.modules[file as usize].function(name).or_fatal("kernel");
        self.functions.write().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), function.clone());
        function
    }

    /// Starts a kernel.
    ///
    /// Addresses among `args` must be of memory that lives until the kernel has run and is as large as the kernel's reference asks:
    /// all callers are in this module and take them from buffers, weights, banks and steps, whose memory is freed only after the
    /// device has been waited for.
    #[allow(clippy::too_many_arguments, reason = "a launch has this many parts")]
    pub(super) fn launch(
        &self,
        stream: &Stream,
        file: File,
        name: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared: usize,
        args: &[&dyn KernelArg],
    ) {
        let function = self.function(file, name);
        let shared = u32::try_from(shared).unwrap_or(u32::MAX);
        #[allow(unsafe_code, reason = "a kernel launch")]
        // SAFETY: said above.
        unsafe { stream.launch(&function, grid, block, shared, args) }.or_fatal(name);
    }
}

/// A size as kernels take it.
///
/// # Panics
/// When it is 2³¹ or more: no dimension of a tensor is.
pub(super) fn int(n: usize) -> i32 {
    i32::try_from(n).unwrap_or_else(|_| panic!("{n} is too large for a kernel's dimension"))
}

/// A size of memory, or a number of elements, as kernels take it.
///
/// # Panics
/// When it is 2⁶³ or more.
pub(super) fn long(n: usize) -> i64 {
    i64::try_from(n).unwrap_or_else(|_| panic!("{n} is too large for a kernel"))
}

/// A number of blocks or threads.
pub(super) fn dim(n: usize) -> u32 {
    u32::try_from(n).unwrap_or_else(|_| panic!("{n} is too large for a launch's dimension"))
}

/// Threads for a block that strides over `width` elements: whole warps, at most `most`.
pub(super) fn threads(width: usize, most: u32) -> u32 {
    dim(width.next_multiple_of(32)).clamp(32, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_kernels_is_an_aligned_fatbin() {
        // A fatbin begins with this number.
        for file in File::ALL {
            let image = file.image();
            assert_eq!(image.get(..4), Some(&[0x50, 0xed, 0x55, 0xba][..]), "{file:?}");
            assert_eq!(image.as_ptr().addr() % 16, 0, "{file:?}: alignment");
        }
    }

    #[test]
    fn a_machine_without_a_driver_or_that_device_says_so() {
        let error = crate::cuda::CudaDevice::open(9999).expect_err("there is no such device").to_string();
        assert!(error.contains("9999") || error.contains("driver"), "{error}");
    }
}
