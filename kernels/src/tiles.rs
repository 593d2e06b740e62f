//! Tiles of quantised matrices, as CUDA kernels take them, back into the blocks of a GGUF file: for checks of what lies in a device's
//! memory. The way there is a kernel (`pack` in `cuda/tiled.cuh`), of which this is the inverse.
//!
//! A matrix of whole tiles (16 rows by 256 columns, row after row of tiles) is three arrays, `qs`, `side` and `side2`, that together
//! have the bytes of its blocks. For each tile, `qs` has `[chunk][rows 0–7 or 8–15][lane][16 bytes]`, where lane `4 g + t` is quarter
//! `t` of row `g` (or `g + 8`); `side` and `side2` have the scales of each row.

use ds4_manifests::GgmlType;

/// Rows and columns of a tile.
pub const TILE: [usize; 2] = [16, 256];
/// Bytes of the longest row of a tile (Q8_0).
const MAX_ROW: usize = 272;

/// Bytes of one row of a tile in `qs`, `side` and `side2`; `None` for types without tiles.
pub fn parts(ty: GgmlType) -> Option<[usize; 3]> {
    match ty {
        GgmlType::Q8_0 => Some([256, 16, 0]),
        GgmlType::Q2_K => Some([64, 16, 4]),
        GgmlType::Q4_K => Some([128, 16, 0]),
        GgmlType::IQ2_XXS => Some([64, 0, 2]),
        _ => None,
    }
}

/// Whether a tensor of `rows` rows (those of stacked matrices together) has tiles.
pub fn is_tiled(ty: GgmlType, rows: usize, cols: usize) -> bool {
    parts(ty).is_some() && rows > 1 && rows.is_multiple_of(TILE[0]) && cols.is_multiple_of(TILE[1])
}

/// The blocks of the matrix that `tiles` are.
///
/// # Panics
/// When it has no tiles, or `tiles` is not as long as its blocks.
pub fn untile(ty: GgmlType, rows: usize, cols: usize, tiles: &[u8]) -> Vec<u8> {
    let Some([qs, side, side2]) = parts(ty).filter(|_| is_tiled(ty, rows, cols)) else {
        panic!("{rows} rows of {cols} {ty} have no tiles")
    };
    let (superblocks, block) = (cols / TILE[1], qs + side + side2);
    let n = rows * superblocks;
    assert_eq!(tiles.len(), n * block, "bytes of {rows} rows of {cols} {ty}");
    let (all_qs, rest) = tiles.split_at(n * qs);
    let (all_side, all_side2) = rest.split_at(n * side);
    let mut out = vec![0; tiles.len()];
    for (item, to) in out.chunks_exact_mut(block).enumerate() {
        let (row, sb) = (item / superblocks, item % superblocks);
        let (tile, r) = (row / 16 * superblocks + sb, row % 16);
        let of_tile = &all_qs[tile * 16 * qs..][..16 * qs];
        // Chunk after chunk, in each the row's four lanes, which lie side by side.
        let mut q = [0; MAX_ROW];
        for (c, to) in q[..qs].chunks_exact_mut(64).enumerate() {
            to.copy_from_slice(&of_tile[((c * 2 + r / 8) * 32 + r % 8 * 4) * 16..][..64]);
        }
        let at = tile * 16 + r;
        unpack(ty, &q[..qs], &all_side[at * side..][..side], &all_side2[at * side2..][..side2], to);
    }
    out
}

/// One row of a tile: `q` is `[chunk][quarter][16]`.
fn unpack(ty: GgmlType, q: &[u8], side: &[u8], side2: &[u8], out: &mut [u8]) {
    let quarters = || q.chunks_exact(16).enumerate().map(|(k, lane)| (k / 4, k % 4, lane));
    match ty {
        GgmlType::Q8_0 => {
            for (c, t, lane) in quarters() {
                out[2 * c * 34 + 2 + 8 * t..][..8].copy_from_slice(&lane[..8]);
                out[(2 * c + 1) * 34 + 2 + 8 * t..][..8].copy_from_slice(&lane[8..]);
            }
            for (b, scale) in side.chunks_exact(2).enumerate() {
                out[b * 34..][..2].copy_from_slice(scale);
            }
        }
        GgmlType::Q2_K => {
            out[..16].copy_from_slice(side);
            out[16..80].copy_from_slice(q);
            out[80..].copy_from_slice(side2);
        }
        GgmlType::Q4_K => {
            out[..16].copy_from_slice(side);
            for (c, t, lane) in quarters() {
                out[16 + 64 * c + 8 * t..][..8].copy_from_slice(&lane[..8]);
                out[16 + 64 * c + 32 + 8 * t..][..8].copy_from_slice(&lane[8..]);
            }
        }
        _ => {
            out[..2].copy_from_slice(side2);
            for g in 0..8 {
                let (mut signs, to) = (0_u32, &mut out[2 + 8 * g..][..8]);
                for (t, lane) in q.chunks_exact(16).enumerate() {
                    to[t] = lane[2 * g];
                    let high = u32::from(lane[2 * g + 1]);
                    signs |= (high & 127) << (7 * t) | (high >> 7) << (28 + t);
                }
                to[4..].copy_from_slice(&signs.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPES: [GgmlType; 4] = [GgmlType::Q8_0, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::IQ2_XXS];

    #[test]
    fn a_tile_has_the_bytes_of_its_blocks() {
        for ty in TYPES {
            let bytes = parts(ty).unwrap().iter().sum::<usize>();
            assert_eq!(Some(bytes as u64), ty.row_bytes(256), "{ty}");
            assert!(bytes <= MAX_ROW);
        }
        assert!(is_tiled(GgmlType::Q8_0, 16, 256) && !is_tiled(GgmlType::Q8_0, 8, 256));
        assert!(!is_tiled(GgmlType::Q8_0, 16, 128) && !is_tiled(GgmlType::F16, 16, 256));
    }

    #[test]
    fn every_bit_of_a_tile_is_one_bit_of_a_block() {
        for ty in TYPES {
            let (rows, cols) = (16, 512);
            let bytes = parts(ty).unwrap().iter().sum::<usize>() * rows * 2;
            let mut seen = vec![0_u8; bytes];
            let mut tiles = vec![0; bytes];
            // Every 13th bit: all 8 bits of bytes, all bytes of lanes.
            for bit in (0..8 * bytes).step_by(13) {
                tiles[bit / 8] = 1 << (bit % 8);
                let blocks = untile(ty, rows, cols, &tiles);
                tiles[bit / 8] = 0;
                let set: Vec<usize> = (0..bytes).filter(|i| blocks[*i] != 0).collect();
                assert!(set.len() == 1 && blocks[set[0]].count_ones() == 1, "{ty} bit {bit}");
                assert_eq!(seen[set[0]] & blocks[set[0]], 0, "{ty} bit {bit} falls on another");
                seen[set[0]] |= blocks[set[0]];
            }
        }
    }

    #[test]
    fn rows_of_q2_k_lie_where_the_kernels_look_for_them() {
        // Row 9 of the second superblock: rows 8-15, lanes 4 to 7, of the second tile.
        let mut tiles = vec![0; 16 * 2 * 84];
        tiles[1024 + 512 + 4 * 16] = 7;
        tiles[16 * 2 * 64 + (16 + 9) * 16] = 8;
        tiles[16 * 2 * 80 + (16 + 9) * 4] = 9;
        let blocks = untile(GgmlType::Q2_K, 16, 512, &tiles);
        let at = (9 * 2 + 1) * 84;
        assert_eq!([blocks[at + 16], blocks[at], blocks[at + 80]], [7, 8, 9]);
        assert_eq!(blocks.iter().filter(|b| **b != 0).count(), 3);
    }
}
