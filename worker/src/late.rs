//! Starting the engine before its tokenizer is there.
//!
//! Building a byte-pair tokenizer is the longest part of a small model's start (80 ms for 49,000 tokens, of 120 ms in
//! all), and the self-test needs of it only five ids and a look at the answer. So both run at the same time.

use std::sync::{Arc, OnceLock};

use ds4_engine::Vocabulary;
use ds4_manifests::Metadata;
use ds4_text::{Specials, Tokenizer};

/// What the self-test reads. Ordinary words: they must give ordinary words back.
const PROBE_TEXT: &str = "The capital of France is";
/// The same as tokens of the byte-level alphabet, in which a space is `Ġ`.
const PROBE_TOKENS: [&str; 5] = ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"];

/// A tokenizer that may still be under construction; whoever needs it waits for it.
#[derive(Default)]
pub struct LateVocabulary(OnceLock<Option<Arc<Tokenizer>>>);

impl LateVocabulary {
    /// Where the builder delivers. Dropped without a delivery (its thread failed), it ends all waiting.
    pub fn promise(self: &Arc<Self>) -> Promise {
        Promise(Arc::clone(self))
    }

    fn wait(&self) -> Option<&Tokenizer> {
        self.0.wait().as_deref()
    }

    /// A prompt for the self-test: found in the vocabulary without the tokenizer, or else made by it.
    pub fn probe_prompt(&self, metadata: &Metadata) -> Vec<u32> {
        if let Some(prompt) = quick_prompt(metadata) {
            return prompt;
        }
        let Some(tokenizer) = self.wait() else { return Vec::new() };
        let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
        bos.into_iter().chain(tokenizer.encode(PROBE_TEXT, Specials::Plain)).collect()
    }
}

impl Vocabulary for LateVocabulary {
    fn token_bytes(&self, token: u32) -> &[u8] {
        self.wait().map_or(&[], |t| t.token_bytes(token))
    }

    fn is_eog(&self, token: u32) -> bool {
        self.wait().is_some_and(|t| t.is_eog(token))
    }

    fn is_control(&self, token: u32) -> bool {
        self.wait().is_some_and(|t| t.is_control(token))
    }
}

/// The builder's end of a [`LateVocabulary`].
pub struct Promise(Arc<LateVocabulary>);

impl Promise {
    /// Delivers.
    pub fn keep(self, tokenizer: &Arc<Tokenizer>) {
        // The only promise, and it is consumed: the cell is empty.
        let _ = self.0.0.set(Some(Arc::clone(tokenizer)));
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let _ = self.0.0.set(None);
    }
}

/// Ids of the probe's words, when the vocabulary has every one as a single token.
fn quick_prompt(metadata: &Metadata) -> Option<Vec<u32>> {
    let mut ids = [None; PROBE_TOKENS.len()];
    for (id, token) in (0u32..).zip(metadata.strings("tokenizer.ggml.tokens")?.iter()) {
        if let Some(at) = PROBE_TOKENS.iter().position(|p| p.as_bytes() == token) {
            ids[at] = Some(id);
        }
    }
    let words = ids.into_iter().collect::<Option<Vec<u32>>>()?;
    let bos = metadata.bool("tokenizer.ggml.add_bos_token").filter(|add| *add);
    let bos = bos.and_then(|_| metadata.u64("tokenizer.ggml.bos_token_id")).and_then(|id| u32::try_from(id).ok());
    Some(bos.into_iter().chain(words).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ds4_manifests::{StringTable, Value};

    fn metadata(tokens: &[&str]) -> Metadata {
        let mut table = StringTable::default();
        tokens.iter().for_each(|t| table.push(t.as_bytes()).unwrap());
        let mut m = Metadata::default();
        m.set("tokenizer.ggml.tokens", Value::Strings(table));
        m
    }

    #[test]
    fn the_probe_s_words_are_found_without_a_tokenizer() {
        let mut m = metadata(&["<s>", "Ġis", "The", "x", "ĠFrance", "Ġof", "Ġcapital"]);
        assert_eq!(quick_prompt(&m), Some(vec![2, 6, 5, 4, 1]));
        m.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
        m.set("tokenizer.ggml.bos_token_id", Value::U64(0));
        assert_eq!(quick_prompt(&m), Some(vec![0, 2, 6, 5, 4, 1]));
        assert_eq!(quick_prompt(&metadata(&["The", "Ġcapital", "Ġof", "ĠFrance"])), None);
        assert_eq!(quick_prompt(&Metadata::default()), None);
    }

    #[test]
    fn a_broken_promise_ends_the_waiting() {
        let late = Arc::new(LateVocabulary::default());
        let promise = late.promise();
        let waiting = std::thread::spawn({
            let late = Arc::clone(&late);
            move || late.is_control(3)
        });
        drop(promise);
        assert!(!waiting.join().unwrap());
        assert!(late.probe_prompt(&Metadata::default()).is_empty());
    }
}
