//! Reasoning, tool calls and their kin over HTTP, with the family's real text side and a model that says what it is told.

use std::collections::HashSet;

use serde_json::json;

use super::*;

const TOOLS: &str = r#","tools":[{"type":"function","function":{"name":"weather","description":"d","parameters":
    {"type":"object","properties":{"city":{"type":"string"}}}}},{"type":"function","function":{"name":"time"}}]"#;

const CALLS: &str = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Köln \"x\"</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">[1, {\"a\": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"time\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

async fn server(says: &str) -> Server {
    Server::start(Script::deepseek_v4(says), ApiConfig::default()).await
}

fn assert_no_markup(text: &str) {
    for mark in ["DSML", "invoke", "parameter>", "think>", "tool_calls>"] {
        assert!(!text.contains(mark), "{mark} in {text}");
    }
}

/// A streamed message put together as clients do it, with the kinds of its deltas in order.
#[derive(Debug, Default)]
struct Rebuilt {
    message: Value,
    order: Vec<&'static str>,
    finish: Vec<String>,
    logprobs: [Vec<Value>; 2],
    usage: Value,
}

fn rebuild(answer: &Answer) -> Rebuilt {
    let mut got = Rebuilt::default();
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::<Value>::new());
    for event in answer.events().iter().filter(|e| *e != "[DONE]") {
        let chunk: Value = serde_json::from_str(event).unwrap();
        if !chunk["usage"].is_null() {
            got.usage = chunk["usage"].clone();
        }
        let Some(choice) = chunk["choices"].get(0) else { continue };
        for (list, key) in got.logprobs.iter_mut().zip(["content", "reasoning_content"]) {
            list.extend(choice["logprobs"][key].as_array().cloned().unwrap_or_default());
        }
        got.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
        let delta = &choice["delta"];
        let mut kind = None;
        if let Some(text) = delta["content"].as_str().filter(|t| !t.is_empty()) {
            content += text;
            kind = Some("content");
        }
        if let Some(text) = delta["reasoning_content"].as_str() {
            reasoning += text;
            kind = Some("reasoning");
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            if call.get("id").is_some() {
                assert_eq!(index, calls.len(), "calls begin in order");
                assert_eq!(call["function"]["arguments"], "");
                calls.push(json!({"id": call["id"], "type": call["type"],
                    "function": {"name": call["function"]["name"], "arguments": ""}}));
                kind = Some("call");
            } else {
                assert_eq!(index + 1, calls.len(), "arguments belong to the last call");
                assert!(call["function"].get("name").is_none());
                let before = calls[index]["function"]["arguments"].as_str().unwrap().to_owned();
                calls[index]["function"]["arguments"] =
                    (before + call["function"]["arguments"].as_str().unwrap()).into();
                kind = Some("arguments");
            }
        }
        if kind.is_some() && got.order.last().copied() != kind {
            got.order.extend(kind);
        }
    }
    got.message = json!({"content": content, "reasoning": reasoning, "calls": calls});
    got
}

fn arguments(call: &Value) -> Value {
    serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap()
}

#[tokio::test]
async fn deepseek_v4_an_answer_of_all_parts_whole_and_streamed() {
    let server = server(&format!("They want 天气 😀.</think>I look it up.{CALLS} and more")).await;
    let whole = server.chat(TOOLS).await.json();
    let choice = &whole["choices"][0];
    let message = &choice["message"];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(message["reasoning_content"], "They want 天气 😀.");
    assert_eq!(message["content"], "I look it up.");
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!((&calls[0]["type"], &calls[0]["function"]["name"]), (&json!("function"), &json!("weather")));
    assert_eq!(arguments(&calls[0]), json!({"city": "Köln \"x\"", "days": [1, {"a": null}]}));
    assert_eq!((&calls[1]["function"]["name"], arguments(&calls[1])), (&json!("time"), json!({})));
    let ids: HashSet<&str> = calls.iter().map(|c| c["id"].as_str().unwrap()).collect();
    assert!(ids.len() == 2 && ids.iter().all(|id| id.starts_with("call_") && id.len() == 37), "{ids:?}");
    let reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert_eq!(reasoning, server.script.tokens("They want 天气 😀.").len() as u64);
    assert_no_markup(&whole.to_string());

    let streamed = server.chat(&format!(r#"{TOOLS},"stream":true,"stream_options":{{"include_usage":true}}"#)).await;
    assert_no_markup(&streamed.text());
    let got = rebuild(&streamed);
    assert_eq!(got.order, ["reasoning", "content", "call", "arguments", "call", "arguments"]);
    assert_eq!(got.finish, ["tool_calls"]);
    assert_eq!(got.message["reasoning"], message["reasoning_content"]);
    assert_eq!(got.message["content"], message["content"]);
    assert_eq!(got.usage, whole["usage"]);
    for (a, b) in got.message["calls"].as_array().unwrap().iter().zip(calls) {
        assert_eq!(a["function"], b["function"]);
    }
}

#[tokio::test]
async fn deepseek_v4_an_answer_that_only_calls_has_no_content() {
    let server = server(&format!("</think>{CALLS}")).await;
    let whole = server.chat(TOOLS).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], Value::Null);
    assert!(whole["choices"][0]["message"].get("reasoning_content").is_none());
    let plain = self::server("Hi.").await.chat(r#","thinking":{"type":"disabled"}"#).await.json();
    let message = &plain["choices"][0]["message"];
    assert_eq!((&message["content"], message.get("tool_calls")), (&json!("Hi."), None));
    assert_eq!(plain["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
    let thought = self::server("Only thought.").await.chat("").await.json();
    let message = &thought["choices"][0]["message"];
    assert_eq!((&message["content"], &message["reasoning_content"]), (&json!(""), &json!("Only thought.")));
}

#[tokio::test]
async fn deepseek_v4_log_probabilities_are_those_of_what_is_shown() {
    // No token of this vocabulary holds the end of the text and the beginning of the line break.
    let server = server(&format!("Héé</think>Yes, 漢{CALLS}")).await;
    let fields = format!(r#"{TOOLS},"logprobs":true,"top_logprobs":0"#);
    let whole = server.chat(&fields).await.json();
    let choice = &whole["choices"][0];
    let bytes = |list: &Value| -> String {
        let bytes = list.as_array().unwrap().iter().flat_map(|t| t["bytes"].as_array().unwrap().clone());
        String::from_utf8(bytes.map(|b| u8::try_from(b.as_u64().unwrap()).unwrap()).collect()).unwrap()
    };
    assert_eq!(json!(bytes(&choice["logprobs"]["content"])), choice["message"]["content"]);
    assert_eq!(json!(bytes(&choice["logprobs"]["reasoning_content"])), choice["message"]["reasoning_content"]);
    let got = rebuild(&server.chat(&format!(r#"{fields},"stream":true"#)).await);
    assert_eq!(Value::Array(got.logprobs[0].clone()), choice["logprobs"]["content"]);
    assert_eq!(Value::Array(got.logprobs[1].clone()), choice["logprobs"]["reasoning_content"]);
}

#[tokio::test]
async fn deepseek_v4_stop_strings_act_on_the_visible_answer() {
    let says = format!("A stop here.</think>One; two. stop three{CALLS}");
    let whole = server(&says).await.chat(&format!(r#"{TOOLS},"stop":["stop"]"#)).await.json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["message"]["reasoning_content"], "A stop here.");
    assert_eq!(choice["message"]["content"], "One; two. ");
    let whole = server(&says).await.chat(&format!(r#"{TOOLS},"stop":["Köln"]"#)).await.json();
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn deepseek_v4_tool_choices_are_kept() {
    let off = r#","thinking":false"#;
    let rest = "<｜DSML｜parameter name=\"city\" string=\"true\">Rom</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let named = r#","tool_choice":{"type":"function","function":{"name":"weather"}}"#;
    let whole = server(rest).await.chat(&format!("{TOOLS}{off}{named}")).await.json();
    let call = &whole["choices"][0]["message"]["tool_calls"][0];
    assert_eq!((&call["function"]["name"], arguments(call)), (&json!("weather"), json!({"city": "Rom"})));
    // The model would rather end in its reasoning.
    let whole = server("Hm.").await.chat(&format!("{TOOLS}{named}")).await.json();
    assert_eq!(whole["choices"][0]["message"]["reasoning_content"], "Hm.");
    assert_eq!(whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "weather");
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    // Any of several: what the model would like to call is none of them.
    let required = r#","tool_choice":"required""#;
    for (says, called) in [("NB\u{fffd}<x>", None), ("time", Some("time")), ("weather", Some("weather")), ("", None)] {
        let server = server(says).await;
        let whole = server.chat(&format!("{TOOLS}{off}{required}")).await.json();
        let calls = whole["choices"][0]["message"]["tool_calls"].as_array().unwrap();
        let name = calls[0]["function"]["name"].as_str().unwrap();
        assert!(["weather", "time"].contains(&name) && called.is_none_or(|c| c == name), "{says}: {whole}");
        let streamed = rebuild(&server.chat(&format!(r#"{TOOLS}{off}{required},"stream":true"#)).await);
        assert_eq!(streamed.message["calls"][0]["function"]["name"], name);
    }
    // None: nothing is on offer, and markup ends the answer.
    let none = server(&format!("No.{CALLS}")).await;
    let whole = none.chat(&format!(r#"{TOOLS}{off},"tool_choice":"none""#)).await.json();
    let choice = &whole["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("No."), &json!("stop")));
    assert!(choice["message"].get("tool_calls").is_none());
    let single = server(CALLS).await.chat(&format!(r#"{TOOLS}{off},"parallel_tool_calls":false"#)).await.json();
    assert_eq!(single["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn deepseek_v4_a_call_that_the_budget_cuts_is_no_call() {
    let cut = CALLS.find("</｜DSML｜parameter>").unwrap();
    let tokens = Script::deepseek_v4("").tokens(&CALLS[..cut]).len();
    let server = server(CALLS).await;
    let whole = server.chat(&format!(r#"{TOOLS},"thinking":false,"max_tokens":{tokens}"#)).await.json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert!(choice["message"].get("tool_calls").is_none(), "{choice}");
    assert_no_markup(&choice.to_string());
}

/// Blocks, calls and parameters as models write them, in every combination: each is the call that was meant, streamed and not, and no
/// letter of it is text.
#[tokio::test]
async fn deepseek_v4_frayed_markup_becomes_calls_and_never_leaks() {
    const BLOCKS: &[(&str, &str)] = &[
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        ("<｜DSML｜toolcalls>", "</｜DSML｜toolcalls>"),
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<DSML｜tool_calls>", "</DSML｜tool_calls>"),
        ("<｜DSML｜ tool_calls >", "</ ｜DSML｜tool_calls >"),
        ("<tool_calls>", "</tool_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_cals>"),
        ("<｜DSML｜tool_calls>", ""),
        ("", ""),
    ];
    const INVOKES: &[(&str, &str)] = &[
        ("<｜DSML｜invoke name=\"weather\">", "</｜DSML｜invoke>"),
        ("<｜DSML｜invoke name='weather'>", "</｜DSML｜invoke>"),
        ("<｜DSML｜invoke  name = \"weather\" >", "</｜DSML｜invoke >"),
        ("<invoke name=\"weather\">", "</invoke>"),
        ("<｜DSML｜invok name=\"weather\">", "<｜DSML｜/invoke>"),
        ("<｜DSML｜invoke name=\"weather\">", ""),
    ];
    const PARAMETERS: &[(&str, &str)] = &[
        ("<｜DSML｜parameter name=\"city\" string=\"true\">", "</｜DSML｜parameter>"),
        ("<｜DSML｜parameter string=\"true\" name=\"city\">", "</｜DSML｜parameter>"),
        ("<｜DSML｜param name=\"city\" string=\"true\">", "</｜DSML｜param>"),
        ("<parameter name=\"city\" string=\"true\">", "</parameter>"),
        ("<｜DSML｜parameter name='city' string=true>", "</｜DSML｜paramet>"),
        ("<｜DSML｜parameter name=\"city\">", "<｜DSML｜/parameter>"),
        ("<｜DSML｜parameter name=\"city\" string=\"true\">", ""),
    ];
    let mut seen = 0;
    for (block, end_block) in BLOCKS {
        for (invoke, end_invoke) in INVOKES {
            for (parameter, end_parameter) in PARAMETERS {
                let says = format!(
                    "Hm.</think>I look.\n\n{block}\n{invoke}\n{parameter}Köln < 5{end_parameter}\n{end_invoke}\n{end_block}"
                );
                let server = server(&says).await;
                let whole = server.chat(TOOLS).await;
                let streamed = server.chat(&format!(r#"{TOOLS},"stream":true"#)).await;
                for answer in [&whole, &streamed] {
                    assert_no_markup(&answer.text());
                }
                let (whole, streamed) = (whole.json(), rebuild(&streamed));
                let choice = &whole["choices"][0];
                assert_eq!(
                    (&choice["finish_reason"], &choice["message"]["content"]),
                    (&json!("tool_calls"), &json!("I look.")),
                    "{says}"
                );
                let call = &choice["message"]["tool_calls"][0];
                assert_eq!(
                    (&call["function"]["name"], arguments(call)),
                    (&json!("weather"), json!({"city": "Köln < 5"})),
                    "{says}"
                );
                assert_eq!(streamed.message["calls"][0]["function"], call["function"], "{says}");
                assert_eq!(
                    (streamed.message["content"].as_str(), streamed.finish),
                    (Some("I look."), vec!["tool_calls".to_owned()])
                );
                server.task.abort();
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 9 * 6 * 7);
}

#[tokio::test]
async fn deepseek_v4_arguments_are_streamed_while_they_are_written() {
    let code = "fn main() { println!(\"<b>\"); }\n".repeat(20);
    let call = format!(
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"code\" string=\"true\">{code}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    );
    let server = server(&call).await;
    let fields = format!(r#"{TOOLS},"thinking":false,"stream":true"#);
    let answer = server.chat(&fields).await;
    let got = rebuild(&answer);
    assert_eq!(arguments(&got.message["calls"][0]), json!({"code": code}));
    let pieces = answer.text().matches(r#""arguments":"#).count();
    assert!(pieces > code.len() / 2, "{pieces} pieces of {} bytes", code.len());
    // Cut in the middle, the client has the beginning and is told why there is no more.
    let cut = server.chat(&format!(r#"{fields},"max_tokens":200"#)).await;
    let got = rebuild(&cut);
    assert_eq!(got.finish, ["length"]);
    let begun = got.message["calls"][0]["function"]["arguments"].as_str().unwrap();
    assert!(begun.starts_with(r#"{"code":"fn main() { println!(\"<b>"#), "{begun}");
    assert_no_markup(&cut.text());
}

#[tokio::test]
async fn deepseek_v4_a_whole_conversation_becomes_its_prompt() {
    let server = server("Fine.").await;
    let body = json!({
        "messages": [
            {"role": "system", "content": "SYS"},
            {"role": "user", "content": [{"type": "text", "text": "List /tmp, "}, {"type": "text", "text": "at most 5"}]},
            {"role": "assistant", "content": null, "reasoning_content": "I should call the tool.", "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "list_files", "arguments": "{\"path\": \"/tmp\", \"limit\": 5}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "a.txt\nb.txt"},
        ],
        "tools": [{"type": "function", "function": {"name": "list_files"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    });
    let answer = server.post("/v1/chat/completions", &body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let prompt = server.script.seen().requests[0].prompt.clone();
    let bytes: Vec<u8> = prompt.iter().flat_map(|t| crate::Backend::token_bytes(&server.script, *t)).collect();
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.starts_with("<｜begin▁of▁sentence｜>SYS\n\n## Tools\n\n"), "{text}");
    assert!(text.contains("\n{\"name\": \"list_files\"}\n"), "{text}");
    let (head, tail) = text.split_once("<｜User｜>").unwrap();
    assert!(head.ends_with(
        "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{\"type\": \"object\"}"
    ));
    assert_eq!(
        tail,
        "List /tmp, \n\nat most 5<｜Assistant｜><think>I should call the tool.</think>\n\n<｜DSML｜tool_calls>\n\
         <｜DSML｜invoke name=\"list_files\">\n<｜DSML｜parameter name=\"path\" string=\"true\">/tmp</｜DSML｜parameter>\n\
         <｜DSML｜parameter name=\"limit\" string=\"false\">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
         </｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>a.txt\nb.txt</tool_result><｜Assistant｜><think>"
    );
}

#[tokio::test]
async fn deepseek_v4_schemas_that_cannot_be_enforced_are_refused_by_name() {
    let server = server("Fine.").await;
    let tool = |name: &str, parameters: &str| {
        format!(r#"{{"type":"function","function":{{"name":"{name}","strict":true,"parameters":{parameters}}}}}"#)
    };
    let fine =
        r#"{"type":"object","properties":{"a":{"type":"string"}},"required":["a"],"additionalProperties":false}"#;
    let tools = format!(r#","tools":[{},{}]"#, tool("f", fine), tool("g", r#"{"type":"object","oneOf":[{}]}"#));
    let schema = |strict: bool| {
        format!(
            r#","response_format":{{"type":"json_schema","json_schema":{{"name":"n","strict":{strict},"schema":{{"not":{{}}}}}}}}"#
        )
    };
    for (fields, param, part) in
        [(tools, "tools[1].function.parameters", "oneOf"), (schema(true), "response_format.json_schema.schema", "not")]
    {
        let answer = server.chat(&fields).await;
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error["param"].as_str()), (400, Some(param)), "{error}");
        assert_eq!(answer.code(), "unsupported_parameter");
        assert!(error["message"].as_str().unwrap().contains(part), "{error}");
    }
    let asked = server.chat(&schema(false)).await;
    assert_eq!(asked.status, 200, "what is not strict is asked for: {}", asked.text());
    assert_eq!(server.chat(&format!(r#","tools":[{}]"#, tool("f", fine))).await.status, 200);
}

#[tokio::test]
async fn deepseek_v4_other_families_refuse_what_they_have_no_place_for() {
    let server = Server::plain().await;
    for (fields, param) in [
        (TOOLS, "tools"),
        (r#","reasoning_effort":"high""#, "reasoning_effort"),
        (r#","thinking":{"type":"enabled"}"#, "thinking"),
    ] {
        let answer = server.chat(fields).await;
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(param)));
        assert_eq!(answer.code(), "unsupported_parameter");
    }
    let history =
        r#"{"messages":[{"role":"assistant","content":"a","reasoning_content":"b"},{"role":"user","content":"c"}]}"#;
    let answer = server.post("/v1/chat/completions", history).await;
    assert_eq!((answer.status, answer.code().as_str()), (400, "unsupported_parameter"));
    assert_eq!(answer.json()["error"]["param"], "messages[0].reasoning_content");
    assert!(answer.text().contains("the served model has no reasoning mode"), "{}", answer.text());
    let whole = server.chat("").await.json();
    assert!(whole["usage"].get("completion_tokens_details").is_none());
}

#[tokio::test]
async fn deepseek_v4_random_weights_are_announced() {
    let mut script = Script::deepseek_v4("x");
    script.model.synthetic = true;
    let server = Server::start(script, ApiConfig::default()).await;
    assert_eq!(server.get("/v1/models").await.json()["data"][0]["meta"]["synthetic"], true);
    assert_eq!(Server::plain().await.get("/v1/models").await.json()["data"][0]["meta"]["synthetic"], false);
}
