//! Reads a run of elements, checks them, encodes them. Errors name the tensor and the element.

use ds4_kernels::quant::{largest, quantize_row_weighted};
use ds4_manifests::GgmlType;
use half::{bf16, f16};

use super::bad;
use super::names::{Form, Scales, Segment};

/// E2M1: a sign, two bits of exponent, one of fraction.
const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn fp4(code: u8) -> f32 {
    let v = FP4[usize::from(code & 7)];
    if code & 8 == 0 { v } else { -v }
}

/// E4M3FN: a sign, four bits of exponent (bias 7), three of fraction; all ones is NaN, and there is no infinity.
fn fp8(code: u8) -> f32 {
    let (exponent, fraction) = ((code >> 3) & 15, f32::from(code & 7) / 8.0);
    let v = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-6),
        _ => (1.0 + fraction) * 2f32.powi(i32::from(exponent) - 7),
    };
    if code & 128 == 0 { v } else { -v }
}

/// E8M0: an exponent of two, plus 127; 255 is NaN.
fn e8m0(code: u8) -> f32 {
    // 2^-127 is subnormal, so the power is not taken in f32, where it would be a quotient.
    #[allow(clippy::cast_possible_truncation, reason = "every power is an f32")]
    let power = 2f64.powi(i32::from(code) - 127) as f32;
    if code == 255 { f32::NAN } else { power }
}

/// Bytes of stored elements as F32, without scales.
pub fn widen(form: Form, bytes: &[u8], out: &mut Vec<f32>) {
    out.clear();
    match form {
        Form::F32 => out.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
        Form::F16 => out.extend(bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        Form::Bf16 => out.extend(bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        Form::Fp8 => {
            let table: [f32; 256] = std::array::from_fn(|i| fp8(i.to_le_bytes()[0]));
            out.extend(bytes.iter().map(|b| table[usize::from(*b)]));
        }
        Form::Fp4 => out.extend(bytes.iter().flat_map(|b| [fp4(b & 15), fp4(b >> 4)])),
        Form::I32 | Form::I64 => unreachable!("tables are not weights"),
    }
}

/// Multiplies whole rows of `cols` values, of which the first is row `first` of its matrix, by their blocks' factors. `bytes`
/// are the rows of the grid from that of row `first` on.
pub fn scale(scales: &Scales, bytes: &[u8], (first, cols): (u64, usize), x: &mut [f32]) -> anyhow::Result<()> {
    let factors: Vec<f32> = if scales.wide {
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    } else {
        bytes.iter().map(|b| e8m0(*b)).collect()
    };
    let (grid, block) = (usize::try_from(scales.grid[1])?, usize::try_from(scales.block[1])?);
    for (row, values) in (first..).zip(x.chunks_exact_mut(cols)) {
        let at = usize::try_from(row / scales.block[0] - first / scales.block[0])? * grid;
        for (values, factor) in values.chunks_exact_mut(block).zip(&factors[at..at + grid]) {
            values.iter_mut().for_each(|v| *v *= factor);
        }
    }
    Ok(())
}

/// Encodes values of one piece of a segment whose first is number `first` of the segment.
pub fn weights(
    ty: GgmlType,
    (gguf, segment, first): (&str, &Segment, u64),
    x: &[f32],
    importance: Option<&[f32]>,
) -> anyhow::Result<Vec<u8>> {
    let limit = largest(ty);
    // One pass that the compiler can vectorise; only a bad tensor is looked at twice. NaN compares false.
    if !x.iter().all(|v| v.abs() <= limit) {
        let at = x.iter().position(|v| v.is_nan() || v.abs() > limit).unwrap_or(0);
        let index = segment.skipped + first + u64::try_from(at)?;
        let name = &segment.name;
        return Err(bad(if x[at].is_finite() {
            format!(
                "{name}: element {index} is {}, beyond {limit} that {ty} can hold ({gguf}); choose another --type",
                x[at]
            )
        } else {
            format!("{name}: element {index} is {}: the checkpoint is damaged ({gguf})", x[at])
        }));
    }
    Ok(quantize_row_weighted(ty, x, importance))
}

/// Expert numbers of token ids: I64 or I32 to I32, each below `experts`.
pub fn table((segment, first): (&Segment, u64), bytes: &[u8], experts: u64) -> anyhow::Result<Vec<u8>> {
    let wide: Vec<i64> = match segment.form {
        Form::I64 => bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
    };
    let mut out = Vec::with_capacity(wide.len() * 4);
    for (i, v) in (first..).zip(wide) {
        let good = i32::try_from(v).ok().filter(|_| u64::try_from(v).is_ok_and(|v| v < experts));
        let good = good
            .ok_or_else(|| bad(format!("{}: element {i} is {v}, expected an expert below {experts}", segment.name)));
        out.extend(good?.to_le_bytes());
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(form: Form) -> Segment {
        Segment {
            name: "layers.0.x.weight".into(),
            source: 0,
            form,
            scales: None,
            offset: 0,
            elements: 64,
            skipped: 100,
        }
    }

    #[test]
    fn deepseek_v4_values_that_cannot_be_weights_are_refused_by_tensor_and_element() {
        let mut x = vec![0.5f32; 64];
        let s = segment(Form::F32);
        weights(GgmlType::F16, ("g", &s, 10), &x, None).unwrap();
        for (value, ty, says) in [
            (f32::NAN, GgmlType::F32, "NaN"),
            (f32::INFINITY, GgmlType::F32, "inf"),
            (f32::NEG_INFINITY, GgmlType::Q8_0, "-inf"),
            (-7e4, GgmlType::F16, "--type"),
            (1e9, GgmlType::Q8_0, "--type"),
        ] {
            x[7] = value;
            let error = weights(ty, ("blk.0.x.weight", &s, 10), &x, None).unwrap_err().to_string();
            assert!(error.contains("layers.0.x.weight: element 117 is") && error.contains(says), "{error}");
            assert!(error.contains("blk.0.x.weight"), "{error}");
        }
    }

    #[test]
    fn deepseek_v4_stored_floats_widen_exactly() {
        let mut out = vec![9.0];
        widen(Form::Bf16, &[0x80, 0x3f, 0x49, 0xc0], &mut out);
        assert_eq!(out, [1.0, -3.140_625]);
        widen(Form::F16, &[0x00, 0x3c, 0x01, 0x00], &mut out);
        assert_eq!(out, [1.0, 2f32.powi(-24)]);
    }

    /// Values of the formats' definitions (OCP 8-bit floating point and microscaling specifications).
    #[test]
    fn deepseek_v4_small_floats_are_those_of_their_specifications() {
        let mut out = Vec::new();
        widen(Form::Fp8, &[0x00, 0x01, 0x07, 0x08, 0x38, 0x3c, 0xb8, 0x7e, 0xfe, 0x40], &mut out);
        let step = 2f32.powi(-9);
        assert_eq!(out, [0.0, step, 7.0 * step, 2f32.powi(-6), 1.0, 1.5, -1.0, 448.0, -448.0, 2.0]);
        widen(Form::Fp8, &[0x7f, 0xff], &mut out);
        assert!(out.iter().all(|v| v.is_nan()));
        widen(Form::Fp4, &[0x10, 0x32, 0x54, 0x76, 0xf9], &mut out);
        assert_eq!(out, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0]);
        assert_eq!((e8m0(127), e8m0(120), e8m0(254)), (1.0, 2f32.powi(-7), 2f32.powi(127)));
        assert!(e8m0(0) > 0.0 && e8m0(255).is_nan());
    }

    #[test]
    fn deepseek_v4_each_block_has_its_own_scale() {
        // A matrix of 4 × 6 in blocks of 2 × 3, of which the last three rows are looked at.
        let s = Scales { source: 0, offset: 0, wide: false, grid: [2, 2], block: [2, 3] };
        let mut x = vec![1.0; 18];
        scale(&s, &[127, 128, 129, 130], (1, 6), &mut x).unwrap();
        let (a, b) = ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], [4.0, 4.0, 4.0, 8.0, 8.0, 8.0]);
        assert_eq!(x, [a, b, b].concat());
        let wide = Scales { wide: true, grid: [4, 1], block: [1, 6], ..s };
        let mut x = vec![2.0; 12];
        let bytes: Vec<u8> = [0.5f32, 3.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        scale(&wide, &bytes, (2, 6), &mut x).unwrap();
        assert_eq!(x, [[1.0; 6], [6.0; 6]].concat());
    }

    #[test]
    fn deepseek_v4_expert_tables_stay_inside_their_experts() {
        let bytes: Vec<u8> = [3i64, 0, 7].iter().flat_map(|v| v.to_le_bytes()).collect();
        let s = segment(Form::I64);
        assert_eq!(table((&s, 0), &bytes, 8).unwrap(), [3, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0]);
        let error = table((&s, 20), &bytes, 7).unwrap_err().to_string();
        assert!(error.contains("element 22 is 7, expected an expert below 7"), "{error}");
        let negative: Vec<u8> = (-1i32).to_le_bytes().to_vec();
        assert!(table((&segment(Form::I32), 0), &negative, 7).unwrap_err().to_string().contains("is -1"));
    }
}
