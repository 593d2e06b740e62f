//! Bit-for-bit comparison with the `gguf` package, from files that `tests/oracles/quant_fixtures.py` wrote.
//!
//! A file is little-endian: `"DS4QFIX1"`, `type id: u32`, `n: u32`, `m: u32`, `e: u32`, then `n` blocks, their f32 results,
//! then `m` blocks and the FNV-1a-64 of all their results' bytes (codebook types visit every codebook entry there), then
//! `e` f32 inputs and the bytes that the package's encoder made of them (`e = 0`: no encoder).

use ds4_manifests::GgmlType;

use super::{SUPPORTED, can_quantize, dequantize_row, quantize_row, row_bytes};

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(n);
        self.0 = tail;
        head
    }

    fn u32(&mut self) -> usize {
        usize::try_from(u32::from_le_bytes(*self.take(4).as_array().unwrap())).unwrap()
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        self.take(4 * n).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

struct Fixture {
    blocks: Vec<u8>,
    expected: Vec<f32>,
    digest_blocks: Vec<u8>,
    digest: u64,
    plain: Vec<f32>,
    encoded: Vec<u8>,
}

fn load(ty: GgmlType) -> Fixture {
    let path = format!("{}/../tests/fixtures/quant/{}.bin", env!("CARGO_MANIFEST_DIR"), ty.name().to_lowercase());
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let mut r = Reader(&bytes);
    assert_eq!(r.take(8), b"DS4QFIX1", "{path}");
    assert_eq!(r.u32(), ty.id() as usize, "{path}");
    let (n, m, e) = (r.u32(), r.u32(), r.u32());
    let elems = usize::try_from(ty.block_elems()).unwrap();
    let bytes_of = |blocks: usize| row_bytes(ty, blocks * elems);
    let fixture = Fixture {
        blocks: r.take(bytes_of(n)).to_vec(),
        expected: r.floats(n * elems),
        digest_blocks: r.take(bytes_of(m)).to_vec(),
        digest: u64::from_le_bytes(*r.take(8).as_array().unwrap()),
        plain: r.floats(e),
        encoded: r.take(if e == 0 { 0 } else { row_bytes(ty, e) }).to_vec(),
    };
    assert!(r.0.is_empty(), "{path}: {} bytes left over", r.0.len());
    assert!(n >= 4 && m >= 4, "{path}: too few blocks to mean anything");
    fixture
}

fn fnv1a(values: &[f32]) -> u64 {
    values
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

fn decode(ty: GgmlType, bytes: &[u8]) -> Vec<f32> {
    let blocks = bytes.len() as u64 / ty.block_bytes();
    let mut out = vec![0.0; usize::try_from(blocks * ty.block_elems()).unwrap()];
    dequantize_row(ty, bytes, &mut out);
    out
}

#[test]
fn every_type_decodes_bit_for_bit_like_the_gguf_package() {
    for ty in SUPPORTED {
        let f = load(ty);
        for (i, (got, want)) in decode(ty, &f.blocks).iter().zip(&f.expected).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "{ty}: element {i}: {got} instead of {want}");
        }
    }
}

#[test]
fn every_codebook_entry_and_many_more_blocks_decode_alike() {
    for ty in SUPPORTED {
        let f = load(ty);
        assert_eq!(fnv1a(&decode(ty, &f.digest_blocks)), f.digest, "{ty}");
    }
}

#[test]
fn encoders_agree_with_the_gguf_package() {
    for ty in SUPPORTED {
        let f = load(ty);
        // The encoders of these are searches of our own: encode_quality.rs judges them.
        let searched = matches!(ty, GgmlType::Q4_K | GgmlType::Q2_K | GgmlType::IQ2_XXS);
        assert_eq!(!f.plain.is_empty(), can_quantize(ty) && !searched, "{ty}: fixture and encoder list differ");
        if !f.plain.is_empty() {
            assert!(quantize_row(ty, &f.plain) == f.encoded, "{ty}: encoded bytes differ");
        }
    }
}
