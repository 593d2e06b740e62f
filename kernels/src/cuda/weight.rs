//! Weights in device memory: copies that this process made, or what an owner has put there and this process may only read.

use std::sync::Arc;

use ds4_manifests::GgmlType;

use super::device::CudaDevice;
use super::driver::KernelArg;
use super::driver::{CudaError, Memory, Space, vmm::DevicePtr};
use super::kernels::{File, dim, int};
use super::quantized::{SUPERBLOCK, TiledArg};
use super::step::StepArg;
use crate::device::{DeviceError, DeviceTensor, TensorSource};
use crate::{quant, tiles};

/// Largest tensor of another type than F32 that also gets an f32 copy, in elements: norms, biases, scales and position tables, which
/// kernels read as f32. 65,536 elements of position table are the largest in the shapes that exist.
const SMALL: usize = 1 << 17;

/// Where a weight's bytes lie.
enum Bytes {
    Own(Memory),
    /// In a mapping that somebody else made.
    Shared(DevicePtr, #[allow(dead_code, reason = "held, not read")] Arc<dyn Send + Sync>),
}

impl Bytes {
    fn start(&self) -> DevicePtr {
        match self {
            Self::Own(memory) => memory.start(),
            Self::Shared(start, _) => *start,
        }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:#x}", if matches!(self, Self::Own(_)) { "own" } else { "shared" }, self.start())
    }
}

/// A bound weight.
#[derive(Debug)]
pub struct CudaWeight {
    pub(super) name: String,
    pub(super) ty: GgmlType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_bytes: usize,
    bytes: Bytes,
    /// Where the parts of the tiles lie; `None` for blocks as in the file.
    tiles: Option<TiledArg>,
    floats: Option<Memory>,
}

impl CudaWeight {
    /// Address of the first row, in the type's blocks.
    pub(super) fn start(&self) -> DevicePtr {
        assert!(self.tiles.is_none(), "{}: its blocks were made into tiles", self.name);
        self.bytes.start()
    }

    /// Whether it lies in tiles.
    pub(super) fn is_tiled(&self) -> bool {
        self.tiles.is_some()
    }

    /// Its tiles.
    pub(super) fn tiles(&self) -> TiledArg {
        match self.tiles {
            Some(tiles) => tiles,
            None => panic!("{}: no tiles", self.name),
        }
    }

    /// All elements as f32, of tensors that are F32 or small.
    pub(super) fn floats(&self) -> DevicePtr {
        match &self.floats {
            Some(m) => m.start(),
            None => {
                assert_eq!(self.ty, GgmlType::F32, "{}: too large for an f32 copy", self.name);
                self.bytes.start()
            }
        }
    }

    /// The f32 values of a vector.
    pub(super) fn vector(&self) -> DevicePtr {
        assert_eq!(self.rows, 1, "{}: a vector", self.name);
        self.floats()
    }
}

/// A driver's answer to an allocation or a copy, as an answer about `name`.
fn refusal(name: &str, e: &CudaError) -> DeviceError {
    match e {
        CudaError::OutOfMemory { bytes, .. } => {
            DeviceError::OutOfMemory { what: "weights", missing: usize::try_from(*bytes).unwrap_or(usize::MAX) }
        }
        other => DeviceError::Weight { name: name.to_owned(), reason: other.to_string() },
    }
}

/// Where the parts of the tiles of a tensor at `start` lie; `None` for types and shapes that have no tiles.
fn tiles_at(ty: GgmlType, rows: usize, cols: usize, start: DevicePtr) -> Option<TiledArg> {
    let parts = tiles::parts(ty).filter(|_| tiles::is_tiled(ty, rows, cols))?;
    let each = parts.map(|b| (b * rows * (cols / SUPERBLOCK)) as u64);
    let side = start + each[0];
    Some(TiledArg { qs: start, side, side2: side + each[1] })
}

/// Starts rearranging the blocks at `from` into `tiles`.
fn repack(device: &CudaDevice, ty: GgmlType, rows: usize, cols: usize, from: DevicePtr, tiles: &TiledArg) {
    let superblocks = cols / SUPERBLOCK;
    let threads = rows * superblocks * 4;
    let args = (from, i64::from(int(rows)), int(superblocks));
    let all: [&dyn KernelArg; 6] = [&args.0, &args.1, &args.2, &tiles.qs, &tiles.side, &tiles.side2];
    device.launch(File::Quantized, &format!("repack_{ty}"), [dim(threads.div_ceil(256)), 1, 1], [256, 1, 1], 0, &all);
}

/// A matrix of blocks as in a file, in a space.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Element type.
    pub ty: GgmlType,
    /// Rows, those of stacked matrices together.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Where its first byte is in the space.
    pub offset: u64,
}

impl Placed {
    /// Bytes of a matrix that has tiles, 0 of others.
    pub fn tiled_bytes(&self) -> usize {
        let parts = tiles::parts(self.ty).filter(|_| tiles::is_tiled(self.ty, self.rows, self.cols));
        parts.map_or(0, |p| p.iter().sum::<usize>() * self.rows * (self.cols / SUPERBLOCK))
    }
}

impl CudaDevice {
    /// Starts rearranging matrices from blocks into tiles, each in its place, in this device's stream; those that have no tiles stay as
    /// they are. The space must be mapped for writing, and nobody else uses the matrices before that is done; `scratch`, which
    /// nobody else uses either, has as many bytes as the largest of them ([`Placed::tiled_bytes`]).
    ///
    /// # Errors
    /// A matrix leaves the space or is larger than `scratch`, or the device failed.
    pub fn tile_in_place(&self, space: &Space, scratch: &Memory, matrices: &[Placed]) -> Result<(), CudaError> {
        for m in matrices {
            let len = m.tiled_bytes();
            let address = space.address(m.offset, len as u64)?;
            if len > scratch.len() {
                return Err(CudaError::Range(format!("{m:?} is larger than {} bytes", scratch.len())));
            }
            let Some(tiles) = tiles_at(m.ty, m.rows, m.cols, address) else { continue };
            #[allow(unsafe_code, reason = "a copy on the device")]
            // SAFETY: both are `len` bytes or more; the matrix is the caller's alone.
            unsafe { self.stream().copy(scratch.start(), address, len) }?;
            repack(self, m.ty, m.rows, m.cols, scratch.start(), &tiles);
        }
        Ok(())
    }
}

/// What a device refuses whatever memory a tensor is in; returns the bytes of a row.
fn check(name: &str, ty: GgmlType, rows: usize, cols: usize, len: u64) -> Result<usize, DeviceError> {
    let refuse = |reason: String| DeviceError::Weight { name: name.to_owned(), reason };
    if !quant::is_supported(ty) && ty != GgmlType::I32 {
        return Err(refuse(format!("type {ty} has no CUDA kernel; convert the model to a supported type")));
    }
    let row_bytes = u64::try_from(cols).ok().and_then(|n| ty.row_bytes(n)).filter(|_| cols > 0);
    let Some(row_bytes) = row_bytes else {
        return Err(refuse(format!("rows of {cols} are not whole {ty} blocks of {}", ty.block_elems())));
    };
    if row_bytes.checked_mul(rows as u64) != Some(len) {
        return Err(refuse(format!("{len} bytes for {rows} rows of {row_bytes} bytes")));
    }
    usize::try_from(row_bytes).map_err(|_| refuse(format!("rows of {row_bytes} bytes")))
}

fn copy(device: &CudaDevice, name: &str, bytes: &[u8]) -> Result<Memory, DeviceError> {
    let memory = Memory::new(device.context(), bytes.len()).map_err(|e| refusal(name, &e))?;
    #[allow(unsafe_code, reason = "a copy to the device")]
    // SAFETY: new memory of that size.
    unsafe { device.stream().upload(memory.start(), bytes) }.map_err(|e| refusal(name, &e))?;
    Ok(memory)
}

/// Whether it gets an f32 copy.
fn is_small(ty: GgmlType, elems: usize) -> bool {
    elems <= SMALL && ty != GgmlType::F32 && ty != GgmlType::I32
}

fn f32_copy(device: &CudaDevice, name: &str, ty: GgmlType, elems: usize, bytes: &[u8]) -> Result<Memory, DeviceError> {
    let mut values = vec![0.0; elems];
    quant::dequantize_row(ty, bytes, &mut values);
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    copy(device, name, &bytes)
}

/// As [`f32_copy`], of a tensor in tiles: the kernel that embeds tokens, given all of them.
fn f32_of_tiles(
    device: &CudaDevice,
    name: &str,
    ty: GgmlType,
    rows: usize,
    cols: usize,
    tiles: &TiledArg,
) -> Result<Memory, DeviceError> {
    let ids: Vec<u8> = (0..int(rows)).flat_map(i32::to_le_bytes).collect();
    let ids = copy(device, name, &ids)?;
    let out = Memory::new(device.context(), rows * cols * 4).map_err(|e| refusal(name, &e))?;
    let args = (StepArg::of_tokens(ids.start()), int(cols), out.start());
    let all: [&dyn KernelArg; 4] = [&args.0, tiles, &args.1, &args.2];
    device.launch(File::Quantized, &format!("embed_tiled_{ty}"), [dim(rows), 1, 1], [256, 1, 1], 0, &all);
    // Weights are read before the kernel before has ended: they must be there.
    device.synchronize().map_err(|e| refusal(name, &e))?;
    Ok(out)
}

/// Copies `source` to the device, into tiles where it has them.
pub(super) fn bind(device: &CudaDevice, source: &TensorSource) -> Result<CudaWeight, DeviceError> {
    let TensorSource { name, ty, cols, rows, bytes } = source;
    let (ty, rows, cols) = (*ty, *rows, *cols);
    let row_bytes = check(name, ty, rows, cols, bytes.len() as u64)?;
    let floats = is_small(ty, rows * cols).then(|| f32_copy(device, name, ty, rows * cols, bytes)).transpose()?;
    let mut own = copy(device, name, bytes)?;
    let mut tiles = None;
    if tiles_at(ty, rows, cols, 0).is_some() {
        let blocks = own;
        own = Memory::new(device.context(), bytes.len()).map_err(|e| refusal(name, &e))?;
        tiles = tiles_at(ty, rows, cols, own.start());
        tiles.iter().for_each(|tiles| repack(device, ty, rows, cols, blocks.start(), tiles));
        // Products fetch weights before the kernel before them has ended.
        device.synchronize().map_err(|e| refusal(name, &e))?;
    }
    Ok(CudaWeight { name: name.clone(), ty, rows, cols, row_bytes, bytes: Bytes::Own(own), tiles, floats })
}

/// Binds `source` where it lies. Small tensors of other types than F32 get an f32 copy, as in [`bind`].
pub(super) fn bind_device(device: &CudaDevice, source: &DeviceTensor) -> Result<CudaWeight, DeviceError> {
    let DeviceTensor { name, ty, cols, rows, address, len, tiled, keep } = source;
    let (ty, rows, cols) = (*ty, *rows, *cols);
    let row_bytes = check(name, ty, rows, cols, *len)?;
    let tiles = tiles_at(ty, rows, cols, *address).filter(|_| *tiled);
    let mut floats = None;
    if is_small(ty, rows * cols) {
        floats = Some(match &tiles {
            Some(tiles) => f32_of_tiles(device, name, ty, rows, cols, tiles)?,
            None => {
                let mut bytes = vec![0; row_bytes * rows];
                #[allow(unsafe_code, reason = "a copy from the device")]
                // SAFETY: as many bytes are mapped there, which `keep` keeps.
                unsafe { device.stream().download(*address, &mut bytes) }.map_err(|e| refusal(name, &e))?;
                f32_copy(device, name, ty, rows * cols, &bytes)?
            }
        });
    }
    let bytes = Bytes::Shared(*address, Arc::clone(keep));
    Ok(CudaWeight { name: name.clone(), ty, rows, cols, row_bytes, bytes, tiles, floats })
}
