"""The vendor's SDK against a DeepSeek V4 of random weights: reasoning, tools, streams of both.

Random weights call nothing by themselves. The call here is the one that `tool_choice` forces for any model; the bias on token 1
ends the answer after it.
"""

import json
import random

from typing import Literal

import jsonschema
import openai
import pydantic
import pytest

from conftest import ROOT, Served

MODEL = str(ROOT / "tests/fixtures/deepseek_v4/tiny-v4.gguf")
TOOLS = [
    {"type": "function", "function": {"name": "get_time", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "get_date", "parameters": {"type": "object", "properties": {}}}},
]
QUESTION = [{"role": "user", "content": "What is the time?"}]
FORCED = dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_time"}}, logit_bias={"1": 100}, temperature=0)


@pytest.fixture(scope="module")
def v4():
    with Served.running("--model", MODEL, "--allow-dev-models", "--ctx", "4096") as it:
        yield it


@pytest.fixture()
def client(v4):
    return openai.OpenAI(base_url=v4.url + "/v1", api_key="none", max_retries=0, timeout=60)


def accumulate(stream):
    """Puts a message together as agents do: calls by index, arguments joined."""
    message = {"content": "", "reasoning": "", "calls": {}, "finish": None, "usage": None}
    for chunk in stream:
        message["usage"] = chunk.usage or message["usage"]
        for choice in chunk.choices:
            message["finish"] = choice.finish_reason or message["finish"]
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                call = message["calls"].setdefault(part.index, {"id": "", "type": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                call["type"] += part.type or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    return message


@pytest.mark.parametrize("effort", ["none", "high"])
def test_deepseek_v4_a_call_streamed_and_not(client, v4, effort):
    options = dict(model=v4.model, messages=QUESTION, reasoning_effort=effort, **FORCED)
    whole = client.chat.completions.create(**options)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {})
    assert whole.usage.completion_tokens_details.reasoning_tokens == 0

    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    message = accumulate(stream)
    assert message["finish"] == "tool_calls" and message["content"] == ""
    (streamed,) = message["calls"].values()
    assert (streamed["name"], streamed["arguments"], streamed["type"]) == ("get_time", "{}", "function")
    assert streamed["id"].startswith("call_") and streamed["id"] != call.id
    assert message["usage"].completion_tokens == whole.usage.completion_tokens

    # The SDK's own message goes back as it is, with the result.
    history = QUESTION + [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "12:40"}]
    answer = client.chat.completions.create(model=v4.model, messages=history, tools=TOOLS, max_tokens=4)
    assert answer.usage.prompt_tokens > whole.usage.prompt_tokens + 20
    with pytest.raises(openai.BadRequestError) as error:
        history[-1]["tool_call_id"] = "call_of_nobody"
        client.chat.completions.create(model=v4.model, messages=history, tools=TOOLS)
    assert error.value.param == f"messages[{len(history) - 1}].tool_call_id"


def test_deepseek_v4_reasoning_streamed_equals_unstreamed(client, v4):
    options = dict(model=v4.model, messages=QUESTION, seed=3, max_tokens=24, logit_bias={"1": -100})
    message = client.chat.completions.create(**options).choices[0].message
    streamed = accumulate(client.chat.completions.create(**options, stream=True))
    assert message.reasoning_content and streamed["reasoning"] == message.reasoning_content
    assert streamed["content"] == (message.content or "")
    assert streamed["finish"] == "length"
    off = client.chat.completions.create(**options, extra_body={"thinking": {"type": "disabled"}})
    assert getattr(off.choices[0].message, "reasoning_content", None) is None


def test_deepseek_v4_log_probabilities_of_both_parts(client, v4):
    answer = client.chat.completions.create(
        model=v4.model, messages=QUESTION, seed=3, max_tokens=8, logit_bias={"1": -100}, logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    reasoning = logprobs.reasoning_content or []
    assert len(reasoning) == answer.usage.completion_tokens_details.reasoning_tokens > 0
    assert all(t["logprob"] <= 0 and len(t["top_logprobs"]) == 1 for t in reasoning)


def test_deepseek_v4_errors_name_field_and_value(client, v4):
    for extra, param in [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_moon"}}}, "tool_choice.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ]:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=v4.model, messages=QUESTION, **extra)
        assert error.value.param == param


class SetLamp(pydantic.BaseModel):
    """Switch a lamp."""

    room: Literal["kitchen", "hall"]
    on: bool


@pytest.mark.parametrize("effort", ["none", "high"])
def test_deepseek_v4_strict_tools_of_the_sdk(client, v4, effort):
    tools = [openai.pydantic_function_tool(SetLamp)]
    assert tools[0]["function"]["strict"] is True
    # The bias would end the answer at once, if it were permitted to.
    options = dict(model=v4.model, messages=QUESTION, tools=tools, tool_choice="required", reasoning_effort=effort,
                   parallel_tool_calls=False, logit_bias={"1": 100}, seed=3, max_tokens=600)
    (call,) = client.chat.completions.parse(**options).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, SetLamp)


def finite(rng, depth=2):
    """A random schema of few and short values, so that random weights come to the end of one."""
    text = lambda: "".join(rng.choice('abZ 0"\\\\/<>&é漢😀\n') for _ in range(rng.randrange(6)))
    some = lambda: rng.choice([text(), rng.randrange(-9, 99), 0.5, True, None, [text()], {"a": text()}])
    kinds = [
        lambda: {"type": "string", "enum": [text() for _ in range(3)]},
        lambda: {"enum": [some() for _ in range(3)]},
        lambda: {"const": some()},
        lambda: {"type": "boolean"},
        lambda: {"type": ["integer", "null"], "minimum": -3, "maximum": 120},
        lambda: {"type": "string", "maxLength": rng.randrange(4)},
        lambda: {"type": "string", "pattern": "^(ab|c<|é){1,3}$"},
        lambda: {"$ref": "#/$defs/a~1b%20c"},
    ]
    if depth:
        inner = lambda: finite(rng, depth - 1)
        kinds += [
            lambda: {"anyOf": [inner(), inner()]},
            lambda: {"type": "array", "items": inner(), "minItems": rng.randrange(2), "maxItems": 2},
            lambda: closed({name: inner() for name in ["a", "é", "x y"]}, rng),
        ]
    return rng.choice(kinds)()


def closed(properties, rng):
    required = [name for name in properties if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("seed", range(24))
def test_deepseek_v4_streamed_arguments_follow_their_schema(client, v4, seed):
    rng = random.Random(seed)
    parameters = closed({f"p{i}": finite(rng) for i in range(3)}, rng) | {"$defs": {"a/b c": {"enum": ["d", 1]}}}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}]
    options = dict(model=v4.model, messages=QUESTION, seed=seed, max_tokens=3000, logit_bias={"1": 100},
                   reasoning_effort=rng.choice(["none", "high"]))
    calling = dict(options, tools=tools, tool_choice="required", parallel_tool_calls=False)
    chunks = list(client.chat.completions.create(**calling, stream=True))
    streamed = accumulate(chunks)
    assert streamed["finish"] == "tool_calls" and streamed["content"] == "", streamed
    (call,) = streamed["calls"].values()
    arguments = json.loads(call["arguments"])
    jsonschema.Draft202012Validator(parameters).validate(arguments)
    pieces = sum(bool(c.delta.tool_calls) for chunk in chunks for c in chunk.choices)
    assert call["name"] == "f" and pieces > len(arguments), "each parameter comes when it is written"
    whole = client.chat.completions.create(**calling).choices[0].message.tool_calls[0].function
    assert json.loads(whole.arguments) == arguments

    answering = dict(options, response_format={"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": parameters}})
    streamed = accumulate(client.chat.completions.create(**answering, stream=True))
    assert streamed["finish"] == "stop", streamed
    jsonschema.Draft202012Validator(parameters).validate(json.loads(streamed["content"]))
    assert client.chat.completions.create(**answering).choices[0].message.content == streamed["content"]
