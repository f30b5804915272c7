"""`/v1/responses`: a chat completion under another shape, whole and in events.

The request becomes a chat request and the answer is written anew, so that whatever chat completions can do holds here
too. Nothing is kept: earlier responses are put into the input by the server, which knows them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from batchline.endpoints.chat import chat_completion
from batchline.endpoints.chat_stream import chat_completion_chunks
from batchline.endpoints.model import GenerativeModel
from batchline.endpoints.response_input import chat_body
from batchline.endpoints.response_output import ResponseWriter
from batchline.errors import BadRequest
from batchline.openai_api.parsing import parse_body
from batchline.openai_api.responses import ResponsesRequest, refuse_other_fields

JsonObject = dict[str, Any]


async def response(
    body: Mapping[str, Any], request_id: str, model: GenerativeModel, priority: int = 0
) -> dict[str, Any]:
    """The answer to a response request. Raises: RequestError, EngineError."""
    request = _parse(body, model)
    if request.stream:
        raise BadRequest("stream: a batch line or a call for one answer cannot be streamed", param="stream")
    answer = await chat_completion(chat_body(request), request_id, model, priority)
    writer = ResponseWriter(body, answer["id"], model)
    choice = answer["choices"][0]
    _ = [*writer.push(choice["message"], _logprobs(choice))]
    *_, last = writer.closing(choice["finish_reason"], answer["usage"])
    whole: JsonObject = last["response"]
    return whole


async def response_events(
    body: Mapping[str, Any], request_id: str, model: GenerativeModel, priority: int = 0
) -> AsyncGenerator[JsonObject, None]:
    """The answer to a response request as events, each with its `type`. Raises: RequestError, EngineError."""
    request = _parse(body, model)
    streamed = chat_body(request) | {"stream": True, "stream_options": {"include_usage": True}}
    writer: ResponseWriter | None = None
    finish_reason = "abort"
    async with aclosing(chat_completion_chunks(streamed, request_id, model, priority)) as chunks:
        async for chunk in chunks:
            if writer is None:
                writer = ResponseWriter(body, chunk["id"], model)
                for event in writer.opening():
                    yield event
            for choice in chunk["choices"]:
                finish_reason = choice["finish_reason"] or finish_reason
                for event in writer.push(choice["delta"], _logprobs(choice)):
                    yield event
            if chunk["usage"] is not None:
                for event in writer.closing(finish_reason, chunk["usage"]):
                    yield event


def _parse(body: Mapping[str, Any], model: GenerativeModel) -> ResponsesRequest:
    refuse_other_fields(body)
    request = parse_body(ResponsesRequest, body, strict=model.config.strict)
    request.check()
    return request


def _logprobs(choice: Mapping[str, Any]) -> list[JsonObject]:
    """Those of the tokens of a choice, or of a chunk of it."""
    told: list[JsonObject] = (choice["logprobs"] or {"content": []})["content"]
    return told
