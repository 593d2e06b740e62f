//! An answer as its client hears it: a reader turns generated tokens into pieces, and says how the next token is chosen.
//!
//! Most models write plain text ([`PlainReader`]). A family whose answers have parts — reasoning, calls of tools — brings a
//! reader of its own, made by an [`AnswerFormat`] for each sequence; whoever generates knows only these traits.

use std::fmt::Debug;

use crate::constraint::Constraint;
use crate::stream::TextStream;

/// A piece of an answer. Pieces come in the order in which they were generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// The answer itself.
    Text(String),
    /// What the model thought before it.
    Reasoning(String),
    /// A call of this tool begins.
    Call(String),
    /// The next part of the last call's arguments. The parts, joined, are the text of a JSON object.
    Arguments(String),
    /// The last call is complete. One without this was cut short, and must not be run.
    CallEnd,
}

/// Which part of the answer a token belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The answer itself, or a stop string that ended it.
    Text,
    /// The reasoning.
    Reasoning,
    /// Markup and calls, which are not shown as text.
    Hidden,
}

/// What a reader says after a token, or after the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// What is certain now: complete UTF-8, and nothing that could still become a stop string or markup. None is empty.
    pub pieces: Vec<Piece>,
    /// Where tokens went, oldest first, one entry for each token whose place became certain. After
    /// [`Reader::finish`] every token has had one.
    pub settled: Vec<Part>,
    /// The answer is over: a stop string is complete, or the markup says so.
    pub ended: bool,
}

impl Read {
    /// The answer's own text in these pieces.
    pub fn text(&self) -> String {
        self.pieces.iter().map(|p| if let Piece::Text(text) = p { text.as_str() } else { "" }).collect()
    }
}

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steer<'r> {
    /// As the request says.
    Free,
    /// The most likely one: it is syntax.
    Greedy,
    /// The most likely one of these: nothing else would be understood. Ascending and distinct, at least two.
    OneOf(&'r [u32]),
    /// This one, whatever the model thinks of it.
    Force(u32),
}

/// Reads the tokens of one answer.
pub trait Reader: Send {
    /// Takes the next token with the bytes that it stands for. `control`: it is one of the vocabulary's control tokens.
    fn push(&mut self, token: u32, bytes: &[u8], control: bool) -> Read;

    /// How the token after those pushed is to be chosen.
    fn steer(&self) -> Steer<'_>;

    /// What the token after those pushed is held to, beside [`Reader::steer`].
    fn constraint(&mut self) -> Option<&mut Constraint> {
        None
    }

    /// The token to take in place of one that would end the answer now, when it must not end yet.
    fn instead_of_end(&self) -> Option<u32>;

    /// The answer has ended; `cut`: by its budget. Says what was still held back.
    fn finish(&mut self, cut: bool) -> Read;
}

/// Makes readers for the answers to one prompt.
pub trait AnswerFormat: Debug + Send + Sync {
    /// A reader that ends the answer at the first of `stops`, looked for in the answer's own text only.
    fn reader(&self, stops: Vec<Vec<u8>>) -> Box<dyn Reader>;

    /// Whether answers are likely to hold syntax, in which the sampler has no choice ([`Steer`]): calls of tools on offer.
    fn has_syntax(&self) -> bool {
        true
    }
}

/// Plain answers that are held to a grammar from their first token on.
impl AnswerFormat for Constraint {
    fn reader(&self, stops: Vec<Vec<u8>>) -> Box<dyn Reader> {
        Box::new(HeldReader { plain: PlainReader::new(stops), constraint: self.clone() })
    }

    fn has_syntax(&self) -> bool {
        false
    }
}

struct HeldReader {
    plain: PlainReader,
    constraint: Constraint,
}

impl Reader for HeldReader {
    fn push(&mut self, token: u32, bytes: &[u8], control: bool) -> Read {
        self.constraint.take(token);
        let mut read = self.plain.push(token, bytes, control);
        read.ended |= self.constraint.complete();
        read
    }

    fn steer(&self) -> Steer<'_> {
        Steer::Free
    }

    fn constraint(&mut self) -> Option<&mut Constraint> {
        Some(&mut self.constraint)
    }

    fn instead_of_end(&self) -> Option<u32> {
        None
    }

    fn finish(&mut self, cut: bool) -> Read {
        self.plain.finish(cut)
    }
}

/// An answer that is text and nothing else. Control tokens show nothing.
#[derive(Clone, Debug)]
pub struct PlainReader(TextStream);

impl PlainReader {
    /// A reader that ends the answer at the first of `stops`.
    pub fn new(stops: Vec<Vec<u8>>) -> Self {
        Self(TextStream::new(stops))
    }
}

fn pieces_of(text: String) -> Vec<Piece> {
    if text.is_empty() { Vec::new() } else { vec![Piece::Text(text)] }
}

impl Reader for PlainReader {
    fn push(&mut self, _: u32, bytes: &[u8], control: bool) -> Read {
        let pushed = self.0.push(if control { &[] } else { bytes });
        Read { pieces: pieces_of(pushed.text), settled: vec![Part::Text], ended: pushed.stopped }
    }

    fn steer(&self) -> Steer<'_> {
        Steer::Free
    }

    fn instead_of_end(&self) -> Option<u32> {
        None
    }

    fn finish(&mut self, _: bool) -> Read {
        Read { pieces: pieces_of(self.0.finish()), ..Read::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_answers_are_text_up_to_a_stop_string() {
        let mut reader = PlainReader::new(vec![b"END".to_vec()]);
        let mut text = String::new();
        for (token, bytes, control) in [(1, &b"one E"[..], false), (2, b"<role>", true), (3, b"ND two", false)] {
            let read = reader.push(token, bytes, control);
            assert_eq!(read.settled, [Part::Text]);
            assert_eq!(read.ended, token == 3);
            text += &read.text();
        }
        assert_eq!((text.as_str(), reader.finish(false), reader.steer()), ("one ", Read::default(), Steer::Free));
    }
}
