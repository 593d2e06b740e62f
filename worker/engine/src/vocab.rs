//! What the engine needs to know about tokens.

/// The token side of a tokenizer; the engine never encodes.
pub trait Vocabulary: Send + Sync + 'static {
    /// The bytes that a token stands for in generated text; empty for control tokens and ids without text. A token may
    /// hold part of a UTF-8 character.
    fn token_bytes(&self, token: u32) -> &[u8];

    /// True for tokens that end a generation.
    fn is_eog(&self, token: u32) -> bool;

    /// True for control tokens (BOS, padding, role marks), end-of-generation ones included.
    fn is_control(&self, token: u32) -> bool;
}
