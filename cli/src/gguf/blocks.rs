//! Random blocks of a tensor type, made directly: no floats are quantised, so that they come at the speed of memory.
//!
//! Every block is a function of the tensor's key and the block's number alone, so that a file does not depend on how many
//! threads wrote it. Layouts: GGUF specification; each comment says how large the values come out.

use ds4_manifests::GgmlType;
use half::f16;

/// Words of 64 random bits from number `at` on: splitmix64, which can start anywhere.
struct Words {
    state: u64,
}

impl Words {
    fn at(key: u64, at: u64) -> Self {
        Self { state: key.wrapping_add(at.wrapping_mul(0x9e37_79b9_7f4a_7c15)) }
    }

    #[inline]
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    #[inline]
    fn fill(&mut self, out: &mut [u8]) {
        for eight in out.chunks_exact_mut(8) {
            eight.copy_from_slice(&self.next().to_le_bytes());
        }
    }
}

/// Start of a tensor's random stream.
pub fn key(name: &str, seed: u64) -> u64 {
    // FNV-1a, then one round of splitmix64 so that neighbouring seeds share nothing.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    Words::at(hash ^ seed.rotate_left(32), 0).next()
}

/// How a tensor's values are spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Mean; other than zero for F32 only.
    pub mean: f32,
    /// Standard deviation.
    pub std: f32,
}

/// What fills a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    /// Weights.
    Random(Spread),
    /// Rows of `used` different numbers below `below`: the experts of a token id. I32 only.
    Distinct {
        /// Numbers in a row.
        used: u64,
        /// Their bound.
        below: u64,
    },
}

/// Sixteen block scales of 0.75 to 1.22 times `d`, and the same times `min`.
fn scales(d: f32, min: f32) -> [([u8; 2], [u8; 2]); 16] {
    std::array::from_fn(|i| {
        let step = u8::try_from(i).map_or(0.0, f32::from);
        let d = f16::from_f32(d * (0.75 + step / 32.0)).to_f32();
        (f16::from_f32(d).to_le_bytes(), f16::from_f32(d * min).to_le_bytes())
    })
}

fn pick(word: u64) -> usize {
    usize::from(word.to_le_bytes()[7] >> 4)
}

/// Fills `out`, a whole number of blocks (for `Distinct`: rows) of which the first is number `first` of its tensor.
///
/// # Panics
/// For a type without random blocks here: the caller chose it.
pub fn fill(ty: GgmlType, how: Fill, key: u64, first: u64, out: &mut [u8]) {
    let spread = match how {
        Fill::Random(spread) => spread,
        Fill::Distinct { used, below } => return distinct(used, below, key, first, out),
    };
    let std = spread.std;
    let block = usize::try_from(ty.block_bytes()).unwrap_or(1);
    match ty {
        GgmlType::F32 => {
            let mut words = Words::at(key, first);
            for v in out.chunks_exact_mut(4) {
                // 24 bits are exact in f32. A uniform distribution on [-1, 1) has a deviation of 1/sqrt(3).
                let [a, b, c, ..] = words.next().to_le_bytes();
                let unit = (f32::from(u16::from_le_bytes([a, b])) * 256.0 + f32::from(c)) / 8_388_608.0 - 1.0;
                v.copy_from_slice(&(spread.mean + std * 3.0_f32.sqrt() * unit).to_le_bytes());
            }
        }
        GgmlType::F16 => {
            // ±[2^e, 2^(e+1)) with a random fraction: root mean square 2^e·sqrt(7/3), so within a factor sqrt(2) of `std`.
            let exponent = (std / (7.0_f32 / 3.0).sqrt()).log2().round().clamp(-14.0, 10.0);
            let bits = u64::from(f16::from_f32(exponent.exp2()).to_bits()) * 0x0001_0001_0001_0001;
            for (i, v) in (first..).zip(out.chunks_exact_mut(2)) {
                let word = (Words::at(key, i / 4).next() & 0x83ff_83ff_83ff_83ff) | bits;
                let lane = usize::try_from(i % 4).unwrap_or(0) * 2;
                v.copy_from_slice(&word.to_le_bytes()[lane..lane + 2]);
            }
        }
        GgmlType::Q8_0 => {
            // d·q, q uniform in -128..=127: deviation 73.9.
            let scales = scales(std / 73.9, 0.0);
            for (i, b) in (first..).zip(out.chunks_exact_mut(block)) {
                let mut words = Words::at(key, i.wrapping_mul(5));
                b[..2].copy_from_slice(&scales[pick(words.next())].0);
                words.fill(&mut b[2..]);
            }
        }
        GgmlType::Q2_K => {
            // d·n·q − dmin·n with dmin = 1.5·d: q uniform in 0..=3 has mean 1.5 and deviation 1.118; n in 8..=15: 11.7.
            let scales = scales(std / (1.118 * 11.7), 1.5);
            for (i, b) in (first..).zip(out.chunks_exact_mut(block)) {
                let mut words = Words::at(key, i.wrapping_mul(11));
                let (d, dmin) = scales[pick(words.next())];
                for eight in b[..16].chunks_exact_mut(8) {
                    let n = (words.next() & 0x0707_0707_0707_0707) | 0x0808_0808_0808_0808;
                    eight.copy_from_slice(&(n | n << 4).to_le_bytes());
                }
                words.fill(&mut b[16..80]);
                b[80..82].copy_from_slice(&d);
                b[82..].copy_from_slice(&dmin);
            }
        }
        GgmlType::Q4_K => {
            // d·n·q − dmin·n with dmin = 7.5·d: q uniform in 0..=15 has mean 7.5 and deviation 4.61; n in 16..=31: 23.9.
            let scales = scales(std / (4.61 * 23.9), 7.5);
            for (i, b) in (first..).zip(out.chunks_exact_mut(block)) {
                let mut words = Words::at(key, i.wrapping_mul(18));
                let (d, dmin) = scales[pick(words.next())];
                b[..2].copy_from_slice(&d);
                b[2..4].copy_from_slice(&dmin);
                let low = (words.next() & 0x0f0f_0f0f_0f0f_0f0f).to_le_bytes();
                for j in 0..4 {
                    // Six bits 01nnnn of sub-blocks j and j + 4, the same for scale and minimum.
                    b[4 + j] = low[j] | 0x50;
                    b[8 + j] = low[j] | 0x50;
                    b[12 + j] = low[4 + j] | low[4 + j] << 4;
                }
                words.fill(&mut b[16..]);
            }
        }
        GgmlType::IQ2_XXS => {
            // d·(2s + 1)/8·grid: root mean squares 18.5 of 2s + 1 (s in 0..=15) and 23.1 of the grid's entries.
            let scales = scales(std / (18.5 / 8.0 * 23.1), 0.0);
            for (i, b) in (first..).zip(out.chunks_exact_mut(block)) {
                let mut words = Words::at(key, i.wrapping_mul(9));
                b[..2].copy_from_slice(&scales[pick(words.next())].0);
                words.fill(&mut b[2..]);
            }
        }
        other => panic!("no random blocks of {other}"),
    }
}

fn distinct(used: u64, below: u64, key: u64, first: u64, out: &mut [u8]) {
    let row = usize::try_from(used * 4).unwrap_or(4);
    for (i, bytes) in (first..).zip(out.chunks_exact_mut(row)) {
        let word = Words::at(key, i).next();
        // used steps of at most below / used stay below one turn, so no number comes twice.
        let stride = 1 + (word >> 32) % (below / used).max(1);
        let mut expert = (word & 0xffff_ffff) % below;
        for slot in bytes.chunks_exact_mut(4) {
            slot.copy_from_slice(&u32::try_from(expert).unwrap_or(0).to_le_bytes());
            expert = (expert + stride) % below;
        }
    }
}

#[cfg(test)]
mod tests {
    use ds4_manifests::GgmlType as T;

    use super::*;

    const TYPES: [T; 6] = [T::F32, T::F16, T::Q8_0, T::Q2_K, T::Q4_K, T::IQ2_XXS];
    const ELEMS: usize = 256 * 64;

    fn made(ty: T, spread: Spread) -> Vec<u8> {
        let mut out = vec![0; usize::try_from(ty.row_bytes(ELEMS as u64).unwrap()).unwrap()];
        fill(ty, Fill::Random(spread), key("blk.0.x", 1), 0, &mut out);
        out
    }

    fn half(b: &[u8]) -> f64 {
        f16::from_le_bytes([b[0], b[1]]).to_f64()
    }

    /// Decoders written from the format's description (`q` values only need their distribution, so order is free).
    fn decode(ty: T, bytes: &[u8]) -> Vec<f64> {
        let block = usize::try_from(ty.block_bytes()).unwrap();
        let one = |b: &[u8]| -> Vec<f64> {
            match ty {
                T::F32 => vec![f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))],
                T::F16 => vec![half(b)],
                T::Q8_0 => b[2..].iter().map(|q| half(b) * f64::from(q.cast_signed())).collect(),
                T::Q2_K => (0..256_usize)
                    .map(|e| {
                        let q = (b[16 + e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2)) & 3;
                        let s = b[e / 16];
                        half(&b[80..]) * f64::from(s & 15) * f64::from(q) - half(&b[82..]) * f64::from(s >> 4)
                    })
                    .collect(),
                T::Q4_K => (0..256_usize)
                    .map(|e| {
                        let (j, s) = (e / 32, &b[4..16]);
                        let (scale, min) = if j < 4 {
                            (s[j] & 63, s[j + 4] & 63)
                        } else {
                            ((s[j + 4] & 15) + 16 * (s[j - 4] >> 6), (s[j + 4] >> 4) + 16 * (s[j] >> 6))
                        };
                        let q = (b[16 + j / 2 * 32 + e % 32] >> (j % 2 * 4)) & 15;
                        half(b) * f64::from(scale) * f64::from(q) - half(&b[2..]) * f64::from(min)
                    })
                    .collect(),
                _ => unreachable!(),
            }
        };
        bytes.chunks_exact(block).flat_map(one).collect()
    }

    #[test]
    fn deepseek_v4_synthetic_values_have_the_spread_that_was_asked_for() {
        for ty in [T::F32, T::F16, T::Q8_0, T::Q2_K, T::Q4_K] {
            for std in [0.009_f32, 0.0625, 1.0] {
                let values = decode(ty, &made(ty, Spread { mean: 0.0, std }));
                assert_eq!(values.len(), ELEMS);
                let n = values.len() as f64;
                let mean = values.iter().sum::<f64>() / n;
                let rms = (values.iter().map(|v| v * v).sum::<f64>() / n).sqrt() / f64::from(std);
                assert!((0.7..1.45).contains(&rms), "{ty} {std}: {rms}");
                assert!(mean.abs() < 0.03 * f64::from(std), "{ty} {std}: mean {mean}");
            }
        }
        let ones = decode(T::F32, &made(T::F32, Spread { mean: 1.0, std: 0.1 }));
        assert!(ones.iter().all(|v| (0.8..1.2).contains(v)));
    }

    #[test]
    fn deepseek_v4_synthetic_blocks_do_not_depend_on_where_a_piece_begins() {
        for ty in TYPES {
            let spread = Fill::Random(Spread { mean: 0.0, std: 0.1 });
            let block = usize::try_from(ty.block_bytes()).unwrap();
            let mut whole = vec![0; block * 40];
            fill(ty, spread, 9, 0, &mut whole);
            let mut tail = vec![0; block * 27];
            fill(ty, spread, 9, 13, &mut tail);
            assert!(whole[block * 13..] == tail[..], "{ty}");
            assert!(whole[..block * 13] != tail[..block * 13], "{ty}");
            let mut other = vec![0; block * 40];
            fill(ty, spread, 10, 0, &mut other);
            assert!(other != whole, "{ty}");
        }
        assert_ne!(key("a", 1), key("a", 2));
        assert_ne!(key("a", 1), key("b", 1));
    }

    #[test]
    fn deepseek_v4_synthetic_expert_tables_name_each_expert_once() {
        for (used, below) in [(6, 256), (2, 4), (4, 4), (1, 1)] {
            let mut out = vec![0; usize::try_from(used).unwrap() * 4 * 500];
            fill(T::I32, Fill::Distinct { used, below }, 3, 0, &mut out);
            let ids: Vec<u32> = out.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            for row in ids.chunks(usize::try_from(used).unwrap()) {
                let different: std::collections::HashSet<_> = row.iter().collect();
                assert!(different.len() == row.len() && row.iter().all(|e| u64::from(*e) < below), "{row:?}");
            }
            let all: std::collections::HashSet<_> = ids.iter().collect();
            assert!(all.len() as u64 > below / 2, "{used} of {below}");
        }
    }
}
