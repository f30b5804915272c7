from __future__ import annotations

from typing import Any

import pytest

from batchline.backends.base import Answer, EndpointRequest
from batchline.errors import EngineLost
from batchline.testing import FakeBackend


async def ask(url: str, backend: FakeBackend | None = None, **body: Any) -> Answer:
    request = EndpointRequest(url=url, body={"model": "fake", **body}, request_id="r")
    return await (backend or FakeBackend()).answer(request)


async def test_a_chat_is_answered_with_its_last_message() -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "say two words"}]
    answer = await ask("/v1/chat/completions", messages=messages)
    assert answer.status_code == 200
    assert answer.body["choices"][0]["message"] == {"role": "assistant", "content": "say two words"}
    assert answer.body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


async def test_a_completion_is_answered_with_its_prompt_and_an_embedding_with_its_length() -> None:
    assert (await ask("/v1/completions", prompt="hello")).body["choices"][0]["text"] == "hello"
    assert (await ask("/v1/embeddings", input="hello")).body["data"][0]["embedding"] == [5.0]


@pytest.mark.parametrize(
    ("url", "model", "code", "param"),
    [("/v1/chat/completions", "other", "model_not_found", "model"), ("/nonsense", "fake", 404, "url")],
)
async def test_what_it_does_not_serve_is_a_404(url: str, model: str, code: object, param: str) -> None:
    answer = await ask(url, model=model)
    assert answer.status_code == 404
    assert (answer.body["error"]["code"], answer.body["error"]["param"]) == (code, param)


async def test_what_before_answer_raises_is_the_fate_of_the_request() -> None:
    async def before_answer(_request: EndpointRequest) -> None:
        raise EngineLost("gone")

    with pytest.raises(EngineLost):
        await ask("/v1/completions", FakeBackend(before_answer=before_answer), prompt="x")


async def test_it_remembers_and_counts_what_it_was_asked() -> None:
    backend = FakeBackend()
    await backend.start()
    await ask("/v1/completions", backend, prompt="one two")
    await backend.close()
    assert [request.body["prompt"] for request in backend.requests] == ["one two"]
    assert (backend.stats().prompt_tokens, backend.stats().output_tokens) == (2, 2)
    assert (backend.is_started, backend.is_closed) == (True, True)
