//! State specs: what a family keeps per sequence. Bank allocation, commit, trim, checkpoints and accounting all derive from it.

use half::f16;

use crate::math::packed;

/// Storage type of state rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateType {
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// FP8 E4M3 with a power-of-two scale per 64 elements, and f16 for the trailing rotary part
    /// ([`crate::math::packed`]): rows that were rounded so already.
    Fp8 {
        /// Trailing elements in f16.
        rotary: usize,
    },
    /// FP4 E2M1 with a power-of-two scale per 32 elements: rows that were rounded so already.
    Fp4,
}

impl StateType {
    /// Bytes of a row of `width` elements.
    pub const fn row_bytes(self, width: usize) -> usize {
        match self {
            StateType::F16 => width * 2,
            StateType::F32 => width * 4,
            StateType::Fp8 { rotary } => packed::fp8_row_bytes(width, rotary),
            StateType::Fp4 => packed::fp4_row_bytes(width),
        }
    }

    /// Writes `row` into its storage bytes (little-endian), rounding to the type's precision.
    ///
    /// # Panics
    /// When `out` has not [`StateType::row_bytes`] bytes.
    pub fn encode(self, row: &[f32], out: &mut [u8]) {
        assert_eq!(out.len(), self.row_bytes(row.len()), "bytes of a state row");
        match self {
            StateType::F16 => {
                for (v, b) in row.iter().zip(out.as_chunks_mut().0) {
                    *b = f16::from_f32(*v).to_le_bytes();
                }
            }
            StateType::F32 => {
                for (v, b) in row.iter().zip(out.as_chunks_mut().0) {
                    *b = v.to_le_bytes();
                }
            }
            StateType::Fp8 { rotary } => packed::store_fp8(row, rotary, out),
            StateType::Fp4 => packed::store_fp4(row, out),
        }
    }

    /// Reads a row from its storage bytes.
    ///
    /// # Panics
    /// When `bytes` has not [`StateType::row_bytes`] bytes.
    pub fn decode(self, bytes: &[u8], row: &mut [f32]) {
        assert_eq!(bytes.len(), self.row_bytes(row.len()), "bytes of a state row");
        match self {
            StateType::F16 => {
                for (v, b) in row.iter_mut().zip(bytes.as_chunks().0) {
                    *v = f16::from_le_bytes(*b).to_f32();
                }
            }
            StateType::F32 => {
                for (v, b) in row.iter_mut().zip(bytes.as_chunks().0) {
                    *v = f32::from_le_bytes(*b);
                }
            }
            StateType::Fp8 { rotary } => packed::load_fp8(bytes, rotary, row),
            StateType::Fp4 => packed::load_fp4(bytes, row),
        }
    }
}

/// One piece of per-sequence state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// One row of `width` elements per token, truncatable.
    Append {
        /// Elements per row.
        width: usize,
        /// Storage type.
        ty: StateType,
    },
    /// One row of `width` elements per `tokens` tokens: compressed history.
    Pooled {
        /// Elements per row.
        width: usize,
        /// Storage type.
        ty: StateType,
        /// Tokens that one row stands for.
        tokens: usize,
    },
    /// The rows of the last `rows` tokens: a sliding window. Cannot be truncated, only rewound from a checkpoint.
    Ring {
        /// Rows kept.
        rows: usize,
        /// Elements per row.
        width: usize,
        /// Storage type.
        ty: StateType,
    },
    /// A block of f32 of fixed size: recurrent state, frontiers of open windows. Rewound from a checkpoint only.
    Fixed {
        /// Elements.
        elems: usize,
    },
}

impl StateKind {
    /// Elements per row; the whole block for [`StateKind::Fixed`].
    pub const fn width(self) -> usize {
        match self {
            StateKind::Append { width, .. } | StateKind::Pooled { width, .. } | StateKind::Ring { width, .. } => width,
            StateKind::Fixed { elems } => elems,
        }
    }

    /// Storage type.
    pub const fn ty(self) -> StateType {
        match self {
            StateKind::Append { ty, .. } | StateKind::Pooled { ty, .. } | StateKind::Ring { ty, .. } => ty,
            StateKind::Fixed { .. } => StateType::F32,
        }
    }

    /// Rows that exist once `tokens` tokens do.
    pub const fn rows(self, tokens: usize) -> usize {
        match self {
            StateKind::Append { .. } => tokens,
            StateKind::Pooled { tokens: each, .. } => tokens / each,
            StateKind::Ring { rows, .. } => {
                if tokens < rows {
                    tokens
                } else {
                    rows
                }
            }
            StateKind::Fixed { .. } => {
                if tokens == 0 {
                    0
                } else {
                    1
                }
            }
        }
    }

    /// Whether forgetting rows is not enough to go back: the piece must be in a checkpoint.
    pub const fn checkpointed(self) -> bool {
        matches!(self, StateKind::Ring { .. } | StateKind::Fixed { .. })
    }

    /// Bytes that `tokens` tokens need.
    pub const fn bytes(self, tokens: usize) -> Option<usize> {
        self.rows(tokens).checked_mul(self.ty().row_bytes(self.width()))
    }
}

/// The ordered list of state pieces of one sequence; kernels name a piece by its index (a *slot*).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateSpec {
    /// Slots in order.
    pub slots: Vec<StateKind>,
}

impl StateSpec {
    /// Bytes of state that one more token costs at depth (fixed parts excluded, pooled rows shared out).
    pub fn bytes_per_token(&self) -> usize {
        self.slots
            .iter()
            .map(|s| match *s {
                StateKind::Append { width, ty } => ty.row_bytes(width),
                StateKind::Pooled { width, ty, tokens } => ty.row_bytes(width).div_ceil(tokens),
                StateKind::Ring { .. } | StateKind::Fixed { .. } => 0,
            })
            .sum()
    }

    /// Bytes of state of a sequence of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> usize {
        self.slots.iter().map(|s| s.bytes(tokens).unwrap_or(usize::MAX)).fold(0, usize::saturating_add)
    }

    /// Bytes of a checkpoint at `tokens` tokens.
    pub fn checkpoint_bytes(&self, tokens: usize) -> usize {
        let pieces = self.slots.iter().filter(|s| s.checkpointed());
        pieces.map(|s| s.bytes(tokens).unwrap_or(usize::MAX)).fold(0, usize::saturating_add)
    }

    /// Whether a sequence can be cut back to any earlier length by forgetting rows.
    pub fn truncatable(&self) -> bool {
        self.slots.iter().all(|s| matches!(s, StateKind::Append { .. }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_bytes_of_each_kind() {
        let ty = StateType::F16;
        let spec = StateSpec {
            slots: vec![
                StateKind::Append { width: 8, ty },
                StateKind::Pooled { width: 8, ty, tokens: 4 },
                StateKind::Ring { rows: 16, width: 8, ty },
                StateKind::Fixed { elems: 10 },
            ],
        };
        let rows = |tokens| spec.slots.iter().map(|s| s.rows(tokens)).collect::<Vec<_>>();
        assert_eq!(rows(0), [0, 0, 0, 0]);
        assert_eq!(rows(3), [3, 0, 3, 1]);
        assert_eq!(rows(101), [101, 25, 16, 1]);
        assert_eq!(spec.bytes(101), 101 * 16 + 25 * 16 + 16 * 16 + 40);
        assert_eq!(spec.bytes_per_token(), 16 + 4);
        assert_eq!([0, 3, 101].map(|t| spec.checkpoint_bytes(t)), [0, 3 * 16 + 40, 16 * 16 + 40]);
        assert!(!spec.truncatable());
        assert!(StateSpec { slots: vec![StateKind::Append { width: 8, ty }] }.truncatable());
    }

    #[test]
    fn deepseek_v4_rows_survive_their_bytes() {
        let row: Vec<f32> = (0..64).map(|i: i16| f32::from(i - 20) / 4.0).collect();
        // Quarters up to 11 have at most 6 bits, so f16 holds them; the packed types are tested with their codecs.
        for ty in [StateType::F16, StateType::F32] {
            let (mut bytes, mut back) = (vec![0; ty.row_bytes(64)], vec![0.0; 64]);
            ty.encode(&row, &mut bytes);
            ty.decode(&bytes, &mut back);
            assert_eq!(back, row);
        }
        let ty = StateType::F16;
        let mut bytes = [0; 2];
        ty.encode(&[1.5], &mut bytes);
        assert_eq!(bytes, [0x00, 0x3e], "little-endian binary16");
    }
}
