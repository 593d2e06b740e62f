//! Bytes of tokens for people and for files.

use std::fmt::Write as _;

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, b| {
        // Writing to a string cannot fail.
        let _ = write!(out, "{b:02x}");
        out
    })
}

/// The bytes that an even number of hex digits stands for.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok())).collect();
    let digits = digits.filter(|d| d.len().is_multiple_of(2))?;
    Some(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// A quoted text with its line ends and quotes escaped, or `b"..."` for bytes that are not UTF-8.
pub fn readable(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => format!("{text:?}"),
        Err(_) => format!("b\"{}\"", bytes.escape_ascii()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_there_and_back() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(unhex(&hex(&all)), Some(all));
        assert_eq!(unhex("aF"), Some(vec![0xaf]));
        assert_eq!((unhex(""), unhex("a"), unhex("0g"), unhex("é0")), (Some(vec![]), None, None, None));
    }

    #[test]
    fn bytes_stay_on_their_line() {
        assert_eq!(readable(b"a\n\"\t"), r#""a\n\"\t""#);
        assert_eq!(readable("天😀".as_bytes()), "\"天😀\"");
        assert_eq!(readable(&[b'a', 0xff, b'\n']), r#"b"a\xff\n""#);
    }
}
