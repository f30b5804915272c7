"""Tokenizing and detokenizing over HTTP: texts, conversations, special tokens."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_models import scripted_model

from batchline.endpoints.tokenizing import detokenized, generative, tokenized
from batchline.errors import BadRequest
from batchline.testing import ByteTokenizer

BOS = ByteTokenizer.BOS


async def test_a_text_gets_its_special_tokens_unless_told_otherwise() -> None:
    answer = await tokenized({"prompt": "hé"}, generative(scripted_model()))
    assert answer == {"count": 4, "max_model_len": 512, "tokens": [BOS, *"hé".encode()], "token_strs": None}
    bare = await tokenized({"prompt": "hé", "add_special_tokens": False}, generative(scripted_model()))
    assert bare["tokens"] == [*"hé".encode()]


async def test_a_conversation_goes_through_the_template() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    assert bytes((await tokenized(body, generative(scripted_model())))["tokens"]) == b"[user]Hi[assistant]"
    body["add_generation_prompt"] = False
    assert bytes((await tokenized(body, generative(scripted_model())))["tokens"]) == b"[user]Hi"


async def test_tokens_can_be_shown_as_text() -> None:
    answer = await tokenized({"prompt": "hi", "return_token_strs": True}, generative(scripted_model()))
    assert answer["token_strs"] == ["<s>", "h", "i"]


async def test_detokenizing_shows_special_tokens() -> None:
    assert await detokenized({"tokens": [BOS, *"né".encode()]}, generative(scripted_model())) == {"prompt": "<s>né"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Send either prompt or messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "Send either prompt or messages"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt: it requires messages"),
        ({"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}, "exclude each other"),
        ({"prompt": "a\ud800"}, "lone surrogate"),
    ],
)
async def test_wrong_requests_are_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        await tokenized(body, generative(scripted_model()))


async def test_unknown_token_ids_are_refused() -> None:
    with pytest.raises(BadRequest, match="tokens: token id 5000 is outside the vocabulary"):
        await detokenized({"tokens": [5000]}, generative(scripted_model()))
