//! One row of logits on its way to a decision.

use ds4_kernels::math::select::sanitise;
use ds4_kernels::ops::RowSummary;

/// A row: its summary, and the row itself, read from the device when something asks for it.
pub(crate) struct Row<'a> {
    /// Logits in it.
    pub width: usize,
    /// What the device said of it, if it was asked.
    pub summary: Option<&'a RowSummary>,
    read: &'a dyn Fn(&mut Vec<f32>),
    values: &'a mut Vec<f32>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    NotRead,
    Raw,
    Ordered,
}

impl<'a> Row<'a> {
    /// A row that `read` puts into `values`, which is scratch memory.
    pub fn new(
        width: usize,
        summary: Option<&'a RowSummary>,
        read: &'a dyn Fn(&mut Vec<f32>),
        values: &'a mut Vec<f32>,
    ) -> Self {
        Self { width, summary, read, values, state: State::NotRead }
    }

    /// As the model gave it; to be asked for before [`Row::whole`].
    pub fn raw(&mut self) -> &[f32] {
        if self.state == State::NotRead {
            (self.read)(self.values);
            self.state = State::Raw;
        }
        self.values
    }

    /// Fit to be ordered.
    pub fn whole(&mut self) -> &mut [f32] {
        self.raw();
        if self.state == State::Raw {
            sanitise(self.values);
            self.state = State::Ordered;
        }
        self.values
    }
}
