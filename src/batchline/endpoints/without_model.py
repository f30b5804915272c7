"""What is wrong with a body as far as no model is needed to know it, checked by the functions that endpoints use.

`batchline check` reads whole files with it. Knows nothing of batch lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from batchline.config import TextConfig
from batchline.endpoints import message_input, response_input
from batchline.endpoints.chat import parse_chat
from batchline.endpoints.chat_form import ChatForm
from batchline.endpoints.completions import parse_completion
from batchline.endpoints.constraints import requested_constraint
from batchline.openai_api.chat import ChatCompletionRequest
from batchline.openai_api.completions import CompletionRequest
from batchline.openai_api.embed import EmbedRequest
from batchline.openai_api.embeddings import EmbeddingsRequest
from batchline.openai_api.endpoint_table import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBED,
    EMBEDDINGS,
    INVOCATIONS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    answering_path,
)
from batchline.openai_api.parsing import parse_body
from batchline.openai_api.rerank import RerankRequest
from batchline.openai_api.score import ScoreRequest
from batchline.text.messages import normalise_messages

Body = Mapping[str, Any]


def checked_request(path: str, body: Body, config: TextConfig) -> BaseModel:
    """The request in a body; of a response or a message, the chat completion that it becomes. path: one of `CHECKS`.

    Raises: RequestError.
    """
    return CHECKS[answering_path(path, body)](body, config)


def _chat(body: Body, config: TextConfig) -> ChatCompletionRequest:
    request = parse_chat(body, config)
    _check_messages(request.messages)
    requested_constraint(request)
    return request


def _completion(body: Body, config: TextConfig) -> CompletionRequest:
    request = parse_completion(body, config)
    requested_constraint(request)
    return request


def _response(body: Body, config: TextConfig) -> ChatCompletionRequest:
    request = response_input.read_request(body, strict=config.strict, limits=config.limits)
    return _chat_in_own_fields(response_input.chat_form(request), config)


def _message(body: Body, config: TextConfig) -> ChatCompletionRequest:
    return _chat_in_own_fields(message_input.chat_form(message_input.read_message(body, config)), config)


def _counted_message(body: Body, config: TextConfig) -> ChatCompletionRequest:
    return _chat_in_own_fields(message_input.chat_form(message_input.read_conversation(body, config)), config)


def _chat_in_own_fields(form: ChatForm, config: TextConfig) -> ChatCompletionRequest:
    with form.in_own_fields():
        return _chat(form.body, config)


def _embeddings(body: Body, config: TextConfig) -> EmbeddingsRequest:
    request = parse_body(EmbeddingsRequest, body, strict=config.strict, limits=config.limits)
    request.check()
    _check_messages(request.messages or ())
    return request


def _embed(body: Body, config: TextConfig) -> EmbedRequest:
    request = parse_body(EmbedRequest, body, strict=config.strict, limits=config.limits)
    request.check()
    return request


def _score(body: Body, config: TextConfig) -> ScoreRequest:
    request = parse_body(ScoreRequest, body, strict=config.strict, limits=config.limits)
    request.texts()
    return request


def _rerank(body: Body, config: TextConfig) -> RerankRequest:
    return parse_body(RerankRequest, body, strict=config.strict, limits=config.limits)


def _invocation(body: Body, config: TextConfig) -> BaseModel:
    return checked_request(INVOCATIONS, body, config)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """What every template would find. Raises: BadRequest."""
    normalise_messages(messages, "string", knows_developer=True)


CHECKS: Mapping[str, Callable[[Body, TextConfig], BaseModel]] = {
    CHAT: _chat,
    COMPLETIONS: _completion,
    RESPONSES: _response,
    MESSAGES: _message,
    COUNT_TOKENS: _counted_message,
    EMBEDDINGS: _embeddings,
    EMBED: _embed,
    **dict.fromkeys(SCORE, _score),
    **dict.fromkeys(RERANK, _rerank),
    INVOCATIONS: _invocation,
}
"""The check of each path that a batch line can name and a model can answer."""
