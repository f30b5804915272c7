"""`/v1/completions` in chunks: the same text as in a whole answer, piece by piece, prompt-major indexes.

With `echo`, a choice's first chunk holds its prompt. Log-probabilities come with the tokens that they belong to. A text
offset is where the token's text begins, even if that text is still held back for a stop string.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from batchline.endpoints.choices import check_streamed, stream_jobs
from batchline.endpoints.completions import (
    Echo,
    EncodedCompletion,
    completion_id,
    echoed_prompt,
    encode_completion,
)
from batchline.endpoints.generation import GeneratedText
from batchline.endpoints.model import GenerativeModel
from batchline.endpoints.reporting import LogprobFormat, StreamUsage
from batchline.openai_api.completions import completion_chunk, completion_chunk_choice

Chunk = dict[str, Any]


async def completion_chunks(
    body: Mapping[str, Any], request_id: str, model: GenerativeModel, priority: int = 0
) -> AsyncGenerator[Chunk, None]:
    """The answer to a completion request in chunks. Raises: RequestError, EngineError."""
    encoded = await encode_completion(body, model, check_streamed)
    request = encoded.request
    make = partial(_CompletionChunks, encoded, model, completion_id(request, request_id))
    chunks = await model.off_loop(make) if request.echo else make()
    deltas = stream_jobs(model, encoded.jobs, request, request_id=request_id, priority=priority)
    async with aclosing(deltas):
        async for prompt, choice, delta in deltas:
            push = partial(chunks.push, prompt, choice, delta)
            for chunk in await model.off_loop(push) if delta.prompt_logprobs else push():
                yield chunk
    for chunk in chunks.finish():
        yield chunk


class _CompletionChunks:
    """Turns deltas of choices into chunks of the answer. Mutable; one per request."""

    def __init__(self, encoded: EncodedCompletion, model: GenerativeModel, answer_id: str) -> None:
        """Call it off the event loop if there are prompts to echo, because it writes them."""
        request = self._request = encoded.request
        prompts = self._prompts = [job.prompt for job in encoded.jobs]
        self._model = model
        self._id = answer_id
        self._created = int(time.time())
        self._style = LogprobFormat(model.tokenizer, as_token_ids=request.return_tokens_as_token_ids)
        self._usage = StreamUsage(request.stream_options, sum(len(prompt.token_ids) for prompt in prompts))
        self._echoes = [echoed_prompt(request, prompt, model) for prompt in prompts]
        self._begun: set[int] = set()

    def push(self, prompt: int, choice: int, delta: GeneratedText) -> list[Chunk]:
        """The chunk of a choice's delta; empty while its text is held back and there is nothing else to report."""
        self._usage.count(delta, prompt=prompt, choice=choice)
        index = prompt * self._request.n + choice
        is_first = index not in self._begun
        self._begun.add(index)
        reports_tokens = self._request.logprobs is not None or self._request.return_token_ids
        if is_first or delta.text or delta.finish_reason is not None or (reports_tokens and delta.token_ids):
            return [self._usage.in_chunk(self._chunk([self._choice(prompt, index, delta, is_first=is_first)]))]
        return []

    def finish(self) -> Iterable[Chunk]:
        """The chunk with the usage, if the request asks for it."""
        return self._usage.last_chunk(self._chunk([]))

    def _choice(self, prompt: int, index: int, delta: GeneratedText, *, is_first: bool) -> Chunk:
        wire = completion_chunk_choice(
            index=index,
            text=self._echoes[prompt].text + delta.text if is_first else delta.text,
            logprobs=self._logprobs(prompt, delta, is_first=is_first),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._request.return_token_ids:
            wire["token_ids"] = list(delta.token_ids)
            if is_first:
                wire["prompt_token_ids"] = list(self._prompts[prompt].token_ids)
        return wire

    def _logprobs(self, prompt: int, delta: GeneratedText, *, is_first: bool) -> Chunk | None:
        """The log-probabilities of the delta's tokens; in a choice's first chunk, after those of an echoed prompt."""
        if self._request.num_alternatives is None:
            return None
        echo = self._echoes[prompt]
        shown = echo if is_first else Echo()
        return self._style.completion(
            [*(delta.prompt_logprobs or ()), *delta.logprobs],
            [*shown.text_offsets, *(len(echo.text) + offset for offset in delta.text_offsets)],
            [*shown.token_ids, *delta.token_ids],
            self._request.num_alternatives,
        )

    def _chunk(self, choices: list[Chunk]) -> Chunk:
        return completion_chunk(completion_id=self._id, created=self._created, model=self._model.name, choices=choices)
