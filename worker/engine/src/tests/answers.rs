//! Answers that a reader of their own takes apart, and that steer the sampler.

use std::collections::HashMap;

use ds4_text::{AnswerFormat, Part, Piece, Read, Reader, Steer};

use super::*;

/// A language for these tests: `(` to `)` is reasoning, `<` to `>` a call in which the sampler is greedy, `!` ends the answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Toy {
    pub forced: Vec<u32>,
    /// Whether the answer may end now.
    pub must_go_on: bool,
    /// Whether it says that it has no syntax.
    pub plain: bool,
    /// What every token of a call is one of, if anything.
    pub one_of: Vec<u32>,
}

struct ToyReader {
    toy: Toy,
    at: usize,
    part: Part,
}

impl AnswerFormat for Toy {
    fn reader(&self, _: Vec<Vec<u8>>) -> Box<dyn Reader> {
        Box::new(ToyReader { toy: self.clone(), at: 0, part: Part::Text })
    }

    fn has_syntax(&self) -> bool {
        !self.plain
    }
}

impl Reader for ToyReader {
    fn push(&mut self, token: u32, bytes: &[u8], _: bool) -> Read {
        self.at += usize::from(self.steer() == Steer::Force(token));
        let text = String::from_utf8_lossy(bytes).into_owned();
        let before = self.part;
        let mut read = Read { ended: text == "!", ..Read::default() };
        match text.as_str() {
            "(" => self.part = Part::Reasoning,
            "<" => {
                self.part = Part::Hidden;
                read.pieces.push(Piece::Call("f".into()));
            }
            ">" => {
                self.part = Part::Text;
                read.pieces.push(Piece::CallEnd);
            }
            ")" => self.part = Part::Text,
            _ if before == Part::Reasoning => read.pieces.push(Piece::Reasoning(text)),
            _ if before == Part::Text => read.pieces.push(Piece::Text(text)),
            _ => {}
        }
        read.settled.push(before);
        read
    }

    fn steer(&self) -> Steer<'_> {
        match self.toy.forced.get(self.at) {
            Some(token) => Steer::Force(*token),
            None if self.part == Part::Hidden && !self.toy.one_of.is_empty() => Steer::OneOf(&self.toy.one_of),
            None if self.part == Part::Hidden => Steer::Greedy,
            None => Steer::Free,
        }
    }

    fn instead_of_end(&self) -> Option<u32> {
        self.toy.must_go_on.then_some(u32::from(b'!'))
    }

    fn finish(&mut self, _: bool) -> Read {
        Read { pieces: vec![Piece::Text(".".into())], ..Read::default() }
    }
}

fn toy_request(toy: Toy) -> GenerateRequest {
    GenerateRequest { format: Some(Arc::new(toy)), ..request(&[1, 2], 200) }
}

fn reply(text: &str) -> MockModel {
    MockModel::replying(2, text.bytes().map(u32::from).collect())
}

#[test]
fn parts_are_told_apart_counted_and_named_in_the_end() {
    let heard = hear(start(reply("(why)ok"), small()).submit(toy_request(Toy::default())).unwrap());
    assert_eq!(heard.text, "ok.");
    let (reason, timings) = heard.done();
    assert_eq!((reason, timings.reasoning_tokens, timings.completion_tokens), (FinishReason::Stop, 4, 8));
    let heard = hear(start(reply("a<x>"), small()).submit(toy_request(Toy::default())).unwrap());
    assert_eq!((heard.text.as_str(), heard.done().0), ("a.", FinishReason::ToolCalls));
    let unfinished = hear(start(reply("a<x"), small()).submit(toy_request(Toy::default())).unwrap());
    assert_eq!(unfinished.done().0, FinishReason::Stop);
    let cut = GenerateRequest { max_tokens: 4, ..toy_request(Toy::default()) };
    let heard = hear(start(reply("a<x>"), small()).submit(cut).unwrap());
    assert_eq!(heard.done().0, FinishReason::Length, "cut is cut, whatever was called");
}

#[test]
fn the_reader_ends_an_answer_or_keeps_it_from_ending() {
    let heard = hear(start(reply("a!b"), small()).submit(toy_request(Toy::default())).unwrap());
    assert_eq!((heard.text.as_str(), heard.done().0), ("a!.", FinishReason::Stop));
    let toy = Toy { must_go_on: true, ..Toy::default() };
    let heard = hear(start(reply("a"), small()).submit(toy_request(toy)).unwrap());
    assert_eq!((heard.text.as_str(), heard.tokens), ("a!.", vec![u32::from(b'a'), u32::from(b'!')]));
}

#[test]
fn forced_tokens_come_whatever_the_model_says() {
    let forced: Vec<u32> = b"xyz".iter().map(|b| u32::from(*b)).collect();
    let mut r = toy_request(Toy { forced: forced.clone(), ..Toy::default() });
    (r.max_tokens, r.logprobs) = (5, Some(0));
    let engine = start(MockModel::hashing(), small());
    let mut rx = engine.submit(r).unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = rx.blocking_recv() {
        if let Event::Token { token, logprob, .. } = event {
            assert!(logprob.is_some_and(|l| l.token == token && l.logprob < 0.0));
            tokens.push(token);
        }
    }
    assert_eq!((tokens.len(), &tokens[..3]), (5, &forced[..]));
}

#[test]
fn the_sampler_is_greedy_where_the_reader_says_so_and_nowhere_else() {
    // Two tokens that are nearly as likely as each other everywhere, after what the reader takes for syntax or not.
    let choosing = |first: u8| {
        MockModel::scripted(Box::new(move |tokens, logits| {
            logits.fill(f32::NEG_INFINITY);
            if tokens.len() == 2 {
                logits[usize::from(first)] = 0.0;
            } else {
                (logits[usize::from(b'A')], logits[usize::from(b'B')]) = (0.01, 0.0);
            }
        }))
    };
    let count = |first: u8| {
        let mut r = toy_request(Toy::default());
        (r.sampling.temperature, r.sampling.seed, r.max_tokens) = (1.0, Some(3), 100);
        let heard = hear(start(choosing(first), small()).submit(r).unwrap());
        let mut counts = HashMap::new();
        heard.tokens[1..].iter().for_each(|t| *counts.entry(*t).or_insert(0) += 1);
        counts
    };
    assert_eq!(count(b'<'), HashMap::from([(u32::from(b'A'), 99)]));
    assert!(count(b'-').get(&u32::from(b'B')).is_some_and(|n| (20..80).contains(n)), "{:?}", count(b'-'));
}

#[test]
fn the_sampler_takes_the_best_of_the_tokens_that_the_reader_lets_through() {
    // Before a call the model's own words; in it each token is the better one of `x` and `y`, and never the best of all.
    let model = || {
        MockModel::scripted(Box::new(|tokens, logits| {
            logits.fill(0.0);
            logits[usize::from(if tokens.len() == 2 { b'<' } else { b'z' })] = 9.0;
            logits[usize::from(if tokens.len() % 2 == 0 { b'x' } else { b'y' })] = 1.0;
        }))
    };
    for drafts in [0, 4] {
        for temperature in [0.0, 1.5] {
            let one_of = vec![u32::from(b'x'), u32::from(b'y')];
            let mut r = toy_request(Toy { one_of, ..Toy::default() });
            (r.sampling.temperature, r.sampling.seed, r.max_tokens) = (temperature, Some(3), 9);
            r.sampling.logit_bias = vec![(u32::from(b'<'), 100.0)];
            let guesses: crate::mock::Guesses = Box::new(|_, n| vec![u32::from(b'z'); n]);
            let model = model().keeping(crate::mock::mock_windowed_spec()).guessing(guesses);
            let heard = hear(start(model, EngineConfig { drafts, ..small() }).submit(r).unwrap());
            let text: String = heard.tokens.iter().map(|t| char::from(u8::try_from(*t).unwrap())).collect();
            assert_eq!(text, "<yxyxyxyx", "{drafts} {temperature}");
        }
    }
}
