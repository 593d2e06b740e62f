//! What a device does itself with weights that have arrived there, in builds with kernels: it hashes each slab, so that the copies are
//! checked too, and arranges the tensors of each chunk as the kernels take them, while later ones are still on their way.

pub(super) use implementation::OnDevice;

#[cfg(feature = "cuda")]
mod implementation {
    use blake3::hazmat::ChainingValue;
    use ds4_kernels::cuda::driver::{Context, CudaError, Event, Memory, Space, Stream};
    use ds4_kernels::cuda::hash::{self, Hashes, Piece};
    use ds4_kernels::cuda::{CudaDevice, Placed};
    use ds4_manifests::{Layout, TensorEntry};

    use super::super::device::Slab;
    use super::super::tree;

    const _: () = assert!(hash::PIECE == tree::PIECE, "slabs are what the kernels hash at once");

    /// The kernels, and their memory.
    pub(in super::super) struct OnDevice {
        hashes: Hashes,
        /// One tensor, while it is arranged.
        scratch: Memory,
        device: CudaDevice,
    }

    impl OnDevice {
        /// Loads the kernels, and takes the memory that they need for a load of `slabs` slabs.
        pub fn open(context: &Context, layout: &Layout, slabs: usize) -> Result<Option<Self>, CudaError> {
            let device = CudaDevice::open(context.device().ordinal)?;
            let largest = layout.placed.iter().map(|t| placed(t, 0).tiled_bytes()).max().unwrap_or(0);
            Ok(Some(Self { hashes: Hashes::new(context, slabs)?, scratch: Memory::new(context, largest)?, device }))
        }

        /// Starts hashing slab number `k` after what is in `stream`; the event is the end of both.
        pub fn hash(&self, stream: &Stream, space: &Space, k: usize, slab: &Slab) -> Result<Event, CudaError> {
            let (offset, len) = (slab.chunk_offset + slab.begin(), slab.len());
            let piece = Piece { offset, len, index: slab.index, whole: tree::pieces(slab.chunk_len) == 1 };
            self.hashes.start(stream, space, k, piece)?;
            let done = Event::new(stream.context())?;
            done.record(stream)?;
            Ok(done)
        }

        /// Starts arranging the tensors of a chunk at `offset` of the space after all of `hashed`.
        pub fn arrange<'a>(
            &self,
            space: &Space,
            offset: u64,
            tensors: impl Iterator<Item = &'a TensorEntry>,
            hashed: &[Event],
        ) -> Result<(), CudaError> {
            hashed.iter().try_for_each(|event| self.device.stream().wait(event))?;
            let all: Vec<Placed> = tensors.map(|t| placed(t, offset)).collect();
            self.device.tile_in_place(space, &self.scratch, &all)
        }

        /// Waits until everything is arranged; the values of all slabs.
        pub fn finish(&self) -> Result<Vec<ChainingValue>, CudaError> {
            self.device.synchronize()?;
            self.hashes.values(self.device.stream())
        }
    }

    fn placed(t: &TensorEntry, chunk_offset: u64) -> Placed {
        let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let cols = size(t.shape.first().copied().unwrap_or(0));
        let rows = t.shape.iter().skip(1).fold(1, |n: usize, d| n.saturating_mul(size(*d)));
        Placed { ty: t.ty, rows, cols, offset: chunk_offset.saturating_add(t.offset) }
    }
}

#[cfg(not(feature = "cuda"))]
mod implementation {
    use blake3::hazmat::ChainingValue;
    use ds4_kernels::cuda::driver::{Context, CudaError, Event, Space, Stream};
    use ds4_manifests::{Layout, TensorEntry};

    use super::super::device::Slab;

    /// There is none: the CPU hashes, and tensors stay as they are in the file.
    pub(in super::super) enum OnDevice {}

    impl OnDevice {
        pub fn open(_: &Context, _: &Layout, _: usize) -> Result<Option<Self>, CudaError> {
            Ok(None)
        }

        pub fn hash(&self, _: &Stream, _: &Space, _: usize, _: &Slab) -> Result<Event, CudaError> {
            match *self {}
        }

        pub fn arrange<'a>(
            &self,
            _: &Space,
            _: u64,
            _: impl Iterator<Item = &'a TensorEntry>,
            _: &[Event],
        ) -> Result<(), CudaError> {
            match *self {}
        }

        pub fn finish(&self) -> Result<Vec<ChainingValue>, CudaError> {
            match *self {}
        }
    }
}
