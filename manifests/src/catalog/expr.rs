//! Dimensions in terms of hyper-parameters: `hidden`, `64`, `heads * head_dim`, `hidden / heads`.

use std::collections::BTreeMap;

use super::Number;

/// A product or quotient of names and literals, evaluated left to right with checked arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Expr {
    text: String,
    first: Term,
    rest: Vec<(Op, Term)>,
}

#[derive(Clone, Debug, PartialEq)]
enum Term {
    Literal(u64),
    Name(String),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    Mul,
    Div,
}

impl Expr {
    /// The expression as written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Names used.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.first).chain(self.rest.iter().map(|(_, t)| t)).filter_map(|t| match t {
            Term::Name(n) => Some(n.as_str()),
            Term::Literal(_) => None,
        })
    }

    /// Its value; `None` when a name is unknown or no integer, a division has a remainder, or the value overflows.
    pub fn value(&self, names: &BTreeMap<String, Number>) -> Option<u64> {
        let term = |t: &Term| match t {
            Term::Literal(v) => Some(*v),
            Term::Name(n) => names.get(n)?.int(),
        };
        self.rest.iter().try_fold(term(&self.first)?, |acc, (op, t)| {
            let v = term(t)?;
            match op {
                Op::Mul => acc.checked_mul(v),
                Op::Div => (acc.checked_rem(v)? == 0).then(|| acc / v),
            }
        })
    }
}

impl std::str::FromStr for Expr {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let term = |word: Option<&str>| -> Result<Term, String> {
            let word = word.ok_or_else(|| format!("expression {s:?} ends early"))?;
            if let Ok(v) = word.parse() {
                return Ok(Term::Literal(v));
            }
            let fine = word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
            fine.then(|| Term::Name(word.to_owned())).ok_or_else(|| format!("expression {s:?}: {word:?} is no name"))
        };
        let mut words = s.split_whitespace();
        let first = term(words.next())?;
        let mut rest = Vec::new();
        while let Some(op) = words.next() {
            let op = match op {
                "*" => Op::Mul,
                "/" => Op::Div,
                other => return Err(format!("expression {s:?}: {other:?} is neither * nor /")),
            };
            rest.push((op, term(words.next())?));
        }
        Ok(Self { text: s.to_owned(), first, rest })
    }
}

impl<'de> serde::Deserialize<'de> for Expr {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> BTreeMap<String, Number> {
        [
            ("heads", Number::Int(9)),
            ("hidden", Number::Int(576)),
            ("eps", Number::Float(0.5)),
            ("huge", Number::Int(u64::MAX)),
        ]
        .map(|(n, v)| (n.to_owned(), v))
        .into()
    }

    #[test]
    fn products_and_quotients() {
        for (text, value) in [
            ("576", Some(576)),
            ("hidden", Some(576)),
            ("hidden / heads", Some(64)),
            ("hidden / heads * 2", Some(128)),
            ("hidden / 7", None),
            ("hidden / 0", None),
            ("huge * 2", None),
            ("eps", None),
            ("nobody", None),
        ] {
            assert_eq!(text.parse::<Expr>().unwrap().value(&names()), value, "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "a *", "a + b", "a b", "A", "a * -1"] {
            assert!(text.parse::<Expr>().is_err(), "{text}");
        }
    }
}
