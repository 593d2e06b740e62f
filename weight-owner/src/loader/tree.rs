//! BLAKE3 of one input, hashed in pieces by several threads.
//!
//! BLAKE3 is a binary tree over 1 KiB leaves in which every left side is the largest power of two of leaves that leaves
//! something for the right (BLAKE3 paper, section 2.1). So aligned pieces of a power-of-two length are whole subtrees,
//! and a chunk of 1 GiB needs not one thread for a third of a second but sixteen for a fiftieth.

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root};

/// Bytes of a piece: a power of two, large enough that its reads are sequential.
pub const PIECE: u64 = 64 << 20;

/// Number of pieces of an input of `len` bytes; at least 1.
pub fn pieces(len: u64) -> u64 {
    len.div_ceil(PIECE).max(1)
}

/// A hasher for piece `index` of an input of `len` bytes.
pub fn hasher(len: u64, index: u64) -> Hasher {
    let mut hasher = Hasher::new();
    if pieces(len) > 1 {
        hasher.set_input_offset(index * PIECE);
    }
    hasher
}

/// The value of a piece that was hashed whole, for [`root`].
pub fn finish(len: u64, hasher: &Hasher) -> ChainingValue {
    if pieces(len) > 1 { hasher.finalize_non_root() } else { *hasher.finalize().as_bytes() }
}

/// The hash of the input of `len` bytes whose [`pieces`] have these values.
pub fn root(len: u64, values: &[ChainingValue]) -> [u8; 32] {
    match values {
        [] => *Hasher::new().finalize().as_bytes(),
        [only] => *only,
        _ => {
            let (left, right) = sides(len, values);
            *merge_subtrees_root(&left, &right, Mode::Hash).as_bytes()
        }
    }
}

fn sides(len: u64, values: &[ChainingValue]) -> (ChainingValue, ChainingValue) {
    let left_len = left_subtree_len(len);
    let split = usize::try_from(left_len / PIECE).unwrap_or(usize::MAX).min(values.len());
    let (left, right) = values.split_at(split);
    (subtree(left_len, left), subtree(len - left_len, right))
}

fn subtree(len: u64, values: &[ChainingValue]) -> ChainingValue {
    match values {
        [] => [0; 32],
        [only] => *only,
        _ => {
            let (left, right) = sides(len, values);
            merge_subtrees_non_root(&left, &right, Mode::Hash)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths around every shape of the tree; the crate's own one-piece hash is the oracle.
    #[test]
    fn pieces_hash_to_what_the_whole_hashes_to() {
        let piece = usize::try_from(PIECE).unwrap();
        let bytes: Vec<u8> = (0..5 * piece + 1).map(|i| u8::try_from((i / 251 * 7 + i) % 256).unwrap()).collect();
        for len in [0, 1, 1024, piece - 1, piece, piece + 1, 2 * piece, 3 * piece + 5000, 4 * piece, 5 * piece + 1] {
            let input = &bytes[..len];
            let values: Vec<ChainingValue> = (0..pieces(len as u64))
                .map(|k| {
                    let from = usize::try_from(k).unwrap() * piece;
                    let mut hasher = hasher(len as u64, k);
                    hasher.update(&input[from..len.min(from + piece)]);
                    finish(len as u64, &hasher)
                })
                .collect();
            assert_eq!(root(len as u64, &values), *blake3::hash(input).as_bytes(), "{len} bytes");
        }
    }
}
