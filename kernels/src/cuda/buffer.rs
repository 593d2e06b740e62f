//! Activations in device memory.

use super::driver::{Context, CudaError, Memory, vmm::DevicePtr};
use super::fatal::OrFatal;
use crate::device::DeviceError;

/// Memory that grows: what was in it is lost when it does.
#[derive(Debug, Default)]
pub(super) struct Growable {
    memory: Option<Memory>,
}

impl Growable {
    /// The address of at least `len` bytes.
    ///
    /// Growing frees the old memory, which waits for the device: it happens in the first steps of their size only.
    ///
    /// # Panics
    /// With a [`DeviceError::OutOfMemory`] as the payload when the device has not got the memory: operations return nothing, and
    /// a step that cannot be computed is the end of its requests and not of the process.
    pub(super) fn at_least(&mut self, context: &Context, len: usize) -> DevicePtr {
        match &self.memory {
            Some(m) if m.len() >= len => m.start(),
            _ => {
                self.memory = None;
                let new = match Memory::new(context, len) {
                    Err(CudaError::OutOfMemory { .. }) => {
                        // No hook shall print a backtrace: whoever runs the step expects this.
                        std::panic::resume_unwind(Box::new(DeviceError::OutOfMemory {
                            what: "activations",
                            missing: len,
                        }))
                    }
                    other => other.or_fatal("activations"),
                };
                self.memory.insert(new).start()
            }
        }
    }

    /// The address; 0 before the first use.
    pub(super) fn start(&self) -> DevicePtr {
        self.memory.as_ref().map_or(0, Memory::start)
    }
}

/// f32 activations `[rows, width]` in device memory.
#[derive(Debug)]
pub struct CudaBuffer {
    memory: Growable,
    context: Context,
    width: usize,
    rows: usize,
}

impl CudaBuffer {
    /// A buffer with no rows yet.
    pub(super) fn new(context: &Context, width: usize) -> Self {
        Self { memory: Growable::default(), context: context.clone(), width, rows: 0 }
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Sets the number of rows; the content is unspecified afterwards. Memory is kept when it shrinks.
    pub(super) fn resize(&mut self, rows: usize) {
        // 16 rows at once: the decode steps of a growing batch do not reallocate.
        self.memory.at_least(&self.context, rows.max(16) * self.width * 4);
        self.rows = rows;
    }

    /// Address of element (0, 0).
    pub fn start(&self) -> DevicePtr {
        self.memory.start()
    }
}
