//! What the engine needs to know about tokens.

/// The token side of a tokenizer; the engine never encodes.
pub trait Vocabulary: Send + Sync + 'static {
    /// The bytes that a token stands for; empty for ids without text. A token may hold part of a UTF-8 character. The
    /// engine shows no bytes of control tokens, whatever this gives.
    fn token_bytes(&self, token: u32) -> &[u8];

    /// True for tokens that end a generation.
    fn is_eog(&self, token: u32) -> bool;

    /// True for control tokens (BOS, padding, role marks), end-of-generation ones included.
    fn is_control(&self, token: u32) -> bool;
}

impl Vocabulary for ds4_text::Tokenizer {
    fn token_bytes(&self, token: u32) -> &[u8] {
        ds4_text::Tokenizer::token_bytes(self, token)
    }

    fn is_eog(&self, token: u32) -> bool {
        ds4_text::Tokenizer::is_eog(self, token)
    }

    fn is_control(&self, token: u32) -> bool {
        ds4_text::Tokenizer::is_control(self, token)
    }
}
