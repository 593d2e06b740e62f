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
    /// Names of all calls, also of those that were not finished.
    called: Vec<String>,
    /// Texts of the tokens of each part.
    parts: [Vec<u8>; 3],
    /// Tokens that were sampled greedily, and those that were forced, as text.
    greedy: String,
    forced: String,
    /// Tokens that were chosen out of a few.
    chosen: Vec<u32>,
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
    play_tokens(input, stops, tokenizer().encode(answer, Specials::Parse), cut)
}

/// As [`play`], of tokens. Where the next one is restricted it says its own if it may, else the last one that it may.
fn play_tokens(input: &ChatInput, stops: &[&str], mut said: Vec<u32>, cut: bool) -> Heard {
    let t = tokenizer();
    let template = ChatTemplate::compile(metadata()).expect("encoder");
    let format = template.answer_format(input, t).expect("schemas").expect("a format of its own");
    let mut reader = format.reader(stops.iter().map(|s| s.as_bytes().to_vec()).collect());
    let mut heard = Heard::default();
    let mut arguments: Vec<String> = Vec::new();
    let mut complete = 0;
    said.reverse();
    let mut tokens = Vec::new();
    let mut settled = Vec::new();
    let mut reads = Vec::new();
    loop {
        let steer = reader.steer();
        let token = match steer {
            Steer::Force(token) => token,
            Steer::OneOf(tokens) => {
                assert!(tokens.len() > 1 && tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
                let own = said.pop_if(|t| tokens.contains(t));
                own.unwrap_or_else(|| *tokens.last().expect("one"))
            }
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
            Steer::OneOf(_) => heard.chosen.push(token),
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
                    heard.called.push(name.clone());
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
        let format = template.answer_format(&input(Thinking::None, tools), tokenizer()).expect("schemas").expect("v4");
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
}

fn tools_of(names: &[&str]) -> Value {
    names.iter().map(|name| json!({"type": "function", "function": {"name": name}})).collect()
}

#[test]
fn deepseek_v4_with_a_choice_of_tools_each_can_be_called_and_nothing_else() {
    let t = tokenizer();
    // Names that begin alike, that begin others, in other letters, long ones.
    let long = "mcp__server.search/things:".repeat(4);
    let names = ["get", "get_weather", "get_weather_2", "Get", "weather", "a", "NB", "search-files", long.as_str()];
    for thinking in [Thinking::None, Thinking::High] {
        let required = ChatInput { tool_choice: ToolChoice::Required, ..input(thinking, Some(tools_of(&names))) };
        let thought = if thinking == Thinking::None { "" } else { "get_weather\"> is it.</think>" };
        let closers = t.encode("\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", Specials::Parse);
        for name in names {
            // The model wants this one: of its tokens, those that it has a say in.
            let spelled = t.encode(&format!("<｜DSML｜invoke name=\"{name}\">\n"), Specials::Parse);
            let format = ChatTemplate::compile(metadata())
                .expect("encoder")
                .answer_format(&required, t)
                .expect("schemas")
                .expect("v4");
            let mut reader = format.reader(Vec::new());
            let mut said = t.encode(thought, Specials::Parse);
            said.iter().for_each(|token| drop(reader.push(*token, t.token_bytes(*token), t.is_control(*token))));
            let begin = t.encode("\n\n<｜DSML｜tool_calls>\n", Specials::Parse);
            for token in begin.iter().chain(&spelled) {
                match reader.steer() {
                    Steer::Force(forced) => assert_eq!(forced, *token, "{name}"),
                    Steer::OneOf(tokens) => {
                        assert!(tokens.contains(token), "{name}: {tokens:?}");
                        said.push(*token);
                    }
                    other => panic!("{name}: {other:?}"),
                }
                reader.push(*token, t.token_bytes(*token), t.is_control(*token));
            }
            assert_eq!(reader.steer(), Steer::Greedy, "{name}: then its arguments");
            let heard = play_tokens(&required, &[], [said, closers.clone()].concat(), false);
            assert_eq!(heard.calls, [(name.to_owned(), json!({}))]);
            assert!(!heard.chosen.is_empty() && heard.ended, "{name}");
        }
        // It would rather call something else, in bytes that are no text.
        for seed in 0..50u64 {
            let mut rng = crate::test_support::Rng::new(seed);
            let mut said = t.encode(thought, Specials::Parse);
            said.extend((0..40).map(|_| u32::try_from(rng.below(t.vocab_size())).expect("id")).filter(|t| *t > 1));
            let heard = play_tokens(&required, &[], said, true);
            assert!(!heard.chosen.is_empty());
            assert!(heard.begun + heard.calls.len() > 0, "{seed}");
            assert!(names.contains(&heard.called[0].as_str()), "{seed}: {:?}", heard.called);
        }
    }
}

#[test]
fn deepseek_v4_unfinished_characters_belong_to_the_tokens_that_began_them() {
    let t = tokenizer();
    let byte = |b: u8| {
        let id = |id: &u32| t.token_bytes(*id) == [b] && !t.is_control(*id);
        (0..u32::try_from(t.vocab_size()).expect("ids")).find(id).expect("a token for each byte")
    };
    let bytes = |all: &[u8]| -> Vec<u32> { all.iter().map(|b| byte(*b)).collect() };
    let of = |text: &str| t.encode(text, Specials::Parse);
    let tools = input(Thinking::High, Some(weather()));
    let plain = input(Thinking::High, None);
    for part in [&b"\xe6"[..], b"\xe6\xbc", b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe6\xe6", b"\xc3"] {
        let shown = String::from_utf8_lossy(part).into_owned();
        // Before the end of the reasoning, before a call, before a marker that is no tag, in text, and in the end.
        let said = [of("Hm "), bytes(part), of("</think>"), of("Yes "), bytes(part), of(CALL)].concat();
        let heard = play_tokens(&tools, &[], said, false);
        assert_eq!((heard.reasoning, heard.text), (format!("Hm {shown}"), format!("Yes {shown}")), "{part:?}");
        assert_eq!(heard.parts[1], [b"Hm ", part].concat(), "{part:?}");
        assert_eq!(heard.parts[0], [b"Yes ", part].concat(), "{part:?}");
        assert!(heard.parts[2].starts_with(b"</think>"), "{part:?}");
        assert_eq!(heard.calls.len(), 1);
        let said = [of("</think>One "), bytes(part), of("｜DSML｜, two "), bytes(part)].concat();
        let heard = play_tokens(&plain, &[], said, false);
        assert_eq!(heard.text, format!("One {shown}, two {shown}"), "{part:?}");
        assert_eq!(heard.parts[0], [b"One ", part, b", two ", part].concat(), "{part:?}");
        assert_eq!(heard.part(2), "</think>｜DSML｜");
        // A second end of the reasoning is a slip once something was said, be it unfinished.
        let said = [of("</think>"), bytes(part), of("</think>Yes "), bytes(part), of("<think>")].concat();
        let heard = play_tokens(&plain, &[], said, false);
        assert_eq!((heard.text.clone(), heard.reasoning.as_str()), (format!("{shown}Yes {shown}"), ""), "{part:?}");
        assert_eq!(
            (&heard.parts[0], heard.part(2).as_str()),
            (&[part, b"Yes ", part].concat(), "</think></think><think>")
        );
        let heard = play_tokens(&plain, &[], [of("Hm "), bytes(part)].concat(), true);
        assert_eq!((heard.reasoning, &heard.parts[1]), (format!("Hm {shown}"), &[b"Hm ", part].concat()));
    }
    // One that is finished, in as many tokens as it has bytes.
    for whole in ["漢", "😀", "é"] {
        let said = [bytes(whole.as_bytes()), of("</think>"), bytes(whole.as_bytes()), of(CALL)].concat();
        let heard = play_tokens(&tools, &[], said, false);
        assert_eq!((heard.part(1).as_str(), heard.part(0).as_str(), heard.calls.len()), (whole, whole, 1));
    }
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
    // White space beside one is shown when text follows, and has its tokens then.
    for (said, shown) in [
        ("One\n｜DSML｜, two", "One\n, two"),
        ("One\n</｜DSML｜tool_calls> two", "One\n two"),
        ("\n｜DSML｜, two", "\n, two"),
    ] {
        let heard = play(&input(Thinking::None, Some(weather())), &[], said, false);
        assert_eq!((heard.text.as_str(), heard.part(0).as_str()), (shown, shown), "{said}");
    }
    // The tag's last letter and the line break are one token, which shows markup.
    let tail = play(&input(Thinking::None, Some(weather())), &[], "One\n</｜DSML｜tool_calls>\ntwo", false);
    assert_eq!((tail.text.as_str(), tail.part(0).as_str()), ("One\n\ntwo", "One\ntwo"));
    let heard = play(&input(Thinking::None, Some(weather())), &[], &format!("One \n｜DSML｜{CALL}"), false);
    assert_eq!((heard.text.as_str(), heard.part(0).as_str(), heard.calls.len()), ("One", "One", 1));
    // Spelt as text they are text.
    let t = tokenizer();
    let mut reader = ChatTemplate::compile(metadata())
        .expect("encoder")
        .answer_format(&plain, t)
        .expect("schemas")
        .expect("v4")
        .reader(vec![]);
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

#[test]
fn deepseek_v4_the_text_of_a_tag_is_a_value_where_a_grammar_holds_the_call() {
    let t = tokenizer();
    let marker = t.token_id(DSML).expect("a token");
    // What text a value has is in plain tokens, as the grammar has it.
    let tokens = |parts: &[(&str, bool)]| -> Vec<u32> {
        let of = |(text, parse): &(&str, bool)| t.encode(text, if *parse { Specials::Parse } else { Specials::Plain });
        parts.iter().flat_map(of).collect()
    };
    let open = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n";
    let close = "</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let parameter = |string: bool| format!("<｜DSML｜parameter name=\"p\" string=\"{string}\">");
    let schema = |of_p: &Value| {
        json!([{"type": "function", "function": {"name": "weather", "strict": true, "parameters": {"type": "object",
            "properties": {"p": of_p}, "required": ["p"], "additionalProperties": false}}}])
    };
    for tag in [
        "</｜DSML｜parameter>",
        "a</｜DSML｜parameter>\n",
        "x</｜DSML｜invoke>",
        "</|DSML|parameter>",
        "</parameter></invoke></tool_calls>",
        "<｜DSML｜parameter name=\"q\" string=\"true\">",
        "<｜DSML｜invoke name=\"weather\">",
        "</｜DSML｜tool_calls>",
        "｜DSML｜",
        "<</",
        " </ ",
    ] {
        let json = Value::from(tag).to_string();
        let object = json!({"x": tag}).to_string();
        for (of_p, string, value, text) in [
            (json!({"const": tag}), true, json!(tag), tag),
            (json!({"enum": ["other", tag]}), true, json!(tag), tag),
            (json!({"type": "string"}), true, json!(tag), tag),
            (json!({"type": "string", "maxLength": 99}), false, json!(tag), &json),
            (
                json!({"type": "object", "properties": {"x": {"const": tag}}, "required": ["x"]}),
                false,
                json!({"x": tag}),
                &object,
            ),
            (json!({"type": "object"}), false, json!({"x": tag}), &object),
        ] {
            let said = tokens(&[
                (open, true),
                (&parameter(string), true),
                (text, false),
                ("</｜DSML｜parameter>\n", true),
                (close, true),
            ]);
            assert_eq!(said.iter().filter(|t| **t == marker).count(), 6, "the value has none: {text}");
            let mut format = held_format(&schema(&of_p));
            let held = format.constraint().expect("it is strict");
            for token in &said {
                assert_eq!(held.permits(*token), Ok(true), "{text}: {of_p}");
                held.take(*token);
            }
            let heard = play_tokens(&input(Thinking::None, Some(schema(&of_p))), &[], said, false);
            assert_eq!(heard.calls, [("weather".to_owned(), json!({"p": value}))], "{text}: {of_p}");
        }
    }
    // Cut in a value that looks like its end, it is none.
    let cut = tokens(&[(open, true), (&parameter(true), true), ("a</｜DSML｜parameter>\n</｜DSML｜invoke>", false)]);
    let heard = play_tokens(&input(Thinking::None, Some(schema(&json!({"type": "string"})))), &[], cut, true);
    assert_eq!((heard.calls.len(), heard.begun), (0, 1));
}

#[test]
fn deepseek_v4_the_text_of_a_tag_is_text_where_a_grammar_holds_the_answer() {
    let t = tokenizer();
    let strict = json!([{"type": "function", "function": {"name": "weather", "strict": true, "parameters": {"type": "object"}}}]);
    for tag in [
        "<｜DSML｜tool_calls>",
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "<invoke name=\"weather\"></invoke>",
        "</｜DSML｜invoke",
        "<｜DSML｜inv",
        "<",
        "</",
    ] {
        let said = Value::from(tag).to_string();
        let of_schema = ChatInput { response_format: Some(json!({"const": tag})), ..input(Thinking::None, None) };
        let heard = play_tokens(&of_schema, &[], t.encode(&said, Specials::Plain), false);
        assert_eq!((heard.text.as_str(), heard.calls.len()), (said.as_str(), 0));
        let with_tools = input(Thinking::None, Some(strict.clone()));
        let said = format!("Look: {tag}");
        let heard = play_tokens(&with_tools, &[], t.encode(&said, Specials::Plain), false);
        assert_eq!((heard.text.as_str(), heard.calls.len()), (said.as_str(), 0));
    }
    let call =
        format!("Look.\n\n<{DSML}tool_calls>\n<{DSML}invoke name=\"weather\">\n\n</{DSML}invoke>\n</{DSML}tool_calls>");
    let heard = play(&input(Thinking::None, Some(strict)), &[], &call, false);
    assert_eq!((heard.text.as_str(), heard.calls), ("Look.", vec![("weather".to_owned(), json!({}))]));
}

fn held_format(tools: &Value) -> Box<dyn Reader> {
    let template = ChatTemplate::compile(metadata()).expect("encoder");
    let input = input(Thinking::None, Some(tools.clone()));
    let format = template.answer_format(&input, tokenizer()).expect("schemas").expect("a format of its own");
    format.reader(Vec::new())
}
