//! Saved sessions: a bank's state as bytes that another worker can continue from.
//!
//! The payload is the family's own ([`SessionFormat`]); the KVC container around it is the same for all and carries checksums.
//! Reading checks everything before the bank is touched: a refused session leaves it as it was.

use ds4_kernels::{Device, DeviceError};
use ds4_kv::{Container, ContainerError, PayloadError};

/// What a session must fit, and is stamped with: settings of the engine that writes or reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Tokens that a bank has room for.
    pub context: usize,
    /// Most prompt tokens in one step.
    pub prefill_chunk: usize,
}

/// A sequence that was read into a bank.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// Tokens whose state the bank holds.
    pub tokens: Vec<u32>,
    /// Logits of the next token.
    pub logits: Vec<f32>,
}

/// Why a session was refused. The bank is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The container around it.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// Layout or shape.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// Container and payload are not of one session.
    #[error("the container is of {container} tokens, its payload of {payload}: they are not of one session")]
    Mismatch {
        /// Tokens that the container says.
        container: usize,
        /// Tokens of the payload.
        payload: usize,
    },
    /// Saved with experts of another quantisation.
    #[error(
        "the session was saved with {found}-bit experts and this model has {want}-bit ones; compute the prompt anew"
    )]
    Quantisation {
        /// In the container.
        found: u8,
        /// Of the model.
        want: u8,
    },
    /// A token that the model does not have.
    #[error("token {index} of the session is {token}, in a vocabulary of {vocab}")]
    Token {
        /// Index in the sequence.
        index: usize,
        /// Id.
        token: u32,
        /// Vocabulary.
        vocab: usize,
    },
    /// A value that no state can have.
    #[error("{place} of the session holds {value}, which no computation leaves there")]
    Value {
        /// Layer and piece.
        place: String,
        /// The value.
        value: f32,
    },
    /// A value that the bank's storage would change: saved under other numerics.
    #[error(
        "{place} of the session holds {value}, which the state's {ty} cannot store: it was saved under other numerics; compute \
         the prompt anew"
    )]
    Precision {
        /// Layer and piece.
        place: String,
        /// The value.
        value: f32,
        /// Storage type.
        ty: String,
    },
    /// The bank could not grow.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A family's session payload.
pub trait SessionFormat<D: Device> {
    /// The payload of the sequence `tokens`, whose state `bank` holds and nothing after it; `logits` are those of the next token.
    ///
    /// # Panics
    /// When `bank` holds fewer tokens, or `logits` are not a row of the vocabulary.
    fn save(&self, device: &D, bank: &D::Bank, tokens: &[u32], logits: &[f32], limits: &SessionLimits) -> Vec<u8>;

    /// Makes `bank` hold the sequence of `payload`, of `tokens` tokens where that is known, and nothing else. Continuing gives the
    /// bits that the saved bank would have given.
    ///
    /// # Errors
    /// [`SessionError`]; the bank's state and length are as they were.
    fn restore(
        &self,
        device: &D,
        bank: &mut D::Bank,
        payload: &[u8],
        tokens: Option<usize>,
        limits: &SessionLimits,
    ) -> Result<Session, SessionError>;
}

/// Reads a session out of a KVC file into `bank`. The flag says whether the file carried checksums; without them (files of other
/// engines) only layout, shape and impossible values are told from good ones.
///
/// # Errors
/// [`SessionError`]; the bank's state and length are as they were.
pub fn restore_container<D: Device>(
    format: &dyn SessionFormat<D>,
    device: &D,
    bank: &mut D::Bank,
    file: &[u8],
    quant_bits: u8,
    limits: &SessionLimits,
) -> Result<(Session, bool), SessionError> {
    let (container, checked) = Container::decode(file)?;
    if container.quant_bits != quant_bits {
        return Err(SessionError::Quantisation { found: container.quant_bits, want: quant_bits });
    }
    let tokens = usize::try_from(container.tokens).unwrap_or(usize::MAX);
    Ok((format.restore(device, bank, &container.payload, Some(tokens), limits)?, checked))
}
