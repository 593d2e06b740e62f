//! Whole answers, token by token, with the real vocabulary.

use serde_json::{Value, json};

use super::*;
use crate::deepseek_v4::tests::{metadata, tokenizer};
use crate::{ChatMessage, ChatTemplate};

/// What a client hears of one answer.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    reasoning: String,
    text: String,
    calls: Vec<(String, Value)>,
    ended: bool,
    /// Calls that were begun and not finished.
    begun: usize,
    /// Texts of the tokens of each part.
    parts: [Vec<u8>; 3],
    /// Tokens that were sampled greedily, and those that were forced, as text.
    greedy: String,
    forced: String,
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])
}

fn input(thinking: Thinking, tools: Option<Value>) -> ChatInput {
    ChatInput { tools, thinking: Some(thinking), ..ChatInput::of(vec![ChatMessage::new("user", "q")]) }
}

impl Heard {
    /// The tokens of the text (0), of the reasoning (1) and the hidden ones (2), joined.
    fn part(&self, at: usize) -> String {
        String::from_utf8_lossy(&self.parts[at]).into_owned()
    }
}

/// Plays a model that says `answer`, in tokens of the vocabulary, and then `end`s or is cut.
fn play(input: &ChatInput, stops: &[&str], answer: &str, cut: bool) -> Heard {
    let t = tokenizer();
    let template = ChatTemplate::compile(metadata()).expect("encoder");
    let format = template.answer_format(input, t).expect("a format of its own");
    let mut reader = format.reader(stops.iter().map(|s| s.as_bytes().to_vec()).collect());
    let mut heard = Heard::default();
    let mut arguments: Vec<String> = Vec::new();
    let mut complete = 0;
    let mut said: Vec<u32> = t.encode(answer, Specials::Parse);
    said.reverse();
    let mut tokens = Vec::new();
    let mut settled = Vec::new();
    let mut reads = Vec::new();
    loop {
        let steer = reader.steer();
        let token = match steer {
            Steer::Force(token) => token,
            _ => match said.pop().or_else(|| reader.instead_of_end().filter(|_| !cut)) {
                Some(token) => token,
                None => break,
            },
        };
        let text = String::from_utf8_lossy(t.token_bytes(token)).into_owned();
        tokens.push(t.token_bytes(token));
        match steer {
            Steer::Free => {}
            Steer::Greedy => heard.greedy += &text,
            Steer::Force(_) => heard.forced += &text,
        }
        let read = reader.push(token, t.token_bytes(token), t.is_control(token));
        heard.ended = read.ended;
        reads.push(read);
        if heard.ended {
            break;
        }
    }
    reads.push(reader.finish(cut));
    for read in reads {
        settled.extend(read.settled);
        for piece in read.pieces {
            match piece {
                Piece::Text(text) => heard.text += &text,
                Piece::Reasoning(text) => heard.reasoning += &text,
                Piece::Call(name) => {
                    heard.calls.push((name, Value::Null));
                    arguments.push(String::new());
                }
                Piece::CallEnd => complete += 1,
                Piece::Arguments(part) => *arguments.last_mut().expect("a call before its arguments") += &part,
            }
        }
    }
    // One that was cut short is the last.
    heard.begun = heard.calls.len() - complete;
    heard.calls.truncate(complete);
    for (call, text) in heard.calls.iter_mut().zip(&arguments) {
        call.1 = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    }
    assert_eq!(settled.len(), tokens.len(), "every token is settled once");
    for (part, token) in settled.iter().zip(&tokens) {
        let at = match part {
            Part::Text => 0,
            Part::Reasoning => 1,
            Part::Hidden => 2,
        };
        heard.parts[at].extend(*token);
    }
    heard
}

const CALL: &str = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Köln 漢字</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

#[test]
fn deepseek_v4_an_answer_of_all_parts() {
    let answer = format!("They want the 天气 😀.</think>I look it up.{CALL}ignored after the block");
    let heard = play(&input(Thinking::High, Some(weather())), &[], &answer, false);
    assert_eq!(heard.reasoning, "They want the 天气 😀.");
    assert_eq!(heard.text, "I look it up.");
    assert_eq!(heard.calls, [("weather".to_owned(), json!({"city": "Köln 漢字", "days": [1, 2]}))]);
    assert!(heard.ended, "the block's closer ends the answer");
    // The full stop and the line breaks before the call are one token.
    assert_eq!(heard.part(0).trim_end(), "I look it up.", "only the answer's tokens are its tokens");
    assert_eq!(heard.part(1), "They want the 天气 😀.");
    assert!(heard.part(2).contains("｜DSML｜") && heard.part(2).starts_with("</think>"), "{}", heard.part(2));
}

#[test]
fn deepseek_v4_answers_have_syntax_where_tools_are_on_offer() {
    let template = ChatTemplate::compile(metadata()).expect("encoder");
    let syntax = |tools| {
        let format = template.answer_format(&input(Thinking::None, tools), tokenizer()).expect("v4");
        format.has_syntax()
    };
    assert_eq!([syntax(None), syntax(Some(json!([]))), syntax(Some(weather()))], [false, false, true]);
}

#[test]
fn deepseek_v4_the_sampler_is_greedy_in_syntax_and_only_there() {
    let answer = format!("I think.</think>I say.{CALL}");
    let heard = play(&input(Thinking::High, Some(weather())), &[], &answer, false);
    for free in ["think", "say", "Köln", "漢字"] {
        assert!(!heard.greedy.contains(free), "{free} in {}", heard.greedy);
    }
    for syntax in ["tool_calls>\n", "invoke name=\"weather\">", "name=\"city\"", "[1, 2]", "invoke>\n"] {
        assert!(heard.greedy.contains(syntax), "{syntax} not in {}", heard.greedy);
    }
    assert_eq!(heard.forced, "");
    // The same markup in reasoning is not syntax.
    let quoted = play(&input(Thinking::High, Some(weather())), &[], &format!("It says {CALL}</think>ok"), false);
    assert_eq!((quoted.greedy.as_str(), quoted.text.as_str(), quoted.calls.len()), ("", "ok", 0));
}

#[test]
fn deepseek_v4_stop_strings_act_on_the_answer_only() {
    let answer = format!("A STOP in thought.</think>One STO two STOP three{CALL}");
    let heard = play(&input(Thinking::High, Some(weather())), &["STOP"], &answer, false);
    assert_eq!((heard.reasoning.as_str(), heard.text.as_str()), ("A STOP in thought.", "One STO two "));
    assert!(heard.ended && heard.calls.is_empty());
    let answer = format!("No.</think>Fine.{}", CALL.replace("漢字", "STOP"));
    let heard = play(&input(Thinking::High, Some(weather())), &["STOP", "Köln"], &answer, false);
    assert_eq!(heard.calls, [("weather".to_owned(), json!({"city": "Köln STOP", "days": [1, 2]}))]);
    // What only looks like one is released before the call, not after it.
    let heard = play(&input(Thinking::None, Some(weather())), &["STOP"], &format!("Fine ST{CALL}"), false);
    assert_eq!((heard.text.as_str(), heard.calls.len()), ("Fine ST", 1));
}

#[test]
fn deepseek_v4_calls_that_must_be_made() {
    let of = |thinking, tool_choice| ChatInput { tool_choice, ..input(thinking, Some(weather())) };
    let named = of(Thinking::None, ToolChoice::Named("weather".into()));
    let rest = "<｜DSML｜parameter name=\"city\" string=\"true\">Rom</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let heard = play(&named, &[], rest, false);
    assert_eq!(heard.calls, [("weather".to_owned(), json!({"city": "Rom"}))]);
    assert_eq!(heard.forced, "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n");
    assert_eq!(heard.text, "");
    // After reasoning, which is the model's own, however it ends.
    for thought in ["Hm.</think>", "Hm."] {
        let required = of(Thinking::High, ToolChoice::Required);
        let heard = play(&required, &[], &format!("{thought}{}", if thought == "Hm." { "" } else { rest }), false);
        assert_eq!(heard.reasoning, "Hm.");
        assert_eq!(heard.calls.len(), 1, "{thought}");
        assert_eq!(heard.calls[0].0, "weather");
    }
    // With a choice of tools, the name is the model's.
    let two = json!([weather()[0], {"type": "function", "function": {"name": "time"}}]);
    let required = ChatInput { tool_choice: ToolChoice::Required, ..input(Thinking::None, Some(two)) };
    let heard = play(&required, &[], "time\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", false);
    assert_eq!(heard.calls, [("time".to_owned(), json!({}))]);
    assert!(heard.greedy.starts_with("time"), "{}", heard.greedy);
}

#[test]
fn deepseek_v4_one_call_at_most_when_asked() {
    let two = CALL.replace(
        "</｜DSML｜tool_calls>",
        "<｜DSML｜invoke name=\"weather\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    );
    let many = input(Thinking::None, Some(weather()));
    assert_eq!(play(&many, &[], &two, false).calls.len(), 2);
    let heard = play(&ChatInput { single_call: true, ..many }, &[], &two, false);
    assert!(heard.ended);
    assert_eq!(heard.calls.len(), 1);
}

#[test]
fn deepseek_v4_control_tokens_that_mean_nothing_are_not_shown() {
    let plain = input(Thinking::None, None);
    let heard = play(&plain, &[], "One</think> two<think> three<｜User｜> four", false);
    assert_eq!((heard.text.as_str(), heard.reasoning.as_str()), ("One two three four", ""));
    assert_eq!(heard.part(0), "One two three four");
    // A marker that belongs to no tag; in code it is quoted.
    for (said, shown) in
        [("One ｜DSML｜, two", "One , two"), ("`<｜DSML｜tool_calls>` and ｜DSML｜.", "`<｜DSML｜tool_calls>` and .")]
    {
        for tools in [None, Some(weather())] {
            let heard = play(&input(Thinking::None, tools), &[], said, false);
            assert_eq!((heard.text.as_str(), heard.calls.len()), (shown, 0), "{said}");
        }
    }
    // Spelt as text they are text.
    let t = tokenizer();
    let mut reader =
        ChatTemplate::compile(metadata()).expect("encoder").answer_format(&plain, t).expect("v4").reader(vec![]);
    let mut text = String::new();
    for token in t.encode("The tag <think> opens it.", Specials::Plain) {
        text += &reader.push(token, t.token_bytes(token), t.is_control(token)).text();
    }
    assert_eq!(text + &reader.finish(false).text(), "The tag <think> opens it.");
}

#[test]
fn deepseek_v4_cut_answers() {
    // By the budget inside a call: none of it. Inside reasoning: reasoning.
    let tools = || input(Thinking::High, Some(weather()));
    let cut = &CALL[..CALL.find("</｜DSML｜invoke>").expect("closer")];
    let heard = play(&tools(), &[], &format!("a</think>b{cut}"), true);
    assert_eq!((heard.text.as_str(), heard.calls.len(), heard.begun, heard.ended), ("b", 0, 1, false));
    assert_eq!(play(&tools(), &[], "only thought </thi", true).reasoning, "only thought </thi");
    // By the model itself there: its closers were forgotten.
    assert_eq!(play(&tools(), &[], &format!("a</think>b{cut}"), false).calls.len(), 1);
    // Without tools a tag ends the answer.
    let heard = play(&input(Thinking::None, None), &[], &format!("Done.{CALL}"), false);
    assert_eq!((heard.text.as_str(), heard.calls.len(), heard.ended), ("Done.", 0, true));
    assert_eq!((heard.part(0).trim_end(), heard.greedy.as_str()), ("Done.", ""));
}
