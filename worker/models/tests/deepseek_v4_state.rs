//! State of DeepSeek V4 sequences: truncation to checkpoints, saving, restoring, and what is refused.
//!
//! Two oracles: transformers' logits (fixtures, bound as in `deepseek_v4.rs`), and our own run without any of it, whose logits
//! must come out again bit for bit.

#[path = "support/seeded.rs"]
mod seeded;
mod support;

use ds4_kernels::cpu::{CpuBank, CpuCheckpoint};
use ds4_kernels::ops::KvNumerics;
use ds4_kernels::{BatchPlan, CpuDevice, Device};
use ds4_kv::{Container, ContainerError, Payload, PayloadError, PayloadShape, Reason};
use ds4_models::Model;
use ds4_models::deepseek_v4::DeepseekV4;
use ds4_models::session::{Session, SessionError, SessionFormat, SessionLimits, restore_container};
use serde_json::Value;
use support::{argmax, fixture, json, tokens};

const BOUND: f64 = 1e-4;
const CONTEXT: usize = 700;
const LIMITS: SessionLimits = SessionLimits { context: CONTEXT, prefill_chunk: 64 };

fn case(name: &str) -> Value {
    let all = json("deepseek_v4/cases.json");
    all.as_array().unwrap().iter().find(|c| c["name"] == name).unwrap_or_else(|| panic!("no case {name}")).clone()
}

/// A model with one bank that holds a sequence.
struct Live {
    device: CpuDevice,
    model: DeepseekV4<CpuDevice>,
    banks: Vec<CpuBank>,
    sequence: Vec<u32>,
}

impl Live {
    fn new(case: &Value, numerics: KvNumerics) -> Self {
        let device = CpuDevice::default();
        let model = DeepseekV4::build(&device, &seeded::weights(case), numerics).unwrap();
        let banks = vec![device.bank(model.state(), CONTEXT).unwrap()];
        Self { device, model, banks, sequence: Vec::new() }
    }

    /// Appends tokens in chunks; logits of each.
    fn feed(&mut self, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        for tokens in tokens.chunks(chunk) {
            let mut plan = BatchPlan::default();
            plan.push(0, self.sequence.len(), tokens, false);
            plan.wanted = (0..tokens.len()).collect();
            self.sequence.extend_from_slice(tokens);
            self.device.bank_commit(&mut self.banks[0], self.sequence.len()).unwrap();
            self.model.forward(&self.device, &plan, &mut self.banks).unwrap();
            for i in 0..tokens.len() {
                rows.push(Vec::new());
                self.device.read(self.model.logits(), i, rows.last_mut().unwrap());
            }
        }
        rows
    }

    fn reset(&mut self, tokens: &[u32]) -> Vec<Vec<f32>> {
        self.device.bank_trim(&mut self.banks[0], 0);
        self.sequence.clear();
        self.feed(tokens, 64)
    }

    fn checkpoint(&self) -> CpuCheckpoint {
        self.device.bank_checkpoint(&self.banks[0], self.sequence.len()).unwrap()
    }

    fn rewind(&mut self, to: &CpuCheckpoint, tokens: usize) {
        self.device.bank_rewind(&mut self.banks[0], to);
        self.sequence.truncate(tokens);
    }

    /// Greedy decode from `logits`; every row on the way.
    fn decode(&mut self, mut logits: Vec<f32>, n: usize) -> Vec<Vec<f32>> {
        (0..n)
            .map(|_| {
                logits = self.feed(&[argmax(&logits)], 1).remove(0);
                logits.clone()
            })
            .collect()
    }

    fn save(&self, logits: &[f32]) -> Vec<u8> {
        self.model.save(&self.device, &self.banks[0], &self.sequence, logits, &LIMITS)
    }

    fn restore(&mut self, payload: &[u8]) -> Result<Session, SessionError> {
        let got = self.model.restore(&self.device, &mut self.banks[0], payload, None, &LIMITS)?;
        self.sequence.clone_from(&got.tokens);
        Ok(got)
    }

    fn restore_file(&mut self, file: &[u8]) -> Result<(Session, bool), SessionError> {
        restore_container::<CpuDevice>(&self.model, &self.device, &mut self.banks[0], file, 2, &LIMITS)
    }

    /// Every byte of the bank.
    fn state(&self) -> Vec<Vec<u8>> {
        let slots = &self.model.state().slots;
        let export = |(i, kind): (usize, &ds4_kernels::StateKind)| {
            let mut out = Vec::new();
            self.device.bank_export(&self.banks[0], i, 0..kind.rows(self.sequence.len()), &mut out);
            out
        };
        slots.iter().enumerate().map(export).collect()
    }
}

fn same(got: &[Vec<f32>], want: &[Vec<f32>], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.iter().zip(w).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: row {i} has other bits");
    }
}

/// Largest error of `got`, the logits from position `from` on, over transformers' rows there, relative to their spread.
fn error(case: &Value, from: usize, got: &[Vec<f32>]) -> (f64, usize) {
    let name = case["name"].as_str().unwrap();
    let bytes = std::fs::read(fixture(&format!("deepseek_v4/{name}.f32"))).unwrap();
    let values: Vec<f64> = bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    let vocab = usize::try_from(case["vocab"].as_u64().unwrap()).unwrap();
    let spread = case["std"].as_f64().unwrap();
    let (mut worst, mut compared) = (0.0f64, 0);
    for (row, want) in tokens(&case["rows"]).into_iter().zip(values.chunks_exact(vocab)) {
        let Some(got) = (row as usize).checked_sub(from).and_then(|i| got.get(i)) else { continue };
        compared += 1;
        for (g, w) in got.iter().zip(want) {
            worst = support::greater(worst, (f64::from(*g) - w).abs() / spread);
        }
    }
    (worst, compared)
}

/// Window edges, compressor edges, and places inside windows.
const EDGES: [usize; 13] = [1, 3, 4, 5, 8, 127, 128, 129, 130, 200, 255, 256, 257];

/// How the rest is fed after each of them.
const CHUNKS: [usize; 13] = [64, 1, 3, 128, 1, 3, 64, 1, 128, 3, 64, 1, 3];

/// Tokens that are not the fixture's.
fn detour(n: usize) -> Vec<u32> {
    (0..n).map(|i| u32::try_from((i * i * 31 + 7 * i + 5) % 160).unwrap()).collect()
}

fn truncates(name: &str) {
    let case = case(name);
    let ids = tokens(&case["ids"]);
    let mut live = Live::new(&case, KvNumerics::Reference);
    let whole = live.reset(&ids);
    let (mut worst, mut rows) = (0.0f64, 0);
    for (at, chunk) in EDGES.into_iter().zip(CHUNKS).filter(|(at, _)| at + 10 < ids.len()) {
        live.reset(&ids[..at]);
        let checkpoint = live.checkpoint();
        // Far enough to overwrite the ring and to finish rows of both ratios; then again, shorter than a window.
        for (n, pieces) in [(150, 40), (2, 1)] {
            live.feed(&detour(n), pieces);
            live.rewind(&checkpoint, at);
        }
        let rest = live.feed(&ids[at..], chunk);
        same(&rest, &whole[at..], &format!("{name} from {at} in chunks of {chunk}"));
        let (e, n) = error(&case, at, &rest);
        worst = worst.max(e);
        rows += n;
    }
    println!("{name}: {worst:.2e} over {rows} rows");
    assert!(rows > 60 && worst <= BOUND, "{name}: {worst:.3e} over {rows} rows");
}

/// What continues after save and restore, of `name` at every edge, in another worker whose bank was in use.
fn survives(name: &str, numerics: KvNumerics) {
    let case = case(name);
    let ids = tokens(&case["ids"]);
    let (mut live, mut other) = (Live::new(&case, numerics), Live::new(&case, numerics));
    let (mut worst, mut rows) = (0.0f64, 0);
    for (at, chunk) in EDGES.into_iter().zip(CHUNKS).filter(|(at, _)| at + 20 < ids.len()) {
        let logits = live.reset(&ids[..at]).pop().unwrap();
        let payload = live.save(&logits);
        let checkpoint = live.checkpoint();
        let decoded = live.decode(logits.clone(), 20);

        other.reset(&detour(if at % 2 == 0 { 300 } else { 3 }));
        let session = other.restore(&payload).unwrap();
        assert_eq!(session.tokens, ids[..at], "{name} at {at}");
        same(std::slice::from_ref(&session.logits), std::slice::from_ref(&logits), "saved logits");
        assert!(other.save(&session.logits) == payload, "{name} at {at}: saved again, other bytes");
        live.rewind(&checkpoint, at);
        assert!(other.state() == live.state(), "{name} at {at}: other state");
        same(&other.decode(session.logits, 20), &decoded, &format!("{name} decoded from {at}"));

        if numerics == KvNumerics::Reference {
            other.restore(&payload).unwrap();
            let rest = other.feed(&ids[at..], chunk);
            let (e, n) = error(&case, at, &rest);
            worst = worst.max(e);
            rows += n;
        }
    }
    if numerics == KvNumerics::Reference {
        println!("{name}: {worst:.2e} over {rows} rows");
        assert!(rows > 60 && worst <= BOUND, "{name}: {worst:.3e} over {rows} rows");
    }
}

macro_rules! each {
    ($($truncated:ident $saved:ident: $name:literal;)*) => { $(
        #[test]
        fn $truncated() {
            truncates($name);
        }

        #[test]
        fn $saved() {
            survives($name, KvNumerics::Reference);
            survives($name, KvNumerics::Official);
        }
    )* };
}

each! {
    deepseek_v4_truncated_sliding_window deepseek_v4_saved_sliding_window: "swa";
    deepseek_v4_truncated_compressed_by_4 deepseek_v4_saved_compressed_by_4: "csa";
    deepseek_v4_truncated_compressed_by_128 deepseek_v4_saved_compressed_by_128: "hca";
    deepseek_v4_truncated_hash_routing deepseek_v4_saved_hash_routing: "hash";
    deepseek_v4_truncated_mixed_layers deepseek_v4_saved_mixed_layers: "mixed";
    deepseek_v4_truncated_past_the_yarn_context deepseek_v4_saved_past_the_yarn_context: "yarn";
    deepseek_v4_truncated_pro_schedule deepseek_v4_saved_pro_schedule: "pro-schedule";
    deepseek_v4_truncated_production_geometry deepseek_v4_saved_production_geometry: "production-geometry";
    deepseek_v4_truncated_with_the_indexer_cutting deepseek_v4_saved_with_the_indexer_cutting: "cut";
}

#[test]
fn deepseek_v4_an_empty_sequence_is_saved_and_restored() {
    let case = case("mixed");
    let mut live = Live::new(&case, KvNumerics::Official);
    let payload = live.save(&vec![0.0; 160]);
    live.reset(&detour(200));
    assert!(live.restore(&payload).unwrap().tokens.is_empty());
    let got = live.feed(&detour(140), 64);
    let want = live.reset(&detour(140));
    same(&got, &want, "after an empty session");
}

/// The payload of `mixed` (six layers: window, window, 4, 128, 4, 128) after `n` tokens, read apart by the published layout.
struct Layout {
    window: Vec<f32>,
    compressed: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
}

fn layer_2(live: &mut Live, n: usize) -> Layout {
    let logits = live.reset(&detour(n)).pop().unwrap();
    let bytes = live.save(&logits);
    let words: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    // Header, ids, logits, two counts a layer; then two layers of window rows.
    let mut at = 13 + n + 160 + 2 * 6 + 2 * 32 * n.min(128);
    let mut take = |len: usize| {
        at += len;
        words[at - len..at].to_vec()
    };
    Layout { window: take(32 * n.min(128)), compressed: take(32 * (n / 4)), values: take(8 * 64), scores: take(8 * 64) }
}

#[test]
fn deepseek_v4_payloads_have_the_published_order() {
    let mut live = Live::new(&case("mixed"), KvNumerics::Official);
    let [a, b] = [150, 151].map(|n| layer_2(&mut live, n));
    // Oldest first: one more token moves the window by one row.
    assert_eq!(a.window[32..], b.window[..127 * 32]);
    assert_ne!(a.window[..32], b.window[..32]);
    // Finished rows are appended to; at 150 and 151 tokens there are 37.
    assert_eq!(a.compressed, b.compressed);
    assert_eq!(a.compressed.len(), 37 * 32);
    let c = layer_2(&mut live, 152);
    assert_eq!(c.compressed[..37 * 32], a.compressed);
    // The token at position 150 took slot 4 + 150 mod 4 of the frontier, value and score, and nothing else.
    for (before, after) in [(&a.values, &b.values), (&a.scores, &b.scores)] {
        for (slot, (x, y)) in before.chunks(64).zip(after.chunks(64)).enumerate() {
            assert_eq!(x != y, slot == 6, "slot {slot}");
        }
    }
    // Before the first window is whole, the slots of the previous one are empty.
    let d = layer_2(&mut live, 3);
    assert!(d.scores[..4 * 64].iter().all(|s| *s == f32::NEG_INFINITY) && d.values[..4 * 64].iter().all(|v| *v == 0.0));
    assert!(d.scores[4 * 64..7 * 64].iter().all(|s| s.is_finite()));
    // Raw rows are f16 and, but for 8 rotary elements, FP8: at most 4 significant bits.
    for row in a.window.chunks(32) {
        assert!(row[..24].iter().all(|v| v.to_bits() & 0x000f_ffff == 0), "{row:?}");
        assert!(row[24..].iter().all(|v| v.to_bits() & 0x1fff == 0), "{row:?}");
    }
}

/// Other engines write other values where none is read: −1e30 for the score of an empty slot, and, after a prefill, whatever they
/// have in slots that the open window has not reached. What continues must not depend on it.
#[test]
fn deepseek_v4_what_other_engines_leave_in_unread_slots_changes_nothing() {
    let case = case("mixed");
    let shape = PayloadShape {
        context: CONTEXT,
        prefill_chunk: 64,
        ring_rows: 2304,
        window: 128,
        ratios: vec![0, 0, 4, 128, 4, 128],
        head_dim: 32,
        index_dim: 16,
        vocab: 160,
    };
    let mut live = Live::new(&case, KvNumerics::Official);
    for at in [1, 3, 4, 6, 130, 259] {
        let logits = live.reset(&detour(at)).pop().unwrap();
        let bytes = live.save(&logits);
        let want = live.decode(logits.clone(), 140);

        let mut payload = Payload::decode(&bytes, &shape).unwrap();
        let mut changed = 0;
        for (layer, ratio) in payload.layers.iter_mut().zip(&shape.ratios) {
            let overlap = *ratio == 4;
            for (c, dim) in [(&mut layer.main, 32), (&mut layer.index, 16)] {
                let Some(c) = c else { continue };
                let width = if overlap { 2 * dim } else { dim };
                let open = if overlap { 4 } else { 0 };
                let unread = (open + at % ratio) * width;
                for v in c.values[unread..].iter_mut().chain(&mut c.scores[unread..]) {
                    *v = 12.5;
                    changed += 1;
                }
                for s in c.scores.iter_mut().filter(|s| **s == f32::NEG_INFINITY) {
                    *s = -1e30;
                    changed += 1;
                }
            }
        }
        assert!(changed > 0);
        live.reset(&detour(20));
        let session = live.restore(&payload.encode(&shape)).unwrap();
        same(&live.decode(session.logits, 140), &want, &format!("from {at}"));
    }
}

fn container(live: &Live, payload: Vec<u8>) -> Container {
    Container {
        quant_bits: 2,
        reason: Reason::Continued,
        visible: 0,
        tokens: u32::try_from(live.sequence.len()).unwrap(),
        hits: 0,
        context: u32::try_from(CONTEXT).unwrap(),
        created: 1,
        last_used: 2,
        text: b"key".to_vec(),
        payload,
        tool_map: Vec::new(),
    }
}

/// A bank in use that must not notice what is refused.
struct Guard {
    live: Live,
    logits: Vec<f32>,
    state: Vec<Vec<u8>>,
    want: Vec<Vec<f32>>,
}

impl Guard {
    fn new(case: &Value, numerics: KvNumerics) -> Self {
        let mut live = Live::new(case, numerics);
        let logits = live.reset(&detour(141)).pop().unwrap();
        let checkpoint = live.checkpoint();
        let want = live.decode(logits.clone(), 20);
        live.rewind(&checkpoint, 141);
        let state = live.state();
        Self { live, logits, state, want }
    }

    fn refuses(&mut self, payload: &[u8]) -> SessionError {
        let e = self.live.restore(payload).expect_err("a refusal");
        assert!(self.live.state() == self.state, "refused with {e}, but the bank was touched");
        e
    }

    fn refuses_file(&mut self, file: &[u8]) -> SessionError {
        self.live.restore_file(file).expect_err("a refusal")
    }

    /// The sequence goes on as if nothing had been tried.
    fn continues(mut self) -> Live {
        assert!(self.live.state() == self.state, "the bank was touched");
        same(&self.live.decode(self.logits, 20), &self.want, "after refusals");
        self.live
    }
}

/// A saved session of `mixed`.
fn saved(case: &Value, numerics: KvNumerics, n: usize) -> (Live, Vec<u8>) {
    let mut writer = Live::new(case, numerics);
    let logits = writer.reset(&tokens(&case["ids"])[..n]).pop().unwrap();
    let payload = writer.save(&logits);
    (writer, payload)
}

#[test]
fn deepseek_v4_refused_payloads_leave_a_live_bank_alone() {
    let case = case("mixed");
    let (_, payload) = saved(&case, KvNumerics::Official, 130);
    let mut guard = Guard::new(&case, KvNumerics::Official);
    let with = |word: usize, v: u32| {
        let mut b = payload.clone();
        b[4 * word..4 * word + 4].copy_from_slice(&v.to_le_bytes());
        b
    };
    use PayloadError as P;
    use SessionError as S;
    assert!(matches!(guard.refuses(&with(0, 1)), S::Payload(P::Magic { found: 1 })));
    assert!(matches!(guard.refuses(&with(1, 3)), S::Payload(P::Version { found: 3 })));
    let shape = |e| match e {
        S::Payload(P::Shape { field, .. }) => field,
        e => panic!("{e}"),
    };
    for (word, v, field) in [
        (2, 701, "context"),
        (3, 65, "prefill chunk"),
        (4, 0, "ring capacity"),
        (5, 127, "window"),
        (6, 178, "compressed capacity"),
        (7, 700, "token count"),
        (8, 7, "layer count"),
        (9, 64, "row width"),
        (10, 32, "indexer row width"),
        (11, 161, "vocabulary"),
        (12, 127, "live window rows"),
        (13 + 130 + 160 + 2, 31, "compressed row count"),
        (13 + 130 + 160 + 6 + 3, 1, "indexer row count"),
    ] {
        assert_eq!(shape(guard.refuses(&with(word, v))), field);
    }
    // One token more: everything behind the ids is a word off.
    assert_eq!(shape(guard.refuses(&with(7, 131))), "compressed row count");
    for n in (0..payload.len()).step_by(1009).chain([payload.len() - 1]) {
        assert!(matches!(guard.refuses(&payload[..n]), S::Payload(P::Truncated { .. })), "{n} bytes");
    }
    let longer = [&payload[..], &[0]].concat();
    assert!(matches!(guard.refuses(&longer), S::Payload(P::Trailing { extra: 1 })));

    assert!(matches!(guard.refuses(&with(13 + 7, 160)), S::Token { index: 7, token: 160, vocab: 160 }));
    let nan = f32::NAN.to_bits();
    let ids_end = 13 + 130;
    assert!(matches!(guard.refuses(&with(ids_end, nan)), S::Value { .. }));
    // The last word of all: a score of the last layer's frontier, which may be −∞ but not +∞.
    let last = payload.len() / 4 - 1;
    let e = guard.refuses(&with(last, f32::INFINITY.to_bits()));
    assert!(e.to_string().starts_with("compressor frontier of layer 5"), "{e}");
    // The first window value of layer 0, off by an f16's last bit's half.
    let first = 13 + 130 + 160 + 12;
    let value = u32::from_le_bytes(payload[4 * first..4 * first + 4].try_into().unwrap());
    let e = guard.refuses(&with(first, value ^ 1));
    assert!(matches!(&e, S::Precision { place, .. } if place == "window rows of layer 0"), "{e}");
    guard.continues();
}

#[test]
fn deepseek_v4_a_session_of_other_numerics_is_refused() {
    let case = case("mixed");
    let (_, payload) = saved(&case, KvNumerics::Reference, 130);
    let mut guard = Guard::new(&case, KvNumerics::Official);
    let e = guard.refuses(&payload);
    assert!(matches!(e, SessionError::Precision { .. }) && e.to_string().contains("compute the prompt anew"), "{e}");
    guard.continues();
}

#[test]
fn deepseek_v4_any_flipped_byte_of_a_file_is_refused_and_leaves_a_live_bank_alone() {
    let case = case("mixed");
    let (writer, payload) = saved(&case, KvNumerics::Official, 9);
    let whole = container(&writer, payload.clone());
    let file = whole.encode();
    let mut guard = Guard::new(&case, KvNumerics::Official);
    for at in 0..file.len() {
        let mut bad = file.clone();
        bad[at] ^= 1 << (at % 8);
        guard.refuses_file(&bad);
    }
    use SessionError as S;
    let with = |f: &dyn Fn(&mut Container)| {
        let mut c = whole.clone();
        f(&mut c);
        c.encode()
    };
    for n in [0, 51, 54, 400, file.len() - 1] {
        assert!(matches!(guard.refuses_file(&file[..n]), S::Container(_)), "{n} bytes");
    }
    assert!(matches!(guard.refuses_file(&[&file[..], b"x"].concat()), S::Container(ContainerError::Trailing { .. })));
    assert!(matches!(guard.refuses_file(&with(&|c| c.quant_bits = 4)), S::Quantisation { found: 4, want: 2 }));
    assert!(matches!(guard.refuses_file(&with(&|c| c.tokens = 8)), S::Mismatch { container: 8, payload: 9 }));
    assert!(matches!(guard.refuses_file(&with(&|c| c.payload[0] = 0)), S::Payload(PayloadError::Magic { .. })));
    // And the good file is taken, by a bank in use.
    let mut live = guard.continues();
    let (session, checked) = live.restore_file(&file).unwrap();
    assert!(checked && session.tokens == writer.sequence);
}
