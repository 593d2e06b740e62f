//! Answers that are held to a grammar: whether a token may come next, and which ones may.
//!
//! Whoever samples draws as ever and asks [`Constraint::permits`], which is cheap. Only when the answer is no does it need
//! [`Constraint::restrict`], which walks the vocabulary, and draws once more among what is left. For a greedy request that is the best
//! permitted token, and for one without top-k, top-p and min-p a draw from the permitted ones in proportion to their probabilities:
//! what is drawn first and refused is drawn again among them, which changes no ratio.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::schema::{few_parts, fit, parts};
use crate::tokenizer::Tokenizer;

/// White space between the tokens of JSON: a space, or a line break and indentation. With any white space at all, the starter
/// model fills its budget with line breaks.
const WHITE_SPACE: &str = r"\x20|\x0A(?:\x20{0,48}|\x09{0,12})";

/// Most bytes of a grammar's text, schemas included.
const MAX_GRAMMAR: usize = 1 << 20;
/// Grammars that are kept, as agents send the same tools with every request.
const KEPT: usize = 4;
/// Most bytes of text of one that is kept: 24 tools of an editing agent have 50 KiB, and take 1 ms instead of 20.
const MAX_KEPT: usize = 128 << 10;
/// The library's measure of a grammar's regular expressions: that of 775 ranges of integers (0.3 s, 90 MiB), 500 dates with times or
/// 8,700 strings of an `enum`. Its own limit is ten times as much, and 1,900 ranges take 1 s.
const LEXER: u64 = 100_000;
/// Most characters of what a client is told of a fault.
const MAX_WHY: usize = 400;

/// Stack for what makes a grammar: it follows a chain of definitions by recursion, and 750 of them need more than 2 MiB.
const STACK: usize = 64 << 20;

/// What the grammar's library says when one of its limits is reached, and when it breaks on numbers beyond them.
const TOO_COMPLEX: [&str; 7] = [
    "panic: ",
    "Current row has",
    "fuel exhausted",
    "too many states",
    "schema too large",
    "(grammar) too big",
    "Unable to determine if regex is empty",
];

/// Why an answer cannot be held to something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConstraintError(pub String);

impl ConstraintError {
    /// What the grammar's library says, without its marks of what it left out.
    fn of(e: impl fmt::Display) -> Self {
        let text = e.to_string();
        let text = text.split("\n<").next().unwrap_or_default();
        if TOO_COMPLEX.iter().any(|limit| text.contains(limit)) {
            return Self("it is too complex for this server".into());
        }
        if let Some(keys) = text.strip_prefix("Unimplemented keys: ") {
            let keys = keys.trim_matches(['[', ']']).replace('"', "`");
            return Self(format!("{keys} is not enforced on this server"));
        }
        if text.starts_with("oneOf constraints are not supported") {
            return Self(
                "`oneOf` of schemas that one value could follow two of is not enforced on this server; use `anyOf`"
                    .into(),
            );
        }
        if let Some((_, at)) =
            text.split_once("Only absolute $ref's (#/...) are supported without 'referencing' feature; ref ")
        {
            return Self(format!("`$ref` {at} is no part of this schema, and others are not fetched by this server"));
        }
        // It may quote the client's schema, of any length.
        let mut shown: String = text.chars().take(MAX_WHY).collect();
        if shown.len() < text.len() {
            shown.push('…');
        }
        Self(shown)
    }
}

/// A vocabulary in the form that grammars need, built once a tokenizer.
pub(crate) struct Grammars {
    factory: ParserFactory,
    eog: Arc<[u32]>,
    /// Number of tokens.
    count: u32,
    /// The latest grammars with their texts, the latest one last.
    kept: Mutex<VecDeque<(String, Constraint)>>,
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
        factory.limits_mut().initial_lexer_fuel = LEXER;
        Ok(Self { factory, eog, count, kept: Mutex::default() })
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

    /// The constraint of a grammar of this text, which may be there already.
    fn kept(&self, text: String, grammar: impl FnOnce() -> TopLevelGrammar) -> Result<Constraint, ConstraintError> {
        fits(text.len())?;
        // A thread that panicked here left a whole list.
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let known = {
            let mut kept = kept();
            let at = kept.iter().position(|(known, _)| *known == text);
            at.and_then(|at| kept.remove(at)).inspect(|found| kept.push_back(found.clone()))
        };
        if let Some((_, constraint)) = known {
            return Ok(constraint);
        }
        let constraint = self.constraint(grammar())?;
        if text.len() <= MAX_KEPT {
            let mut kept = kept();
            if kept.len() == KEPT {
                kept.pop_front();
            }
            kept.push_back((text, constraint.clone()));
        }
        Ok(constraint)
    }

    /// An answer that is JSON after this schema.
    pub(crate) fn schema(&self, schema: &Value) -> Result<Constraint, ConstraintError> {
        let schema = with_options(schema)?;
        few_parts(parts(&schema))?;
        self.kept(schema.to_string(), || TopLevelGrammar::from_json_schema(schema))
    }

    /// An answer after a grammar in llguidance's variant of Lark.
    pub(crate) fn lark(&self, grammar: String) -> Result<Constraint, ConstraintError> {
        self.kept(grammar.clone(), || TopLevelGrammar::from_lark(grammar))
    }

    /// Whether [`Self::lark`] would have an answer, which is not kept in place of one that was had.
    pub(crate) fn check(&self, grammar: String) -> Result<(), ConstraintError> {
        fits(grammar.len())?;
        self.constraint(TopLevelGrammar::from_lark(grammar)).map(|_| ())
    }
}

/// Runs what makes a grammar on a stack of its own.
///
/// # Errors
/// Those of `make`, and that there is no thread for it.
pub(crate) fn deep<T: Send, E: Send + From<ConstraintError>>(
    make: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK).spawn_scoped(scope, make);
        let thread = thread.map_err(|e| ConstraintError(format!("no thread could be started for it: {e}")))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Whether a grammar of this many bytes is made at all.
pub(crate) fn fits(bytes: usize) -> Result<(), ConstraintError> {
    if bytes <= MAX_GRAMMAR {
        return Ok(());
    }
    Err(ConstraintError(format!("schemas of {bytes} bytes together are too large; at most {MAX_GRAMMAR} are enforced")))
}

/// Bytes of a value's text, which is not made for it.
pub(crate) fn length(value: &Value) -> usize {
    struct Counted(usize);
    impl io::Write for Counted {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut counted = Counted(0);
    // Neither the value nor the counter has anything to fail of.
    let _ = serde_json::to_writer(&mut counted, value);
    counted.0
}

/// A schema with our options in place of any of the client's, which could make it hold nothing.
///
/// # Errors
/// It has what is not enforced, see [`fit`].
pub(crate) fn with_options(schema: &Value) -> Result<Value, ConstraintError> {
    let mut schema = match fit(schema)? {
        object @ Value::Object(_) => object,
        other => json!({ "allOf": [other] }),
    };
    schema["x-guidance"] = json!({ "whitespace_pattern": WHITE_SPACE });
    Ok(schema)
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

impl From<ConstraintError> for Unenforceable {
    /// Of the answer's own schema.
    fn from(e: ConstraintError) -> Self {
        Self { tool: None, why: e.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Specials;
    use crate::test_support::starter_tokenizer;

    fn refusal(schema: &Value) -> String {
        deep(|| starter_tokenizer().grammars().and_then(|g| g.schema(schema)).map(|_| ())).unwrap_err().0
    }

    #[test]
    fn a_fault_is_told_briefly_and_without_the_library_s_insides() {
        let panic = ConstraintError::of("panic: attempt to multiply with overflow\n<backtrace>\n 0: {closure#0}");
        assert_eq!(panic.0, "it is too complex for this server");
        assert!(!refusal(&json!({"type": "integer", "multipleOf": 999_999_937})).contains("panic"));
        let long = refusal(&json!({"type": "string", "pattern": "(".repeat(100_000)}));
        assert!(long.starts_with("regex parse error") && long.chars().count() == MAX_WHY + 1, "{long}");
        assert_eq!(refusal(&json!({"not": {}, "type": "integer"})), "`not` is not enforced on this server");
        let either = json!({"oneOf": [{"type": "integer"}, {"type": "number"}]});
        assert!(refusal(&either).contains("`anyOf`"), "the library would name an option of its own");
    }

    #[test]
    fn a_limit_met_in_the_middle_of_an_answer_is_told_as_one() {
        let tokenizer = starter_tokenizer();
        let many: serde_json::Map<_, _> = (0..1900).map(|i| (format!("p{i}"), json!({"type": "object"}))).collect();
        let schema = json!({"type": "object", "properties": many, "additionalProperties": false});
        let mut held = tokenizer.grammars().and_then(|g| g.schema(&schema)).unwrap();
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        let fault = tokenizer.encode(r#"{"p0": {}, "p1": {}}"#, Specials::Plain).into_iter().find_map(|token| {
            let fault = held.restrict(&mut logits).err();
            held.take(token);
            fault
        });
        assert_eq!(fault.unwrap().0, "it is too complex for this server");
    }

    #[test]
    fn schemas_that_would_take_minutes_or_gigabytes_are_refused_at_once() {
        let patterns: Vec<Value> = (0..20).map(|i| json!({"type": "string", "pattern": format!(".*{i}.*")})).collect();
        assert!(refusal(&json!({"allOf": patterns})).contains("8 patterns"));
        assert_eq!(refusal(&json!({"allOf": patterns[..8]})), "it is too complex for this server");
        let ranges: Vec<Value> =
            (0..1900).map(|i| json!({"type": "integer", "minimum": i, "maximum": i * 1003})).collect();
        assert_eq!(refusal(&json!({"anyOf": ranges})), "it is too complex for this server");
        assert!(refusal(&json!({"const": "c".repeat(MAX_GRAMMAR)})).contains("too large"));
    }

    #[test]
    fn schemas_that_would_overflow_a_thread_s_stack_are_refused_and_smaller_ones_do_not() {
        let strings = |n: usize| -> serde_json::Map<_, _> {
            (0..n).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect()
        };
        let required = |n: usize| json!({"properties": strings(n), "required": strings(n).keys().collect::<Vec<_>>()});
        let chain = |n: usize| {
            let next = |i: usize| {
                (format!("d{i}"), json!({"items": {"$ref": format!("#/$defs/d{}", i + 1)}, "type": "array"}))
            };
            let defs: serde_json::Map<_, _> = (0..n).map(next).chain([(format!("d{n}"), json!(true))]).collect();
            json!({"$ref": "#/$defs/d0", "$defs": defs})
        };
        let tuple = |n: usize| json!({"type": "array", "prefixItems": vec![json!({"type": "integer"}); n]});
        let either = |n: usize| json!({"anyOf": (0..n).map(|i| json!({"const": i})).collect::<Vec<_>>()});
        let unlisted = |n: usize| json!({"required": strings(n).keys().collect::<Vec<_>>()});
        let matched = |n: usize| {
            let patterns: serde_json::Map<_, _> = (0..n).map(|i| (format!("^{i}x"), json!(true))).collect();
            json!({"patternProperties": patterns})
        };
        let optional = |n: usize| json!({"properties": strings(n), "type": "object"});
        for (most, of) in [
            (1999, &required as &dyn Fn(usize) -> Value),
            (999, &chain),
            (1999, &tuple),
            (1999, &either),
            (1999, &optional),
            (1999, &unlisted),
            (44, &matched),
        ] {
            let schema = of(most);
            deep(|| starter_tokenizer().grammars().and_then(|g| g.schema(&schema))).unwrap();
            for n in [most + 1, 9_000] {
                assert!(refusal(&of(n)).contains("more than 2000"), "{n}: {}", refusal(&of(n)));
            }
        }
    }

    #[test]
    fn a_grammar_that_is_kept_begins_anew() {
        let tokenizer = starter_tokenizer();
        let schema = |i: usize| json!({"const": format!("kept {i}")});
        for i in (0..2 * KEPT).chain(0..2 * KEPT).flat_map(|i| [i, i]) {
            let mut held = tokenizer.grammars().and_then(|g| g.schema(&schema(i))).unwrap();
            for token in tokenizer.encode(&format!("\"kept {i}\""), Specials::Plain) {
                assert_eq!(held.permits(token), Ok(true), "{i}");
                held.take(token);
            }
            assert!(held.complete());
        }
        assert!(tokenizer.grammars().unwrap().kept.lock().unwrap().len() <= KEPT);
    }
}
