//! BLAKE3 of what lies in device memory, in pieces: `cuda/hash.cu`.

use super::driver::{Context, CudaError, Function, KernelArg, Memory, Module, Space, Stream};
use super::kernels::{Aligned, dim, int};

/// Not among the files of a [`CudaDevice`](super::CudaDevice): workers hash nothing.
static IMAGE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/hash.fatbin")));

/// Bytes of a leaf of the tree, and what the kernels make one value of: leaves or values.
const LEAF: u64 = 1024;
const FAN: u64 = 256;
/// Bytes of a value.
const VALUE: u64 = 32;
/// The flag of the topmost node of an input's tree.
const ROOT: u32 = 8;

/// Bytes of a piece, the last one of an input excepted.
pub const PIECE: u64 = FAN * FAN * LEAF;

/// A piece of an input.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Where its first byte is in the space; a multiple of 64. Memory up to the next multiple of 64 behind its last byte is mapped.
    pub offset: u64,
    /// Its bytes, [`PIECE`] at most.
    pub len: u64,
    /// Which piece of the input it is.
    pub index: u64,
    /// It is all of the input.
    pub whole: bool,
}

/// Values of pieces: the hash of one that is all of its input, else the chaining value of its subtree.
#[derive(Debug)]
pub struct Hashes {
    leaves: Function,
    parents: Function,
    /// All pieces' values, then room for those of each piece's groups of leaves.
    memory: Memory,
    count: usize,
}

impl Hashes {
    /// Room for `count` values: 8 KiB of device memory each.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or the kernels do not run on the device.
    pub fn new(context: &Context, count: usize) -> Result<Self, CudaError> {
        let module = Module::load(context, &IMAGE.0)?;
        let bytes = usize::try_from(VALUE * (1 + FAN)).unwrap_or(usize::MAX).saturating_mul(count);
        Ok(Self {
            leaves: module.function("hash_leaves")?,
            parents: module.function("hash_parents")?,
            memory: Memory::new(context, bytes)?,
            count,
        })
    }

    /// Starts computing value number `k` from what is in `space` when everything before this in `stream` has happened.
    ///
    /// # Errors
    /// There is no value of that number, the piece is longer than [`PIECE`], not aligned or leaves the space, or the launch failed.
    pub fn start(&self, stream: &Stream, space: &Space, k: usize, piece: Piece) -> Result<(), CudaError> {
        let Piece { offset, len, index, whole } = piece;
        if k >= self.count || len > PIECE || !offset.is_multiple_of(64) {
            let text = format!("hash {k} of {}: {len} bytes at {offset}", self.count);
            return Err(CudaError::Range(text));
        }
        let from = space.address(offset, len.next_multiple_of(64))?;
        let groups = usize::try_from(len.div_ceil(FAN * LEAF).max(1)).unwrap_or(usize::MAX);
        let values = self.memory.start() + VALUE * self.count as u64 + VALUE * FAN * k as u64;
        let out = self.memory.start() + VALUE * k as u64;
        let top = |alone: bool| if alone { ROOT } else { 0 };
        let len = i64::try_from(len).unwrap_or(i64::MAX);
        let leaves = (from, len, index * FAN * FAN, top(whole && groups == 1), values);
        let leaves: [&dyn KernelArg; 5] = [&leaves.0, &leaves.1, &leaves.2, &leaves.3, &leaves.4];
        let parents = (values, int(groups), top(whole), out);
        let parents: [&dyn KernelArg; 4] = [&parents.0, &parents.1, &parents.2, &parents.3];
        #[allow(unsafe_code, reason = "kernel launches")]
        // SAFETY: the kernels read the piece, whose range was checked and which the space keeps, and write the values of its groups
        // and its own one, for which there is room; `memory` is freed only after the device has been waited for.
        unsafe {
            stream.launch(&self.leaves, [dim(groups), 1, 1], [256, 1, 1], 0, &leaves)?;
            stream.launch(&self.parents, [1, 1, 1], [256, 1, 1], 0, &parents)
        }
    }

    /// All values. Every stream in which one was started has been waited for; those that never were are undefined.
    ///
    /// # Errors
    /// The device failed.
    pub fn values(&self, stream: &Stream) -> Result<Vec<[u8; 32]>, CudaError> {
        let mut bytes = vec![0; 32 * self.count];
        #[allow(unsafe_code, reason = "a copy from the device")]
        // SAFETY: the values are the first bytes of the memory.
        unsafe { stream.download(self.memory.start(), &mut bytes) }?;
        Ok(bytes.as_chunks::<32>().0.to_vec())
    }
}
