"""Conversations and the prompts that DeepSeek's published encoder makes of them.

usage: deepseek_v4_prompt.py encoding_dsv4.py > ../fixtures/deepseek_v4/prompts.json

The encoder is `encoding_dsv4.py` of the model's repository (MIT); the sglang 0.5.12 wheel carries it as
sglang/srt/entrypoints/openai/encoding_dsv4.py. It is run here as a black box. A case's `input` is our ChatInput.
"""

import copy
import importlib.util
import json
import random
import sys

spec = importlib.util.spec_from_file_location("encoding_dsv4", sys.argv[1])
encoder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(encoder)
rng = random.Random(4)

WORDS = ["Hello", "你好，世界", "2+2=", "fn main() {\n  1\n}", "", "naïve 😀", " leading", "trailing\n", "a < b && c > d", "\"quoted\"", "tab\t", "<b>bold</b>"]
VALUES = ["text", "multi\nline", 5, -1.5, 1e22, 0.1, True, None, [1, "ä", {"k": []}], {"z": 1, "a": {"y": "ü\n"}}, "", "</b>", "5"]
TOOLS = [
    {"type": "function", "function": {"name": "list_files", "description": "Lists files – all of them", "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer", "default": 1.0}}, "required": ["path"]}}},
    {"type": "function", "function": {"name": "天气", "parameters": {"type": "object", "properties": {}}, "strict": True}},
]


def words():
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))


def call(i):
    keys = rng.sample(["path", "limit", "b", "键", "arguments"], rng.randint(0, 4))
    arguments = {k: copy.deepcopy(rng.choice(VALUES)) for k in keys}
    return {"id": f"call_{i}", "type": "function", "function": {"name": rng.choice(["list_files", "天气"]), "arguments": json.dumps(arguments, ensure_ascii=rng.random() < 0.5)}}


def conversation():
    messages = []
    if rng.random() < 0.6:
        messages.append({"role": "system", "content": words()})
    calls = 0
    for turn in range(rng.randint(1, 4)):
        if rng.random() < 0.15:
            messages.append({"role": "latest_reminder", "content": words()})
        role = "developer" if rng.random() < 0.15 else "user"
        messages.append({"role": role, "content": words() + "."})
        if rng.random() < 0.1:
            messages.append({"role": rng.choice(["user", "latest_reminder"]), "content": words()})
        if rng.random() < 0.35:
            made = [call(calls + i) for i in range(rng.randint(1, 3))]
            calls += len(made)
            message = {"role": "assistant", "content": rng.choice([None, "", words()]), "tool_calls": made}
            if rng.random() < 0.7:
                message["reasoning_content"] = words()
            messages.append(message)
            results = [{"role": "tool", "tool_call_id": c["id"], "content": words()} for c in made]
            rng.shuffle(results)
            if rng.random() < 0.1:
                results[-1]["tool_call_id"] = "of another conversation"
            if rng.random() < 0.2:
                results[0]["content"] = [{"type": "text", "text": "part"}, {"type": "image", "url": "x"}, {"type": "text", "text": "two"}]
            messages += results
            if rng.random() < 0.3:
                messages.append({"role": "user", "content": words()})
        if turn < 3 and rng.random() < 0.8:
            message = {"role": "assistant", "content": words()}
            if rng.random() < 0.7:
                message["reasoning_content"] = words()
            messages.append(message)
    return messages


def official(case):
    messages = copy.deepcopy(case["messages"])
    if case.get("tools") or case.get("response_format"):
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        for key in ("tools", "response_format"):
            if case.get(key):
                messages[0][key] = case[key]
    mode = "chat" if case["thinking"] == "none" else "thinking"
    effort = "max" if case["thinking"] == "max" else None
    return encoder.encode_messages(messages, thinking_mode=mode, reasoning_effort=effort)


cases = []
while len(cases) < 300:
    case = {"messages": conversation(), "thinking": rng.choice(["none", "high", "high", "max"])}
    if rng.random() < 0.4:
        case["tools"] = rng.sample(TOOLS, rng.randint(1, 2))
    if rng.random() < 0.2:
        case["response_format"] = {"type": "object", "properties": {"é": {"type": "number"}}}
    cases.append({"input": case, "prompt": official(case)})

# Texts that are the same in every prompt are kept once, and U+0001 to U+0003 stand for them.
section = encoder.render_tools([{}])
head, tail = section.split("\n{}\n")
fixed = [head + "\n", "\n" + tail, encoder.REASONING_EFFORT_MAX]
for case in cases:
    for i, text in enumerate(fixed):
        case["prompt"] = case["prompt"].replace(text, chr(i + 1))
json.dump({"fixed": fixed, "cases": cases}, sys.stdout, ensure_ascii=False, separators=(",", ":"))
sys.stdout.write("\n")
