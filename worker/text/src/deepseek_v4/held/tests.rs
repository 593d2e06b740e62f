//! What a constraint lets through, with the real vocabulary, in the tokenizer's own tokens and cut at random.

use super::*;
use crate::deepseek_v4::tests::tokenizer;
use crate::test_support::Rng;
use crate::{ChatMessage, Specials};

fn of(tools: Value, choice: ToolChoice, schema: Option<Value>) -> Result<Option<Constraint>, Unenforceable> {
    let input = ChatInput {
        tools: Some(tools).filter(|t| t != &json!([])),
        tool_choice: choice,
        response_format: schema,
        ..ChatInput::of(vec![ChatMessage::new("user", "q")])
    };
    constraint(&input, tokenizer())
}

fn tool(name: &str, strict: bool, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}})
}

/// Tokens of a text, words cut at random places, the marker one token.
fn tokens(text: &str, rng: &mut Rng) -> Vec<u32> {
    let t = tokenizer();
    let mut out = Vec::new();
    for (i, part) in text.split(DSML).enumerate() {
        if i > 0 {
            out.extend(t.token_id(DSML));
        }
        let mut rest = part;
        while !rest.is_empty() {
            let at = (1 + rng.below(12)..=rest.len()).find(|at| rest.is_char_boundary(*at)).unwrap_or(rest.len());
            out.extend(t.encode(&rest[..at], Specials::Plain));
            rest = &rest[at..];
        }
    }
    out
}

/// How many bytes of a text are let through, and whether the answer may end behind it.
fn follow(constraint: &Constraint, text: &str, rng: &mut Rng) -> (usize, bool) {
    let mut c = constraint.clone();
    let mut passed = 0;
    for token in tokens(text, rng) {
        if !c.permits(token).expect("a verdict") {
            // What is refused is masked, too.
            let mut row = vec![0.0; tokenizer().vocab_size() + 8];
            c.restrict(&mut row).expect("a mask");
            assert_eq!(row[token as usize], f32::NEG_INFINITY);
            assert!(row[tokenizer().vocab_size()..].iter().all(|l| *l == f32::NEG_INFINITY), "no tokens are there");
            return (passed, false);
        }
        passed += tokenizer().token_bytes(token).len();
        c.take(token);
    }
    (passed, c.permits(tokenizer().eos().expect("eos")).expect("a verdict"))
}

/// Checks that these texts, and no others, are whole answers.
fn check(constraint: &Constraint, whole: &[&str], not: &[&str]) {
    let mut rng = Rng::new(4);
    for text in whole {
        for _ in 0..4 {
            assert_eq!(follow(constraint, text, &mut rng), (text.len(), true), "{text:?}");
        }
    }
    for text in not {
        assert!(!follow(constraint, text, &mut rng).1, "{text:?}");
    }
}

fn call(name: &str, parameters: &str) -> String {
    format!("<{DSML}tool_calls>\n<{DSML}invoke name=\"{name}\">\n{parameters}</{DSML}invoke>\n</{DSML}tool_calls>")
}

fn parameter(key: &str, string: bool, value: &str) -> String {
    format!("<{DSML}parameter name=\"{key}\" string=\"{string}\">{value}</{DSML}parameter>\n")
}

#[test]
fn deepseek_v4_an_answer_follows_its_schema() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["a", "b"],
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "array", "items": {"enum": ["x", "ü"]}}},
        "$defs": {"n": {"type": "integer", "minimum": 0}}});
    let c = of(json!([]), ToolChoice::Auto, Some(schema)).unwrap().unwrap();
    check(
        &c,
        &["{\"a\": 12, \"b\": [\"x\", \"ü\"]}", "{\"a\":0,\"b\":[]}", "{\n  \"a\": 1,\n  \"b\": []\n}"],
        &["", "{}", "{\"a\": -1", "{\"a\": 1}", "{\"a\": 1, \"b\": [\"y\"", "Here: {", "{\"a\": 1, \"b\": []} and"],
    );
    let any = of(json!([]), ToolChoice::Auto, Some(json!({"type": "object"}))).unwrap().unwrap();
    check(&any, &["{}", "{\"x\": {\"y\": [1, null, \"<\"]}}"], &["[1]", "{]", "{\"x\""]);
    let mut padded = any.clone();
    let beyond = u32::try_from(tokenizer().vocab_size()).unwrap();
    assert_eq!([beyond, beyond + 7].map(|t| padded.permits(t)), [Ok(false), Ok(false)], "no tokens are there");
    assert_eq!(padded.permits(tokenizer().token_id("{").unwrap()), Ok(true), "and nothing is broken");
    let mut spaces = any.clone();
    spaces.take(tokenizer().token_id("{").unwrap());
    let [newline, space] = ["\n", " "].map(|t| tokenizer().encode(t, Specials::Plain)[0]);
    let mut most = |token: u32| {
        (0..200).take_while(|_| spaces.permits(token).unwrap().then(|| spaces.take(token)).is_some()).count()
    };
    assert_eq!([most(newline), most(space)], [1, 48], "a model must not lose itself in white space");
}

#[test]
fn deepseek_v4_strict_calls_follow_their_schemas() {
    let parameters = json!({"type": "object", "additionalProperties": false, "required": ["city", "days", "unit", "note"],
        "properties": {"city": {"type": "string", "description": "where"}, "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"], "type": "string"}, "note": {"type": ["string", "null"]}, "tags": {"type": "array", "items": {"type": "string"}}}});
    let tools = json!([tool("weather", true, parameters), tool("other", false, json!({"type": "object"}))]);
    let c = of(tools.clone(), ToolChoice::Auto, None).unwrap().unwrap();
    let rest = [parameter("days", false, "3"), parameter("unit", true, "C"), parameter("note", false, "null")].concat();
    let good = |city: &str| call("weather", &(parameter("city", true, city) + &rest));
    // Values may hold anything, what looks like closing tags included, as long as it is no marker.
    let odd = good("</div> \"x\" </｜ \n\n<a></");
    let with_tags = call("weather", &(parameter("city", true, "") + &rest + &parameter("tags", false, "[\"a\"]")));
    let noted = call(
        "weather",
        &[
            parameter("city", true, "漢"),
            parameter("days", false, "-1"),
            parameter("unit", true, "F"),
            parameter("note", true, "so"),
        ]
        .concat(),
    );
    let loose = call("other", &(parameter("x y", true, "1") + &parameter("z", false, "{\"a\": 1}")));
    let empty = call("other", "\n");
    let two = format!(
        "<{DSML}tool_calls>\n{0}{0}</{DSML}tool_calls>",
        format_args!("<{DSML}invoke name=\"other\">\n\n</{DSML}invoke>\n")
    );
    let said = format!("I look. a < b\n\n{}", good("Oslo"));
    check(
        &c,
        &["", "Hello <b>.", "\n\n", &good("Oslo"), &odd, &with_tags, &noted, &loose, &empty, &two, &said],
        &[
            &call("weather", &rest),
            &call("weather", &(parameter("city", false, "1") + &rest)),
            &call("weather", &(parameter("city", true, "a") + &parameter("days", false, "3.5"))),
            &call("weather", &(parameter("city", true, "a") + &parameter("days", true, "3"))),
            &call(
                "weather",
                &(parameter("city", true, "a") + &parameter("days", false, "3") + &parameter("unit", true, "K")),
            ),
            &call("nobody", "\n"),
            &call("weather", &(parameter("city", true, "a") + &rest + &parameter("more", true, "b"))),
            &format!("so<{DSML}tool_calls>\n"),
            &format!("{}.", good("Oslo")),
            DSML,
        ],
    );
    for choice in [ToolChoice::Required, ToolChoice::Named("weather".into())] {
        let named = matches!(choice, ToolChoice::Named(_));
        let c = of(tools.clone(), choice, None).unwrap().unwrap();
        check(&c, &[&format!("\n\n{}", good("a"))], &["", "Hello", &good("a")]);
        let other = format!("\n\n{empty}");
        let (whole, not): (&[&str], &[&str]) = if named { (&[], &[&other]) } else { (&[&other], &[]) };
        check(&c, whole, not);
    }
}

#[test]
fn deepseek_v4_an_answer_follows_its_schema_or_calls() {
    let tools = json!([tool("f", false, json!({"type": "object"}))]);
    let c = of(tools.clone(), ToolChoice::Auto, Some(json!({"type": "object"}))).unwrap().unwrap();
    let called = format!("\n\n{}", call("f", "\n"));
    check(&c, &["{\"a\": 1}", &called, &called[2..]], &["", "{", "Text", &format!("{{}}{called}")]);
    assert!(
        of(tools.clone(), ToolChoice::Required, Some(json!({"type": "object"}))).unwrap().is_none(),
        "no schema is met"
    );
    assert!(of(tools, ToolChoice::Auto, None).unwrap().is_none());
}

#[test]
fn deepseek_v4_what_cannot_be_enforced_is_refused_when_it_is_strict() {
    let strict = |parameters: Value| {
        let tools = json!([tool("ok", true, json!({"type": "object", "properties": {}})), tool("f", true, parameters)]);
        of(tools, ToolChoice::Auto, None).err()
    };
    for (parameters, part) in [
        (json!({"type": "string"}), "`type` is not `object`"),
        (json!({"type": "object", "oneOf": []}), "`oneOf`"),
        (json!({"type": "object", "required": ["x"]}), "`x` is required"),
        (json!({"type": "object", "properties": {"a\"b": {}}}), "a\\\"b"),
        (json!({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}), "not"),
        (json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}), "none"),
        (json!({"type": "object", "properties": {"a": {"enum": [9_007_199_254_740_993_i64]}}}), "2^53"),
        (
            json!({"type": "object", "properties": {"a": {"anyOf": [{"type": "object", "minProperties": 2}]}}}),
            "minProp",
        ),
    ] {
        let e = strict(parameters.clone()).unwrap_or_else(|| panic!("{parameters} was accepted"));
        assert!(e.tool == Some(1) && e.why.contains(part), "{parameters}: {e:?}");
    }
    assert_eq!(strict(json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}})), None);
    let itself = of(json!([]), ToolChoice::Auto, Some(json!({"$ref": "#"}))).unwrap();
    assert!(itself.is_none(), "nothing can follow it");
    let bare = json!({"type": "function", "function": {"name": "bare", "strict": true}});
    let unmet = json!({"type": "object", "not": {}});
    let both = |response_strict| {
        let input = ChatInput {
            tools: Some(json!([bare])),
            response_format: Some(unmet.clone()),
            response_strict,
            ..ChatInput::of(vec![ChatMessage::new("user", "q")])
        };
        constraint(&input, tokenizer())
    };
    assert_eq!(both(true).unwrap_err().tool, None, "the tool is none to blame");
    check(
        &both(false).unwrap().unwrap(),
        &["Hello", &call("bare", "\n")],
        &[&call("bare", &parameter("a", true, "b"))],
    );
    let with = |of_a: Value, required: &[&str]| {
        let parameters =
            json!({"type": "object", "properties": {"a": of_a, "b": {"type": "integer"}}, "required": required});
        of(json!([tool("g", false, json!({})), tool("f", true, parameters)]), ToolChoice::Named("f".into()), None)
    };
    let none = with(json!({"enum": []}), &[]).unwrap().unwrap();
    let begun = format!("<{DSML}parameter name=\"a\" string=\"");
    check(
        &none,
        &[&format!("\n\n{}", call("f", &parameter("b", false, "3")))],
        &[&format!("\n\n{}", call("f", &begun)), &format!("\n\n{}", call("f", &parameter("a", true, "")))],
    );
    // As JSON nothing is wrong with the last one, which can leave that parameter out.
    let empty = json!({"type": "integer", "minimum": 5, "maximum": 2});
    for (of_a, required) in [(json!({"enum": []}), &["a"][..]), (empty, &[])] {
        let e = with(of_a, required).unwrap_err();
        assert_eq!(e.tool, Some(1), "there is no schema of the answer's own: {e:?}");
    }
    let input = |response_strict| ChatInput {
        response_format: Some(unmet.clone()),
        response_strict,
        ..ChatInput::of(vec![ChatMessage::new("user", "q")])
    };
    assert!(constraint(&input(false), tokenizer()).unwrap().is_none(), "it is asked for only");
    let e = constraint(&input(true), tokenizer()).unwrap_err();
    assert!(e.tool.is_none() && e.why.contains("not"), "{e:?}");
}

#[test]
fn references_from_a_tool_s_parameters_lead_out_of_them() {
    let schema = json!({"type": "object", "additionalProperties": false, "$id": "https://example.com/tree",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}, "n": {"$ref": "#/properties/m"}, "m": {"type": "integer"}}});
    let held = of(json!([tool("f", true, schema)]), ToolChoice::Named("f".into()), None).unwrap().unwrap();
    let whole = |value: &str| format!("\n\n{}", call("f", &parameter("children", false, value)));
    check(
        &held,
        &[&whole(r#"[{"children": [], "n": 1}, {}]"#), &format!("\n\n{}", call("f", &parameter("n", false, "1")))],
        &[&whole("[[]]"), &whole(r#"[{"n": true}]"#), &format!("\n\n{}", call("f", &parameter("n", false, "true")))],
    );
}

#[test]
fn parameters_that_are_a_definition_are_held_as_if_written_out() {
    let point = json!({"type": "object", "title": "Point", "additionalProperties": false, "required": ["x"],
        "properties": {"x": {"$ref": "#/$defs/N"}, "next": {"$ref": "#/$defs/Point"}}});
    let defs = json!({"N": {"type": "integer"}, "Point": point, "Alias": {"$ref": "#/$defs/Point", "description": "d"}, "N N": {"type": "string"}});
    let held = |parameters: Value| of(json!([tool("f", true, parameters)]), ToolChoice::Named("f".into()), None);
    for root in [
        json!({"$ref": "#/$defs/Point", "$defs": defs}),
        json!({"$ref": "#/$defs/Alias", "$defs": defs, "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}),
        json!({"$ref": "p.json#/$defs/Point", "$id": "https://example.com/p.json", "$defs": defs}),
    ] {
        let held = held(root).unwrap().unwrap();
        let whole = |rest: &str| format!("\n\n{}", call("f", &(parameter("x", false, "1") + rest)));
        let next = |value: &str| whole(&parameter("next", false, value));
        check(
            &held,
            &[&whole(""), &next(r#"{"x": 2, "next": {"x": 3}}"#)],
            &[
                &next("{}"),
                &next("1"),
                &format!("\n\n{}", call("f", &parameter("x", true, "1"))),
                &format!("\n\n{}", call("f", "\n")),
            ],
        );
    }
    for (root, part) in [
        (json!({"$ref": "#/$defs/Point", "$defs": defs, "minProperties": 2}), "`$ref`"),
        (json!({"$ref": "#/$defs/N N", "$defs": defs}), "`type` is not `object`"),
        (json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}), "`$ref`"),
        (json!({"$ref": "#"}), "`$ref`"),
        (json!({"$ref": "#/$defs/none"}), "`$ref`"),
    ] {
        let why = held(root.clone()).unwrap_err().why;
        assert!(why.contains(part), "{root}: {why}");
    }
    let endless =
        json!({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"], "additionalProperties": false});
    let why = held(endless).unwrap_err().why;
    assert!(why.contains("nothing can follow it"), "{why}");
}

#[test]
fn all_tools_of_a_request_are_bounded_together() {
    let strings: Map<String, Value> = (0..190).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
    let parameters = json!({"type": "object", "properties": strings});
    let tools = |n: usize| json!((0..n).map(|i| tool(&format!("f{i}"), true, parameters.clone())).collect::<Vec<_>>());
    assert!(of(tools(10), ToolChoice::Auto, None).unwrap().is_some());
    for n in [11, 900] {
        let e = of(tools(n), ToolChoice::Auto, None).unwrap_err();
        assert!(e.why.contains("more than 2000") && e.tool == Some(10), "{e:?}");
    }
}

#[test]
fn tools_of_too_many_bytes_are_refused_before_they_are_looked_at() {
    let chain = |n: usize| -> Map<String, Value> {
        (0..n).map(|i| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)}))).collect()
    };
    let with = |n: usize| json!({"type": "object", "properties": {}, "$defs": chain(n)});
    // 19 MB, which were followed into 500,000 calls.
    let long = with(500_000);
    let tools = |parameters: Value| json!([tool("ok", true, with(0)), tool("f", true, parameters)]);
    let e = of(tools(long.clone()), ToolChoice::Auto, None).unwrap_err();
    let bytes = long.to_string().len() + with(0).to_string().len();
    assert!(e.why.contains(&format!("{bytes} bytes together")) && e.why.contains("at most 1048576"), "{e:?}");
    assert_eq!(e.tool, Some(1));
    // One by one they would fit.
    let halves = (0..3).map(|i| tool(&format!("f{i}"), true, with(15_000))).collect::<Vec<_>>();
    let e = of(json!(halves), ToolChoice::Auto, None).unwrap_err();
    assert!(e.why.contains("at most 1048576") && e.tool == Some(2), "{e:?}");
    assert!(of(tools(with(15_000)), ToolChoice::Auto, None).unwrap().is_some());
    let asked = json!([tool("f", false, long), tool("g", true, with(0))]);
    assert!(of(asked, ToolChoice::Auto, None).unwrap().is_some(), "it is not enforced");
}

#[test]
fn the_tool_is_named_with_which_it_becomes_too_much() {
    let strings: Map<String, Value> = (0..1500).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
    // What an anchor leads to is counted, too.
    let anchored = json!({"type": "object", "properties": {"a": {"$ref": "#x"}},
        "$defs": {"x": {"$anchor": "x", "type": "object", "properties": strings}}});
    let plain = json!({"type": "object", "properties": {}});
    let named = |faulty: &[(usize, &Value)]| {
        let of_tool = |i: usize| faulty.iter().find(|(at, _)| *at == i).map_or(&plain, |(_, schema)| schema).clone();
        let tools = (0..24).map(|i| tool(&format!("f{i}"), i % 2 == 1, of_tool(i))).collect::<Vec<_>>();
        of(json!(tools), ToolChoice::Auto, None).unwrap_err()
    };
    let e = named(&[(3, &anchored), (17, &anchored), (19, &anchored)]);
    assert!(e.tool == Some(17) && e.why.contains("more than 2000"), "{e:?}");
    // Only the library minds it.
    let unmet = json!({"type": "object", "properties": {"a": {"not": {}}}});
    for at in [1, 13, 23] {
        let e = named(&[(at, &unmet)]);
        assert!(e.tool == Some(at) && e.why.contains("`not`"), "{e:?}");
    }
    // One that is not to be called is not to blame.
    let tools = json!([tool("f", true, unmet), tool("g", true, json!({"type": "string"}))]);
    let e = of(tools, ToolChoice::Named("g".into()), None).unwrap_err();
    assert_eq!(e.tool, Some(1), "{e:?}");
}
