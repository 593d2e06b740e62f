//! Graphs: what was recorded of a stream, and instances of it.

use std::collections::HashMap;
use std::ffi::c_int;

use crate::streams::Op;
use crate::{INVALID_HANDLE, INVALID_VALUE, call, put};

#[derive(Default)]
pub struct Graphs {
    last: u64,
    graphs: HashMap<u64, Vec<Op>>,
    instances: HashMap<u64, Vec<Op>>,
}

impl Graphs {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: u64, _mode: c_int) -> c_int {
    call("cuStreamBeginCapture_v2", true, |state| state.streams.record_graph(stream))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: u64, graph: *mut u64) -> c_int {
    call("cuStreamEndCapture", true, |state| {
        let recorded = state.streams.recorded(stream)?;
        let id = state.graphs.next();
        state.graphs.graphs.insert(id, recorded);
        put(graph, id)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(to: *mut u64, graph: u64, flags: u64) -> c_int {
    call("cuGraphInstantiateWithFlags", true, |state| {
        let ops = state.graphs.graphs.get(&graph).cloned().ok_or(INVALID_HANDLE)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        state.say(ops.len());
        let id = state.graphs.next();
        state.graphs.instances.insert(id, ops);
        put(to, id)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: u64) -> c_int {
    call("cuGraphDestroy", true, |state| state.graphs.graphs.remove(&graph).map(drop).ok_or(INVALID_HANDLE))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(instance: u64) -> c_int {
    call("cuGraphExecDestroy", true, |state| {
        let ops = state.graphs.instances.remove(&instance).ok_or(INVALID_HANDLE)?;
        state.say(ops.len());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(instance: u64, stream: u64) -> c_int {
    call("cuGraphLaunch", true, |state| {
        let ops = state.graphs.instances.get(&instance).cloned().ok_or(INVALID_HANDLE)?;
        state.say(ops.len());
        ops.into_iter().try_for_each(|op| state.streams.push(stream, op))
    })
}
