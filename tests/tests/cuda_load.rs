//! A load of a build with kernels, which hashes what has arrived on the device and arranges it there, on the fake driver: its hash
//! kernels compute, and where tensors are to be arranged it marks them, so that what is hashed too late, or arranged too early,
//! shows.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use ds4_manifests::{GgufModel, plan_layout};
use ds4_os::seqpacket::Connection;
use ds4_tests::card::Card;
use ds4_weight_owner::loader::{self, backend::Choice};
use ds4_weight_owner::report::{Job, MAX_REPORT, Report};

/// What a tensor begins with instead of being arranged (`kernels.rs` of the fake).
const ARRANGED: [u8; 2] = [0x5a; 2];

/// Makes a card's processes know where the test's models are.
fn card() -> Card {
    Card::new().with("FAKE_CUDA_PAGEABLE", 1).with("MODELS", concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures"))
}

fn fixture(name: &str) -> PathBuf {
    Path::new(&std::env::var_os("MODELS").unwrap()).join(name)
}

/// Last report of a load, its exit code, and the descriptors of its chunks.
fn load(path: &Path, backend: Choice, expect_blake3: Option<String>) -> (Report, u8, Vec<OwnedFd>) {
    let job = Job {
        path: path.to_owned(),
        name: String::new(),
        expect_blake3,
        plan_only: false,
        unless_blake3: None,
        epoch: 1,
        reserve_bytes: 0,
        allow_dev_models: true,
        backend,
    };
    let (ours, theirs) = Connection::pair().unwrap();
    ours.send(&serde_json::to_vec(&job).unwrap(), &[]).unwrap();
    std::thread::scope(|scope| {
        let loader = scope.spawn(move || loader::run(&theirs));
        let (mut last, mut chunks) = (None, Vec::new());
        while let Some(message) = ours.recv(MAX_REPORT).unwrap() {
            let report = serde_json::from_slice(&message.bytes).unwrap();
            if matches!(report, Report::Chunks { .. }) {
                chunks.extend(message.fds);
            }
            last = Some(report);
        }
        (last.unwrap(), loader.join().unwrap(), chunks)
    })
}

fn published(path: &Path, backend: Choice) -> (String, Vec<OwnedFd>) {
    match load(path, backend, None) {
        (Report::Published { blake3, .. }, 0, chunks) => (blake3, chunks),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_device_hashes_what_the_cpu_hashes_and_arranges_it_afterwards() {
    let card = card().logged();
    if !card.is_here("a_device_hashes_what_the_cpu_hashes_and_arranges_it_afterwards") {
        // The stream that arranges waits for the hash of every slab before the first tensor of it; whether it would have had to is luck.
        let (calls, mut hashed, mut waited) = (card.calls(), 0, 0);
        for line in calls.lines() {
            hashed += usize::from(line.ends_with(" hash_leaves"));
            waited += usize::from(line.starts_with("cuStreamWaitEvent "));
            assert!(
                !line.contains(" repack_") || (hashed > 0 && waited == hashed),
                "{waited} waits for {hashed} hashes"
            );
        }
        assert!(waited == hashed && calls.contains(" repack_"), "{waited} waits for {hashed} hashes");
        return;
    }
    for name in ["deepseek_v4/tiny-v4.gguf", "tiny-llama/tiny-llama.gguf"] {
        let path = fixture(name);
        let (host, _) = published(&path, Choice::Memfd);
        let (device, chunks) = published(&path, Choice::CudaVmm);
        assert_eq!(device, host, "{name}");
        // Every tensor is where the layout says: as in the file, or arranged after all of its copies.
        let model = GgufModel::open(&path).unwrap();
        let layout = plan_layout(&model.tensors);
        let file = std::fs::File::open(&path).unwrap();
        let mut arranged = 0;
        for (placed, t) in layout.placed.iter().zip(&model.tensors) {
            let [mut there, mut here] = [0, 1].map(|_| vec![0; usize::try_from(t.len).unwrap()]);
            let chunk = std::fs::File::from(chunks[placed.chunk as usize].try_clone().unwrap());
            chunk.read_exact_at(&mut there, placed.offset).unwrap();
            file.read_exact_at(&mut here, t.offset).unwrap();
            let rows: u64 = t.shape[1..].iter().product();
            if ds4_kernels::tiles::is_tiled(t.ty, usize::try_from(rows).unwrap(), usize::try_from(t.shape[0]).unwrap())
            {
                assert!(there.starts_with(&ARRANGED), "{name}: {}", t.name);
                arranged += 1;
            } else {
                assert!(there == here, "{name}: {}", t.name);
            }
        }
        assert!(arranged > 0 || !name.contains("v4"), "{name}: no tensor has tiles");
    }
}

/// Many slabs, the last one short, in two chunks of which the first is full.
#[test]
fn slabs_of_several_chunks_make_the_hash_of_the_whole() {
    let card = card().with("FAKE_CUDA_TOTAL_MIB", 1200);
    let model = card.model("two-chunks", 1 << 23);
    let card = card.with("FAKE_CUDA_TEST_MODEL", model.display());
    if !card.is_here("slabs_of_several_chunks_make_the_hash_of_the_whole") {
        return;
    }
    let path = PathBuf::from(std::env::var_os("FAKE_CUDA_TEST_MODEL").unwrap());
    let (device, chunks) = published(&path, Choice::CudaVmm);
    assert_eq!(chunks.len(), 2);
    drop(chunks);
    assert_eq!(device, published(&path, Choice::Memfd).0);
}

/// Copies are checked too: what arrives with a bit wrong has another hash, and a load that was told which one refuses it.
#[test]
fn a_copy_that_went_wrong_is_found_by_the_hash() {
    if !card().with("FAKE_CUDA_FLIP", 1).is_here("a_copy_that_went_wrong_is_found_by_the_hash") {
        return;
    }
    let path = fixture("tiny-llama/tiny-llama.gguf");
    let (host, _) = published(&path, Choice::Memfd);
    let (Report::Failed(failure), code, chunks) = load(&path, Choice::CudaVmm, Some(host.clone())) else {
        panic!("it was published")
    };
    assert_eq!((failure.code.as_str(), failure.exit, chunks.len()), ("content_mismatch", code, 0), "{failure:?}");
    assert!(failure.message.contains(&format!("but {host} was expected")), "{failure:?}");
    // The next one arrives as it is.
    let (last, code, _) = load(&path, Choice::CudaVmm, Some(host));
    assert!(matches!(last, Report::Published { .. }) && code == 0, "{last:?}");
}
