"""What streamed answers of all endpoints share: which requests may stream, exact usage, and when it is told."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from batchline.endpoints.generation import GeneratedText
from batchline.errors import BadRequest
from batchline.openai_api.common import Usage
from batchline.openai_api.generation import GenerationBody, StreamOptions


def check_whole(body: GenerationBody) -> None:
    """The request wants one whole answer. Raises: BadRequest."""
    if body.stream:
        raise BadRequest("stream: a batch line or a call for one answer cannot be streamed", param="stream")
    if body.stream_options is not None:
        raise BadRequest("stream_options: it requires stream: true", param="stream_options")


def check_streamed(body: GenerationBody) -> None:
    """What is only known at the end cannot be streamed. Raises: BadRequest."""
    if body.use_beam_search:
        raise BadRequest("use_beam_search: beams are known at the end only and cannot be streamed", param="stream")
    if body.best_of is not None and body.best_of > body.n:
        raise BadRequest("best_of: the best are known at the end only; with stream it must equal n", param="best_of")
    if body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: they cannot be streamed", param="prompt_logprobs")


streams_of_request: ContextVar[list[StreamUsage] | None] = ContextVar("streams_of_request", default=None)
"""Where a caller wants to know of the tokens that are streamed in its context, however the stream ends."""


class StreamUsage:
    """Counts a request's tokens while it streams, and adds them to chunks as `stream_options` says. Mutable."""

    def __init__(self, options: StreamOptions | None, num_prompt_tokens: int) -> None:
        """num_prompt_tokens: of all prompts together."""
        self._options = options or StreamOptions()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_generated = 0
        self._num_reasoning_tokens = 0
        self._cached_by_prompt: dict[int, int] = {}
        if (streams := streams_of_request.get()) is not None:
            streams.append(self)

    def count(self, delta: GeneratedText, *, prompt: int, choice: int, num_reasoning_tokens: int = 0) -> None:
        """Take a delta into account. A prompt is counted once, as its first choice found it in the cache."""
        self._num_generated += len(delta.token_ids)
        self._num_reasoning_tokens += num_reasoning_tokens
        if choice == 0:
            self._cached_by_prompt.setdefault(prompt, delta.num_cached_tokens)

    @property
    def so_far(self) -> Usage:
        """The counts of all deltas until now."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_generated,
            cached_tokens=sum(self._cached_by_prompt.values()),
            reasoning_tokens=self._num_reasoning_tokens,
        )

    def in_chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """The chunk with usage so far where that is asked for at every step; else null where a last chunk tells it."""
        if self._options.continuous_usage_stats:
            return chunk | {"usage": self.so_far.to_dict()}
        return chunk | {"usage": None} if self._options.include_usage else chunk

    def last_chunk(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """`chunk`, which has no choices, with the final usage; nothing where it is not asked for."""
        return [chunk | {"usage": self.so_far.to_dict()}] if self._options.include_usage else []
