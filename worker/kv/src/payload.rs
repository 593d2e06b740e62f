//! The DSV4 session payload, version 2: a DeepSeek V4 sequence as little-endian words.
//!
//! Layout (project fact sheet on DeepSeek V4, sections 8.1 to 8.4): 13 `u32` of header; token ids; logits of the next token;
//! compressed row counts and indexer row counts per layer; then per layer the window rows (oldest first), and for compressed
//! layers the finished rows and the frontier (values, then scores), and for ratio-4 layers the same of the indexer. All
//! floats are f32. Trailing bytes are an error.

use crate::wire::{Reader, put_f32s, put_u32s};

/// `DSV4`, little-endian.
const MAGIC: u32 = 0x3456_5344;
/// The version that is written, and the only one read.
pub const VERSION: u32 = 2;
/// The ratio whose windows overlap and whose layers have an indexer.
const OVERLAPPING: usize = 4;

/// What a payload must fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PayloadShape {
    /// Context length of the running engine.
    pub context: usize,
    /// Prefill chunk of the running engine.
    pub prefill_chunk: usize,
    /// Rows that the window ring can hold; informational.
    pub ring_rows: usize,
    /// Sliding window.
    pub window: usize,
    /// Tokens per compressed row of each layer; 0 for none.
    pub ratios: Vec<usize>,
    /// Row width.
    pub head_dim: usize,
    /// Indexer row width.
    pub index_dim: usize,
    /// Vocabulary.
    pub vocab: usize,
}

/// Finished rows and frontier of one compressor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompressorState {
    /// `[tokens / ratio, dim]`.
    pub rows: Vec<f32>,
    /// Frontier values `[slots, width]`.
    pub values: Vec<f32>,
    /// Frontier scores `[slots, width]`, position biases included; empty slots hold −∞.
    pub scores: Vec<f32>,
}

/// State of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerState {
    /// Rows of the last `min(tokens, window)` positions, oldest first.
    pub window: Vec<f32>,
    /// Compressed history, when the layer has any.
    pub main: Option<CompressorState>,
    /// Indexer history, for ratio-4 layers.
    pub index: Option<CompressorState>,
}

/// A sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Payload {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Logits of the next token.
    pub logits: Vec<f32>,
    /// One entry per layer.
    pub layers: Vec<LayerState>,
}

/// Why a payload was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// Not a payload at all.
    #[error("the session payload begins with {found:#010x}, not with the DSV4 magic")]
    Magic {
        /// First word.
        found: u32,
    },
    /// Written by another release.
    #[error("the session payload has version {found}; this release reads version {VERSION}")]
    Version {
        /// Its version.
        found: u32,
    },
    /// Of another model or configuration.
    #[error("the session payload's {field} is {found}, {rule} {limit}")]
    Shape {
        /// Header field.
        field: &'static str,
        /// Its value.
        found: usize,
        /// How it relates to the limit.
        rule: &'static str,
        /// The running engine's value.
        limit: usize,
    },
    /// It ends early.
    #[error("the session payload ends in the middle of {section}, at byte {at}")]
    Truncated {
        /// What was being read.
        section: &'static str,
        /// Offset.
        at: usize,
    },
    /// There is more than there should be.
    #[error("the session payload has {extra} bytes too many")]
    Trailing {
        /// Bytes after the end.
        extra: usize,
    },
}

/// Slots and width of a frontier.
fn frontier(ratio: usize, dim: usize) -> (usize, usize) {
    if ratio == OVERLAPPING { (2 * ratio, 2 * dim) } else { (ratio, dim) }
}

impl PayloadShape {
    /// Bytes of a payload of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> usize {
        let compressor = |ratio: usize, dim: usize| {
            let (slots, width) = frontier(ratio, dim);
            tokens / ratio * dim + 2 * slots * width
        };
        let layers: usize = self
            .ratios
            .iter()
            .map(|&ratio| {
                let main = if ratio == 0 { 0 } else { compressor(ratio, self.head_dim) };
                let index = if ratio == OVERLAPPING { compressor(ratio, self.index_dim) } else { 0 };
                tokens.min(self.window) * self.head_dim + main + index
            })
            .sum();
        4 * (13 + tokens + self.vocab + 2 * self.ratios.len() + layers)
    }

    fn header(&self, tokens: usize) -> [usize; 11] {
        [
            self.context,
            self.prefill_chunk,
            self.ring_rows,
            self.window,
            self.context / OVERLAPPING + 2,
            tokens,
            self.ratios.len(),
            self.head_dim,
            self.index_dim,
            self.vocab,
            tokens.min(self.window),
        ]
    }

    /// Checks the eleven fields after magic and version; returns the token count.
    fn check(&self, h: &[usize]) -> Result<usize, PayloadError> {
        let equal = |field, found, limit| {
            if found == limit { Ok(()) } else { Err(PayloadError::Shape { field, found, rule: "not", limit }) }
        };
        let at_most = |field, found, limit| {
            if found <= limit { Ok(()) } else { Err(PayloadError::Shape { field, found, rule: "more than", limit }) }
        };
        at_most("context", h[0], self.context)?;
        equal("prefill chunk", h[1], self.prefill_chunk)?;
        if h[2] == 0 {
            return Err(PayloadError::Shape { field: "ring capacity", found: 0, rule: "less than", limit: 1 });
        }
        equal("window", h[3], self.window)?;
        at_most("compressed capacity", h[4], self.context / OVERLAPPING + 2)?;
        at_most("token count", h[5], self.context.saturating_sub(1))?;
        equal("layer count", h[6], self.ratios.len())?;
        equal("row width", h[7], self.head_dim)?;
        equal("indexer row width", h[8], self.index_dim)?;
        equal("vocabulary", h[9], self.vocab)?;
        equal("live window rows", h[10], h[5].min(self.window))?;
        at_most("live window rows", h[10], h[2])?;
        Ok(h[5])
    }
}

impl Payload {
    /// The bytes of this sequence.
    ///
    /// # Panics
    /// When the state does not have the shape's sizes: a programming error.
    pub fn encode(&self, shape: &PayloadShape) -> Vec<u8> {
        let tokens = self.tokens.len();
        let word = |n: usize| u32::try_from(n).unwrap_or_else(|_| panic!("{n} does not fit the payload's header"));
        let mut out = Vec::with_capacity(shape.bytes(tokens));
        put_u32s(&mut out, &[MAGIC, VERSION]);
        put_u32s(&mut out, &shape.header(tokens).map(word));
        put_u32s(&mut out, &self.tokens);
        put_f32s(&mut out, &self.logits);
        let counts = |index: bool| -> Vec<u32> {
            let rows = |r: usize| if r == 0 || (index && r != OVERLAPPING) { 0 } else { word(tokens / r) };
            shape.ratios.iter().map(|r| rows(*r)).collect()
        };
        put_u32s(&mut out, &counts(false));
        put_u32s(&mut out, &counts(true));
        for layer in &self.layers {
            put_f32s(&mut out, &layer.window);
            for c in [&layer.main, &layer.index].into_iter().flatten() {
                put_f32s(&mut out, &c.rows);
                put_f32s(&mut out, &c.values);
                put_f32s(&mut out, &c.scores);
            }
        }
        assert_eq!(out.len(), shape.bytes(tokens), "a payload of the shape's size");
        out
    }

    /// Reads and checks a payload against the running engine's shape.
    ///
    /// # Errors
    /// [`PayloadError`]; nothing is returned in part.
    pub fn decode(bytes: &[u8], shape: &PayloadShape) -> Result<Self, PayloadError> {
        let mut r = Reader::new(bytes);
        let cut = |section: &'static str, r: &Reader<'_>| PayloadError::Truncated { section, at: r.at() };
        let magic = r.u32().ok_or_else(|| cut("the magic", &r))?;
        if magic != MAGIC {
            return Err(PayloadError::Magic { found: magic });
        }
        let version = r.u32().ok_or_else(|| cut("the version", &r))?;
        if version != VERSION {
            return Err(PayloadError::Version { found: version });
        }
        let header = r.u32s(11).ok_or_else(|| cut("the header", &r))?;
        let header: Vec<usize> = header.iter().map(|v| usize::try_from(*v).unwrap_or(usize::MAX)).collect();
        let tokens = shape.check(&header)?;
        // The header fixes the size, so a wrong length is told before anything large is read.
        let want = shape.bytes(tokens);
        if bytes.len() > want {
            return Err(PayloadError::Trailing { extra: bytes.len() - want });
        }
        let ids = r.u32s(tokens).ok_or_else(|| cut("the token ids", &r))?;
        let logits = r.f32s(shape.vocab).ok_or_else(|| cut("the logits", &r))?;
        for (field, index) in [("compressed row count", false), ("indexer row count", true)] {
            let counts = r.u32s(shape.ratios.len()).ok_or_else(|| cut("the row counts", &r))?;
            for (count, ratio) in counts.into_iter().zip(&shape.ratios) {
                let found = usize::try_from(count).unwrap_or(usize::MAX);
                let limit = if *ratio == 0 || (index && *ratio != OVERLAPPING) { 0 } else { tokens / ratio };
                if found != limit {
                    return Err(PayloadError::Shape { field, found, rule: "not", limit });
                }
            }
        }
        let mut layers = Vec::with_capacity(shape.ratios.len());
        for &ratio in &shape.ratios {
            let mut layer = LayerState {
                window: r.f32s(tokens.min(shape.window) * shape.head_dim).ok_or_else(|| cut("the window rows", &r))?,
                ..LayerState::default()
            };
            if ratio != 0 {
                let main = read_compressor(&mut r, ratio, shape.head_dim, tokens);
                layer.main = Some(main.ok_or_else(|| cut("the compressed rows", &r))?);
            }
            if ratio == OVERLAPPING {
                let index = read_compressor(&mut r, ratio, shape.index_dim, tokens);
                layer.index = Some(index.ok_or_else(|| cut("the indexer rows", &r))?);
            }
            layers.push(layer);
        }
        Ok(Self { tokens: ids, logits, layers })
    }
}

fn read_compressor(r: &mut Reader<'_>, ratio: usize, dim: usize, tokens: usize) -> Option<CompressorState> {
    let (slots, width) = frontier(ratio, dim);
    Some(CompressorState {
        rows: r.f32s(tokens / ratio * dim)?,
        values: r.f32s(slots * width)?,
        scores: r.f32s(slots * width)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flash() -> PayloadShape {
        PayloadShape {
            context: 131_072,
            prefill_chunk: 2048,
            ring_rows: 2304,
            window: 128,
            ratios: (0..43)
                .map(|i| {
                    if i < 2 {
                        0
                    } else if i % 2 == 0 {
                        4
                    } else {
                        128
                    }
                })
                .collect(),
            head_dim: 512,
            index_dim: 128,
            vocab: 129_280,
        }
    }

    fn small() -> PayloadShape {
        PayloadShape {
            context: 64,
            prefill_chunk: 8,
            ring_rows: 16,
            window: 8,
            ratios: vec![0, 4, 16],
            head_dim: 4,
            index_dim: 2,
            vocab: 5,
        }
    }

    /// A sequence of `tokens` tokens filled with distinct values.
    fn sequence(shape: &PayloadShape, tokens: usize) -> Payload {
        let mut next = 0.0f32;
        let mut floats = |n: usize| -> Vec<f32> {
            (0..n)
                .map(|_| {
                    next += 0.5;
                    next
                })
                .collect()
        };
        let logits = floats(shape.vocab);
        let layers = shape
            .ratios
            .iter()
            .map(|&ratio| {
                let window = floats(tokens.min(shape.window) * shape.head_dim);
                let mut compressor = |dim| {
                    let (slots, width) = frontier(ratio, dim);
                    let rows = floats(tokens / ratio * dim);
                    CompressorState { rows, values: floats(slots * width), scores: floats(slots * width) }
                };
                let main = (ratio != 0).then(|| compressor(shape.head_dim));
                let index = (ratio == 4).then(|| compressor(shape.index_dim));
                LayerState { window, main, index }
            })
            .collect();
        Payload { tokens: (0..u32::try_from(tokens).unwrap()).collect(), logits, layers }
    }

    #[test]
    fn deepseek_v4_published_sizes() {
        // The `kvcache_bytes` column of the published benchmark files (fact sheet, sections 8.4 and 10.2).
        let shape = flash();
        assert_eq!(shape.bytes(2048), 52_184_460);
        assert_eq!(shape.bytes(4096), 80_373_132);
        assert_eq!(shape.bytes(65_536), 926_033_292);
    }

    #[test]
    fn deepseek_v4_payload_round_trip() {
        let shape = small();
        for tokens in [0, 1, 3, 4, 7, 8, 9, 16, 33, 63] {
            let p = sequence(&shape, tokens);
            let bytes = p.encode(&shape);
            assert_eq!(bytes.len(), shape.bytes(tokens));
            assert_eq!(Payload::decode(&bytes, &shape), Ok(p), "{tokens} tokens");
        }
    }

    #[test]
    fn deepseek_v4_payload_header_as_published() {
        let shape = small();
        let bytes = sequence(&shape, 9).encode(&shape);
        let (words, _) = bytes.as_chunks::<4>();
        let words: Vec<u32> = words[..13].iter().map(|w| u32::from_le_bytes(*w)).collect();
        assert_eq!(&bytes[..4], b"DSV4");
        assert_eq!(words[1..], [2, 64, 8, 16, 8, 18, 9, 3, 4, 2, 5, 8]);
    }

    #[test]
    fn deepseek_v4_payload_every_length_but_the_right_one_is_refused() {
        let shape = small();
        let bytes = sequence(&shape, 9).encode(&shape);
        for n in 0..bytes.len() {
            let e = Payload::decode(&bytes[..n], &shape);
            assert!(matches!(e, Err(PayloadError::Truncated { .. })), "{n}: {e:?}");
        }
        let mut longer = bytes;
        longer.push(0);
        assert_eq!(Payload::decode(&longer, &shape), Err(PayloadError::Trailing { extra: 1 }));
    }

    #[test]
    fn deepseek_v4_payload_of_another_shape_is_refused_by_field() {
        let shape = small();
        let bytes = sequence(&shape, 9).encode(&shape);
        let with = |f: &dyn Fn(&mut PayloadShape)| {
            let mut s = shape.clone();
            f(&mut s);
            match Payload::decode(&bytes, &s) {
                Err(PayloadError::Shape { field, .. }) => field,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(with(&|s| s.context = 32), "context");
        assert_eq!(with(&|s| s.prefill_chunk = 16), "prefill chunk");
        assert_eq!(with(&|s| s.window = 4), "window");
        assert_eq!(with(&|s| s.ratios.push(0)), "layer count");
        assert_eq!(with(&|s| s.head_dim = 8), "row width");
        assert_eq!(with(&|s| s.index_dim = 4), "indexer row width");
        assert_eq!(with(&|s| s.vocab = 6), "vocabulary");
        assert_eq!(with(&|s| s.ratios = vec![0, 16, 4]), "compressed row count");
        let word = |i: usize, v: u32| {
            let mut b = bytes.clone();
            b[4 * i..4 * i + 4].copy_from_slice(&v.to_le_bytes());
            Payload::decode(&b, &shape)
        };
        assert_eq!(word(0, 7), Err(PayloadError::Magic { found: 7 }));
        assert_eq!(word(1, 1), Err(PayloadError::Version { found: 1 }));
        assert!(matches!(word(7, 64), Err(PayloadError::Shape { field: "token count", .. })));
        assert!(matches!(word(12, 7), Err(PayloadError::Shape { field: "live window rows", .. })));
        // A count that asks for gigabytes is told by the bytes that are there.
        let mut huge = shape.clone();
        huge.context = 1 << 30;
        assert!(matches!(word(7, 1 << 29), Err(PayloadError::Shape { .. })));
        let mut b = bytes.clone();
        b[28..32].copy_from_slice(&(1u32 << 29).to_le_bytes());
        b[48..52].copy_from_slice(&8u32.to_le_bytes());
        assert!(matches!(Payload::decode(&b, &huge), Err(PayloadError::Truncated { section: "the token ids", .. })));
    }
}
