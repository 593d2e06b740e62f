//! A scripted model over a trivial device, for tests of the scheduler and of what stands on the engine.
//!
//! The device keeps token ids where a real one keeps KV rows, and checks what the engine promises: rows are written in
//! order, inside what was committed, and never after a trim that removed them. The model's logits are a function of the
//! tokens in the bank, so a mix-up of banks or positions changes the output.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use ds4_kernels::ops::{RowQuery, RowSummary, summarise_row};
use ds4_kernels::{Attention, BatchPlan, Device, DeviceError, Rope, StateKind, StateSpec, StateType, TensorSource};
use ds4_models::speculation::{DraftRequest, Drafter};
use ds4_models::{Model, ModelError, ModelShape};

use crate::vocab::Vocabulary;

/// State spec of the mock: 8 bytes a token.
pub fn mock_spec() -> StateSpec {
    StateSpec { slots: vec![StateKind::Append { width: 2, ty: StateType::F32 }] }
}

/// State spec of a mock that cannot be truncated: also 8 bytes a token, and a window of 4 rows.
pub fn mock_windowed_spec() -> StateSpec {
    let mut spec = mock_spec();
    spec.slots.push(StateKind::Ring { rows: 4, width: 2, ty: StateType::F32 });
    spec
}

const BYTES: usize = 8;

/// A bank of the mock: the tokens whose rows were written.
#[derive(Debug, Default)]
pub struct MockBank {
    tokens: Vec<u32>,
    committed: usize,
    context: usize,
    /// It has a window, so a trim to anything but nothing leaves it unfit for use until it is rewound.
    windowed: bool,
    torn: bool,
}

/// The device; clones share their memory account.
#[derive(Clone, Debug)]
pub struct MockDevice {
    committed: Arc<AtomicUsize>,
    limit: Arc<AtomicUsize>,
    reads: Arc<AtomicUsize>,
}

impl Default for MockDevice {
    fn default() -> Self {
        Self { committed: Arc::default(), limit: Arc::new(AtomicUsize::new(usize::MAX)), reads: Arc::default() }
    }
}

impl MockDevice {
    /// Lets all banks together commit at most `tokens` rows.
    pub fn limit_tokens(&self, tokens: usize) {
        self.limit.store(tokens, SeqCst);
    }

    /// Rows of logits that were read whole so far.
    pub fn rows_read(&self) -> usize {
        self.reads.load(SeqCst)
    }

    /// Writes rows as a forward pass does.
    pub fn write(&self, bank: &mut MockBank, first_pos: usize, tokens: &[u32]) {
        assert!(!bank.torn, "a window was cut and not rewound");
        assert_eq!(bank.tokens.len(), first_pos, "rows must be written in order");
        bank.tokens.extend_from_slice(tokens);
        assert!(bank.tokens.len() <= bank.committed, "rows past what is committed");
    }
}

impl Device for MockDevice {
    type Buffer = Vec<f32>;
    type Weight = ();
    type Bank = MockBank;
    type Step = ();
    /// The tokens that the bank held.
    type Checkpoint = Vec<u32>;
    type Room = ();

    fn describe(&self) -> String {
        "mock".into()
    }

    fn bank(&self, spec: &StateSpec, context: usize) -> Result<MockBank, DeviceError> {
        Ok(MockBank { context, windowed: !spec.truncatable(), ..MockBank::default() })
    }

    fn bank_commit(&self, bank: &mut MockBank, tokens: usize) -> Result<(), DeviceError> {
        assert!(tokens <= bank.context, "commit past the context");
        let more = tokens.saturating_sub(bank.committed);
        if self.committed.load(SeqCst) + more > self.limit.load(SeqCst) {
            return Err(DeviceError::OutOfMemory { what: "mock bank", missing: more * BYTES });
        }
        self.committed.fetch_add(more, SeqCst);
        bank.committed += more;
        Ok(())
    }

    fn bank_trim(&self, bank: &mut MockBank, tokens: usize) {
        bank.torn = tokens > 0 && (bank.torn || bank.windowed && tokens < bank.tokens.len());
        bank.tokens.truncate(tokens);
        let less = bank.committed.saturating_sub(tokens);
        self.committed.fetch_sub(less, SeqCst);
        bank.committed -= less;
    }

    fn bank_committed(&self, bank: &MockBank) -> usize {
        bank.committed * BYTES
    }

    fn bank_checkpoint(&self, bank: &MockBank, tokens: usize) -> Result<Vec<u32>, DeviceError> {
        assert!(!bank.torn && bank.tokens.len() == tokens, "a checkpoint of a whole bank at its own length");
        Ok(bank.tokens.clone())
    }

    fn bank_rewind(&self, bank: &mut MockBank, checkpoint: &Vec<u32>) {
        assert!(bank.tokens.starts_with(checkpoint), "a checkpoint of another sequence");
        self.bank_trim(bank, checkpoint.len());
        bank.torn = false;
    }

    fn bank_export(&self, bank: &MockBank, slot: usize, rows: Range<usize>, out: &mut Vec<u8>) {
        assert_eq!(slot, 0, "the mock keeps tokens only");
        out.extend(bank.tokens[rows].iter().flat_map(|t| u64::from(*t).to_le_bytes()));
    }

    fn bank_import(&self, bank: &mut MockBank, slot: usize, rows: Range<usize>, bytes: &[u8]) {
        assert!(slot == 0 && rows.end <= bank.committed, "the mock keeps tokens only");
        bank.tokens.resize(bank.tokens.len().max(rows.end), 0);
        for (t, b) in bank.tokens[rows].iter_mut().zip(bytes.as_chunks().0) {
            *t = u32::try_from(u64::from_le_bytes(*b)).expect("a token");
        }
    }

    fn read(&self, x: &Vec<f32>, row: usize, out: &mut Vec<f32>) {
        self.reads.fetch_add(1, SeqCst);
        out.clear();
        out.extend_from_slice(row_of(x, row));
    }

    fn summarise(&self, logits: &Vec<f32>, queries: &[RowQuery], out: &mut Vec<RowSummary>) {
        out.clear();
        out.extend(queries.iter().map(|q| summarise_row(&mut row_of(logits, q.row).to_vec(), q)));
    }

    fn bind(&self, _: &TensorSource) -> Result<(), DeviceError> {
        Ok(())
    }

    fn buffer(&self, _: usize) -> Vec<f32> {
        Vec::new()
    }

    fn room(&self) {}

    fn buffer_in(&self, (): &(), _: usize) -> Vec<f32> {
        Vec::new()
    }

    fn turn(&self, (): &()) {}

    fn step(&self, _: &BatchPlan, _: &mut [MockBank]) -> Result<(), DeviceError> {
        Ok(())
    }

    // The mock model computes nothing with the op set.
    fn embed(&self, (): &(), (): &(), _: &mut Vec<f32>) {}
    fn rms_norm(&self, _: &Vec<f32>, (): &(), _: f32, _: &mut Vec<f32>) {}
    fn matmul(&self, _: &Vec<f32>, _: &mut [(&(), &mut Vec<f32>)]) {}
    fn rope(&self, (): &(), _: &Rope, _: usize, _: &mut Vec<f32>) {}
    fn state_write(&self, (): &(), _: usize, _: &Vec<f32>) {}
    fn attention(&self, (): &(), _: &Attention, _: &Vec<f32>, _: &mut Vec<f32>) {}
    fn swiglu(&self, _: &Vec<f32>, _: &Vec<f32>, _: &mut Vec<f32>) {}
    fn add(&self, _: &mut Vec<f32>, _: &Vec<f32>) {}
    fn gather_wanted(&self, (): &(), _: &Vec<f32>, _: &mut Vec<f32>) {}
}

fn row_of(x: &[f32], row: usize) -> &[f32] {
    &x[row * MockModel::VOCAB..(row + 1) * MockModel::VOCAB]
}

/// What the mock model answers to a sequence: fills the logits, which are 0 everywhere before.
pub type Script = Box<dyn FnMut(&[u32], &mut [f32]) + Send>;

/// What the mock model does before each step; an error fails the step.
pub type BeforeStep = Box<dyn FnMut(&BatchPlan) -> Result<(), ModelError> + Send>;

/// What the mock drafter guesses: given the sequence up to the next token and how many guesses are wanted.
pub type Guesses = Box<dyn FnMut(&[u32], usize) -> Vec<u32> + Send>;

/// The model.
pub struct MockModel {
    shape: ModelShape,
    spec: StateSpec,
    logits: Vec<f32>,
    script: Script,
    before: BeforeStep,
    guesses: Option<Guesses>,
}

impl MockModel {
    /// Vocabulary size.
    pub const VOCAB: usize = 300;

    /// A model with its own answers.
    pub fn scripted(script: Script) -> Self {
        Self {
            shape: ModelShape { vocab: Self::VOCAB, context: 4096 },
            spec: mock_spec(),
            logits: Vec::new(),
            script,
            before: Box::new(|_| Ok(())),
            guesses: None,
        }
    }

    /// A model whose logits are pseudo-random numbers in -4..4, different for every sequence. It never favours
    /// [`MockVocabulary::EOG`].
    pub fn hashing() -> Self {
        Self::scripted(Box::new(Self::hash))
    }

    /// The script of [`MockModel::hashing`].
    pub fn hash(tokens: &[u32], logits: &mut [f32]) {
        let mut h = 0xcbf2_9ce4_8422_2325u64;
        for t in tokens {
            h = (h ^ u64::from(*t)).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        }
        for l in logits.iter_mut() {
            // xorshift64
            h ^= h << 13;
            h ^= h >> 7;
            h ^= h << 17;
            *l = f32::from(u8::try_from(h >> 56).unwrap_or(0)) / 32.0 - 4.0;
        }
        logits[MockVocabulary::EOG as usize] = -10.0;
    }

    /// A model that continues any prompt of `prompt_len` tokens with `reply`, then [`MockVocabulary::EOG`].
    pub fn replying(prompt_len: usize, reply: Vec<u32>) -> Self {
        Self::scripted(Box::new(move |tokens, logits| {
            let next = reply.get(tokens.len() - prompt_len).copied().unwrap_or(MockVocabulary::EOG);
            logits[next as usize] = 10.0;
        }))
    }

    /// The same model with another state spec, such as [`mock_windowed_spec`].
    pub fn keeping(mut self, spec: StateSpec) -> Self {
        self.spec = spec;
        self
    }

    /// The same model with a drafter.
    pub fn guessing(mut self, guesses: Guesses) -> Self {
        self.guesses = Some(guesses);
        self
    }

    /// The same model with something to do before each step.
    pub fn before(mut self, before: BeforeStep) -> Self {
        self.before = before;
        self
    }
}

impl Model<MockDevice> for MockModel {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn state(&self) -> &StateSpec {
        &self.spec
    }

    fn forward(&mut self, device: &MockDevice, plan: &BatchPlan, banks: &mut [MockBank]) -> Result<(), ModelError> {
        (self.before)(plan)?;
        self.logits.clear();
        for span in &plan.spans {
            let rows = span.first_row..span.first_row + span.rows;
            let bank = &mut banks[span.bank];
            device.write(bank, span.first_pos, &plan.tokens[rows.clone()]);
            for wanted in plan.wanted.iter().filter(|w| rows.contains(w)) {
                let start = self.logits.len();
                self.logits.resize(start + Self::VOCAB, 0.0);
                let seen = span.first_pos + (wanted - span.first_row) + 1;
                (self.script)(&bank.tokens[..seen], &mut self.logits[start..]);
            }
        }
        Ok(())
    }

    fn logits(&self) -> &Vec<f32> {
        &self.logits
    }

    fn drafter(&mut self) -> Option<&mut dyn Drafter<MockDevice>> {
        if self.guesses.is_some() { Some(self) } else { None }
    }
}

/// The drafter keeps the tokens that it is shown, as rows are kept, and guesses from them. What it was not shown is 0.
impl Drafter<MockDevice> for MockModel {
    fn state(&self) -> &StateSpec {
        &self.spec
    }

    fn window(&self) -> usize {
        usize::MAX
    }

    fn draft(
        &mut self,
        device: &MockDevice,
        plan: &BatchPlan,
        requests: &[DraftRequest],
        banks: &mut [MockBank],
        ends: &dyn Fn(u32) -> bool,
    ) -> Result<Vec<Vec<u32>>, ModelError> {
        let mut all = Vec::new();
        for r in requests {
            let span = plan.spans.iter().find(|s| (s.first_row..s.first_row + s.rows).contains(&r.first_row));
            let Some(span) = span else { panic!("{r:?} is of no span") };
            let end = r.first_row + r.rows;
            assert!(r.rows > 0 && end <= span.first_row + span.rows, "{r:?} lies in one span");
            assert_eq!(r.first_pos, span.first_pos + r.first_row - span.first_row, "{r:?}");
            let bank = &mut banks[r.bank];
            // A bank's new sequence begins at the prefix that it shares with the old one, of which the drafter may know less.
            bank.tokens.resize(r.first_pos, 0);
            bank.torn = false;
            device.bank_commit(bank, r.first_pos + r.rows)?;
            device.write(bank, r.first_pos, &plan.tokens[r.first_row..end]);
            let known: Vec<u32> = bank.tokens.iter().copied().chain([r.next]).collect();
            let guesses = self.guesses.as_mut().filter(|_| r.drafts > 0 && !ends(r.next));
            let guesses = guesses.map(|g| g(&known, r.drafts)).unwrap_or_default();
            assert!(guesses.len() <= r.drafts, "no more than wanted");
            all.push(guesses);
        }
        Ok(all)
    }
}

/// Tokens 0–255 are single bytes; 256 and up are control tokens without text, [`MockVocabulary::EOG`] ends a sequence.
#[derive(Clone, Copy, Debug, Default)]
pub struct MockVocabulary;

impl MockVocabulary {
    /// End of generation.
    pub const EOG: u32 = 256;
    /// Beginning of sequence.
    pub const BOS: u32 = 257;
}

static BYTE_TABLE: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0u8;
    while i < 255 {
        table[i as usize] = i;
        i += 1;
    }
    table[255] = 255;
    table
};

impl Vocabulary for MockVocabulary {
    fn token_bytes(&self, token: u32) -> &[u8] {
        usize::try_from(token).ok().and_then(|t| BYTE_TABLE.get(t..=t)).unwrap_or_default()
    }

    fn is_eog(&self, token: u32) -> bool {
        token == Self::EOG
    }

    fn is_control(&self, token: u32) -> bool {
        token >= 256
    }
}
