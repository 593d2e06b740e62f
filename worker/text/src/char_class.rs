//! Unicode classes of characters as pre-tokenizers use them: \p{L}, \p{M}, \p{N}, \p{P}, \p{S} and \s.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// Letters, `\p{L}`.
pub(crate) const LETTER: u8 = 1;
/// Marks, `\p{M}`.
pub(crate) const MARK: u8 = 2;
/// Numbers, `\p{N}`.
pub(crate) const NUMBER: u8 = 4;
/// Punctuation, `\p{P}`.
pub(crate) const PUNCTUATION: u8 = 8;
/// Symbols, `\p{S}`.
pub(crate) const SYMBOL: u8 = 16;
/// White space, `\s` (the property White_Space).
pub(crate) const SPACE: u8 = 32;

const BLOCK: usize = 256;

/// Two levels: most of the 4,352 blocks of 256 characters are uniform and shared, so the table stays near 70 KiB.
struct Table {
    blocks: Vec<u16>,
    classes: Vec<[u8; BLOCK]>,
}

static TABLE: LazyLock<Table> = LazyLock::new(build);

/// The classes of `c`, a union of the constants above.
#[inline]
pub(crate) fn of(c: char) -> u8 {
    let code = c as usize;
    TABLE.classes[usize::from(TABLE.blocks[code / BLOCK])][code % BLOCK]
}

/// Builds the table now rather than at the first text: about a millisecond.
pub(crate) fn prepare() {
    LazyLock::force(&TABLE);
}

fn build() -> Table {
    let mut flat = vec![0u8; 0x11_0000];
    for (pattern, bit) in
        [(r"\p{L}", LETTER), (r"\p{M}", MARK), (r"\p{N}", NUMBER), (r"\p{P}", PUNCTUATION), (r"\p{S}", SYMBOL)]
    {
        let parsed = regex_syntax::parse(pattern).ok();
        let Some(HirKind::Class(Class::Unicode(class))) = parsed.as_ref().map(|hir| hir.kind()) else {
            unreachable!("{pattern} is one class of the general categories, which are compiled in")
        };
        for range in class.ranges() {
            for entry in &mut flat[range.start() as usize..=range.end() as usize] {
                *entry |= bit;
            }
        }
    }
    for (code, entry) in (0u32..).zip(&mut flat) {
        if char::from_u32(code).is_some_and(char::is_whitespace) {
            *entry |= SPACE;
        }
    }
    let mut table = Table { blocks: Vec::with_capacity(flat.len() / BLOCK), classes: Vec::new() };
    let mut known = ahash::AHashMap::<[u8; BLOCK], u16>::new();
    for chunk in flat.as_chunks::<BLOCK>().0 {
        let next = known.len();
        let id = *known.entry(*chunk).or_insert_with(|| {
            table.classes.push(*chunk);
            u16::try_from(next).unwrap_or_else(|_| unreachable!("there are 4,352 blocks"))
        });
        table.blocks.push(id);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_of_characters_with_known_general_category() {
        for (text, class) in [
            ("aÉß漢한אไʰ𠮷", LETTER),
            ("\u{301}\u{fe0f}\u{20dd}\u{93f}", MARK),
            ("0٣½²Ⅻ①𝟙", NUMBER),
            ("!-_¡—«“、", PUNCTUATION),
            ("$+<^`|~€→😀", SYMBOL),
            (" \t\r\n\u{85}\u{a0}\u{2003}\u{2028}\u{3000}", SPACE),
            ("\0\u{7f}\u{200b}\u{200d}\u{feff}\u{e000}\u{10ffff}", 0),
        ] {
            for c in text.chars() {
                assert_eq!(of(c), class, "{c:?}");
            }
        }
    }
}
