//! The tokenizer of a model, built from its metadata.

use std::sync::OnceLock;

use aho_corasick::{AhoCorasick, MatchKind};
use ds4_manifests::Metadata;

use crate::bpe::Merger;
use crate::char_class;
use crate::constraint::{ConstraintError, Grammars};
use crate::deepseek_v4;
use crate::error::TextError;
use crate::pre_tokenizer::PreTokenizer;
use crate::vocabulary::{Kind, Vocabulary};

/// Whether the strings of control tokens in a text are those tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// They are: for text of a template or a trusted caller.
    Parse,
    /// They are ordinary text: no control token comes out. User-defined tokens, which stand for text, still do.
    Plain,
}

/// A text has more tokens than its caller can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the text has at least {at_least} tokens, more than the limit of {limit}")]
pub struct TooManyTokens {
    /// Lower bound of the text's tokens; the rest was not counted.
    pub at_least: usize,
    /// The caller's limit.
    pub limit: usize,
}

/// Strings that are found in a text before it is cut into words.
#[derive(Debug)]
struct Fixed {
    finder: AhoCorasick,
    ids: Vec<u32>,
}

impl Fixed {
    fn new(vocabulary: &Vocabulary, ids: impl Iterator<Item = u32>) -> Result<Option<Self>, TextError> {
        let ids: Vec<u32> = ids.filter(|id| !vocabulary.bytes(*id).is_empty()).collect();
        if ids.is_empty() {
            return Ok(None);
        }
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(ids.iter().map(|id| vocabulary.bytes(*id)))
            .map_err(|e| TextError::Damaged { what: format!("the special tokens cannot be searched for: {e}") })?;
        Ok(Some(Self { finder, ids }))
    }
}

/// A model's tokenizer: byte-level BPE. Shared between threads; every method takes `&self`.
#[derive(Debug)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    pre_tokenizer: PreTokenizer,
    merger: Merger,
    /// Control and user-defined tokens.
    specials: Option<Fixed>,
    /// User-defined tokens only.
    user_defined: Option<Fixed>,
    eog: Vec<u32>,
    eos: Option<u32>,
    bos: Option<u32>,
    add_bos: bool,
    longest: usize,
    /// Built when the first answer is to be held to a grammar.
    grammars: OnceLock<Result<Grammars, ConstraintError>>,
}

/// Control tokens that end a generation in some model family, by their string.
const END_OF_GENERATION: &[&str] = &[
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<EOT>",
    "<|EOT|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "[|endofturn|]",
];

impl Tokenizer {
    /// Builds the tokenizer from the `tokenizer.ggml.*` keys. It is ready when this returns; only what holds answers to
    /// grammars is built at the first of these.
    ///
    /// # Errors
    /// A tokenizer model or a pre-tokenizer that is not implemented, by name; missing keys; a vocabulary and merges that
    /// contradict each other.
    pub fn from_metadata(m: &Metadata) -> Result<Tokenizer, TextError> {
        const MODEL: &str = "tokenizer.ggml.model";
        match m.str(MODEL).ok_or(TextError::MissingKey { key: MODEL })? {
            "gpt2" => {}
            kind => return Err(TextError::UnknownTokenizer { kind: kind.to_owned() }),
        }
        let pre = m.str("tokenizer.ggml.pre").unwrap_or("default");
        let pre_tokenizer = PreTokenizer::by_name(pre)
            .ok_or_else(|| TextError::UnknownPreTokenizer { pre: pre.to_owned(), known: PreTokenizer::names() })?;
        let (vocabulary, merger) = std::thread::scope(|s| {
            s.spawn(char_class::prepare);
            let vocabulary = Vocabulary::from_metadata(m)?;
            let merger = Merger::from_metadata(m, &vocabulary, pre_tokenizer.whole_words())?;
            Ok((vocabulary, merger))
        })?;
        let id = |key: &str| -> Result<Option<u32>, TextError> {
            let Some(raw) = m.u64(key) else { return Ok(None) };
            match u32::try_from(raw).ok().filter(|id| (*id as usize) < vocabulary.len()) {
                Some(id) => Ok(Some(id)),
                None => Err(TextError::Damaged {
                    what: format!("{key} is {raw}, outside the vocabulary of {}", vocabulary.len()),
                }),
            }
        };
        let (eos, bos) = (id("tokenizer.ggml.eos_token_id")?, id("tokenizer.ggml.bos_token_id")?);
        // DeepSeek V4's answers end with its end of sequence only; `<|EOT|>` is left over from code models.
        let others = if deepseek_v4::is_tokenizer(m) { &[deepseek_v4::EOS][..] } else { END_OF_GENERATION };
        let mut eog: Vec<u32> = vocabulary
            .ids(Kind::Control)
            .filter(|id| others.iter().any(|s| s.as_bytes() == vocabulary.bytes(*id)))
            .chain(eos)
            .chain(id("tokenizer.ggml.eot_token_id")?)
            .chain(id("tokenizer.ggml.eom_token_id")?)
            .collect();
        eog.sort_unstable();
        eog.dedup();
        let specials = Fixed::new(&vocabulary, vocabulary.ids(Kind::Control).chain(vocabulary.ids(Kind::UserDefined)))?;
        let user_defined = Fixed::new(&vocabulary, vocabulary.ids(Kind::UserDefined))?;
        let add_bos = m.bool("tokenizer.ggml.add_bos_token").unwrap_or(false);
        let longest = vocabulary.longest().max(1);
        Ok(Self {
            vocabulary,
            pre_tokenizer,
            merger,
            specials,
            user_defined,
            eog,
            eos,
            bos,
            add_bos,
            longest,
            grammars: OnceLock::new(),
        })
    }

    /// Token ids of `text`. No BOS is added: see [`Tokenizer::add_bos`].
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 4 + 1);
        self.encode_into(text, specials, usize::MAX, &mut out);
        out
    }

    /// As [`Tokenizer::encode`], but gives up early on a text that has more than `limit` tokens, at once when its length alone
    /// says so: a 64 MiB text is refused in microseconds.
    ///
    /// # Errors
    /// [`TooManyTokens`] with the count so far.
    pub fn encode_up_to(&self, text: &str, specials: Specials, limit: usize) -> Result<Vec<u32>, TooManyTokens> {
        let at_least = text.len().div_ceil(self.longest);
        if at_least > limit {
            return Err(TooManyTokens { at_least, limit });
        }
        let mut out = Vec::with_capacity((text.len() / 4 + 1).min(limit));
        self.encode_into(text, specials, limit, &mut out);
        if out.len() > limit {
            return Err(TooManyTokens { at_least: out.len(), limit });
        }
        Ok(out)
    }

    /// Appends the tokens of `text`; stops soon after `out` has passed `limit`.
    pub(crate) fn encode_into(&self, text: &str, specials: Specials, limit: usize, out: &mut Vec<u32>) {
        let fixed = match specials {
            Specials::Parse => &self.specials,
            Specials::Plain => &self.user_defined,
        };
        let mut at = 0;
        if let Some(fixed) = fixed {
            for found in fixed.finder.find_iter(text) {
                self.encode_words(&text[at..found.start()], limit, out);
                if out.len() > limit {
                    return;
                }
                out.push(fixed.ids[found.pattern().as_usize()]);
                at = found.end();
            }
        }
        self.encode_words(&text[at..], limit, out);
    }

    /// Cuts `text` at the strings of control tokens: calls `gap` for what lies between and `control` for each of them.
    pub(crate) fn at_controls<'t>(&self, text: &'t str, mut piece: impl FnMut(Result<&'t str, u32>)) {
        let mut at = 0;
        if let Some(fixed) = &self.specials {
            for found in fixed.finder.find_iter(text) {
                let id = fixed.ids[found.pattern().as_usize()];
                if self.is_control(id) {
                    piece(Ok(&text[at..found.start()]));
                    piece(Err(id));
                    at = found.end();
                }
            }
        }
        piece(Ok(&text[at..]));
    }

    fn encode_words(&self, text: &str, limit: usize, out: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let mut scratch = String::new();
        self.pre_tokenizer.split(text, &mut |word| {
            if out.len() <= limit {
                self.merger.encode_word(word, &mut scratch, out);
            }
        });
    }

    /// The bytes that a token stands for: decoded for text, the string itself for control tokens, none for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocabulary.bytes(id)
    }

    /// True for tokens that are structure and not text, and for ids outside the vocabulary.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocabulary.kind(id) == Kind::Control
    }

    /// True for tokens that end a generation: end of sequence, of turn, of message.
    pub fn is_eog(&self, id: u32) -> bool {
        self.eog.binary_search(&id).is_ok()
    }

    /// All of these, ascending.
    pub(crate) fn eog(&self) -> &[u32] {
        &self.eog
    }

    /// What holds answers of this vocabulary to grammars.
    pub(crate) fn grammars(&self) -> Result<&Grammars, ConstraintError> {
        self.grammars.get_or_init(|| Grammars::new(self)).as_ref().map_err(Clone::clone)
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The begin-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// True when a raw prompt (a completion, not a chat: templates write their own) must begin with [`Tokenizer::bos`].
    pub fn add_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }

    /// Number of tokens, control tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// Bytes that no token stands for, in order. [`Tokenizer::encode`] leaves them out, as the reference implementation does:
    /// the model has no way to read them.
    pub fn missing_bytes(&self) -> Vec<u8> {
        (0..=255).filter(|b| !self.merger.has_byte(*b)).collect()
    }

    /// The token that is exactly this string: a control or user-defined token by its name, or a text token by its text.
    pub fn token_id(&self, s: &str) -> Option<u32> {
        let named = |fixed: &Option<Fixed>| {
            let ids = fixed.as_ref().map_or(&[][..], |f| &f.ids);
            ids.iter().copied().find(|id| self.token_bytes(*id) == s.as_bytes())
        };
        named(&self.specials).or_else(|| self.merger.token_id(s))
    }
}

#[cfg(test)]
mod tests;
