//! NumPy's array file, format version 1.0, for one row of f32.
//!
//! Magic `\x93NUMPY`, version bytes 1 and 0, the header's length as a little-endian u16, the header (a Python literal, padded
//! with spaces and ended by a newline so that the data begin at a multiple of 64 bytes), the data. Source: NumPy's
//! documentation of `numpy.lib.format`.

/// A one-dimensional array of little-endian f32 given as its bytes.
pub fn row(data: &[u8]) -> Vec<u8> {
    let count = data.len() / size_of::<f32>();
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({count},), }}");
    const PREFIX: usize = 10;
    let padding = (PREFIX + header.len() + 1).next_multiple_of(64) - (PREFIX + header.len() + 1);
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    // The header is some 70 bytes whatever the count.
    let length = u16::try_from(header.len()).unwrap_or(u16::MAX).to_le_bytes();
    [b"\x93NUMPY\x01\x00".as_slice(), &length, header.as_bytes(), data].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_what_numpy_writes() {
        // numpy.save of numpy.array([1, -2], "<f4"), NumPy 2.4.
        let data: Vec<u8> = [1f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut want = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }".to_vec();
        want.resize(127, b' ');
        want.push(b'\n');
        want.extend([0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]);
        assert_eq!(row(&data), want);
    }
}
