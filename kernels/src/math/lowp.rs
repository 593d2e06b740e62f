//! Low-precision round trips that DeepSeek's own kernels apply to cached rows: FP8 E4M3 in blocks of 64, FP4 E2M1 in
//! blocks of 32 after a Hadamard transform. Scales are powers of two.
//!
//! Source: the published inference kernels of DeepSeek V4 as summarised in the project's fact sheet, section 3.7.

/// Largest finite E4M3FN value.
const FP8_MAX: f32 = 448.0;
/// Values per FP8 scale.
pub const FP8_BLOCK: usize = 64;
/// Values per FP4 scale.
pub const FP4_BLOCK: usize = 32;

/// Smallest power of two that is at least `x`, for positive normal or subnormal `x` (exact: works on the bits).
pub(crate) fn pow2_ceil(x: f32) -> f32 {
    let bits = x.to_bits();
    if bits < 0x0080_0000 {
        // Subnormal: a single set bit is already a power of two; otherwise the next higher bit is.
        return f32::from_bits(bits.next_power_of_two());
    }
    if bits & 0x007f_ffff == 0 { x } else { f32::from_bits((bits & 0x7f80_0000) + 0x0080_0000) }
}

/// Rounds to the nearest E4M3FN value, ties to even, saturating at ±448: 3 mantissa bits, subnormal step 2⁻⁹.
pub fn round_e4m3(x: f32) -> f32 {
    let a = x.abs().min(FP8_MAX);
    // The quantum is 2^(e-3) with e the exponent of `a`, but never below 2^-9. Adding and subtracting 1.5·2^23 quanta
    // rounds to a whole number of quanta, ties to even, in the current (default) rounding mode.
    let exponent = (a.to_bits() >> 23).max(127 - 6);
    let quantum = f32::from_bits((exponent - 3) << 23);
    let magic = quantum * 12_582_912.0;
    ((a + magic) - magic).copysign(x)
}

/// Rounds to the nearest of {0, .5, 1, 1.5, 2, 3, 4, 6}, ties to the even code index, saturating at ±6.
pub fn round_e2m1(x: f32) -> f32 {
    let a = x.abs();
    // Upper borders of codes 0..6; a tie goes to the lower code when that one is even.
    let q = if a <= 0.25 {
        0.0
    } else if a < 0.75 {
        0.5
    } else if a <= 1.25 {
        1.0
    } else if a < 1.75 {
        1.5
    } else if a <= 2.5 {
        2.0
    } else if a < 3.5 {
        3.0
    } else if a <= 5.0 {
        4.0
    } else {
        6.0
    };
    f32::copysign(q, x)
}

/// FP8 round trip in place; the last block may be short.
pub fn fp8_round_trip(row: &mut [f32]) {
    for block in row.chunks_mut(FP8_BLOCK) {
        let amax = block.iter().fold(1e-4_f32, |m, v| m.max(v.abs()));
        let scale = pow2_ceil(amax / FP8_MAX);
        for v in block {
            *v = round_e4m3(*v / scale) * scale;
        }
    }
}

/// FP4 round trip in place; the last block may be short.
pub fn fp4_round_trip(row: &mut [f32]) {
    for block in row.chunks_mut(FP4_BLOCK) {
        // 6·2⁻¹²⁶ keeps the scale normal.
        let amax = block.iter().fold(7.052_966_4e-38_f32, |m, v| m.max(v.abs()));
        let scale = pow2_ceil(amax / 6.0);
        for v in block {
            *v = round_e2m1(*v / scale) * scale;
        }
    }
}

/// In-place Walsh–Hadamard transform, scaled by `1/sqrt(len)`; `row.len()` is a power of two.
pub fn hadamard(row: &mut [f32]) {
    debug_assert!(row.len().is_power_of_two());
    let mut half = 1;
    while half < row.len() {
        for pair in row.chunks_exact_mut(2 * half) {
            let (lo, hi) = pair.split_at_mut(half);
            for (a, b) in lo.iter_mut().zip(hi) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    #[allow(clippy::cast_precision_loss, reason = "head widths are small")]
    let scale = 1.0 / (row.len() as f32).sqrt();
    for v in row {
        *v *= scale;
    }
}

/// Rounds every value through IEEE half precision.
pub fn f16_round_trip(row: &mut [f32]) {
    for v in row {
        *v = half::f16::from_f32(*v).to_f32();
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "test values are rounded to f32 on purpose")]
mod tests {
    use super::*;

    /// Every finite E4M3FN magnitude, from the format's definition.
    fn e4m3_values() -> Vec<f64> {
        let mut v: Vec<f64> = (0..8).map(|m| f64::from(m) * 2f64.powi(-9)).collect();
        for e in 1..16 {
            for m in 0..8 {
                if e < 15 || m < 7 {
                    v.push((1.0 + f64::from(m) / 8.0) * 2f64.powi(e - 7));
                }
            }
        }
        v
    }

    /// Nearest table value, ties to the even code, in f64.
    fn nearest(table: &[f64], x: f64) -> f64 {
        let (i, _) = table
            .iter()
            .enumerate()
            .min_by(|(i, a), (j, b)| ((**a - x).abs(), i % 2).partial_cmp(&((**b - x).abs(), j % 2)).unwrap())
            .unwrap();
        table[i]
    }

    #[test]
    fn e4m3_rounds_like_the_table() {
        let table = e4m3_values();
        assert_eq!(*table.last().unwrap(), 448.0);
        for i in 0..60_000_u32 {
            let x = (f64::from(i) / 60_000.0).powi(3) * 470.0;
            let x = f64::from(x as f32);
            assert_eq!(f64::from(round_e4m3(x as f32)), nearest(&table, x.min(448.0)), "x = {x}");
            assert_eq!(round_e4m3(-x as f32), -round_e4m3(x as f32));
        }
        // Ties: halfway between neighbours goes to the even code.
        for w in table.windows(2) {
            let x = (w[0] + w[1]) / 2.0;
            assert_eq!(f64::from(round_e4m3(x as f32)), nearest(&table, x), "tie {x}");
        }
    }

    #[test]
    fn e2m1_rounds_like_the_table() {
        let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for i in 0..=7000_u32 {
            let x = f64::from(i) / 1000.0;
            let x = f64::from(x as f32);
            assert_eq!(f64::from(round_e2m1(x as f32)), nearest(&table, x.min(6.0)), "x = {x}");
        }
    }

    #[test]
    fn published_check_value_of_the_fp8_round_trip() {
        let mut row: Vec<f32> = (0..64_u8).map(|i| 0.1 * (f32::from(i) - 31.5)).collect();
        fp8_round_trip(&mut row);
        assert_eq!(&row[..6], &[-3.25, -3.0, -3.0, -2.75, -2.75, -2.75]);
    }

    #[test]
    fn power_of_two_scales() {
        for (x, want) in
            [(1.0, 1.0), (1.1, 2.0), (0.75, 1.0), (0.5, 0.5), (3.0, 4.0), (2f32.powi(-126), 2f32.powi(-126))]
        {
            assert_eq!(pow2_ceil(x), want, "{x}");
        }
        assert_eq!(pow2_ceil(f32::from_bits(3)), f32::from_bits(4));
    }

    #[test]
    fn hadamard_matches_the_definition() {
        let x: Vec<f32> = (0..16_u8).map(|i| f32::from(i * 7 % 11) - 4.0).collect();
        let mut y = x.clone();
        hadamard(&mut y);
        for (k, v) in y.iter().enumerate() {
            let want: f64 =
                (0..16).map(|n| f64::from(x[n]) * if (n & k).count_ones() % 2 == 0 { 1.0 } else { -1.0 }).sum::<f64>()
                    / 4.0;
            assert!((f64::from(*v) - want).abs() < 1e-5, "{k}: {v} {want}");
        }
        hadamard(&mut y);
        for (a, b) in x.iter().zip(&y) {
            assert!((a - b).abs() < 1e-5);
        }
    }
}
