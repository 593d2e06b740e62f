//! The vocabulary of a model: bytes and kind of every token.

use ds4_manifests::Metadata;

use crate::byte_level;
use crate::deepseek_v4;
use crate::error::TextError;

/// A token's type, as numbered in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// 1, 5 and 6: text (unused and byte tokens included).
    Text,
    /// 2 and 3: structure, never text that a user wrote.
    Control,
    /// 4: text that is always one token.
    UserDefined,
}

/// Every token's bytes in one block, and its kind.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<Kind>,
}

impl Vocabulary {
    /// Reads `tokenizer.ggml.tokens` and `tokenizer.ggml.token_type`. Text tokens are decoded from the byte alphabet.
    pub(crate) fn from_metadata(m: &Metadata) -> Result<Self, TextError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let tokens = m.strings(TOKENS).filter(|t| !t.is_empty()).ok_or(TextError::MissingKey { key: TOKENS })?;
        let types = m.ints("tokenizer.ggml.token_type");
        if let Some(t) = types.filter(|t| t.len() != tokens.len()) {
            return Err(TextError::Damaged { what: format!("{} tokens and {} token types", tokens.len(), t.len()) });
        }
        let mut v = Self { bytes: Vec::new(), ends: Vec::new(), kinds: Vec::new() };
        v.ends.reserve_exact(tokens.len());
        v.kinds.reserve_exact(tokens.len());
        v.bytes.reserve(tokens.len() * 8);
        let deepseek = deepseek_v4::is_tokenizer(m);
        for (i, token) in tokens.iter().enumerate() {
            let text = std::str::from_utf8(token)
                .map_err(|_| TextError::Damaged { what: format!("token {i} is not UTF-8") })?;
            let kind = match types.and_then(|t| t.get(i)) {
                _ if deepseek && deepseek_v4::is_control(text) => Kind::Control,
                // Converters call `<think>` and the like user-defined, which a user's text could become.
                Some(4) if deepseek => Kind::Control,
                other => kind_of(other.copied(), i)?,
            };
            match kind {
                Kind::Text => byte_level::decode_into(text, &mut v.bytes),
                Kind::Control | Kind::UserDefined => v.bytes.extend_from_slice(token),
            }
            let end = u32::try_from(v.bytes.len())
                .map_err(|_| TextError::Damaged { what: "the vocabulary's text is over 4 GiB".into() })?;
            v.ends.push(end);
            v.kinds.push(kind);
        }
        Ok(v)
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of a token; empty for an id outside the vocabulary.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        let i = id as usize;
        let Some(&end) = self.ends.get(i) else { return &[] };
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        &self.bytes[start..end as usize]
    }

    /// Kind of a token; an id outside the vocabulary is control.
    pub(crate) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Control)
    }

    /// Ids of one kind.
    pub(crate) fn ids(&self, kind: Kind) -> impl Iterator<Item = u32> {
        (0u32..).zip(&self.kinds).filter(move |(_, k)| **k == kind).map(|(id, _)| id)
    }

    /// Length of the longest token that text can become, in bytes.
    pub(crate) fn longest(&self) -> usize {
        (0u32..).take(self.len()).map(|id| self.bytes(id).len()).max().unwrap_or(0)
    }
}

fn kind_of(kind: Option<i64>, token: usize) -> Result<Kind, TextError> {
    match kind {
        None | Some(1 | 5 | 6) => Ok(Kind::Text),
        Some(2 | 3) => Ok(Kind::Control),
        Some(4) => Ok(Kind::UserDefined),
        Some(t) => Err(TextError::Damaged { what: format!("token {token} has type {t}") }),
    }
}

/// The strings of a model's control tokens, without building a [`Vocabulary`].
pub(crate) fn control_strings(m: &Metadata) -> Vec<String> {
    let Some(tokens) = m.strings("tokenizer.ggml.tokens") else { return Vec::new() };
    let types = m.ints("tokenizer.ggml.token_type").unwrap_or(&[]);
    let deepseek = deepseek_v4::is_tokenizer(m);
    let control = |i: usize, token: &[u8]| match types.get(i) {
        Some(2 | 3) => true,
        kind if deepseek => kind == Some(&4) || std::str::from_utf8(token).is_ok_and(deepseek_v4::is_control),
        _ => false,
    };
    tokens
        .iter()
        .enumerate()
        .filter(|(i, token)| control(*i, token))
        .filter_map(|(_, token)| String::from_utf8(token.to_vec()).ok())
        .filter(|s| !s.is_empty())
        .collect()
}
