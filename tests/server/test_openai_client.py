"""The official `openai` client against the model that ships: what its users do, unchanged."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import openai
import pytest
from threaded_server import ThreadedServer

MESSAGES: Any = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello world!"},
]


def test_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content is not None
    assert choice.message.content.startswith("Hello")
    assert (choice.message.role, choice.finish_reason, answer.object) == ("assistant", "stop", "chat.completion")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_clients_own_stream_helper_puts_the_message_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, temperature=0, logprobs=True) as stream:
        contents = [event.content for event in stream if event.type == "content.done"]
        final = stream.get_final_completion()
    assert contents == [final.choices[0].message.content]
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content is not None
    assert "".join(entry.token for entry in final.choices[0].logprobs.content).startswith("Hello")


def test_several_choices_stream_side_by_side(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "n": 3, "seed": 7, "temperature": 1.2, "max_tokens": 30}
    whole = client.chat.completions.create(**body)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "prompt": ["Say pong.", "Hello"], "temperature": 0, "max_tokens": 8, "echo": True}
    whole = client.completions.create(**body)
    assert whole.choices[0].text.startswith("Say pong.")
    texts = ["", ""]
    for chunk in client.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


async def test_the_async_client_with_many_requests_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def ask(text: str) -> str:
        stream = await async_client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    questions = ["Say pong.", "Hello world!", "What is the capital of New York?"] * 4
    answers = await asyncio.gather(*map(ask, questions))
    assert answers[:3] == answers[3:6] == answers[6:9] == answers[9:]
    assert "Albany" in answers[2]


def test_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    decoded = client.embeddings.create(model="tiny", input=["one", "two"])  # the client asks for base64 by itself
    floats = client.embeddings.create(model="tiny", input=["one", "two"], encoding_format="float")
    raw = client.embeddings.with_raw_response.create(model="tiny", input="one", encoding_format="base64")
    encoded = raw.http_response.json()["data"][0]["embedding"]
    for one, other in zip(decoded.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    vector = floats.data[0].embedding
    assert struct.unpack(f"<{len(vector)}f", base64.b64decode(encoded)) == pytest.approx(vector, abs=1e-5)


def test_request_ids_are_echoed_and_become_the_answers_id(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert (answer._request_id, answer.id) == ("mine-1", "chatcmpl-mine-1")
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES, max_tokens=1)
    assert raw.parse().id == f"chatcmpl-{raw.headers['x-request-id']}"


def test_models_by_any_name_slashes_included(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "org/alias"]
    model = client.models.retrieve("org/alias")
    assert (model.id, model.owned_by, model.model_extra and model.model_extra["root"]) == (
        "org/alias",
        "batchline",
        "tiny",
    )
    answer = client.chat.completions.create(model="org/alias", messages=MESSAGES, max_tokens=1)
    assert answer.model == "tiny"


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'none' does not exist") as unknown:
        client.chat.completions.create(model="none", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5000)


def test_an_error_in_a_streamed_request_is_an_ordinary_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, top_p=7, stream=True)


def test_a_wrong_key_is_an_authentication_error(tiny: ThreadedServer) -> None:
    with (
        openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.models.list()
    assert refused.value.code == "invalid_api_key"


def test_parameters_beyond_openais_go_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, extra_body={"ignore_eos": True, "min_tokens": 5, "top_k": 1}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
