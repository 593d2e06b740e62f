//! What few kernels do here: those that a load depends on, and the one that says which token is best. All others do nothing.

use blake3::Hasher;
use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};

use crate::memory::Memory;
use crate::{Code, ILLEGAL_ADDRESS, INVALID_VALUE};

/// Bytes of a group of leaves, and of a value.
const GROUP: usize = 256 << 10;
const VALUE: usize = 32;
/// What tensors are filled with instead of being arranged, to be told from those that are not.
const ARRANGED: u8 = 0x5a;
/// The best token of every row.
const BEST: u32 = 7;

/// A launch of such a kernel, with its arguments (`kernels/cuda/hash.cu`, `repack` in `quantized.cu`, `sample.cu`).
#[derive(Clone, Copy)]
pub enum Work {
    /// Values of the groups of `len` bytes from leaf `first` of an input on; `root` when they are all of it.
    Leaves { data: u64, len: usize, first: u64, root: bool, out: u64 },
    /// The value of the tree over `count` values.
    Parents { values: u64, count: usize, root: bool, out: u64 },
    /// A byte of each superblock stands for the whole tensor.
    Arrange { to: u64, len: usize },
    /// Of `rows` rows of logits, that they are all alike.
    Best { heads: u64, rows: u32 },
}

impl Work {
    /// The launch of `kernel` with these arguments, little-endian; none of kernels that do nothing.
    pub fn of(kernel: &str, grid: [u32; 3], args: &[Vec<u8>]) -> Result<Option<Self>, Code> {
        let arg = |i: usize| -> Result<u64, Code> {
            let bytes = args.get(i).filter(|a| a.len() <= 8).ok_or(INVALID_VALUE)?;
            Ok(bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
        };
        let size = |i: usize| usize::try_from(arg(i)?).map_err(|_| INVALID_VALUE);
        Ok(match kernel {
            "hash_leaves" => {
                Some(Self::Leaves { data: arg(0)?, len: size(1)?, first: arg(2)?, root: arg(3)? != 0, out: arg(4)? })
            }
            "hash_parents" => {
                Some(Self::Parents { values: arg(0)?, count: size(1)?, root: arg(2)? != 0, out: arg(3)? })
            }
            name if name.starts_with("repack_") => Some(Self::Arrange { to: arg(3)?, len: size(1)? * size(2)? }),
            "sample_best" => Some(Self::Best { heads: arg(5)?, rows: grid[1] }),
            _ => None,
        })
    }

    pub fn run(&self, memory: &Memory) -> Result<(), Code> {
        match *self {
            Self::Leaves { data, len, first, root, out } => {
                let bytes = memory.bytes(data, len)?;
                let groups = if len == 0 { vec![bytes] } else { bytes.chunks(GROUP).collect() };
                let alone = root && groups.len() == 1;
                let mut values = Vec::new();
                for (offset, group) in (first * 1024..).step_by(GROUP).zip(groups) {
                    let mut hasher = Hasher::new();
                    if offset > 0 {
                        hasher.set_input_offset(offset);
                    }
                    hasher.update(group);
                    values.extend(if alone { *hasher.finalize().as_bytes() } else { hasher.finalize_non_root() });
                }
                memory.write(out, &values)
            }
            Self::Parents { values, count, root, out } => {
                let values = memory.bytes(values, count * VALUE)?;
                memory.write(out, &tree(values.as_chunks::<VALUE>().0.to_vec(), root)?)
            }
            Self::Best { heads, rows } => {
                // Two sums and a margin that says that nothing was drawn; the best candidate (the key of 0, and the token's complement), the
                // drawn one, and eight bytes that nobody looks at.
                let sums = [0.0, 0.0, -1.0_f64].map(f64::to_bits);
                let best = u64::from(0x8000_0000_u32) << 32 | u64::from(!BEST);
                let head: Vec<u8> = sums.iter().chain(&[best, 0, 0]).flat_map(|w| w.to_le_bytes()).collect();
                memory.write(heads, &head.repeat(usize::try_from(rows).unwrap_or(0)))
            }
            Self::Arrange { to, len } => memory.write(to, &vec![ARRANGED; len]),
        }
    }
}

/// Pair by pair; the last of an odd number goes up alone.
fn tree(mut values: Vec<[u8; VALUE]>, root: bool) -> Result<[u8; VALUE], Code> {
    while values.len() > 1 {
        let top = root && values.len() == 2;
        let pair = |pair: &[[u8; VALUE]]| match pair {
            [left, right] if top => *merge_subtrees_root(left, right, Mode::Hash).as_bytes(),
            [left, right] => merge_subtrees_non_root(left, right, Mode::Hash),
            alone => alone[0],
        };
        values = values.chunks(2).map(pair).collect();
    }
    values.first().copied().ok_or(ILLEGAL_ADDRESS)
}
