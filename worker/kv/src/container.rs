//! The KVC container: key text and payload of one saved session, with our checksum section behind them.
//!
//! Layout (project fact sheet on DeepSeek V4, section 8.5): `KVC`, version 1, 48 more bytes of fixed header, the key text, the
//! payload, an optional tool map (`KTM`), which this codec carries as opaque bytes, and then our section: `KCS` + version
//! 1 and the BLAKE3 hashes of header, text, payload and tool map, in that order. Readers that do not know the section stop at
//! the end of what they know. A container without it (written by another engine) is read, and says so.

use crate::wire::Reader;

const MAGIC: &[u8; 3] = b"KVC";
const VERSION: u8 = 1;
/// Bytes before the key text.
pub const HEADER_BYTES: usize = 52;
const CHECKSUM_MAGIC: &[u8; 4] = b"KCS\x01";
const CHECKSUM_BYTES: usize = 4 + 4 * 32;
/// Flag bit: a tool map follows the payload.
const HAS_TOOL_MAP: u8 = 1;

/// Why a session was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Unknown, or a value of a later release.
    Unknown = 0,
    /// A cold prompt's boundary.
    Cold = 1,
    /// The interval while a session grows.
    Continued = 2,
    /// Its bank was needed.
    Evict = 3,
    /// The worker stopped.
    Shutdown = 4,
    /// An agent's system prompt.
    AgentSystem = 5,
    /// An agent's session.
    AgentSession = 6,
}

impl Reason {
    fn from_byte(b: u8) -> Self {
        match b {
            1 => Self::Cold,
            2 => Self::Continued,
            3 => Self::Evict,
            4 => Self::Shutdown,
            5 => Self::AgentSystem,
            6 => Self::AgentSession,
            _ => Self::Unknown,
        }
    }
}

/// A container's parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Bits of the routed experts' quantisation: 2 or 4.
    pub quant_bits: u8,
    /// Why it was saved.
    pub reason: Reason,
    /// The key is the transcript that a Responses client sees (flag bit 1) or that a thinking client sees (bit 2).
    pub visible: u8,
    /// Tokens in the payload, at least 1.
    pub tokens: u32,
    /// Times that it was loaded.
    pub hits: u32,
    /// Context length that it was written for.
    pub context: u32,
    /// Unix seconds.
    pub created: u64,
    /// Unix seconds.
    pub last_used: u64,
    /// Key text.
    pub text: Vec<u8>,
    /// Session payload.
    pub payload: Vec<u8>,
    /// Tool map section, `KTM` included; empty for none.
    pub tool_map: Vec<u8>,
}

/// Why a container was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContainerError {
    /// Not a container.
    #[error("the file begins with {found:02x?}, not with the KVC magic")]
    Magic {
        /// First bytes.
        found: [u8; 3],
    },
    /// Written by another release.
    #[error("the container has version {found}; this release reads version {VERSION}")]
    Version {
        /// Its version.
        found: u8,
    },
    /// A header field that no writer makes.
    #[error("the container's {field} is {found}")]
    Header {
        /// Field.
        field: &'static str,
        /// Value.
        found: u64,
    },
    /// It ends early.
    #[error("the container ends in the middle of {section}")]
    Truncated {
        /// What was being read.
        section: &'static str,
    },
    /// There is something unknown behind the last section.
    #[error("the container has {extra} bytes behind its last section")]
    Trailing {
        /// Bytes.
        extra: usize,
    },
    /// A section does not have the hash that it was written with.
    #[error("the container's {section} is damaged: its checksum does not match")]
    Checksum {
        /// Section.
        section: &'static str,
    },
}

impl Container {
    fn header(&self) -> [u8; HEADER_BYTES] {
        let mut h = [0; HEADER_BYTES];
        h[..3].copy_from_slice(MAGIC);
        h[3] = VERSION;
        h[4] = self.quant_bits;
        h[5] = self.reason as u8;
        h[6] = (self.visible << 1) | u8::from(!self.tool_map.is_empty());
        h[8..12].copy_from_slice(&self.tokens.to_le_bytes());
        h[12..16].copy_from_slice(&self.hits.to_le_bytes());
        h[16..20].copy_from_slice(&self.context.to_le_bytes());
        h[24..32].copy_from_slice(&self.created.to_le_bytes());
        h[32..40].copy_from_slice(&self.last_used.to_le_bytes());
        h[40..48].copy_from_slice(&(self.payload.len() as u64).to_le_bytes());
        let text = u32::try_from(self.text.len()).unwrap_or_else(|_| panic!("a key text of over 4 GiB"));
        h[48..52].copy_from_slice(&text.to_le_bytes());
        h
    }

    /// The file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let header = self.header();
        let sections: [&[u8]; 4] = [&header, &self.text, &self.payload, &self.tool_map];
        let mut out = Vec::with_capacity(sections.iter().map(|s| s.len()).sum::<usize>() + CHECKSUM_BYTES);
        sections.iter().for_each(|s| out.extend_from_slice(s));
        out.extend_from_slice(CHECKSUM_MAGIC);
        sections.iter().for_each(|s| out.extend_from_slice(blake3::hash(s).as_bytes()));
        out
    }

    /// Reads and checks a file. The flag says whether it carried checksums.
    ///
    /// # Errors
    /// [`ContainerError`]; nothing is returned in part.
    pub fn decode(bytes: &[u8]) -> Result<(Self, bool), ContainerError> {
        let cut = |section| ContainerError::Truncated { section };
        let bad = |field, found| ContainerError::Header { field, found };
        let mut r = Reader::new(bytes);
        let head = r.take(8).ok_or(cut("the header"))?;
        if &head[..3] != MAGIC {
            return Err(ContainerError::Magic { found: [head[0], head[1], head[2]] });
        }
        if head[3] != VERSION {
            return Err(ContainerError::Version { found: head[3] });
        }
        if head[4] != 2 && head[4] != 4 {
            return Err(bad("quantisation", head[4].into()));
        }
        if head[6] > 7 {
            return Err(bad("flags", head[6].into()));
        }
        if head[7] != 0 {
            return Err(bad("reserved byte", head[7].into()));
        }
        let rest =
            |r: &mut Reader<'_>| Some((r.u32()?, r.u32()?, r.u32()?, r.u32()?, r.u64()?, r.u64()?, r.u64()?, r.u32()?));
        let (tokens, hits, context, reserved, created, last_used, payload, text) =
            rest(&mut r).ok_or(cut("the header"))?;
        if tokens == 0 {
            return Err(bad("token count", 0));
        }
        if reserved != 0 {
            return Err(bad("reserved word", reserved.into()));
        }
        let text = usize::try_from(text).ok().and_then(|n| r.take(n)).ok_or(cut("the key text"))?;
        let payload = usize::try_from(payload).ok().and_then(|n| r.take(n)).ok_or(cut("the payload"))?;

        let tool_map = if head[6] & HAS_TOOL_MAP == 0 {
            &[][..]
        } else {
            let at = r.at();
            skip_tool_map(&mut r).ok_or(cut("the tool map"))?;
            &bytes[at..r.at()]
        };
        let sums = match r.left() {
            0 => None,
            CHECKSUM_BYTES => r.take(CHECKSUM_BYTES).and_then(|s| s.strip_prefix(CHECKSUM_MAGIC)),
            _ => None,
        };
        if sums.is_none() && r.at() != payload_end(tool_map, payload, text) || r.left() > 0 {
            return Err(ContainerError::Trailing { extra: bytes.len() - payload_end(tool_map, payload, text) });
        }
        if let Some(sums) = sums {
            let sections =
                [("header", &bytes[..HEADER_BYTES]), ("key text", text), ("payload", payload), ("tool map", tool_map)];
            for ((section, data), sum) in sections.into_iter().zip(sums.chunks_exact(32)) {
                if blake3::hash(data).as_bytes() != sum {
                    return Err(ContainerError::Checksum { section });
                }
            }
        }
        let container = Self {
            quant_bits: head[4],
            reason: Reason::from_byte(head[5]),
            visible: head[6] >> 1,
            tokens,
            hits,
            context,
            created,
            last_used,
            text: text.to_vec(),
            payload: payload.to_vec(),
            tool_map: tool_map.to_vec(),
        };
        Ok((container, sums.is_some()))
    }
}

/// Offset of the first byte behind the known sections.
fn payload_end(tool_map: &[u8], payload: &[u8], text: &[u8]) -> usize {
    HEADER_BYTES + text.len() + payload.len() + tool_map.len()
}

/// Walks a tool map: `KTM`, version 1, a count, and per entry the lengths and bytes of a call id and its exact call block.
fn skip_tool_map(r: &mut Reader<'_>) -> Option<()> {
    (r.take(4)? == b"KTM\x01").then_some(())?;
    for _ in 0..r.u32()? {
        let (id, block) = (r.u32()?, r.u32()?);
        r.take(usize::try_from(id).ok()?)?;
        r.take(usize::try_from(block).ok()?)?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOL_MAP: &[u8] = b"KTM\x01\x01\0\0\0\x06\0\0\0\x04\0\0\0call_1<..>";

    fn sample(tool_map: &[u8]) -> Container {
        Container {
            quant_bits: 2,
            reason: Reason::Continued,
            visible: 0,
            tokens: 7,
            hits: 3,
            context: 4096,
            created: 1_767_225_600,
            last_used: 1_767_225_700,
            text: b"a prompt".to_vec(),
            payload: (0..200).collect(),
            tool_map: tool_map.to_vec(),
        }
    }

    #[test]
    fn round_trip_with_and_without_a_tool_map() {
        for map in [&b""[..], TOOL_MAP] {
            let c = sample(map);
            assert_eq!(Container::decode(&c.encode()), Ok((c, true)));
        }
    }

    #[test]
    fn the_header_is_where_other_readers_expect_it() {
        let bytes = sample(b"").encode();
        assert_eq!(&bytes[..8], b"KVC\x01\x02\x02\0\0");
        assert_eq!(bytes[8..12], 7u32.to_le_bytes());
        assert_eq!(bytes[40..48], 200u64.to_le_bytes());
        assert_eq!(bytes[48..52], 8u32.to_le_bytes());
        assert_eq!(&bytes[52..60], b"a prompt");
    }

    #[test]
    fn a_container_of_another_engine_has_no_checksums_and_is_read() {
        let c = sample(b"");
        let bytes = c.encode();
        let plain = &bytes[..bytes.len() - CHECKSUM_BYTES];
        assert_eq!(Container::decode(plain), Ok((c, false)));
    }

    #[test]
    fn k7_every_flipped_bit_and_every_truncation_is_refused() {
        for map in [&b""[..], TOOL_MAP] {
            let bytes = sample(map).encode();
            for at in 0..bytes.len() {
                for bit in 0..8 {
                    let mut b = bytes.clone();
                    b[at] ^= 1 << bit;
                    assert!(Container::decode(&b).is_err(), "bit {bit} of byte {at}");
                }
            }
            let plain = bytes.len() - CHECKSUM_BYTES;
            for n in (0..bytes.len()).filter(|n| *n != plain) {
                assert!(Container::decode(&bytes[..n]).is_err(), "cut to {n}");
            }
        }
    }

    #[test]
    fn errors_name_the_section() {
        let bytes = sample(b"").encode();
        let with = |at: usize, v: u8| {
            let mut b = bytes.clone();
            b[at] = v;
            Container::decode(&b).unwrap_err()
        };
        assert!(matches!(with(0, b'X'), ContainerError::Magic { .. }));
        assert_eq!(with(3, 2), ContainerError::Version { found: 2 });
        assert_eq!(with(4, 3), ContainerError::Header { field: "quantisation", found: 3 });
        assert_eq!(with(8, 0), ContainerError::Header { field: "token count", found: 0 });
        assert_eq!(with(12, 9), ContainerError::Checksum { section: "header" });
        assert_eq!(with(53, b'x'), ContainerError::Checksum { section: "key text" });
        assert_eq!(with(70, 99), ContainerError::Checksum { section: "payload" });
        // A payload that claims to be larger than the file.
        let mut b = bytes.clone();
        b[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(Container::decode(&b).unwrap_err(), ContainerError::Truncated { section: "the payload" });
    }
}
