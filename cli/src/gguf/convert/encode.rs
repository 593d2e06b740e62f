//! Reads a run of elements, checks them, encodes them. Errors name the tensor and the element.

use ds4_kernels::quant::{largest, quantize_row_weighted};
use ds4_manifests::GgmlType;
use half::{bf16, f16};
use safetensors::Dtype;

use super::bad;
use super::names::Segment;

/// Bytes of stored elements as F32.
pub fn widen(dtype: Dtype, bytes: &[u8], out: &mut Vec<f32>) {
    out.clear();
    match dtype {
        Dtype::F32 => out.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
        Dtype::F16 => out.extend(bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        Dtype::BF16 => out.extend(bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        other => unreachable!("names::resolve lets no {other:?} through"),
    }
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
    let wide: Vec<i64> = match segment.dtype {
        Dtype::I64 => bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
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

    fn segment(dtype: Dtype) -> Segment {
        Segment { name: "layers.0.x.weight".into(), source: 0, dtype, offset: 0, elements: 64, skipped: 100 }
    }

    #[test]
    fn deepseek_v4_values_that_cannot_be_weights_are_refused_by_tensor_and_element() {
        let mut x = vec![0.5f32; 64];
        let s = segment(Dtype::F32);
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
        widen(Dtype::BF16, &[0x80, 0x3f, 0x49, 0xc0], &mut out);
        assert_eq!(out, [1.0, -3.140_625]);
        widen(Dtype::F16, &[0x00, 0x3c, 0x01, 0x00], &mut out);
        assert_eq!(out, [1.0, 2f32.powi(-24)]);
    }

    #[test]
    fn deepseek_v4_expert_tables_stay_inside_their_experts() {
        let bytes: Vec<u8> = [3i64, 0, 7].iter().flat_map(|v| v.to_le_bytes()).collect();
        let s = segment(Dtype::I64);
        assert_eq!(table((&s, 0), &bytes, 8).unwrap(), [3, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0]);
        let error = table((&s, 20), &bytes, 7).unwrap_err().to_string();
        assert!(error.contains("element 22 is 7, expected an expert below 7"), "{error}");
        let negative: Vec<u8> = (-1i32).to_le_bytes().to_vec();
        assert!(table((&segment(Dtype::I32), 0), &negative, 7).unwrap_err().to_string().contains("is -1"));
    }
}
