//! Answers that are held to a grammar: whether a token may come next, and which ones may.
//!
//! Whoever samples draws as ever and asks [`Constraint::permits`], which is cheap. Only when the answer is no does it need
//! [`Constraint::restrict`], which walks the vocabulary, and draws once more among what is left. For a greedy request that is the best
//! permitted token, and for one without top-k, top-p and min-p a draw from the permitted ones in proportion to their probabilities:
//! what is drawn first and refused is drawn again among them, which changes no ratio.

use std::fmt;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::tokenizer::Tokenizer;

/// White space between the tokens of JSON: a space, or a line break and indentation. With any white space at all, the starter
/// model fills its budget with line breaks.
const WHITE_SPACE: &str = r"\x20|\x0A(?:\x20{0,48}|\x09{0,12})";

/// Why an answer cannot be held to something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConstraintError(pub String);

impl ConstraintError {
    /// What the grammar's library says, without its marks of what it left out.
    fn of(e: impl fmt::Display) -> Self {
        let text = e.to_string();
        Self(text.split("\n<non-verbose").next().unwrap_or_default().to_owned())
    }
}

/// A vocabulary in the form that grammars need, built once a tokenizer.
pub(crate) struct Grammars {
    factory: ParserFactory,
    eog: Arc<[u32]>,
    /// Number of tokens.
    count: u32,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

impl Grammars {
    /// Takes 0.4 s for 129,280 tokens (on a busy core). After it a verdict takes 1 µs, a mask 80 µs, and the grammar of 40 strict
    /// tools 5 ms to build.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self, ConstraintError> {
        let eog: Arc<[u32]> = tokenizer.eog().into();
        let (Some(eos), Ok(count)) = (eog.first(), u32::try_from(tokenizer.vocab_size())) else {
            return Err(ConstraintError("this model's vocabulary has no token that ends an answer".into()));
        };
        let word = |id: u32| {
            let bytes = tokenizer.token_bytes(id);
            // The mark of what no text can become: control tokens, and the byte that is never part of UTF-8.
            if tokenizer.is_control(id) || bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) {
                return [&[TokTrie::SPECIAL_TOKEN_MARKER], format!("<{id}>").as_bytes()].concat();
            }
            bytes.to_vec()
        };
        let words: Vec<Vec<u8>> = (0..count).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(count, *eos), &words).with_eos_tokens(&eog);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(ConstraintError::of)?;
        factory.quiet();
        // An error goes to a client: it names the fault, and not the parser's state.
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory, eog, count })
    }

    fn constraint(&self, grammar: TopLevelGrammar) -> Result<Constraint, ConstraintError> {
        let mut matcher = Matcher::new(self.factory.create_parser(grammar));
        if let Some(why) = matcher.get_error() {
            return Err(ConstraintError::of(why));
        }
        // Such as a schema that refers to itself alone.
        if !matcher.compute_mask_or_eos().is_ok_and(|first| !first.is_zero()) {
            return Err(ConstraintError("nothing can follow it".into()));
        }
        Ok(Constraint { matcher, eog: Arc::clone(&self.eog), count: self.count })
    }

    /// An answer that is JSON after this schema.
    pub(crate) fn schema(&self, schema: &Value) -> Result<Constraint, ConstraintError> {
        self.constraint(TopLevelGrammar::from_json_schema(with_options(schema)))
    }

    /// An answer after a grammar in llguidance's variant of Lark.
    pub(crate) fn lark(&self, grammar: String) -> Result<Constraint, ConstraintError> {
        self.constraint(TopLevelGrammar::from_lark(grammar))
    }
}

/// A schema with our options in place of any of the client's, which could make it hold nothing.
pub(crate) fn with_options(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Object(_) => schema.clone(),
        other => json!({ "allOf": [other] }),
    };
    schema["x-guidance"] = json!({ "whitespace_pattern": WHITE_SPACE });
    schema
}

/// Where an answer stands in its grammar.
pub struct Constraint {
    matcher: Matcher,
    eog: Arc<[u32]>,
    /// Tokens of the vocabulary: the matcher breaks when it is asked about others.
    count: u32,
}

impl Clone for Constraint {
    /// With caches of its own: answers are generated side by side.
    fn clone(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), eog: Arc::clone(&self.eog), count: self.count }
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("error", &self.matcher.get_error()).finish_non_exhaustive()
    }
}

impl Constraint {
    /// Whether the answer may go on with this token; for one that ends it, whether it may end here.
    ///
    /// # Errors
    /// The grammar cannot be followed any further: it became too complex, or an earlier token broke it.
    pub fn permits(&mut self, token: u32) -> Result<bool, ConstraintError> {
        // The model may have more logits than its vocabulary has tokens.
        if token >= self.count {
            return Ok(false);
        }
        let verdict = if self.eog.contains(&token) {
            if self.matcher.is_stopped() { Ok(!self.matcher.is_error()) } else { self.matcher.is_accepting() }
        } else {
            self.matcher.validate_tokens(&[token]).map(|n| n == 1)
        };
        verdict.map_err(ConstraintError::of)
    }

    /// Makes every logit -inf whose token may not come next.
    ///
    /// # Errors
    /// As [`Constraint::permits`].
    pub fn restrict(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        let permitted = self.matcher.compute_mask_or_eos().map_err(ConstraintError::of)?;
        for (id, logit) in logits.iter_mut().enumerate() {
            if id >= permitted.len() || !permitted.get(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// The answer went on with this token. One that it must not go on with breaks the constraint, which says so when asked next.
    pub fn take(&mut self, token: u32) {
        if !self.matcher.is_stopped() {
            // The error is kept.
            let _ = self.matcher.consume_token(token);
        }
    }

    /// The answer is complete: nothing can follow.
    pub fn complete(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }
}

/// A schema of a request that its answers cannot be held to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the answer cannot be held to this schema: {why}")]
pub struct Unenforceable {
    /// Whose it is: the tool of this index, or the answer's own.
    pub tool: Option<usize>,
    /// What cannot be done.
    pub why: String,
}

impl Unenforceable {
    /// Of the answer's own schema.
    pub(crate) fn answer(e: ConstraintError) -> Self {
        Self { tool: None, why: e.0 }
    }
}
