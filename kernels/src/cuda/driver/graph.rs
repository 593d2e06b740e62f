//! Graphs: a recorded run of a stream that is replayed with one call.

use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUstreamCaptureMode_enum as Mode};

use super::error::check;
use super::{Context, CudaError, Stream};

/// An instantiated graph.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    context: Context,
}

// SAFETY: a handle that any thread with the context current may use; `launch` takes `&mut self`, as the driver asks for no
// concurrent launches of one graph.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` puts into `stream` instead of running it.
    ///
    /// # Errors
    /// What `work` failed with; or it did something that cannot be recorded (waiting for the device, allocating).
    pub fn record<E: From<CudaError>>(stream: &Stream, work: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        stream.ready()?;
        Self::record_in(stream.context(), stream.raw(), work)
    }

    /// As [`Graph::record`], in a stream by its handle, which is alive.
    pub(super) fn record_in<E: From<CudaError>>(
        context: &Context,
        stream: sys::CUstream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let context = context.clone();
        context.bind()?;
        // SAFETY: the stream lives. Only this thread's calls are recorded or refused.
        check("cuStreamBeginCapture_v2", unsafe {
            sys::cuStreamBeginCapture_v2(stream, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        })?;
        let done = work();
        let mut graph = null_mut();
        // SAFETY: the pointer is valid for the call. Ends the capture also after a failure, or the stream would stay in it.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) });
        let made = done.and_then(|()| {
            ended?;
            let mut raw = null_mut();
            // SAFETY: the pointer is valid for the call and the graph has just been made.
            check("cuGraphInstantiateWithFlags", unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, graph, 0) })?;
            Ok(Self { raw, context })
        });
        if !graph.is_null() {
            // SAFETY: made above, destroyed once; the instance has its own copy.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        made
    }

    /// Runs it in `stream`.
    ///
    /// # Safety
    /// All memory that the recorded work uses still exists.
    ///
    /// # Errors
    /// The context is lost.
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        stream.ready()?;
        // SAFETY: the caller's promise; the stream lives.
        unsafe { self.launch_in(stream.raw()) }
    }

    /// As [`Graph::launch`], in a stream by its handle.
    ///
    /// # Safety
    /// As for [`Graph::launch`], and the stream is alive.
    pub(super) unsafe fn launch_in(&mut self, stream: sys::CUstream) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: both live; the memory is the caller's promise.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.raw, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made once, destroyed once; the driver finishes a running one by itself.
            let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}
