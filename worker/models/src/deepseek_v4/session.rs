//! DeepSeek V4's session payload (DSV4 version 2, fact sheet sections 8.1 to 8.4) written from and read into a bank.
//!
//! The payload is f32 throughout. A bank of the `official` profile keeps raw rows in f16, compressed rows in FP8 with rotary parts
//! in f16, and indexer rows in FP4; each of their values is an f32, and encoding an f32 row again gives the same codes and scales
//! ([`ds4_kernels::math::packed`]), so rows go through the payload without loss. A row that encoding would change is refused: it
//! was saved under other numerics, and continuing from a rounded copy would give another sequence.
//!
//! Frontiers are written as they are: empty slots hold the score −∞ and value 0. Other writers put −1e30 there, which has the same
//! weight in a pooling, none.

use std::borrow::Cow;

use ds4_kernels::StateKind;
use ds4_kernels::ops::{HyperOps, MoeOps, SparseOps};
use ds4_kv::payload::{CompressorState, LayerState, Payload, PayloadShape};

use super::forward::DeepseekV4;
use super::state::CompressorSlots;
use crate::session::{Session, SessionError, SessionFormat, SessionLimits};

/// Rows that are encoded at a time.
const BLOCK: usize = 256;

/// A stretch of one slot's rows from row 0 on, in storage order.
struct Piece<'a> {
    layer: usize,
    what: &'static str,
    slot: usize,
    rows: Cow<'a, [f32]>,
    /// Elements from here on may be −∞: a frontier's scores.
    scores_from: usize,
}

impl Piece<'_> {
    fn place(&self) -> String {
        format!("{} of layer {}", self.what, self.layer)
    }
}

impl<D: SparseOps + HyperOps + MoeOps> DeepseekV4<D> {
    fn payload_shape(&self, limits: &SessionLimits) -> PayloadShape {
        let p = &self.p;
        PayloadShape {
            context: limits.context,
            prefill_chunk: limits.prefill_chunk,
            ring_rows: p.window,
            window: p.window,
            ratios: p.layers.iter().map(|l| l.ratio).collect(),
            head_dim: p.head_dim,
            index_dim: p.index_dim,
            vocab: p.vocab,
        }
    }

    /// The rows of a slot that exist after `tokens` tokens, in storage order.
    fn export(&self, device: &D, bank: &D::Bank, slot: usize, tokens: usize) -> Vec<f32> {
        let kind = self.spec.slots[slot];
        let (width, bytes_per_row) = (kind.width(), kind.ty().row_bytes(kind.width()));
        let rows = kind.rows(tokens);
        let mut out = vec![0.0; rows * width];
        let mut bytes = Vec::new();
        for from in (0..rows).step_by(BLOCK) {
            let to = rows.min(from + BLOCK);
            bytes.clear();
            device.bank_export(bank, slot, from..to, &mut bytes);
            for (row, bytes) in out[from * width..].chunks_exact_mut(width).zip(bytes.chunks_exact(bytes_per_row)) {
                kind.ty().decode(bytes, row);
            }
        }
        out
    }

    fn save_compressor(&self, device: &D, bank: &D::Bank, slots: CompressorSlots, tokens: usize) -> CompressorState {
        let rows = self.export(device, bank, slots.rows, tokens);
        let half = self.spec.slots[slots.frontier].width() / 2;
        let mut values = self.export(device, bank, slots.frontier, tokens);
        if values.is_empty() {
            // Of an empty sequence, as the first token will find it.
            return CompressorState { rows, values: vec![0.0; half], scores: vec![f32::NEG_INFINITY; half] };
        }
        let scores = values.split_off(half);
        CompressorState { rows, values, scores }
    }

    /// Everything of a payload that goes into a bank.
    fn pieces<'a>(&'a self, payload: &'a Payload) -> impl Iterator<Item = Piece<'a>> {
        let tokens = payload.tokens.len();
        let width = self.p.head_dim;
        self.slots.iter().zip(&payload.layers).enumerate().flat_map(move |(layer, (slots, state))| {
            let mut window = Cow::Borrowed(state.window.as_slice());
            if tokens > self.p.window {
                // Oldest first in the payload; position p in row p mod window in the ring.
                window.to_mut().rotate_right(tokens % self.p.window * width);
            }
            let mut out =
                vec![Piece { layer, what: "window rows", slot: slots.ring, rows: window, scores_from: usize::MAX }];
            let names = [("compressed rows", "compressor frontier"), ("indexer rows", "indexer frontier")];
            let both = [(slots.main, &state.main), (slots.index, &state.index)];
            for ((rows, frontier), (slots, state)) in names.into_iter().zip(both) {
                if let (Some(slots), Some(state)) = (slots, state) {
                    let finished = Cow::Borrowed(state.rows.as_slice());
                    out.push(Piece { layer, what: rows, slot: slots.rows, rows: finished, scores_from: usize::MAX });
                    if tokens > 0 {
                        let block = Cow::Owned([state.values.as_slice(), &state.scores].concat());
                        let scores_from = state.values.len();
                        out.push(Piece { layer, what: frontier, slot: slots.frontier, rows: block, scores_from });
                    }
                }
            }
            out
        })
    }

    /// Refuses what the bank could not hold exactly.
    fn check(&self, piece: &Piece<'_>) -> Result<(), SessionError> {
        let kind = self.spec.slots[piece.slot];
        let impossible =
            |(i, v): &(usize, &f32)| !(v.is_finite() || *i >= piece.scores_from && **v == f32::NEG_INFINITY);
        if let Some((_, value)) = piece.rows.iter().enumerate().find(impossible) {
            return Err(SessionError::Value { place: piece.place(), value: *value });
        }
        let (width, ty) = (kind.width(), kind.ty());
        let (mut bytes, mut back) = (vec![0; ty.row_bytes(width)], vec![0.0; width]);
        for row in piece.rows.chunks_exact(width) {
            ty.encode(row, &mut bytes);
            ty.decode(&bytes, &mut back);
            if let Some((value, _)) = row.iter().zip(&back).find(|(a, b)| a.to_bits() != b.to_bits()) {
                let (place, ty) = (piece.place(), format!("{ty:?}"));
                return Err(SessionError::Precision { place, value: *value, ty });
            }
        }
        Ok(())
    }

    fn import(&self, device: &D, bank: &mut D::Bank, piece: &Piece<'_>) {
        let kind = self.spec.slots[piece.slot];
        let (width, ty) = (kind.width(), kind.ty());
        let mut bytes = Vec::new();
        for (block, rows) in piece.rows.chunks(BLOCK * width).enumerate() {
            let count = rows.len() / width;
            bytes.resize(count * ty.row_bytes(width), 0);
            for (row, out) in rows.chunks_exact(width).zip(bytes.chunks_exact_mut(ty.row_bytes(width))) {
                ty.encode(row, out);
            }
            device.bank_import(bank, piece.slot, block * BLOCK..block * BLOCK + count, &bytes);
        }
    }
}

impl<D: SparseOps + HyperOps + MoeOps> SessionFormat<D> for DeepseekV4<D> {
    fn save(&self, device: &D, bank: &D::Bank, tokens: &[u32], logits: &[f32], limits: &SessionLimits) -> Vec<u8> {
        assert_eq!(logits.len(), self.p.vocab, "logits of the next token");
        let n = tokens.len();
        let layers = self
            .slots
            .iter()
            .map(|slots| {
                let mut window = self.export(device, bank, slots.ring, n);
                if n > self.p.window {
                    window.rotate_left(n % self.p.window * self.p.head_dim);
                }
                let compressor = |slots| self.save_compressor(device, bank, slots, n);
                LayerState { window, main: slots.main.map(compressor), index: slots.index.map(compressor) }
            })
            .collect();
        Payload { tokens: tokens.to_vec(), logits: logits.to_vec(), layers }.encode(&self.payload_shape(limits))
    }

    fn restore(
        &self,
        device: &D,
        bank: &mut D::Bank,
        payload: &[u8],
        tokens: Option<usize>,
        limits: &SessionLimits,
    ) -> Result<Session, SessionError> {
        let payload = Payload::decode(payload, &self.payload_shape(limits))?;
        if let Some(container) = tokens.filter(|t| *t != payload.tokens.len()) {
            return Err(SessionError::Mismatch { container, payload: payload.tokens.len() });
        }
        let vocab = self.p.vocab;
        let known = |token: u32| usize::try_from(token).is_ok_and(|t| t < vocab);
        if let Some((index, token)) = payload.tokens.iter().enumerate().find(|(_, t)| !known(**t)) {
            return Err(SessionError::Token { index, token: *token, vocab });
        }
        if let Some(value) = payload.logits.iter().find(|v| !v.is_finite()) {
            return Err(SessionError::Value { place: "the next token's logits".into(), value: *value });
        }
        for piece in self.pieces(&payload) {
            self.check(&piece)?;
        }
        let tokens = payload.tokens.len();
        // More pages change nothing that the bank holds, should the last of them not be had.
        device.bank_commit(bank, tokens)?;
        for piece in self.pieces(&payload) {
            debug_assert_eq!(piece.rows.len(), rows_of(self.spec.slots[piece.slot], tokens));
            self.import(device, bank, &piece);
        }
        device.bank_trim(bank, tokens);
        Ok(Session { tokens: payload.tokens, logits: payload.logits })
    }
}

/// Elements of a slot after `tokens` tokens.
fn rows_of(kind: StateKind, tokens: usize) -> usize {
    kind.rows(tokens) * kind.width()
}
