//! State specs: what a family keeps per sequence. Bank allocation, commit, trim and accounting all derive from it.

/// Storage type of state rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateType {
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl StateType {
    /// Bytes per element.
    pub const fn bytes(self) -> usize {
        match self {
            StateType::F16 => 2,
            StateType::F32 => 4,
        }
    }
}

/// One piece of per-sequence state. Further kinds (rings, fixed blocks) come with the families that need them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// One row of `width` elements per token, truncatable.
    Append {
        /// Elements per row.
        width: usize,
        /// Storage type.
        ty: StateType,
    },
}

/// The ordered list of state pieces of one sequence; kernels name a piece by its index (a *slot*).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateSpec {
    /// Slots in order.
    pub slots: Vec<StateKind>,
}

impl StateSpec {
    /// Bytes of state that one more token costs.
    pub fn bytes_per_token(&self) -> usize {
        self.slots
            .iter()
            .map(|s| match s {
                StateKind::Append { width, ty } => width * ty.bytes(),
            })
            .sum()
    }
}
