//! The broker socket's messages: how a worker gets the weights of a model.
//!
//! The broker is a Unix socket of type SOCK_SEQPACKET, so that a message is one packet and carries its descriptors with it.
//! The conversation:
//!
//! ```text
//! worker                                             owner
//!   ── Hello {model, expected content, client} ──────▶   within 5 s of connecting
//!   ◀── Refused {code, sentence, retry_after_ms} ─────   and the owner closes, or
//!   ◀── Welcome {lease, epoch, chunks, manifest} ─────   with 1 descriptor: the manifest, a sealed memfd
//!   ◀── Chunks {first, count} ────────────────────────   with `count` ≤ 253 descriptors; repeated until all `chunks` came
//!   ◀── Drain {deadline_s, reason} ───────────────────   perhaps, later: please finish and go
//!   ── Goodbye ──────────────────────────────────────▶   or just close: the connection is the lease
//! ```
//!
//! Descriptor `k` over all `Chunks` messages is chunk `k` of the manifest. The lease lasts as long as the connection: the
//! kernel closes it when the worker dies, however it dies. A worker keeps the connection open for as long as it maps the
//! memory; on `Drain` it should finish and close, else it gets SIGTERM at the deadline.
//!
//! Frame, little-endian: magic `DS4B`, version u16, kind u16, body length u32, FNV-1a of all that plus the body u32, body.
//! Strings are u16 length + UTF-8. The header and the body of `Refused` are the same in every version, so that two
//! programs of different versions can still say why they do not understand each other.

/// Version of this protocol.
pub const VERSION: u16 = 1;
/// No frame is longer, in bytes.
pub const MAX_FRAME: usize = 4096;
/// Seconds that a client has from connecting to its Hello.
pub const HELLO_TIMEOUT_S: u64 = 5;

const MAGIC: [u8; 4] = *b"DS4B";
const HEADER: usize = 16;
const KIND_HELLO: u16 = 1;
const KIND_WELCOME: u16 = 2;
const KIND_CHUNKS: u16 = 3;
const KIND_REFUSED: u16 = 4;
const KIND_DRAIN: u16 = 5;
const KIND_GOODBYE: u16 = 6;

/// Stable codes of [`Message::Refused`].
pub mod codes {
    /// The client speaks another version of the protocol.
    pub const PROTOCOL_VERSION: &str = "protocol_version";
    /// The client sent something that is not a message of the protocol.
    pub const BAD_MESSAGE: &str = "bad_message";
    /// The client sent no Hello in time.
    pub const HELLO_TIMEOUT: &str = "hello_timeout";
    /// The client's user may not attach.
    pub const PEER_NOT_ALLOWED: &str = "peer_not_allowed";
    /// The owner holds no model at all.
    pub const NO_MODEL: &str = "no_model";
    /// The owner holds no model of that name.
    pub const UNKNOWN_MODEL: &str = "unknown_model";
    /// Several models are held and the client named none.
    pub const AMBIGUOUS_MODEL: &str = "ambiguous_model";
    /// The model is being loaded; retry.
    pub const MODEL_LOADING: &str = "model_loading";
    /// The model's load failed.
    pub const MODEL_FAILED: &str = "model_failed";
    /// The model is held with other content than the client expects.
    pub const CONTENT_MISMATCH: &str = "content_mismatch";
    /// The model is being unloaded.
    pub const MODEL_DRAINING: &str = "model_draining";
    /// The owner is stopping; retry.
    pub const OWNER_STOPPING: &str = "owner_stopping";
    /// The owner serves as many leases as it may.
    pub const TOO_MANY_LEASES: &str = "too_many_leases";
}

/// A message of the broker socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Worker to owner, first: which model, and who asks.
    Hello {
        /// Name of the model; empty: the only one that the owner has.
        model: String,
        /// BLAKE3 that the model's content must have.
        expected: Option<[u8; 32]>,
        /// What the client calls itself, for people to read.
        client: String,
    },
    /// Owner to worker: the lease is granted. Carries one descriptor, the manifest's.
    Welcome {
        /// Identifies the lease in the owner's logs and listings.
        lease: u64,
        /// Epoch of the model.
        epoch: u64,
        /// Number of chunk descriptors that follow.
        chunks: u32,
        /// Bytes of the manifest.
        manifest_len: u64,
        /// Name of the model.
        model: String,
    },
    /// Owner to worker: carries the descriptors of chunks `first..first + count`.
    Chunks {
        /// Index of the first.
        first: u32,
        /// How many, 1 to 253.
        count: u32,
    },
    /// Owner to worker: no lease; the owner closes.
    Refused {
        /// One of [`codes`].
        code: String,
        /// The cause in a sentence, naming what to do.
        sentence: String,
        /// Try again after this many milliseconds; 0: trying again is pointless.
        retry_after_ms: u32,
    },
    /// Owner to worker: finish and close within `deadline_s`.
    Drain {
        /// Seconds until SIGTERM; 0: none comes, a newer epoch is there and this one goes when its last lease ends.
        deadline_s: u32,
        /// Why, in a sentence.
        reason: String,
    },
    /// Worker to owner: the mapping is gone.
    Goodbye,
}

/// Why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Too short for a header, or not as long as the header says.
    #[error("a frame of {actual} bytes should have {expected}")]
    Length {
        /// From the header, or the header's own size.
        expected: usize,
        /// Received.
        actual: usize,
    },
    /// Not this protocol.
    #[error("a frame begins with {0:02x?} instead of the magic \"DS4B\"")]
    Magic([u8; 4]),
    /// Another version of this protocol.
    #[error(
        "the peer speaks version {0} of the broker protocol, this program version {VERSION}; install both from the same release"
    )]
    Version(u16),
    /// Bits changed.
    #[error("a frame's checksum is wrong")]
    Checksum,
    /// A kind that this version does not have.
    #[error("unknown kind {0} of message")]
    Kind(u16),
    /// The body does not parse.
    #[error("a malformed {0} message")]
    Body(&'static str),
}

/// FNV-1a, 32 bits: catches every change of a single byte, which is all that a local socket could need.
fn checksum(parts: [&[u8]; 2]) -> u32 {
    parts.into_iter().flatten().fold(0x811c_9dc5, |h, b| (h ^ u32::from(*b)).wrapping_mul(0x0100_0193))
}

/// At most `max` bytes of `s`, cut between characters.
fn clip(s: &str, max: usize) -> &str {
    &s[..s.floor_char_boundary(max)]
}

fn put_str(out: &mut Vec<u8>, s: &str, max: usize) {
    let s = clip(s, max);
    let len = u16::try_from(s.len()).unwrap_or(0);
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&s.as_bytes()[..usize::from(len)]);
}

/// Longest model name, client name and code, in bytes; longer ones are cut.
const MAX_NAME: usize = 256;
/// Longest sentence; longer ones are cut.
const MAX_SENTENCE: usize = 2048;

impl Message {
    /// The frame. Over-long strings are cut (names at 256 bytes, sentences at 2048), so it always fits [`MAX_FRAME`].
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let kind = match self {
            Self::Hello { model, expected, client } => {
                put_str(&mut body, model, MAX_NAME);
                put_str(&mut body, client, MAX_NAME);
                body.push(u8::from(expected.is_some()));
                body.extend_from_slice(&expected.unwrap_or_default());
                KIND_HELLO
            }
            Self::Welcome { lease, epoch, chunks, manifest_len, model } => {
                body.extend_from_slice(&lease.to_le_bytes());
                body.extend_from_slice(&epoch.to_le_bytes());
                body.extend_from_slice(&chunks.to_le_bytes());
                body.extend_from_slice(&manifest_len.to_le_bytes());
                put_str(&mut body, model, MAX_NAME);
                KIND_WELCOME
            }
            Self::Chunks { first, count } => {
                body.extend_from_slice(&first.to_le_bytes());
                body.extend_from_slice(&count.to_le_bytes());
                KIND_CHUNKS
            }
            Self::Refused { code, sentence, retry_after_ms } => {
                put_str(&mut body, code, MAX_NAME);
                put_str(&mut body, sentence, MAX_SENTENCE);
                body.extend_from_slice(&retry_after_ms.to_le_bytes());
                KIND_REFUSED
            }
            Self::Drain { deadline_s, reason } => {
                body.extend_from_slice(&deadline_s.to_le_bytes());
                put_str(&mut body, reason, MAX_SENTENCE);
                KIND_DRAIN
            }
            Self::Goodbye => KIND_GOODBYE,
        };
        frame(VERSION, kind, &body)
    }

    /// Parses a frame; it must be exactly one message.
    ///
    /// # Errors
    /// See [`DecodeError`]. A `Refused` of any version is understood.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let Some((header, body)) = bytes.split_first_chunk::<HEADER>() else {
            return Err(DecodeError::Length { expected: HEADER, actual: bytes.len() });
        };
        let mut fields = Reader(header);
        let truncated = DecodeError::Body("header");
        let magic = fields.array().ok_or(truncated.clone())?;
        if magic != MAGIC {
            return Err(DecodeError::Magic(magic));
        }
        let version = fields.u16().ok_or(truncated.clone())?;
        let kind = fields.u16().ok_or(truncated.clone())?;
        let length = fields.u32().ok_or(truncated.clone())? as usize;
        let sum = fields.u32().ok_or(truncated)?;
        if length != body.len() || bytes.len() > MAX_FRAME {
            return Err(DecodeError::Length {
                expected: length.saturating_add(HEADER).min(MAX_FRAME),
                actual: bytes.len(),
            });
        }
        if sum != checksum([&header[..HEADER - 4], body]) {
            return Err(DecodeError::Checksum);
        }
        if version != VERSION && kind != KIND_REFUSED {
            return Err(DecodeError::Version(version));
        }
        let mut r = Reader(body);
        let (name, message) = match kind {
            KIND_HELLO => ("Hello", r.hello()),
            KIND_WELCOME => ("Welcome", r.welcome()),
            KIND_CHUNKS => ("Chunks", r.chunks()),
            KIND_REFUSED => ("Refused", r.refused()),
            KIND_DRAIN => ("Drain", r.drain()),
            KIND_GOODBYE => ("Goodbye", Some(Self::Goodbye)),
            other => return Err(DecodeError::Kind(other)),
        };
        message.filter(|_| r.0.is_empty()).ok_or(DecodeError::Body(name))
    }

    /// A refusal with one of [`codes`].
    pub fn refused(code: &str, sentence: impl Into<String>, retry_after_ms: u32) -> Self {
        Self::Refused { code: code.into(), sentence: sentence.into(), retry_after_ms }
    }
}

fn frame(version: u16, kind: u16, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + body.len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&version.to_le_bytes());
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    let sum = checksum([&out, body]);
    out.extend_from_slice(&sum.to_le_bytes());
    out.extend_from_slice(body);
    out
}

/// Takes fields off the front of a body; `None` when it is too short or a string is not UTF-8.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn string(&mut self, max: usize) -> Option<String> {
        let len = usize::from(self.u16()?);
        let (head, rest) = self.0.split_at_checked(len).filter(|_| len <= max)?;
        self.0 = rest;
        std::str::from_utf8(head).ok().map(str::to_owned)
    }

    fn hello(&mut self) -> Option<Message> {
        let (model, client) = (self.string(MAX_NAME)?, self.string(MAX_NAME)?);
        let [given] = self.array()?;
        let hash = self.array()?;
        let expected = match given {
            0 => None,
            1 => Some(hash),
            _ => return None,
        };
        Some(Message::Hello { model, expected, client })
    }

    fn welcome(&mut self) -> Option<Message> {
        Some(Message::Welcome {
            lease: self.u64()?,
            epoch: self.u64()?,
            chunks: self.u32()?,
            manifest_len: self.u64()?,
            model: self.string(MAX_NAME)?,
        })
    }

    fn chunks(&mut self) -> Option<Message> {
        Some(Message::Chunks { first: self.u32()?, count: self.u32()? })
    }

    fn refused(&mut self) -> Option<Message> {
        Some(Message::Refused {
            code: self.string(MAX_NAME)?,
            sentence: self.string(MAX_SENTENCE)?,
            retry_after_ms: self.u32()?,
        })
    }

    fn drain(&mut self) -> Option<Message> {
        Some(Message::Drain { deadline_s: self.u32()?, reason: self.string(MAX_SENTENCE)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examples() -> Vec<Message> {
        vec![
            Message::Hello { model: "smollm2".into(), expected: Some([7; 32]), client: "ds4-worker 1".into() },
            Message::Hello { model: String::new(), expected: None, client: "é".into() },
            Message::Welcome { lease: 3, epoch: u64::MAX, chunks: 96, manifest_len: 1 << 22, model: "m".into() },
            Message::Chunks { first: 253, count: 1 },
            Message::refused(codes::MODEL_LOADING, "m is loading: 43 %", 250),
            Message::Drain { deadline_s: 30, reason: "the owner is stopping".into() },
            Message::Goodbye,
        ]
    }

    #[test]
    fn messages_survive_a_round_trip() {
        for message in examples() {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_refused() {
        for message in examples() {
            let good = message.encode();
            for bit in 0..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(Message::decode(&bad).is_err(), "bit {bit} of {message:?}");
            }
            for len in 0..good.len() {
                assert!(Message::decode(&good[..len]).is_err(), "{len} bytes of {message:?}");
            }
            let longer = [&good[..], &[0]].concat();
            assert!(matches!(Message::decode(&longer), Err(DecodeError::Length { .. })));
        }
    }

    #[test]
    fn each_fault_has_its_own_error() {
        let good = Message::Goodbye.encode();
        assert_eq!(Message::decode(b"GET / HTTP/1.1\r\n\r\n"), Err(DecodeError::Magic(*b"GET ")));
        assert_eq!(Message::decode(&[]), Err(DecodeError::Length { expected: 16, actual: 0 }));
        assert_eq!(Message::decode(&frame(VERSION, 77, &[])), Err(DecodeError::Kind(77)));
        assert_eq!(Message::decode(&frame(VERSION, KIND_HELLO, &[0, 0])), Err(DecodeError::Body("Hello")));
        assert_eq!(Message::decode(&frame(VERSION, KIND_GOODBYE, &[0])), Err(DecodeError::Body("Goodbye")));
        let mut flipped = good;
        flipped[12] ^= 1;
        assert_eq!(Message::decode(&flipped), Err(DecodeError::Checksum));
        let mut bad_utf8 = vec![2, 0, 0xff, 0xff, 0, 0, 0];
        bad_utf8.extend([0; 32]);
        assert_eq!(Message::decode(&frame(VERSION, KIND_HELLO, &bad_utf8)), Err(DecodeError::Body("Hello")));
    }

    #[test]
    fn another_version_is_named_but_its_refusal_is_understood() {
        let hello = Message::decode(&frame(2, KIND_HELLO, &[]));
        assert_eq!(hello, Err(DecodeError::Version(2)));
        let text = hello.unwrap_err().to_string();
        assert!(text.contains("version 2") && text.contains("version 1"), "{text}");
        let refusal = Message::refused(codes::PROTOCOL_VERSION, "no", 0);
        let mut bytes = refusal.encode();
        let body = bytes.split_off(HEADER);
        assert_eq!(Message::decode(&frame(9, KIND_REFUSED, &body)), Ok(refusal));
    }

    #[test]
    fn long_strings_are_cut_between_characters_and_fit_a_frame() {
        let long = "é".repeat(3000);
        for message in [
            Message::Hello { model: long.clone(), expected: None, client: long.clone() },
            Message::refused(&long, long.clone(), 0),
            Message::Drain { deadline_s: 1, reason: long.clone() },
        ] {
            let bytes = message.encode();
            assert!(bytes.len() <= MAX_FRAME);
            assert!(Message::decode(&bytes).is_ok());
        }
    }

    #[test]
    fn the_layout_is_fixed() {
        // Written out by hand from the module's description: FNV-1a 32 of the twelve header bytes of an empty body.
        let bytes = Message::Goodbye.encode();
        assert_eq!(&bytes[..12], b"DS4B\x01\x00\x06\x00\x00\x00\x00\x00");
        let mut hash: u32 = 2_166_136_261;
        for byte in &bytes[..12] {
            hash ^= u32::from(*byte);
            hash = hash.wrapping_mul(16_777_619);
        }
        assert_eq!(bytes[12..], hash.to_le_bytes());
    }
}
