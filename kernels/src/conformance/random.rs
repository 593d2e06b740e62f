//! Random inputs: activations with outliers, and blocks of every weight type.

use ds4_manifests::GgmlType;

use crate::quant;

/// A small generator (SplitMix64) for test inputs.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator with a given seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed in `DS4_SEED`, or one from the clock.
    pub fn fresh_seed() -> u64 {
        if let Some(seed) = std::env::var("DS4_SEED").ok().and_then(|s| s.parse().ok()) {
            return seed;
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        now.as_secs().rotate_left(32) ^ u64::from(now.subsec_nanos())
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        #[allow(clippy::cast_precision_loss, reason = "24 bits fit f32 exactly")]
        let x = (self.bits() >> 40) as f32;
        x / 8_388_608.0 - 1.0
    }

    /// Below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        let n = u64::try_from(n).unwrap_or(u64::MAX);
        usize::try_from(self.bits() % n).unwrap_or(0)
    }

    /// `n` activations: mostly of order 1 with a few large ones, as language models have.
    pub fn activations(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit() * if self.below(97) == 0 { 30.0 } else { 1.0 }).collect()
    }

    /// `rows * cols` weights of `ty`: random blocks whose scales are finite and of order 0.01.
    pub fn weights(&mut self, ty: GgmlType, rows: usize, cols: usize) -> Vec<u8> {
        let n = rows * cols;
        match ty {
            GgmlType::F32 => return (0..n).flat_map(|_| self.unit().to_le_bytes()).collect(),
            GgmlType::F16 => return (0..n).flat_map(|_| half::f16::from_f32(self.unit()).to_le_bytes()).collect(),
            GgmlType::BF16 => return (0..n).flat_map(|_| half::bf16::from_f32(self.unit()).to_le_bytes()).collect(),
            _ => {}
        }
        let mut bytes: Vec<u8> = (0..quant::row_bytes(ty, n)).map(|_| self.bits().to_le_bytes()[0]).collect();
        let block = usize::try_from(ty.block_bytes()).unwrap_or(usize::MAX);
        let scales: &[usize] = match ty {
            GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4_K | GgmlType::Q5_K => &[0, 2],
            GgmlType::Q2_K => &[80, 82],
            GgmlType::Q3_K => &[108],
            GgmlType::Q6_K => &[208],
            _ => &[0],
        };
        for b in bytes.chunks_exact_mut(block) {
            if ty == GgmlType::IQ1_M {
                let d = half::f16::from_f32(self.unit() * 0.01).to_bits();
                for k in 0..4 {
                    b[49 + 2 * k] = (b[49 + 2 * k] & 0x0f) | (((d >> (4 * k)) & 15) << 4).to_le_bytes()[0];
                }
                continue;
            }
            for at in scales {
                b[*at..at + 2].copy_from_slice(&half::f16::from_f32(self.unit() * 0.01).to_le_bytes());
            }
        }
        bytes
    }
}
