//! GPT-2's printable alphabet for bytes: every byte has a character, so that a vocabulary can be text.
//!
//! Bytes 0x21–0x7E, 0xA1–0xAC and 0xAE–0xFF stand for themselves; the other 68 are numbered in order from U+0100.

/// One past the largest character of the alphabet.
const END: usize = 0x100 + 68;

const fn stands_for_itself(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

const fn alphabet() -> ([char; 256], [Option<u8>; END]) {
    let mut to_char = ['\0'; 256];
    let mut to_byte = [None; END];
    let mut next: u8 = 0;
    let mut byte: u8 = 0;
    loop {
        let c = if stands_for_itself(byte) {
            byte as char
        } else {
            // U+0100 + next, by its UTF-16 value: `next` is at most 67, so this is a scalar value.
            let code = 0x100 + next as u32;
            next += 1;
            match char::from_u32(code) {
                Some(c) => c,
                None => panic!("U+0100 to U+0143 are characters"),
            }
        };
        to_char[byte as usize] = c;
        to_byte[c as usize] = Some(byte);
        if byte == 255 {
            return (to_char, to_byte);
        }
        byte += 1;
    }
}

static TABLES: ([char; 256], [Option<u8>; END]) = alphabet();

/// The character of a byte.
pub(crate) fn char_of(byte: u8) -> char {
    TABLES.0[usize::from(byte)]
}

/// The byte that a character stands for, or `None` outside the alphabet.
pub(crate) fn byte_of(c: char) -> Option<u8> {
    TABLES.1.get(c as usize).copied().flatten()
}

/// Appends the bytes that `token` stands for; a token with a character outside the alphabet is taken literally.
pub(crate) fn decode_into(token: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in token.chars() {
        match byte_of(c) {
            Some(b) => out.push(b),
            None => {
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_is_a_bijection_with_the_published_corner_values() {
        let mut seen = std::collections::HashSet::new();
        for b in 0..=255u8 {
            assert!(seen.insert(char_of(b)));
            assert_eq!(byte_of(char_of(b)), Some(b));
        }
        // Known from any GPT-2 vocabulary: space is Ġ, newline Ċ, tab ĉ; the last one is soft hyphen's.
        assert_eq!(char_of(b' '), 'Ġ');
        assert_eq!(char_of(b'\n'), 'Ċ');
        assert_eq!(char_of(b'\t'), 'ĉ');
        assert_eq!(char_of(0xAD), '\u{143}');
        assert_eq!(byte_of('\u{144}'), None);
        assert_eq!(byte_of(' '), None);
    }

    #[test]
    fn a_foreign_character_makes_the_whole_token_literal() {
        let mut out = b"x".to_vec();
        decode_into("Ġ€", &mut out);
        assert_eq!(out, "xĠ€".as_bytes());
    }
}
