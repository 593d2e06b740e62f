"""How far the Jinja template that llama.cpp carries for DeepSeek V4 agrees with the makers' encoder.

usage: deepseek_v4_jinja.py encoding_dsv4.py deepseek-ai-DeepSeek-V4.jinja

The encoder is the one of deepseek_v4_prompt.py, to which our prompts are held byte for byte; the template is found under
models/templates of llama.cpp's forks (MIT). Random conversations are rendered by both. A difference must have one of the causes
below, which are told from the conversation alone, before anything is rendered; the script fails on any other, and on a cause that
makes no difference in any conversation.
"""

import collections
import copy
import importlib.util
import json
import pathlib
import random
import sys

import jinja2

spec = importlib.util.spec_from_file_location("encoding_dsv4", sys.argv[1])
encoder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(encoder)
env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
env.filters["from_json"] = json.loads
template = env.from_string(pathlib.Path(sys.argv[2]).read_text())
rng = random.Random(5)

WORDS = ["Hello", "你好，世界", "2+2=", "fn main() {\n  1\n}", "naïve 😀", " leading", "a < b && c > d", "\"quoted\"", "<b>bold</b>"]
VALUES = ["text", "multi\nline", 5, -1.5, True, None, [1, "ä", {"k": []}], {"z": 1, "a": "ü"}, "", "</b>"]
TOOLS = [
    {"type": "function", "function": {"name": "list_files", "description": "Lists – all", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]


def words():
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))


def conversation():
    messages = [{"role": "system", "content": words()}] if rng.random() < 0.7 else []
    calls = 0
    for _ in range(rng.randint(0, 3)):
        messages.append({"role": "user", "content": words()})
        message = {"role": "assistant", "content": words()}
        if rng.random() < 0.5:
            message["reasoning_content"] = words()
        if rng.random() < 0.4:
            made = []
            for _ in range(rng.randint(1, 2)):
                keys = rng.sample(["path", "limit", "键"], rng.choice([0, 1, 1, 2, 2, 3]))
                arguments = json.dumps({k: rng.choice(VALUES) for k in keys})
                made.append({"id": f"c{calls}", "type": "function", "function": {"name": "list_files", "arguments": arguments}})
                calls += 1
            message["tool_calls"] = made
            messages.append(message)
            results = [{"role": "tool", "tool_call_id": c["id"], "content": words()} for c in made]
            if rng.random() < 0.2:
                results.reverse()
            messages += results
            message = {"role": "assistant", "content": words()}
        messages.append(message)
    messages.append({"role": "user", "content": words()})
    return messages


def causes(messages, tools, thinking):
    """What the template does otherwise in this conversation."""
    found = set()
    if tools and messages[0]["role"] != "system":
        found.add("no line breaks before the tools when there is no system message")
    if thinking and tools and any(m["role"] == "assistant" for m in messages):
        found.add("earlier reasoning is dropped although there are tools")
    for at, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        if any(json.loads(c["function"]["arguments"]) == {} for c in calls):
            found.add("no empty line for a call without arguments")
        results = [m["tool_call_id"] for m in messages[at + 1 : at + 1 + len(calls)]]
        if results != [c["id"] for c in calls]:
            found.add("results stay in the order in which they came")
    return found


def official(messages, tools, thinking):
    messages = copy.deepcopy(messages)
    if tools:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = tools
    return encoder.encode_messages(messages, thinking_mode="thinking" if thinking else "chat")


equal, seen, differing = 0, collections.Counter(), collections.Counter()
for _ in range(4000):
    messages = conversation()
    tools = rng.choice([None, None, TOOLS[:1], TOOLS])
    thinking = rng.random() < 0.5
    got = template.render(
        messages=messages, tools=tools, thinking=thinking, add_generation_prompt=True, bos_token="<｜begin▁of▁sentence｜>"
    )
    want = official(messages, tools, thinking)
    why = causes(messages, tools, thinking)
    seen.update(why)
    if got == want:
        equal += 1
    elif not why:
        sys.exit(f"differs:\n{json.dumps(messages, ensure_ascii=False)}\n--- template\n{got}\n--- encoder\n{want}")
    elif len(why) == 1:
        differing.update(why)
print(f"{equal} of 4000 conversations are equal; every other one has a cause:")
for cause in sorted(seen):
    print(f"  {cause}: in {seen[cause]}, alone and visible in {differing[cause]}")
    assert differing[cause], cause
