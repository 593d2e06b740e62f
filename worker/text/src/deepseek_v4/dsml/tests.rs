//! Single cases of the parser and the serializer.

use super::*;

/// An answer parsed whole: reasoning, content, calls, and whether it was stopped or cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Parsed {
    pub(super) reasoning: String,
    pub(super) content: String,
    pub(super) calls: Vec<ToolCall>,
    pub(super) stopped: bool,
    pub(super) cut: bool,
}

pub(super) fn options(thinking: bool) -> Options {
    Options { thinking, tools: ["f", "list_files"].map(String::from).to_vec(), ..Options::default() }
}

/// Parses `text` given in pieces of `size` characters (0: whole).
pub(super) fn parse_in(options: &Options, text: &str, size: usize, end: End) -> Parsed {
    let mut parser = Parser::new(Options { live: true, ..options.clone() });
    let mut out = Parsed::default();
    // The call that is being told.
    let mut live: Option<(String, String)> = None;
    let mut take = |events: Vec<Event>| {
        for event in events {
            match event {
                Event::Reasoning(t) => out.reasoning += &t,
                Event::Content(t) => out.content += &t,
                Event::Begin(name) => {
                    assert_eq!(live.replace((name, String::new())), None, "one call at a time: {text}")
                }
                Event::Arguments(t) => live.as_mut().expect("a call").1 += &t,
                Event::Call(c) => {
                    let (name, told) = live.take().expect("told before");
                    let told: serde_json::Value = serde_json::from_str(&told).unwrap_or_else(|e| panic!("{e}: {told}"));
                    let whole: serde_json::Value = serde_json::from_str(&c.arguments).expect("JSON");
                    assert_eq!((name.as_str(), told), (c.name.as_str(), whole), "{text}");
                    out.calls.push(c);
                }
                Event::Stop => out.stopped = true,
            }
        }
    };
    let chars: Vec<char> = text.chars().collect();
    for piece in chars.chunks(if size == 0 { usize::MAX } else { size }) {
        take(parser.push(&piece.iter().collect::<String>()));
    }
    take(parser.finish(end));
    out.cut = parser.cut();
    assert!(live.is_none() || out.cut, "a call was told of that is none: {text}");
    assert_eq!(parser.calls(), out.calls.len());
    out
}

/// As [`parse_in`], in pieces of several sizes that must agree.
pub(super) fn parse(options: &Options, text: &str, end: End) -> Parsed {
    let whole = parse_in(options, text, 0, end);
    for size in [1, 2, 7] {
        assert_eq!(parse_in(options, text, size, end), whole, "in pieces of {size}: {text}");
    }
    whole
}

pub(super) fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall { name: name.into(), arguments: arguments.into() }
}

const CALL: &str = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

#[test]
fn deepseek_v4_dsml_what_is_written_is_read() {
    let calls = vec![
        call("list_files", "{\"path\":\"/tmp\",\"limit\":5,\"deep\":{\"a\":[1,null,\"ü\"]}}"),
        call("f", "{}"),
        call("f", "{\"code\":\"if a < b && c {\\n  \\\"x\\\"\\n}\\n\",\"on\":true,\"n\":null,\"empty\":\"\"}"),
    ];
    let text = format!("Let me see.\n\n{}", serialize(&calls));
    let parsed = parse(&options(false), &text, End::Stop);
    assert_eq!((parsed.content.as_str(), parsed.calls), ("Let me see.", calls));
    assert_eq!(
        serialize(&[call("f", "{}")]),
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    );
    assert!(serialize(&[call("f", "not json")]).contains("name=\"arguments\" string=\"true\">not json</"));
}

#[test]
fn deepseek_v4_dsml_reasoning_content_and_calls() {
    let parsed = parse(&options(true), &format!("Hm </thin> < b.</think>Text.\n\n{CALL}"), End::Stop);
    assert_eq!((parsed.reasoning.as_str(), parsed.content.as_str()), ("Hm </thin> < b.", "Text."));
    assert_eq!(parsed.calls, [call("f", "{\"a\":\"1\"}")]);
    // A repeated opener, an unfinished thought, a needless closer.
    assert_eq!(parse(&options(true), "<think>a</think>b", End::Stop).reasoning, "a");
    assert_eq!(parse(&options(true), "a</thi", End::Length).reasoning, "a</thi");
    assert_eq!(parse(&options(false), "</think>b", End::Stop).content, "b");
    assert_eq!(parse(&options(false), "<think>a</think>b", End::Stop).reasoning, "a");
    let plain = parse(&options(false), "a < b\n\n`x` <b>c</b>  \n", End::Stop);
    assert_eq!(plain.content, "a < b\n\n`x` <b>c</b>  \n", "nothing is lost from text");
}

#[test]
fn t1_opening_tag_frayed_toolcalls() {
    let text = CALL.replacen("tool_calls", "toolcalls", 1);
    for text in [text.clone(), format!("Sure.\n\n{text}"), text.replace("</｜DSML｜tool_calls>", "")] {
        let parsed = parse(&options(false), &text, End::Stop);
        assert_eq!(parsed.calls, [call("f", "{\"a\":\"1\"}")], "{text}");
        assert!(!parsed.content.contains('<'), "{text}");
    }
}

#[test]
fn t3_dsml_quoted_stays_text() {
    let quoted = [
        format!("Write it like this:\n```\n{CALL}\n```\nand no other way."),
        format!("Write it like this:\n\n````xml\n```\n{CALL}\n````"),
        "The tag `<｜DSML｜tool_calls>` opens a block, `</｜DSML｜invoke>` closes one.".to_owned(),
        "You wrote <｜DSML｜tool_calls> in your question, which is a tag.".to_owned(),
        "Say ``<｜DSML｜invoke name=\"f\">`` and wait.".to_owned(),
        "｜DSML｜ is one token.".to_owned(),
        "<tool_calls> and <invoke name=\"g\"> are XML.".to_owned(),
        "<parameter name=\"a\">1</parameter>".to_owned(),
    ];
    for text in quoted {
        let parsed = parse(&options(false), &text, End::Stop);
        assert_eq!((parsed.content.as_str(), parsed.calls.len()), (text.as_str(), 0), "an echo");
        let parsed = parse(&options(true), &format!("{text}</think>ok"), End::Stop);
        assert_eq!((parsed.reasoning.as_str(), parsed.content.as_str()), (text.as_str(), "ok"), "in reasoning");
    }
    let parsed = parse(&options(true), CALL, End::Stop);
    assert_eq!((parsed.reasoning.as_str(), parsed.calls.len()), (CALL, 0), "reasoning that never ended");
}

#[test]
fn t3_echo_of_what_the_user_wrote_is_no_call() {
    let two = CALL.replace("</｜DSML｜tool_calls>", "<｜DSML｜invoke name=\"f\"/>\n</｜DSML｜tool_calls>");
    let bare = "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\">x";
    for quoted in [CALL, &two, bare] {
        let options =
            Options { quoted: vec!["hi".into(), format!("Repeat this:\n{quoted}\nand stop")], ..options(false) };
        let text = format!("You wrote\n\n{quoted}");
        let parsed = parse(&options, &text, End::Stop);
        assert_eq!((parsed.content.as_str(), parsed.calls.len()), (text.as_str(), 0));
        // Another call is a call, in the same answer too.
        let other = CALL.replace(">1<", ">2<");
        let parsed = parse(&options, &format!("Well.\n\n{other}"), End::Stop);
        assert_eq!((parsed.content.as_str(), parsed.calls), ("Well.", vec![call("f", "{\"a\":\"2\"}")]));
        if quoted != bare {
            let parsed = parse(&options, &format!("{text}\nand so\n\n{other}"), End::Stop);
            assert_eq!(parsed.calls, [call("f", "{\"a\":\"2\"}")]);
            assert!(parsed.content.starts_with(&text) && parsed.content.ends_with("and so"), "{}", parsed.content);
        }
    }
}

#[test]
fn deepseek_v4_dsml_calls_are_told_while_they_are_read() {
    let mut parser = Parser::new(Options { live: true, ..options(false) });
    let mut told = Vec::new();
    for text in [
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\"",
        ">\n",
        "<｜DSML｜parameter name=\"a\" string=\"true\">say \"h",
        "i\"  ",
        "\n x",
        " </p",
        "> </｜DSML｜parameter>",
        "\n<｜DSML｜parameter name=\"b\" string=\"false\">[1, ",
        "2]</｜DSML｜parameter>",
        "\n</｜DSML｜invoke>",
    ] {
        let events = parser.push(text).into_iter().map(|e| match e {
            Event::Begin(name) => format!("begin {name}"),
            Event::Arguments(text) => text,
            Event::Call(c) => c.arguments,
            other => panic!("{other:?}"),
        });
        told.push(events.collect::<Vec<String>>());
    }
    let told: Vec<Vec<&str>> = told.iter().map(|t| t.iter().map(String::as_str).collect()).collect();
    assert_eq!(
        told,
        [
            vec![],
            vec!["begin f"],
            vec!["{\"a\":\"say \\\"h"],
            vec!["i\\\""],
            vec!["  \\n x"],
            vec![],
            vec![" </p> \""],
            vec![],
            vec![",\"b\":[1,2]"],
            vec!["}", "{\"a\":\"say \\\"hi\\\"  \\n x </p> \",\"b\":[1,2]}"],
        ]
    );
    // What someone else said is not begun before it differs.
    let quoted = vec![CALL.to_owned()];
    let mut parser = Parser::new(Options { live: true, quoted, ..options(false) });
    let (same, other) = CALL.split_at(CALL.find(">1<").expect("value") + 1);
    assert_eq!(parser.push(same), []);
    let begun = parser.push(&other.replacen('1', "2", 1));
    assert_eq!(begun[0], Event::Begin("f".into()), "{begun:?}");
}

#[test]
fn t7_tool_tags_without_tools_end_the_answer() {
    let none = Options::default();
    for text in [
        format!("Done.\n\n{CALL}"),
        format!("Done.\n{}", CALL.replace("｜DSML｜", "")),
        "Done.\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter".to_owned(),
        "Done.\n\n<｜DSML｜tool_calls>\nand more".to_owned(),
        "Done.\n\n<｜DSML｜tool_calls".to_owned(),
        "Done.\n\n<｜DS".to_owned(),
        "Done.</｜DSML｜tool_calls>".to_owned(),
    ] {
        let parsed = parse(&none, &text, End::Stop);
        assert_eq!((parsed.content.trim_end(), parsed.calls.len()), ("Done.", 0), "{text}");
        let whole = text.contains('\u{3e}');
        assert_eq!(parsed.stopped, whole, "{text}");
    }
    let mut parser = Parser::new(none);
    assert_eq!(
        parser.push("Done.\n\n<｜DSML｜tool_"),
        [Event::Content("Done.".into())],
        "the partial tag is held back"
    );
    assert_eq!(parser.push("calls>\n<｜DSML｜invoke name="), []);
    assert_eq!(parser.push("\"f\">"), [Event::Stop]);
    assert_eq!(parser.push("anything"), []);
}

#[test]
fn deepseek_v4_dsml_an_answer_cut_in_a_call_calls_nothing() {
    for cut in 1..CALL.chars().count() {
        let text: String = CALL.chars().take(cut).collect();
        let parsed = parse(&options(false), &format!("Go.\n\n{text}"), End::Length);
        assert_eq!(parsed.content.trim_end(), if cut == 1 { "Go.\n\n<" } else { "Go." }, "cut at {cut}");
        let done = text.contains("</｜DSML｜invoke>");
        assert_eq!(parsed.calls.len(), usize::from(done), "cut at {cut}");
        let begun = text.contains("<｜DSML｜invoke name=\"f\">");
        assert!(!begun || parsed.cut || done, "cut at {cut}");
    }
}

#[test]
fn deepseek_v4_dsml_values_may_contain_tags() {
    let html = "<p class=\"x\">a</p>\n</parameter>\n<invoke name=\"f\">\n</tool_calls> <parameter name=\"q\">";
    let arguments = serde_json::json!({ "html": html, "b": 2 }).to_string();
    let text = serialize(&[call("f", &arguments)]);
    let parsed = parse(&options(false), &text, End::Stop);
    assert_eq!(parsed.calls, [call("f", &arguments)]);
}

#[test]
fn deepseek_v4_dsml_entities_are_decoded_on_demand() {
    let text = CALL.replace(">1<", ">a &amp;&amp; b<");
    assert_eq!(parse(&options(false), &text, End::Stop).calls, [call("f", "{\"a\":\"a &amp;&amp; b\"}")]);
    let decode = Options { decode_entities: true, ..options(false) };
    assert_eq!(parse(&decode, &text, End::Stop).calls, [call("f", "{\"a\":\"a && b\"}")]);
}

/// Where the sampler is greedy: tags, names and JSON outside its strings, and nowhere else.
#[test]
fn deepseek_v4_dsml_syntax_positions() {
    use Position::{Free, Payload, Structure};
    let mut parser = Parser::new(options(true));
    for (text, position) in [
        ("thinking <｜DSML｜tool_calls>", Free),
        ("</think>", Free),
        ("Hello <", Free),
        ("b>", Free),
        ("\n\n<", Free),
        ("｜DSML｜", Structure),
        ("tool_calls", Structure),
        (">\n", Structure),
        ("<", Structure),
        ("｜DSML｜invoke name=\"f", Structure),
        ("\">\n", Structure),
        ("<｜DSML｜parameter name=\"a\" string=\"true\"", Structure),
        (">", Payload),
        ("some text", Payload),
        (" <", Payload),
        ("b> ", Payload),
        ("</", Structure),
        ("｜DSML｜parameter", Structure),
        (">\n", Structure),
        ("<｜DSML｜parameter name=\"b\" string=\"false\">", Structure),
        ("[", Structure),
        ("\"", Payload),
        ("x\\\"y", Payload),
        ("\"", Structure),
        (", 5]", Structure),
        ("</｜DSML｜parameter>\n</｜DSML｜invoke>\n", Structure),
        ("</｜DSML｜tool_calls>", Free),
    ] {
        parser.push(text);
        assert_eq!(parser.position(), position, "after {text:?}");
    }
    let mut none = Parser::new(Options::default());
    none.push("\n<｜DSML｜tool");
    assert_eq!(none.position(), Free, "no tools, nothing to be greedy for");
}

/// Tags, halves of tags and text in any order: what comes out does not depend on how the text was cut, text without any tag is
/// left as it is, and arguments are always an object.
#[test]
fn deepseek_v4_dsml_random_mixtures_do_not_depend_on_chunks() {
    const SNIPPETS: &[&str] = &[
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        "<｜DSML｜invoke name=\"f\">",
        "</｜DSML｜invoke>",
        "<｜DSML｜parameter name=\"a\" string=\"true\">",
        "<｜DSML｜parameter name=\"b\" string=\"false\">",
        "</｜DSML｜parameter>",
        "<tool_calls>",
        "<invoke name=\"f\">",
        "<parameter name=\"c\">",
        "</parameter>",
        "</invoke>",
        "</tool_calls>",
        "<｜DSML｜",
        "</",
        "<",
        "｜DSML｜",
        ">",
        "/>",
        "\"",
        "name=",
        "<｜DSML｜function_calls",
        "<think>",
        "</think>",
        "\n",
        "\n\n",
        " ",
        "text",
        "`",
        "```\n",
        "```",
        "{\"a\": 1}",
        "5",
        "a < b",
        "é漢",
        "<b>",
        "~~~\n",
        "&lt;",
    ];
    let mut rng = crate::test_support::Rng::new(5);
    let mut called = 0;
    for round in 0..20_000 {
        let text: String = (0..=rng.below(14)).map(|_| SNIPPETS[rng.below(SNIPPETS.len())]).collect();
        let end = if rng.below(2) == 0 { End::Stop } else { End::Length };
        let options = if round % 5 == 0 { Options::default() } else { options(round % 2 == 0) };
        let parsed = parse(&options, &text, end);
        for c in &parsed.calls {
            assert!(serde_json::from_str::<serde_json::Value>(&c.arguments).is_ok_and(|v| v.is_object()), "{text}");
        }
        called += parsed.calls.len();
        if !text.contains(['<', '｜']) && !options.thinking {
            assert_eq!(parsed.content, text);
        }
    }
    assert!(called > 1000, "{called} calls");
}

#[test]
fn deepseek_v4_dsml_long_values_are_linear() {
    for unit in ["a", "<", "</", "</parameter>", "<｜", "&lt;", "`", "\n<b>x</b>", "</｜DSML"] {
        let value = unit.repeat(1_000_000 / unit.len());
        let text = CALL.replace(">1<", &format!(">{value}x<"));
        for text in [&text, &value] {
            let start = std::time::Instant::now();
            let mut parser = Parser::new(Options { live: true, ..options(false) });
            let mut at = 0;
            while at < text.len() {
                let mut to = (at + 4096).min(text.len());
                while !text.is_char_boundary(to) {
                    to += 1;
                }
                parser.push(&text[at..to]);
                at = to;
            }
            parser.finish(End::Stop);
            // Tens of milliseconds; a quadratic parser would take minutes.
            assert!(start.elapsed().as_secs() < 5, "{unit:?} took {:?}", start.elapsed());
        }
    }
}
