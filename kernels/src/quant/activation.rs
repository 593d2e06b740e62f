//! Int8 activations: what a row of f32 becomes before it meets quantised weights, and the plain dot product that fast
//! code is held against.
//!
//! One format serves every weight type: blocks of 32 with their own f32 scale. That is finer than ggml's blocks of 256 for
//! K types and costs one more multiply per 32 elements.

use ds4_manifests::GgmlType;

use super::{dequantize_row, row_bytes};

/// Elements per activation block.
pub const Q8_BLOCK: usize = 32;

/// A quantised activation row: element `i` is `d[i / 32] * qs[i]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Q8Row {
    /// Quants in -127..=127, one per element.
    pub qs: Vec<i8>,
    /// Scale per block of 32: largest magnitude / 127. NaN when the block held a NaN or an infinity, so that a broken
    /// activation shows in the result instead of vanishing.
    pub d: Vec<f32>,
    /// Sum of `qs` per 16 elements (two a block), for weight types with a minimum: `Σ (d*q + m) * x` needs `m * Σ x`.
    pub sums: Vec<i16>,
}

/// Quantises a row whose length is a multiple of 32.
///
/// Per block: `d = max|x| / 127`, `q = round_to_nearest_even(x * (1 / d))`. A block whose `d` would be subnormal is zero.
/// |error| is at most `d / 2` plus rounding of the product.
///
/// # Panics
/// When the length is not a multiple of 32.
pub fn quantize_q8(x: &[f32]) -> Q8Row {
    let (blocks, rest) = x.as_chunks::<Q8_BLOCK>();
    assert!(rest.is_empty(), "activation width {} is not a multiple of {Q8_BLOCK}", x.len());
    let mut row = Q8Row {
        qs: Vec::with_capacity(x.len()),
        d: Vec::with_capacity(blocks.len()),
        sums: Vec::with_capacity(blocks.len() * 2),
    };
    for block in blocks {
        let (qs, d) = quantize_block(block);
        row.d.push(d);
        for half in qs.as_chunks::<16>().0 {
            row.sums.push(half.iter().map(|&q| i16::from(q)).sum());
        }
        row.qs.extend_from_slice(&qs);
    }
    row
}

fn quantize_block(x: &[f32; Q8_BLOCK]) -> ([i8; Q8_BLOCK], f32) {
    if x.iter().any(|v| !v.is_finite()) {
        return ([0; Q8_BLOCK], f32::NAN);
    }
    let d = x.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
    if d < f32::MIN_POSITIVE {
        return ([0; Q8_BLOCK], 0.0);
    }
    let inverse = 1.0 / d;
    #[allow(clippy::cast_possible_truncation, reason = "|x / d| <= 127 up to rounding, and the cast saturates")]
    let qs = x.map(|v| (v * inverse).round_ties_even() as i8);
    (qs, d)
}

impl Q8Row {
    /// The f32 values that the row stands for.
    pub fn dequantize(&self) -> Vec<f32> {
        self.qs.iter().enumerate().map(|(i, &q)| self.d[i / Q8_BLOCK] * f32::from(q)).collect()
    }

    /// Sum of the quants of block `block`.
    pub fn block_sum(&self, block: usize) -> i32 {
        i32::from(self.sums[2 * block]) + i32::from(self.sums[2 * block + 1])
    }
}

/// The dot product of one weight row with an activation row, by definition: dequantised weight × dequantised activation,
/// summed in f64. The yardstick for fast kernels, not a fast kernel.
///
/// # Panics
/// When the row's bytes don't match the activation's length.
pub fn dot_q8_reference(ty: GgmlType, row: &[u8], x: &Q8Row) -> f32 {
    assert_eq!(row.len(), row_bytes(ty, x.qs.len()));
    let mut w = vec![0f32; x.qs.len()];
    dequantize_row(ty, row, &mut w);
    let sum: f64 = w.iter().zip(x.dequantize()).map(|(&w, x)| f64::from(w) * f64::from(x)).sum();
    #[allow(clippy::cast_possible_truncation, reason = "rounding to f32 is the point")]
    {
        sum as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_at_most_half_a_step() {
        let x: Vec<f32> = (0..96u16).map(|i| (f32::from(i) * 0.7).sin() * f32::from(i / 32 + 1)).collect();
        let row = quantize_q8(&x);
        for (i, (a, b)) in x.iter().zip(row.dequantize()).enumerate() {
            assert!((a - b).abs() <= row.d[i / 32] * 0.5001, "element {i}: {a} became {b}");
        }
        let largest = x[..32].iter().fold(0f32, |m, v| m.max(v.abs()));
        assert_eq!(row.d[0], largest / 127.0);
        assert_eq!(row.qs[..32].iter().map(|q| q.unsigned_abs()).max(), Some(127));
    }

    #[test]
    fn sums_cover_sixteen_elements_each() {
        let x: Vec<f32> = (0..64u8).map(|i| f32::from(i) - 20.0).collect();
        let row = quantize_q8(&x);
        assert_eq!(row.sums.len(), 4);
        for (k, sum) in row.sums.iter().enumerate() {
            let direct: i32 = row.qs[16 * k..16 * (k + 1)].iter().map(|&q| i32::from(q)).sum();
            assert_eq!(i32::from(*sum), direct);
        }
        assert_eq!(row.block_sum(1), i32::from(row.sums[2]) + i32::from(row.sums[3]));
    }

    #[test]
    fn zeros_and_subnormals_become_zero() {
        for v in [0.0, 1e-40, -1e-45] {
            let row = quantize_q8(&[v; 32]);
            assert_eq!((row.d[0], row.qs[0]), (0.0, 0), "{v}");
        }
    }

    #[test]
    fn broken_activations_stay_visible() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 64];
            x[40] = bad;
            let row = quantize_q8(&x);
            assert!(!row.d[0].is_nan() && row.d[1].is_nan(), "{bad}");
            let w: Vec<u8> = std::iter::repeat_n(1f32.to_le_bytes(), 64).flatten().collect();
            assert!(dot_q8_reference(GgmlType::F32, &w, &row).is_nan(), "{bad}");
        }
    }

    /// Small integers are exact in every step, so the dot product is known: Σ i*(i%3) for i in 0..32, with 127 in the row so
    /// that the scale is 1.
    #[test]
    fn dot_of_integers_is_exact() {
        let mut x: Vec<f32> = (0..32u8).map(f32::from).collect();
        x[31] = 127.0;
        let w: Vec<f32> = (0..32u8).map(|i| f32::from(i % 3)).collect();
        let expected: f32 = x.iter().zip(&w).map(|(a, b)| a * b).sum();
        let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(dot_q8_reference(GgmlType::F32, &bytes, &quantize_q8(&x)), expected);
    }
}
