//! Weights in device memory.

use ds4_manifests::GgmlType;

use super::device::CudaDevice;
use super::driver::KernelArg;
use super::driver::{CudaError, Memory, vmm::DevicePtr};
use super::kernels::{File, dim, int};
use super::quantized::{SUPERBLOCK, TILE, TiledArg, tile_shape};
use crate::device::{DeviceError, TensorSource};
use crate::quant;

/// Largest tensor of another type than F32 that also gets an f32 copy, in elements: norms, biases, scales and position tables, which
/// kernels read as f32. 65,536 elements of position table are the largest in the shapes that exist.
const SMALL: usize = 1 << 17;

/// A bound weight.
#[derive(Debug)]
pub struct CudaWeight {
    pub(super) name: String,
    pub(super) ty: GgmlType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_bytes: usize,
    bytes: Memory,
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

/// Rearranges blocks into tiles, when the type and the shape have them.
fn tile(device: &CudaDevice, source: &TensorSource, blocks: Memory) -> Result<(Memory, Option<TiledArg>), DeviceError> {
    let Some(shape) = tile_shape(source.ty) else { return Ok((blocks, None)) };
    if source.rows == 1 || !source.rows.is_multiple_of(TILE) || !source.cols.is_multiple_of(SUPERBLOCK) {
        return Ok((blocks, None));
    }
    let superblocks = source.cols / SUPERBLOCK;
    let each = shape.bytes.map(|b| b * source.rows * superblocks);
    let memory = Memory::new(device.context(), each.iter().sum()).map_err(|e| refusal(&source.name, &e))?;
    let qs = memory.start();
    let side = qs + each[0] as u64;
    let tiles = TiledArg { qs, side, side2: side + each[1] as u64 };
    let threads = source.rows * superblocks * 4;
    let args = (blocks.start(), source.rows as i64, int(superblocks));
    let all: [&dyn KernelArg; 6] = [&args.0, &args.1, &args.2, &tiles.qs, &tiles.side, &tiles.side2];
    let name = format!("repack_{}", source.ty);
    device.launch(File::Quantized, &name, [dim(threads.div_ceil(256)), 1, 1], [256, 1, 1], 0, &all);
    Ok((memory, Some(tiles)))
}

/// Copies `source` to the device.
pub(super) fn bind(device: &CudaDevice, source: &TensorSource) -> Result<CudaWeight, DeviceError> {
    let refuse = |reason: String| DeviceError::Weight { name: source.name.clone(), reason };
    if !quant::is_supported(source.ty) && source.ty != GgmlType::I32 {
        return Err(refuse(format!("type {} has no CUDA kernel; convert the model to a supported type", source.ty)));
    }
    let row_bytes = u64::try_from(source.cols).ok().and_then(|n| source.ty.row_bytes(n));
    let Some(row_bytes) = row_bytes.and_then(|n| usize::try_from(n).ok()).filter(|_| source.cols > 0) else {
        let block = source.ty.block_elems();
        return Err(refuse(format!("rows of {} are not whole {} blocks of {block}", source.cols, source.ty)));
    };
    if row_bytes.checked_mul(source.rows) != Some(source.bytes.len()) {
        return Err(refuse(format!("{} bytes for {} rows of {row_bytes} bytes", source.bytes.len(), source.rows)));
    }
    let copy = |bytes: &[u8]| -> Result<Memory, DeviceError> {
        let memory = Memory::new(device.context(), bytes.len()).map_err(|e| refusal(&source.name, &e))?;
        #[allow(unsafe_code, reason = "a copy to the device")]
        // SAFETY: new memory of that size.
        unsafe { device.stream().upload(memory.start(), bytes) }.map_err(|e| refusal(&source.name, &e))?;
        Ok(memory)
    };
    let mut floats = None;
    let elems = source.rows * source.cols;
    if elems <= SMALL && source.ty != GgmlType::F32 && source.ty != GgmlType::I32 {
        let mut values = vec![0.0; elems];
        quant::dequantize_row(source.ty, &source.bytes, &mut values);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        floats = Some(copy(&bytes)?);
    }
    let (bytes, tiles) = tile(device, source, copy(&source.bytes)?)?;
    Ok(CudaWeight {
        name: source.name.clone(),
        ty: source.ty,
        rows: source.rows,
        cols: source.cols,
        row_bytes,
        bytes,
        tiles,
        floats,
    })
}
