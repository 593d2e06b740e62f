//! Hashes of what lies in a device's memory against the crate blake3: lengths around every shape of the tree, parts of a longer input,
//! and values of several streams at once.

use blake3::hazmat::HasherExt;
use ds4_kernels::conformance::Random;
use ds4_kernels::cuda::driver::{Access, Context, Driver, Physical, Space, Staging};
use ds4_kernels::cuda::hash::{Hashes, PIECE, Piece};
use serde_json::{Value, json};

/// Largest part that is copied at once.
const COPY: usize = 4 << 20;

pub(crate) fn check() -> Value {
    let mut rng = Random::new(Random::fresh_seed());
    let piece = usize::try_from(PIECE).unwrap();
    let bytes: Vec<u8> = (0..piece / 8).flat_map(|_| rng.bits().to_le_bytes()).collect();
    let context = Context::new(Driver::open().unwrap(), 0).unwrap();
    let mut space = Space::reserve(&context, PIECE).unwrap();
    space.map(0, Physical::create(&context, PIECE).unwrap()).unwrap();
    space.allow(0, PIECE, Access::ReadWrite).unwrap();
    let mut staging: Vec<Staging<'_>> = (0..3).map(|_| Staging::new(&space, 2, COPY).unwrap()).collect();
    for (k, part) in bytes.chunks(COPY).enumerate() {
        staging[0].buffer().unwrap()[..part.len()].copy_from_slice(part);
        staging[0].upload(0, part.len(), (k * COPY) as u64).unwrap();
    }
    staging[0].finish().unwrap();

    // Leaves of 1 KiB, groups of 256 leaves; wholes and parts, from several places.
    let mut lengths = vec![0, 1, 3, 4, 63, 64, 65, 1023, 1024, 1025, 2048, 3 << 10, (5 << 10) + 17];
    lengths.extend([256, 257, 512, 767, 1000].map(|leaves: usize| leaves << 10));
    lengths.extend([(256 << 10) - 1, (256 << 10) + 1, (7 << 18) + 300, piece / 2 + 1024, piece - 1, piece]);
    lengths.extend((0..20).map(|_| rng.below(1 << 20)));
    let pieces: Vec<(usize, Piece)> = lengths
        .iter()
        .enumerate()
        .flat_map(|(i, len)| {
            let offset = (piece - len) * (i % 3) / 2 / 64 * 64;
            [(true, 0), (false, 1), (false, 70_000)].map(|(whole, index)| (*len, whole, index, offset))
        })
        // No part of a longer input is empty.
        .filter(|(len, whole, ..)| *whole || *len > 0)
        .map(|(len, whole, index, offset)| (len, Piece { offset: offset as u64, len: len as u64, index, whole }))
        .collect();
    let hashes = Hashes::new(&context, pieces.len()).unwrap();
    for (k, (_, piece)) in pieces.iter().enumerate() {
        hashes.start(staging[k % 3].stream(), &space, k, *piece).unwrap();
    }
    staging.iter().for_each(|s| s.finish().unwrap());
    for ((len, piece), got) in pieces.iter().zip(hashes.values(staging[0].stream()).unwrap()) {
        let from = usize::try_from(piece.offset).unwrap();
        let mut hasher = blake3::Hasher::new();
        if !piece.whole {
            hasher.set_input_offset(piece.index * PIECE);
        }
        hasher.update(&bytes[from..from + len]);
        let want = if piece.whole { *hasher.finalize().as_bytes() } else { hasher.finalize_non_root() };
        assert_eq!(got, want, "{piece:?}");
    }
    assert!(
        hashes.start(staging[0].stream(), &space, 0, Piece { offset: 32, len: 32, index: 0, whole: true }).is_err()
    );
    json!({"values_equal": pieces.len()})
}
