//! Banks of the CUDA device on the fake driver, whose copies are real, against those of the CPU: the same rows whatever was committed,
//! trimmed, kept and gone back to, and memory that follows them.

use std::ops::Range;

use ds4_kernels::conformance::Random;
use ds4_kernels::cuda::CudaDevice;
use ds4_kernels::{CpuDevice, Device, StateKind, StateSpec, StateType};
use ds4_tests::card::Card;

const CONTEXT: usize = 40_000;

fn spec() -> StateSpec {
    let fp8 = StateType::Fp8 { rotary: 64 };
    StateSpec {
        slots: vec![
            StateKind::Ring { rows: 128, width: 512, ty: fp8 },
            StateKind::Append { width: 96, ty: StateType::F16 },
            StateKind::Pooled { width: 512, ty: fp8, tokens: 4 },
            StateKind::Fixed { elems: 4096 },
            StateKind::Pooled { width: 128, ty: StateType::Fp4, tokens: 4 },
            StateKind::Pooled { width: 512, ty: fp8, tokens: 128 },
            StateKind::Append { width: 7, ty: StateType::F32 },
        ],
    }
}

/// A sequence's state on a device.
struct Kept<D: Device> {
    device: D,
    spec: StateSpec,
    bank: D::Bank,
    tokens: usize,
    checkpoint: Option<(D::Checkpoint, usize)>,
}

impl<D: Device> Kept<D> {
    fn new(device: D) -> Self {
        let spec = spec();
        let bank = device.bank(&spec, CONTEXT).unwrap();
        Self { device, spec, bank, tokens: 0, checkpoint: None }
    }

    fn export(&self, slot: usize, rows: Range<usize>) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.device.bank_export(&self.bank, slot, rows, &mut bytes);
        bytes
    }

    /// All rows of every slot.
    fn all(&self) -> Vec<Vec<u8>> {
        self.spec.slots.iter().enumerate().map(|(i, s)| self.export(i, 0..s.rows(self.tokens))).collect()
    }

    /// Appends tokens: their rows, and all of rings and fixed blocks, are random.
    fn append(&mut self, count: usize, rng: &mut Random) {
        let before = self.tokens;
        self.tokens += count;
        self.device.bank_commit(&mut self.bank, self.tokens).unwrap();
        for (i, slot) in self.spec.slots.iter().enumerate() {
            let whole = matches!(slot, StateKind::Ring { .. } | StateKind::Fixed { .. });
            let rows = if whole { 0 } else { slot.rows(before) }..slot.rows(self.tokens);
            let len = self.export(i, rows.clone()).len();
            let bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| rng.bits().to_le_bytes()).take(len).collect();
            self.device.bank_import(&mut self.bank, i, rows, &bytes);
        }
    }

    fn keep(&mut self) {
        self.checkpoint = Some((self.device.bank_checkpoint(&self.bank, self.tokens).unwrap(), self.tokens));
    }

    /// Back to what was kept, if nothing before it has changed since.
    fn go_back(&mut self) {
        if let Some((checkpoint, tokens)) = self.checkpoint.take() {
            self.device.bank_rewind(&mut self.bank, &checkpoint);
            self.tokens = tokens;
        }
    }

    fn trim(&mut self, tokens: usize) {
        self.device.bank_trim(&mut self.bank, tokens);
        self.tokens = tokens;
        self.checkpoint.take_if(|(_, at)| *at > tokens);
    }
}

#[test]
fn rows_are_those_of_the_cpus_bank_and_memory_follows_them() {
    let card = Card::new().with("FAKE_CUDA_PAGEABLE", 1);
    if !card.is_here("rows_are_those_of_the_cpus_bank_and_memory_follows_them") {
        return;
    }
    let seed = Random::fresh_seed();
    println!("seed {seed}");
    let (mut rng, mut rows) = (Random::new(seed), [Random::new(seed + 1), Random::new(seed + 1)]);
    let device = CudaDevice::open(0).unwrap();
    let free = device.context().memory().unwrap().0;
    let (mut cuda, mut cpu) = (Kept::new(device), Kept::new(CpuDevice::default()));
    // Three blocks of tokens.
    cuda.append(9000, &mut rows[0]);
    cpu.append(9000, &mut rows[1]);
    for step in 0..120 {
        let tokens = cuda.tokens;
        match rng.below(8) {
            0 => (cuda.keep(), cpu.keep()),
            1 => (cuda.go_back(), cpu.go_back()),
            2 => {
                let to = tokens - rng.below(tokens / 2 + 1);
                (cuda.trim(to), cpu.trim(to))
            }
            _ => {
                let wanted = [1, 3, 130, 4000][rng.below(4)];
                let count = wanted.min(CONTEXT - tokens);
                (cuda.append(count, &mut rows[0]), cpu.append(count, &mut rows[1]))
            }
        };
        let other = cuda.all().iter().zip(cpu.all()).position(|(a, b)| *a != b);
        assert_eq!(other, None, "seed {seed}, step {step}: rows of a slot differ at {} tokens", cuda.tokens);
        let taken = usize::try_from(free - cuda.device.context().memory().unwrap().0).unwrap();
        let committed = cuda.device.bank_committed(&cuda.bank);
        // A checkpoint has whole rings, each of which begins at a multiple of 256 bytes; one of nothing takes a byte.
        let kept = cuda.checkpoint.as_ref().map_or(0, |_| cuda.spec.checkpoint_bytes(CONTEXT) + 2 * 256);
        let checkpoint = taken.checked_sub(committed).expect("what is committed is taken");
        assert!(checkpoint <= kept, "seed {seed}, step {step}: a checkpoint of {checkpoint} bytes");
        // Rest of the first rows, of the last block of tokens, and of the last piece of 2 MiB.
        assert!(committed <= cuda.spec.bytes(cuda.tokens) + (6 << 20), "{committed} bytes for {} tokens", cuda.tokens);
    }
    cuda.trim(0);
    assert_eq!(cuda.device.bank_committed(&cuda.bank), 0);
}
