//! Codebooks of the IQ types: format data, packed as the generator `tests/oracles/iq_grids.py` wrote it.
//!
//! An entry's elements are indices into a short value list, 2 bits each (four a byte, lowest bits first) or, where there are
//! eight values, 4 bits each. They are unpacked at compile time, so there is no start-up work and no lock.

/// Values of an IQ4_NL or IQ4_XS nibble.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// IQ2_XXS: 8 magnitudes per entry.
pub static IQ2_XXS: [[i8; 8]; 256] = unpack(include_bytes!("grids/iq2_xxs.bin"), &[8, 25, 43], 2);

/// IQ2_XS: 8 magnitudes per entry.
pub static IQ2_XS: [[i8; 8]; 512] = unpack(include_bytes!("grids/iq2_xs.bin"), &[8, 25, 43], 2);

/// IQ3_XXS: 4 magnitudes per entry.
pub static IQ3_XXS: [[i8; 4]; 256] = unpack(include_bytes!("grids/iq3_xxs.bin"), &[4, 12, 20, 28, 36, 44, 52, 62], 4);

/// IQ1_S and IQ1_M: 8 values in -1..=1 per entry, before the shift of ±1/8.
pub static IQ1: [[i8; 8]; 2048] = unpack(include_bytes!("grids/iq1.bin"), &[-1, 0, 1], 2);

/// Signs of eight elements from a 7-bit index: bit `j` set means that element `j` is negative. The eighth bit makes the
/// number of minus signs even.
#[inline]
pub const fn even_signs(index: u8) -> u8 {
    let index = index & 127;
    if index.count_ones() % 2 == 1 { index | 128 } else { index }
}

const fn unpack<const E: usize, const N: usize>(packed: &[u8], values: &[i8], bits: usize) -> [[i8; E]; N] {
    let per_byte = 8 / bits;
    assert!(packed.len() * per_byte == N * E);
    let mut grid = [[0; E]; N];
    let mut i = 0;
    while i < N * E {
        let index = (packed[i / per_byte] >> (bits * (i % per_byte))) & ((1 << bits) - 1);
        grid[i / E][i % E] = values[index as usize];
        i += 1;
    }
    grid
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// A codebook with a repeated entry would waste code space: no format has one, so a repeat means damaged data.
    #[test]
    fn entries_are_distinct() {
        assert_eq!(IQ2_XXS.iter().collect::<HashSet<_>>().len(), 256);
        assert_eq!(IQ2_XS.iter().collect::<HashSet<_>>().len(), 512);
        assert_eq!(IQ3_XXS.iter().collect::<HashSet<_>>().len(), 256);
        assert_eq!(IQ1.iter().collect::<HashSet<_>>().len(), 2048);
    }

    #[test]
    fn signs_have_even_parity() {
        for i in 0..128u8 {
            let s = even_signs(i);
            assert_eq!(s & 127, i);
            assert_eq!(s.count_ones() % 2, 0);
        }
    }
}
