//! A grammar of frayed answers: every combination of how the parts of one call are written. Each must give the call that was
//! meant, or stay text as it is; none may show markup in any other way.

use super::tests::{Parsed, call, options, parse};
use super::*;
use crate::test_support::Rng;

/// How a block may be opened and closed.
const BLOCKS: &[(&str, &str)] = &[
    ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ("<｜DSML｜toolcalls>", "</｜DSML｜toolcalls>"),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ("<DSML｜tool_calls>", "</DSML｜tool_calls>"),
    ("<|DSML|tool_calls>", "</|DSML|tool_calls>"),
    ("<tool_calls>", "</tool_calls>"),
    ("<function_calls>", "</function_calls>"),
    ("<｜DSML｜tool_call>", "</｜DSML｜tool_calls>"),
    ("<｜DSML｜ tool_calls >", "</ ｜DSML｜tool_calls >"),
    ("<dsml:tool_calls>", "</dsml:tool_calls>"),
    ("｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ("<｜DSML｜tool_calls\n", "</｜DSML｜tool_calls"),
    ("<｜DSML｜tool_calls>", "</｜DSML｜tool_cals>"),
    ("<｜DSML｜tool_calls>", ""),
    ("", "</｜DSML｜tool_calls>"),
    ("", ""),
];

/// How a call may be opened and closed.
const INVOKES: &[(&str, &str)] = &[
    ("<｜DSML｜invoke name=\"f\">", "</｜DSML｜invoke>"),
    ("<｜DSML｜invoke name='f'>", "</｜DSML｜invoke>"),
    ("<｜DSML｜invoke name=f>", "</｜DSML｜invoke>"),
    ("<｜DSML｜invoke  name = \"f\" >", "</｜DSML｜invoke >"),
    ("<｜DSML｜invoke name=&quot;f&quot;>", "</｜DSML｜invoke>"),
    ("<｜DSML｜invoke name=\"f>", "</｜DSML｜invoke>"),
    ("<｜DSML｜invoke id=\"1\" name=\"f\">", "</｜DSML｜/invoke>"),
    ("<｜DSML｜Invoke name=\"f\">", "</｜DSML｜Invoke>"),
    ("<DSML｜invoke name=\"f\">", "</DSML｜invoke>"),
    ("<invoke name=\"f\">", "</invoke>"),
    ("<｜DSML｜invok name=\"f\">", "</｜DSML｜invok>"),
    ("<｜DSML｜invoke name=\"f\">", "<｜DSML｜/invoke>"),
    ("<｜DSML｜invoke name=\"f\">", ""),
];

/// How a parameter may be opened and closed; `@k` is its name, `@s` its kind.
const PARAMETERS: &[(&str, &str)] = &[
    ("<｜DSML｜parameter name=\"@k\" string=\"@s\">", "</｜DSML｜parameter>"),
    ("<｜DSML｜parameter string=\"@s\" name=\"@k\">", "</｜DSML｜parameter>"),
    ("<｜DSML｜parameter name='@k' string=@s>", "</｜DSML｜parameter>"),
    ("<｜DSML｜parameter  name = \"@k\"  string = \"@s\" >", "</｜DSML｜parameter >"),
    ("<｜DSML｜param name=\"@k\" string=\"@s\">", "</｜DSML｜param>"),
    ("<｜DSML｜paramter name=\"@k\" string=\"@s\">", "</｜DSML｜paramter>"),
    ("<DSML｜parameter name=\"@k\" string=\"@s\">", "</DSML｜parameter>"),
    ("<parameter name=\"@k\" string=\"@s\">", "</parameter>"),
    ("<｜DSML｜parameter name=\"@k\" string=\"@s\">", "</｜DSML｜paramet>"),
    ("<｜DSML｜parameter name=\"@k\" string=\"@s\">", "</｜DSML｜>"),
    ("<｜DSML｜parameter name=\"@k\" string=\"@s\">", "</parameter>"),
    ("<｜DSML｜parameter name=\"@k\" string=\"@s\">", "<｜DSML｜/parameter>"),
    ("<｜DSML｜parameter name=\"@k\" string=\"@s\">", ""),
];

/// What is between tags.
const GAPS: &[&str] = &["\n", "", "\n\n  ", " \t\r\n"];

/// Values: the text, whether it is a string, and its JSON.
const VALUES: &[(&str, bool, &str)] = &[
    ("/tmp/a b", true, "\"/tmp/a b\""),
    ("5", false, "5"),
    ("a < b && c > d \"q\"", true, "\"a < b && c > d \\\"q\\\"\""),
    ("[1, {\"x\": null}]", false, "[1,{\"x\":null}]"),
    ("True", false, "true"),
];

struct Shape {
    text: String,
    arguments: String,
}

/// One answer with one call of these forms.
fn shape(block: usize, invoke: usize, parameter: usize, gap: usize, values: &[usize]) -> Shape {
    let (open, close) = BLOCKS[block];
    let (begin, end) = INVOKES[invoke];
    let gap = GAPS[gap];
    let mut text = format!("{open}{gap}{begin}");
    let mut members = Vec::new();
    for (i, value) in values.iter().enumerate() {
        let (before, after) = PARAMETERS[parameter];
        let (value, string, json) = VALUES[*value];
        let before = before.replace("@k", &format!("k{i}")).replace("@s", if string { "true" } else { "false" });
        text += &format!("{gap}{before}{value}{after}");
        members.push(format!("\"k{i}\":{json}"));
    }
    text += &format!("{gap}{end}{gap}{close}");
    Shape { text, arguments: format!("{{{}}}", members.join(",")) }
}

/// What became of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Right,
    /// All of it was shown as the text that it is.
    Text,
    /// A call was begun, and the parser says that it was not finished.
    Cut,
}

/// Every shape gives the right call and a text before it that is what the model said, or stays text.
fn check(shape: &Shape, prefix: &str, thinking: bool) -> Outcome {
    let answer = format!("{prefix}{}", shape.text);
    let text = format!("{}{answer}", if thinking { "I call.</think>" } else { "" });
    let parsed = parse(&options(thinking), &text, End::Stop);
    assert_eq!(parsed.reasoning, if thinking { "I call." } else { "" });
    let (said, shown) = (prefix.trim_end(), parsed.content.trim_end());
    let outcome = if parsed.calls == [call("f", &shape.arguments)] && shown == said {
        Outcome::Right
    } else if parsed.calls.is_empty() && shown == answer.trim_end() {
        Outcome::Text
    } else {
        assert!(
            parsed.cut && parsed.calls.is_empty() && shown == said,
            "{text}\n gave {parsed:?}\n not {}",
            shape.arguments
        );
        Outcome::Cut
    };
    // Quoted, it is what it is.
    let quoted = format!("See:\n```\n{}\n```", shape.text);
    let echo = parse(&options(false), &quoted, End::Stop);
    assert_eq!((echo.content.as_str(), echo.calls.len()), (quoted.as_str(), 0));
    // In reasoning, too.
    let thought = parse(&options(true), &format!("{}</think>Yes.", shape.text), End::Stop);
    let expected = Parsed { reasoning: shape.text.clone(), content: "Yes.".into(), ..Parsed::default() };
    assert_eq!(thought, expected);
    // Without tools nothing of it is seen, however the answer goes on.
    let none = parse(&Options::default(), &format!("Done.\n\n{} more", shape.text), End::Stop);
    assert!(none.calls.is_empty());
    if shape.text.trim() != "<invoke name=\"f\">" {
        assert_eq!(none.content.trim_end(), "Done.", "{}", shape.text);
    }
    outcome
}

#[test]
fn t2_every_shape_of_one_call() {
    let mut outcomes = Vec::new();
    let mut rng = Rng::new(2);
    for block in 0..BLOCKS.len() {
        for invoke in 0..INVOKES.len() {
            for parameter in 0..PARAMETERS.len() {
                let gap = rng.below(GAPS.len());
                let values: Vec<usize> = (0..rng.below(4)).map(|_| rng.below(VALUES.len())).collect();
                let shape = shape(block, invoke, parameter, gap, &values);
                let prefix = ["", "I look.\n\n", "I look. ", "`x` and\n"][rng.below(4)];
                outcomes.push(check(&shape, prefix, rng.below(2) == 0));
            }
        }
    }
    assert_eq!(outcomes.len(), 16 * 13 * 13);
    let count = |o| outcomes.iter().filter(|x| **x == o).count();
    println!("{} right, {} text, {} cut", count(Outcome::Right), count(Outcome::Text), count(Outcome::Cut));
    // A lone opener in a sentence, with nothing after it, is no call.
    assert!(count(Outcome::Right) * 100 >= outcomes.len() * 98, "{} right", count(Outcome::Right));
}

/// Cut anywhere by the budget: no call but a complete one, and no markup.
#[test]
fn t2_every_shape_cut_anywhere() {
    let mut rng = Rng::new(3);
    for _ in 0..1500 {
        let shape = shape(
            rng.below(BLOCKS.len()),
            rng.below(INVOKES.len()),
            rng.below(PARAMETERS.len()),
            rng.below(GAPS.len()),
            &[0, 1],
        );
        let chars: Vec<char> = shape.text.chars().collect();
        let text: String = chars[..rng.below(chars.len())].iter().collect();
        let parsed = parse(&options(false), &format!("I look.\n\n{text}"), End::Length);
        assert!(parsed.calls.is_empty() || parsed.calls == [call("f", &shape.arguments)], "{text}\n gave {parsed:?}");
        // The first letters of a tag, or a plain-XML one that was cut, cannot be told from text.
        let begun = text.trim_start();
        let plain = ["<", "｜", "<D", "<DS", "<d", "<ds"].contains(&begun)
            || ["<t", "<f", "<i"].iter().any(|p| begun.starts_with(p));
        assert!(plain || parsed.content.trim_end() == "I look.", "{text:?}\n gave {parsed:?}");
    }
}

#[test]
fn t2_other_shapes() {
    let f = |arguments: &str| vec![call("f", arguments)];
    let mut seen = 0;
    for (text, calls) in [
        ("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\"/>\n</｜DSML｜tool_calls>", f("{}")),
        ("<｜DSML｜invoke name=\"f\" />", f("{}")),
        (
            "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"false\" value=\"5\"/>\n</｜DSML｜invoke>",
            f("{\"a\":5}"),
        ),
        (
            "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\"/>\n</｜DSML｜invoke>",
            f("{\"a\":\"\"}"),
        ),
        ("<｜DSML｜invoke name=\"f\">{\"a\": [1, \"<b>\"]}</｜DSML｜invoke>", f("{\"a\":[1,\"<b>\"]}")),
        (
            "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"o\"><｜DSML｜parameter name=\"x\" string=\"false\">1</｜DSML｜parameter><｜DSML｜parameter name=\"y\">s</｜DSML｜parameter></｜DSML｜parameter></｜DSML｜invoke>",
            f("{\"o\":{\"x\":1,\"y\":\"s\"}}"),
        ),
        (
            "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\">no kind</｜DSML｜parameter></｜DSML｜invoke>",
            f("{\"a\":\"no kind\"}"),
        ),
        (
            "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"false\">not json</｜DSML｜parameter></｜DSML｜invoke>",
            f("{\"a\":\"not json\"}"),
        ),
        (
            "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"false\"></｜DSML｜parameter></｜DSML｜invoke>",
            f("{\"a\":null}"),
        ),
        (
            "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"false\">{&quot;b&quot;: 1}</｜DSML｜parameter></｜DSML｜invoke>",
            f("{\"a\":{\"b\":1}}"),
        ),
        (
            "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">1</｜DSML｜parameter>\n<｜DSML｜parameter name=\"a\" string=\"true\">2</｜DSML｜parameter></｜DSML｜invoke>",
            f("{\"a\":\"2\"}"),
        ),
        (
            "<｜DSML｜tool_calls>\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n</｜DSML｜tool_calls>",
            f("{}"),
        ),
        (
            "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"false\">{\"b\": ",
            vec![],
        ),
        ("<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>", vec![]),
        ("<｜DSML｜tool_calls>", vec![]),
        ("<｜DSML｜tool_calls/>", vec![]),
        ("</｜DSML｜invoke>\n</｜DSML｜tool_calls>", vec![]),
        ("<｜DSML｜invoke>\n</｜DSML｜invoke>", vec![]),
        ("<｜DSML｜parameter name=\"a\" string=\"true\"></｜DSML｜parameter>", vec![]),
        ("<｜DSML｜nonsense>", vec![]),
    ] {
        let parsed = parse(&options(false), &format!("Go.\n\n{text}"), End::Stop);
        assert_eq!((parsed.calls, parsed.content.trim_end()), (calls, "Go."), "{text}");
        seen += 1;
    }
    assert_eq!(seen, 20);
    // Two calls, with and without their closers, and text after them.
    let two = vec![call("f", "{\"a\":\"1\"}"), call("list_files", "{\"b\":2}")];
    let begin = |n: &str, p: &str| format!("<｜DSML｜invoke name=\"{n}\">\n<｜DSML｜parameter {p}");
    let (one, other) =
        (begin("f", "name=\"a\" string=\"true\">1"), begin("list_files", "name=\"b\" string=\"false\">2"));
    let ends = ["</｜DSML｜parameter>\n</｜DSML｜invoke>", "</｜DSML｜invoke>", ""];
    for end in ends {
        for block in ["<｜DSML｜tool_calls>\n", ""] {
            let text = format!("{block}{one}{end}\n{other}{end}\n</｜DSML｜tool_calls>");
            assert_eq!(parse(&options(false), &text, End::Stop).calls, two, "{text}");
            let after = parse(&options(false), &format!("{text}\nWaiting."), End::Stop);
            assert_eq!((after.calls, after.content.trim()), (two.clone(), "Waiting."), "{text}");
        }
    }
}
