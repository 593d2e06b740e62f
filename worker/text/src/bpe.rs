//! Byte-pair merges, by the `tokenizers` crate.

use ahash::AHashMap;
use ds4_manifests::{Metadata, StringTable};
use tokenizers::Model;
use tokenizers::models::bpe::BPE;

use crate::byte_level;
use crate::error::TextError;
use crate::vocabulary::{Kind, Vocabulary};

/// Longest word that is merged as a whole, in bytes. A longer one (megabytes without a space) is merged in blocks of
/// this size: the merges need about 100 bytes of memory for each byte, and the block seams are the only deviation.
const LONGEST_WORD: usize = 256 * 1024;

/// Words whose merges are remembered. A remembered word of 255 bytes holds 8 KiB, so that a client who sends nothing but
/// long distinct words costs 16 MiB; the crate's default of 10,000 would be half of the worker's memory budget.
const CACHED_WORDS: usize = 2048;

/// The merges of a model. Control tokens are not in it: text cannot become one.
#[derive(Debug)]
pub(crate) struct Merger {
    bpe: BPE,
}

impl Merger {
    /// Builds the merges from `tokenizer.ggml.tokens` and `tokenizer.ggml.merges`.
    pub(crate) fn from_metadata(m: &Metadata, vocabulary: &Vocabulary, whole_words: bool) -> Result<Self, TextError> {
        const MERGES: &str = "tokenizer.ggml.merges";
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let tokens = m.strings(TOKENS).ok_or(TextError::MissingKey { key: TOKENS })?;
        let merges = m.strings(MERGES).ok_or(TextError::MissingKey { key: MERGES })?;
        let pairs = split_merges(merges)?;
        let mut vocab: AHashMap<String, u32> = AHashMap::with_capacity(tokens.len());
        for (id, token) in (0u32..).zip(tokens.iter()) {
            if vocabulary.kind(id) != Kind::Control {
                vocab.insert(text(token, "token", id as usize)?.to_owned(), id);
            }
        }
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, pairs)
            .ignore_merges(whole_words)
            .cache_capacity(CACHED_WORDS)
            .build()
            .map_err(|e| TextError::Damaged { what: format!("the merges do not fit the vocabulary: {e}") })?;
        Ok(Self { bpe })
    }

    /// Appends the tokens of one word of the pre-tokenizer. `scratch` is reused between calls.
    pub(crate) fn encode_word(&self, word: &str, scratch: &mut String, out: &mut Vec<u32>) {
        for block in word.as_bytes().chunks(LONGEST_WORD) {
            scratch.clear();
            scratch.extend(block.iter().map(|b| byte_level::char_of(*b)));
            // It fails only for a model with an unknown token, which this one is built without: a byte that the
            // vocabulary lacks is left out, as by the reference.
            if let Ok(tokens) = self.bpe.tokenize(scratch) {
                out.extend(tokens.iter().map(|t| t.id));
            }
        }
    }

    /// The token whose text is exactly `text`.
    pub(crate) fn token_id(&self, text: &str) -> Option<u32> {
        let coded: String = text.bytes().map(byte_level::char_of).collect();
        self.bpe.token_to_id(&coded)
    }

    /// True when some token is this byte alone.
    pub(crate) fn has_byte(&self, byte: u8) -> bool {
        self.bpe.token_to_id(byte_level::char_of(byte).encode_utf8(&mut [0; 4])).is_some()
    }
}

fn text<'b>(bytes: &'b [u8], what: &str, i: usize) -> Result<&'b str, TextError> {
    std::str::from_utf8(bytes).map_err(|_| TextError::Damaged { what: format!("{what} {i} is not UTF-8") })
}

/// Merges as pairs of tokens. A token of the byte alphabet has no space in it, so the first one separates them.
fn split_merges(merges: &StringTable) -> Result<Vec<(String, String)>, TextError> {
    let mut pairs = Vec::with_capacity(merges.len());
    for (i, merge) in merges.iter().enumerate() {
        let (a, b) = text(merge, "merge", i)?
            .split_once(' ')
            .ok_or_else(|| TextError::Damaged { what: format!("merge {i} is not two tokens with a space between") })?;
        pairs.push((a.to_owned(), b.to_owned()));
    }
    Ok(pairs)
}
