"""`/v1/chat/completions` in chunks: the same message as in a whole answer, piece by piece.

The first chunk of each choice has the message's role (and the text of `echo`). Later ones add text, and the one with a
`finish_reason` is the choice's last. Nothing is sent before the engine's first output, so that an invalid request still
gets an ordinary error.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from batchline.endpoints.answer_format import MessageReader
from batchline.endpoints.chat import (
    EncodedChat,
    answered_role,
    chat_completion_id,
    echoed_text,
    encode_chat,
)
from batchline.endpoints.choices import check_streamed, stream_jobs
from batchline.endpoints.generation import GeneratedText, by_token
from batchline.endpoints.model import GenerativeModel
from batchline.endpoints.reporting import LogprobFormat, StreamUsage
from batchline.openai_api.chat import ChatCompletionRequest, chat_chunk_choice, chat_completion_chunk, tool_call_delta

Chunk = dict[str, Any]


async def chat_completion_chunks(
    body: Mapping[str, Any], request_id: str, model: GenerativeModel, priority: int = 0
) -> AsyncGenerator[Chunk, None]:
    """The answer to a chat request in chunks. Raises: RequestError, EngineError."""
    chat = await encode_chat(body, model, check_streamed)
    chunks = _ChatChunks(chat, model, chat_completion_id(chat.request, request_id))
    deltas = stream_jobs(model, [chat.job], chat.request, request_id=request_id, priority=priority)
    async with aclosing(deltas):
        async for _, choice, delta in deltas:
            for chunk in chunks.push(choice, delta):
                yield chunk
    for chunk in chunks.finish():
        yield chunk


class _ChatChunks:
    """Turns deltas of choices into chunks of the answer. Mutable; one per request."""

    def __init__(self, chat: EncodedChat, model: GenerativeModel, completion_id: str) -> None:
        request = self._request = chat.request
        self._prompt = chat.job.prompt
        self._readers = [MessageReader(chat.answer_format) for _ in range(request.n)]
        self._model = model
        self._id = completion_id
        self._created = int(time.time())
        self._style = LogprobFormat(model.tokenizer, as_token_ids=request.return_tokens_as_token_ids)
        self._usage = StreamUsage(request.stream_options, len(chat.job.prompt.token_ids))
        self._num_characters = [0] * request.n
        self._is_open = False

    def push(self, choice: int, delta: GeneratedText) -> Iterable[Chunk]:
        """The chunks of a choice's delta; empty while its text is held back and there is nothing else to report.

        With log-probabilities, each of a choice's last tokens gets its own chunk. The token that ends the choice adds
        no text, and clients that assemble the text from tokens skip a chunk without text.
        """
        is_split = self._request.logprobs and delta.finish_reason is not None
        parts = by_token(delta, self._num_characters[choice]) if is_split else [delta]
        self._num_characters[choice] += len(delta.text)
        for part in parts:
            yield from self._push_part(choice, part)

    def _push_part(self, choice: int, delta: GeneratedText) -> Iterable[Chunk]:
        message = self._readers[choice].push(delta)
        self._usage.count(message, prompt=0, choice=choice)
        if not self._is_open:
            self._is_open = True
            yield from self._opening()
        reports_tokens = self._request.logprobs or self._request.return_token_ids
        added = _added(message, self._request)
        if added or message.finish_reason is not None or (reports_tokens and message.token_ids):
            yield self._usage.in_chunk(self._chunk([self._choice(choice, message, added)]))

    def finish(self) -> Iterable[Chunk]:
        """The chunk with the usage, if the request asks for it."""
        return self._usage.last_chunk(self._chunk([]))

    def _opening(self) -> Iterable[Chunk]:
        """The first chunk of every choice."""
        delta = {"role": answered_role(self._request), "content": echoed_text(self._request)}
        for choice in range(self._request.n):
            chunk = self._chunk([chat_chunk_choice(index=choice, delta=delta)])
            if self._request.return_token_ids:
                chunk["prompt_token_ids"] = list(self._prompt.token_ids)
            yield self._usage.in_chunk(chunk)

    def _choice(self, choice: int, message: GeneratedText, added: Chunk) -> Chunk:
        request = self._request
        wire = chat_chunk_choice(
            index=choice,
            delta=added,
            logprobs=self._style.chat(message.logprobs, request.num_alternatives) if request.logprobs else None,
            finish_reason=message.finish_reason,
            stop_reason=message.stop_reason,
        )
        return wire | {"token_ids": list(message.token_ids)} if request.return_token_ids else wire

    def _chunk(self, choices: list[Chunk]) -> Chunk:
        return chat_completion_chunk(
            completion_id=self._id, created=self._created, model=self._model.name, choices=choices
        )


def _added(message: GeneratedText, request: ChatCompletionRequest) -> Chunk:
    """A chunk's `delta`, with only the fields that have a value."""
    content, reasoning, calls = message.content, message.reasoning, message.calls
    added: Chunk = {"content": content} if content else {}
    if reasoning:
        added |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls and request.functions is not None:
        name = {} if calls[0].name is None else {"name": calls[0].name}
        added["function_call"] = {**name, "arguments": "".join(call.arguments_fragment for call in calls)}
    elif calls:
        added["tool_calls"] = [
            tool_call_delta(index=call.index, call_id=call.id, name=call.name, arguments=call.arguments_fragment)
            for call in calls
        ]
    return added
