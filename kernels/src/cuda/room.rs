//! Memory in which buffers take turns.
//!
//! Addresses are reserved once and memory is mapped at their end as a turn needs more, so nothing moves while it grows; every turn begins at
//! the first address. A step's turns ask for the same sizes in the same order in every layer and in every step of as many rows, so their
//! launches have the same addresses, by which they are found again (see `driver/queue.rs`).
//!
//! A buffer that gets more rows in the same turn gets another place: what comes in parts begins with the largest.
//!
//! A kernel that writes before the kernel before it has ended (`after_previous` in common.cuh names them) must not be the first one of a turn
//! to write: what that kernel uses may be of the turn before. F16 products beside others are not, and routing has memory of its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Context, CudaError, Space, vmm};

/// Addresses of a room. Beyond them it is out of memory.
const LEN: u64 = 64 << 30;

/// Where pieces of a turn begin, as of memory from the driver.
pub(super) const ALIGNMENT: usize = 256;

/// See the module.
#[derive(Clone, Debug)]
pub struct CudaRoom(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Number of the turn under way.
    turn: AtomicU64,
    given: Mutex<Given>,
    context: Context,
}

#[derive(Debug, Default)]
struct Given {
    space: Option<Space>,
    /// Bytes mapped.
    mapped: u64,
    /// Bytes that the turn has given away.
    end: u64,
}

impl CudaRoom {
    /// Without memory yet.
    pub(super) fn new(context: &Context) -> Self {
        Self(Arc::new(Shared { turn: AtomicU64::new(1), given: Mutex::default(), context: context.clone() }))
    }

    fn given(&self) -> MutexGuard<'_, Given> {
        self.0.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`crate::device::Device::turn`].
    pub(super) fn turn(&self) {
        self.given().end = 0;
        self.0.turn.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of the turn under way.
    pub(super) fn current(&self) -> u64 {
        self.0.turn.load(Ordering::Relaxed)
    }

    /// `len` bytes of the turn under way.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; nothing is given away.
    pub(super) fn place(&self, len: usize) -> Result<vmm::DevicePtr, CudaError> {
        let (mut given, context) = (self.given(), &self.0.context);
        let Given { space, mapped, end } = &mut *given;
        let space = match space {
            Some(space) => space,
            none => none.insert(Space::reserve(context, LEN)?),
        };
        let (at, next) = (*end, *end + len.next_multiple_of(ALIGNMENT) as u64);
        if next > *mapped {
            let more = (next - *mapped).next_multiple_of(vmm::granularity(context)?);
            if *mapped + more > LEN {
                return Err(CudaError::OutOfMemory { call: "a room", bytes: more });
            }
            space.fill(*mapped, more)?;
            *mapped += more;
        }
        *end = next;
        Ok(space.start() + at)
    }
}
