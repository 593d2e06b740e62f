//! Where a step's time goes, launch by launch, with the kernels as they are replayed: started early, weights fetched ahead.
//!
//! Profilers stop kernels from overlapping. Here the launches of a step are kept ([`Stream::keep`]) and parts of them are replayed as
//! graphs: what the first `n` take, less what the first `n - 1` take, is what launch `n` adds; what all take, less what all
//! but one take, is what would be gained if that one cost nothing.

use std::ffi::CStr;
use std::ptr::null;

use cudarc::driver::sys;

use super::error::check;
use super::queue::Work;
use super::{CudaError, Event, Graph, Stream};

/// Launches that were kept. What they use must live as long as they are replayed.
#[derive(Debug)]
pub struct Timeline(Work);

impl Stream {
    /// Keeps the launches of steps from here on. Only those that are held back are seen.
    pub fn keep(&self) {
        self.queue().keep(true);
    }

    /// What was kept since [`Stream::keep`].
    ///
    /// # Errors
    /// What a launch that was held back failed with.
    pub fn kept(&self) -> Result<Timeline, CudaError> {
        self.ready()?;
        Ok(Timeline(self.queue().keep(false).unwrap_or_default()))
    }
}

impl Timeline {
    /// Each launch's kernel and blocks, in order.
    pub fn names(&self) -> Vec<(String, [u32; 3])> {
        let name = |(function, grid)| {
            let mut name = null();
            // SAFETY: the pointer is valid for the call; the function is loaded.
            let rc = unsafe { sys::cuFuncGetName(&raw mut name, function) };
            if check("cuFuncGetName", rc).is_err() || name.is_null() {
                return ("?".to_owned(), grid);
            }
            // SAFETY: the driver's name of a loaded function, a string that lives as long as its module.
            (unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(), grid)
        };
        self.0.functions().map(|f| f.map_or(("copy".to_owned(), [0; 3]), name)).collect()
    }

    /// Median time of `rounds` replays of the launches whose numbers are wanted, in microseconds. What they compute is of no use.
    ///
    /// # Errors
    /// What a launch failed with.
    pub fn time(&self, stream: &Stream, rounds: usize, wanted: impl Fn(usize) -> bool) -> Result<f64, CudaError> {
        stream.ready()?;
        let issue = || self.0.issue_some(stream.raw(), stream.queue().is_early(), &wanted);
        let mut graph = Graph::record_in(stream.context(), stream.raw(), issue)?;
        let (start, end) = (Event::timed(stream.context())?, Event::timed(stream.context())?);
        let mut all = Vec::with_capacity(rounds);
        for _ in 0..rounds + 2 {
            start.record(stream)?;
            // SAFETY: kernels of a step use memory of the device alone; were it gone, the context would be lost and the host's memory as it is.
            unsafe { graph.launch_in(stream.raw()) }?;
            end.record(stream)?;
            stream.synchronize()?;
            all.push(f64::from(end.since_ms(&start)?) * 1e3);
        }
        all.drain(..2);
        all.sort_by(f64::total_cmp);
        Ok(all.get(rounds / 2).copied().unwrap_or_default())
    }
}
