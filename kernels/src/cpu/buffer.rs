//! Activations.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What buffers take turns in elsewhere (see [`Device::turn`](crate::device::Device::turn)). Here each has memory of its own, and what is
/// read of an earlier turn, which other devices have lost, is a panic.
#[derive(Clone, Debug, Default)]
pub struct CpuRoom(Arc<AtomicU64>);

impl CpuRoom {
    /// Begins a turn.
    pub(crate) fn turn(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn current(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// f32 activations `[rows, width]`.
#[derive(Clone, Debug, Default)]
pub struct CpuBuffer {
    data: Vec<f32>,
    pub(super) width: usize,
    pub(super) rows: usize,
    room: Option<CpuRoom>,
    /// In which turn of the room it got its rows.
    turn: u64,
}

impl CpuBuffer {
    /// A buffer with no rows yet.
    pub(crate) fn new(width: usize, room: Option<CpuRoom>) -> Self {
        Self { width, room, ..Self::default() }
    }

    fn current(&self) -> u64 {
        self.room.as_ref().map_or(0, CpuRoom::current)
    }

    fn elements(&self) -> usize {
        assert_eq!(self.turn, self.current(), "rows of an earlier turn");
        self.rows * self.width
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Row-major elements.
    pub fn data(&self) -> &[f32] {
        &self.data[..self.elements()]
    }

    /// Row-major elements.
    pub fn data_mut(&mut self) -> &mut [f32] {
        let n = self.elements();
        &mut self.data[..n]
    }

    /// Row `row`.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data()[row * self.width..(row + 1) * self.width]
    }

    /// Sets the number of rows; the content is unspecified afterwards. Memory is kept when it shrinks.
    pub fn resize(&mut self, rows: usize) {
        let n = rows * self.width;
        if self.data.len() < n {
            self.data.resize(n, 0.0);
        }
        (self.rows, self.turn) = (rows, self.current());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "rows of an earlier turn")]
    fn what_is_read_of_an_earlier_turn_is_a_panic() {
        let room = CpuRoom::default();
        let mut buffers = [0, 1].map(|_| CpuBuffer::new(2, Some(room.clone())));
        for _ in 0..2 {
            room.turn();
            buffers[0].resize(3);
            assert_eq!(buffers[0].data().len(), 6);
        }
        buffers[1].resize(3);
        room.turn();
        buffers[0].resize(1);
        assert_eq!(buffers[0].row(0), [0.0; 2]);
        buffers[1].data();
    }
}
