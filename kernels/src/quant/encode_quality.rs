//! The searching encoders against ggml's own on the same data (`tests/oracles/encode_quality.py`), and at their edges.

use ds4_manifests::GgmlType;

use super::{dequantize_row, largest, quantize_row, quantize_row_weighted};

const SEARCHED: [GgmlType; 3] = [GgmlType::Q4_K, GgmlType::Q2_K, GgmlType::IQ2_XXS];

/// splitmix64, seeded with the FNV-1a hash of a name.
fn words(name: &str) -> impl Iterator<Item = u64> {
    let seed = fnv1a(name.bytes());
    (1u64..).map(move |i| {
        let mut z = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

fn unit(word: u64) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "24 bits")]
    let bits = (word >> 40) as f64;
    bits / f64::from(1u32 << 24)
}

#[allow(clippy::cast_possible_truncation, reason = "the data's type is f32")]
fn data(name: &str, n: usize) -> Vec<f32> {
    let mut w = words(name);
    let mut bell = || (0..3).map(|_| unit(w.next().unwrap())).sum::<f64>() - 1.5;
    (0..n)
        .map(|i| {
            let b = bell() as f32;
            match name {
                "bell" => b,
                "tails" => b * b * b,
                "shifted" => b + 0.5,
                "small" => b * 0.03125,
                "uneven" => b * [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015_625, 0.007_812_5][i / 32 % 8],
                other => panic!("{other}"),
            }
        })
        .collect()
}

#[allow(clippy::cast_possible_truncation, reason = "the data's type is f32")]
fn importance(cols: usize) -> Vec<f32> {
    words("importance")
        .take(cols)
        .map(|w| {
            let v = 0.1f32 + (unit(w) * unit(w)) as f32 * 1.9f32;
            v * v
        })
        .collect()
}

fn decoded(ty: GgmlType, bytes: &[u8], n: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; n];
    dequantize_row(ty, bytes, &mut out);
    out
}

/// Root of the weighted squared error over the weighted square.
fn error(x: &[f32], y: &[f32], w: impl Fn(usize) -> f32) -> f64 {
    let (mut e, mut s) = (0.0, 0.0);
    for (i, (x, y)) in x.iter().zip(y).enumerate() {
        let (x, y, w) = (f64::from(*x), f64::from(*y), f64::from(w(i)));
        e += w * (y - x) * (y - x);
        s += w * x * x;
    }
    (e / s).sqrt()
}

/// The value of a key on a line of our JSON fixture, whose values are plain words and numbers.
fn field<'a>(line: &'a str, key: &str) -> &'a str {
    let at = line.find(&format!("\"{key}\": ")).unwrap_or_else(|| panic!("{key} in {line}")) + key.len() + 4;
    line[at..].split([',', '}', '\n']).next().unwrap().trim_matches('"')
}

#[test]
fn deepseek_v4_encoders_do_no_worse_than_ggml() {
    let path = format!("{}/../tests/fixtures/quant/encoders.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let (rows, cols): (usize, usize) = (field(&text, "rows").parse().unwrap(), field(&text, "cols").parse().unwrap());
    let hash = |v: &[f32]| format!("{:016x}", fnv1a(v.iter().flat_map(|v| v.to_le_bytes())));
    let weights = importance(cols);
    assert_eq!(hash(&weights), field(&text, "importance_fnv"));
    let mut seen = 0;
    let mut worst = Vec::new();
    for line in text.lines().filter(|l| l.starts_with("{\"data\"")) {
        let (name, ty, weighted) = (field(line, "data"), field(line, "type"), field(line, "weighted") == "true");
        let ty: GgmlType = ty.parse().unwrap();
        let x = data(name, rows * cols);
        assert_eq!(hash(&x), field(line, "data_fnv"), "{name}: not the data that ggml had");
        let y: Vec<f32> = x
            .chunks_exact(cols)
            .flat_map(|row| decoded(ty, &quantize_row_weighted(ty, row, weighted.then_some(&weights[..])), cols))
            .collect();
        let ours = error(&x, &y, |i| if weighted { weights[i % cols] } else { 1.0 });
        let theirs: f64 = field(line, "error").parse().unwrap();
        println!("{name:8} {ty:8} weighted {weighted:5}: {ours:.5}, ggml {theirs:.5}, ratio {:.3}", ours / theirs);
        if ours > theirs {
            worst.push(format!("{name} {ty} weighted {weighted}: {ours:.5} against {theirs:.5}"));
        }
        seen += 1;
    }
    assert_eq!(seen, 30);
    assert!(worst.is_empty(), "{worst:#?}");
}

#[test]
fn deepseek_v4_encoders_use_the_importance() {
    let (x, w) = (data("bell", 2048), importance(2048));
    for ty in SEARCHED {
        let weighted = |bytes: Vec<u8>| error(&x, &decoded(ty, &bytes, 2048), |i| w[i]);
        let (with, without) = (weighted(quantize_row_weighted(ty, &x, Some(&w))), weighted(quantize_row(ty, &x)));
        assert!(with < 0.98 * without, "{ty}: {with} against {without}");
        // Ones are the same as nothing, and zeros are as good as nothing.
        for flat in [1.0, 0.0] {
            assert!(quantize_row_weighted(ty, &x, Some(&[flat; 2048])) == quantize_row(ty, &x), "{ty}");
        }
    }
}

/// Blocks of values that the format holds exactly, made from their fields, each field at its extreme somewhere.
#[test]
fn deepseek_v4_values_that_a_format_holds_survive_exactly() {
    let mut w = words("exact");
    let mut pick = move |n: u64| w.next().unwrap() % n;
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    let mut values = |ty| -> Vec<f32> {
        let (elems, top, top_scale, d) =
            if ty == GgmlType::Q4_K { (32, 15, 63, 0.0078125) } else { (16, 3, 15, 0.03125) };
        (0..256 / elems)
            .flat_map(|g| {
                let (scale, min) = if g == 0 { (top_scale, top_scale) } else { (1 + pick(top_scale), pick(top_scale)) };
                let levels: Vec<u64> = (0..elems).map(|i| if i < 2 { i * top } else { pick(top + 1) }).collect();
                levels.into_iter().map(move |q| d * (scale * q) as f32 - 0.5 * d * min as f32).collect::<Vec<_>>()
            })
            .collect()
    };
    for ty in [GgmlType::Q4_K, GgmlType::Q2_K] {
        for _ in 0..20 {
            let x = values(ty);
            let y = decoded(ty, &quantize_row(ty, &x), 256);
            assert!(x == y, "{ty}: error {:e}", error(&x, &y, |_| 1.0));
        }
    }
    for _ in 0..20 {
        let mut block = vec![0u8; 66];
        block.iter_mut().for_each(|b| *b = u8::try_from(pick(256)).unwrap());
        block[..2].copy_from_slice(&half::f16::from_f32(0.0131).to_le_bytes());
        block[9] |= 0xf0; // the first group has the largest scale
        let x = decoded(GgmlType::IQ2_XXS, &block, 256);
        assert!(quantize_row(GgmlType::IQ2_XXS, &x) == block);
    }
}

#[test]
fn deepseek_v4_encoders_take_constants_zeros_and_the_largest_values() {
    for ty in SEARCHED {
        let zeros = quantize_row(ty, &[0.0; 256]);
        assert!(decoded(ty, &zeros, 256).iter().all(|v| *v == 0.0), "{ty}");
        for constant in [1.0f32, -1.0, 0.37, -0.01, 1e5] {
            let x = [constant; 256];
            let e = error(&x, &decoded(ty, &quantize_row(ty, &x), 256), |_| 1.0);
            // One scale suffices for a constant; what is left is the f16's rounding.
            assert!(e < 6e-4, "{ty} {constant}: {e}");
        }
        for big in [largest(ty), -largest(ty)] {
            for x in [[big; 256], std::array::from_fn(|i| if i % 7 == 0 { big } else { big * 1e-3 })] {
                let y = decoded(ty, &quantize_row(ty, &x), 256);
                let e = error(&x, &y, |_| 1.0);
                // IQ2_XXS has nothing below 8 of 43: seven such neighbours of a 43 are an error of 0.49.
                let bound = if ty == GgmlType::IQ2_XXS { 0.5 } else { 0.05 };
                assert!(y.iter().all(|v| v.is_finite()) && e < bound, "{ty} {big}: {e}");
            }
        }
        // Under the smallest f16 scale: nothing is left, but nothing breaks.
        let y = decoded(ty, &quantize_row(ty, &[1e-12; 256]), 256);
        assert!(y.iter().all(|v| v.abs() < 1e-6), "{ty}");
        let alternating: [f32; 256] = std::array::from_fn(|i| if i % 2 == 0 { big_and_small(i) } else { -1.0 });
        assert!(decoded(ty, &quantize_row(ty, &alternating), 256).iter().all(|v| v.is_finite()), "{ty}");
    }
}

fn big_and_small(i: usize) -> f32 {
    if i.is_multiple_of(64) { 3e4 } else { 1e-4 }
}
