//! Activations in device memory.

use std::ops::Range;
use std::sync::Arc;

use super::driver::{Context, CudaError, Memory, vmm::DevicePtr};
use super::fatal::OrFatal;
use super::room::{ALIGNMENT, CudaRoom};
use super::split::{Activations, ActsArg};
use crate::device::DeviceError;

/// Memory that grows: what was in it is lost when it does.
#[derive(Debug, Default)]
pub(super) struct Growable {
    /// Where it is from; from the driver without one.
    room: Option<CudaRoom>,
    held: Option<Held>,
}

#[derive(Clone, Debug)]
struct Held {
    start: DevicePtr,
    /// None of its own if it is lent.
    len: usize,
    /// When the room gave it, 0 for the driver's.
    turn: u64,
    /// Keeps it there, if it is not of the own room.
    _memory: Option<Arc<Memory>>,
    room: Option<CudaRoom>,
}

impl Growable {
    /// Of a room.
    pub(super) fn of(room: &CudaRoom) -> Self {
        Self { room: Some(room.clone()), held: None }
    }

    /// The address of at least `len` bytes of its own.
    ///
    /// Growing frees the old memory, which waits for the device: it happens in the first steps of their size only.
    ///
    /// # Panics
    /// With a [`DeviceError::OutOfMemory`] as the payload when the device has not got the memory: operations return nothing, and
    /// a step that cannot be computed is the end of its requests and not of the process.
    pub(super) fn at_least(&mut self, context: &Context, len: usize) -> DevicePtr {
        let (len, turn) = (len.max(1), self.room.as_ref().map_or(0, CudaRoom::current));
        if let Some(held) = self.held.as_ref().filter(|h| h.len >= len && h.turn == turn) {
            return held.start;
        }
        self.held = None;
        let new = match &self.room {
            Some(room) => room.place(len).map(|start| (start, None)),
            None => Memory::new(context, len).map(|m| (m.start(), Some(Arc::new(m)))),
        };
        let (start, memory) = match new {
            Err(CudaError::OutOfMemory { .. }) => {
                // No hook shall print a backtrace: whoever runs the step expects this.
                std::panic::resume_unwind(Box::new(DeviceError::OutOfMemory { what: "activations", missing: len }))
            }
            other => other.or_fatal("activations"),
        };
        self.held.insert(Held { start, len, turn, _memory: memory, room: None }).start
    }

    /// Addresses of pieces of so many bytes, one after the other.
    pub(super) fn pieces<const N: usize>(&mut self, context: &Context, lens: [usize; N]) -> [DevicePtr; N] {
        let starts = lens.map(|len| len.next_multiple_of(ALIGNMENT));
        let mut at = self.at_least(context, starts.iter().sum());
        starts.map(|len| {
            at += len as u64;
            at - len as u64
        })
    }

    /// The address; 0 before the first use.
    pub(super) fn start(&self) -> DevicePtr {
        self.held.as_ref().map_or(0, |h| h.start)
    }

    /// Takes the memory of `other` from `offset` on instead of its own. It lives as long as somebody has it.
    pub(super) fn borrow(&mut self, other: &Self, offset: usize) {
        self.held = other.held.as_ref().map(|h| {
            let room = h.room.as_ref().or(other.room.as_ref()).cloned();
            Held { start: h.start + offset as u64, len: 0, room, ..h.clone() }
        });
    }

    /// The `len` bytes from `offset` on, to be written.
    fn part(&self, offset: usize, len: usize) -> Self {
        let mut part = Self { room: self.room.clone(), held: None };
        part.borrow(self, offset);
        if let Some(held) = &mut part.held {
            held.len = len;
        }
        part
    }
}

/// What kernels made of a buffer's content beside it, so that the next operation need not begin with it. It holds until the
/// buffer is written again.
#[derive(Debug, Default)]
struct Made {
    /// Split for products, in some order of their types'.
    split: Option<(i32, ActsArg)>,
    /// Partial products with the mixer at this address, and sums of squares.
    mixed: Option<DevicePtr>,
    /// Mixing weights whose rounds are still to be done, by which launch.
    begun: Option<u64>,
}

/// f32 activations `[rows, width]` in device memory.
#[derive(Debug)]
pub struct CudaBuffer {
    memory: Growable,
    context: Context,
    width: usize,
    rows: usize,
    made: Made,
    split: Activations,
    partial: Growable,
}

impl CudaBuffer {
    /// A buffer with no rows yet, of a room or of memory of its own.
    pub(super) fn new(context: &Context, room: Option<&CudaRoom>, width: usize) -> Self {
        let memory = || room.map_or_else(Growable::default, Growable::of);
        Self {
            memory: memory(),
            context: context.clone(),
            width,
            rows: 0,
            made: Made::default(),
            split: Activations::of(memory()),
            partial: memory(),
        }
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
        self.made = Made::default();
    }

    /// Makes it the rows `rows` of `x`, in the same memory, until it is resized.
    pub(super) fn borrow_rows(&mut self, x: &Self, rows: Range<usize>) {
        assert!(rows.end <= x.rows && self.width == x.width, "rows {rows:?} of {}, {} wide", x.rows, x.width);
        self.memory.borrow(&x.memory, rows.start * x.width * 4);
        self.split.borrow(&x.split);
        self.made = Made {
            split: x.made.split.map(|(order, acts)| (order, acts.after_rows(rows.start, x.width))),
            ..Made::default()
        };
        self.rows = rows.len();
    }

    /// Its rows `rows`, for an operation that writes as many.
    pub(super) fn rows_mut(&mut self, rows: Range<usize>) -> Self {
        assert!(rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        self.made = Made::default();
        let row = self.width * 4;
        // As much as is asked for of few rows; none of it is written.
        let memory = self.memory.part(rows.start * row, rows.len().max(16) * row);
        Self { memory, rows: rows.len(), ..Self::new(&self.context, None, self.width) }
    }

    /// Address of element (0, 0).
    pub fn start(&self) -> DevicePtr {
        self.memory.start()
    }

    /// Address of element (0, 0), for an operation that changes the content in place: what was made of it before is forgotten. Every
    /// such operation takes the address from here.
    pub(super) fn changed(&mut self) -> DevicePtr {
        self.made = Made::default();
        self.start()
    }

    /// The rows split for products, in an order of `split::order`, if the kernel that wrote them did that too.
    pub(super) fn split(&self, order: i32) -> Option<ActsArg> {
        self.made.split.and_then(|(made, acts)| (made == order).then_some(acts))
    }

    /// Where the kernel that writes the rows (which exist already) splits them too.
    pub(super) fn split_here(&mut self, order: i32) -> ActsArg {
        let acts = self.split.at_least(&self.context, self.rows, self.width);
        self.made.split = Some((order, acts));
        acts
    }

    /// Says that these mixing weights are written by the launch of that number and want their rounds.
    pub(super) fn begun_by(&mut self, launch: u64) {
        self.made.begun = Some(launch);
    }

    /// The launch that wrote mixing weights whose rounds are still to be done.
    pub(super) fn begun(&self) -> Option<u64> {
        self.made.begun
    }

    /// Where the partial products with `mixer` are, if they were made.
    pub(super) fn mixed(&self, mixer: DevicePtr) -> Option<DevicePtr> {
        (self.made.mixed == Some(mixer)).then(|| self.partial.start())
    }

    /// Where a kernel puts `len` bytes of partial products with `mixer`.
    pub(super) fn mixed_here(&mut self, mixer: DevicePtr, len: usize) -> DevicePtr {
        self.made.mixed = Some(mixer);
        self.partial.at_least(&self.context, len)
    }
}
