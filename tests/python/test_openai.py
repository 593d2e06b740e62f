"""The vendor's own SDK against the worker."""

from typing import Literal

import openai
import pydantic
import pytest


@pytest.fixture()
def client(served):
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60)


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_models(client, served):
    assert [m.id for m in client.models.list()] == [served.model]


def test_chat_streamed_equals_unstreamed(client, served):
    options = dict(model=served.model, messages=QUESTION, temperature=0, max_tokens=24)
    whole = client.chat.completions.create(**options)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_several_choices_and_logprobs(client, served):
    answer = client.chat.completions.create(
        model=served.model, messages=QUESTION, temperature=0.8, seed=7, max_tokens=4, n=2, logprobs=True, top_logprobs=2
    )
    assert [c.index for c in answer.choices] == [0, 1]
    for choice in answer.choices:
        tokens = choice.logprobs.content
        assert len(tokens) == 4 and all(t.logprob <= 0 and len(t.top_logprobs) == 2 for t in tokens)


class Colours(pydantic.BaseModel):
    first: Literal["red", "green"]
    second: bool


def test_a11_structured_answers_become_the_clients_own_types(client, served):
    parse = client.chat.completions.parse
    for seed in (1, 2):
        answer = parse(model=served.model, messages=QUESTION, seed=seed, max_tokens=100, response_format=Colours)
        assert isinstance(answer.choices[0].message.parsed, Colours)
    options = dict(model=served.model, messages=QUESTION, seed=1, max_tokens=100, response_format=Colours)
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion()
    assert isinstance(streamed.choices[0].message.parsed, Colours)


def test_completions(client, served):
    answer = client.completions.create(model=served.model, prompt="The capital of France is", temperature=0, max_tokens=4)
    assert "Paris" in answer.choices[0].text


def test_errors_are_the_sdks_own(client, served):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=served.model, messages=QUESTION, max_tokens=0)
    assert error.value.param == "max_tokens" and error.value.code


def test_closing_a_stream_frees_its_place(client, served):
    import time

    stream = client.completions.create(
        model=served.model, prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 5
    while served.ctl("status")["worker"]["running"] > 0:
        assert time.monotonic() < deadline, "the abandoned generation still runs"
        time.sleep(0.02)
